"""Hyper-parameters and tensors of a GGUF, dequantised, as the oracle reads them."""

from __future__ import annotations

import dataclasses
import os

import gguf
import numpy as np

# The two ways of pairing the dimensions of a head for the rotation. Files of the first kind hold rotated pairs side by
# side (their Q and K rows were permuted when the file was written), those of the second kind half a head apart.
ADJACENT, HALVES = "adjacent", "halves"
PAIRS = {"llama": ADJACENT, "mistral3": ADJACENT, "qwen2": HALVES, "qwen3": HALVES, "qwen3moe": HALVES}


class ReferenceError(ValueError):
    """A file that the oracle cannot run, with what was expected and what was found."""


@dataclasses.dataclass(frozen=True)
class Hparams:
    """Sizes of the model. Widths in floats; `theta` is the base of the rotation, which turns the first `n_rot` of each head."""

    arch: str
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    head: int
    n_rot: int
    eps: float
    theta: float
    pairs: str
    n_expert: int
    n_expert_used: int
    rope_scaling: str
    rope_factor: float
    rope_attn_factor: float
    rope_log_mul: float
    n_ctx_orig: int
    beta_fast: float
    beta_slow: float
    attention_scale: float
    temperature_scale: float


class Weights:
    """A model file opened for the oracle.

    path  a GGUF of architecture llama, mistral3, qwen2, qwen3 or qwen3moe, of any type gguf-py can dequantise

    Raises ReferenceError for another architecture or a feature that the oracle does not have.
    """

    def __init__(self, path: str | os.PathLike):
        reader = gguf.GGUFReader(str(path))
        self._tensors = {t.name: t for t in reader.tensors}
        self.hparams = _hparams(reader, self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> np.ndarray:
        """Tensor `name` in float64, row-major: [out, in] for a matrix, [experts, out, in] for stacked ones."""
        if name not in self._tensors:
            raise ReferenceError(f"tensor {name}: expected in the file, found none")
        t = self._tensors[name]
        return gguf.dequantize(t.data, t.tensor_type).astype(np.float64).reshape([int(n) for n in reversed(t.shape)])

    def layer(self, il: int, name: str) -> np.ndarray:
        """Tensor `blk.<il>.<name>`, as __getitem__."""
        return self[f"blk.{il}.{name}"]

    def layer_or(self, il: int, name: str, default):
        """Tensor `blk.<il>.<name>`, or `default` where the file has none."""
        key = f"blk.{il}.{name}"
        return self[key] if key in self else default


def _hparams(reader: gguf.GGUFReader, tensors) -> Hparams:
    def get(key: str, default=None):
        field = reader.fields.get(key)
        if field is None:
            if default is None:
                raise ReferenceError(f"key {key}: expected in the file, found none")
            return default
        return field.contents()

    arch = get("general.architecture")
    if arch not in PAIRS:
        raise ReferenceError(f"architecture: expected one of {', '.join(PAIRS)}, found {arch}")
    n_head = get(f"{arch}.attention.head_count")
    head = get(f"{arch}.attention.key_length", get(f"{arch}.embedding_length") // n_head)
    if (found := get(f"{arch}.attention.value_length", head)) != head:
        raise ReferenceError(f"{arch}.attention.value_length: expected the head size {head}, found {found}")
    n_rot = get(f"{arch}.rope.dimension_count", head)
    if n_rot % 2 or n_rot > head:
        raise ReferenceError(f"{arch}.rope.dimension_count: expected an even number up to the head size {head}, found {n_rot}")
    fused = [name for name in tensors if name.endswith("attn_qkv.weight")]
    if fused:
        raise ReferenceError(f"expected separate Q, K and V tensors, found {fused[0]}")
    scaling = get(f"{arch}.rope.scaling.type", "linear")
    if scaling not in ("none", "linear", "yarn"):
        raise ReferenceError(f"{arch}.rope.scaling.type: expected none, linear or yarn, found {scaling}")
    return Hparams(
        arch=arch,
        n_layer=get(f"{arch}.block_count"),
        n_embd=get(f"{arch}.embedding_length"),
        n_head=n_head,
        n_head_kv=get(f"{arch}.attention.head_count_kv", n_head),
        head=head,
        n_rot=n_rot,
        eps=get(f"{arch}.attention.layer_norm_rms_epsilon"),
        theta=get(f"{arch}.rope.freq_base", 10000.0),
        pairs=PAIRS[arch],
        n_expert=get(f"{arch}.expert_count", 0),
        n_expert_used=get(f"{arch}.expert_used_count", 0),
        rope_scaling=scaling,
        rope_factor=get(f"{arch}.rope.scaling.factor", 1.0),
        rope_attn_factor=get(f"{arch}.rope.scaling.attn_factor", 1.0),
        rope_log_mul=get(f"{arch}.rope.scaling.yarn_log_multiplier", 0.0),
        n_ctx_orig=get(f"{arch}.rope.scaling.original_context_length", get(f"{arch}.context_length")),
        beta_fast=get(f"{arch}.rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=get(f"{arch}.rope.scaling.yarn_beta_slow", 1.0),
        attention_scale=get(f"{arch}.attention.scale", 0.0) or head**-0.5,
        temperature_scale=get(f"{arch}.attention.temperature_scale", 0.0),
    )
