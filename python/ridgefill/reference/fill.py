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
INPUT, INPUT_LR, KV, KV_PREV = "input", "input_lr", "kv", "kv_prev"
KINDS = (INPUT, INPUT_LR, KV, KV_PREV)


@dataclasses.dataclass(frozen=True)
class Maps:
    """Ridge maps of one kind (docs/SIDECAR.md).

    kind    input: A_l x_S + b_l stands in for the input of layer l
            input_lr: x_S + U_l (V_l^T x_S) + b_l does
            kv: A_l n + b_l stands in for its K and V before norm and rotation, K first; n = x_S over its root mean square
            kv_prev: the same from [n ; n of the row before], 0 at position 0
    layers  {l: (A_l [d_out, d_in], b_l [d_out])} for l = S+1..L-1, of kind input_lr (U_l [d, r], V_l^T [r, d], b_l)
    """

    kind: str
    layers: Mapping[int, tuple[np.ndarray, ...]]

    def __call__(self, il: int, features: np.ndarray) -> np.ndarray:
        """Prediction [n, d_out] for layer `il` from features [n, d_in]."""
        *matrices, b = self.layers[il]
        if self.kind == INPUT_LR:
            u, v = matrices
            return features + (features @ v.T) @ u.T + b
        return features @ matrices[0].T + b


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

    @property
    def predicts_kv(self) -> bool:
        """Whether K and V are put in place, rather than layer inputs."""
        return self.kind in (KV, KV_PREV)

    def predict(self, il: int, x_split: np.ndarray) -> np.ndarray:
        """Kinds input and input_lr: stand-in for the input of layer il >= S of rows with split states x_split [n, d]."""
        return x_split if il == self.split or self.mode != FILL else self.maps(il, x_split)


def features(kind: str, x_split: np.ndarray, eps: float) -> np.ndarray:
    """What maps of kind kv or kv_prev read, [n, d] or [n, 2d], from the split states [n, d] of rows at positions 0..n-1."""
    n = x_split / np.sqrt((x_split**2).mean(axis=1, keepdims=True) + eps)
    return n if kind == KV else np.hstack([n, np.vstack([np.zeros_like(n[:1]), n[:-1]])])


def load_maps(path: str | os.PathLike) -> Maps:
    """The maps of a sidecar in float64, read with gguf-py alone."""
    reader = gguf.GGUFReader(str(path))
    kind = reader.fields["ridge.kind"].contents() if "ridge.kind" in reader.fields else "none"
    if kind not in KINDS:
        raise ReferenceError(f"{path}: kind: expected one of {', '.join(KINDS)}, found {kind}")
    tensors = {t.name: t for t in reader.tensors}
    names = ("up", "down", "bias") if kind == INPUT_LR else ("weight", "bias")

    def read(name: str) -> np.ndarray:
        if name not in tensors:
            raise ReferenceError(f"{path}: expected tensor {name}, found none")
        return gguf.dequantize(tensors[name].data, tensors[name].tensor_type).astype(np.float64)

    layers = range(reader.fields["ridge.split"].contents() + 1, reader.fields["ridge.block_count"].contents())
    return Maps(kind, {il: tuple(read(f"blk.{il}.ridge.{name}") for name in names) for il in layers})
