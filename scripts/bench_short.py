"""What loaded maps cost a prompt that is too short to be filled: two servers, the same prompts in turn."""
from __future__ import annotations

import math
import statistics
from pathlib import Path

from rich.console import Console
from rich.progress import track
from scipy import stats

from filler import passages
from llama_server import LlamaServer, ServerError

N_PAIRS = 20
N_PROMPTS = 5  # a pair compares the sums of as many prompts, which the servers answer in turn: one alone is too noisy
N_TOKENS = 400
LIMIT = 0.02


def _cpu_seconds(pid: int) -> float:
    """CPU time of all threads that a process has, from the scheduler's nanosecond counters (Linux)."""
    return sum(int(f.read_text().split()[0]) for f in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _prompt(server: LlamaServer, i: int) -> list[int]:
    """Prompt i of a round: passages from another place on, round and round."""
    found = passages()
    at = 13 * i % len(found)
    return server.tokenize(f"Notes, page {i}.\n\n" + "\n\n".join((found[at:] + found)[:60]))[:N_TOKENS]


def _one(server: LlamaServer, tokens: list[int], with_maps: bool) -> float:
    start = _cpu_seconds(server.process.pid)
    answer = server.complete(tokens, n_predict=1)
    if answer.timings["prompt_n"] != len(tokens):
        raise ServerError(f"expected {len(tokens)} prompt tokens processed, found {answer.timings['prompt_n']}")
    if with_maps and (answer.ridge.get("filled") != 0 or not answer.ridge.get("reason")):
        raise ServerError(f"expected an exact prompt with a reason, found {answer.ridge}")
    return _cpu_seconds(server.process.pid) - start


def measure_short(model: Path, maps: Path, console: Console) -> dict:
    """Mean slowdown over N_PAIRS pairs with a 95 % interval (Student's t on log ratios); CPU time of the server, 1 thread."""
    common = ("-m", model, "-c", 2048, "-np", 1, "-t", 1)
    ratios = []
    with LlamaServer(*common) as stock, LlamaServer(*common, "--ridge-maps", maps) as ridge:
        for server in (stock, ridge):
            server.complete("Hello", n_predict=2)
        for pair in track(range(N_PAIRS), "pairs", console=console, transient=True):
            seconds = {"stock": 0.0, "ridge": 0.0}
            for i in range(pair * N_PROMPTS, (pair + 1) * N_PROMPTS):
                tokens = _prompt(stock, i)
                for name, server in (("stock", stock), ("ridge", ridge))[:: 1 if i % 2 == 0 else -1]:
                    seconds[name] += _one(server, tokens, name == "ridge")
            ratios.append(seconds["ridge"] / seconds["stock"])
    logs = [math.log(r) for r in ratios]
    mean, error = statistics.mean(logs), stats.sem(logs)
    low, high = stats.t.interval(0.95, len(logs) - 1, loc=mean, scale=error)
    return {"pairs": N_PAIRS, "prompts_per_pair": N_PROMPTS, "n_tokens": N_TOKENS, "slowdown": math.expm1(mean), "low_95": math.expm1(low),
            "high_95": math.expm1(high), "limit": LIMIT, "ratios": ratios}


def show_short(r: dict, console: Console) -> None:
    verdict = "within" if r["high_95"] < r["limit"] else "NOT within"
    console.print(f"{r['pairs']} pairs of {r['prompts_per_pair']} prompts of {r['n_tokens']} tokens: with maps loaded {100 * r['slowdown']:+.2f} % CPU time, "
                  f"95 % interval [{100 * r['low_95']:+.2f}, {100 * r['high_95']:+.2f}] %: {verdict} {100 * r['limit']:.0f} %")
