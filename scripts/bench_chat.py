#!/usr/bin/env python3
"""A conversation with fills on beside the same one served exactly: what is reused, and how long each turn waits.

    scripts/bench_chat.py          writes results/bench-chat.json

Two slots of one server hold the same conversation, one in mode off, one in mode fill, and take their turns one after the
other. The assistant's part of both is what the exact one said, so that both have the same prompts. The first message is long,
the others shorter. Exit status 0: more rows are reused in every turn, no hazard row stays filled, and the last turn waits less
than 1.2 times as long as from exact cache, by the median of the repetitions.
"""
from __future__ import annotations

import dataclasses
import os
import statistics
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from filler import passages
from llama_server import Answer, LlamaServer, ServerError
from ridgefill.machine import write_record

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MAPS = ROOT / "models" / "smollm2-135m-instruct.s20.q8_0.ridge.gguf"
TURNS, MAX_RATIO, ANSWER = 5, 1.2, 32
ARMS = ("off", "fill")

console = Console(width=max(120, Console().width))


@dataclasses.dataclass
class Turn:
    """One turn in one mode; rows are counts, the time in milliseconds."""

    arm: str
    turn: int
    rows: int
    cached: int
    filled: int
    cached_filled: int
    hazard: int
    first_token_ms: float

    @classmethod
    def of(cls, arm: str, turn: int, rows: int, a: Answer) -> Turn:
        r = a.ridge
        return cls(arm, turn, rows, a.timings["cache_n"], r["filled"], r["cached_filled"], r["hazard"], a.first_token_ms)


def words(server: LlamaServer, texts: list[str], n: int) -> str:
    """Text of about n tokens, taken from the end of `texts`."""
    out, total = [], 0
    while total < n:
        out.append(texts.pop())
        total += len(server.tokenize(out[-1]))
    return "\n\n".join(out)


def converse(server: LlamaServer, first: int, later: int, skip: int, tick) -> list[Turn]:
    """One conversation in both slots. `skip` passages are left out, so that no repetition finds the rows of another."""
    texts, messages, turns = passages()[: len(passages()) - skip], [], []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": words(server, texts, later if turn else first)})
        prompt = server.tokenize(server.post("/apply-template", {"messages": messages})["prompt"])
        answers = {}
        for slot, arm in list(enumerate(ARMS))[:: 1 if turn % 2 == 0 else -1]:
            answers[arm] = server.complete(prompt, n_predict=ANSWER, ridge={"mode": arm}, id_slot=slot, cache_prompt=True)
            turns.append(Turn.of(arm, turn, len(prompt), answers[arm]))
            tick()
        messages.append({"role": "assistant", "content": answers["off"].text.strip()})
    return turns


def check(runs: list[list[Turn]]) -> list[str]:
    """What does not hold."""
    faults = []
    for run in runs:
        cached = [t.cached for t in sorted((t for t in run if t.arm == "fill"), key=lambda t: t.turn)]
        if any(b <= a for a, b in zip(cached, cached[1:])):
            faults.append(f"rows reused: expected more in every turn, found {cached}")
        if not any(t.filled for t in run if t.arm == "fill"):
            faults.append("expected a filled turn, found none")
    if (ratio := last_ratio(runs)) >= MAX_RATIO:
        faults.append(f"last turn: expected less than {MAX_RATIO} of the exact one's time, found {ratio:.2f}")
    return faults


def last_ratio(runs: list[list[Turn]]) -> float:
    times = {arm: [t.first_token_ms for run in runs for t in run if t.arm == arm and t.turn == TURNS - 1] for arm in ARMS}
    return statistics.median(times["fill"]) / statistics.median(times["off"])


def show(runs: list[list[Turn]]) -> None:
    table = Table("turn", "rows", "reused: exact", "filled", "of these filled", "new filled", "hazard rows", "exact, s", "filled, s", title="medians")
    for turn in range(TURNS):
        by_arm = {arm: [t for run in runs for t in run if (t.arm, t.turn) == (arm, turn)] for arm in ARMS}
        median = lambda arm, name: statistics.median(getattr(t, name) for t in by_arm[arm])  # noqa: B023,E731
        row = [median("fill", "rows"), median("off", "cached"), *(median("fill", n) for n in ("cached", "cached_filled", "filled", "hazard"))]
        table.add_row(str(turn + 1), *(f"{x:,.0f}" for x in row), *(f"{median(a, 'first_token_ms') / 1000:.2f}" for a in ARMS))
    console.print(table)


def main(
    model: Annotated[Path, typer.Option(help="GGUF")] = MODEL,
    maps: Annotated[Path, typer.Option(help="its sidecar")] = MAPS,
    first: Annotated[int, typer.Option(help="tokens of the first message, about")] = 3000,
    later: Annotated[int, typer.Option(help="tokens of each later one, about")] = 300,
    repeats: Annotated[int, typer.Option(help="conversations")] = 3,
    out: Annotated[Path, typer.Option(help="JSON file")] = ROOT / "results" / "bench-chat.json",
) -> None:
    flags = ["-np", 2, "-c", 2 * 8192, "--no-kv-unified", "--cache-ram", 0, "-t", os.cpu_count() or 1]
    with LlamaServer("-m", model, "--ridge-maps", maps, *flags) as server, Progress(console=console, transient=True) as progress:
        tail = server.loaded_maps()["tail"]
        task = progress.add_task("turns", total=repeats * TURNS * len(ARMS))
        runs = [converse(server, first, later, 40 * i, lambda: progress.advance(task)) for i in range(repeats)]
    show(runs)
    faults = check(runs)
    settings = {"model": model.name, "maps": maps.name, "tail": tail, "first": first, "later": later, "repeats": repeats}
    found = [[dataclasses.asdict(t) for t in run] for run in runs]
    write_record(out, {"settings": settings, "runs": found, "last_turn_ratio": last_ratio(runs), "faults": faults})
    console.print(f"last turn: {last_ratio(runs):.2f} of the exact one's time to first token; written to {os.path.relpath(out)}")
    for fault in faults:
        console.print(f"NOT good: {fault}", highlight=False)
    raise typer.Exit(1 if faults else 0)


if __name__ == "__main__":
    try:
        typer.run(main)
    except ServerError as e:
        sys.exit(f"bench_chat: {e}")
