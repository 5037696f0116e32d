"""Sums over rows from which every ridge regression of a model is solved.

One `Moments` belongs to one split layer S and one set of documents; x is the input of layer S, y_l that of layer l > S. It
holds n, sum(x), sum(y_l), X^T X, X^T Y_l and sum(|y_l|^2) in float64, all taken about fixed origins: the residual stream has
channels whose mean is far larger than their spread, and sums about zero would lose the spread to rounding.

Blocks are added one at a time, sets are merged by adding; the result does not depend on where blocks were cut (up to the
last bits of float64).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .errors import StatisticsError


class Moments:
    """Sums for the maps of layers `layers` from the input of layer `split`.

    `origin` maps each of those layers and `split` to a vector [d] that is subtracted from its rows; any vector is exact in
    algebra, one near the mean is exact in numbers.
    """

    def __init__(self, split: int, layers: list[int], origin: Mapping[int, np.ndarray]):
        self.split, self.layers = split, list(layers)
        self.origin = {il: np.asarray(origin[il], np.float64) for il in [split, *layers]}
        d = len(self.origin[split])
        self.n = 0
        self.sum_x = np.zeros(d)
        self.xx = np.zeros((d, d))
        self.sum_y = {il: np.zeros(len(self.origin[il])) for il in layers}
        self.xy = {il: np.zeros((d, len(self.origin[il]))) for il in layers}
        self.yy = dict.fromkeys(layers, 0.0)

    @property
    def width(self) -> int:
        return len(self.sum_x)

    def add(self, rows: Mapping[int, np.ndarray]) -> None:
        """Add a block: the inputs [n, d] of `split` and of every mapped layer, row by row of the same tokens.

        Raises StatisticsError naming the layer whose rows are not finite; the sums are then unchanged.
        """
        for il in [self.split, *self.layers]:
            check_finite(il, rows[il])
        x = rows[self.split] - self.origin[self.split]
        self.n += len(x)
        self.sum_x += x.sum(0)
        self.xx += x.T @ x
        for il in self.layers:
            y = rows[il] - self.origin[il]
            self.sum_y[il] += y.sum(0)
            self.xy[il] += x.T @ y
            self.yy[il] += float(np.vdot(y, y))

    def merge(self, other: Moments) -> None:
        """Add the sums of another set over the same layers and origins."""
        assert self.split == other.split and self.layers == other.layers
        assert all(np.array_equal(self.origin[il], other.origin[il]) for il in self.origin)
        self.n += other.n
        self.sum_x += other.sum_x
        self.xx += other.xx
        for il in self.layers:
            self.sum_y[il] += other.sum_y[il]
            self.xy[il] += other.xy[il]
            self.yy[il] += other.yy[il]


def check_finite(il: int, rows: np.ndarray) -> None:
    """Raises StatisticsError naming layer, row and channel of the first value that is not finite."""
    finite = np.isfinite(rows)
    if not finite.all():
        row, channel = np.argwhere(~finite)[0]
        raise StatisticsError(
            f"layer {il}: expected finite activations, found {rows[row, channel]} in row {row}, channel {channel} "
            f"({int((~finite).sum())} values in this block)"
        )


def memory_bytes(n_embd: int, splits: list[int], n_layer: int) -> int:
    """Bytes of the sums that calibrating `splits` needs: fitted and held-out moments, and the solver's work of one split."""
    matrices = sum(n_layer - s for s in splits)  # one X^T X and n_layer - 1 - s times X^T Y
    solver = n_layer - min(splits) + 4
    return 8 * n_embd**2 * (2 * matrices + solver)
