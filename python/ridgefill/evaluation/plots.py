"""Figures of a study's result, as SVG. matplotlib is imported here: nothing else needs it."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence

import numpy as np

from . import splices
from .arms import Arm
from .errors import EvaluationError
from .loss import KL_EDGES

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
except ImportError:
    raise EvaluationError("the plots of a report are made with matplotlib, which is missing: pip install matplotlib") from None

# by what fills the rows; told apart in greyscale and by people who do not see all colours (Okabe and Ito 2008)
COLOURS = {
    "exact": "#000000", "noise": "#888888", "cut": "#999933", "pop": "#882255", "nofill": "#56b4e9", "identity": "#cc79a7",
    "input": "#d55e00", "input_lr": "#e69f00", "kv": "#0072b2", "kv_prev": "#009e73",
}  # fmt: skip
SPLICE_COLOURS = {
    "filled keys": "#d55e00", "exact keys": "#0072b2", "exact values": "#009e73", "exact both": "#000000", "exact key norms": "#e69f00",
}  # fmt: skip
MARKERS = {"none": "o", "digits": "D", "random": "x", "attention": "P", "tail": "^", "equal": "s"}
ROWS = {"none": "", "digits": "digit rows", "random": "random rows", "attention": "rows attended to", "tail": "longer tail", "equal": "tail at the cost of the fill"}


def family(arm: Arm) -> str:
    """What an arm is coloured by: its mode or, for a fill, the kind of its maps."""
    return arm.kind or "input" if arm.mode == "fill" else arm.mode


def svg(figure: Figure) -> str:
    """The figure as the address of an image; the same figure gives the same text."""
    out = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ridgefill"}):
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(out.getvalue()).decode()


def _bars(ax: Axes, x: float, e: dict, arm: Arm) -> None:
    reach = [[max(0.0, e["value"] - e["low"])], [max(0.0, e["high"] - e["value"])]]
    ax.errorbar(x, e["value"], yerr=reach, fmt=MARKERS[arm.rows], color=COLOURS[family(arm)], ms=6, lw=1, capsize=2, alpha=0.9)
    if arm.split and arm.rows == "none":
        ax.annotate(f"S{arm.split}", (x, e["value"]), xytext=(5, 4), textcoords="offset points", fontsize=7, color="#444444")


def _legend(ax: Axes, arms: Sequence[Arm]) -> None:
    lines = [Line2D([], [], marker="o", ls="", color=COLOURS[f], label=f) for f in COLOURS if f in map(family, arms)]
    rows = [Line2D([], [], marker=MARKERS[r], ls="", color="#444444", label=ROWS[r]) for r in ROWS if r != "none" and r in {a.rows for a in arms}]
    ax.legend(handles=lines + rows, loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8, frameon=False)


def _cost_axes(arms: Sequence[Arm], title: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.5, 4.2))
    ax = figure.add_subplot()
    ax.set(title=title, xlabel="cost of the prompt relative to exact (multiply-adds)", ylabel=y)
    ax.grid(alpha=0.25)
    _legend(ax, arms)
    return figure, ax


def loss_by_cost(summary: dict, margin: float) -> Figure:
    """Loss over exact of each arm against its cost; the margin as a band."""
    arms = {name: Arm.parse(name) for name in summary if name != "exact"}
    figure, ax = _cost_axes(list(arms.values()), "Loss against cost (left and low is better)", "loss over exact, nats [95 %]")
    ax.axhspan(-margin, margin, color="#000000", alpha=0.06, lw=0)
    for name, arm in arms.items():
        _bars(ax, summary[name]["cost"], summary[name]["over_exact"], arm)
    ax.set_yscale("symlog", linthresh=0.01)
    return figure


def recall_by_cost(summary: dict, title: str) -> Figure:
    """Share of items answered by each arm against its cost."""
    arms = {name: Arm.parse(name) for name in summary}
    figure, ax = _cost_axes(list(arms.values()), f"{title}: recall against cost (left and high is better)", "recalled [95 %]")
    for name, arm in arms.items():
        _bars(ax, summary[name]["cost"], summary[name]["share"], arm)
    ax.set_ylim(-0.05, 1.05)
    return figure


def recall_by_depth(summary: dict, title: str) -> Figure | None:
    """Hits of each arm at each depth, as a map; None where the items have no depth."""
    names = [name for name in summary if summary[name]["depths"]]
    if not names:
        return None
    depths = [d["depth"] for d in summary[names[0]]["depths"]]
    shares = np.array([[d["value"] for d in summary[name]["depths"]] for name in names])
    figure = Figure(figsize=(7.5, 0.8 + 0.24 * len(names)))
    ax = figure.add_subplot()
    ax.imshow(shares, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    for i, name in enumerate(names):
        for j, d in enumerate(summary[name]["depths"]):
            ax.text(j, i, f"{d['hits']}/{d['n']}", ha="center", va="center", fontsize=7, color="black" if shares[i, j] > 0.5 else "white")
    ax.set_xticks(range(len(depths)), [f"{d:.2f}" for d in depths], fontsize=8)
    ax.set_yticks(range(len(names)), names, fontsize=8)
    ax.set(title=f"{title}: recall by depth", xlabel="depth of the fact in the filled rows (0: start)")
    return figure


def kl_histograms(items: Sequence[dict]) -> Figure:
    """How the scored tokens spread over KL(exact || arm), by split; the noise floor in each."""
    counts: dict[Arm, np.ndarray] = {}
    for r in items:
        arm = Arm.parse(r["arm"])
        if arm.mode != "exact" and arm.rows == "none":
            counts[arm] = counts.get(arm, 0) + np.array(r["kl_counts"])
    splits = sorted({a.split for a in counts if a.split}) or [0]
    figure = Figure(figsize=(7.5, 2.6 * len(splits)))
    all_axes = figure.subplots(len(splits), sharex=True, squeeze=False)[:, 0]
    for ax, split in zip(all_axes, splits, strict=True):
        for arm, n in counts.items():
            if arm.split in (0, split):
                ax.stairs(n / n.sum(), KL_EDGES, color=COLOURS[family(arm)], label=family(arm), lw=1.3)
        ax.set(xscale="log", ylabel=f"share of tokens, S = {split}" if split else "share of tokens")
        ax.grid(alpha=0.25)
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8, frameon=False)
    all_axes[0].set_title("KL(exact || arm) of the scored tokens")
    all_axes[-1].set_xlabel("nats, 4 bins to a factor of ten; smaller values count in the first bin")
    return figure


def splices_by_layer(rows: Sequence[dict], title: str) -> Figure:
    """Change of the answer's log-probability by layer, as bars with intervals: above what filled keys take from an exact prompt,
    below what exact rows give back to a filled one.
    """
    panels = (["filled keys"], [name for name in splices.ALL if name != "filled keys"])
    layers, _ = splices.by_layer(rows, "filled keys")
    figure = Figure(figsize=(max(7.5, 0.55 * len(layers)), 5.6))
    for ax, names in zip(figure.subplots(2, sharex=True), panels, strict=True):
        for i, name in enumerate(names):
            value, low, high = splices.by_layer(rows, name)[1].T
            at = np.array(layers) + (i - (len(names) - 1) / 2) * 0.8 / len(names)
            reach = np.maximum([value - low, high - value], 0)
            ax.bar(at, value, 0.8 / len(names), yerr=reach, color=SPLICE_COLOURS[name], label=name, error_kw={"lw": 0.8, "capsize": 1.5})
        ax.axhline(0, color="#000000", lw=0.6)
        ax.set(ylabel="change, nats a token [95 %]")
        ax.grid(axis="y", alpha=0.25)
        ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8, frameon=False)
    figure.axes[0].set_title(f"{title}: log-probability of the answer, one layer spliced")
    figure.axes[1].set_xlabel("layer")
    figure.axes[1].xaxis.get_major_locator().set_params(integer=True)
    return figure


def layer_scores(maps: Sequence[dict]) -> Figure | None:
    """R^2 of K and V on held-out text by layer, as the files of maps record it; None where none was scored."""
    scored = [m for m in maps if m["scores"]]
    if not scored:
        return None
    figure = Figure(figsize=(7.5, 3.4))
    ax = figure.add_subplot()
    for m in scored:
        for part, style in (("k", "-"), ("v", ":")):
            values = [s[f"r2_{part}"] for s in m["scores"]]
            label = f"S{m['split']} {m['kind']}: {part.upper()}"
            ax.plot([s["layer"] for s in m["scores"]], values, style, marker=".", lw=1.2, color=COLOURS[m["kind"]], label=label)
    ax.set(title="R² of the maps by layer", xlabel="layer", ylabel="R², held-out text")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.25)
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize=8, frameon=False)
    return figure
