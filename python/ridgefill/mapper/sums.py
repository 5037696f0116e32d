"""Sums over the keys, and over the values, of two models: one Gram matrix of all layers of the source, and cross terms for all
layers of the target. Every choice of source layers, number of them and penalty is solved from these (solve.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..statistics import Moments, about
from ..sums import MAX_ROWS, PARTS
from ..sums_file import Header
from .models import ROTATED, Side

TARGET = 0  # all layers of the target side by side: the one "layer" whose targets a Moments holds
NAMES = {"k": "keys", "v": "values", ROTATED: "rotated keys"}


@dataclass(frozen=True)
class PairLayout:
    """Widths of the keys or values of two models. Directions: 0 from the first to the second, 1 back."""

    family: str  # of models.PARTS, or models.ROTATED
    widths: list[list[int]]  # by model and layer, over all heads
    both: bool  # directions
    previous: bool  # whether the row before is a feature too

    @property
    def directions(self) -> range:
        return range(1 + self.both)

    def d_in(self, direction: int) -> int:
        """Features: those of a row in the order of its layers, then those of the row before."""
        return (1 + self.previous) * sum(self.widths[direction])

    def d_out(self, direction: int) -> int:
        return sum(self.widths[1 - direction])

    def sources(self, direction: int) -> list[np.ndarray]:
        """Places of the features of each source layer, [1, width]; with the row before [2, width], whose are the second."""
        ends = np.cumsum([0, *self.widths[direction]])
        before = np.arange(1 + self.previous)[:, None] * ends[-1]
        return [before + np.arange(a, b) for a, b in zip(ends, ends[1:], strict=False)]

    def targets(self, direction: int) -> list[slice]:
        """Columns of each target layer."""
        ends = np.cumsum([0, *self.widths[1 - direction]])
        return [slice(int(a), int(b)) for a, b in zip(ends, ends[1:], strict=False)]

    @property
    def n_bytes(self) -> int:
        """Of the sums of fitted and held-out rows."""
        return sum(2 * 8 * self.d_in(d) * (self.d_in(d) + self.d_out(d)) for d in self.directions)


@dataclass
class PairHeader(Header):
    """Of sums for mappers. `fingerprints` are by model, 0 and 1."""

    sides: list[dict]  # fields of models.Side of both models

    format: ClassVar[str] = "ridgefill mapper sums"
    made_with: ClassVar[str] = "ridgefill mapper fit"

    @staticmethod
    def layout(fields: dict) -> PairLayout:
        return PairLayout(**fields)

    def widths(self, layout: PairLayout) -> dict[int, tuple[int, dict[int, int]]]:
        return {d: (layout.d_in(d), {TARGET: layout.d_out(d)}) for d in layout.directions}

    def empty_sums(self) -> list[PairSums]:
        return [PairSums(layout) for layout in self.layouts]

    def direction(self, direction: int) -> tuple[Side, Side]:
        """Source and target."""
        sides = [Side(**fields) for fields in self.sides]
        return sides[direction], sides[1 - direction]


class PairSums:
    """Sums of keys or of values, filled chunk by chunk with add(). `moments` has a Moments by part of the text and direction."""

    def __init__(self, layout: PairLayout):
        self.layout = layout
        self.moments: dict[str, dict[int, Moments]] = {}

    def _start(self, rows: list[list[np.ndarray]], chosen: slice) -> None:
        with np.errstate(invalid="ignore"):  # about() refuses what is not finite by its place
            means = [np.concatenate([x[chosen].mean(0, dtype=np.float64) for x in layers]) for layers in rows]
        n = 1 + self.layout.previous
        for part in PARTS:
            self.moments[part] = {d: Moments(d, np.tile(means[d], n), {TARGET: means[1 - d]}) for d in self.layout.directions}

    def add(self, part: str, rows: list[list[np.ndarray]], chosen: slice) -> None:
        """Add the `chosen` rows of a chunk to "fit" or "heldout": rows [n, width] by model and layer, from position 0.

        Raises StatisticsError naming the layer of a value that is not finite.
        """
        if not self.moments:
            self._start(rows, chosen)
        first = self.moments[part][0]
        origins = [first.origin_x[: sum(self.layout.widths[0])], first.origin_y[TARGET]]
        for at in range(0, len(rows[0][0][chosen]), MAX_ROWS):
            block = slice(at, at + MAX_ROWS)
            now = [self._centred(m, rows[m], origins[m], chosen, block) for m in range(2)]
            for d, moments in self.moments[part].items():
                x = now[d]
                if self.layout.previous:
                    before = self._centred(d, [_before(r) for r in rows[d]], origins[d], chosen, block)
                    x = np.concatenate([x, before], axis=1)
                moments.add_features(x)
                moments.add_targets(TARGET, x, now[1 - d])

    def _centred(self, model: int, layers: list[np.ndarray], origin: np.ndarray, chosen: slice, block: slice) -> np.ndarray:
        """Rows of a block over all layers about their origin, float64."""
        what = f"{NAMES[self.layout.family]} of the {('first', 'second')[model]} model"
        origins = np.split(origin, np.cumsum(self.layout.widths[model])[:-1])
        parts = [about(x[chosen][block], o, il, what) for il, (x, o) in enumerate(zip(layers, origins, strict=True))]
        return np.concatenate(parts, axis=1)

    def each(self) -> Iterator[tuple[str, int, Moments]]:
        """Part, direction and moments, in a fixed order."""
        for part, by_direction in self.moments.items():
            for direction, moments in by_direction.items():
                yield part, direction, moments


def _before(x: np.ndarray) -> np.ndarray:
    """The row before each row; before position 0 there is 0."""
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


def with_row_before(x: np.ndarray) -> np.ndarray:
    """Features [n, 2 d] of a map that reads the row before, too."""
    return np.concatenate([x, _before(x)], axis=1)
