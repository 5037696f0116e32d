#!/usr/bin/env python3
"""Handing a prompt over from one model to another, against the other's own prefill, in turn, in one process.

    scripts/bench_transfer.py SOURCE.gguf TARGET.gguf MAPPER --out results/bench-transfer.json

For each length the source holds the prompt. Hand-over: the target runs the first rows, gets the rows of the middle by
transfer, and runs the last ones (--tail), to logits. Process CPU time, median of the ratios. The bound is what moving the
bytes would take that a transfer cannot do without, at the speed of copying memory here.
"""
from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from bench_prefill import ROOT, text_tokens
from ridgefill.errors import RidgefillError
from ridgefill.evaluation import stats
from ridgefill.lib import Context, Mapper, Model, Transfer
from ridgefill.machine import write_record
from ridgefill.progress import progress

console = Console()


def bytes_per_second() -> float:
    """Of copying a block of memory that no cache holds; read and written bytes both count, as they do for a transfer."""
    a, b, seconds = np.ones(1 << 28, np.uint8), np.empty(1 << 28, np.uint8), []
    for _ in range(5):
        start = time.perf_counter()
        b[:] = a
        seconds.append(time.perf_counter() - start)
    return 2 * len(a) / statistics.median(seconds)


class Pair:
    """Contexts of both models; the source's holds `tokens`."""

    def __init__(self, source: Model, target: Model, mapper: Mapper, tokens: list[int], tail: int, threads: int):
        n = len(tokens)
        self.source, self.target = (Context(m, n + 256, n_threads=threads) for m in (source, target))
        self.mapper, self.tokens, self.middle = mapper, tokens, n - tail
        self.source.decode(tokens, logits="none")

    def prefill(self) -> None:
        self.target.decode(self.tokens)

    def hand_over(self) -> dict:
        """Statistics of the transfer."""
        n_sink = self.mapper.n_sink
        self.target.decode(self.tokens[:n_sink], logits="none")
        with Transfer(self.source, self.target, self.mapper, n_sink, self.middle).run() as transfer:
            found = transfer.stats
        self.target.decode(self.tokens[self.middle :], pos0=self.middle)
        return found

    def close(self) -> None:
        self.source.close()
        self.target.close()


def measure(pair: Pair, rounds: int, speed: float, report) -> dict:
    """Times of both ways in each round, their ratio, and what a transfer moved."""
    times: dict[str, list[float]] = {"prefill": [], "hand_over": []}
    transfers = []
    for i in range(rounds + 1):
        for name in times:
            pair.target.clear()
            start = time.process_time()
            found = getattr(pair, name)()
            if i:  # the first round warms up
                times[name].append(time.process_time() - start)
                transfers += [found] if found else []
        report(f"{len(pair.tokens):,} tokens", i + 1, rounds + 1)
    seconds = statistics.median(t["t_us"] for t in transfers) / 1e6
    n_bytes = transfers[0]["n_bytes"]
    n = len(pair.tokens)
    return {
        "n_tokens": n, "n_transferred": transfers[0]["n_rows"],
        "gain": stats.median_ratio(times["prefill"], times["hand_over"], f"{n} tokens").as_dict(),
        "transfer_seconds": seconds, "bytes": n_bytes, "of_bound": n_bytes / speed / seconds, "rounds": times,
    }  # fmt: skip


def show(results: list[dict]) -> None:
    table = Table("tokens", "transferred", "prefill / hand-over [95 %]", "transfer", "moved", "of the bandwidth bound", title="Hand-over")
    for r in results:
        gain = "{value:.2f} [{low:.2f}, {high:.2f}]".format(**r["gain"])
        moved = f"{r['bytes'] / 2**20:.1f} MiB"
        table.add_row(f"{r['n_tokens']:,}", f"{r['n_transferred']:,}", gain, f"{1e3 * r['transfer_seconds']:.1f} ms", moved, f"{r['of_bound']:.1%}")
    console.print(table)


def main(
    source: Annotated[Path, typer.Argument(help="GGUF that holds the prompt")],
    target: Annotated[Path, typer.Argument(help="GGUF that takes it over")],
    mapper: Annotated[Path, typer.Argument(help="of `ridgefill mapper fit`")],
    lengths: Annotated[str, typer.Option(help="tokens of the prompts, separated by commas")] = "64,512,2048,7680",
    tail: Annotated[int, typer.Option(min=1, help="last rows that the target runs")] = 32,
    threads: Annotated[int, typer.Option()] = 1,
    rounds: Annotated[int, typer.Option(min=2)] = 10,
    out: Annotated[Path, typer.Option(help="JSON file")] = ROOT / "out" / "bench-transfer.json",
) -> None:
    speed, results = bytes_per_second(), []
    with Model(source) as a, Model(target) as b, Mapper(a, b, mapper) as maps, progress(quiet=False) as report:
        for n in map(int, lengths.split(",")):
            if n <= maps.n_sink + tail:
                raise RidgefillError(f"--lengths: expected more than the {maps.n_sink + tail} first and last rows, found {n}")
            pair = Pair(a, b, maps, text_tokens(b, n), tail, threads)
            results.append(measure(pair, rounds, speed, report))
            pair.close()
    show(results)
    about = {"source": source.name, "target": target.name, "mapper": maps.hash, "threads": threads, "tail": tail, "bytes_per_second": speed}
    write_record(out, {**about, "results": results})


if __name__ == "__main__":
    try:
        typer.run(main)
    except RidgefillError as e:
        sys.exit(f"bench_transfer: {e}")
