"""Two models between which a mapper is fitted: whether that can be done, and their keys and values without rotation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..attention import Attention, check_one_dimension
from ..errors import RidgeError, RidgefillError
from ..lib import Model
from ..model_file import ModelFile

PARTS = ("k", "v")  # of a cache: a mapper has a map of each for every layer of the target


class PairError(RidgefillError):
    """Two models between which no mapper can be fitted."""

    exit_code = 15


@dataclass(frozen=True)
class Side:
    """What a mapper records of one of its two models.

    fingerprint  lib.Model.fingerprint()
    heads        of K and V, by layer
    head_size    by part: numbers of a head
    rope         fields of attention.Rope by name; `factors` is a list, or None
    """

    fingerprint: dict[str, Any]
    heads: list[int]
    head_size: dict[str, int]
    rope: dict[str, Any]

    @property
    def n_layer(self) -> int:
        return len(self.heads)

    def widths(self, part: str) -> list[int]:
        """Of K or V over all heads, by layer."""
        return [n * self.head_size[part] for n in self.heads]


class KeysValues(Attention):
    """Keys and values of every layer of a loaded model.

    Raises RidgefillError for a model whose projections cannot be computed or whose positions have more than one dimension,
    RidgeError for one that the library cannot capture.
    """

    def __init__(self, model: Model):
        check_one_dimension(ModelFile(model.path))
        if reason := model.unsupported():
            raise RidgeError(f"{model.path} cannot be captured: {reason}")
        super().__init__(model.path)
        self.layers = range(model.n_layer)
        for il in self.layers:
            self.layer(il)  # what cannot be read should show before the work
        fields = asdict(self.rope)
        factors = None if self.rope.factors is None else [float(f) for f in self.rope.factors]
        self.side = Side(
            fingerprint=model.fingerprint(model.n_layer // 2),
            heads=[self.n_kv_heads(il) for il in self.layers],
            head_size=dict(zip(PARTS, self.head_sizes, strict=True)),
            rope={**fields, "factors": factors},
        )

    def __call__(self, inputs: dict[int, np.ndarray]) -> dict[str, list[np.ndarray]]:
        """K after head norms and before rotation, and V: by part and layer, [n, width] of inputs [n, d] of every layer."""
        rows = [self.keys_values(il, inputs[il]) for il in self.layers]
        return {part: [r[i] for r in rows] for i, part in enumerate(PARTS)}


def check_pair(source: Side, target: Side) -> None:
    """Raises PairError when the two do not cut text into the same tokens."""
    hashes = [side.fingerprint["tokenizer_sha256"] for side in (source, target)]
    if hashes[0] != hashes[1]:
        (a, x), (b, y) = ((side.fingerprint["name"], h[:12]) for side, h in zip((source, target), hashes, strict=True))
        raise PairError(f"tokenizer: expected the same in both models, found {x}... in the source ({a}) and {y}... in the target ({b})")
