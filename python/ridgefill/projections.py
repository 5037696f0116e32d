"""K and V projections of layer inputs, from the tensors of a GGUF: what the maps of kinds `kv` and `kv_prev` predict.

    [k_l ; v_l] = [W_K ; W_V] (rms_norm(x_l) * attn_norm) + biases,      before head norms and rotation

Rows of K stand in the order of the file, which for some architectures is permuted for the rotation: that is the order in
which the runtime computes them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from .errors import RidgefillError
from .model_file import ModelFile

# layers of all of these normalise their input by its root mean square, scale it by attn_norm and project it to Q, K and V
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3moe", "mistral3", "minimax-m2", "nanbeige")


def rms_normalise(x: np.ndarray, eps: float) -> np.ndarray:
    """Rows x [n, d] over their root mean square (arXiv 1910.07467, without weights), float32."""
    square = np.einsum("ij,ij->i", x, x, dtype=np.float64) / x.shape[1]
    return x * (1 / np.sqrt(square + eps)).astype(np.float32)[:, None]


@dataclass(frozen=True)
class Layer:
    """Projections of one layer. Output rows are K's, then V's."""

    norm: np.ndarray  # float32 [d]
    weight: np.ndarray  # float32 [n_k + n_v, d]
    bias: np.ndarray | None  # float32 [n_k + n_v]
    n_k: int  # width of K over all heads
    n_v: int


class Projections:
    """The K and V projections of a model file.

    `eps` is the model's epsilon of the root mean square, `n_embd` the width d of a layer's input.

    Raises RidgefillError for an architecture outside ARCHITECTURES, and for clamped projections.
    """

    def __init__(self, path: str | os.PathLike):
        self._file = ModelFile(os.fspath(path))
        arch = self._file.get("general.architecture")
        if arch not in ARCHITECTURES:
            raise RidgefillError(f"architecture: expected one of {', '.join(ARCHITECTURES)}, found {arch}")
        self.arch: str = arch
        self.eps = float(self._require(f"{arch}.attention.layer_norm_rms_epsilon"))
        self._n_blocks = int(self._require(f"{arch}.block_count"))
        clamp = f"{arch}.attention.clamp_kqv"
        if limit := self._file.get(clamp, 0.0):
            raise RidgefillError(f"{clamp}: expected projections that are not clamped, found a clamp at {limit}")
        n_head = self._require(f"{arch}.attention.head_count")
        n_head_kv = self._file.get(f"{arch}.attention.head_count_kv", n_head)
        self.n_embd = int(self._require(f"{arch}.embedding_length"))
        head = self.n_embd // (max(n_head) if isinstance(n_head, list) else n_head)
        self._n_heads, self._n_kv_heads = (n if isinstance(n, list) else [n] * self._n_blocks for n in (n_head, n_head_kv))
        self._head_k = self._file.get(f"{arch}.attention.key_length", head)
        self._head_v = self._file.get(f"{arch}.attention.value_length", head)
        self._layers: dict[int, Layer] = {}

    def _require(self, key: str):
        if (value := self._file.get(key)) is None:
            raise RidgefillError(f"expected key {key} in the model file, found none")
        return value

    def widths(self, il: int) -> tuple[int, int]:
        """Widths of K and of V of layer `il`, over all heads."""
        heads = self._n_kv_heads[il % self._n_blocks]
        return heads * self._head_k, heads * self._head_v

    def layer(self, il: int) -> Layer:
        """Tensors of layer `il`, read once. A model that loops over its blocks has more layers than blocks.

        Raises RidgefillError naming a tensor that is missing, of another shape, or of a type that gguf-py cannot read.
        """
        block = il % self._n_blocks
        if block not in self._layers:
            self._layers[block] = self._read(block)
        return self._layers[block]

    def _read(self, block: int) -> Layer:
        n_k, n_v = self.widths(block)
        prefix = f"blk.{block}."
        fused = f"{prefix}attn_qkv.weight" in self._file.tensors
        if fused:
            weight = self._scaled(f"{prefix}attn_qkv")[-(n_k + n_v) :]
        else:
            weight = np.concatenate([self._scaled(f"{prefix}attn_{which}") for which in "kv"])
        if len(weight) != n_k + n_v:
            raise RidgefillError(f"layer {block}: expected {n_k} rows of K and {n_v} of V, found {len(weight)} in all")
        norm = self._file.required(f"{prefix}attn_norm.weight")
        return Layer(norm, np.ascontiguousarray(weight), self._bias(prefix, n_k, n_v, fused), n_k, n_v)

    def _bias(self, prefix: str, n_k: int, n_v: int, fused: bool) -> np.ndarray | None:
        if fused and (bias := self._file.tensor(f"{prefix}attn_qkv.bias")) is not None:
            return bias[-(n_k + n_v) :]
        q, k, v = (self._file.tensor(f"{prefix}attn_{which}.bias") for which in "qkv")
        if (k is None and v is None) or (fused and any(b is None for b in (q, k, v))):  # a fused matrix takes all three or none
            return None
        return np.concatenate([np.zeros(n, np.float32) if b is None else b for b, n in ((k, n_k), (v, n_v))])

    def _scaled(self, name: str) -> np.ndarray:
        """A matrix times the scale that some quantised files keep beside it."""
        scale = self._file.tensor(f"{name}.scale")
        weight = self._file.required(f"{name}.weight")
        return weight if scale is None else weight * scale

    def project(self, il: int, x: np.ndarray) -> np.ndarray:
        """K and V [n, n_k + n_v], float32, of inputs x [n, d] of layer `il`."""
        layer = self.layer(il)
        out = (rms_normalise(x, self.eps) * layer.norm) @ layer.weight.T
        return out if layer.bias is None else out + layer.bias
