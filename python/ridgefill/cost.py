"""What a filled prompt costs beside an exact one, counted in multiply-adds of a model file's matrices and of attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .errors import RidgefillError
from .model_file import ModelFile


@dataclass(frozen=True)
class Recipe:
    """How prompts are filled: split layer S, kind of maps, tail T, sink rows, and the rank of maps of kind input_lr."""

    split: int
    kind: str
    tail: int
    sink: int = 4
    rank: int = 128


class Cost:
    """Of a model file. `exact` and `filled` give multiply-adds; embedding and logits, equal in both, are left out.

    n_layer  layers that a row passes: more than the file's blocks, where a model loops over them
    """

    def __init__(self, path: str, n_layer: int):
        file = ModelFile(path)
        arch = file.get("general.architecture")

        def number(key: str, default: int | None = None) -> int:
            value = file.get(f"{arch}.{key}", default)
            if value is None:
                raise RidgefillError(f"expected key {arch}.{key} in the model file, found none")
            return max(value) if isinstance(value, list) else int(value)

        self.n_layer, self.n_embd, n_head = n_layer, number("embedding_length"), number("attention.head_count")
        head = number("attention.key_length", self.n_embd // n_head)
        self._n_kv = 2 * number("attention.head_count_kv", n_head) * head
        # a row attends to each row before it, for scores and for the mix of values
        self._attention = 2 * n_head * head
        used = number("expert_used_count", 0) / max(1, number("expert_count", 0))
        self._layer = sum(
            int(np.prod(t.shape)) * (used if len(t.shape) == 3 else 1)
            for name, t in file.tensors.items()
            if name.startswith("blk.") and len(t.shape) > 1
        ) / number("block_count")

    def _map(self, r: Recipe) -> int:
        """Multiply-adds of one filled row in one layer above the split."""
        if r.kind in ("input", "input_lr"):  # the layer's own projections follow
            return self.n_embd * ((self.n_embd if r.kind == "input" else 2 * r.rank) + self._n_kv)
        return (2 if r.kind == "kv_prev" else 1) * self.n_embd * self._n_kv

    def _rows(self, positions: np.ndarray) -> float:
        """Of these rows in one layer."""
        return len(positions) * self._layer + self._attention * float((positions + 1).sum())

    def exact(self, n: int) -> float:
        """Of a prompt of n rows."""
        return self.n_layer * self._rows(np.arange(n))

    def filled(self, n: int, r: Recipe) -> float:
        """Of a prompt of n rows that is filled as `r` says."""
        rows = np.arange(n)
        kept = (rows < r.sink) | (rows >= n - r.tail)
        n_filled, above = int((~kept).sum()), self.n_layer - r.split
        fill = self.n_embd * self._n_kv + (above - 1) * self._map(r)
        return r.split * self._rows(rows) + above * self._rows(rows[kept]) + n_filled * fill
