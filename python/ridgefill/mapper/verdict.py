"""What a mapper may be used for, judged by its scores.

A mapper is weak when keys or values are predicted no better than by their mean, or when attention regains by it less than half of
what it would lose by mean rows: (cosine - cosine_mean) / (1 - cosine_mean). These bounds are conventions, not measurements. A weak
mapper of enough text wants one that is not linear (`mlp`), one of too little is not to be used (`no`). One that is not weak is
good for `text`; whether facts are recalled through it does not follow from scores, so that `use` is not said of any.
"""

from __future__ import annotations

import numpy as np

from .models import PARTS
from .sidecar import Mapper, Scores, Verdict
from .sums import NAMES

MIN_SHARE = 0.5
MIN_ROWS_PER_FEATURE = 10  # with fewer, a weak mapper may be weak for want of text


def share_read(scores: Scores) -> np.ndarray:
    """Of each target layer, what attention reads beyond what mean rows give: 1 for true rows, 0 for mean rows."""
    return np.array([((c - m) / (1 - m)).mean() for c, m in zip(scores.cosine, scores.cosine_mean, strict=True)])


def rows_per_feature(mapper: Mapper, part: str) -> np.ndarray:
    """Fitted rows for each feature, by target layer."""
    return mapper.calibration.n_tokens / np.array([mapper.d_in(part, il) for il in range(mapper.target.n_layer)])


def verdict(mapper: Mapper) -> Verdict:
    """Of a mapper that has scores."""
    scores, share = mapper.scores, share_read(mapper.scores)
    ratio = min(rows_per_feature(mapper, part).min() for part in PARTS)
    concentration = {part: np.concatenate(scores.concentration[part]).mean() for part in PARTS}
    found = []  # whether each is a fault, and what it says
    for part in PARTS:
        r2 = np.array([heads.mean() for heads in scores.r2[part]])
        found.append((r2.mean() <= 0, f"{NAMES[part]}: R^2 {_mean_and_worst(r2)}"))
    found.append((share.mean() < MIN_SHARE, f"attention regains of what it would lose by mean rows: {_mean_and_worst(share)}"))
    facts = [f"error where attention reads over mean error: {concentration['k']:.2f} of keys, {concentration['v']:.2f} of values"]
    if ratio < MIN_ROWS_PER_FEATURE:
        facts.append(f"fitted rows for each feature: {ratio:.1f} where they are fewest, fewer than {MIN_ROWS_PER_FEATURE}")
    faults = [said for is_fault, said in found if is_fault]
    facts = [said for is_fault, said in found if not is_fault] + facts
    if not faults:
        return Verdict("text", ["whether facts are recalled was not measured", *facts])
    return Verdict("no" if ratio < MIN_ROWS_PER_FEATURE else "mlp", [*faults, *facts])


def _mean_and_worst(by_layer: np.ndarray) -> str:
    worst = int(by_layer.argmin())
    return f"{by_layer.mean():.2f} on average, {by_layer[worst]:.2f} in layer {worst}, the worst"
