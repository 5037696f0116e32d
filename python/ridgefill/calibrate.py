"""Fitting ridge maps for a GGUF model: text -> layer inputs -> sums -> maps -> sidecar, one file per split.

Every split of one call is fitted in the same pass over the text.
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
from .errors import RidgeError, RidgefillError
from .lib import Context, Model
from .solve import LAMBDAS, Ridge, check_fit
from .statistics import Moments, memory_bytes
from .text import Document, read_documents

MAX_ROWS = 2048  # of one block of sums


@dataclass
class Config:
    """What to calibrate and how."""

    model: str  # GGUF file
    out: str  # sidecar; "{split}" in it stands for the split, else with several splits out.gguf becomes out.s19.gguf
    splits: list[int]  # split layers S, 1 <= S <= layers - 2
    text: list[str]  # files and folders
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
    lambdas: tuple[float, ...] = field(default=LAMBDAS)

    def out_path(self, split: int) -> Path:
        """File for one split."""
        if "{split}" in self.out:
            return Path(self.out.replace("{split}", str(split)))
        out = Path(self.out)
        return out if len(self.splits) == 1 else out.with_name(f"{out.stem}.s{split}{out.suffix}")


@dataclass(frozen=True)
class Result:
    """One sidecar that was written."""

    path: str
    split: int
    layers: list[int]
    lambdas: list[float]
    r2: list[float]  # held-out, of the maps as written
    n_tokens: int  # rows fitted
    n_heldout_tokens: int
    seconds: float  # of the whole call

    @property
    def r2_mean(self) -> float:
        return float(np.mean(self.r2))


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
            raise RidgefillError(f"split: expected 1 to {model.n_layer - 2} for a model of {model.n_layer} layers, found {split}")
    if not 0 <= config.sink < config.ctx:
        raise RidgefillError(f"sink rows: expected 0 to {config.ctx - 1}, found {config.sink}")
    if config.tail < 1:
        raise RidgefillError(f"tail: expected at least 1 row, found {config.tail}")
    if reason := model.unsupported():
        raise RidgeError(f"{config.model} cannot be filled: {reason}")


def _blocks(rows: dict[int, np.ndarray]):
    n = len(next(iter(rows.values())))
    for i in range(0, n, MAX_ROWS):
        yield {il: r[i : i + MAX_ROWS] for il, r in rows.items()}


class Calibration:
    """One run: plan() to look before it starts, run() to do it. Owns model and context; use it in `with`."""

    def __init__(self, config: Config):
        self.config = config
        self.started = time.monotonic()
        for split in config.splits:
            sidecar.check_writable(config.out_path(split), config.force)
        documents = read_documents(config.text)
        self.model = Model(config.model, n_gpu_layers=config.gpu_layers)
        try:
            _check(config, self.model)
            # a width that the map type cannot hold should not show after an hour of work
            sidecar.encode(np.zeros((1, self.model.n_embd)), config.map_type)
            self.fingerprints = {s: self.model.fingerprint(s) for s in config.splits}
            self.selection = select(documents, config.seed, config.heldout_documents)
            self.fit = chunks(self.model, self.selection.fit, config.ctx, config.sink, config.n_tokens)
            self.heldout = chunks(self.model, self.selection.heldout, config.ctx, config.sink)
        except BaseException:
            self.model.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.model.close()

    @property
    def layers(self) -> list[int]:
        """Layers whose inputs are captured."""
        return list(range(min(self.config.splits), self.model.n_layer))

    def _used(self, chunk_list: list[Chunk], documents: list[Document]) -> list[Document]:
        return [documents[i] for i in sorted({c.document for c in chunk_list})]

    def plan(self) -> Plan:
        c, d = self.config, self.model.n_embd
        captured = 3 * 4 * c.ctx * d * len(self.layers)  # the library's buffer, our copy, and one set in the making
        return Plan(
            n_documents=len(self._used(self.fit, self.selection.fit)),
            n_heldout_documents=len(self._used(self.heldout, self.selection.heldout)),
            n_tokens=sum(len(k.tokens) for k in self.fit),
            n_heldout_tokens=sum(len(k.tokens) for k in self.heldout),
            memory_bytes=memory_bytes(d, c.splits, self.model.n_layer) + captured,
            memory_available=os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        )

    def _sums(self, report: Report) -> tuple[dict[int, Moments], dict[int, Moments]]:
        """Fitted and held-out moments by split."""
        c, total, done = self.config, sum(len(k.tokens) for k in self.fit + self.heldout), 0
        fit: dict[int, Moments] = {}
        heldout: dict[int, Moments] = {}
        with Context(self.model, c.ctx, n_batch=c.ctx, n_threads=c.threads) as ctx:
            for part, chunk_list in ((fit, self.fit), (heldout, self.heldout)):
                for chunk, rows in zip(chunk_list, activations(ctx, chunk_list, self.layers, c.sink)):
                    if not fit:
                        origin = {il: r.mean(0, dtype=np.float64) for il, r in rows.items()}
                        for split in c.splits:
                            mapped = list(range(split + 1, self.model.n_layer))
                            fit[split], heldout[split] = Moments(split, mapped, origin), Moments(split, mapped, origin)
                    for block in _blocks(rows):
                        for moments in part.values():
                            moments.add(block)
                    done += len(chunk.tokens)
                    report("capture", done, total)
        return fit, heldout

    def _solve(self, fit: Moments, heldout: Moments, report: Report) -> sidecar.Sidecar:
        """The sidecar of one split, with maps and scores as they are written."""
        c, ridge, split = self.config, Ridge(fit, heldout), fit.split
        lambdas, r2, weights, biases = [], [], [], []
        for i, il in enumerate(fit.layers):
            best = ridge.best(il, c.lambdas)
            stored, weight = sidecar.encode(best.weight, c.map_type)
            bias = ridge.bias(il, weight).astype(np.float32)
            lambdas.append(best.lam)
            r2.append(ridge.r2(il, weight, bias.astype(np.float64)))
            weights.append(stored)
            biases.append(bias)
            report("solve", i + 1, len(fit.layers))
        used, heldout_used = self._used(self.fit, self.selection.fit), self._used(self.heldout, self.selection.heldout)
        record = sidecar.Calibration(
            sources=sorted({f"{d.source}; {d.licence}" for d in used + heldout_used}),
            n_tokens=fit.n,
            n_documents=len(used),
            n_heldout_tokens=heldout.n,
            n_heldout_documents=len(heldout_used),
            seed=c.seed,
        )
        return sidecar.Sidecar(self.fingerprints[split], split, c.sink, c.tail, c.map_type, lambdas, r2, weights, biases, record)

    def run(self, report: Report = lambda stage, done, total: None) -> list[Result]:
        """Capture, solve and write. Nothing is written before every split is solved.

        Raises StatisticsError naming the layer when activations cannot be fitted, OutputExists when a file appeared meanwhile.
        """
        with threadpool_limits(self.config.threads):
            fit, heldout = self._sums(report)
            for split in self.config.splits:
                check_fit(fit[split], heldout[split])
            solved = [self._solve(fit[s], heldout[s], report) for s in self.config.splits]
        results = []
        for s in solved:
            path = self.config.out_path(s.split)
            sidecar.write(path, s, self.config.force)
            n_fit, n_heldout = s.calibration.n_tokens, s.calibration.n_heldout_tokens
            results.append(Result(str(path), s.split, fit[s.split].layers, s.lambdas, s.r2, n_fit, n_heldout, time.monotonic() - self.started))  # fmt: skip
        return results


def calibrate(config: Config, report: Report = lambda stage, done, total: None) -> list[Result]:
    """Fit and write the sidecars of `config`; see Calibration."""
    with Calibration(config) as run:
        return run.run(report)


def result_dict(result: Result) -> dict:
    """A result as plain data for JSON."""
    return {**asdict(result), "r2_mean": result.r2_mean}
