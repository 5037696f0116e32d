"""`ridgefill evaluate`: what fills cost, measured on a model and text, as a report with intervals."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from ..progress import progress
from .common import AsJson, Threads, errors_for_people, say, stdout

SETS = "loss,single,passwords,multikey"


def evaluate(
    model: Annotated[str, typer.Argument(help="GGUF model file")],
    text: Annotated[list[str], typer.Option(help="folder of scripts/fetch_text.sh, of which the partition evaluation is used; with --unseen any file or folder; may be given several times")],
    out: Annotated[Path, typer.Option(help="folder in which the result gets a folder of its own, named after its settings")],
    maps: Annotated[list[str] | None, typer.Option(help="sidecar; may be given several times, once for each split and kind")] = None,
    unseen: Annotated[bool, typer.Option("--unseen", help="no map was fitted on any of this text: use all of it")] = False,
    sets: Annotated[str, typer.Option(help="what to measure: loss; splices; tasks single, passwords, multikey, multivalue, multiquery, variables, common, frequent")] = SETS,
    arms: Annotated[str, typer.Option(help="MODE[-SPLIT[:KIND]][+ROWS[=SHARE]],... [default: all that the maps allow]")] = "",
    share: Annotated[float, typer.Option(min=0, max=0.99, help="share of the filled rows that is exact in the arms with random rows, with rows chosen by attention and with a longer tail, 0: no such arms")] = 0.1,
    documents: Annotated[int, typer.Option(min=2, help="documents of the loss")] = 20,
    prefix: Annotated[int, typer.Option(help="loss: rows in front of the scored tokens")] = 2048,
    tail: Annotated[int, typer.Option(help="loss: last rows of these, which are exact")] = 256,
    scored: Annotated[int, typer.Option(help="loss: tokens scored in each document")] = 256,
    decode: Annotated[int, typer.Option(min=0, help="loss: tokens decoded greedily behind each prefix")] = 32,
    items: Annotated[int, typer.Option(min=2, help="prompts of each task, and of the splices")] = 48,
    rows: Annotated[int, typer.Option(help="tasks: length of a prompt")] = 1024,
    item_tail: Annotated[int, typer.Option(help="tasks: last rows of a prompt, which are exact and hold the question")] = 128,
    plain: Annotated[bool, typer.Option("--plain", help="tasks: prompts without the model's chat template")] = False,
    loss_margin: Annotated[float, typer.Option(help="nats within which two losses count as equal")] = 0.02,
    share_margin: Annotated[float, typer.Option(help="difference within which two shares of hits count as equal")] = 0.05,
    seed: Annotated[int, typer.Option(help="of windows, prompts and random rows")] = 1,
    threads: Threads = 2,
    gpu_layers: Annotated[int, typer.Option(help="model layers on the accelerator, -1: all")] = 0,
    json_output: AsJson = False,
) -> None:
    """Measure what fills cost: loss, agreement and recall of a model under each way to fill, with intervals and tests.

    Writes report.html, result.json and a CSV of every record. A run that was stopped goes on with the same command.
    """
    with errors_for_people("; the same command goes on"), ExitStack() as stack:
        from ..evaluation import folder, study
        from ..lib import Maps, Model

        names = sets.split(",")
        study.check_sets(names)
        docs = documents_of(text, unseen)
        m = stack.enter_context(Model(model, n_gpu_layers=gpu_layers))
        loaded = sorted((stack.enter_context(Maps(m, path)) for path in maps or []), key=lambda x: (x.split, x.kind))
        chosen = tuple(arms.split(",")) if arms else tuple(a.name for a in study.default_arms(loaded, share))
        settings = study.Settings(
            documents=documents, prefix=prefix, tail=tail, scored=scored, decode=decode, items=items, rows=rows,
            item_tail=item_tail, chat=not plain, seed=seed, loss_arms=chosen, item_arms=chosen,
            loss_margin=loss_margin, share_margin=share_margin,
        )  # fmt: skip
        run = stack.enter_context(study.Study(m, loaded, docs, names, settings, threads))
        place = folder.Folder(out, run.about)
        if not json_output:
            goes_on = f", goes on after {place.n_done} items" if place.n_done else ""
            print(f"{len(chosen)} arms; result in {place.path}{goes_on}", file=sys.stderr)
        result = place.finish(run.run(place.journal, stack.enter_context(progress(json_output))))
    _print(result, place.path, json_output)


def documents_of(text: list[str], unseen: bool) -> list:
    """Those that may be evaluated on: of the partition evaluation, or all where nothing was fitted on any."""
    from ..evaluation import texts
    from ..text import read_documents

    return read_documents(text) if unseen else [d for path in text for d in texts.documents(path)]


def _print(result: dict, path: Path, json_output: bool) -> None:
    from ..evaluation import report, splices

    if json_output:
        found = {what: {k: v for k, v in result[what].items() if k != "items"} for what in result["sets"]}
        print(json.dumps({"folder": str(path), **found}, indent=1))
        return
    for what in result["sets"]:
        table = {"loss": report.loss_table, splices.NAME: splices.table}.get(what, report.facts_table)
        stdout.print(table(result[what]["summary"], what))
    say(f"written: {path / 'report.html'}")
