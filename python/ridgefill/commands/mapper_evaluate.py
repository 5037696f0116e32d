"""`ridgefill mapper evaluate`: what a mapper keeps of the target's answers, measured beside what knows nothing of the pair."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from ..progress import progress
from .common import AsJson, Threads, errors_for_people, say, stdout
from .evaluate import documents_of


def evaluate(
    mapper: Annotated[str, typer.Argument(help="mapper to judge")],
    source: Annotated[str, typer.Option(help="GGUF of its source")],
    target: Annotated[str, typer.Option(help="GGUF of its target")],
    text: Annotated[list[str], typer.Option(help="folder of scripts/fetch_text.sh, of which the partition evaluation is used; with --unseen any file or folder; may be given several times")],
    out: Annotated[Path, typer.Option(help="folder in which the result gets a folder of its own, named after its settings")],
    back: Annotated[str, typer.Option(help="mapper from target to source, for the set turns")] = "",
    unseen: Annotated[bool, typer.Option("--unseen", help="the mapper was not fitted on any of this text: use all of it")] = False,
    sets: Annotated[str, typer.Option(help="what to measure: loss; single, passwords (facts, answered freely and by likelihood); turns [default: all that is given what it needs]")] = "",
    task: Annotated[list[str] | None, typer.Option(help="NAME=FILE: records of a task by lm-evaluation-harness' name, one JSON object a line; may be given several times")] = None,
    arms: Annotated[str, typer.Option(help="some of target, noise, source, transfer, wrong, random, identity, native, empty+, empty [default: all that the two models allow]")] = "",
    documents: Annotated[int, typer.Option(min=2, help="documents of loss and turns")] = 20,
    prefix: Annotated[int, typer.Option(help="loss: rows in front of the scored tokens")] = 1024,
    tail: Annotated[int, typer.Option(help="loss: last rows of these, which the target runs; 0: as the mapper recommends")] = 0,
    scored: Annotated[int, typer.Option(help="loss: tokens scored in each document")] = 256,
    items: Annotated[int, typer.Option(min=2, help="prompts of single and of passwords")] = 48,
    rows: Annotated[int, typer.Option(help="their length")] = 1024,
    item_tail: Annotated[int, typer.Option(help="their last rows, which the target runs and which hold the question; 0: as the mapper recommends")] = 0,
    plain: Annotated[bool, typer.Option("--plain", help="prompts without the target's chat template")] = False,
    turns: Annotated[int, typer.Option(min=2, help="turns of a conversation")] = 10,
    turn: Annotated[int, typer.Option(help="tokens of a turn")] = 96,
    questions: Annotated[int, typer.Option(min=2, help="questions of each --task")] = 100,
    question_tail: Annotated[int, typer.Option(min=1, help="last rows of their prompts, which the target runs")] = 8,
    shots: Annotated[int | None, typer.Option(min=0, help="examples in front of them, the first records of the file [default: 5 of mmlu, 8 of gsm8k, else none]")] = None,
    seed: Annotated[int, typer.Option(help="of windows, prompts, choices and random weights")] = 1,
    threads: Threads = 2,
    gpu_layers: Annotated[int, typer.Option(help="layers of both models on the accelerator, -1: all")] = 0,
    json_output: AsJson = False,
) -> None:
    """Measure what a mapper keeps: loss, choices, free answers and drift, beside source, target, and caches that know nothing.

    First the target's own rows pass the same path, which must change nothing. Writes report.html, result.json and CSVs. A run that was
    stopped goes on with the same command.
    """
    with errors_for_people("; the same command goes on"), ExitStack() as stack:
        from ..evaluation import folder
        from ..lib import Model
        from ..mapper import sidecar
        from ..mapper.evaluation import engine, page, study

        names = sets.split(",") if sets else [what for what in study.SETS if what != study.turns.NAME or back]
        files = _files(task or [])
        study.check_sets(names, files)
        docs = documents_of(text, unseen)
        file = sidecar.read(mapper)
        models = [stack.enter_context(Model(path, n_gpu_layers=gpu_layers)) for path in (source, target)]
        settings = study.Settings(
            documents=documents, prefix=prefix, tail=tail or file.tail, scored=scored, items=items, rows=rows, item_tail=item_tail or file.tail,
            chat=not plain, turns=turns, turn=turn, questions=questions, question_tail=question_tail, shots=shots, seed=seed,
            arms=tuple(arms.split(",")) if arms else engine.allowed(*models, file),
        )  # fmt: skip
        run = stack.enter_context(study.Study(*models, mapper, docs, names, settings, back, files, threads))
        place = folder.Folder(out, run.about)
        if not json_output:
            goes_on = f", goes on after {place.n_done} items" if place.n_done else ""
            print(f"{len(settings.arms)} arms; result in {place.path}{goes_on}", file=sys.stderr)
        result = place.finish(run.run(place.journal, stack.enter_context(progress(json_output))), page.render, study.ALONE)
    _print(result, place.path, json_output)


def _files(tasks: list[str]) -> dict[str, str]:
    pairs = [t.partition("=") for t in tasks]
    if wrong := [name for name, _, path in pairs if not path]:
        raise typer.BadParameter(f"--task: expected NAME=FILE, found {wrong[0]!r}")
    return {name: path for name, _, path in pairs}


def _print(result: dict, path: Path, json_output: bool) -> None:
    from ..evaluation.report import span
    from ..mapper.evaluation import turns

    if json_output:
        found = {what: {k: v for k, v in result[what].items() if k != "items"} for what in result["sets"]}
        print(json.dumps({"folder": str(path), "gate": result["gate"], **found, "comparisons": result["comparisons"]}, indent=1))
        return
    for what in result["sets"]:
        summary = result[what]["summary"]
        if what == turns.NAME:
            table = Table("turn", "model", "over it alone, nats", "KL", "top-1", title=what)
            for name, s in summary.items():
                table.add_row(name, s["model"], span(s["over_alone"]), f"{s['kl']['value']:.3f}", f"{s['top1']['value']:.3f}")
        else:
            table = Table(Column("arm", no_wrap=True), *(["loss"] if what == "loss" else ["hits"]), "over target", "retention over empty+", title=what)
            for name, s in summary.items():
                got = f"{s['loss']['value']:.3f}" if what == "loss" else f"{s['hits']} of {s['n']}"
                kept = s["retention"].get("empty+")
                table.add_row(name, got, span(s["over_exact"]) if "over_exact" in s else "", span(kept, 2, "") if kept else "-")
        stdout.print(table)
    for c in result["comparisons"]:
        say(c["line"])
    say(f"written: {path / 'report.html'}")
