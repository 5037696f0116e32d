#!/usr/bin/env python3
"""What a fill gains through the Python bindings, beside what it gains in llama-server.

    .venv/bin/python scripts/bench_bindings.py          writes results/bench-bindings.json

Each round has one prompt of its own, which both answer exactly and filled, one after the other, the four in an order that
changes from round to round. The gain of a round is the exact time to first token over the filled one. Exit status 0: the median
gain through the bindings is within 5 % of the server's.
"""
from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from filler import passages
from llama_server import LlamaServer, ServerError, check_arm
from ridgefill import Llama
from ridgefill.evaluation import stats
from ridgefill.machine import write_record

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MAPS = ROOT / "models" / "smollm2-135m-instruct.s20.q8_0.ridge.gguf"
N_CTX, N_BATCH, N_UBATCH, LIMIT = 8192, 2048, 512, 0.05
ARMS = ("off", "fill")

console = Console(width=max(100, Console().width))


def server_seconds(server: LlamaServer, tokens: list[int], arm: str) -> float:
    answer = server.complete(tokens, n_predict=1, ridge={"mode": arm})
    check_arm(arm, answer, len(tokens))
    return answer.first_token_ms / 1000


def bindings_seconds(llm: Llama, tokens: list[int], arm: str) -> float:
    llm.reset()  # nothing of the prompt before is reused
    start = time.monotonic()
    for _ in llm.create_completion(tokens, max_tokens=1, temperature=0, stream=True, ridge_mode=arm):
        break
    seconds = time.monotonic() - start
    if llm.ridge_last.cached or (arm == "fill") != (llm.ridge_last.filled > 0):
        raise ServerError(f"{arm}: expected nothing reused and rows {'filled' if arm == 'fill' else 'exact'}, found {llm.ridge_last}")
    return seconds


def measure(server: LlamaServer, llm: Llama, n_tokens: int, rounds: int) -> list[dict]:
    """Seconds of every round, by who answered and how. A first round warms up and is left out."""
    text = server.tokenize("\n\n".join(passages()))
    who: dict[str, Callable] = {"server": lambda t, arm: server_seconds(server, t, arm), "bindings": lambda t, arm: bindings_seconds(llm, t, arm)}
    cells = [(name, arm) for name in who for arm in ARMS]
    found = []
    for i in track(range(rounds + 1), "rounds", console=console, transient=True):
        start = 97 * i % (len(text) - n_tokens)
        turn = i % len(cells)
        found.append({f"{name} {arm}": who[name](text[start : start + n_tokens], arm) for name, arm in cells[turn:] + cells[:turn]})
    return found[1:]


def main(
    model: Annotated[Path, typer.Option(help="GGUF")] = MODEL,
    maps: Annotated[Path, typer.Option(help="its sidecar")] = MAPS,
    n_tokens: Annotated[int, typer.Option(help="of each prompt")] = 3000,
    rounds: Annotated[int, typer.Option(help="prompts")] = 10,
    out: Annotated[Path, typer.Option(help="JSON file")] = ROOT / "results" / "bench-bindings.json",
) -> None:
    threads = os.cpu_count() or 1
    sizes = ("-c", N_CTX, "-b", N_BATCH, "-ub", N_UBATCH, "-np", 1, "-t", threads, "--cache-ram", 0)
    llm = Llama(str(model), n_ctx=N_CTX, n_batch=N_BATCH, n_ubatch=N_UBATCH, n_threads=threads, n_threads_batch=threads,
                ridge_maps=str(maps), verbose=False)  # fmt: skip
    with LlamaServer("-m", model, "--ridge-maps", maps, *sizes) as server:
        tail = server.loaded_maps()["tail"]
        found = measure(server, llm, n_tokens, rounds)
    gains = {name: [r[f"{name} off"] / r[f"{name} fill"] for r in found] for name in ("server", "bindings")}
    ratio = stats.median_ratio(gains["bindings"], gains["server"], "gain through the bindings over the server's")
    for name, values in gains.items():
        console.print(f"{name}: exact time to first token {statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}] of the filled one")
    good = abs(ratio.value - 1) <= LIMIT
    console.print(f"bindings over server: {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]: {'within' if good else 'NOT within'} {LIMIT:.0%}")
    settings = {"model": model.name, "maps": maps.name, "tail": tail, "n_tokens": n_tokens, "rounds": rounds, "threads": threads}
    write_record(out, {"settings": settings, "seconds": found, "ratio": ratio.as_dict(), "good": good})
    console.print(f"written to {os.path.relpath(out)}")
    raise typer.Exit(0 if good else 1)


if __name__ == "__main__":
    try:
        typer.run(main)
    except ServerError as e:
        sys.exit(f"bench_bindings: {e}")
