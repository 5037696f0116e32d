"""Fitting ridge maps for a GGUF model: text -> layer inputs -> sums -> maps -> sidecar, one file per split and kind.

Every split and kind of one call is fitted in the same pass over the text.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from . import sidecar
from .capture import Chunk, activations, chunks, select
from .errors import RidgeError, RidgefillError, TextError
from .kinds import Targets, families
from .lib import Context, Model
from .model_file import check_copy
from .solve import LAMBDAS, Ridge, check_fit
from .statistics import Moments, about, memory_bytes
from .text import Document, read_documents

MAX_ROWS = 2048  # of one block of sums


@dataclass
class Config:
    """What to calibrate and how."""

    model: str  # GGUF file
    out: str  # sidecar; see out_path()
    splits: list[int]  # split layers S, 1 <= S <= layers - 2
    text: list[str]  # files and folders
    kinds: list[str] = field(default_factory=lambda: ["input"])  # of kinds.KINDS
    map_type: str = "q8_0"  # f32, f16 or q8_0
    sink: int = 4  # rows at the start of each sequence that are neither fitted nor filled
    tail: int = 512  # recommended tail, rows
    seed: int = 0  # order of the documents, hence which are held out
    n_tokens: int = 0  # tokens to fit on, 0: all
    heldout_documents: int | None = None  # None: those marked so, else a sixth
    ctx: int = 2048  # tokens run together from position 0
    threads: int = 2
    gpu_layers: int = 0
    force: bool = False  # replace existing files
    prev_share: float = 1.0  # of the row before in K of kind kv_prev: 1 as regressed, 0 as in kind kv
    served: str = ""  # GGUF file that the maps are for, where `model` is a copy of it at higher precision
    lambdas: tuple[float, ...] = field(default=LAMBDAS)

    def out_path(self, split: int, kind: str) -> Path:
        """File for one split and kind: `out` with "{split}" and "{kind}" replaced.

        Where several are fitted and `out` does not name them, out.gguf becomes out.s19.kv.gguf.
        """
        out = Path(self.out.replace("{split}", str(split)).replace("{kind}", kind))
        more = f".s{split}" if len(self.splits) > 1 and "{split}" not in self.out else ""
        more += f".{kind}" if len(self.kinds) > 1 and "{kind}" not in self.out else ""
        return out.with_name(f"{out.stem}{more}{out.suffix}")


@dataclass(frozen=True)
class Result:
    """One sidecar that was written."""

    path: str
    kind: str
    split: int
    layers: list[int]
    lambdas: dict[str, list[float]]  # by part: "input" of kind input, "k" and "v" of the kv kinds
    r2: dict[str, list[float]]  # held-out, of the maps as written
    n_tokens: int  # rows fitted
    n_heldout_tokens: int
    seconds: float  # of the whole call

    @property
    def r2_mean(self) -> dict[str, float]:
        """By part, over the layers."""
        return {part: float(np.mean(r2)) for part, r2 in self.r2.items()}


@dataclass(frozen=True)
class Plan:
    """What a run is about to do, for the user to see before it starts."""

    n_documents: int
    n_heldout_documents: int
    n_tokens: int
    n_heldout_tokens: int
    memory_bytes: int  # sums and captured activations; the model itself comes on top
    memory_available: int


# called as report(stage, done, total): "capture" counts tokens, "solve" layers
Report = Callable[[str, int, int], None]


def _check(config: Config, model: Model) -> None:
    if config.map_type not in sidecar.MAP_TYPES:
        raise RidgefillError(f"map type: expected one of {', '.join(sidecar.MAP_TYPES)}, found {config.map_type!r}")
    if len(set(config.splits)) != len(config.splits) or not config.splits:
        raise RidgefillError(f"splits: expected at least one and each once, found {config.splits}")
    for split in config.splits:
        if not 1 <= split <= model.n_layer - 2:
            n = model.n_layer
            raise RidgefillError(f"split: expected 1 to {n - 2} for a model of {n} layers, found {split}")
    if not 0 <= config.sink < config.ctx:
        raise RidgefillError(f"sink rows: expected 0 to {config.ctx - 1}, found {config.sink}")
    if not 0 <= config.prev_share <= 1:
        raise RidgefillError(f"share of the row before: expected 0 to 1, found {config.prev_share}")
    if config.tail < 1:
        raise RidgefillError(f"tail: expected at least 1 row, found {config.tail}")
    if reason := model.unsupported():
        raise RidgeError(f"{config.model} cannot be filled: {reason}")


class _Sums:
    """Fitted and held-out moments of every split over the targets of one family of kinds."""

    def __init__(self, targets: Targets, splits: list[int], n_layer: int, n_sink: int):
        self.targets, self.splits, self.n_sink = targets, splits, n_sink
        self.layers = range(min(splits) + 1, n_layer)
        self.moments: dict[str, dict[int, Moments]] = {}  # by part of the text and split

    def _start(self, x: dict[int, np.ndarray], inputs: dict[int, np.ndarray]) -> None:
        """Take the means of the first chunk, with features x, as origins."""
        origin_y = {il: self.targets.targets(il, inputs[il][self.n_sink :]).mean(0, dtype=np.float64) for il in self.layers}
        for part in ("fit", "heldout"):
            self.moments[part] = {
                s: Moments(s, x[s].mean(0, dtype=np.float64), {il: o for il, o in origin_y.items() if il > s})
                for s in self.splits
            }

    def add(self, part: str, inputs: dict[int, np.ndarray]) -> None:
        """Add a chunk to "fit" or "heldout": inputs [n, d] of the splits and every layer above, from position 0.

        Sink rows are left out. Row 0 and its neighbours carry massive activations, a hundred times the others': in the fit
        they would drown every other row, and at run time sink rows are exact anyway.
        """
        x = {s: self.targets.features(inputs[s])[self.n_sink :] for s in self.splits}
        if not self.moments:
            with np.errstate(invalid="ignore"):  # about() refuses what is not finite by its place
                self._start(x, inputs)
        moments = self.moments[part]
        for at in range(0, len(x[self.splits[0]]), MAX_ROWS):
            rows = slice(at, at + MAX_ROWS)
            xs = {s: about(x[s][rows], m.origin_x, s) for s, m in moments.items()}
            for m in moments.values():
                m.add_features(xs[m.split])
            for il in self.layers:
                inside = inputs[il][self.n_sink :][rows]
                above = [m for m in moments.values() if il > m.split]
                y = about(self.targets.targets(il, inside), above[0].origin_y[il], il)
                for m in above:
                    m.add_targets(il, xs[m.split], y)


class Calibration:
    """One run: plan() to look before it starts, run() to do it. Owns model and context; use it in `with`."""

    def __init__(self, config: Config):
        self.config = config
        self.started = time.monotonic()
        for split, kind in self._files():
            sidecar.check_writable(config.out_path(split, kind), config.force)
        documents = read_documents(config.text)
        self.model = Model(config.model, n_gpu_layers=config.gpu_layers)
        try:
            _check(config, self.model)
            mapped = range(min(config.splits) + 1, self.model.n_layer)
            self.families = families(config.kinds, config.model, self.model.n_embd, mapped)
            # a width that the map type cannot hold should not show after an hour of work
            sidecar.encode(np.zeros((1, self.model.n_embd)), config.map_type)
            self.fingerprints = self._fingerprints()
            self.selection = select(documents, config.seed, config.heldout_documents)
            self.fit = chunks(self.model, self.selection.fit, config.ctx, config.sink, config.n_tokens)
            self.heldout = chunks(self.model, self.selection.heldout, config.ctx, config.sink)
            if not self.fit or not self.heldout:
                n_fit, n_heldout = len({c.document for c in self.fit}), len({c.document for c in self.heldout})
                raise TextError(
                    f"expected documents of more than {config.sink} tokens to fit and to hold out, found {n_fit} and {n_heldout}"
                )
        except BaseException:
            self.model.close()
            raise

    def _fingerprints(self) -> dict[int, dict]:
        """By split, of the file that the maps are for."""
        splits, served = self.config.splits, self.config.served
        if not served:
            return {s: self.model.fingerprint(s) for s in splits}
        check_copy(self.config.model, served)
        with Model(served) as model:
            return {s: model.fingerprint(s) for s in splits}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.model.close()

    def _files(self) -> list[tuple[int, str]]:
        """Split and kind of each sidecar, in the order in which they are written."""
        return [(split, kind) for kind in self.config.kinds for split in self.config.splits]

    @property
    def layers(self) -> list[int]:
        """Layers whose inputs are captured."""
        return list(range(min(self.config.splits), self.model.n_layer))

    def _used(self, chunk_list: list[Chunk], documents: list[Document]) -> list[Document]:
        return [documents[i] for i in sorted({c.document for c in chunk_list})]

    def plan(self) -> Plan:
        return Plan(
            n_documents=len(self._used(self.fit, self.selection.fit)),
            n_heldout_documents=len(self._used(self.heldout, self.selection.heldout)),
            n_tokens=sum(len(k.tokens) for k in self.fit),
            n_heldout_tokens=sum(len(k.tokens) for k in self.heldout),
            memory_bytes=self._memory_bytes(),
            memory_available=os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        )

    def _memory_bytes(self) -> int:
        c = self.config
        # the library's buffer, our copy, and one set in the making
        need = 3 * 4 * c.ctx * self.model.n_embd * len(self.layers)
        solving = 0
        for targets, kinds in self.families:
            widths = {il: targets.d_out(il) for il in self.layers[1:]}
            need += sum(memory_bytes(s, targets.d_in, widths) for s in c.splits) + targets.weight_bytes
            # features of a chunk, float32 and the block in float64
            need += (4 * c.ctx + 8 * min(c.ctx, MAX_ROWS)) * targets.d_in * len(c.splits)
            # maps wait as float32 at most until all are solved; the solver works on five square matrices
            need += sum(4 * targets.d_in * widths[il] for s in c.splits for il in widths if il > s) * len(kinds)
            solving = max(solving, 8 * 5 * targets.d_in**2)
        return need + solving

    def _sums(self, report: Report) -> list[_Sums]:
        """Fitted and held-out moments, by family of kinds."""
        c, total, done = self.config, sum(len(k.tokens) for k in self.fit + self.heldout), 0
        sums = [_Sums(targets, c.splits, self.model.n_layer, c.sink) for targets, _ in self.families]
        with Context(self.model, c.ctx, n_batch=c.ctx, n_threads=c.threads) as ctx:
            for part, chunk_list in (("fit", self.fit), ("heldout", self.heldout)):
                for chunk, inputs in zip(chunk_list, activations(ctx, chunk_list, self.layers)):
                    for s in sums:
                        s.add(part, inputs)
                    done += len(chunk.tokens)
                    report("capture", done, total)
        return sums

    def _mixed(self, kind: str) -> int:
        """Width of the row's own features where K is mixed from a map with and one without the row before, else 0."""
        return self.model.n_embd if kind == "kv_prev" and self.config.prev_share < 1 else 0

    def _solve(
        self, kind: str, targets: Targets, fit: Moments, heldout: Moments, report: Callable[[], None]
    ) -> sidecar.Sidecar:
        """The sidecar of one split and kind, with maps and scores as they are written."""
        c, ridge, split = self.config, Ridge(fit, heldout), fit.split
        parts = sidecar.PARTS[kind]
        lambdas, r2 = {part: [] for part in parts}, {part: [] for part in parts}
        weights, biases = [], []
        plain = Ridge(fit.first(c_in), heldout.first(c_in)) if (c_in := self._mixed(kind)) else None
        for il in fit.layers:
            rows = []
            for part in parts:
                columns = targets.parts(il)[part]
                best = ridge.best(il, c.lambdas, columns)
                if plain and part == "k":
                    best.weight[:] *= c.prev_share
                    best.weight[:, :c_in] += (1 - c.prev_share) * plain.best(il, c.lambdas, columns).weight
                stored, weight = sidecar.encode(best.weight, c.map_type)
                bias = ridge.bias(il, weight, columns).astype(np.float32)
                lambdas[part].append(best.lam)
                r2[part].append(ridge.r2(il, weight, bias.astype(np.float64), columns))
                rows.append((stored, bias))
            weights.append(np.concatenate([stored for stored, _ in rows]))
            biases.append(np.concatenate([bias for _, bias in rows]))
            report()
        return sidecar.Sidecar(
            fingerprint=self.fingerprints[split],
            split=split,
            sink_rows=c.sink,
            tail=c.tail,
            map_type=c.map_type,
            lambdas=lambdas,
            r2=r2,
            weights=weights,
            biases=biases,
            calibration=self._record(fit, heldout),
            kind=kind,
            kv_lengths=[targets.kv_lengths(il) for il in fit.layers] if kind != "input" else [],
            prev_share=c.prev_share,
        )

    def _record(self, fit: Moments, heldout: Moments) -> sidecar.Calibration:
        used, heldout_used = self._used(self.fit, self.selection.fit), self._used(self.heldout, self.selection.heldout)
        return sidecar.Calibration(
            sources=sorted({f"{d.source}; {d.licence}" for d in used + heldout_used}),
            n_tokens=fit.n,
            n_documents=len(used),
            n_heldout_tokens=heldout.n,
            n_heldout_documents=len(heldout_used),
            seed=self.config.seed,
        )

    def _solve_all(self, sums: list[_Sums], report: Report) -> dict[tuple[int, str], sidecar.Sidecar]:
        """Sidecars by split and kind."""
        c, done, total = self.config, 0, sum(self.model.n_layer - 1 - split for split, _ in self._files())
        found = {}

        def layer_done() -> None:
            nonlocal done
            done += 1
            report("solve", done, total)

        problems = []
        for (targets, kinds), s in zip(self.families, sums, strict=True):
            for kind in kinds:
                for split in c.splits:
                    d_in = self.model.n_embd if kind == "kv" else targets.d_in
                    fit, heldout = (s.moments[part][split].first(d_in) for part in ("fit", "heldout"))
                    check_fit(fit, heldout, targets.parts)
                    problems.append((kind, targets, fit, heldout))
        for kind, targets, fit, heldout in problems:
            found[fit.split, kind] = self._solve(kind, targets, fit, heldout, layer_done)
        return found

    def run(self, report: Report = lambda stage, done, total: None) -> list[Result]:
        """Capture, solve and write. Nothing is written before every split is solved.

        Raises StatisticsError naming the layer when activations cannot be fitted, OutputExists when a file appeared meanwhile.
        """
        with threadpool_limits(self.config.threads):
            solved = self._solve_all(self._sums(report), report)
        results = []
        for split, kind in self._files():
            s, path = solved[split, kind], self.config.out_path(split, kind)
            sidecar.write(path, s, self.config.force)
            results.append(
                Result(
                    path=str(path),
                    kind=kind,
                    split=split,
                    layers=list(range(split + 1, self.model.n_layer)),
                    lambdas=s.lambdas,
                    r2=s.r2,
                    n_tokens=s.calibration.n_tokens,
                    n_heldout_tokens=s.calibration.n_heldout_tokens,
                    seconds=time.monotonic() - self.started,
                )
            )
        return results


def calibrate(config: Config, report: Report = lambda stage, done, total: None) -> list[Result]:
    """Fit and write the sidecars of `config`; see Calibration."""
    with Calibration(config) as run:
        return run.run(report)


def result_dict(result: Result) -> dict:
    """A result as plain data for JSON, with the score keys of the sidecar: lambda and r2, or lambda_k, r2_k, lambda_v, r2_v."""
    data = {k: v for k, v in asdict(result).items() if k not in ("lambdas", "r2")}
    for part in result.r2:
        data[sidecar.score_key("lambda", part)] = result.lambdas[part]
        data[sidecar.score_key("r2", part)] = result.r2[part]
        data[sidecar.score_key("r2_mean", part)] = result.r2_mean[part]
    return data
