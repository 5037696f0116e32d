"""Maps of kind `input_lr` from the sums of kind `input`: y_l ~ x + U V^T x + b, with r columns in U and V.

    minimise  sum_t |y_t - x_t - U V^T x_t - b|^2 + alpha |U V^T|_F^2        x, y centred by the fitted rows

This is ridge regression of the residual y - x under a bound on the rank. Without the bound its solution is
B = (X^T X + alpha I)^-1 X^T (Y - X); with it, U = W and V = B W, where W holds the eigenvectors of the r largest eigenvalues of
B^T (X^T X + alpha I) B: B loses least, in the metric of X^T X + alpha I, when its outputs are projected on W.
(Mukherjee and Zhu, Reduced rank ridge regression and its kernel extensions, Statistical Analysis and Data Mining 4, 2011.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.linalg

from .solve import LAMBDAS, Ridge


@dataclass(frozen=True)
class Factors:
    """A map y_l = x + up @ down @ x + bias without its bias."""

    layer: int
    up: np.ndarray  # U, float64 [d, rank], orthonormal columns
    down: np.ndarray  # V^T, float64 [rank, d]
    lam: float  # scale-free penalty lambda


class LowRank:
    """Maps of at most this rank for every layer of `ridge`, whose sums are those of kind `input`."""

    def __init__(self, ridge: Ridge, rank: int):
        self.ridge, self.rank = ridge, rank

    def _residual(self, il: int) -> np.ndarray:
        """Centred X^T (Y - X) of the fitted rows in the eigenbasis, [d, d]."""
        return self.ridge.projected(il) - self.ridge.values[:, None] * self.ridge.vectors.T

    def _factors(self, residual: np.ndarray, lam: float) -> tuple[np.ndarray, np.ndarray]:
        """U [d, rank], and V^T [rank, d] in the eigenbasis."""
        inverse, d = self.ridge.inverse(lam), len(residual)
        explained = residual.T @ (inverse[:, None] * residual)
        _, up = scipy.linalg.eigh(explained, subset_by_index=[d - self.rank, d - 1])
        return up, (residual @ up).T * inverse

    def solution(self, il: int, lam: float) -> Factors:
        """The map of layer `il` for one lambda."""
        up, down = self._factors(self._residual(il), lam)
        return Factors(il, up, down @ self.ridge.vectors.T, lam)

    def best(self, il: int, lambdas: tuple[float, ...] = LAMBDAS) -> Factors:
        """The map of layer `il` with the lambda of the highest held-out R^2 under this rank."""
        ridge, residual = self.ridge, self._residual(il)
        heldout_xy, _ = ridge.heldout_y(il)
        heldout = ridge.vectors.T @ (heldout_xy - ridge.heldout_xx)  # X^T (Y - X) about the fitted means
        found, least = None, np.inf
        for lam in lambdas:
            up, down = self._factors(residual, lam)
            # the squared error but for what no map changes
            error = np.vdot(down @ ridge.heldout_xx_eig, down) - 2 * np.vdot(down.T, heldout @ up)
            if found is None or error < least:
                found, least = Factors(il, up, down @ ridge.vectors.T, lam), error
        return found
