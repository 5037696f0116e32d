"""The report of a mapper's evaluation: one HTML file that needs no other."""

from __future__ import annotations

from pathlib import Path

from ...evaluation.page import Column, Table, pictures, template
from . import plots, study, turns

TEMPLATE = Path(__file__).with_name("mapper.html.j2")
LOSS = (
    Column("cost", "cost", ".3f"), Column("loss", "loss", ".3f"), Column("over target", "over_exact", "+.4f"),
    Column("retention over empty+", "retention/empty+", ".3f"), Column("over empty", "retention/empty", ".3f"),
    Column("key tokens", "key_over_exact", "+.3f"), Column("same top token", "top1", ".4f"), Column("mean KL", "kl", ".3g"),
)  # fmt: skip
HITS = (
    Column("cost", "cost", ".3f"), Column("hits", "hits", "d"), Column("of", "n", "d"), Column("share", "share", ".3f"),
    Column("over target", "over_exact", "+.3f"), Column("of the target's", "of_exact", ".3f"),
    Column("retention over empty+", "retention/empty+", ".3f"), Column("over empty", "retention/empty", ".3f"),
    Column("over chance", "retention/chance", ".3f"), Column("mean score", "score", ".3f"),
)  # fmt: skip
TURNS = (
    Column("model", "model"), Column("loss of the model alone", "alone", ".3f"), Column("over it", "over_alone", "+.4f"),
    Column("mean KL", "kl", ".3g"), Column("same top token", "top1", ".4f"),
)  # fmt: skip
DRIFT = (
    Column("model", "model"), Column("from", "from"), Column("to", "to"), Column("more loss over itself alone", "loss", "+.4f"), Column("p", "p", ".2g"),
)  # fmt: skip
COMPARISONS = (
    Column("set", "set"), Column("transfer against", "control"), Column("better by", "better", "+.4f"), Column("", "unit"), Column("p", "p_holm", ".2g"),
)  # fmt: skip


def _tables(found: dict, what: str) -> list[Table]:
    if what == turns.NAME:
        drift = [Table((what, "drift"), DRIFT, found["drift"], named=False, title="Drift")] if found["drift"] else []
        return [Table((what, "summary"), TURNS, found["summary"], named=True), *drift]
    columns = LOSS if what == "loss" else HITS
    floors = next(iter(found["summary"].values()))["retention"]
    columns = [c for c in columns if not c.key.startswith("retention/") or c.key.split("/")[1] in floors]
    return [Table((what, "summary"), columns, found["summary"], named=True)]


def _figures(summary: dict, what: str) -> list:
    if what == turns.NAME:
        return [plots.by_turn(summary)]
    if what == "loss":
        return [plots.by_arm(summary, "over_exact", "Loss over the target", "nats [95 %]")]
    return [plots.by_arm(summary, "share", f"{what}: share of hits", "share [95 %]")]


def render(result: dict) -> str:
    """The HTML of a result of study.Study.run(), with what the command adds."""
    sections = [
        {"name": what, "about": study.about(what), "tables": _tables(result[what], what), "figures": pictures(_figures(result[what]["summary"], what))}
        for what in result["sets"]
    ]
    comparisons = Table(("comparisons",), COMPARISONS, result["comparisons"], named=False)
    fit = pictures([plots.by_number(result["mapper"])])
    return template(TEMPLATE).render(result=result, sections=sections, comparisons=comparisons, fit=fit)
