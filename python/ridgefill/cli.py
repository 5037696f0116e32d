"""The commands `ridgefill-calibrate` and `ridgefill`.

Exit codes: 0 done; 1 a value out of range, or a fault of ours; 2 wrong usage; 3 the native library refused or is missing;
4 text that cannot be used; 5 activations that cannot be fitted; 6 a file exists already; 7 not a sidecar, or a damaged one.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from .errors import RidgefillError

EPILOG = __doc__.split("\n\n", 1)[1]

stderr = Console(stderr=True)
stdout = Console()

calibrate_app = typer.Typer(add_completion=False)
app = typer.Typer(add_completion=False, no_args_is_help=True, help="Sidecars of ridge maps.", epilog=EPILOG)


@contextmanager
def _errors_for_people():
    """Print our own errors as one line and leave with their exit code."""
    try:
        yield
    except RidgefillError as e:
        print(f"error: {e}", file=sys.stderr)
        raise typer.Exit(e.exit_code) from None


class _RateColumn(TextColumn):
    """Rows per second so far."""

    def __init__(self):
        super().__init__("")

    def render(self, task):
        rate = task.finished_speed or task.speed
        return f"{rate:,.0f}/s" if rate and task.description == "capture" else ""


def _log_report():
    began: dict[str, float] = {}
    tenths: dict[str, int] = {}

    def report(stage: str, done: int, total: int) -> None:
        began.setdefault(stage, time.monotonic())
        if (tenth := 10 * done // total) != tenths.get(stage):
            tenths[stage] = tenth
            seconds = time.monotonic() - began[stage]
            left = f", about {seconds * (total - done) / done:,.0f} s left" if seconds else ""
            print(f"{stage}: {done:,} of {total:,} after {seconds:,.0f} s{left}", file=sys.stderr, flush=True)

    return report


@contextmanager
def _progress(quiet: bool):
    """A report function that draws one bar per stage with rate and time left; in a log, a line at every tenth."""
    if not quiet and not stderr.is_terminal:
        yield _log_report()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _RateColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr, disable=quiet) as progress:
        tasks: dict[str, int] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=total)
            progress.update(tasks[stage], completed=done, total=total)

        yield report


def _mib(n: int) -> str:
    return f"{n / 2**20:,.1f} MiB"


@calibrate_app.command(epilog=EPILOG)
def calibrate(
    model: Annotated[str, typer.Argument(help="GGUF model file")],
    out: Annotated[str, typer.Option(help="sidecar to write; {split} and {kind} in it stand for the split and the kind, else with several NAME.gguf becomes NAME.s19.kv.gguf")],
    split: Annotated[list[int], typer.Option(help="split layer S, 1 to layers - 2; may be given several times")],
    text: Annotated[list[str], typer.Option(help="file or folder of text; may be given several times")],
    kind: Annotated[list[str] | None, typer.Option(help="input: predict layer inputs; kv: keys and values; kv_prev: keys and values, from the row before too; may be given several times [default: input]")] = None,
    map_type: Annotated[str, typer.Option(help="f32, f16 or q8_0")] = "q8_0",
    sink: Annotated[int, typer.Option(help="first rows that are neither fitted nor filled")] = 4,
    tail: Annotated[int, typer.Option(help="recommended tail to record, rows")] = 512,
    seed: Annotated[int, typer.Option(help="order of the documents, hence which are held out")] = 0,
    n_tokens: Annotated[int, typer.Option(min=0, help="tokens to fit on, 0: all")] = 0,
    heldout_documents: Annotated[int | None, typer.Option(min=1, help="documents to hold out [default: those marked so in sources.json, else a sixth]")] = None,
    ctx: Annotated[int, typer.Option(min=64, help="tokens run together from position 0")] = 2048,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    gpu_layers: Annotated[int, typer.Option(help="model layers on the accelerator, -1: all")] = 0,
    force: Annotated[bool, typer.Option("--force", help="replace existing files")] = False,
    prev_share: Annotated[float, typer.Option(min=0, max=1, help="kind kv_prev: weight of the regression with the row before in the maps of K, the rest is kind kv's; below 1 numbers are copied more faithfully, at a higher loss")] = 1.0,
    served: Annotated[str, typer.Option("--for", help="model file that the maps are for, where {model} is a copy of it at higher precision, which many CPUs run faster; the weights are compared")] = "",
    json_output: Annotated[bool, typer.Option("--json", help="print the result as JSON, and nothing else but errors")] = False,
) -> None:
    """Fit ridge maps for a model and write them as a sidecar, one file per split and kind, in one pass over the text."""
    with _errors_for_people():
        from . import calibrate as c

        config = c.Config(
            model, out, split, text, kind or ["input"], map_type, sink, tail, seed, n_tokens, heldout_documents, ctx, threads,
            gpu_layers, force, prev_share, served,
        )  # fmt: skip
        with c.Calibration(config) as run:
            plan = run.plan()
            if not json_output:
                stderr.print(
                    f"{plan.n_documents} documents with {plan.n_tokens:,} tokens to fit, {plan.n_heldout_documents} with "
                    f"{plan.n_heldout_tokens:,} held out; needs {_mib(plan.memory_bytes)} besides the model",
                    soft_wrap=True,
                )
            if plan.memory_bytes > plan.memory_available:
                print(
                    f"warning: {_mib(plan.memory_bytes)} needed, {_mib(plan.memory_available)} free: fit fewer splits or kinds at a time",
                    file=sys.stderr,
                )
            with _progress(json_output) as report:
                results = run.run(report)
    if json_output:
        print(json.dumps([c.result_dict(r) for r in results], indent=1))
        return
    for r in results:
        _print_result(r)


def _score_table(rows: list[dict]) -> Table:
    """Rows of sidecar.scores()."""
    table = Table(*(name.replace("r2", "held-out R²").replace("_k", " K").replace("_v", " V") for name in rows[0]))
    for row in rows:
        table.add_row(*(f"{v:.2g}" if name.startswith("lambda") else f"{v:.4f}" if name != "layer" else str(v) for name, v in row.items()))
    return table


def _print_result(r) -> None:
    stdout.print(f"{r.path}: kind {r.kind}, split {r.split}, {r.n_tokens:,} rows fitted", soft_wrap=True)
    rows = []
    for i, il in enumerate(r.layers):
        rows.append({"layer": il})
        for part in r.r2:
            end = "" if part == "input" else f"_{part}"
            rows[-1] |= {f"lambda{end}": r.lambdas[part][i], f"r2{end}": r.r2[part][i]}
    stdout.print(_score_table(rows))
    means = ", ".join(("" if part == "input" else f"{part.upper()} ") + f"{mean:.4f}" for part, mean in r.r2_mean.items())
    stdout.print(f"mean held-out R² {means} over {r.n_heldout_tokens:,} rows; {r.seconds:.0f} s")


@app.callback()
def _root() -> None:
    """Keeps `inspect` a subcommand while it is the only one."""


@app.command()
def inspect(
    file: Annotated[str, typer.Argument(help="sidecar to look at")],
    json_output: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Check a sidecar with the library's reader and show what it was fitted on and how well."""
    with _errors_for_people():
        from . import sidecar

        found = sidecar.inspect(file)
    if json_output:
        print(json.dumps(found, indent=1))
        return
    keys = found["keys"]
    stdout.print(f"{found['path']}: sidecar of ridge maps, {_mib(found['size'])}, sha256 {found['sha256']}", soft_wrap=True)
    for name, value in keys.items():
        if not isinstance(value, list):
            stdout.print(f"  {name} = {value}", soft_wrap=True, highlight=False)
    for source in keys["ridge.calibration.sources"]:
        stdout.print(f"  source: {source}", soft_wrap=True, highlight=False)
    stdout.print(_score_table(sidecar.scores(keys)))


def calibrate_main() -> None:
    calibrate_app()


def main() -> None:
    app()
