"""Mappers from sums: which source layers, how many, which penalty; keys and values each on their own, for each target layer.

    minimise  sum_t |y_t - (W x_t + b)|^2 + alpha |W|_F^2,    alpha = lambda tr(X^T X) / d_in,    x, y centred

x holds the features of the chosen source layers side by side. Their X^T X and X^T Y are blocks of those of all layers, so that
nothing here needs the data again. Whatever is chosen is chosen on held-out rows, by R^2 averaged over the target's heads.
(arXiv 2608.03893)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from ..errors import StatisticsError
from ..solve import RANK_TOLERANCE, Centred, Ridge, check_fit, check_varies
from ..statistics import Moments
from .sums import NAMES, TARGET, PairLayout

LAMBDAS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
ALL_LAYERS = 0  # as a number of source layers
KS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, ALL_LAYERS)
SELECTIONS = ("r2", "greedy")


@dataclass(frozen=True)
class Choice:
    """What was chosen for one target layer, and what that was chosen by."""

    sources: list[int]  # ascending
    lam: float
    r2_by_k: np.ndarray  # held-out, averaged over heads, [number of ks]
    r2_single: np.ndarray  # of each source layer alone, [source layers]


class Solver(Centred):
    """Maps of keys or of values in one direction.

    sources  places of the features of each source layer, [1 or 2, width] (PairLayout.sources)
    targets  columns of each target layer
    n_heads  of each target layer
    """

    def __init__(self, fit: Moments, heldout: Moments, sources: list[np.ndarray], targets: list[slice], n_heads: list[int]):
        super().__init__(fit, heldout)
        self.sources, self.targets, self.n_heads = sources, targets, n_heads
        self._cross = self.xy(TARGET)
        self._heldout_cross, self._heldout_squares = self.heldout_y(TARGET)
        self._spread = self.spread(TARGET)

    def features(self, layers: Sequence[int]) -> np.ndarray:
        """Places of the features of some source layers: of the row, layer by layer, then of the row before."""
        return np.concatenate([self.sources[il][i] for i in range(len(self.sources[0])) for il in layers])

    def _gram(self, features: np.ndarray) -> np.ndarray:
        return self.cov[np.ix_(features, features)]

    def weight(self, target: int, layers: Sequence[int], lam: float) -> np.ndarray:
        """W [d_out, d_in] of one target layer from some source layers."""
        features = self.features(layers)
        gram = self._gram(features)
        return _ridge(gram, lam * _scale(gram), self._cross[features, self.targets[target]], layers).T

    def head_r2(self, target: int, errors: np.ndarray) -> np.ndarray:
        """R^2 by head from squared errors by column [..., width] of one target layer."""
        heads = (*errors.shape[:-1], self.n_heads[target], -1)
        return 1 - errors.reshape(heads).sum(-1) / self._spread[self.targets[target]].reshape(heads[-2:]).sum(-1)

    def r2_grid(self, layers: Sequence[int], targets: Sequence[int], lambdas: Sequence[float]) -> np.ndarray:
        """Held-out R^2 of target layers from some source layers, averaged over heads: [lambdas, targets]."""
        features = self.features(layers)
        gram, heldout = self._gram(features), self.heldout_xx[np.ix_(features, features)]
        columns = np.concatenate([np.arange(s.start, s.stop) for s in (self.targets[t] for t in targets)])
        cross, heldout_cross = (m[np.ix_(features, columns)] for m in (self._cross, self._heldout_cross))
        ends = np.cumsum([self.targets[t].stop - self.targets[t].start for t in targets])[:-1]
        out = np.empty((len(lambdas), len(targets)))
        for i, lam in enumerate(lambdas):
            w = _ridge(gram, lam * _scale(gram), cross, layers)
            errors = self._heldout_squares[columns] - np.einsum("ij,ij->j", w, 2 * heldout_cross - heldout @ w)
            out[i] = [self.head_r2(t, e).mean() for t, e in zip(targets, np.split(errors, ends), strict=True)]
        return out

    #
    # source layers
    #

    def greedy(self, target: int, n: int, alpha: float) -> list[int]:
        """The first `n` source layers of forward selection: each adds most to the held-out R^2 with those before it.

        After each step what the chosen layer explains is taken out of the others, out of the target, and of the held-out
        sums likewise (block elimination), so that a step solves systems of one layer's width only.
        """
        columns = self.targets[target]
        gram, heldout = self.cov + alpha * np.eye(len(self.cov)), self.heldout_xx.copy()
        cross, heldout_cross = self._cross[:, columns].copy(), self._heldout_cross[:, columns].copy()
        errors, left, order = self._heldout_squares[columns], list(range(len(self.sources))), []

        def errors_with(il: int) -> tuple[np.ndarray, np.ndarray]:
            at = self.features([il])
            w = _ridge(gram[np.ix_(at, at)], 0.0, cross[at], [il])
            gain = np.einsum("ij,ij->j", w, 2 * heldout_cross[at] - heldout[np.ix_(at, at)] @ w)
            return errors - gain, w

        while len(order) < n:
            found = {il: errors_with(il) for il in left}
            best = max(left, key=lambda il: self.head_r2(target, found[il][0]).mean())
            errors, w = found[best]
            order.append(best)
            left.remove(best)
            at = self.features([best])
            p = _ridge(gram[np.ix_(at, at)], 0.0, gram[at], [best])  # how the chosen layer predicts every feature
            cross -= p.T @ cross[at]
            gram -= gram[:, at] @ p
            of_chosen = heldout[:, at] - p.T @ heldout[np.ix_(at, at)]  # held-out residuals with the chosen features
            heldout_cross += -p.T @ heldout_cross[at] - of_chosen @ w
            heldout += -p.T @ heldout[at] - of_chosen @ p
        return order

    def singles(self, lambdas: Sequence[float]) -> np.ndarray:
        """Held-out R^2 from each source layer alone, averaged over heads: [source layers, lambdas, target layers]."""
        return np.stack([self.r2_grid([il], range(len(self.targets)), lambdas) for il in range(len(self.sources))])

    def choose(
        self, ks: Sequence[int], lambdas: Sequence[float], select: str = "r2", report: Callable[[], None] = lambda: None
    ) -> list[Choice]:
        """For each target layer the source layers, of which numbers `ks` are tried (ascending), and the penalty.

        `report` is called once for each of them and target layer.
        """
        n, all_targets = len(self.sources), range(len(self.targets))
        grids = self.singles(lambdas)
        single = grids.max(1).T
        n_ordered = max((k for k in ks if k < n), default=0)
        orders = []
        for t in all_targets:
            if select == "greedy":
                lam = lambdas[int(np.argmax(grids[:, :, t].max(0)))]
                order = self.greedy(t, n_ordered, lam * _scale(self.cov))
            else:
                order = list(np.argsort(-single[t], kind="stable")[:n_ordered])
            orders.append(order)
        r2 = np.empty((len(ks), len(lambdas), len(self.targets)))
        for i, k in enumerate(ks):
            groups = defaultdict(list)  # target layers with the same sources share a factorisation
            for t in all_targets:
                groups[tuple(sorted(int(il) for il in orders[t][:k]) if k < n else range(n))].append(t)
            for layers, targets in groups.items():
                r2[i][:, targets] = self.r2_grid(layers, targets, lambdas)
                for _ in targets:
                    report()
        out = []
        for t in all_targets:
            i, j = np.unravel_index(np.argmax(r2[:, :, t]), r2.shape[:2])
            layers = sorted(int(il) for il in orders[t][: ks[i]]) if ks[i] < n else list(range(n))
            out.append(Choice(layers, lambdas[j], r2[:, :, t].max(1), single[t]))
        return out


def _scale(gram: np.ndarray) -> float:
    """alpha of lambda = 1."""
    return float(np.trace(gram)) / len(gram)


def _ridge(gram: np.ndarray, alpha: float, cross: np.ndarray, layers: Sequence[int]) -> np.ndarray:
    """(gram + alpha I)^-1 cross, [d_in, d_out]. Raises StatisticsError naming the source layers when there is no inverse."""
    damped = gram.copy()
    damped[np.diag_indices_from(damped)] += alpha
    try:
        factor = scipy.linalg.cho_factor(damped, lower=True, overwrite_a=True)
        pivots = np.diag(factor[0]) ** 2
        if pivots.min() > RANK_TOLERANCE * pivots.max():
            return scipy.linalg.cho_solve(factor, cross)
    except np.linalg.LinAlgError:
        pass
    names = ", ".join(map(str, layers))
    raise StatisticsError(f"source layers {names}: their features depend on each other; take a larger lambda")


#
# what can be solved
#


def n_features(sources: list[np.ndarray], k: int) -> int:
    """Features of the k widest source layers."""
    return sum(sorted((s.size for s in sources), reverse=True)[:k])


def numbers_of_layers(ks: Sequence[int], sources: list[np.ndarray], n_rows: int) -> list[int]:
    """Of `ks` (ALL_LAYERS: all) those that there are layers for, and rows: twice as many as features. Ascending."""
    n = len(sources)
    return sorted({k or n for k in ks if (k or n) <= n and 2 * n_features(sources, k or n) <= n_rows})


def check(fit: Moments, heldout: Moments, layout: PairLayout, n_heads: list[int], ks: Sequence[int]) -> None:
    """Refuse sums from which no trustworthy mapper follows; see also sums.check_fit().

    Raises StatisticsError naming the model and layer whose keys or values are too few, never vary or repeat themselves.
    """
    direction, what = fit.split, NAMES[layout.family]
    sources = layout.sources(direction)
    try:
        for il, at in enumerate(sources):
            blocks = [m.block(il, at.ravel()) for m in (fit, heldout)]
            check_fit(*blocks)
            Ridge(*blocks).check_rank()
    except StatisticsError as e:
        raise StatisticsError(f"{what} of the source: {e}") from None
    if not numbers_of_layers(ks, sources, fit.n):
        k = min(k or len(sources) for k in ks)
        need = 2 * n_features(sources, k)
        raise StatisticsError(
            f"{what} of the source: expected at least {need} rows to fit (twice the features of {k} layers), found {fit.n}"
        )
    for il, columns in enumerate(layout.targets(direction)):
        for h, heads in enumerate(np.split(np.arange(columns.start, columns.stop), n_heads[il])):
            check_varies(fit, heldout, TARGET, heads, f"{what} of the target: layer {il}: head {h}")
