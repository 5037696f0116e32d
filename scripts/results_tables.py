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

from ridgefill.evaluation import Arm, page, splices, stats, study, tasks

STUDY, PAGE = ROOT / "results" / "study", ROOT / "docs" / "RESULTS.md"
HEAD = """# What fills cost: results

Made by `scripts/study.sh` and written by `scripts/results_tables.py`; do not edit. What arms, columns and tasks are, and how intervals
and p-values come about: [EVALUATE.md](EVALUATE.md).
"""
WITH_NORM, WITHOUT = "pico-qwen3-s", "pico-llama"  # of as many layers, looking facts up in the same one, with the same tokenizer
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


def splits_of(summary: dict) -> tuple[list[int], list[str], dict[tuple[int, str], dict]]:
    """Splits, ways of filling, and what was found for each pair of them that was measured, of arms without further exact rows."""
    plain = {name: a for name, a in ((name, Arm.parse(name)) for name in summary) if a.split and a.rows == "none"}
    found = {(a.split, way(a)): summary[name] for name, a in plain.items()}
    return sorted({a.split for a in plain.values()}), list(dict.fromkeys(map(way, plain.values()))), found


def by_split(summary: dict) -> str:
    """Hits, a row for each split; and from which split on each way keeps KEPT of exact's. "" where fewer than two were measured."""
    splits, ways, found = splits_of(summary)
    if len(splits) < 2:
        return ""
    rows = [[str(s), *(page.written(found[s, w]["share"], ".3f") if (s, w) in found else "" for w in ways)] for s in splits]
    exact = summary["exact"]
    return (
        f"\nBy split; exact {page.written(exact['share'], '.3f')} of {exact['n']}. Last row: the lowest split from which on at least "
        f"{KEPT:.0%} of exact's hits are kept.\n\n" + markdown(["split", *ways], [*rows, ["back from", *backs(summary).values()]])
    )


def backs(summary: dict) -> dict[str, str]:
    """By way of filling."""
    splits, ways, found = splits_of(summary)
    return {w: _back({s: found[s, w] for s in splits if (s, w) in found}) for w in ways}


def back_from(results: dict[str, dict]) -> str:
    """The last rows of by_split() of all models and tasks that have some."""
    rows, ways = [], {}
    for name, result in results.items():
        for what in (w for w in result["sets"] if w in tasks.TASKS and by_split(result[w]["summary"])):
            exact, back = result[what]["summary"]["exact"], backs(result[what]["summary"])
            ways |= dict.fromkeys(back)
            n_layer = result["model"]["n_layer"]
            rows.append(([name, str(n_layer), what, f"{page.written(exact['share'], '.3f')} of {exact['n']}"], back))
    if not rows:
        return ""
    table = [[*head, *(back.get(w, "") for w in ways)] for head, back in rows]
    return (
        f"\n## Where recall comes back\n\nThe lowest split from which on at least {KEPT:.0%} of exact's hits are kept, by what fills the rows.\n\n"
        + markdown(["model", "layers", "task", "exact", *ways], table)
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


def chosen_rows(results: dict[str, dict]) -> str:
    """What a tenth of the filled rows does that is chosen by attention, over random rows and over a longer tail: every model and set."""
    rows = []
    for name, result in results.items():
        for what in (w for w in result["sets"] if w != splices.NAME):
            pairs = {(p["a"], p["b"]): p for p in result[what]["pairs"]}
            for a in dict.fromkeys(a for a, _ in pairs if "+attention" in a):
                row = [name, what, a.split("+")[0]]
                for other in ("random", "tail"):
                    p = pairs[a, a.replace("+attention", f"+{other}")]
                    row += [page.written(p["share"] if "share" in p else p["loss"], "+.3f"), f"{p['p_holm']:.2g}"]
                rows.append(row)
    if not rows:
        return ""
    head = ["model", "set", "rows chosen in", "over random rows", "p", "over a longer tail", "p"]
    return (
        "\n## Rows chosen by attention\n\nA tenth of the filled rows runs exactly. Of tasks the difference in the share of hits (more is "
        "better), of the loss that in nats (less is better).\n\n" + markdown(head, rows)
    )


def head_norm(results: dict[str, dict]) -> str:
    """Hits of the two small models that differ in the norm on Q and K, on the same prompts."""
    if not {WITH_NORM, WITHOUT} <= results.keys():
        return ""
    rows = []
    for what in (w for w in results[WITHOUT]["sets"] if w in tasks.TASKS):
        hits = [_hits(results[name][what]["items"]) for name in (WITH_NORM, WITHOUT)]
        for arm in (a for a in hits[0] if a in hits[1] and a != "noise" and Arm.parse(a).rows == "none"):
            with_norm, without = (h[arm] for h in hits)
            if with_norm.keys() != without.keys():
                raise SystemExit(f"results_tables: expected the same prompts of {what} for {WITH_NORM} and {WITHOUT}, found others")
            x, y = ([h[item] for item in with_norm] for h in (with_norm, without))
            shares = [page.written(stats.share(sum(h), len(h)).as_dict(), ".3f") for h in (x, y)]
            rows.append([what, f"`{arm}`", *shares, page.written(stats.share_difference(x, y).as_dict(), "+.3f"), str(len(x))])
    head = ["task", "arm", WITH_NORM, WITHOUT, "difference", "n"]
    return (
        f"\n## A norm on Q and K\n\n{WITH_NORM} has it, {WITHOUT} has not. The paper says that with it shallow splits work. The same prompts "
        "for both; compare each arm with `exact` of its model, since the models differ in more than the norm (width, heads, how well they "
        "recall).\n\n" + markdown(head, rows)
    )


def _hits(items: list[dict]) -> dict[str, dict[tuple, bool]]:
    """By arm and prompt."""
    out: dict[str, dict[tuple, bool]] = {}
    for i in items:
        out.setdefault(i["arm"], {})[i["seed"], i["document"], i["value"]] = i["hit"]
    return out


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
    results = {p.stem: json.loads(p.read_text()) for p in sorted(folder.glob("*.json"), key=lambda p: p.stem)}
    across = back_from(results) + head_norm(results) + chosen_rows(results)
    sections = [section(name, result) for name, result in results.items()]
    return HEAD + (across + "".join(sections) or "\nNothing is measured yet.\n")


def main(folder: Path = STUDY, out: Path = PAGE) -> None:
    out.write_text(render(folder))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
