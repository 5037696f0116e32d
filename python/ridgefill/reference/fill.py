"""What RidgeFill does to a prompt: which rows are filled, and what stands in for their layer inputs or their K and V."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import gguf
import numpy as np

from .weights import ReferenceError

EXACT, IDENTITY, NOFILL, FILL = "exact", "identity", "nofill", "fill"
MODES = (EXACT, IDENTITY, NOFILL, FILL)
INPUT, KV, KV_PREV = "input", "kv", "kv_prev"


@dataclasses.dataclass(frozen=True)
class Maps:
    """Ridge maps of one kind (docs/SIDECAR.md).

    kind    input: A_l x_S + b_l stands in for the input of layer l
            kv: A_l n + b_l stands in for its K and V before norm and rotation, K first; n = x_S over its root mean square
            kv_prev: the same from [n ; n of the row before], 0 at position 0
    layers  {l: (A_l [d_out, d_in], b_l [d_out])} for l = S+1..L-1
    """

    kind: str
    layers: Mapping[int, tuple[np.ndarray, np.ndarray]]

    def __call__(self, il: int, features: np.ndarray) -> np.ndarray:
        """Prediction [n, d_out] for layer `il` from features [n, d_in]."""
        a, b = self.layers[il]
        return features @ a.T + b


@dataclasses.dataclass(frozen=True)
class Fill:
    """How the rows of a prompt are treated (arXiv 2611.09709, section 2.1).

    mode        exact: every row runs every layer
                fill: maps predict the input of layer l > S of a filled row, or its K and V
                identity: it is x_S
                nofill: layers S and above hold nothing of the filled rows
    split       S; layers 0..S-1 run for every row. Layer S reads the true x_S in every row
    n_tail      T, the last rows of the prompt, exact
    n_sink      the first rows, exact
    exact_rows  further rows that run every layer
    maps        mode fill only
    """

    mode: str = EXACT
    split: int = 0
    n_tail: int = 0
    n_sink: int = 4
    exact_rows: Sequence[int] = ()
    maps: Maps | None = None

    def __post_init__(self):
        if self.mode not in MODES:
            raise ReferenceError(f"mode: expected one of {', '.join(MODES)}, found {self.mode}")

    def filled(self, n_rows: int) -> np.ndarray:
        """[n_rows] True for each filled row of a prompt."""
        mask = np.zeros(n_rows, dtype=bool)
        if self.mode != EXACT:
            mask[self.n_sink : max(self.n_sink, n_rows - self.n_tail)] = True
            mask[list(self.exact_rows)] = False
        return mask

    @property
    def kind(self) -> str:
        """What is put in place of a filled row; mode identity is a map of inputs that does nothing."""
        return self.maps.kind if self.mode == FILL else INPUT

    def predict(self, il: int, x_split: np.ndarray) -> np.ndarray:
        """Kind input: stand-in for the input of layer il >= S of rows with split states x_split [n, d]."""
        return x_split if il == self.split or self.mode != FILL else self.maps(il, x_split)


def features(kind: str, x_split: np.ndarray, eps: float) -> np.ndarray:
    """What maps of kind kv or kv_prev read, [n, d] or [n, 2d], from the split states [n, d] of rows at positions 0..n-1."""
    n = x_split / np.sqrt((x_split**2).mean(axis=1, keepdims=True) + eps)
    return n if kind == KV else np.hstack([n, np.vstack([np.zeros_like(n[:1]), n[:-1]])])


def load_maps(path: str | os.PathLike) -> Maps:
    """The maps of a sidecar in float64, read with gguf-py alone."""
    reader = gguf.GGUFReader(str(path))
    tensors = {t.name: t for t in reader.tensors}
    layers = {}
    for name, t in tensors.items():
        if not name.endswith(".ridge.weight"):
            continue
        il = int(name.split(".")[1])
        bias = tensors[f"blk.{il}.ridge.bias"]
        layers[il] = tuple(gguf.dequantize(x.data, x.tensor_type).astype(np.float64) for x in (t, bias))
    if not layers:
        raise ReferenceError(f"{path}: expected tensors blk.N.ridge.weight, found none")
    kind = reader.fields["ridge.kind"].contents()
    if kind not in (INPUT, KV, KV_PREV):
        raise ReferenceError(f"{path}: kind: expected input, kv or kv_prev, found {kind}")
    return Maps(kind, layers)
