"""What a mapper does to a cache: keys and values of a target model from those of a source model (arXiv 2608.03893).

    K_target = rotate_target(unrotate_source(K_source) W + b),    V_target = V_source W + b,    per target layer

W reads the chosen source layers side by side, and where the mapper says so those of the row before, too.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import gguf
import numpy as np

from .rope import rotate, unrotate
from .weights import Hparams, ReferenceError, Weights


@dataclasses.dataclass(frozen=True)
class Mapper:
    """Maps of a sidecar (docs/MAPPER.md), float64.

    maps      {"k" or "v": [(source layers, W [d_out, d_in], b [d_out]) of each target layer]}
    previous  whether W reads the row before, too: 0 before position 0
    """

    maps: Mapping[str, Sequence[tuple[Sequence[int], np.ndarray, np.ndarray]]]
    previous: bool

    def __call__(self, part: str, il: int, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Prediction [n, d_out] for target layer `il` from rows [n, width] of every source layer; row 0 is position 0."""
        layers, w, b = self.maps[part][il]
        x = np.hstack([rows[s] for s in layers])
        if self.previous:
            x = np.hstack([x, np.vstack([np.zeros_like(x[:1]), x[:-1]])])
        return x @ w.T + b


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotation of a model."""

    hparams: Hparams
    factors: np.ndarray | float  # as rope.angles() takes them

    def rotate(self, x: np.ndarray) -> np.ndarray:
        """x [n, heads, head] of rows at positions 0..n-1."""
        return rotate(self.hparams, x, np.arange(float(len(x))), self.factors)

    def unrotate(self, x: np.ndarray) -> np.ndarray:
        return unrotate(self.hparams, x, np.arange(float(len(x))), self.factors)


def rope_of(weights: Weights) -> Rope:
    return Rope(weights.hparams, weights["rope_freqs.weight"] if "rope_freqs.weight" in weights else 1.0)


def transfer(
    mapper: Mapper, source: Rope, target: Rope, k: Sequence[np.ndarray], v: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """K and V of every target layer, [n, n_head_kv, head], from those of every source layer as its cache holds them, rotated;
    rows are at positions 0..n-1.
    """

    def flat(layers: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [x.reshape(len(x), -1) for x in layers]

    def heads(y: np.ndarray) -> np.ndarray:
        return y.reshape(len(y), -1, target.hparams.head)

    k_rows, v_rows = flat([source.unrotate(x) for x in k]), flat(v)
    n_layer = len(mapper.maps["k"])
    return (
        [target.rotate(heads(mapper("k", il, k_rows))) for il in range(n_layer)],
        [heads(mapper("v", il, v_rows)) for il in range(n_layer)],
    )


def load_mapper(path: str | os.PathLike) -> Mapper:
    """The maps of a sidecar in float64, read with gguf-py alone."""
    reader = gguf.GGUFReader(str(path))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("adapter.type") != "kv_mapper":
        raise ReferenceError(f"{path}: adapter.type: expected kv_mapper, found {fields.get('adapter.type', 'none')}")
    tensors = {t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}
    maps = {}
    for part in "kv":
        ends = np.cumsum([0, *fields[f"ridge.{part}.n_sources"]])
        maps[part] = [
            (fields[f"ridge.{part}.sources"][a:b], tensors[f"blk.{il}.mapper.{part}.weight"], tensors[f"blk.{il}.mapper.{part}.bias"])
            for il, (a, b) in enumerate(zip(ends, ends[1:], strict=False))
        ]
    return Mapper(maps, fields["ridge.previous_row"])
