"""Ridge regression from sums (arXiv 2611.09709, section 2.1): maps, their penalty and their held-out R^2.

    minimise  sum_t |y_t - (A x_t + b)|^2 + alpha |A|_F^2        x, y centred by the fitted rows
    A = Y^T X (X^T X + alpha I)^-1,   b = mu_y - A mu_x,   alpha = lambda tr(X^T X) / d

One eigendecomposition of X^T X per split and kind serves every layer and every lambda.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from .errors import StatisticsError
from .statistics import Moments

LAMBDAS = tuple(float(x) for x in np.logspace(-4, 0, 13))  # three a decade

# eigenvalues below this share of the largest are rounding: without a penalty their directions get no weight, which is
# the solution of least norm
RANK_TOLERANCE = 1e-12
# rows whose squares about their mean are below this share of the squares of the mean differ by the rounding of float32
_SAME_TOLERANCE = 1e-12


@dataclass(frozen=True)
class Map:
    """A map: y_l = weight @ x + bias, or some columns of y_l."""

    layer: int
    weight: np.ndarray  # float64 [d_out, d_in]
    bias: np.ndarray  # float64 [d_out]
    lam: float  # scale-free penalty lambda
    r2: float  # held-out R^2 of this map


ALL = slice(None)  # the columns of y_l


def check_fit(fit: Moments, heldout: Moments, parts: Callable[[int], Mapping[str, slice]] = lambda il: {"input": ALL}) -> None:
    """Refuse sums from which no trustworthy map follows. `parts` names the columns of y_l that are scored on their own.

    Raises StatisticsError naming the layer for fewer fitted rows than twice the features, no held-out rows, or a layer
    whose features or targets never vary.
    """
    if fit.n < 2 * fit.width:
        raise StatisticsError(
            f"layer {fit.split}: expected at least {2 * fit.width} rows to fit (twice its {fit.width} features), found {fit.n}"
        )
    if heldout.n < 2:
        raise StatisticsError(f"layer {fit.split}: expected held-out rows, found {heldout.n}")
    x_spread = np.trace(fit.xx) - fit.sum_x @ fit.sum_x / fit.n
    if not x_spread > _rounding(fit.n, fit.origin_x + fit.sum_x / fit.n):
        raise StatisticsError(f"layer {fit.split}: its input is the same in all {fit.n} fitted rows")
    for il in fit.layers:
        for what, columns in parts(il).items():
            check_varies(fit, heldout, il, columns, f"layer {il}: its {what}")


def check_varies(fit: Moments, heldout: Moments, il: int, columns: slice, what: str) -> None:
    """Raises StatisticsError when these columns of y_l, called `what`, are the same in all rows."""
    for name, m in (("fitted", fit), ("held-out", heldout)):
        if not _spread(m, il, columns).sum() > _rounding(m.n, (m.origin_y[il] + m.sum_y[il] / m.n)[columns]):
            raise StatisticsError(f"{what} is the same in all {m.n} {name} rows")


def _rounding(n: int, mean: np.ndarray) -> float:
    """Sum of squares about the mean that n equal rows of float32 may have."""
    return _SAME_TOLERANCE * n * float(mean @ mean)


def _spread(m: Moments, il: int, columns: slice) -> np.ndarray:
    """Sums of squares of y_l about its mean, by column."""
    return m.yy[il][columns] - m.sum_y[il][columns] ** 2 / m.n


class Centred:
    """Fitted and held-out sums about the fitted means, and what a map scores on them.

    Columns of y_l do not depend on each other: each method takes those that it is about. Vectors live relative to the origins
    of the moments; `bias` is in the coordinates of the model.

    cov         centred X^T X of the fitted rows, [d_in, d_in]
    heldout_xx  that of the held-out rows, about the fitted mean too
    """

    def __init__(self, fit: Moments, heldout: Moments):
        self.fit, self.heldout = fit, heldout
        self.mean_x = fit.sum_x / fit.n
        self.cov = fit.xx - fit.n * np.outer(self.mean_x, self.mean_x)
        h, mu = heldout, self.mean_x
        self.heldout_xx = h.xx - np.outer(h.sum_x, mu) - np.outer(mu, h.sum_x) + h.n * np.outer(mu, mu)

    def _mean_y(self, il: int, columns: slice) -> np.ndarray:
        return self.fit.sum_y[il][columns] / self.fit.n

    def xy(self, il: int, columns: slice = ALL) -> np.ndarray:
        """Centred X^T Y of the fitted rows, [d_in, d_out]."""
        return self.fit.xy[il][:, columns] - np.outer(self.fit.sum_x, self._mean_y(il, columns))

    def bias(self, il: int, weight: np.ndarray, columns: slice = ALL, features: np.ndarray | slice = ALL) -> np.ndarray:
        """b that makes the map exact for the mean row, whatever rounding `weight` [d_out, n_features] went through."""
        mean = (self.fit.origin_x + self.mean_x)[features]
        return self.fit.origin_y[il][columns] + self._mean_y(il, columns) - weight @ mean

    def heldout_y(self, il: int, columns: slice = ALL) -> tuple[np.ndarray, np.ndarray]:
        """Held-out sums about the fitted means: X^T Y, and |y|^2 by column."""
        h, mu_x, mu_y = self.heldout, self.mean_x, self._mean_y(il, columns)
        sum_y = h.sum_y[il][columns]
        hxy = h.xy[il][:, columns] - np.outer(h.sum_x, mu_y) - np.outer(mu_x, sum_y) + h.n * np.outer(mu_x, mu_y)
        return hxy, h.yy[il][columns] - 2 * sum_y * mu_y + h.n * mu_y**2

    def spread(self, il: int, columns: slice = ALL) -> np.ndarray:
        """Held-out sums of squares of y_l about its held-out mean, by column."""
        return _spread(self.heldout, il, columns)

    def errors(
        self, il: int, weight: np.ndarray, bias: np.ndarray, columns: slice = ALL, features: np.ndarray | slice = ALL
    ) -> np.ndarray:
        """Held-out squared error by column of a given map of some features, for instance of one as it was rounded for its file."""
        h, mu_y = self.heldout, self._mean_y(il, columns)
        hxy, hyy = self.heldout_y(il, columns)
        hxx = self.heldout_xx if features is ALL else self.heldout_xx[np.ix_(features, features)]
        # y - A x - b = (y - mu_y) - A (x - mu_x) - c
        mean, sum_x = (self.fit.origin_x + self.mean_x)[features], (h.sum_x - h.n * self.mean_x)[features]
        c = bias + weight @ mean - self.fit.origin_y[il][columns] - mu_y
        residual = (h.sum_y[il][columns] - h.n * mu_y) - weight @ sum_x
        explained = np.einsum("ij,ji->i", weight, 2 * hxy[features] - hxx @ weight.T)
        return hyy - explained - 2 * c * residual + h.n * c**2

    def r2(self, il: int, weight: np.ndarray, bias: np.ndarray, columns: slice = ALL) -> float:
        """Held-out R^2 of a given map of layer `il`, over all columns."""
        return float(1 - self.errors(il, weight, bias, columns).sum() / self.spread(il, columns).sum())


class Ridge(Centred):
    """Solutions for every layer and lambda of one split, scored on held-out sums."""

    def __init__(self, fit: Moments, heldout: Moments):
        super().__init__(fit, heldout)
        values, self.vectors = scipy.linalg.eigh(self.cov)
        self.values = np.maximum(values, 0.0)
        self.scale = float(np.trace(self.cov)) / fit.width  # alpha of lambda = 1
        self.heldout_xx_eig = self.vectors.T @ self.heldout_xx @ self.vectors

    def check_rank(self) -> None:
        """Refuse features that move in few directions only: of text that repeats itself, however long it is.

        Raises StatisticsError naming the split layer when the rows span less than half of the features that vary.
        """
        spread = np.diag(self.cov)
        varying = int(np.count_nonzero(spread > RANK_TOLERANCE * spread.max()))
        rank = int(np.count_nonzero(self.values > RANK_TOLERANCE * self.values[-1]))
        if 2 * rank < varying:
            raise StatisticsError(
                f"layer {self.fit.split}: expected rows that span at least half of its {varying} varying features, found "
                f"{rank} directions in {self.fit.n} rows: the text repeats itself"
            )

    def projected(self, il: int, columns: slice = ALL) -> np.ndarray:
        """Centred X^T Y of the fitted rows in the eigenbasis, [d_in, d_out]."""
        return self.vectors.T @ self.xy(il, columns)

    def inverse(self, lam: float) -> np.ndarray:
        """1 / (eigenvalue + alpha); 0 where both vanish."""
        denominator = self.values + lam * self.scale
        keep = denominator > RANK_TOLERANCE * self.values[-1]
        return np.divide(1.0, denominator, out=np.zeros_like(denominator), where=keep)

    def weight(self, il: int, lam: float, columns: slice = ALL) -> np.ndarray:
        """A of layer `il` for one lambda, float64 [d_out, d_in]."""
        return ((self.vectors * self.inverse(lam)) @ self.projected(il, columns)).T

    def r2_grid(self, il: int, lambdas: tuple[float, ...] = LAMBDAS, columns: slice = ALL) -> np.ndarray:
        """Held-out R^2 of layer `il` for each lambda: 1 - sum|y - y_hat|^2 / sum|y - mean(y)|^2 over all its columns."""
        g = self.projected(il, columns)
        hxy, hyy = self.heldout_y(il, columns)
        # with A^T = V D G the squared error is a quadratic form in the diagonal D
        linear = np.einsum("ij,ij->i", g, self.vectors.T @ hxy)
        quadratic = self.heldout_xx_eig * (g @ g.T)
        inverse = np.array([self.inverse(lam) for lam in lambdas])
        error = hyy.sum() - 2 * inverse @ linear + np.einsum("ki,ki->k", inverse @ quadratic, inverse)
        return 1 - error / self.spread(il, columns).sum()

    def best(self, il: int, lambdas: tuple[float, ...] = LAMBDAS, columns: slice = ALL) -> Map:
        """The map of layer `il` with the lambda of the highest held-out R^2."""
        lam = lambdas[int(np.argmax(self.r2_grid(il, lambdas, columns)))]
        weight = self.weight(il, lam, columns)
        bias = self.bias(il, weight, columns)
        return Map(il, weight, bias, lam, self.r2(il, weight, bias, columns))
