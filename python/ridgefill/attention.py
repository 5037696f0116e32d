"""Attention of one layer of a GGUF, from its input rows: queries, head norms, rotation, and the output with given K and V.

Written for scoring maps: what the model's own queries read from predicted keys and values. Same order of rows and heads as
in projections.py; NumPy float32, positions count from the start of the rows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from .errors import RidgefillError
from .model_file import ModelFile
from .projections import Projections, rms_normalise

# Files of these hold the two numbers of a rotated pair side by side, those of the others half the rotated width apart.
_PAIRS_ADJACENT = ("llama", "mistral3", "nanbeige")


@dataclass(frozen=True)
class Rotation:
    """Rotary positions (arXiv 2104.09864), with linear or YaRN scaling (arXiv 2309.00071).

    frequency  radians per position of each pair, float64 [n_rot / 2]
    gain       factor on the rotated numbers, other than 1 under YaRN
    adjacent   whether pairs are side by side
    """

    frequency: np.ndarray
    gain: float
    adjacent: bool

    def __call__(self, y: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """y [n, heads, head] turned by its positions [n]; dimensions from n_rot on stay as they are."""
        n_rot = 2 * len(self.frequency)
        angle = positions[:, None] * self.frequency
        cos, sin = ((self.gain * f(angle))[:, None, :].astype(np.float32) for f in (np.cos, np.sin))
        half = n_rot // 2
        a, b = (slice(0, n_rot, 2), slice(1, n_rot, 2)) if self.adjacent else (slice(0, half), slice(half, n_rot))
        out = y.copy()
        out[..., a] = y[..., a] * cos - y[..., b] * sin
        out[..., b] = y[..., a] * sin + y[..., b] * cos
        return out


@dataclass(frozen=True)
class Rope:
    """What a model file says of its rotary positions, where it says nothing the library's defaults.

    n_rot       rotated numbers of each head, the first ones
    base        of the frequencies
    scaling     "none", "linear", "yarn" or another type that the library knows
    factor      by which the context was stretched, 1 without scaling
    gain        on the rotated numbers, besides YaRN's own
    beta_fast, beta_slow   turns within the original context between which YaRN blends
    log_mul     YaRN's multiplier of the logarithm, 0: none
    n_ctx_orig  original context, tokens
    adjacent    whether rotated pairs are side by side, else half of n_rot apart
    factors     divisors of the frequencies, float32 [n_rot / 2], or None
    """

    n_rot: int
    base: float
    scaling: str
    factor: float
    gain: float
    beta_fast: float
    beta_slow: float
    log_mul: float
    n_ctx_orig: int
    adjacent: bool
    factors: np.ndarray | None

    def rotation(self) -> Rotation:
        """As the library applies it to a context no longer than in training."""
        i = np.arange(self.n_rot // 2)
        free = self.base ** (-2.0 * i / self.n_rot) / (1.0 if self.factors is None else self.factors)
        if self.scaling != "yarn":
            return Rotation(free / self.factor, self.gain, self.adjacent)

        def pair_that_turns(n: float) -> float:  # n times within the original context
            return self.n_rot * np.log(self.n_ctx_orig / (n * 2 * np.pi)) / (2 * np.log(self.base))

        low, high = max(0.0, np.floor(pair_that_turns(self.beta_fast))), min(self.n_rot - 1.0, np.ceil(pair_that_turns(self.beta_slow)))
        keep = 1 - np.clip((i - low) / max(0.001, high - low), 0, 1)  # fast pairs keep their frequency
        gain = self.gain * _yarn_gain(self.factor, 1.0) / (_yarn_gain(self.factor, self.log_mul) if self.log_mul else 1.0)
        return Rotation(free * (keep + (1 - keep) / self.factor), gain, self.adjacent)


def check_one_dimension(file: ModelFile) -> None:
    """Raises RidgefillError for positions in more than one dimension (M-RoPE)."""
    key = f"{file.get('general.architecture')}.rope.dimension_sections"
    if any(found := file.get(key, [])):
        raise RidgefillError(f"{key}: expected positions in one dimension, found M-RoPE with {found}")


def rope(file: ModelFile, arch: str, head: int) -> Rope:
    """Of a model file whose heads are `head` wide.

    Raises RidgefillError for positions in more than one dimension (M-RoPE).
    """

    def get(key: str, default=None):
        return file.get(f"{arch}.rope.{key}", default)

    check_one_dimension(file)
    scaling = get("scaling.type", "linear")
    own = arch == "mistral3"  # the only one of which the library reads these
    factors = (file.tensor(name) for name in ("rope_freqs.weight", "rope_factors_short.weight"))
    return Rope(
        n_rot=int(get("dimension_count", head)),
        base=float(get("freq_base", 10000.0)),
        scaling=scaling,
        factor=float((get("scaling.factor", 0.0) or get("scale_linear", 0.0) or 1.0) if scaling != "none" else 1.0),
        gain=float(get("scaling.attn_factor", 1.0)),
        beta_fast=float(get("scaling.yarn_beta_fast", 32.0) if own else 32.0),
        beta_slow=float(get("scaling.yarn_beta_slow", 1.0) if own else 1.0),
        log_mul=float(get("scaling.yarn_log_multiplier", 0.0) if own else 0.0),
        n_ctx_orig=int(get("scaling.original_context_length", file.get(f"{arch}.context_length", 0))),
        adjacent=arch in _PAIRS_ADJACENT,
        factors=next((f for f in factors if f is not None), None),
    )


def _yarn_gain(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * np.log(factor) + 1


class Attention(Projections):
    """The attention layers of a model file; errors as for Projections."""

    def __init__(self, path: str | os.PathLike):
        super().__init__(path)
        self.rope = rope(self._file, self.arch, self._head_k)
        self.rotation = self.rope.rotation()
        self._temperature = self._file.get(f"{self.arch}.attention.temperature_scale", 0.0) if self.arch == "mistral3" else 0.0
        self._norms: dict[str, np.ndarray | None] = {}
        self._extra: dict[int, dict[str, np.ndarray | None]] = {}

    def _tensors(self, il: int) -> dict[str, np.ndarray | None]:
        """Of layer `il` besides its K and V: "q" and its "q_bias", and "o". Read once."""
        block = il % self._n_blocks
        if block not in self._extra:
            prefix, n_kv = f"blk.{block}.", sum(self.widths(block))
            fused = f"{prefix}attn_qkv.weight" in self._file.tensors
            q = self._scaled(f"{prefix}attn_qkv")[:-n_kv] if fused else self._scaled(f"{prefix}attn_q")
            self._extra[block] = {
                "q": np.ascontiguousarray(q),
                "q_bias": self._q_bias(prefix, n_kv, fused),
                "o": self._scaled(f"{prefix}attn_output"),
            }
        return self._extra[block]

    def check(self, il: int) -> None:
        """Raises RidgefillError naming a tensor of layer `il` of a type that gguf-py cannot read; loads none."""
        for name in self._file.tensors:
            if name.startswith(f"blk.{il % self._n_blocks}.attn_"):
                self._file.tensor(name, slice(1))

    def n_heads(self, il: int) -> int:
        """Heads of Q of layer `il`."""
        return self._n_heads[il % self._n_blocks]

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Of K and of V."""
        return self._head_k, self._head_v

    def keys_values(self, il: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """K after head norms and before rotation, and V, [n, width] of inputs x [n, d] of layer `il`."""
        n_k, _ = self.widths(il)
        kv = self.project(il, x)
        return self.head_norm(il, "k", kv[:, :n_k]), kv[:, n_k:]

    def n_kv_heads(self, il: int) -> int:
        """Heads of K and V of layer `il`."""
        return self._n_kv_heads[il % self._n_blocks]

    def weight_bytes(self, il: int) -> int:
        """Memory that the tensors of layer `il` take once they are read, those of Projections included."""
        n_k, n_v = self.widths(il)
        n_q = self.n_heads(il) * self._head_k
        return 4 * self.n_embd * (2 * n_q + n_k + n_v)

    def _q_bias(self, prefix: str, n_kv: int, fused: bool) -> np.ndarray | None:
        if fused and (bias := self._file.tensor(f"{prefix}attn_qkv.bias")) is not None:
            return bias[:-n_kv]
        q, k, v = (self._file.tensor(f"{prefix}attn_{which}.bias") for which in "qkv")
        return None if fused and (k is None or v is None) else q  # a fused matrix takes all three or none

    def head_norm(self, il: int, which: str, y: np.ndarray) -> np.ndarray:
        """Q ("q") or K ("k") [n, width] after the norm over each head, or over all of them, that some models have."""
        name = f"blk.{il % self._n_blocks}.attn_{which}_norm.weight"
        if name not in self._norms:
            self._norms[name] = self._file.tensor(name)
        if (weight := self._norms[name]) is None:
            return y
        return (rms_normalise(y.reshape(-1, len(weight)), self.eps) * weight).reshape(y.shape)

    def queries(self, il: int, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Q [n, n_head, head] of inputs x [n, d] at `positions`, normed and rotated."""
        t = self._tensors(il)
        q = (rms_normalise(x, self.eps) * self.layer(il).norm) @ t["q"].T
        q = self.head_norm(il, "q", q if t["q_bias"] is None else q + t["q_bias"])
        q = self.rotation(q.reshape(len(x), -1, self._head_k), positions)
        if self._temperature:
            grown = np.log(np.floor(positions / self.rope.n_ctx_orig) + 1) * self._temperature + 1
            q *= grown.astype(np.float32)[:, None, None]
        return q

    def keys(self, il: int, k: np.ndarray) -> np.ndarray:
        """K [n, n_head_kv, head] as a cache holds it, of normed rows [n, width] at positions 0..n-1."""
        return self.rotation(k.reshape(len(k), -1, self._head_k), np.arange(len(k)))

    def weights(self, q: np.ndarray, positions: np.ndarray, k: np.ndarray) -> np.ndarray:
        """Attention [n_head_kv, heads of Q for each, n, m] of queries [n, n_head, head] at `positions` to keys [m, n_head_kv, head].

        q of queries(), k of keys() or of a cache. Row m is seen from position m on.
        """
        n, n_head, _ = q.shape
        n_kv = k.shape[1]
        q = q.reshape(n, n_kv, n_head // n_kv, self._head_k)  # consecutive queries share a head of K
        logits = np.einsum("nghd,mgd->ghnm", q, k, optimize=True) / np.float32(np.sqrt(self._head_k))
        logits[..., np.arange(len(k))[None, :] > positions[:, None]] = -np.inf
        logits -= logits.max(-1, keepdims=True)
        weight = np.exp(logits, out=logits)
        weight /= weight.sum(-1, keepdims=True)
        return weight

    @staticmethod
    def mixed(weight: np.ndarray, v: np.ndarray) -> np.ndarray:
        """What each head reads, [n, n_head, head], with attention of weights() to rows v [m, width]."""
        n_kv, group, n, m = weight.shape
        return np.einsum("ghnm,mgd->nghd", weight, v.reshape(m, n_kv, -1), optimize=True).reshape(n, n_kv * group, -1)

    def output(self, il: int, q: np.ndarray, positions: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """What attention adds to the residual stream, [n, d] without a bias, for queries at `positions`.

        q, k of queries() and keys(), v [m, width]; see weights().
        """
        return self.mixed(self.weights(q, positions, k), v).reshape(len(q), -1) @ self._tensors(il)["o"].T
