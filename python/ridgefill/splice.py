"""Splices: which layer's keys or values decide what a filled prompt recalls.

A prompt lies in the cache several times: computed exactly, filled, and in a sequence that begins as a copy of one of these
and takes rows of some layers from another. What the tail then answers tells what these rows carry. Everything runs through
libllama, so the answer is the served model's on any backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from . import lib
from .errors import RidgeError
from .evaluation.facts import answer_tokens
from .evaluation.loss import log_softmax

EXACT, FILLED, NORMED, WORK = range(4)  # sequences; NORMED is FILLED with each key as long as the exact one

# name of a splice -> what it begins as, from where it takes rows, and which
SPLICES = {
    "filled keys": (EXACT, FILLED, "k"),
    "exact keys": (FILLED, EXACT, "k"),
    "exact values": (FILLED, EXACT, "v"),
    "exact both": (FILLED, EXACT, "kv"),
}
NORMS = {"exact key norms": (FILLED, NORMED, "k")}


@dataclass(frozen=True)
class Score:
    """How a sequence answers: mean log-probability (nats) of the tokens of the exact answer, and whether it gives the same ones."""

    log_prob: float
    hit: bool


def replace_keys(ctx: lib.Context, source: int, target: int, keys: Mapping[int, np.ndarray]) -> None:
    """Make sequence `target` a copy of `source` with other keys: {layer: [n, n_head_kv, head size]}, as the cache holds them, for
    the rows from position 0 on.

    The library has no call for it: the bytes of the old keys are looked up in the saved state of the sequence. Raises RidgeError
    where they are not there exactly once, as with a cache that is not of type f16.
    """
    state = bytearray(ctx.state(source))
    for il, k in keys.items():
        old = ctx.get_kv(source, il, "k", 0, len(k)).astype(np.float16).tobytes()
        if (n := state.count(old)) != 1:
            raise RidgeError(f"keys of layer {il}: expected them once in the state of sequence {source}, found them {n} times")
        at = state.index(old)
        state[at : at + len(old)] = k.astype(np.float16).tobytes()
    ctx.set_state(target, bytes(state))


class Splicer:
    """A context for prompts of at most `n_rows` rows, answers included, several times over. Use it in `with`."""

    def __init__(self, model: lib.Model, n_rows: int, n_threads: int, n_sink: int):
        self.model, self._n_sink = model, n_sink
        n_cells = -(-n_rows // 256) * 256  # as the library pads each sequence
        self.ctx = lib.Context(model, (WORK + 1) * n_cells, n_seq_max=WORK + 1, n_threads=n_threads)

    def __enter__(self) -> Splicer:
        return self

    def __exit__(self, *_) -> None:
        self.ctx.close()

    def begin(self, item, judge, maps: lib.Maps) -> bool:
        """Put a prompt (`tokens`, `n_tail`) into the cache, exact and filled. False when the exact model gives a wrong answer.

        judge  answered(answer) and decided(answer), as those of a Fact
        """
        tokens, ctx = list(item.tokens), self.ctx
        self._n, self._base, self._split = len(tokens) - item.n_tail, None, maps.split
        self._tail = tokens[self._n :]
        ctx.clear()
        logits = ctx.decode(tokens, seq=EXACT)[0]
        self._answer = answer_tokens(self, logits, judge)
        if not judge.answered(self.model.detokenize(self._answer)):
            return False
        ctx.seq_rm(EXACT, self._n)
        ctx.prefill(tokens, seq=FILLED, mode="fill", maps=maps, n_tail=item.n_tail, n_sink=self._n_sink).run()
        ctx.seq_rm(FILLED, self._n)
        return True

    def score(self, base: int, source: int = EXACT, layers: Sequence[int] = (), what: str = "") -> Score:
        """Of sequence `base`, with K ("k"), V ("v") or both ("kv") of `layers` as `source` has them."""
        ctx, answer = self.ctx, self._answer
        if source == NORMED and ctx.seq_pos_max(NORMED) < 0:
            self._make_normed()
        self._start(base)
        self._take(source, layers, what)
        rows = range(len(self._tail) - 1, len(self._tail) + len(answer) - 1)
        logits = ctx.decode(self._tail + answer[:-1], pos0=self._n, seq=WORK, logits=rows)
        ctx.seq_rm(WORK, self._n)
        self._take(base, layers, what)
        found = log_softmax(logits)[np.arange(len(answer)), answer]
        return Score(float(found.mean(dtype=np.float64)), bool((logits.argmax(axis=1) == answer).all()))

    def _start(self, base: int) -> None:
        if self._base != base:
            self.ctx.seq_cp(base, WORK)
            self._base = base

    def _make_normed(self) -> None:
        """Fill sequence NORMED. Rotation leaves the length of a key as it is."""
        keys = {}
        for il in range(self._split + 1, self.model.n_layer):
            exact, filled = (self.ctx.get_kv(seq, il, "k", 0, self._n) for seq in (EXACT, FILLED))
            length, mine = (np.linalg.norm(k, axis=-1, keepdims=True) for k in (exact, filled))
            keys[il] = filled * length / np.maximum(mine, np.finfo(np.float32).tiny)
        replace_keys(self.ctx, FILLED, NORMED, keys)

    def _take(self, source: int, layers: Sequence[int], what: str) -> None:
        for il in layers:
            for which in what:
                self.ctx.copy_kv(source, WORK, il, which, self._n_sink, self._n)


def splice(
    splicer: Splicer, item, judge, maps: lib.Maps, layers: Sequence[int], splices: Mapping[str, tuple] = SPLICES, together: bool = False
) -> list[dict]:
    """Records of one prompt (Splicer.begin): both sequences as they are (layer -1), every splice of every layer and, `together`, of
    all of these layers at once (layer -1); none when exact answers wrongly.
    """
    if not splicer.begin(item, judge, maps):
        return []
    whole = [("exact", EXACT), ("filled", FILLED)]
    found = [{"splice": name, "layer": -1, **vars(splicer.score(base))} for name, base in whole]
    groups = [(il, [il]) for il in layers] + ([(-1, layers)] if together else [])
    for name, (base, source, what) in splices.items():
        found += [{"splice": name, "layer": il, **vars(splicer.score(base, source, group, what))} for il, group in groups]
    return found
