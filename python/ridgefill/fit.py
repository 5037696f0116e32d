"""From sums to sidecars: every wanted split and kind solved, scored as it is written, and written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from . import sidecar
from .errors import RidgefillError
from .kinds import KINDS, Layout
from .low_rank import LowRank
from .solve import LAMBDAS, Ridge, check_fit
from .statistics import Moments
from .sums import Sums
from .sums_file import MapsHeader, SumsError

# called as report(stage, done, total): "capture" counts tokens, "solve" layers; first with what was done before
Report = Callable[[str, int, int], None]


def no_report(stage: str, done: int, total: int) -> None:
    """A Report that says nothing."""


@dataclass(frozen=True)
class Wanted:
    """Which sidecars to make, and how."""

    out: str  # sidecar; see path()
    splits: list[int]
    kinds: list[str]  # of kinds.KINDS
    map_type: str = "q8_0"  # of sidecar.MAP_TYPES
    tail: int = 512  # recommended tail, rows
    lambdas: tuple[float, ...] = LAMBDAS
    prev_share: float = 1.0  # of the row before in K of kind kv_prev: 1 as regressed, 0 as in kind kv
    rank: int = 128  # of kind input_lr
    force: bool = False  # replace existing files

    def path(self, split: int, kind: str) -> Path:
        """File for one split and kind: `out` with "{split}" and "{kind}" replaced.

        Where several are made and `out` does not name them, out.gguf becomes out.s19.kv.gguf.
        """
        out = Path(self.out.replace("{split}", str(split)).replace("{kind}", kind))
        more = f".s{split}" if len(self.splits) > 1 and "{split}" not in self.out else ""
        more += f".{kind}" if len(self.kinds) > 1 and "{kind}" not in self.out else ""
        return out.with_name(f"{out.stem}{more}{out.suffix}")

    def files(self) -> list[tuple[int, str]]:
        """Split and kind of each sidecar, in the order in which they are written."""
        return [(split, kind) for kind in self.kinds for split in self.splits]

    def check(self) -> None:
        """Raises RidgefillError for a value out of range."""
        if self.map_type not in sidecar.MAP_TYPES:
            raise RidgefillError(f"map type: expected one of {', '.join(sidecar.MAP_TYPES)}, found {self.map_type!r}")
        if len(set(self.splits)) != len(self.splits) or not self.splits:
            raise RidgefillError(f"splits: expected at least one and each once, found {self.splits}")
        if not self.kinds or len(set(self.kinds)) != len(self.kinds) or any(k not in KINDS for k in self.kinds):
            found = ", ".join(self.kinds) or "none"
            raise RidgefillError(f"kinds: expected some of {', '.join(KINDS)}, each once, found {found}")
        if not 0 <= self.prev_share <= 1:
            raise RidgefillError(f"share of the row before: expected 0 to 1, found {self.prev_share}")
        if self.tail < 1:
            raise RidgefillError(f"tail: expected at least 1 row, found {self.tail}")
        if not self.lambdas or not all(math.isfinite(x) and x >= 0 for x in self.lambdas):
            raise RidgefillError(f"lambdas: expected finite numbers that are not negative, found {list(self.lambdas)}")

    def check_widths(self, n_embd: int) -> None:
        """Raises RidgefillError when maps of a model of width `n_embd` cannot have this rank or type."""
        sidecar.check_block(self.map_type, "width", n_embd)
        if "input_lr" in self.kinds:
            if not 1 <= self.rank <= n_embd:
                raise RidgefillError(f"rank: expected 1 to {n_embd}, the width of the model, found {self.rank}")
            sidecar.check_block(self.map_type, "rank", self.rank)


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
    scores: dict[str, list[float]] = field(default_factory=dict)  # of the written file, by name (score.py); {}: not judged

    @property
    def r2_mean(self) -> dict[str, float]:
        """By part, over the layers."""
        return {part: float(np.mean(r2)) for part, r2 in self.r2.items()}


def result_dict(result: Result) -> dict:
    """A result as plain data for JSON, with the score keys of the sidecar: lambda and r2, or lambda_k, r2_k, lambda_v, r2_v."""
    data = {k: v for k, v in asdict(result).items() if k not in ("lambdas", "r2")}
    for part in result.r2:
        data[sidecar.score_key("lambda", part)] = result.lambdas[part]
        data[sidecar.score_key("r2", part)] = result.r2[part]
        data[sidecar.score_key("r2_mean", part)] = result.r2_mean[part]
    return data


@dataclass(frozen=True)
class _Problem:
    """One split and kind to be solved."""

    kind: str
    layout: Layout
    fit: Moments
    heldout: Moments


def _problems(wanted: Wanted, sums: list[Sums]) -> list[_Problem]:
    """Those of each family together. Raises StatisticsError naming the layer of sums from which no map follows."""
    problems = []
    for s in sums:
        for kind in (k for k in wanted.kinds if k in s.layout.kinds):
            for split in (x for x in wanted.splits if x in s.splits):
                fit, heldout = (s.moments[part][split].first(s.layout.d_in(kind)) for part in ("fit", "heldout"))
                check_fit(fit, heldout, s.layout.parts)
                problems.append(_Problem(kind, s.layout, fit, heldout))
    return problems


@dataclass(frozen=True)
class _Layer:
    """The map of one layer as it is written, with its scores."""

    weights: dict[str, np.ndarray]  # as sidecar.Sidecar has them
    bias: np.ndarray  # float32 [d_out]
    lambdas: dict[str, float]  # by part
    r2: dict[str, float]


def _full_solver(wanted: Wanted, problem: _Problem, ridge: Ridge) -> Callable[[int], _Layer]:
    """Solves layers with maps of full rank."""
    layout, kind = problem.layout, problem.kind
    # K of kv_prev may be mixed from a map with and one without the row before
    own = layout.d_in("kv") if kind == "kv_prev" and wanted.prev_share < 1 else 0
    plain = Ridge(problem.fit.first(own), problem.heldout.first(own)) if own else None

    def solve_part(il: int, part: str) -> _Layer:
        columns = layout.parts(il)[part]
        best = ridge.best(il, wanted.lambdas, columns)
        if plain and part == "k":
            best.weight[:] *= wanted.prev_share
            best.weight[:, :own] += (1 - wanted.prev_share) * plain.best(il, wanted.lambdas, columns).weight
        stored, weight = sidecar.encode(best.weight, wanted.map_type)
        bias = ridge.bias(il, weight, columns).astype(np.float32)
        r2 = ridge.r2(il, weight, bias.astype(np.float64), columns)
        return _Layer({"weight": stored}, bias, {part: best.lam}, {part: r2})

    def solve_layer(il: int) -> _Layer:
        parts = [solve_part(il, part) for part in sidecar.PARTS[kind]]
        return _Layer(
            weights={"weight": np.concatenate([p.weights["weight"] for p in parts])},
            bias=np.concatenate([p.bias for p in parts]),
            lambdas={part: lam for p in parts for part, lam in p.lambdas.items()},
            r2={part: r2 for p in parts for part, r2 in p.r2.items()},
        )

    return solve_layer


def _low_rank_solver(wanted: Wanted, ridge: Ridge) -> Callable[[int], _Layer]:
    """Solves layers of kind input_lr."""
    low_rank = LowRank(ridge, wanted.rank)

    def solve_layer(il: int) -> _Layer:
        best = low_rank.best(il, wanted.lambdas)
        (up, up_back), (down, down_back) = (sidecar.encode(x, wanted.map_type) for x in (best.up, best.down))
        weight = sidecar.low_rank(up_back, down_back)
        bias = ridge.bias(il, weight).astype(np.float32)
        return _Layer({"down": down, "up": up}, bias, {"input": best.lam}, {"input": ridge.r2(il, weight, bias.astype(np.float64))})

    return solve_layer


def _solve(wanted: Wanted, header: MapsHeader, problem: _Problem, report: Callable[[], None]) -> sidecar.Sidecar:
    """The sidecar of one split and kind, with maps and scores as they are written."""
    fit, layout, kind = problem.fit, problem.layout, problem.kind
    ridge = Ridge(fit, problem.heldout)
    ridge.check_rank()
    solve_layer = _low_rank_solver(wanted, ridge) if kind == "input_lr" else _full_solver(wanted, problem, ridge)
    layers = []
    for il in fit.layers:
        layers.append(solve_layer(il))
        report()
    return sidecar.Sidecar(
        fingerprint=header.fingerprints[fit.split],
        split=fit.split,
        sink_rows=header.sink,
        tail=wanted.tail,
        map_type=wanted.map_type,
        lambdas={part: [layer.lambdas[part] for layer in layers] for part in sidecar.PARTS[kind]},
        r2={part: [layer.r2[part] for layer in layers] for part in sidecar.PARTS[kind]},
        weights=[layer.weights for layer in layers],
        biases=[layer.bias for layer in layers],
        calibration=_record(header, wanted, fit.n, problem.heldout.n),
        kind=kind,
        kv_lengths=[layout.kv_lengths[il] for il in fit.layers] if layout.kv_lengths else [],
        prev_share=wanted.prev_share,
    )


def _record(header: MapsHeader, wanted: Wanted, n_tokens: int, n_heldout_tokens: int) -> sidecar.Calibration:
    options = header.record["options"] + ([f"shards={header.n_shards}"] if header.n_shards > 1 else [])
    options += [f"lambda={x:g}" for x in wanted.lambdas] if wanted.lambdas != LAMBDAS else []
    counts = {"n_tokens": n_tokens, "n_heldout_tokens": n_heldout_tokens}
    return sidecar.Calibration(**{**header.record, **counts, "options": options})


def solve(wanted: Wanted, header: MapsHeader, sums: list[Sums], report: Report = no_report) -> list[Result]:
    """Solve, score and write. Nothing is written before all is solved.

    Raises SumsError when splits, kinds or text are missing in the sums, StatisticsError naming the layer when they cannot be
    fitted, OutputExists when a file exists and may not be replaced.
    """
    started = time.monotonic()
    wanted.check()
    wanted.check_widths(header.layouts[0].n_embd)
    check_holds(wanted, header)
    if header.layers:
        raise SumsError(f"the sums are of layers {header.layer_names()} only: make sidecars with the command that made the sums")
    solution = Solution(wanted, header.n_layer, report)
    solution.add(header, sums)
    return solution.write(started)


class Solution:
    """Sidecars in the making: add() sums, of all layers or of some at a time in ascending order, then write()."""

    def __init__(self, wanted: Wanted, n_layer: int, report: Report = no_report):
        self._wanted, self._n_layer, self._report = wanted, n_layer, report
        self._solved: dict[tuple[int, str], sidecar.Sidecar] = {}
        self._done, self._total = 0, sum(n_layer - 1 - split for split, _ in wanted.files())

    def _layer_done(self) -> None:
        self._done += 1
        self._report("solve", self._done, self._total)

    def add(self, header: MapsHeader, sums: list[Sums]) -> None:
        """Solve and score. Raises StatisticsError naming the layer when the sums cannot be fitted."""
        self._report("solve", self._done, self._total)
        for p in _problems(self._wanted, sums):
            found, key = _solve(self._wanted, header, p, self._layer_done), (p.fit.split, p.kind)
            self._solved[key] = _joined(self._solved[key], found) if key in self._solved else found

    def write(self, started: float, same_is_fine: bool = False) -> list[Result]:
        """Write the sidecars. `started` is the time.monotonic() from which the seconds of the results count.

        With `same_is_fine` a file that exists already with the very bytes to be written is left alone.

        Raises OutputExists when a file exists and may not be replaced.
        """
        results = []
        for split, kind in self._wanted.files():
            s, path = self._solved[split, kind], self._wanted.path(split, kind)
            sidecar.write(path, s, self._wanted.force, same_is_fine)
            results.append(
                Result(
                    path=str(path),
                    kind=kind,
                    split=split,
                    layers=list(range(split + 1, self._n_layer)),
                    lambdas=s.lambdas,
                    r2=s.r2,
                    n_tokens=s.calibration.n_tokens,
                    n_heldout_tokens=s.calibration.n_heldout_tokens,
                    seconds=time.monotonic() - started,
                )
            )
        return results


def _joined(lower: sidecar.Sidecar, upper: sidecar.Sidecar) -> sidecar.Sidecar:
    """One sidecar of two for the same split and kind, with the maps of lower and of higher layers."""
    return replace(
        lower,
        lambdas={part: lower.lambdas[part] + upper.lambdas[part] for part in lower.lambdas},
        r2={part: lower.r2[part] + upper.r2[part] for part in lower.r2},
        weights=lower.weights + upper.weights,
        biases=lower.biases + upper.biases,
        kv_lengths=lower.kv_lengths + upper.kv_lengths,
    )


def check_holds(wanted: Wanted, header: MapsHeader) -> None:
    """Raises SumsError when the sums lack what is wanted."""
    header.check_complete()
    for what, found, there in (("splits", wanted.splits, sorted(header.splits)), ("kinds", wanted.kinds, header.kinds)):
        if unknown := [x for x in found if x not in there]:
            raise SumsError(f"{what}: expected some of {', '.join(map(str, there))}, found {', '.join(map(str, unknown))}")
