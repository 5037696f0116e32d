"""Arms: the ways in which an evaluation puts a prompt into the cache, and the engine that does it."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from .. import lib, sidecar
from ..cost import Cost
from .attended import AttendedRows
from .errors import EvaluationError
from .texts import rng

SPLIT_MODES = ("nofill", "identity", "fill")
MODES = ("exact", "noise", "cut", "pop", *SPLIT_MODES)
ROWS = ("none", "digits", "random", "attention", "tail", "equal")
NOISE_UBATCH = 96  # rows that the arm `noise` runs together; the other arms run lib.Context's own number
FORM = "MODE[-SPLIT[:KIND]][+ROWS[=BUDGET]]"


@dataclasses.dataclass(frozen=True)
class Arm:
    """How a prompt is processed.

    mode    exact: upstream's decode of every row
            noise: the same, NOISE_UBATCH rows at a time: what differs from exact is the noise floor
            cut: the context is its last T rows and nothing else
            pop: POP's recipe: identity above the first two thirds of the layers, every row filled but the last
            nofill, identity, fill: a ridge prefill in that mode
    split   S, for the last three
    rows    which rows besides sink and tail are exact:
            none, or those of the selector `digits`
            random: as many random ones as `budget` says, or as `digits` selects in the same prompt
            attention: as many as `budget` says, those that the prompt's last rows attend to most (AttendedRows)
            tail: as many as `budget` says, all in front of the tail, which they make longer
            equal: the same, for nofill: as many as make it cost what the fill of these maps costs
    kind    of the maps, for fill and equal; "" is the only kind there is of that split
    budget  share of the filled region, for random, attention and tail
    """

    mode: str
    split: int = 0
    rows: str = "none"
    kind: str = ""
    budget: float = 0.0

    def __post_init__(self):
        if self.mode not in MODES:
            raise EvaluationError(f"mode of an arm: expected one of {', '.join(MODES)}, found {self.mode!r}")
        if self.rows not in ROWS:
            raise EvaluationError(f"rows of an arm: expected one of {', '.join(ROWS)}, found {self.rows!r}")
        has_split = self.mode in SPLIT_MODES
        if has_split != (self.split > 0):
            raise EvaluationError(f"arm {self.mode}: expected a split layer for the ridge modes {', '.join(SPLIT_MODES)} only, found {self.split}")
        if self.kind and not self.needs_maps:
            raise EvaluationError(f"arm {self.mode}: expected a kind of maps for mode fill only, found {self.kind!r}")
        if self.rows != "none" and not has_split or self.rows == "equal" and self.mode != "nofill":
            raise EvaluationError(f"arm {self.mode}: expected exact rows for {', '.join(SPLIT_MODES)}, equal for nofill, found {self.rows}")
        if not (0 < self.budget < 1 if self.rows in ("attention", "tail") or self.budget and self.rows == "random" else self.budget == 0):
            raise EvaluationError(f"arm {self.mode}+{self.rows}: expected a share of rows for random, attention and tail, found {self.budget:g}")

    @property
    def is_ridge(self) -> bool:
        """Whether some of its rows are filled."""
        return self.mode == "pop" or self.mode in SPLIT_MODES

    @property
    def needs_maps(self) -> bool:
        return self.mode == "fill" or self.rows == "equal"

    @property
    def name(self) -> str:
        """fill-S15:kv+random=0.1: mode, split layer, kind of maps, exact rows, their share."""
        split, kind = f"-S{self.split}" if self.split else "", f":{self.kind}" if self.kind else ""
        rows = f"+{self.rows}" if self.rows != "none" else ""
        return self.mode + split + kind + rows + (f"={self.budget:g}" if self.budget else "")

    @classmethod
    def parse(cls, name: str) -> Arm:
        """The arm of a name. Raises EvaluationError for anything that `name` does not write."""
        head, _, rows = name.partition("+")
        rows, _, budget = rows.partition("=")
        head, _, kind = head.partition(":")
        mode, _, split = head.partition("-S")
        try:
            arm = cls(mode, int(split or 0), rows or "none", kind, float(budget or 0))
        except ValueError as e:
            raise EvaluationError(f"arm {name!r}: expected {FORM}, e.g. fill-S15:kv+digits ({e})") from None
        if arm.name != name:
            raise EvaluationError(f"arm {name!r}: expected {arm.name!r}")
        return arm


@dataclasses.dataclass(frozen=True)
class Filled:
    """What a prefill did.

    n_rows  of the prompt that were run
    filled  of them, the filled ones
    chosen  the exact ones besides sink and tail
    cost    of the prompt, relative to exact, counted by cost.Cost
    """

    n_rows: int
    filled: np.ndarray
    chosen: tuple[int, ...]
    cost: float


class Engine:
    """A model, its maps and a context, reused for every item.

    model    lib.Model
    maps     lib.Maps, at most one of each split and kind
    n_ctx    cells of the context: the longest prompt and what is decoded after it
    n_sink   rows at the start that are always exact

    `ctx` is the context that holds the prompt begun last; the arm `noise` has one of its own.
    """

    def __init__(self, model: lib.Model, maps: Sequence[lib.Maps], n_ctx: int, n_threads: int = 2, n_sink: int = 4):
        self.model, self.maps, self.n_sink = model, {(m.split, m.kind): m for m in maps}, n_sink
        if len(self.maps) != len(maps):
            raise EvaluationError(f"maps: expected one of each split and kind, found {', '.join(map(self._label, maps))}")
        self._options = {"n_ctx": n_ctx, "n_threads": n_threads}
        self._noise: lib.Context | None = None
        self._fills: dict[tuple[int, str], float] = {}  # multiply-adds of a filled row, by split and kind
        self.ctx = self._main = lib.Context(model, **self._options)

    def close(self) -> None:
        self._main.close()
        if self._noise:
            self._noise.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @cached_property
    def _attended(self) -> AttendedRows:
        return AttendedRows(self.model)

    @cached_property
    def _cost(self) -> Cost:
        return Cost(self.model.path, self.model.n_layer)

    def begin(self, arm: Arm, prompt: Sequence[int], n_tail: int, seed: int = 0) -> tuple[list[int], int, Filled]:
        """Empty the cache and put the first rows of a prompt into it.

        Returns (tokens left to decode, position of the first of them, what was filled). At least one token is left.

        Raises EvaluationError when the library fills other rows than the arm's definition says.
        """
        if arm.mode == "noise" and not self._noise:
            self._noise = lib.Context(self.model, **self._options, n_ubatch=NOISE_UBATCH)
        self.ctx = self._noise if arm.mode == "noise" else self._main
        self.ctx.clear()
        n, none = len(prompt), np.empty(0, np.int32)
        if arm.mode == "cut":
            return list(prompt[-n_tail:]), 0, Filled(n_tail, none, (), self._cost.exact(n_tail) / self._cost.exact(n))
        if not arm.is_ridge:
            return list(prompt), 0, Filled(n, none, (), 1.0)
        chosen = self.choose(arm, prompt, n_tail, seed)
        n_sink = self.n_sink
        if arm.mode == "pop":
            arm, n_tail, n_sink = Arm("identity", self.model.n_layer - self.model.n_layer // 3), 1, 0
        p = self.ctx.prefill(
            prompt, mode=arm.mode, split=arm.split, n_tail=n_tail, n_sink=n_sink, exact_rows=chosen,
            maps=self._maps(arm) if arm.mode == "fill" else None,
        ).run()  # fmt: skip
        kept = self._kept(n, n_tail, n_sink, chosen)
        if not np.array_equal(p.filled, np.flatnonzero(~kept)):
            raise EvaluationError(f"{arm.name}: expected {n - kept.sum()} filled rows, found {len(p.filled)} or others")
        cost = self._cost_of(arm, kept) / self._cost.exact(n)
        return list(prompt[p.n_done :]), p.n_done, Filled(n, p.filled, tuple(chosen), cost)

    def choose(self, arm: Arm, prompt: Sequence[int], n_tail: int, seed: int) -> list[int]:
        """Exact rows of the prefix besides the sink. `seed` draws random ones, the same for every arm of one budget."""
        begin, end = self.n_sink, len(prompt) - n_tail
        if arm.rows == "none" or end <= begin:
            return []
        if arm.rows in ("tail", "equal"):
            n = round(arm.budget * (end - begin)) if arm.rows == "tail" else self._equal(arm, len(prompt), n_tail)
            return list(range(end - n, end))
        budget = max(1, round(arm.budget * (end - begin))) if arm.budget else 0
        if arm.rows == "attention":
            deepest = max((split for split, _ in self.maps), default=0)
            return self._attended.select(self._main, prompt, begin, end, budget, arm.split, deepest)
        if not budget:
            digits = lib.select_rows("digits", self.model, prompt, begin, end)
            if arm.rows == "digits" or not digits:
                return digits
            budget = len(digits)
        drawn = int(rng(seed, "random rows").integers(2**31))
        return lib.select_rows("random", self.model, prompt, begin, end, budget=budget, seed=drawn)

    def require(self, arms: Sequence[Arm]) -> None:
        """Raises EvaluationError for an arm whose maps are not here, or whose split layer the model does not have, RidgefillError
        for rows chosen by attention where that cannot be computed.
        """
        for arm in arms:
            if arm.needs_maps:
                self._maps(arm)
            if arm.rows == "attention":
                self._attended.check(arm.split)
            if arm.split and not 0 < arm.split < self.model.n_layer:
                raise EvaluationError(
                    f"{arm.name}: expected a split layer from 1 to {self.model.n_layer - 1}, found {arm.split}"
                )

    def _kept(self, n: int, n_tail: int, n_sink: int, chosen: Sequence[int] = ()) -> np.ndarray:
        """bool [n], the rows of a prompt that run every layer."""
        kept = np.zeros(n, bool)
        kept[:n_sink], kept[max(0, n - n_tail) :], kept[list(chosen)] = True, True, True
        return kept

    def _cost_of(self, arm: Arm, kept: np.ndarray) -> float:
        """Of a ridge arm. Cells that nofill hides are not counted where they are masked, to the benefit of nofill."""
        if arm.mode == "nofill":
            return self._cost.partly(kept, arm.split, 0.0, hidden=True)
        maps = self._maps(arm) if arm.mode == "fill" else None
        key = arm.split, maps.kind if maps else "identity"
        if key not in self._fills:
            rank = sidecar.inspect(maps.path)["keys"]["ridge.rank"] if key[1] == "input_lr" else 0
            self._fills[key] = self._cost.fill(*key, rank)
        return self._cost.partly(kept, arm.split, self._fills[key])

    def _equal(self, arm: Arm, n: int, n_tail: int) -> int:
        """Least number of rows by which the tail of a nofill is longer that costs no less than the fill it is compared with."""
        fill = self._cost_of(dataclasses.replace(arm, mode="fill", rows="none"), self._kept(n, n_tail, self.n_sink))
        longer = range(n - n_tail - self.n_sink)
        return bisect_left(longer, fill, key=lambda k: self._cost_of(arm, self._kept(n, n_tail + k, self.n_sink)))

    def _maps(self, arm: Arm) -> lib.Maps:
        found = [m for (split, kind), m in self.maps.items() if split == arm.split and arm.kind in ("", kind)]
        if len(found) != 1:
            known = ", ".join(map(self._label, self.maps.values())) or "none"
            raise EvaluationError(f"{arm.name}: expected one file of maps that this names, found {len(found)} among {known}")
        return found[0]

    @staticmethod
    def _label(maps: lib.Maps) -> str:
        return f"S{maps.split}:{maps.kind}"
