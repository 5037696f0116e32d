#!/usr/bin/env python3
"""What one filled row costs in one upper layer, by kind of maps: sidecars of one model and split, in turn, in one process.

    scripts/bench_kinds.py out/kinds.s15.input.gguf out/kinds.s15.kv.gguf --out results/bench-kinds.json

A row costs the time of one ubatch of sweep 1 with these maps less the same without, over its filled rows and the layers
from the split on. Differences of two large times scatter widely from round to round; their median does not, and the interval
says how far. Exit status 0: maps of kind kv, where they are given with those of kind input, take at most half the time.
"""
from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench_prefill import N_UBATCH, ROOT, fill_times, requantised, text_tokens
from ridgefill.errors import RidgefillError
from ridgefill.evaluation import stats
from ridgefill.lib import Maps, Model
from ridgefill.machine import write_record

console = Console()


def measure(path: Path, files: list[Path], threads: int, rounds: int) -> list[dict]:
    """Per file: microseconds of a row and layer in each round of process CPU time, their median, and its ratio to the first's."""
    with Model(path) as model:
        maps = [Maps(model, f) for f in files]
        if len(found := {m.split for m in maps}) > 1:
            raise RidgefillError(f"maps: expected files of one split, found {', '.join(map(str, sorted(found)))}")
        times = fill_times(model, maps, text_tokens(model, N_UBATCH + 1), threads, "cpu", rounds)
        about = [{"file": f.name, "split": m.split, "kind": m.kind} for f, m in zip(files, maps, strict=True)]
        for m in maps:
            m.close()
    us = [[1e6 * x for x in t] for t in times]
    return [
        a | {"us": statistics.median(t), "of_first": stats.median_ratio(t, us[0], a["file"]).as_dict(), "rounds_us": t}
        for a, t in zip(about, us, strict=True)
    ]


def show(results: list[dict]) -> None:
    table = Table("kind", "split", "µs a row and layer [quartiles]", "of the first [95 %]", title="Filling one row of one layer")
    for r in results:
        low, _, high = statistics.quantiles(r["rounds_us"], n=4)
        of = "{value:.2f} [{low:.2f}, {high:.2f}]".format(**r["of_first"])
        table.add_row(r["kind"], str(r["split"]), f"{r['us']:.2f} [{low:.2f}, {high:.2f}]", of)
    console.print(table)


def main(
    maps: Annotated[list[Path], typer.Argument(help="sidecars of one split")],
    model: Annotated[Path | None, typer.Option(help="GGUF [default: SmolLM2 as Q8_0]")] = None,
    threads: Annotated[int, typer.Option()] = 1,
    rounds: Annotated[int, typer.Option(min=2)] = 60,
    out: Annotated[Path, typer.Option(help="JSON file")] = ROOT / "out" / "bench-kinds.json",
) -> None:
    path = model or requantised()
    results = measure(path, maps, threads, rounds)
    show(results)
    write_record(out, {"model": path.name, "threads": threads, "results": results})
    us = {r["kind"]: r["us"] for r in results}
    raise typer.Exit({"input", "kv"} <= us.keys() and 2 * us["kv"] > us["input"])


if __name__ == "__main__":
    try:
        typer.run(main)
    except RidgefillError as e:
        sys.exit(f"bench_kinds: {e}")
