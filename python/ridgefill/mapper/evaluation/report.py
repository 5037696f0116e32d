"""Figures of a mapper from records of items: losses, hits, retention, and what transferred rows are better than."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...evaluation import stats
from ...evaluation.errors import EvaluationError
from ...evaluation.report import adjust, by_arm, compare_facts, compare_loss, summarise_facts, summarise_loss

TARGET, TRANSFER = "target", "transfer"
FLOORS = ("empty+", "empty")  # retention is 0 there, and 1 at the target
CONTROLS = ("empty+", "wrong", "empty", "random", "identity")  # what transferred rows must be better than
LEVEL = 0.05


def losses(records: Sequence[dict]) -> dict:
    """By arm: the figures of summarise_loss beside the target, and `retention`."""
    return _retained(summarise_loss(records, TARGET), _values(records, "document", "loss"))


def hits(records: Sequence[dict]) -> dict:
    """By arm: the figures of summarise_facts beside the target, and `retention`; for questions of n choices also over `chance`,
    the mean of 1 / n.
    """
    values = _values(records, "seed", "hit")
    chance = [1 / r["n_choices"] for r in by_arm(records, "seed")[TARGET]] if "n_choices" in records[0] else None
    return _retained(summarise_facts(records, TARGET), values, chance)


def _values(records: Sequence[dict], item: str, field: str) -> dict[str, np.ndarray]:
    return {name: np.array([r[field] for r in rows], float) for name, rows in by_arm(records, item).items()}


def _retained(summary: dict, values: dict[str, np.ndarray], chance: list[float] | None = None) -> dict:
    floors = {floor: values[floor] for floor in FLOORS if floor in values} | ({"chance": np.array(chance)} if chance else {})
    for name, s in summary.items():
        s["retention"] = {floor: retention(values[name], at, values[TARGET], f"retention of {name} over {floor}") for floor, at in floors.items()}
    return summary


def retention(arm: np.ndarray, floor: np.ndarray, target: np.ndarray, what: str) -> dict | None:
    """(floor - arm) / (floor - target) of the means, paired by item, BCa interval: the share of what the target gets from the rows
    that an arm keeps. None where floor and target are not clearly apart: the ratio then says nothing.
    """
    gap = stats.mean_difference(floor, target, what)
    if gap.low <= 0 <= gap.high:
        return None
    try:
        with np.errstate(all="ignore"):
            found = stats.ratio(floor - arm, floor - target, what).as_dict()
    except EvaluationError:  # some draw of the bootstrap has no gap at all
        return None
    return {key: x + 0 for key, x in found.items()}  # no negative zeros


def compare(what: str, records: Sequence[dict]) -> list[dict]:
    """Transfer beside each control that was measured: the difference, positive where transfer is better, and its p."""
    arms = {r["arm"] for r in records}
    if TRANSFER not in arms:
        return []
    out = []
    for control in (c for c in CONTROLS if c in arms):
        if what == "loss":
            found = compare_loss(records, control, TRANSFER)
            out.append({"set": what, "control": control, "better": found["loss"], "unit": "nats", "p": found["p"]})
        else:
            found = compare_facts(records, TRANSFER, control)
            out.append({"set": what, "control": control, "better": found["share"], "unit": "of the items", "p": found["p"]})
    return out


def conclude(comparisons: Sequence[dict]) -> None:
    """Adjust the p of all comparisons by Holm, and put `beats` and a `line` on each: beaten is a control whose interval lies on
    one side of 0 with an adjusted p below LEVEL.
    """
    adjust(comparisons)
    for c in comparisons:
        e = c["better"]
        c["beats"] = bool(e["low"] > 0 and c["p_holm"] < LEVEL)
        verb = "beats" if c["beats"] else "is worse than" if e["high"] < 0 and c["p_holm"] < LEVEL else "is not shown to beat"
        c["line"] = f"{c['set']}: transfer {verb} {c['control']}: {e['value']:+.3f} [{e['low']:+.3f}, {e['high']:+.3f}] {c['unit']}, p {c['p_holm']:.2g}"
