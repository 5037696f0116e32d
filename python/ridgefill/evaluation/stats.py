"""Intervals and tests. All of them are scipy's; this module fixes the choices and refuses what cannot be computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from .errors import EvaluationError, finite

N_RESAMPLES = 10_000
SEED = 20_261_109
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval over n items."""

    value: float
    low: float
    high: float
    n: int

    def as_dict(self) -> dict:
        return dataclasses.asdict(self)


def mean(values: Sequence[float], what: str = "mean") -> Estimate:
    """Mean of one value per document, BCa bootstrap interval (Efron 1987) over documents.

    Raises EvaluationError for fewer than two values or one that is not finite.
    """
    return _bootstrap((finite(values, what),), lambda x, axis=-1: np.mean(x, axis=axis), what)


def mean_difference(a: Sequence[float], b: Sequence[float], what: str = "difference") -> Estimate:
    """Mean of a - b, paired: a[i] and b[i] are of the same document. Interval as mean()."""
    a, b = _paired(a, b, what)
    return mean(a - b, what)


def ratio(a: Sequence[float], b: Sequence[float], what: str = "ratio") -> Estimate:
    """mean(a) / mean(b), paired. Interval as mean(), documents drawn in pairs."""
    a, b = _paired(a, b, what)
    return _bootstrap((a, b), lambda x, y, axis=-1: np.mean(x, axis=axis) / np.mean(y, axis=axis), what)


def pooled_difference(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]], statistic: Callable[[np.ndarray], float], what: str = "difference"
) -> Estimate:
    """statistic(all values of a) - statistic(all values of b), where a[i] and b[i] hold the values of group i.

    Percentile bootstrap over groups, drawn in pairs: values of one group are not independent. Raises EvaluationError for
    fewer than two groups, an empty one, or a value that is not finite.
    """
    if len(a) != len(b) or len(a) < 2 or not all(map(len, (*a, *b))):
        raise EvaluationError(f"{what}: expected two lists of as many groups, 2 or more, none empty, found {len(a)} and {len(b)}")
    a, b = ([finite(group, what) for group in side] for side in (a, b))

    def difference(groups: np.ndarray) -> float:
        return float(statistic(np.concatenate([a[i] for i in groups])) - statistic(np.concatenate([b[i] for i in groups])))

    groups = np.arange(len(a))
    found = stats.bootstrap(
        (groups,),
        difference,
        vectorized=False,
        n_resamples=N_RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return Estimate(difference(groups), float(found.low), float(found.high), len(a))


def _paired(a, b, what: str) -> tuple[np.ndarray, np.ndarray]:
    a, b = finite(a, what), finite(b, what)
    if a.shape != b.shape or a.ndim != 1:
        raise EvaluationError(f"{what}: expected two lists of equal length, found shapes {a.shape} and {b.shape}")
    return a, b


def _bootstrap(samples: tuple[np.ndarray, ...], statistic, what: str) -> Estimate:
    n = len(samples[0])
    if n < 2:
        raise EvaluationError(f"{what}: expected at least 2 documents, found {n}")
    value = float(finite(statistic(*samples), what))
    without_one = [float(statistic(*(np.delete(s, i) for s in samples))) for i in range(n)]
    if np.ptp(without_one) <= 1e-12 * abs(value):
        return Estimate(value, value, value, n)  # BCa is undefined where every resample has the same value
    found = stats.bootstrap(
        samples,
        statistic,
        paired=len(samples) > 1,
        vectorized=True,
        n_resamples=N_RESAMPLES,
        confidence_level=LEVEL,
        method="BCa",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    low, high = finite([found.low, found.high], f"interval of {what}")
    return Estimate(value, float(low), float(high), n)


def share(hits: int, n: int, what: str = "share") -> Estimate:
    """hits / n with its Wilson interval (1927).

    Raises EvaluationError unless 0 <= hits <= n and n > 0.
    """
    if not (n > 0 and 0 <= hits <= n):
        raise EvaluationError(f"{what}: expected 0 <= hits <= n and n > 0, found {hits} of {n}")
    found = stats.binomtest(int(hits), int(n)).proportion_ci(LEVEL, method="wilson")
    return Estimate(hits / n, float(found.low), float(found.high), n)


@dataclasses.dataclass(frozen=True)
class McNemar:
    """Pairs where one arm alone answers, and the exact two-sided p of their being equally many."""

    only_a: int
    only_b: int
    p: float


def mcnemar(a: Sequence[bool], b: Sequence[bool], what: str = "pairs") -> McNemar:
    """McNemar's exact test of paired hits: the discordant pairs against a fair coin; p = 1 where there are none."""
    x, y = (np.asarray(v) for v in (a, b))
    if x.dtype != bool or y.dtype != bool or x.shape != y.shape or x.ndim != 1 or not len(x):
        raise EvaluationError(
            f"{what}: expected two lists of hits of equal length, found {x.dtype} {x.shape} and {y.dtype} {y.shape}"
        )
    only_a, only_b = int((x & ~y).sum()), int((~x & y).sum())
    n = only_a + only_b
    return McNemar(only_a, only_b, float(stats.binomtest(only_a, n).pvalue) if n else 1.0)
