"""Mappers that know nothing of a pair of models: the identity, and random weights. What a fitted mapper must be better than."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ... import sidecar as maps_sidecar
from ...evaluation.errors import EvaluationError
from .. import sidecar
from ..models import PARTS, Side


def pairs_of_layers(n_source: int, n_target: int) -> list[int]:
    """Source layer of each target layer: the same depth in layers of the whole, the first and the last paired."""
    return [round(il * (n_source - 1) / max(1, n_target - 1)) for il in range(n_target)]


def why_not_identity(source: Side, target: Side) -> str | None:
    """Why a cache of the source cannot be copied into the target; None where it can."""
    for part in PARTS:
        wide = {w for side in (source, target) for w in side.widths(part)}
        if len(wide) > 1 or source.head_size[part] != target.head_size[part]:
            return f"{part.upper()} of the two models differ in shape"
    return None


def identity(path: Path, source: Side, target: Side, like: sidecar.Mapper) -> Path:
    """Write a mapper that copies each target layer from the source layer at the same depth. Sinks and tail are those of `like`.

    Raises EvaluationError where the shapes do not allow it.
    """
    if reason := why_not_identity(source, target):
        raise EvaluationError(f"identity: {reason}")
    weights = {part: [np.eye(w) for w in target.widths(part)] for part in PARTS}
    biases = {part: [np.zeros(w) for w in target.widths(part)] for part in PARTS}
    layers = [[s] for s in pairs_of_layers(source.n_layer, target.n_layer)]
    return _write(path, source, target, dict.fromkeys(PARTS, layers), weights, biases, like, previous=False)


def random(path: Path, fitted: sidecar.Mapper, seed: int) -> Path:
    """Write a mapper of the same source layers as `fitted`; weights and biases of each layer are normal numbers of its mean and
    standard deviation.
    """
    rng = np.random.default_rng(seed)

    def drawn(x: np.ndarray) -> np.ndarray:
        return rng.normal(x.mean(), x.std(), x.shape)

    layers = {part: maps.sources for part, maps in fitted.maps.items()}
    weights = {part: [drawn(fitted.weight(part, il)) for il in range(fitted.target.n_layer)] for part in PARTS}
    biases = {part: [drawn(b) for b in fitted.maps[part].biases] for part in PARTS}
    return _write(path, fitted.source, fitted.target, layers, weights, biases, fitted, fitted.previous)


def _write(path: Path, source: Side, target: Side, layers: dict, weights: dict, biases: dict, like: sidecar.Mapper, previous: bool) -> Path:
    """Scores, which nobody measured, are written as 0: the file lives as long as the evaluation."""
    n = target.n_layer
    maps = {
        part: sidecar.Maps(
            sources=layers[part], lambdas=[0.0] * n, r2_head=[[0.0] * h for h in target.heads], r2_single=np.zeros((n, source.n_layer)),
            tried=[1], r2_by_number=np.zeros((n, 1)), weights=[w.astype(np.float32) for w in weights[part]], biases=biases[part],
        )
        for part in PARTS
    }  # fmt: skip
    none = maps_sidecar.Calibration(
        sources=["nothing"], n_tokens=0, n_documents=0, n_heldout_tokens=0, n_heldout_documents=0, seed=0
    )
    m = sidecar.Mapper(source, target, previous, like.sink_rows, like.tail, "f32", like.select, none, maps)
    sidecar.write(path, m)
    return path
