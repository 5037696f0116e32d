"""The selector `attention`: rows that the end of a prompt, where the question stands, attends to most below the split layer.

The library computes the prompt; queries and attention come from its layer inputs and cache in NumPy. What is selected goes to the
library as a list of exact rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .. import lib
from ..attention import Attention

N_ASKING = 64  # last rows of the prompt whose attention counts


class AttendedRows:
    """For prompts of a model. What was computed of the last one is kept for other splits and shares.

    Raises RidgefillError for an architecture whose attention ridgefill.attention does not know.
    """

    def __init__(self, model: lib.Model):
        self._attention = Attention(model.path)
        self._prompt: tuple[int, ...] = ()
        self._masses = np.empty((0, 0))

    def check(self, split: int) -> None:
        """Raises RidgefillError naming a tensor below layer `split` that cannot be read."""
        for il in range(split):
            self._attention.check(il)

    def masses(self, ctx: lib.Context, prompt: Sequence[int], n_layers: int) -> np.ndarray:
        """What each row gets from the last N_ASKING in each of the first n_layers, summed over them and the heads: [n_layers, n].

        Runs the prompt exactly in `ctx`, which is left empty, unless the prompt is that of the call before.
        """
        if self._prompt != tuple(prompt) or len(self._masses) < n_layers:
            self._masses, self._prompt = self._compute(ctx, list(prompt), n_layers), tuple(prompt)
        return self._masses[:n_layers]

    def _compute(self, ctx: lib.Context, prompt: list[int], n_layers: int) -> np.ndarray:
        n, n_asking = len(prompt), min(N_ASKING, len(prompt))
        at = np.arange(n - n_asking, n)
        ctx.clear()
        if n > n_asking:
            ctx.decode(prompt[:-n_asking], logits="none")
        ctx.capture(range(n_layers))
        ctx.decode(prompt[-n_asking:], pos0=n - n_asking, logits="none")
        found = np.empty((n_layers, n))
        for il in range(n_layers):
            q = self._attention.queries(il, ctx.layer_inputs(il), at)
            found[il] = self._attention.weights(q, at, ctx.get_kv(0, il, "k", 0, n)).sum((0, 1, 2), dtype=np.float64)
        ctx.capture(())
        ctx.clear()
        return found

    def select(self, ctx: lib.Context, prompt: Sequence[int], begin: int, end: int, n: int, split: int, n_layers: int) -> list[int]:
        """The n rows of [begin, end) that get most in the layers below `split`, ascending; of equals the first.

        n_layers  to compute, should the prompt be a new one: those below the deepest split that is to be asked for
        """
        mass = self.masses(ctx, prompt, max(split, n_layers))[:split].sum(0)
        return sorted((begin + np.argsort(-mass[begin:end], kind="stable")[:n]).tolist())
