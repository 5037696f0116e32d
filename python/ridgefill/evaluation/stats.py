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

    return _percentile(difference, len(a))


def median_ratio(a: Sequence[float], b: Sequence[float], what: str = "ratio") -> Estimate:
    """median(a) / median(b), paired: for times, of which a few are far off. Percentile bootstrap over pairs.

    Raises EvaluationError for fewer than two pairs, lists of unequal length, or a value that is not finite.
    """
    a, b = _paired(a, b, what)
    if len(a) < 2:
        raise EvaluationError(f"{what}: expected 2 pairs or more, found {len(a)}")
    return _percentile(lambda pairs: float(np.median(a[pairs]) / np.median(b[pairs])), len(a))


def _percentile(statistic: Callable[[np.ndarray], float], n: int) -> Estimate:
    """Of the items whose indices it is given, n of them."""
    items = np.arange(n)
    found = stats.bootstrap(
        (items,),
        statistic,
        vectorized=False,
        n_resamples=N_RESAMPLES,
        confidence_level=LEVEL,
        method="percentile",
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return Estimate(statistic(items), float(found.low), float(found.high), n)


def _paired(a, b, what: str) -> tuple[np.ndarray, np.ndarray]:
    a, b = finite(a, what), finite(b, what)
    if a.shape != b.shape or a.ndim != 1:
        raise EvaluationError(f"{what}: expected two lists of equal length, found shapes {a.shape} and {b.shape}")
    return a, b


def _hits(a, b, what: str) -> tuple[np.ndarray, np.ndarray]:
    x, y = (np.asarray(v) for v in (a, b))
    if x.dtype != bool or y.dtype != bool or x.shape != y.shape or x.ndim != 1 or not len(x):
        raise EvaluationError(
            f"{what}: expected two lists of hits of equal length, found {x.dtype} {x.shape} and {y.dtype} {y.shape}"
        )
    return x, y


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
    x, y = _hits(a, b, what)
    only_a, only_b = int((x & ~y).sum()), int((~x & y).sum())
    n = only_a + only_b
    return McNemar(only_a, only_b, float(stats.binomtest(only_a, n).pvalue) if n else 1.0)


def share_difference(a: Sequence[bool], b: Sequence[bool], what: str = "pairs") -> Estimate:
    """Share of hits of a less that of b, on the same items, with Newcombe's interval (1998, his method 10 for paired samples).

    It stays wide where every pair agrees: a few items that all hit show little, and a bootstrap of them would not tell.
    """
    x, y = _hits(a, b, what)
    both, neither, only_a, only_b = (x & y).sum(), (~x & ~y).sum(), (x & ~y).sum(), (~x & y).sum()
    n, ours, theirs = len(x), share(x.sum(), len(x), what), share(y.sum(), len(y), what)
    margins = (both + only_a) * (both + only_b) * (neither + only_a) * (neither + only_b)
    lead = both * neither - only_a * only_b
    phi = (max(lead - n / 2, 0) if lead > 0 else lead) / np.sqrt(margins) if margins else 0.0

    def reach(up: float, down: float) -> float:
        return float(np.sqrt(max(up * up - 2 * phi * up * down + down * down, 0.0)))

    value = ours.value - theirs.value
    low = value - reach(ours.value - ours.low, theirs.high - theirs.value)
    high = value + reach(ours.high - ours.value, theirs.value - theirs.low)
    return Estimate(value, low, high, n)


def paired_p(a: Sequence[float], b: Sequence[float], what: str = "difference") -> float:
    """Two-sided p of mean(a - b) = 0 by exchanging a and b within documents: every way of it up to 13 documents, else
    N_RESAMPLES random ones.
    """
    a, b = _paired(a, b, what)
    found = stats.permutation_test(
        (a, b),
        lambda x, y, axis=-1: np.mean(x - y, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=N_RESAMPLES,
        rng=np.random.default_rng(SEED),
    )
    return float(finite(found.pvalue, what))


def holm(p: Sequence[float], what: str = "p") -> list[float]:
    """Adjusted p-values of one family of comparisons (Holm 1979), in the order given."""
    p = finite(p, what)
    if p.min() < 0 or p.max() > 1:
        raise EvaluationError(f"{what}: expected p-values from 0 to 1, found {p.min()} to {p.max()}")
    order = np.argsort(p, kind="stable")
    stepped = np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1))
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted.tolist()


def verdict(difference: Estimate, margin: float) -> str:
    """What an interval says of a margin that was fixed before: equal (all of it within), apart (all of it beyond) or open."""
    if not margin > 0:
        raise EvaluationError(f"margin: expected a number above 0, found {margin}")
    if -margin < difference.low and difference.high < margin:
        return "equal"
    return "apart" if difference.low > margin or difference.high < -margin else "open"
