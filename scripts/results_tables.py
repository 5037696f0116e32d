#!/usr/bin/env python3
"""Write docs/RESULTS.md from the results of scripts/study.sh: scripts/results_tables.py [results/study [docs/RESULTS.md]].

Every figure in it comes from a file there, and a model without a file is not in it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

from ridgefill.evaluation import Arm, page, splices, study

STUDY, PAGE = ROOT / "results" / "study", ROOT / "docs" / "RESULTS.md"
HEAD = """# What fills cost: results

Made by `scripts/study.sh` and written by `scripts/results_tables.py`; do not edit. What arms, columns and tasks are, and how intervals
and p-values come about: [EVALUATE.md](EVALUATE.md).
"""
KEPT = 0.95  # share of exact's hits from which on recall is said to be back
# What another implementation, in PyTorch, measured with SmolLM2 on other text of its own: loss over exact, nats, and the difference
# within which this one was expected
ELSEWHERE = {
    "identity-S15": (0.49, 0.05), "fill-S15:input": (0.068, 0.01), "fill-S18:kv": (0.021, 0.006), "fill-S19:input": (0.024, 0.005),
}  # fmt: skip


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(r) + " |" for r in (head, ["---"] * len(head), *rows)) + "\n"


def of_page(table: page.Table) -> str:
    rows = [[text for text, _ in cells] for cells in table.rows()]
    rows = [[f"`{r[0]}`", *r[1:]] if table.named else r for r in rows]
    return (f"\n**{table.title}**\n\n" if table.title else "\n") + markdown(table.head, rows)


def by_split(summary: dict) -> str:
    """Hits of arms without further exact rows, a row for each split; and from which split on each keeps KEPT of exact's. "" where
    fewer than two splits were measured.
    """
    arms = {name: Arm.parse(name) for name in summary}
    plain = {name: a for name, a in arms.items() if a.split and a.rows == "none"}
    splits, ways = sorted({a.split for a in plain.values()}), list(dict.fromkeys(way(a) for a in plain.values()))
    if len(splits) < 2:
        return ""
    found = {(a.split, way(a)): summary[name] for name, a in plain.items()}
    rows = [[str(s), *(page.written(found[s, w]["share"], ".3f") if (s, w) in found else "" for w in ways)] for s in splits]
    back = [_back({s: found[s, w] for s in splits if (s, w) in found}) for w in ways]
    exact = summary["exact"]
    return (
        f"\nBy split; exact {page.written(exact['share'], '.3f')} of {exact['n']}. Last row: the lowest split from which on at least "
        f"{KEPT:.0%} of exact's hits are kept.\n\n" + markdown(["split", *ways], [*rows, ["back from", *back]])
    )


def _back(found: dict[int, dict]) -> str:
    """The lowest of these splits from which on KEPT of exact's hits are there."""
    kept = {s: entry["of_exact"] is not None and entry["of_exact"] >= KEPT for s, entry in found.items()}
    return next((str(s) for s in sorted(kept) if all(kept[t] for t in kept if t >= s)), "none of these")


def way(a: Arm) -> str:
    """What fills the rows: the mode or, of fill, the kind of the maps."""
    return a.kind or a.mode


def beside(summary: dict) -> str:
    """Losses beside those of the other implementation; "" where no such arm was measured."""
    rows = []
    for name, (expected, within) in ELSEWHERE.items():
        if name in summary:
            value = summary[name]["over_exact"]
            inside = "yes" if abs(value["value"] - expected) <= within else "no"
            rows.append([f"`{name}`", page.written(value, "+.3f"), f"{expected:+.3f} ± {within:.3f}", inside])
    if not rows:
        return ""
    text = "\nBeside what another implementation, in PyTorch, found on text of its own (loss over exact, nats):\n\n"
    return text + markdown(["arm", "here", "there", "within"], rows)


def section(name: str, result: dict) -> str:
    s, m = result["settings"], result["machine"]
    sizes = {
        "loss": f"{s['documents']} documents, P = {s['prefix']:,}, T = {s['tail']}, {s['scored']} tokens scored",
        "others": f"{s['items']} prompts of {s['rows']:,} rows, T = {s['item_tail']}",
    }
    out = []
    for what in result["sets"]:
        out.append(f"\n### {what}: {study.about(what)}\n\n{sizes.get(what, sizes['others'])}.\n")
        summary = result[what]["summary"]
        out += [of_page(t) for t in page.tables(result, what)]
        if what != splices.NAME:
            out.append(beside(summary) if what == "loss" else by_split(summary))
    maps = ", ".join(f"S{m['split']} {m['kind']}" for m in result["maps"]) or "none"
    made = f"{result['model']['file']}: {result['model']['n_layer']} layers ({result['model']['architecture']}); maps: {maps}. {m['cpu']}, {m['cores']} cores, commit {m['commit']}, seed {s['seed']}."
    return f"\n## {name}\n\n{made}\n" + "".join(out)


def render(folder: Path) -> str:
    """The page for the results in a folder, in the order of their names."""
    sections = [section(p.stem, json.loads(p.read_text())) for p in sorted(folder.glob("*.json"), key=lambda p: p.stem)]
    return HEAD + ("".join(sections) or "\nNothing is measured yet.\n")


def main(folder: Path = STUDY, out: Path = PAGE) -> None:
    out.write_text(render(folder))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
