"""The report of a study: one HTML file that needs no other, and tables of its records."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from . import plots, splices, study

TEMPLATES = Path(__file__).parent
NOT_IN_CSV = ("kl_counts",)


@dataclass(frozen=True)
class Column:
    """A column of a table: `key` of an entry of the result (with "/" in it the key of an entry of that entry), and how its number (or
    the three of an interval) is written.
    """

    title: str
    key: str
    form: str = ""


LOSS = (
    Column("cost", "cost", ".3f"), Column("loss", "loss", ".3f"), Column("over exact", "over_exact", "+.4f"),
    Column("new tokens", "new_over_exact", "+.4f"), Column("key tokens", "key_over_exact", "+.3f"),
    Column("same top token", "top1", ".4f"), Column("mean KL", "kl", ".3g"), Column("median KL", "kl_median", ".3g"),
    Column("same greedy text", "decode", ".3f"), Column("quoted", "quoted", ".3f"), Column("p", "p_holm", ".2g"), Column("verdict", "verdict"),
)  # fmt: skip
RECALL = (
    Column("cost", "cost", ".3f"), Column("filled rows", "filled_rows", ",.0f"), Column("chosen rows", "chosen_rows_median", ",.0f"),
    Column("hits", "hits", "d"), Column("of", "n", "d"), Column("recalled", "share", ".3f"), Column("over exact", "over_exact", "+.3f"),
    Column("mean score", "score", ".3f"), Column("p", "p_holm", ".2g"), Column("verdict", "verdict"),
)  # fmt: skip
LOSS_PAIRS = (
    Column("arm", "a"), Column("against", "b"), Column("loss over it", "loss", "+.4f"), Column("key tokens", "key", "+.3f"),
    Column("p", "p_holm", ".2g"),
)  # fmt: skip
RECALL_PAIRS = (
    Column("arm", "a"), Column("against", "b"), Column("recalled over it", "share", "+.3f"), Column("alone right", "only_a", "d"),
    Column("the other alone right", "only_b", "d"), Column("p", "p_holm", ".2g"),
)  # fmt: skip
SPLICES = (
    Column("splice", "splice"), Column("layer", "layer"), Column("hits", "hits", "d"), Column("recalled", "share", ".3f"),
    Column("log-probability of the answer, change", "log_prob", "+.3f"), Column("from", "over"),
)  # fmt: skip


def written(value, form: str) -> str:
    """A value as a table shows it: an interval with its ends, a dash for what was not measured. Where every item has the same value
    a bootstrap knows no interval, and none is shown.
    """
    if value is None:
        return "–"
    if isinstance(value, dict):
        if value["low"] == value["high"]:
            return f"{value['value']:{form}}"
        value, low, high = (f"{value[k]:{form}}" for k in ("value", "low", "high"))
        return f"{value} [{low}, {high}]"
    return f"{value:{form}}"


@dataclass(frozen=True)
class Table:
    """path is where in the result the entries stand, rows are (key there, name to show); `title` stands above."""

    path: tuple[str, ...]
    columns: Sequence[Column]
    entries: dict | list
    named: bool
    title: str = ""

    @property
    def head(self) -> list[str]:
        return (["arm"] if self.named else []) + [c.title for c in self.columns]

    def rows(self) -> Iterator[list[tuple[str, str]]]:
        """Cells (text, path of the value in the result) of each row; a name has no path."""
        keys = list(self.entries) if self.named else range(len(self.entries))
        for key in keys:
            cells = [(key, "")] if self.named else []
            for c in self.columns:
                value = self.entries[key]
                for part in c.key.split("/"):
                    value = value.get(part)
                cells.append((written(value, c.form), "" if value is None else "/".join(map(str, (*self.path, key, c.key)))))
            yield cells


def tables(result: dict, what: str) -> list[Table]:
    """The tables of one set."""
    found = result[what]
    if what == splices.NAME:
        return [Table((what, "summary", m, "rows"), SPLICES, s["rows"], named=False, title=m) for m, s in found["summary"].items()]
    of_arms, of_pairs = (LOSS, LOSS_PAIRS) if what == "loss" else (RECALL, RECALL_PAIRS)
    pairs = [Table((what, "pairs"), of_pairs, found["pairs"], named=False)] if found["pairs"] else []
    return [Table((what, "summary"), of_arms, found["summary"], named=True), *pairs]


def _figures(result: dict, what: str) -> list:
    """The plots of one set, None for one that its items do not allow."""
    summary = result[what]["summary"]
    if what == splices.NAME:
        return [plots.splices_by_layer(s["rows"], m) for m, s in summary.items()]
    if what == "loss":
        return [plots.loss_by_cost(summary, result["settings"]["loss_margin"]), plots.kl_histograms(result[what]["items"])]
    return [plots.recall_by_cost(summary, what), plots.recall_by_depth(summary, what)]


def render(result: dict) -> str:
    """The HTML of a study's result (study.Study.run(), with what the command adds)."""
    sections = [
        {"name": what, "about": study.about(what), "tables": tables(result, what), "figures": pictures(_figures(result, what))}
        for what in result["sets"]
    ]
    maps = pictures([plots.layer_scores(result["maps"])])
    return template(TEMPLATES / "page.html.j2").render(result=result, sections=sections, maps_figures=maps)


def template(path: Path) -> jinja2.Template:
    """A page, which may include what lies in TEMPLATES."""
    loader = jinja2.FileSystemLoader([path.parent, TEMPLATES])
    env = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return env.get_template(path.name)


def pictures(figures: Sequence) -> list[tuple[str, str]]:
    """Address and title of each figure that there is."""
    return [(plots.svg(f), f.axes[0].get_title()) for f in figures if f]


def write_csv(path: Path, records: Sequence[dict]) -> None:
    """A line for each record, all of which have the same fields; lists of counts are left to the JSON."""
    fields = [f for f in records[0] if f not in NOT_IN_CSV]
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, fields, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(records)
