"""Fitting mappers: text -> layer inputs of two models -> keys and values -> sums -> maps -> scores -> sidecars, both directions at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from .. import sidecar as maps_sidecar
from ..capture import Chunk
from ..errors import RidgefillError
from ..fit import Report, no_report
from ..gather import Estimate, TextConfig, TextRun
from ..hf import Checkpoint, is_checkpoint
from ..lib import Model
from ..model_file import file_sha256
from ..passes import Pass
from ..prepare import Cutting
from ..score import document_pieces
from ..statistics import Moments
from ..sums import PARTS as SUMS_PARTS
from ..sums_file import Store, SumsError
from . import score, sidecar
from .models import PARTS, ROTATED, KeysValues, Rows, captured, check_pair
from .solve import KS, LAMBDAS, SELECTIONS, Choice, Solver, check, n_features, numbers_of_layers
from .sums import TARGET, PairHeader, PairLayout, PairSums

DIRECTIONS = ("forward", "back")
CRITERIA = ("r2", "cosine")


@dataclass(frozen=True)
class Wanted:
    """Which mappers to make, and how."""

    out: str  # sidecar; see path()
    both: bool = False  # directions
    select: str = "r2"  # source layers: "r2" those of the highest R^2 alone, "greedy" those that add most to the ones before
    criterion: str = "r2"  # for the number of source layers: "r2", or "cosine" of attention outputs
    ks: tuple[int, ...] = KS  # numbers of source layers to try; solve.ALL_LAYERS: all
    lambdas: tuple[float, ...] = LAMBDAS
    map_type: str = "f16"  # of sidecar.MAP_TYPES
    tail: int = 128  # recommended tail, rows
    force: bool = False  # replace existing files

    @property
    def directions(self) -> range:
        return range(1 + self.both)

    def path(self, direction: int) -> Path:
        """File for one direction: `out` with "{direction}" replaced by forward or back; without it out.gguf becomes out.back.gguf."""
        name = DIRECTIONS[direction]
        out = Path(self.out.replace("{direction}", name))
        return out if not self.both or "{direction}" in self.out else out.with_name(f"{out.stem}.{name}{out.suffix}")

    def check(self) -> None:
        """Raises RidgefillError for a value out of range."""
        for what, found, choices in (
            ("select", self.select, SELECTIONS),
            ("criterion", self.criterion, CRITERIA),
            ("map type", self.map_type, maps_sidecar.MAP_TYPES),
        ):
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
    rotated: bool = False  # whether single source layers are scored on rotated keys too
    source_checkpoint: str = ""  # hf.is_checkpoint: what runs the text in place of `source`, whose keys and values they are
    target_checkpoint: str = ""
    dtype: str = ""  # of checkpoints: of hf.DTYPES; "": f32 on a CPU, else bf16
    device: str = ""  # of checkpoints: cpu or cuda; "": cpu
    ctx: int = 1024

    @property
    def checkpoints(self) -> tuple[str, str]:
        """Of source and target."""
        return self.source_checkpoint, self.target_checkpoint

    def cutting(self) -> Cutting:
        return replace(super().cutting(), scored=True)

    def check(self) -> None:
        super().check()
        self.wanted.check()
        if bool(self.shard) == bool(self.wanted.out):
            raise RidgefillError("expected a file for the mapper or a shard, which makes none, found both or neither")
        if (self.dtype or self.device) and not any(self.checkpoints):
            raise RidgefillError("dtype and device: expected a checkpoint to go with them, found none")


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
        with ExitStack() as stack:
            files = (config.source, config.target)
            self.models = [stack.enter_context(Model(f, n_gpu_layers=config.gpu_layers)) for f in files]
            self.keys_values = [KeysValues(model, config.rotated) for model in self.models]
            self.sides = [kv.side for kv in self.keys_values]
            check_pair(*self.sides)
            store = stack.enter_context(Store(config.sums)) if config.sums else None
            for d in config.wanted.directions if config.wanted.out else ():
                maps_sidecar.check_writable(config.wanted.path(d), config.wanted.force or bool(store and store.path.exists()))
            self._runners = [self._runner(model, name) for model, name in zip(self.models, config.checkpoints, strict=True)]
            n_evaluation = self._prepare_text(self.models[0], warn)
            documents = {part: getattr(self.prepared.selection, part) for part in ("heldout", "score")}
            self._judged = {part: (d, document_pieces(self.models[0], d, config.sink)) for part, d in documents.items()}
            header = self._header(n_evaluation)
            self.layouts = header.layouts
            self.passes = [Pass([], header, store)]
            self.passes[0].look_at_file(self._sums_bytes(self.passes[0]))
            self._stack = stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def _runner(self, model: Model, name: str) -> Model | Checkpoint:
        """What runs the text: a checkpoint of that name, or else the model."""
        c = self.config
        if not name:
            return model
        if not is_checkpoint(name):
            raise RidgefillError(f"checkpoint: expected a folder, or OWNER/NAME of the hub, found {name!r}")
        return Checkpoint(name, model, c.dtype, c.device, c.threads)

    def _header(self, n_evaluation: int) -> PairHeader:
        c = self.config
        families = (*PARTS, ROTATED) if c.rotated else PARTS
        layouts = [PairLayout(f, [side.widths(f[0]) for side in self.sides], c.wanted.both, c.previous) for f in families]
        checkpoints = {role: r for role, r in zip(sidecar.ROLES, self._runners, strict=True) if isinstance(r, Checkpoint)}
        options = [f"{role}_checkpoint={Path(r.name).name} in {r.dtype}" for role, r in checkpoints.items()]
        settings = {
            "source": self.sides[0].fingerprint["name"],
            "target": self.sides[1].fingerprint["name"],
            "tokenizer": self.sides[0].fingerprint["tokenizer_sha256"],
            "source file": file_sha256(c.source),
            "target file": file_sha256(c.target),
            "both directions": c.wanted.both,
            "previous row": c.previous,
            "rotated keys": c.rotated,
            **{f"{role} checkpoint": f"{r.sha256()} in {r.dtype}" for role, r in checkpoints.items()},
            **self._text_settings(),
        }
        return PairHeader(
            settings=settings if c.sums else {},
            fingerprints={i: side.fingerprint for i, side in enumerate(self.sides)},
            sides=[asdict(side) for side in self.sides],
            layouts=layouts,
            **self._text_header(n_evaluation, options),
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
        if not self.config.wanted.out:
            return need + block
        return max(need + max(block, solving), sum(self._scoring_bytes(d) for d in self.layouts[0].directions))

    def _scoring_bytes(self, direction: int) -> int:
        """Maps as stored and in float32, and the target's attention; sums are gone by then."""
        target = self.keys_values[1 - direction]
        by_cosine = self.config.wanted.criterion == "cosine"  # then there is a mapper for each number of source layers
        n = sum(
            features * layout.d_out(direction)
            for layout in self.layouts
            if layout.family in PARTS
            for features in (self._n_features(layout, direction) if by_cosine else self._n_features(layout, direction)[-1:])
        )
        return 8 * n + sum(target.weight_bytes(il) for il in target.layers)

    def _n_features(self, layout: PairLayout, direction: int) -> list[int]:
        """Of each number of source layers that is wanted, ascending."""
        sources = layout.sources(direction)
        return sorted({n_features(sources, k or len(sources)) for k in self.config.wanted.ks})

    def _solver_bytes(self, layout: PairLayout, direction: int) -> int:
        """Centred copies of all sums, and for the largest number of source layers its blocks."""
        d_in, d_out, n = layout.d_in(direction), layout.d_out(direction), self._n_features(layout, direction)[-1]
        greedy = 3 * d_in * d_in if self.config.wanted.select == "greedy" else 0
        return 8 * (2 * d_in * (d_in + d_out) + max(greedy, 3 * n * n + 2 * n * d_out))

    @contextmanager
    def _captured(self, chunks: list[Chunk], p: Pass) -> Iterator[Iterator[list[Rows]]]:
        """Keys and values of each chunk by model."""
        c = self.config
        with captured(self._runners, self.keys_values, chunks, c.ctx, c.threads) as stream:
            yield ([kv(inputs) for kv, inputs in zip(self.keys_values, both, strict=True)] for both in stream)

    def _add(self, sums: list[PairSums], part: str, captured: list[Rows], chosen: slice) -> None:
        for s in sums:
            s.add(part, [rows[s.layout.family] for rows in captured], chosen)

    def run(self, report: Report = no_report, on_estimate: Callable[[Estimate], None] = lambda estimate: None) -> list[Result]:
        """Capture, solve, score and write; a shard captures only. Nothing is written before every direction is scored.

        Raises StatisticsError naming model and layer when keys or values cannot be fitted, OutputExists when a file appeared
        meanwhile, SumsError when the file of sums cannot be written, Stopped when the user asked for it.
        """
        c = self.config
        with threadpool_limits(c.threads):
            sums = self._collect(self.passes[0], report, on_estimate)
            if not c.wanted.out:
                return []
            header = self.passes[0].header
            by_cosine = c.wanted.criterion == "cosine"
            solved = candidates(c.wanted, header, sums, report) if by_cosine else solve(c.wanted, header, sums, report)
            del sums  # scoring needs the memory
            mappers = self._judge("heldout", report).best(solved) if by_cosine else solved
            return write(c.wanted, self._judge("score", report).judged(mappers), self.started, same_is_fine=bool(c.sums))

    def _judge(self, part: str, report: Report) -> score.Judge:
        """On the documents of a part of the text."""
        return score.Judge(self.models, self.keys_values, *self._judged[part], self.config.threads, report)


def fit(config: Config, report: Report = no_report) -> list[Result]:
    """Fit and write the mappers of `config`; see MapperFit."""
    with MapperFit(config) as run:
        return run.run(report)


#
# solving
#


def write(wanted: Wanted, mappers: dict[int, sidecar.Mapper], started: float, same_is_fine: bool = False) -> list[Result]:
    """Files of mappers by direction. Raises OutputExists when one exists and may not be replaced."""
    for d, mapper in mappers.items():
        sidecar.write(wanted.path(d), mapper, wanted.force, same_is_fine)
    return [Result(str(wanted.path(d)), mapper, time.monotonic() - started) for d, mapper in mappers.items()]


def solve(
    wanted: Wanted,
    header: PairHeader,
    sums: list[PairSums],
    report: Report = no_report,
    directions: Sequence[int] | None = None,
) -> dict[int, sidecar.Mapper]:
    """Choose and solve: mappers by direction, by default of all that are wanted.

    Raises SumsError when text or a direction is missing in the sums, StatisticsError naming model and layer when they cannot be
    fitted.
    """
    wanted.check()
    header.check_complete()
    if wanted.both and not header.layouts[0].both:
        raise SumsError("the sums are of one direction only: expected both, found forward")
    problems = [(d, s) for d in directions or wanted.directions for s in sums]
    for d, s in problems:
        check(*_moments(s, d), s.layout, header.direction(d)[1].heads, wanted.ks)
    done, total = 0, sum(header.direction(d)[1].n_layer for d, _ in problems)
    maps: dict[int, dict[str, sidecar.Maps]] = {d: {} for d, _ in problems}
    rotated: dict[int, np.ndarray] = {}
    report("solve", 0, total)
    for d, s in problems:
        fitted, heldout = _moments(s, d)
        target = header.direction(d)[1]
        solver = Solver(fitted, heldout, s.layout.sources(d), s.layout.targets(d), target.heads)
        if s.layout.family == ROTATED:
            rotated[d] = solver.singles(wanted.lambdas).max(1).T
        else:
            ks = numbers_of_layers(wanted.ks, solver.sources, fitted.n)
            ticks = iter(range(1, len(ks) * target.n_layer + 1))

            def tick(ticks=ticks, done=done, n=len(ks)) -> None:
                report("solve", done + next(ticks) // n, total)

            maps[d][s.layout.family] = _maps(solver, solver.choose(ks, wanted.lambdas, wanted.select, tick), ks, wanted.map_type)
        done += target.n_layer
    report("solve", total, total)
    rows = [m.n for m in _moments(sums[0], 0)]
    return {d: _mapper(wanted, header, d, maps[d], rotated.get(d), *rows) for d in maps}


def candidates(
    wanted: Wanted, header: PairHeader, sums: list[PairSums], report: Report = no_report
) -> list[tuple[int, sidecar.Mapper]]:
    """Direction and mapper for each number of source layers that can be tried of keys and of values; raises what solve() does."""
    out = []
    for d in wanted.directions:
        of_each = [set(numbers_of_layers(wanted.ks, s.layout.sources(d), _moments(s, d)[0].n)) for s in sums]
        for k in sorted(set.intersection(*of_each)) or wanted.ks:  # where there are none, solve() says why
            out.append((d, solve(replace(wanted, ks=(k,)), header, sums, report, [d])[d]))
    return out


def _moments(sums: PairSums, direction: int) -> list[Moments]:
    """Of fitted and of held-out rows."""
    return [sums.moments[part][direction] for part in SUMS_PARTS]


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
    wanted: Wanted,
    header: PairHeader,
    direction: int,
    maps: dict[str, sidecar.Maps],
    r2_rotated: np.ndarray | None,
    n_rows: int,
    n_heldout: int,
) -> sidecar.Mapper:
    source, target = header.direction(direction)
    options = header.record["options"] + ([f"shards={header.n_shards}"] if header.n_shards > 1 else [])
    options += ["criterion=cosine"] if wanted.criterion == "cosine" else []
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
        r2_rotated=r2_rotated,
    )
