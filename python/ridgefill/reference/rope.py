"""Rotary positions (RoFormer, arXiv 2104.09864) with linear and YaRN scaling (arXiv 2309.00071)."""

from __future__ import annotations

import numpy as np

from .weights import ADJACENT, Hparams


def angles(h: Hparams, positions: np.ndarray, factors=1.0) -> tuple[np.ndarray, float]:
    """Rotation angles and the gain of the rotated vectors.

    positions  [n] positions of the rows
    factors    [n_rot / 2] divisors of the frequencies that some files bring along, or 1

    Returns ([n, n_rot / 2] radians, gain). The gain differs from 1 under YaRN alone.
    """
    i = np.arange(h.n_rot // 2)
    free = positions[:, None] * h.theta ** (-2.0 * i / h.n_rot)[None, :] / factors
    if h.rope_scaling == "none":
        return free, h.rope_attn_factor
    squeezed = free / h.rope_factor
    if h.rope_scaling == "linear":
        return squeezed, h.rope_attn_factor

    def turns_at(n_turns: float) -> float:
        """The dimension pair that turns n_turns times within the original context."""
        return h.n_rot * np.log(h.n_ctx_orig / (n_turns * 2 * np.pi)) / (2 * np.log(h.theta))

    low = max(0.0, np.floor(turns_at(h.beta_fast)))
    high = min(h.n_rot - 1.0, np.ceil(turns_at(h.beta_slow)))
    keep = 1.0 - np.clip((i - low) / max(0.001, high - low), 0.0, 1.0)
    # fast pairs keep their own frequency, slow ones are squeezed
    return squeezed * (1 - keep) + free * keep, h.rope_attn_factor * _yarn_gain(h)


def _yarn_gain(h: Hparams) -> float:
    def m(scale: float) -> float:
        return 1.0 if h.rope_factor <= 1.0 else 0.1 * scale * np.log(h.rope_factor) + 1.0

    return m(1.0) / m(h.rope_log_mul) if h.rope_log_mul else m(1.0)


def rotate(h: Hparams, x: np.ndarray, positions: np.ndarray, factors=1.0) -> np.ndarray:
    """x [n, heads, head] turned by its positions [n]; pairs as the architecture stores them."""
    theta, gain = angles(h, positions, factors)
    return _turn(h, x, theta, gain)


def unrotate(h: Hparams, x: np.ndarray, positions: np.ndarray, factors=1.0) -> np.ndarray:
    """The inverse of rotate()."""
    theta, gain = angles(h, positions, factors)
    return _turn(h, x, -theta, 1 / gain)


def _turn(h: Hparams, x: np.ndarray, theta: np.ndarray, gain: float) -> np.ndarray:
    cos, sin = (f(theta)[:, None, :] * gain for f in (np.cos, np.sin))
    n, half = h.n_rot, h.n_rot // 2  # numbers from n on are not rotated
    a, b = (slice(0, n, 2), slice(1, n, 2)) if h.pairs == ADJACENT else (slice(0, half), slice(half, n))
    out = x.copy()
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., a] * sin + x[..., b] * cos
    return out
