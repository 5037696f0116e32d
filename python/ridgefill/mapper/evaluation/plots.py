"""Figures of a mapper's evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {"source": "#e69f00", "target": "#000000", "transfer": "#0072b2"}  # told apart by people who do not see all colours
OTHER = "#888888"


def _points(ax: Axes, estimates: Sequence[dict], colours: Sequence[str]) -> None:
    for i, (e, colour) in enumerate(zip(estimates, colours, strict=True)):
        reach = [[max(0.0, e["value"] - e["low"])], [max(0.0, e["high"] - e["value"])]]
        ax.errorbar(e["value"], i, xerr=reach, fmt="o", color=colour, ms=6, lw=1, capsize=2)


def by_arm(summary: Mapping[str, dict], key: str, title: str, x: str) -> Figure:
    """One figure of every arm that has it, with its interval."""
    arms = [name for name in summary if summary[name].get(key)]
    figure = Figure(figsize=(7.5, 1.0 + 0.3 * len(arms)))
    ax = figure.add_subplot()
    _points(ax, [summary[name][key] for name in arms], [COLOURS.get(name, OTHER) for name in arms])
    ax.set_yticks(range(len(arms)), arms)
    ax.invert_yaxis()
    ax.set(title=title, xlabel=x)
    ax.grid(alpha=0.25, axis="x")
    return figure


def by_turn(summary: Mapping[str, dict]) -> Figure:
    """Loss over the model alone, turn by turn."""
    figure = Figure(figsize=(7.5, 3.4))
    ax = figure.add_subplot()
    for role in ("source", "target"):
        turns = [(i, s["over_alone"]) for i, s in enumerate(summary.values(), 1) if s["model"] == role]
        at, value, low, high = np.array([(i, e["value"], e["low"], e["high"]) for i, e in turns]).T
        reach = np.maximum([value - low, high - value], 0)
        ax.errorbar(at, value, yerr=reach, fmt="o-", color=COLOURS[role], lw=1, capsize=2, label=f"turns of the {role}")
    ax.axhline(0, color="#000000", lw=0.6)
    ax.set(title="A conversation that changes models each turn", xlabel="turn", ylabel="loss over the model alone, nats [95 %]")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, frameon=False)
    return figure


def by_number(mapper: Mapping) -> Figure:
    """Held-out R^2 by number of source layers, as the file of the mapper records it."""
    figure = Figure(figsize=(7.5, 3.0))
    ax = figure.add_subplot()
    for part, style in (("k", "o-"), ("v", "s:")):
        found = mapper["parts"][part]
        ax.plot(found["tried"], found["r2_by_number"], style, color="#0072b2", lw=1.2, label=part.upper())
    ax.set(title="Held-out R² by number of source layers", xlabel="source layers", ylabel="R², mean over layers and heads")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, frameon=False)
    return figure
