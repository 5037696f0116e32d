"""Splices of filled prompts as a set of a study: which layer's keys and values the answer hangs on, of each file of maps.

The prompts are those of the task `single`: a number in their filled rows. See ridgefill.splice for what is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.table import Column, Table

from .. import lib
from ..splice import NORMS, SPLICES, Splicer, splice
from . import stats
from .errors import EvaluationError
from .tasks import TaskItem

NAME = "splices"
TASK = "single"
ALL = SPLICES | NORMS


def label(maps: lib.Maps) -> str:
    return f"S{maps.split}:{maps.kind}"


def measure(splicer: Splicer, item: TaskItem, maps: Sequence[lib.Maps]) -> list[dict]:
    """Records of one prompt: every splice of each layer above the split of each file of maps, and of all of these at once; none
    when exact answers wrongly.
    """
    found = []
    for m in maps:
        layers = range(m.split + 1, splicer.model.n_layer)
        found += [{"maps": label(m), "seed": item.seed} | r for r in splice(splicer, item, item.puzzle, m, layers, ALL, together=True)]
    return found


def summarise(records: Sequence[dict]) -> dict:
    """By file of maps {"n": prompts that exact answers, "rows": one for each splice and layer}, where a layer is its number or "all".

    A row has the share of prompts answered as exact answers them (Wilson), and the change of the answer's log-probability (nats
    a token, BCa over prompts) from that of the cache that rows were exchanged in: the exact one for filled keys, else the filled.

    Raises EvaluationError when exact answers fewer than two prompts.
    """
    by_maps: dict[str, dict[tuple, dict]] = {}
    for r in records:
        by_maps.setdefault(r["maps"], {}).setdefault((r["splice"], r["layer"]), {})[r["seed"]] = r
    if not by_maps or (n := len(next(iter(by_maps.values()))["exact", -1])) < 2:
        raise EvaluationError(f"{NAME}: expected at least 2 facts that exact recalls, found {n if by_maps else 0}")
    return {maps: {"n": n, "rows": _rows(found, maps)} for maps, found in by_maps.items()}


def _rows(found: dict[tuple, dict], maps: str) -> list[dict]:
    whole = {name: found[name, -1] for name in ("exact", "filled")}
    rows = []
    for (name, il), items in found.items():
        base = "exact" if name.startswith("filled") else "filled"
        what = f"{name} of layer {il}, {maps}"
        hits = sum(r["hit"] for r in items.values())
        row = {"splice": name, "layer": "all" if il < 0 else il, "hits": hits, "share": stats.share(hits, len(items), what).as_dict()}
        if name == "exact":
            row["over"], row["log_prob"] = None, None
        else:
            pairs = [(items[seed]["log_prob"], whole[base][seed]["log_prob"]) for seed in items]
            row |= {"over": base, "log_prob": stats.mean_difference(*zip(*pairs, strict=True), what).as_dict()}
        rows.append(row)
    return rows


def by_layer(rows: Sequence[dict], name: str) -> tuple[list[int], np.ndarray]:
    """Layers and, for each, the change of the log-probability with its interval (value, low, high) in one splice."""
    single = [r for r in rows if r["splice"] == name and r["layer"] != "all"]
    return [r["layer"] for r in single], np.array([[r["log_prob"][k] for k in ("value", "low", "high")] for r in single])


def table(summary: dict, title: str) -> Table:
    """Splices of all layers at once, and of each the layer that changes most."""
    out = Table(Column("maps", no_wrap=True), Column("splice", no_wrap=True), "layers", "recalled", "log-probability, nats", title=title)
    for maps, s in summary.items():
        names = list(dict.fromkeys(r["splice"] for r in s["rows"]))
        for name in names:
            mine = [r for r in s["rows"] if r["splice"] == name]
            single = [r for r in mine if r["layer"] != "all"]
            most = [max(single, key=lambda r: abs(r["log_prob"]["value"]))] if single else []
            for r in [r for r in mine if r["layer"] == "all"] + most:
                change = r["log_prob"]
                shown = f"{change['value']:+.3f} [{change['low']:+.3f}, {change['high']:+.3f}]" if change else "-"
                out.add_row(maps, name, str(r["layer"]), f"{r['hits']} / {s['n']}", shown)
    return out
