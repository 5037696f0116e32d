"""What stops an evaluation."""

from __future__ import annotations

import numpy as np

from ..errors import RidgefillError


class EvaluationError(RidgefillError):
    """An evaluation that cannot be trusted: a value is missing or not finite, an item breaks its own rules."""

    exit_code = 14


def finite(values, what: str) -> np.ndarray:
    """`values` as float64. Raises EvaluationError where there are none or one is not finite, naming `what`."""
    a = np.asarray(values, dtype=np.float64)
    if a.size == 0:
        raise EvaluationError(f"{what}: expected at least one value, found none")
    bad = np.flatnonzero(~np.isfinite(a))
    if len(bad):
        raise EvaluationError(f"{what}: expected finite values, found {a.ravel()[bad[0]]} at index {bad[0]} of {a.size}")
    return a
