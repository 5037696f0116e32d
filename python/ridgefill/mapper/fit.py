"""Fitting mappers: text -> layer inputs of two models -> keys and values -> sums -> maps -> sidecars, both directions at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from .. import sidecar as maps_sidecar
from ..capture import Chunk, activations
from ..errors import RidgefillError
from ..fit import Report, no_report
from ..gather import Estimate, TextConfig, TextRun
from ..lib import Context, Model
from ..model_file import file_sha256
from ..passes import Pass
from ..sums_file import Store, SumsError
from . import sidecar
from .models import PARTS, KeysValues, check_pair
from .solve import KS, LAMBDAS, SELECTIONS, Choice, Solver, check, n_features, numbers_of_layers
from .sums import TARGET, PairHeader, PairLayout, PairSums

DIRECTIONS = ("forward", "back")


@dataclass(frozen=True)
class Wanted:
    """Which mappers to make, and how."""

    out: str  # sidecar; see path()
    both: bool = False  # directions
    select: str = "r2"  # source layers: "r2" those of the highest R^2 alone, "greedy" those that add most to the ones before
    ks: tuple[int, ...] = KS  # numbers of source layers to try; solve.ALL_LAYERS: all
    lambdas: tuple[float, ...] = LAMBDAS
    map_type: str = "f16"  # of sidecar.MAP_TYPES
    tail: int = 128  # recommended tail, rows
    force: bool = False  # replace existing files

    def path(self, direction: int) -> Path:
        """File for one direction: `out` with "{direction}" replaced by forward or back; without it out.gguf becomes out.back.gguf."""
        name = DIRECTIONS[direction]
        out = Path(self.out.replace("{direction}", name))
        return out if not self.both or "{direction}" in self.out else out.with_name(f"{out.stem}.{name}{out.suffix}")

    def check(self) -> None:
        """Raises RidgefillError for a value out of range."""
        for what, found, choices in (("select", self.select, SELECTIONS), ("map type", self.map_type, maps_sidecar.MAP_TYPES)):
            if found not in choices:
                raise RidgefillError(f"{what}: expected one of {', '.join(choices)}, found {found!r}")
        if not self.ks or min(self.ks) < 0:
            raise RidgefillError(f"numbers of source layers: expected some of 1 or more, or all, found {list(self.ks)}")
        if not self.lambdas or not all(math.isfinite(x) and x >= 0 for x in self.lambdas):
            raise RidgefillError(f"lambdas: expected finite numbers that are not negative, found {list(self.lambdas)}")
        if self.tail < 0:
            raise RidgefillError(f"tail: expected rows, found {self.tail}")


@dataclass(kw_only=True)
class Config(TextConfig):
    """Which mapper to fit, and how."""

    source: str  # GGUF files of two models with the same tokenizer
    target: str
    wanted: Wanted  # `out` is "" for a shard, which makes none
    previous: bool = False  # whether the row before is a feature too
    ctx: int = 1024


@dataclass(frozen=True)
class Result:
    """One mapper that was written."""

    path: str
    mapper: sidecar.Mapper
    seconds: float  # of the whole call


class MapperFit(TextRun):
    """One run: plan() to look before it starts, run() to do it. Owns models and the file of sums; use it in `with`.

    Raises PairError when the models do not go together, RidgefillError for one whose keys and values cannot be computed, and what
    reading text raises. `warn` is called with lines about text that is left out.
    """

    config: Config

    def __init__(self, config: Config, warn: Callable[[str], None] = lambda line: None):
        super().__init__(config, *config.shard_of())
        config.check()
        config.wanted.check()
        if bool(config.shard) == bool(config.wanted.out):
            raise RidgefillError("expected a file for the mapper or a shard, which makes none, found both or neither")
        with ExitStack() as stack:
            files = (config.source, config.target)
            self.models = [stack.enter_context(Model(f, n_gpu_layers=config.gpu_layers)) for f in files]
            self.keys_values = [KeysValues(model) for model in self.models]
            self.sides = [kv.side for kv in self.keys_values]
            check_pair(*self.sides)
            store = stack.enter_context(Store(config.sums)) if config.sums else None
            for d in range(1 + config.wanted.both) if config.wanted.out else ():
                maps_sidecar.check_writable(config.wanted.path(d), config.wanted.force or bool(store and store.path.exists()))
            n_evaluation = self._prepare_text(self.models[0], warn)
            header = self._header(n_evaluation)
            self.layouts = header.layouts
            self.passes = [Pass([], header, store)]
            self.passes[0].look_at_file(self._sums_bytes(self.passes[0]))
            self._stack = stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _header(self, n_evaluation: int) -> PairHeader:
        c = self.config
        layouts = [PairLayout(p, [side.widths(p) for side in self.sides], c.wanted.both, c.previous) for p in PARTS]
        settings = {
            "source": self.sides[0].fingerprint["name"],
            "target": self.sides[1].fingerprint["name"],
            "tokenizer": self.sides[0].fingerprint["tokenizer_sha256"],
            "source file": file_sha256(c.source),
            "target file": file_sha256(c.target),
            "both directions": c.wanted.both,
            "previous row": c.previous,
            **self._text_settings(),
        }
        return PairHeader(
            settings=settings if c.sums else {},
            fingerprints={i: side.fingerprint for i, side in enumerate(self.sides)},
            sides=[asdict(side) for side in self.sides],
            layouts=layouts,
            **self._text_header(n_evaluation),
        )

    def _sums_bytes(self, p: Pass) -> int:
        return sum(layout.n_bytes for layout in p.header.layouts)

    def _memory_bytes(self) -> int:
        need = self._sums_bytes(self.passes[0])
        for model, kv in zip(self.models, self.keys_values, strict=True):
            widths = [sum(kv.widths(il)) for il in kv.layers]
            # of a chunk: layer inputs (the library's, ours and one set in the making), keys and values; projections
            need += 4 * self.config.ctx * (3 * model.n_embd * model.n_layer + sum(widths)) + 4 * model.n_embd * sum(widths)
        # a block in float64 with its features side by side, or the solver
        block = max(8 * self.config.ctx * 2 * (layout.d_in(d) + layout.d_out(d)) for layout in self.layouts for d in layout.directions)
        solving = max(self._solver_bytes(layout, d) for layout in self.layouts for d in layout.directions)
        return need + max(block, solving if self.config.wanted.out else 0)

    def _solver_bytes(self, layout: PairLayout, direction: int) -> int:
        """Centred copies of all sums, and for the largest number of source layers its blocks."""
        sources, d_in, d_out = layout.sources(direction), layout.d_in(direction), layout.d_out(direction)
        n = n_features(sources, max(k or len(sources) for k in self.config.wanted.ks))
        greedy = 3 * d_in * d_in if self.config.wanted.select == "greedy" else 0
        return 8 * (2 * d_in * (d_in + d_out) + max(greedy, 3 * n * n + 2 * n * d_out))

    @contextmanager
    def _captured(self, chunks: list[Chunk], p: Pass) -> Iterator[Iterator[list[dict[str, list[np.ndarray]]]]]:
        """Keys and values of each chunk by model."""
        c = self.config
        with ExitStack() as stack:
            streams = []
            for model, kv in zip(self.models, self.keys_values, strict=True):
                ctx = stack.enter_context(Context(model, c.ctx, n_batch=c.ctx, n_threads=c.threads))
                streams.append(stack.enter_context(closing(activations(ctx, chunks, list(kv.layers)))))
            kvs = self.keys_values
            yield ([kv(inputs) for kv, inputs in zip(kvs, both, strict=True)] for both in zip(*streams, strict=True))

    def _add(self, sums: list[PairSums], part: str, captured: list[dict[str, list[np.ndarray]]], chosen: slice) -> None:
        for s in sums:
            s.add(part, [rows[s.layout.family] for rows in captured], chosen)

    def run(self, report: Report = no_report, on_estimate: Callable[[Estimate], None] = lambda estimate: None) -> list[Result]:
        """Capture, solve and write; a shard captures only. Nothing is written before every direction is solved.

        Raises StatisticsError naming model and layer when keys or values cannot be fitted, OutputExists when a file appeared
        meanwhile, SumsError when the file of sums cannot be written, Stopped when the user asked for it.
        """
        c = self.config
        with threadpool_limits(c.threads):
            sums = self._collect(self.passes[0], report, on_estimate)
            if not c.wanted.out:
                return []
            return solve(c.wanted, self.passes[0].header, sums, report, self.started, same_is_fine=bool(c.sums))


def fit(config: Config, report: Report = no_report) -> list[Result]:
    """Fit and write the mappers of `config`; see MapperFit."""
    with MapperFit(config) as run:
        return run.run(report)


#
# solving
#


def solve(
    wanted: Wanted,
    header: PairHeader,
    sums: list[PairSums],
    report: Report = no_report,
    started: float | None = None,
    same_is_fine: bool = False,
) -> list[Result]:
    """Choose, solve, score and write. Nothing is written before all is solved.

    Raises SumsError when text or a direction is missing in the sums, StatisticsError naming model and layer when they cannot be
    fitted, OutputExists when a file exists and may not be replaced.
    """
    started = time.monotonic() if started is None else started
    wanted.check()
    header.check_complete()
    if wanted.both and not header.layouts[0].both:
        raise SumsError("the sums are of one direction only: expected both, found forward")
    directions = range(1 + wanted.both)
    problems = [(d, s.layout, *(s.moments[part][d] for part in ("fit", "heldout"))) for d in directions for s in sums]
    for d, layout, fitted, heldout in problems:
        check(fitted, heldout, layout, header.direction(d)[1].heads, wanted.ks)
    done, total = 0, sum(header.direction(d)[1].n_layer for d, *_ in problems)
    found: dict[int, dict[str, sidecar.Maps]] = {d: {} for d in directions}
    report("solve", 0, total)
    for d, layout, fitted, heldout in problems:
        source, target = header.direction(d)
        ks = numbers_of_layers(wanted.ks, layout.sources(d), fitted.n)
        solver = Solver(fitted, heldout, layout.sources(d), layout.targets(d), target.heads)
        ticks = iter(range(1, len(ks) * target.n_layer + 1))

        def tick(ticks=ticks, done=done, n=len(ks)) -> None:
            report("solve", done + next(ticks) // n, total)

        choices = solver.choose(ks, wanted.lambdas, wanted.select, tick)
        found[d][layout.family] = _maps(solver, choices, ks, wanted.map_type)
        done += target.n_layer
    mappers = {d: _mapper(wanted, header, d, found[d], *_rows(sums, d)) for d in directions}
    for d, mapper in mappers.items():
        sidecar.write(wanted.path(d), mapper, wanted.force, same_is_fine)
    return [Result(str(wanted.path(d)), mapper, time.monotonic() - started) for d, mapper in mappers.items()]


def _rows(sums: list[PairSums], direction: int) -> tuple[int, int]:
    """Fitted and held out."""
    moments = sums[0].moments
    return moments["fit"][direction].n, moments["heldout"][direction].n


def _maps(solver: Solver, choices: list[Choice], ks: list[int], map_type: str) -> sidecar.Maps:
    """Maps as they are written, with their scores."""
    weights, biases, r2_head = [], [], []
    for t, choice in enumerate(choices):
        columns, features = solver.targets[t], solver.features(choice.sources)
        stored, weight = maps_sidecar.encode(solver.weight(t, choice.sources, choice.lam), map_type)
        bias = solver.bias(TARGET, weight, columns, features).astype(np.float32)
        r2 = solver.head_r2(t, solver.errors(TARGET, weight, bias.astype(np.float64), columns, features))
        weights.append(stored)
        biases.append(bias)
        r2_head.append(r2.tolist())
    return sidecar.Maps(
        sources=[c.sources for c in choices],
        lambdas=[c.lam for c in choices],
        r2_head=r2_head,
        r2_single=np.stack([c.r2_single for c in choices]),
        tried=ks,
        r2_by_number=np.stack([c.r2_by_k for c in choices]),
        weights=weights,
        biases=biases,
    )


def _mapper(
    wanted: Wanted, header: PairHeader, direction: int, maps: dict[str, sidecar.Maps], n_rows: int, n_heldout: int
) -> sidecar.Mapper:
    source, target = header.direction(direction)
    options = header.record["options"] + ([f"shards={header.n_shards}"] if header.n_shards > 1 else [])
    options += [f"lambda={x:g}" for x in wanted.lambdas] if wanted.lambdas != LAMBDAS else []
    counts = {"n_tokens": n_rows, "n_heldout_tokens": n_heldout, "options": options}
    return sidecar.Mapper(
        source=source,
        target=target,
        previous=header.layouts[0].previous,
        sink_rows=header.sink,
        tail=wanted.tail,
        map_type=wanted.map_type,
        select=wanted.select,
        calibration=maps_sidecar.Calibration(**{**header.record, **counts}),
        maps=maps,
    )
