"""Pictures of a mapper: how each source layer alone predicts each target layer, how heads are predicted, and what more layers add."""

from __future__ import annotations

import os

import numpy as np

from ..card import PlotsMissing
from .models import PARTS, ROTATED
from .sidecar import Mapper
from .sums import NAMES


def plot(mapper: Mapper, out: str | os.PathLike) -> None:
    """Write a picture of the type that the name ends in. R^2 below 0 is drawn as 0.

    Raises PlotsMissing without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotsMissing("plots are drawn with matplotlib, which is missing: pip install 'ridgefill[plots]'") from None
    singles = {} if mapper.r2_rotated is None else {ROTATED: mapper.r2_rotated}
    singles |= {part: mapper.maps[part].r2_single for part in PARTS}
    figure = Figure(figsize=(4 * max(3, len(singles)), 7), layout="constrained")
    top, bottom = figure.subfigures(2, 1)
    for axes, (part, r2) in zip(top.subplots(1, len(singles)), singles.items(), strict=True):
        image = _heat(axes, r2.T, f"{NAMES[part]}: one source layer", "layer of the target", "layer of the source")
    top.colorbar(image, ax=top.axes, label="R²")
    *heads, curve = bottom.subplots(1, len(PARTS) + 1)
    for axes, part in zip(heads, PARTS, strict=True):
        by_layer = mapper.scores.r2[part] if mapper.scores else mapper.maps[part].r2_head
        r2 = np.full((len(by_layer), max(map(len, by_layer))), np.nan)  # layers may differ in their heads
        for il, by_head in enumerate(by_layer):
            r2[il, : len(by_head)] = by_head
        image = _heat(axes, r2.T, f"{NAMES[part]}: the mapper", "layer of the target", "head")
    bottom.colorbar(image, ax=heads, label="R²")
    for part in PARTS:
        curve.plot(mapper.maps[part].tried, mapper.maps[part].r2_by_number.mean(0), marker=".", label=NAMES[part])
    curve.set(title="numbers of source layers", xlabel="source layers", ylabel="held-out R²")
    curve.grid(alpha=0.3)
    curve.legend()
    figure.suptitle(f"{mapper.source.fingerprint['name']} to {mapper.target.fingerprint['name']}", fontsize="small")
    figure.savefig(out, dpi=120)


def _heat(axes, r2: np.ndarray, title: str, x: str, y: str):
    image = axes.imshow(r2, vmin=0, vmax=1, origin="lower", aspect="auto", interpolation="nearest", cmap="viridis")
    axes.set(title=title, xlabel=x, ylabel=y)
    for axis, n in ((axes.xaxis, r2.shape[1]), (axes.yaxis, r2.shape[0])):
        axis.set_ticks(range(0, n, max(1, n // 8)))
    return image
