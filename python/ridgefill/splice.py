"""Splices: which layer's keys or values decide what a filled prompt recalls.

A prompt lies in the cache three times: computed exactly, filled, and in a third sequence that begins as a copy of one of
these and takes rows of single layers from the other. What the tail then answers tells what these rows carry. Everything runs
through libllama, so the answer is the served model's on any backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from . import lib
from .evaluation.facts import FactItem, answer_tokens
from .evaluation.loss import log_softmax

EXACT, FILLED, WORK = range(3)  # sequences

# name of a splice -> what it begins as, and which rows of one layer it takes from the other
SPLICES = {
    "filled keys": (EXACT, "k"),
    "exact keys": (FILLED, "k"),
    "exact values": (FILLED, "v"),
    "exact both": (FILLED, "kv"),
}


@dataclass(frozen=True)
class Score:
    """How a sequence answers: mean log-probability (nats) of the tokens of the exact answer, and whether it gives the same ones."""

    log_prob: float
    hit: bool


class Splicer:
    """A context of three sequences for prompts of at most `n_rows` rows, answers included. Use it in `with`."""

    def __init__(self, model: lib.Model, maps: lib.Maps, n_rows: int, n_threads: int, n_sink: int):
        self.model, self._maps, self._n_sink = model, maps, n_sink
        self.ctx = lib.Context(model, 3 * n_rows, n_seq_max=3, n_threads=n_threads)

    def __enter__(self) -> Splicer:
        return self

    def __exit__(self, *_) -> None:
        self.ctx.close()

    def begin(self, item: FactItem) -> bool:
        """Put a prompt into the cache, exact and filled. False when the exact model does not give the fact."""
        tokens, ctx = list(item.tokens), self.ctx
        self._n, self._base = len(tokens) - item.n_tail, None
        self._tail = tokens[self._n :]
        ctx.clear()
        logits = ctx.decode(tokens, seq=EXACT)[0]
        self._answer = answer_tokens(self, logits, item.fact)
        if not item.fact.answered(self.model.detokenize(self._answer)):
            return False
        ctx.seq_rm(EXACT, self._n)
        filling = {"maps": self._maps, "n_tail": item.n_tail, "n_sink": self._n_sink}
        ctx.prefill(tokens, seq=FILLED, mode="fill", **filling).run()
        ctx.seq_rm(FILLED, self._n)
        return True

    def score(self, base: int, il: int = 0, what: str = "") -> Score:
        """Of sequence `base`, with K ("k"), V ("v") or both ("kv") of layer `il` as the other one has them."""
        ctx, answer = self.ctx, self._answer
        self._start(base)
        self._take(EXACT + FILLED - base, il, what)
        rows = range(len(self._tail) - 1, len(self._tail) + len(answer) - 1)
        logits = ctx.decode(self._tail + answer[:-1], pos0=self._n, seq=WORK, logits=rows)
        ctx.seq_rm(WORK, self._n)
        self._take(base, il, what)
        found = log_softmax(logits)[np.arange(len(answer)), answer]
        return Score(float(found.mean(dtype=np.float64)), bool((logits.argmax(axis=1) == answer).all()))

    def _start(self, base: int) -> None:
        if self._base != base:
            self.ctx.seq_cp(base, WORK)
            self._base = base

    def _take(self, source: int, il: int, what: str) -> None:
        for which in what:
            self.ctx.copy_kv(source, WORK, il, which, self._n_sink, self._n)


def splice(splicer: Splicer, item: FactItem, layers: Sequence[int]) -> list[dict]:
    """Records of one prompt: both sequences as they are, and every splice of every layer; none when exact misses the fact."""
    if not splicer.begin(item):
        return []
    whole = [("exact", EXACT), ("filled", FILLED)]
    found = [{"splice": name, "layer": -1, **vars(splicer.score(base))} for name, base in whole]
    for name, (base, what) in SPLICES.items():
        found += [{"splice": name, "layer": il, **vars(splicer.score(base, il, what))} for il in layers]
    return found
