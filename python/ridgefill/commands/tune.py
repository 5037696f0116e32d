"""`ridgefill tune`: find by measurement how a model should be filled."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from ..progress import progress, stderr
from .common import AsJson, Force, Threads, errors_for_people, stdout


def tune(
    model: Annotated[str, typer.Argument(help="GGUF model file")],
    text: Annotated[list[str], typer.Option(help="file or folder of text, .jsonl or .parquet; may be given several times")],
    out: Annotated[str, typer.Option(help="sidecar to write; what was measured is kept in OUT.tune/, a summary in OUT.json")],
    kind: Annotated[list[str] | None, typer.Option("--kind", help="kind of maps to try; may be given several times [default: kv, kv_prev]")] = None,
    tail: Annotated[list[int] | None, typer.Option(min=1, help="tail to try, rows; may be given several times [default: 512]")] = None,
    min_recall: Annotated[float, typer.Option(min=0, max=1, help="least share of the facts recalled by the exact model")] = 0.95,
    max_loss: Annotated[float, typer.Option(help="highest loss over exact, nats")] = 0.03,
    prompt_rows: Annotated[int, typer.Option(min=1024, help="length of the prompts for which the cost counts")] = 8192,
    probes: Annotated[int, typer.Option(min=8, help="planted facts for each recipe")] = 24,
    n_tokens: Annotated[int, typer.Option(min=0, help="tokens to fit on, 0: all")] = 60_000,
    heldout_documents: Annotated[int | None, typer.Option(min=2, help="documents to hold out [default: those marked so in sources.json, else a sixth]")] = None,
    overlap: Annotated[str, typer.Option(help="where documents share text: refuse, drop or keep")] = "refuse",
    map_type: Annotated[str, typer.Option(help="type of the maps as stored")] = "q8_0",
    prev_share: Annotated[float, typer.Option(min=0, max=1, help="kind kv_prev: see ridgefill-calibrate")] = 0.6,
    sink: Annotated[int, typer.Option(help="first rows that are neither fitted nor filled")] = 4,
    seed: Annotated[int, typer.Option(help="order of documents, and what is planted where")] = 0,
    threads: Threads = 2,
    gpu_layers: Annotated[int, typer.Option(help="model layers on the accelerator, -1: all")] = 0,
    served: Annotated[str, typer.Option("--for", help="model file that the maps are for, where MODEL is a copy of it at higher precision")] = "",
    force: Force = False,
    json_output: AsJson = False,
) -> None:
    """Find split layer and kind of maps by measuring recall and loss, and write the sidecar of the best recipe.

    A run that was stopped goes on with the same command.
    """
    with errors_for_people("; the same command goes on"):
        from .. import calibrate as c
        from .. import tune as t

        config = t.Config(
            calibration=c.Config(
                model=model, out=out, splits=[], text=text, map_type=map_type, sink=sink, seed=seed, n_tokens=n_tokens,
                heldout_documents=heldout_documents, threads=threads, gpu_layers=gpu_layers, force=force,
                prev_share=prev_share, served=served, overlap=overlap,
            ),
            tails=tail or [512], n_prompt=prompt_rows, min_recall=min_recall, max_loss=max_loss, probes=probes,
            **({"kinds": kind} if kind else {}),
        )  # fmt: skip
        say = (lambda line: None) if json_output else lambda line: stderr.print(line, soft_wrap=True, highlight=False)
        with progress(json_output) as report, t.Tuner(config, say, report) as run:
            tuned = run.run()
            found = asdict(tuned) | {"explanation": tuned.sentences()}
            run.summary.write_text(json.dumps(found, indent=1) + "\n")
    if json_output:
        print(json.dumps(found, indent=1))
        return
    stdout.print(_layers(tuned))
    stdout.print(_candidates(tuned))
    for sentence in tuned.sentences():
        stdout.print(sentence, soft_wrap=True, highlight=False)


def _layers(tuned) -> Table:
    names = [name for name in tuned.layers[0] if name not in ("layer", "carries")]
    table = Table("layer", *names, "carries recall", title="One layer exchanged: prompts answered as exactly (nats of the answer)")
    for row in tuned.layers:
        cells = (f"{row[n]['hits']:.2f} ({row[n]['log_prob']:+.2f})" for n in names)
        table.add_row(str(row["layer"]), *cells, "yes" if row["carries"] else "")
    return table


def _candidates(tuned) -> Table:
    table = Table("split", "kind", "tail", "cost", f"recall of {tuned.n_exact}", "loss over exact", "of key tokens", "", title="Recipes; * on the Pareto front")
    for c in tuned.candidates:
        losses = ("" if x is None else f"{x:+.3f}" for x in (c.loss, c.key_loss))
        mark = "chosen" if c == tuned.chosen else "*" if c.pareto else ""
        table.add_row(str(c.split), c.kind, str(c.tail), f"{c.cost:.2f}", f"{c.recall:.2f}", *losses, mark)
    return table
