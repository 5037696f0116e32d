"""What RidgeFill does to a prompt: which rows are filled, and what stands in for their layer inputs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

import gguf
import numpy as np

from .weights import ReferenceError

EXACT, IDENTITY, NOFILL, FILL = "exact", "identity", "nofill", "fill"
MODES = (EXACT, IDENTITY, NOFILL, FILL)


@dataclasses.dataclass(frozen=True)
class Fill:
    """How the rows of a prompt are treated (arXiv 2611.09709, section 2.1).

    mode        exact: every row runs every layer
                fill: the input of layer l > S of a filled row is A_l x_S + b_l
                identity: it is x_S
                nofill: layers S and above hold nothing of the filled rows
    split       S; layers 0..S-1 run for every row. Layer S reads the true x_S in every row
    n_tail      T, the last rows of the prompt, exact
    n_sink      the first rows, exact
    exact_rows  further rows that run every layer
    maps        {l: (A_l [d, d], b_l [d])} for l = S+1..L-1; mode fill only
    """

    mode: str = EXACT
    split: int = 0
    n_tail: int = 0
    n_sink: int = 4
    exact_rows: Sequence[int] = ()
    maps: Mapping[int, tuple[np.ndarray, np.ndarray]] | None = None

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

    def predict(self, il: int, x_split: np.ndarray) -> np.ndarray:
        """Stand-in for the input of layer il >= S of rows with split states x_split [n, d]."""
        if il == self.split or self.mode != FILL:
            return x_split
        a, b = self.maps[il]
        return x_split @ a.T + b


def load_maps(path: str | os.PathLike) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """{l: (A_l [d, d], b_l [d])} in float64 from a sidecar (docs/SIDECAR.md), read with gguf-py alone."""
    tensors = {t.name: t for t in gguf.GGUFReader(str(path)).tensors}
    maps = {}
    for name, t in tensors.items():
        if not name.endswith(".ridge.weight"):
            continue
        il = int(name.split(".")[1])
        bias = tensors[f"blk.{il}.ridge.bias"]
        maps[il] = tuple(gguf.dequantize(x.data, x.tensor_type).astype(np.float64) for x in (t, bias))
    if not maps:
        raise ReferenceError(f"{path}: expected tensors blk.N.ridge.weight, found none")
    return maps
