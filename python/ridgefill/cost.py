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

    def fill(self, split: int, kind: str, rank: int = 128) -> float:
        """Of one filled row in all layers from `split` on. kind identity predicts every layer's input by that of `split`."""
        # the input of layer `split` itself is exact, and predicting inputs leaves the layers' own projections to do
        own, above = self.n_embd * self._n_kv, self.n_layer - split - 1
        if kind in ("input", "input_lr"):
            return own + above * self.n_embd * ((self.n_embd if kind == "input" else 2 * rank) + self._n_kv)
        return own + above * (2 if kind == "kv_prev" else 1) * own

    def _rows(self, n: int, seen: np.ndarray) -> float:
        """Of n rows in one layer, which attend to `seen` rows each."""
        return n * self._layer + self._attention * float(seen.sum())

    def exact(self, n: int) -> float:
        """Of a prompt of n rows."""
        return self.n_layer * self._rows(n, np.arange(1, n + 1))

    def partly(self, kept: np.ndarray, split: int, fill: float, hidden: bool = False) -> float:
        """Of a prompt whose rows run every layer where `kept` (bool [n]), else those below `split` and `fill` in the others.

        hidden  the layers from `split` on see the kept rows alone, as in mode nofill
        """
        n, rows = len(kept), np.flatnonzero(kept)
        seen = np.arange(1, len(rows) + 1) if hidden else rows + 1
        below, above = split * self._rows(n, np.arange(1, n + 1)), (self.n_layer - split) * self._rows(len(rows), seen)
        return below + above + (n - len(rows)) * fill

    def filled(self, n: int, r: Recipe) -> float:
        """Of a prompt of n rows that is filled as `r` says."""
        rows = np.arange(n)
        return self.partly((rows < r.sink) | (rows >= n - r.tail), r.split, self.fill(r.split, r.kind, r.rank))
