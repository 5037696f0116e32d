"""The `ridge_*` keywords of `Llama`: what is known, what is in range, and what overrides what."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from typing import Any, TypedDict

from .errors import RidgeError

MODES = ("off", "plumb", "identity", "nofill", "fill")
ROWS = ("none", "random", "digits")


class RidgeKeywords(TypedDict, total=False):
    """Keywords of a single call; see `Options`."""

    ridge_mode: str | None
    ridge_tail: int | None
    ridge_rows: str | None
    ridge_budget: float | None
    ridge_seed: int | None
    ridge_min_prompt: int | None


@dataclass(frozen=True)
class Options:
    """How a prompt is to run. None: what the call around it says, else the object, else the default named here.

    mode        one of MODES; "fill" with maps, else "off"
    tail        last rows of a prompt that are always exact; the sidecar's
    rows        selector of further exact rows, one of ROWS; "none"
    budget      most rows of the selector: a share of the rows before the tail (0 < F < 1) or a number (F >= 1); 0, which
                is no limit for digits
    seed        of the random rows; 0
    min_prompt  prompts with fewer new rows run exactly, 0 for no minimum; twice the tail
    """

    mode: str | None = None
    tail: int | None = None
    rows: str | None = None
    budget: float | None = None
    seed: int | None = None
    min_prompt: int | None = None

    def over(self, other: Options) -> Options:
        """These options, and those of `other` where this one says nothing."""
        said = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return replace(other, **said)

    def checked(self) -> Options:
        """Itself. Raises RidgeError for a value that is out of range; the message names the keyword."""
        _expect("mode", self.mode in (None, *MODES), "off, plumb, identity, nofill or fill", self.mode)
        _expect("rows", self.rows in (None, *ROWS), "none, random or digits", self.rows)
        _expect("tail", _is_count(self.tail, 1, 2**31), "a whole number of rows, 1 or more", self.tail)
        _expect("min_prompt", _is_count(self.min_prompt, 0, 2**31), "a whole number of rows, 0 or more", self.min_prompt)
        _expect("seed", _is_count(self.seed, 0, 2**64), "a whole number, 0 or more", self.seed)
        b = self.budget
        good = b is None or (isinstance(b, Real) and not isinstance(b, bool) and math.isfinite(b) and b >= 0)
        _expect("budget", good, "a share of the rows (0 < F < 1), a number of rows (F >= 1), or 0", b)
        return self

    def checked_together(self) -> Options:
        """Itself, when every value that matters is filled in. Raises RidgeError for values that exclude each other."""
        if self.rows == "random" and not self.budget:
            raise RidgeError("ridge_rows='random' needs ridge_budget: expected a share or a number of rows, found 0")
        if self.rows in (None, "none") and self.budget:
            raise RidgeError("ridge_budget needs ridge_rows: expected 'random' or 'digits', found 'none'")
        return self


CALL_KEYWORDS = tuple(f"ridge_{f.name}" for f in fields(Options))
KEYWORDS = ("ridge_maps", *CALL_KEYWORDS)


def _expect(name: str, good: bool, expected: str, found: object) -> None:
    if not good:
        raise RidgeError(f"ridge_{name}: expected {expected}, found {found!r}")


def _is_count(value: object, least: int, end: int) -> bool:
    return value is None or (isinstance(value, Integral) and not isinstance(value, bool) and least <= value < end)


def check_maps_path(path: str | os.PathLike | None) -> str | None:
    """The path as text. Raises RidgeError when there is no such file."""
    if path is None:
        return None
    if not os.path.isfile(path):
        raise RidgeError(f"ridge_maps: expected a file of ridge maps, found no file {os.fspath(path)!r}")
    return os.fspath(path)


def take(keywords: dict[str, Any]) -> Options:
    """Remove the `ridge*` keywords of a call from `keywords`.

    Raises TypeError for one that is unknown, and RidgeError for a value out of range.
    """
    found = {name: keywords.pop(name) for name in [k for k in keywords if k.startswith("ridge")]}
    for name in found:
        if name == "ridge_maps":
            raise TypeError(f"'ridge_maps' is given when the object is made; a call takes {', '.join(CALL_KEYWORDS)}")
        if name not in CALL_KEYWORDS:
            raise TypeError(f"unknown keyword {name!r}; a call takes {', '.join(CALL_KEYWORDS)}")
    return Options(**{name.removeprefix("ridge_"): value for name, value in found.items()}).checked()


def refuse_unknown(keywords: Iterable[str], upstream: Iterable[str]) -> None:
    """Raise TypeError for keywords of a new object that begin with `ridge`, or look misspelt.

    llama-cpp-python's constructor swallows what it does not know; `upstream` is what it knows.
    """
    for name in set(keywords) - set(upstream):
        near = difflib.get_close_matches(name, KEYWORDS, n=1, cutoff=0.8)
        if name.startswith("ridge") or near:
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"unknown keyword {name!r}; known are {', '.join(KEYWORDS)}{hint}")
