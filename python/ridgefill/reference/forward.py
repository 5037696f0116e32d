"""The forward pass of the oracle: all rows at once, layer by layer, float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .fill import NOFILL, Fill, features
from .rope import rotate
from .weights import Weights


@dataclasses.dataclass(frozen=True)
class Result:
    """k, v    one [n, n_head_kv, head] per layer, as a cache holds them: K after norm and rotation. In mode nofill the
               rows that a layer does not hold are NaN
    x          one [n, d] per layer: its input, true or predicted (NaN where there is none: mode nofill, and maps of K and V)
    rows       [m] rows that ran every layer, ascending
    logits     [m, n_vocab] of those rows
    """

    k: list[np.ndarray]
    v: list[np.ndarray]
    x: list[np.ndarray]
    rows: np.ndarray
    logits: np.ndarray


def forward(weights: Weights, tokens: Sequence[int], fill: Fill = Fill()) -> Result:
    """Run a prompt at positions 0..n-1.

    The order in which an engine visits the rows does not matter: a row reads the cache entries of the rows before it,
    and these hold the filled values before any exact row runs an upper layer.
    """
    h = weights.hparams
    n = len(tokens)
    filled = fill.filled(n)
    live = np.arange(n)  # rows that run the layer at hand
    x = weights["token_embd.weight"][np.asarray(tokens)]
    x_split = None
    ks, vs, xs = [], [], []
    for il in range(h.n_layer):
        visible = np.ones(n, dtype=bool)
        inputs, predicted = x, None
        if filled.any() and il >= fill.split:
            if il == fill.split:
                x_split, live, x = x, np.flatnonzero(~filled), x[~filled]
            inputs = np.empty_like(x_split)
            inputs[live] = x
            if fill.mode == NOFILL:
                visible = ~filled
                inputs[filled] = np.nan
            elif fill.predicts_kv and il > fill.split:
                inputs[filled] = np.nan
                predicted = fill.maps(il, features(fill.kind, x_split, h.eps)[filled])
            else:
                inputs[filled] = fill.predict(il, x_split[filled])
        x, k, v = _layer(weights, il, x, inputs, live, visible, filled, predicted)
        ks.append(k)
        vs.append(v)
        xs.append(inputs)
    x = rms_norm(x, weights["output_norm.weight"], h.eps)
    head = weights["output.weight" if "output.weight" in weights else "token_embd.weight"]
    return Result(ks, vs, xs, live, x @ head.T)


def _layer(w: Weights, il: int, x, inputs, live, visible, filled, predicted):
    """One block.

    x [m, d] states of the live rows; inputs [n, d] what K and V of all rows come from, but for those of the `filled` rows
    where maps predicted them: predicted [n_filled, K width + V width], before norm and rotation.

    Returns (x after the block [m, d], K [n, n_head_kv, head], V of the same shape).
    """
    h = w.hparams
    norm = w.layer(il, "attn_norm.weight")
    z = rms_norm(inputs, norm, h.eps)
    k, v = (_linear(w, il, which, z, h.n_head_kv) for which in "kv")
    if predicted is not None:
        k[filled], v[filled] = np.split(predicted.reshape(len(predicted), 2 * h.n_head_kv, h.head), 2, axis=1)
    k = _turned(w, il, "k", k, np.arange(len(inputs)))
    q = _turned(w, il, "q", _linear(w, il, "q", rms_norm(x, norm, h.eps), h.n_head), live)
    mixed = _attend(h, q, k, v, live, visible)
    x = x + mixed @ w.layer(il, "attn_output.weight").T + w.layer_or(il, "attn_output.bias", 0.0)
    return x + _feed_forward(w, il, rms_norm(x, w.layer(il, "ffn_norm.weight"), h.eps)), k, v


def _linear(w: Weights, il: int, which: str, z: np.ndarray, heads: int) -> np.ndarray:
    """Q, K or V [n, heads, head] of normalised rows z [n, d], with its bias."""
    y = z @ w.layer(il, f"attn_{which}.weight").T + w.layer_or(il, f"attn_{which}.bias", 0.0)
    return y.reshape(len(z), heads, w.hparams.head)


def _turned(w: Weights, il: int, which: str, y: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Q or K [n, heads, head] after the head norm and the rotation that the file has."""
    h = w.hparams
    norm = w.layer_or(il, f"attn_{which}_norm.weight", None)
    if norm is not None:
        y = rms_norm(y, norm, h.eps)
    # one shared table in the files that have it
    factors = w["rope_freqs.weight"] if "rope_freqs.weight" in w else 1.0
    y = rotate(h, y, positions.astype(np.float64), factors)
    if which == "q" and h.temperature_scale:
        y = y * (np.log(np.floor(positions / h.n_ctx_orig) + 1) * h.temperature_scale + 1)[:, None, None]
    return y


def _attend(h, q: np.ndarray, k: np.ndarray, v: np.ndarray, live: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Causal attention of the live rows over the visible ones. q [m, n_head, head] -> [m, n_head * head]."""
    columns = np.flatnonzero(visible)
    hidden = columns[None, :] > live[:, None]
    out = np.empty_like(q)
    for i in range(h.n_head):
        j = i // (h.n_head // h.n_head_kv)
        scores = (q[:, i] @ k[columns, j].T) * h.attention_scale
        out[:, i] = softmax(np.where(hidden, -np.inf, scores)) @ v[columns, j]
    return out.reshape(len(q), -1)


def _feed_forward(w: Weights, il: int, z: np.ndarray) -> np.ndarray:
    """Gated unit of rows z [m, d]; with experts, the best few per row, their softmax weights scaled to sum to 1."""
    h = w.hparams
    if not h.n_expert:
        return _gated(z, *(w.layer(il, f"ffn_{name}.weight") for name in ("gate", "up", "down")))
    weight = softmax(z @ w.layer(il, "ffn_gate_inp.weight").T)
    best = np.argsort(-weight, axis=1, kind="stable")[:, : h.n_expert_used]
    share = np.take_along_axis(weight, best, axis=1)
    share = share / share.sum(axis=1, keepdims=True)
    gate, up, down = (w.layer(il, f"ffn_{name}_exps.weight") for name in ("gate", "up", "down"))
    out = np.zeros_like(z)
    for e in range(h.n_expert):
        row, slot = np.nonzero(best == e)
        if len(row):
            out[row] += share[row, slot][:, None] * _gated(z[row], gate[e], up[e], down[e])
    return out


def _gated(z: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    g = z @ gate.T
    return (g / (1 + np.exp(-g)) * (z @ up.T)) @ down.T


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Root-mean-square norm (arXiv 1910.07467) over the last axis."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis; -inf entries get 0."""
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)
