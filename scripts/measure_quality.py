#!/usr/bin/env python3
"""Measure what fills cost: loss on real text, and facts planted in the filled region.

    scripts/measure_quality.py                  the full measurement; writes results/quality-smollm2.json
    scripts/measure_quality.py --reduced        a small one, about two minutes
    scripts/measure_quality.py --sets digits --facts-arms exact,fill-S15,fill-S15+digits,fill-S15+random

Sets: `loss` (tokens after a prefix of P rows, one window per document), `digits` and `words` (facts of a number or of words,
in chat prompts). Arms are written MODE[-SPLIT[:KIND]][+ROWS]: exact, cut (context cut to the tail), nofill-S15, identity-S20,
fill-S20, fill-S20:kv, fill-S15+digits, fill-S15+random (as many rows as digits selects). A run that was stopped goes on where it was.

Exit status: 0 when every criterion holds that the chosen sets and arms allow to check, 1 when one does not, 2 when the
measurement itself failed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

from ridgefill import __version__, lib
from ridgefill.errors import RidgefillError
from ridgefill.evaluation import Arm, facts, prompts, report, texts
from ridgefill.evaluation.journal import Journal
from ridgefill.evaluation.study import Settings, Study
from ridgefill.machine import machine
from ridgefill.progress import progress

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MAPS = [ROOT / "models" / f"smollm2-135m-instruct.s{s}.q8_0.ridge.gguf" for s in (20, 15)]
DEEP, SHALLOW = 20, 15  # splits above and below the layer that carries recall in this model
SETS = "loss,digits,words"
LOSS_ARMS = "exact,cut,fill-S20,identity-S20,fill-S15,identity-S15,nofill-S15"
FACTS_ARMS = "exact,fill-S20,fill-S15,fill-S15+digits,fill-S15+random"
OUT, OUT_REDUCED = Path("results/quality-smollm2.json"), Path("out/quality-reduced.json")
FILLER = ",".join(facts.FILLER_SOURCES)

console = Console()

SIZES = {"documents": 24, "loss_arms": LOSS_ARMS, "item_arms": FACTS_ARMS, "sources": FILLER}
REDUCED = {
    "documents": 6,
    "prefix": 640,
    "tail": 96,
    "scored": 96,
    "items": 8,
    "rows": 512,
    "item_tail": 96,
    "loss_arms": "exact,fill-S20,identity-S20",
    "item_arms": "exact,fill-S20,fill-S15,fill-S15+digits",
}

# a few items cannot tell .95 from .85: these bounds tell a working fill from a broken one
REDUCED_BOUNDS = report.Bounds(n_documents=6, n_facts=8, loss=0.06, times=2.0, recall=0.85, kept=0.70, lost=0.25)


def check(found: dict, reduced: bool) -> tuple[list[report.Criterion], list[str]]:
    """Criteria of the sets that were measured with every arm they need, and why others were not checked."""
    bounds = REDUCED_BOUNDS if reduced else report.Bounds()
    checks = {
        "loss": ([Arm("fill", DEEP), Arm("identity", DEEP)], lambda r: report.loss_criteria(r, DEEP, bounds)),
        "digits": (
            [Arm("fill", DEEP), Arm("fill", SHALLOW), Arm("fill", SHALLOW, "digits")],
            lambda r: report.facts_criteria(r, DEEP, SHALLOW, bounds),
        ),
    }
    criteria, skipped = [], []
    for name, (needs, make) in checks.items():
        missing = [a.name for a in needs if name in found and a.name not in found[name]["summary"]]
        if name in found and not missing:
            criteria += make(found[name]["items"])
        else:
            skipped.append(f"{name}: {'arms not measured: ' + ', '.join(missing) if missing else 'not measured'}")
    criteria += report.kinds_criteria(found.get("loss", {}).get("pairs", ()), SHALLOW)
    return criteria, skipped


def show(found: dict, criteria: Sequence[report.Criterion], skipped: Sequence[str]) -> None:
    if "loss" in found:
        console.print(report.loss_table(found["loss"]["summary"], "Loss on real text [95 % over documents]"))
        if found["loss"]["pairs"]:
            console.print(report.pairs_table(found["loss"]["pairs"], "Kinds of maps, paired by document"))
    for kind in found:
        if kind != "loss":
            console.print(report.facts_table(found[kind]["summary"], f"Facts made of {kind}"))
            for p in found[kind]["pairs"]:
                console.print(f"{p['a']} alone {p['only_a']}, {p['b']} alone {p['only_b']}: McNemar p = {p['p']:.2g}")
    if criteria:
        console.print(report.criteria_table(criteria))
    for line in skipped:
        console.print(f"not checked: {line}", highlight=False)


def measure(
    model_path: Path, map_paths: Sequence[Path], text: Path, sets: Sequence[str], s: Settings, reduced: bool, threads: int,
    journal_path: Path,
) -> dict:  # fmt: skip
    """Measure and return the whole result; raises RidgefillError where that is not possible."""
    wanted = {a.split for what in sets for a in s.arms(what) if a.needs_maps}
    docs = texts.documents(text)
    with lib.Model(model_path) as model:
        maps = sorted((lib.Maps(model, p) for p in map_paths), key=lambda m: (m.split, m.kind))
        maps = [m for m in maps if m.split in wanted]
        with Study(model, maps, docs, sets, s, threads) as study, progress(False) as bars:
            about = study.about | {"reduced": reduced}
            found = study.run(Journal(journal_path, about), bars)
        for m in maps:
            m.close()
    criteria, skipped = check(found, reduced)
    show(found, criteria, skipped)
    return (
        {"tool": f"ridgefill {__version__}", "machine": machine()}
        | about
        | found
        | {"criteria": [c.as_dict() for c in criteria], "not_checked": skipped}
    )


def main(
    model: Annotated[Path, typer.Option(help="model file")] = MODEL,
    maps: Annotated[list[Path], typer.Option(help="sidecars, one per split layer and kind")] = MAPS,
    text: Annotated[Path, typer.Option(help="text set of scripts/fetch_text.sh")] = ROOT / "out" / "text",
    out: Annotated[Path | None, typer.Option(help=f"result file [default: {OUT}, or {OUT_REDUCED}]")] = None,
    sets: Annotated[str, typer.Option(help="some of loss,digits,words")] = "",
    reduced: Annotated[bool, typer.Option(help="a small measurement with the same criteria")] = False,
    documents: Annotated[int | None, typer.Option(help="documents of the loss")] = None,
    n_facts: Annotated[int | None, typer.Option("--facts", help="facts of each kind")] = None,
    fact_rows: Annotated[int | None, typer.Option(help=f"most rows of a prompt with a fact, at most {prompts.SLACK} fewer")] = None,
    loss_arms: Annotated[str | None, typer.Option(help="arms of the loss")] = None,
    facts_arms: Annotated[str | None, typer.Option(help="arms of the facts")] = None,
    filler: Annotated[str | None, typer.Option(help="sources of the text around facts, e.g. handbook,reference,jargon")] = None,
    seed: Annotated[int | None, typer.Option(help="of windows, facts and random rows")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads")] = 2,
    fresh: Annotated[
        bool, typer.Option(help="measure everything anew instead of going on with a run that was stopped")
    ] = False,
) -> None:
    chosen = {
        "documents": documents,
        "items": n_facts,
        "rows": fact_rows,
        "loss_arms": loss_arms,
        "item_arms": facts_arms,
        "sources": filler,
        "seed": seed,
    }
    sizes = SIZES | (REDUCED if reduced else {}) | {k: v for k, v in chosen.items() if v is not None}
    names = (sets or ("loss,digits" if reduced else SETS)).split(",")
    out = out or ROOT / (OUT_REDUCED if reduced else OUT)
    journal = out.with_suffix(".journal.jsonl")
    if fresh:
        journal.unlink(missing_ok=True)
    try:
        settings = Settings(**{k: tuple(v.split(",")) if isinstance(v, str) else v for k, v in sizes.items()})
        result = measure(model, maps, text, names, settings, reduced, threads, journal)
    except RidgefillError as e:
        console.print(f"measure_quality: {e}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
    journal.unlink()  # its records are in the result now
    console.print(f"written: {out}", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if all(c["holds"] for c in result["criteria"]) else 1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(help=__doc__)(main)
    app()
