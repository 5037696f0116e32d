"""Two models between which a mapper is fitted: whether that can be done, and their keys and values without rotation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..attention import Attention, check_one_dimension
from ..capture import Chunk, activations
from ..errors import RidgeError, RidgefillError
from ..hf import Checkpoint
from ..lib import Context, Model
from ..model_file import ModelFile

PARTS = ("k", "v")  # of a cache: a mapper has a map of each for every layer of the target
ROTATED = "k_rotated"  # keys as caches hold them, which are looked at only
Rows = Mapping[str, list[np.ndarray]]  # by part and layer, [n, width]


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
    """Keys and values of every layer of a loaded model; with `rotated` also keys as its cache holds them.

    Raises RidgefillError for a model whose projections cannot be computed or whose positions have more than one dimension,
    RidgeError for one that the library cannot capture.
    """

    def __init__(self, model: Model, rotated: bool = False):
        check_one_dimension(ModelFile(model.path))
        if reason := model.unsupported():
            raise RidgeError(f"{model.path} cannot be captured: {reason}")
        super().__init__(model.path)
        self.layers, self._rotated = range(model.n_layer), rotated
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

    def __call__(self, inputs: Mapping[int, np.ndarray]) -> Rows:
        """K after head norms and before rotation, and V, and K rotated if wanted: by part and layer, [n, width] of inputs [n, d] of every layer."""
        rows = [self.keys_values(il, inputs[il]) for il in self.layers]
        found = {part: [r[i] for r in rows] for i, part in enumerate(PARTS)}
        if self._rotated:
            found[ROTATED] = [self.keys(il, k).reshape(k.shape) for il, k in zip(self.layers, found["k"], strict=True)]
        return found


@contextmanager
def captured(
    runners: Sequence[Model | Checkpoint], keys_values: Sequence[KeysValues], chunks: Sequence[Chunk], n_ctx: int, n_threads: int
) -> Iterator[Iterator[tuple[dict[int, np.ndarray], ...]]]:
    """Inputs [n, d] of every layer of each model, chunk by chunk, as each of the `runners` computes them."""
    with ExitStack() as stack:
        streams = []
        for runner, kv in zip(runners, keys_values, strict=True):
            if isinstance(runner, Model):
                ctx = stack.enter_context(Context(runner, n_ctx, n_batch=n_ctx, n_threads=n_threads))
                stream = activations(ctx, chunks, list(kv.layers))
            else:
                stream = runner.activations(chunks, list(kv.layers))
            streams.append(stack.enter_context(closing(stream)))
        yield zip(*streams, strict=True)


def check_pair(source: Side, target: Side) -> None:
    """Raises PairError when the two do not cut text into the same tokens."""
    hashes = [side.fingerprint["tokenizer_sha256"] for side in (source, target)]
    if hashes[0] != hashes[1]:
        (a, x), (b, y) = ((side.fingerprint["name"], h[:12]) for side, h in zip((source, target), hashes, strict=True))
        raise PairError(f"tokenizer: expected the same in both models, found {x}... in the source ({a}) and {y}... in the target ({b})")


def check_models(expected: Sequence[Side], found: Sequence[Side]) -> None:
    """Raises PairError naming the first thing in which a model, source or target, is not the one that a mapper is for.

    Name, quantisation and weights may be those of a relative.
    """
    for role, a, b in zip(("source", "target"), expected, found, strict=True):
        here, there = (
            {
                **{name: side.fingerprint[name] for name in ("architecture", "tokenizer_sha256", "hparams")},
                "heads of K and V": side.heads,
                "sizes of heads": side.head_size,
                **{f"rotation: {name}": np.float32(x).tolist() if isinstance(x, float) else x for name, x in side.rope.items()},
            }
            for side in (a, b)
        )
        for what, value in here.items():
            if value != there[what]:
                raise PairError(f"{role}: {what}: expected {value}, found {there[what]}")
