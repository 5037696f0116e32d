"""Sums over rows from which every ridge regression of a model is solved.

One `Moments` belongs to one split layer S, one set of features x and one set of documents; y_l is what the map of layer
l > S predicts (`kinds`). It holds n, sum(x), sum(y_l), X^T X, X^T Y_l and the squares of y_l in float64, all taken about
fixed origins: the residual stream has channels whose mean is far larger than their spread, and sums about zero would lose
the spread to rounding.

Blocks of rows are added one at a time, sets are merged by adding; the result does not depend on where blocks were cut, nor
on the origins (up to the last bits of float64).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .errors import StatisticsError


class Moments:
    """Sums for the maps of layers `origin_y` from features of layer `split`.

    `origin_x` [d_in] and `origin_y` {layer: [d_out]} are what was subtracted from the rows (`about`); any
    vector is exact in algebra, one near the mean is exact in numbers.
    """

    def __init__(self, split: int, origin_x: np.ndarray, origin_y: Mapping[int, np.ndarray]):
        self.split, self.layers = split, list(origin_y)
        self.origin_x = np.asarray(origin_x, np.float64)
        self.origin_y = {il: np.asarray(o, np.float64) for il, o in origin_y.items()}
        d_in = len(self.origin_x)
        self.n = 0
        self.sum_x = np.zeros(d_in)
        self.xx = np.zeros((d_in, d_in))
        self.sum_y = {il: np.zeros(len(o)) for il, o in self.origin_y.items()}
        self.xy = {il: np.zeros((d_in, len(o))) for il, o in self.origin_y.items()}
        self.yy = {il: np.zeros(len(o)) for il, o in self.origin_y.items()}

    @property
    def width(self) -> int:
        """Number of features d_in."""
        return len(self.sum_x)

    def add_features(self, x: np.ndarray) -> None:
        """Begin a block: its features x [n, d_in] about their origin, float64."""
        self.n += len(x)
        self.sum_x += x.sum(0)
        self.xx += x.T @ x

    def add_targets(self, il: int, x: np.ndarray, y: np.ndarray) -> None:
        """Add what is predicted of layer `il` for the block of features x: y [n, d_out] about its origin, float64."""
        self.sum_y[il] += y.sum(0)
        self.xy[il] += x.T @ y
        self.yy[il] += np.einsum("ij,ij->j", y, y)

    def merge(self, other: Moments) -> None:
        """Add the sums of another set over the same layers. They are first moved about our origins, exactly in algebra."""
        assert self.split == other.split and self.layers == other.layers
        dx = other.origin_x - self.origin_x  # rows about their origin plus dx are about ours
        self.xx += other.xx
        self.xx += np.outer(other.sum_x, dx) + np.outer(dx, other.sum_x + other.n * dx)
        for il in self.layers:
            dy = other.origin_y[il] - self.origin_y[il]
            sum_y = other.sum_y[il] + other.n * dy
            self.xy[il] += other.xy[il]
            self.xy[il] += np.outer(other.sum_x, dy) + np.outer(dx, sum_y)
            self.yy[il] += other.yy[il] + dy * (other.sum_y[il] + sum_y)
            self.sum_y[il] += sum_y
        self.sum_x += other.sum_x + other.n * dx
        self.n += other.n

    def first(self, d_in: int) -> Moments:
        """The sums of the first `d_in` features alone, sharing memory with these."""
        return self._of(slice(d_in), self.layers)

    def block(self, split: int, features: np.ndarray) -> Moments:
        """The sums of some features, given by their places, without targets, as those of layer `split`."""
        part = self._of(features, [])
        part.split = split
        return part

    def _of(self, features: slice | np.ndarray, layers: list[int]) -> Moments:
        part = object.__new__(Moments)
        part.__dict__ = {**self.__dict__, "origin_x": self.origin_x[features], "sum_x": self.sum_x[features], "layers": layers}
        part.xx = self.xx[features][:, features]
        part.xy = {il: self.xy[il][features] for il in layers}
        return part


def about(rows: np.ndarray, origin: np.ndarray, layer: int, what: str = "activations") -> np.ndarray:
    """Rows [n, d] of `layer` less `origin` [d], float64.

    Raises StatisticsError naming layer, row and channel of the first value that is not finite.
    """
    with np.errstate(invalid="ignore"):
        centred = np.subtract(rows, origin, dtype=np.float64)
        total = centred.sum()  # sums of what was float32 do not overflow float64
    if not np.isfinite(total):
        finite = np.isfinite(rows)
        row, channel = np.argwhere(~finite)[0]
        raise StatisticsError(
            f"layer {layer}: expected finite {what}, found {rows[row, channel]} in row {row}, channel {channel} "
            f"({int((~finite).sum())} values in this block)"
        )
    return centred


def memory_bytes(split: int, d_in: int, d_out: Mapping[int, int]) -> int:
    """Bytes of the sums for one split: of the fitted and of the held-out rows.

    d_in features of layer `split` predict d_out[l] numbers of each layer l; layers up to `split` are left out.
    """
    return 2 * 8 * d_in * (d_in + sum(n for il, n in d_out.items() if il > split))
