"""Kinds of maps (docs/SIDECAR.md): from which features of the split layer S they predict what of a layer l > S.

    kind      features of row t         predicts
    input     x_S,t                     x_l,t, the layer's input
    input_lr  x_S,t                     the same, as x_S,t plus a map of bounded rank
    kv        n_t                       [k_l,t ; v_l,t], its K and V projections before head norms and rotation
    kv_prev   [n_t ; n_t-1]             the same; n_t = x_S,t over its root mean square, 0 before position 0
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .projections import Projections, rms_normalise

KINDS = ("input", "input_lr", "kv", "kv_prev")


@dataclass(frozen=True)
class Layout:
    """Widths of the features and targets of one family of kinds, which share their sums.

    A solver needs to know no more of a model than this, so it goes into a file of sums.
    """

    family: str  # the kind of most features
    n_embd: int
    kv_lengths: dict[int, tuple[int, int]]  # by layer, widths of K and V over all heads; empty for `input`

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds that the sums serve: kv's features are the first half of kv_prev's."""
        return {"input": ("input", "input_lr"), "kv": ("kv",), "kv_prev": ("kv", "kv_prev")}[self.family]

    def d_in(self, kind: str = "") -> int:
        """Number of features of a kind, by default of the family."""
        return 2 * self.n_embd if (kind or self.family) == "kv_prev" else self.n_embd

    def d_out(self, il: int) -> int:
        """Width of what is predicted of layer `il`."""
        return sum(self.kv_lengths[il]) if self.kv_lengths else self.n_embd

    def parts(self, il: int) -> dict[str, slice]:
        """Columns of the target that take a lambda and a score of their own."""
        if not self.kv_lengths:
            return {"input": slice(0, self.n_embd)}
        n_k, n_v = self.kv_lengths[il]
        return {"k": slice(0, n_k), "v": slice(n_k, n_k + n_v)}


class InputTargets:
    """Features and targets of the kinds `input` and `input_lr` for a model of width `n_embd`."""

    def __init__(self, n_embd: int):
        self.layout = Layout("input", n_embd, {})

    def features(self, x: np.ndarray) -> np.ndarray:
        """Features [n, d_in] of all rows of a chunk from the inputs x [n, d] of the split layer; row 0 is position 0."""
        return x

    def targets(self, il: int, x: np.ndarray) -> np.ndarray:
        """What is predicted [n, d_out] of rows with inputs x [n, d] of layer `il`."""
        return x

    @property
    def weight_bytes(self) -> int:
        """Of the tensors that targets() holds."""
        return 0


class KvTargets:
    """Features and targets of the kinds `kv` (`previous` False) and `kv_prev` for a model file.

    `layers` are the mapped ones. Methods as those of InputTargets.
    """

    def __init__(self, projections: Projections, n_embd: int, layers: range, previous: bool):
        self._projections, self._previous = projections, previous
        self.layout = Layout("kv_prev" if previous else "kv", n_embd, {il: projections.widths(il) for il in layers})

    def features(self, x: np.ndarray) -> np.ndarray:
        n = rms_normalise(x, self._projections.eps)
        if not self._previous:
            return n
        before = np.zeros_like(n)
        before[1:] = n[:-1]
        return np.concatenate([n, before], axis=1)

    def targets(self, il: int, x: np.ndarray) -> np.ndarray:
        return self._projections.project(il, x)

    @property
    def weight_bytes(self) -> int:
        return sum(4 * self.layout.n_embd * self.layout.d_out(il) for il in self.layout.kv_lengths)


Targets = InputTargets | KvTargets


def families(kinds: list[str], model_path: str, n_embd: int, layers: range) -> list[tuple[Targets, list[str]]]:
    """Targets whose sums serve the kinds beside them. `layers` are the mapped ones.

    Raises RidgefillError for a model whose projections cannot be computed. `kinds` have been checked (fit.Wanted).
    """
    out: list[tuple[Targets, list[str]]] = []
    if inputs := [k for k in kinds if k in ("input", "input_lr")]:
        out.append((InputTargets(n_embd), inputs))
    if kv := [k for k in kinds if k not in inputs]:
        projections = Projections(model_path)
        for il in layers:
            projections.layer(il)  # what cannot be read should show before the work
        out.append((KvTargets(projections, n_embd, layers, "kv_prev" in kv), kv))
    return out
