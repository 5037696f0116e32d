"""Kinds of maps (docs/SIDECAR.md): from which features of the split layer S they predict what of a layer l > S.

    kind     features of row t         predicts
    input    x_S,t                     x_l,t, the layer's input
    kv       n_t                       [k_l,t ; v_l,t], its K and V projections before head norms and rotation
    kv_prev  [n_t ; n_t-1]             the same; n_t = x_S,t over its root mean square, 0 before position 0
"""

from __future__ import annotations

import numpy as np

from .errors import RidgefillError
from .projections import Projections, rms_normalise

KINDS = ("input", "kv", "kv_prev")


class InputTargets:
    """Features and targets of kind `input` for a model of width `n_embd`."""

    def __init__(self, n_embd: int):
        self._n_embd = n_embd
        self.d_in = n_embd

    def features(self, x: np.ndarray) -> np.ndarray:
        """Features [n, d_in] of all rows of a chunk from the inputs x [n, d] of the split layer; row 0 is position 0."""
        return x

    def targets(self, il: int, x: np.ndarray) -> np.ndarray:
        """What is predicted [n, d_out] of rows with inputs x [n, d] of layer `il`."""
        return x

    def d_out(self, il: int) -> int:
        return self._n_embd

    def parts(self, il: int) -> dict[str, slice]:
        """Columns of the target that take a lambda and a score of their own."""
        return {"input": slice(0, self._n_embd)}

    @property
    def weight_bytes(self) -> int:
        """Of the tensors that targets() holds."""
        return 0


class KvTargets:
    """Features and targets of the kinds `kv` (`previous` False) and `kv_prev` for a model file.

    Methods as those of InputTargets.
    """

    def __init__(self, projections: Projections, n_embd: int, layers: range, previous: bool):
        self._projections, self._layers, self._previous = projections, layers, previous
        self._n_embd = n_embd
        self.d_in = 2 * n_embd if previous else n_embd

    def features(self, x: np.ndarray) -> np.ndarray:
        n = rms_normalise(x, self._projections.eps)
        if not self._previous:
            return n
        before = np.zeros_like(n)
        before[1:] = n[:-1]
        return np.concatenate([n, before], axis=1)

    def targets(self, il: int, x: np.ndarray) -> np.ndarray:
        return self._projections.project(il, x)

    def d_out(self, il: int) -> int:
        return sum(self._projections.widths(il))

    def kv_lengths(self, il: int) -> tuple[int, int]:
        """Widths of K and of V of layer `il`."""
        return self._projections.widths(il)

    def parts(self, il: int) -> dict[str, slice]:
        n_k, n_v = self._projections.widths(il)
        return {"k": slice(0, n_k), "v": slice(n_k, n_k + n_v)}

    @property
    def weight_bytes(self) -> int:
        return sum(4 * self._n_embd * self.d_out(il) for il in self._layers)


Targets = InputTargets | KvTargets


def families(kinds: list[str], model_path: str, n_embd: int, layers: range) -> list[tuple[Targets, list[str]]]:
    """Targets whose sums serve the kinds beside them: kv's features are the first half of kv_prev's.

    `layers` are the mapped ones.

    Raises RidgefillError for an unknown kind, and for a model whose projections cannot be computed.
    """
    if not kinds or len(set(kinds)) != len(kinds) or any(k not in KINDS for k in kinds):
        raise RidgefillError(f"kinds: expected some of {', '.join(KINDS)}, each once, found {', '.join(kinds) or 'none'}")
    out: list[tuple[Targets, list[str]]] = []
    if "input" in kinds:
        out.append((InputTargets(n_embd), ["input"]))
    if kv := [k for k in kinds if k != "input"]:
        projections = Projections(model_path)
        for il in layers:
            projections.layer(il)  # what cannot be read should show before the work
        out.append((KvTargets(projections, n_embd, layers, "kv_prev" in kv), kv))
    return out
