"""Arms: the ways in which an evaluation puts a prompt into the cache, and the engine that does it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .. import lib
from .errors import EvaluationError
from .texts import rng

MODES = ("exact", "cut", "nofill", "identity", "fill")
ROWS = ("none", "digits", "random")


@dataclasses.dataclass(frozen=True)
class Arm:
    """How a prompt is processed.

    mode   exact: upstream's decode of every row
           cut: the context is its last T rows and nothing else
           nofill, identity, fill: a ridge prefill in that mode
    split  S, for the ridge modes
    kind   of the maps, for fill; "" is the only kind there is of that split
    rows   which rows besides sink and tail are exact: none, those of the selector `digits`, or `random` ones, as many
           as `digits` selects in the same prompt
    """

    mode: str
    split: int = 0
    rows: str = "none"
    kind: str = ""

    def __post_init__(self):
        if self.mode not in MODES:
            raise EvaluationError(f"mode of an arm: expected one of {', '.join(MODES)}, found {self.mode!r}")
        if self.rows not in ROWS:
            raise EvaluationError(f"rows of an arm: expected one of {', '.join(ROWS)}, found {self.rows!r}")
        if self.is_ridge != (self.split > 0):
            raise EvaluationError(f"arm {self.mode}: expected a split layer for the ridge modes only, found {self.split}")
        if self.kind and self.mode != "fill":
            raise EvaluationError(f"arm {self.mode}: expected a kind of maps for mode fill only, found {self.kind!r}")

    @property
    def is_ridge(self) -> bool:
        return self.mode in ("nofill", "identity", "fill")

    @property
    def name(self) -> str:
        """fill-S15:kv+digits: mode, split layer, kind of maps, exact rows."""
        split, kind = f"-S{self.split}" if self.is_ridge else "", f":{self.kind}" if self.kind else ""
        return self.mode + split + kind + (f"+{self.rows}" if self.rows != "none" else "")

    @classmethod
    def parse(cls, name: str) -> Arm:
        """The arm of a name. Raises EvaluationError for anything that `name` does not write."""
        head, _, rows = name.partition("+")
        head, _, kind = head.partition(":")
        mode, _, split = head.partition("-S")
        try:
            arm = cls(mode, int(split or 0), rows or "none", kind)
        except ValueError as e:
            raise EvaluationError(f"arm {name!r}: expected MODE[-SPLIT[:KIND]][+ROWS], e.g. fill-S15:kv+digits ({e})") from None
        if arm.name != name:
            raise EvaluationError(f"arm {name!r}: expected {arm.name!r}")
        return arm


@dataclasses.dataclass(frozen=True)
class Filled:
    """What a prefill did: n_rows of the prompt, its filled rows and the exact ones chosen by the selector."""

    n_rows: int
    filled: np.ndarray
    chosen: tuple[int, ...]


class Engine:
    """A model, its maps and one context, reused for every item.

    model    lib.Model
    maps     lib.Maps, at most one of each split and kind
    n_ctx    cells of the context: the longest prompt and what is decoded after it
    n_sink   rows at the start that are always exact
    """

    def __init__(self, model: lib.Model, maps: Sequence[lib.Maps], n_ctx: int, n_threads: int = 2, n_sink: int = 4):
        self.model, self.maps, self.n_sink = model, {(m.split, m.kind): m for m in maps}, n_sink
        if len(self.maps) != len(maps):
            raise EvaluationError(f"maps: expected one of each split and kind, found {', '.join(map(self._label, maps))}")
        self.ctx = lib.Context(model, n_ctx, n_threads=n_threads)

    def close(self) -> None:
        self.ctx.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def begin(self, arm: Arm, prompt: Sequence[int], n_tail: int, seed: int = 0) -> tuple[list[int], int, Filled]:
        """Empty the cache and put the first rows of a prompt into it.

        Returns (tokens left to decode, position of the first of them, what was filled). At least one token is left.

        Raises EvaluationError when the library fills other rows than the arm's definition says.
        """
        self.ctx.clear()
        if arm.mode == "cut":
            return list(prompt[-n_tail:]), 0, Filled(n_tail, np.empty(0, np.int32), ())
        if arm.mode == "exact":
            return list(prompt), 0, Filled(len(prompt), np.empty(0, np.int32), ())
        chosen = self.choose(arm.rows, prompt, n_tail, seed)
        p = self.ctx.prefill(
            prompt, mode=arm.mode, split=arm.split, n_tail=n_tail, n_sink=self.n_sink, exact_rows=chosen, maps=self._maps(arm)
        ).run()
        expected = np.setdiff1d(np.arange(self.n_sink, len(prompt) - n_tail), chosen)
        if not np.array_equal(p.filled, expected):
            raise EvaluationError(f"{arm.name}: expected {len(expected)} filled rows, found {len(p.filled)} or others")
        return list(prompt[p.n_done :]), p.n_done, Filled(len(prompt), p.filled, tuple(chosen))

    def choose(self, rows: str, prompt: Sequence[int], n_tail: int, seed: int) -> list[int]:
        """Exact rows of the prefix: none, the digit tokens, or as many random ones drawn by `seed`."""
        if rows == "none":
            return []
        span = self.n_sink, len(prompt) - n_tail
        digits = lib.select_rows("digits", self.model, prompt, *span)
        if rows == "digits" or not digits:
            return digits
        return lib.select_rows(
            "random", self.model, prompt, *span, budget=len(digits), seed=int(rng(seed, "random rows").integers(2**31))
        )

    def require(self, arms: Sequence[Arm]) -> None:
        """Raises EvaluationError for an arm whose maps are not here, or whose split layer the model does not have."""
        for arm in arms:
            self._maps(arm)
            if arm.is_ridge and not 0 < arm.split < self.model.n_layer:
                raise EvaluationError(
                    f"{arm.name}: expected a split layer from 1 to {self.model.n_layer - 1}, found {arm.split}"
                )

    def _maps(self, arm: Arm):
        if arm.mode != "fill":
            return None
        found = [m for (split, kind), m in self.maps.items() if split == arm.split and arm.kind in ("", kind)]
        if len(found) != 1:
            known = ", ".join(map(self._label, self.maps.values())) or "none"
            raise EvaluationError(f"{arm.name}: expected one file of maps that this names, found {len(found)} among {known}")
        return found[0]

    @staticmethod
    def _label(maps: lib.Maps) -> str:
        return f"S{maps.split}:{maps.kind}"
