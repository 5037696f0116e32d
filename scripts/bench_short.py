"""What loaded maps cost a prompt that is too short to be filled: two servers, the same prompts in turn.

By CPU time, or, where a shared machine is too noisy for that, by the instructions that callgrind counts.
"""
from __future__ import annotations

import math
import re
import shutil
import statistics
import subprocess
import tempfile
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
N_COUNTED, N_COUNTED_TOKENS, LIMIT_INSTRUCTIONS = 2, 64, 0.01  # callgrind takes minutes; what maps cost does not grow with the prompt


def _cpu_seconds(pid: int) -> float:
    """CPU time of all threads that a process has, from the scheduler's nanosecond counters (Linux)."""
    return sum(int(f.read_text().split()[0]) for f in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def _prompt(server: LlamaServer, i: int, n_tokens: int = N_TOKENS) -> list[int]:
    """Prompt i of a round: passages from another place on, round and round."""
    found = passages()
    at = 13 * i % len(found)
    return server.tokenize(f"Notes, page {i}.\n\n" + "\n\n".join((found[at:] + found)[:60]))[:n_tokens]


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


def _instructions(model: Path, flags: tuple, folder: Path) -> list[int]:
    """Of each of N_COUNTED prompts, loading and a first request left out."""
    under = ("valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/out")

    def control(flag: str) -> None:
        subprocess.run(["callgrind_control", flag, str(server.process.pid)], check=True, capture_output=True, timeout=300)

    with LlamaServer("-m", model, "-c", 2048, "-np", 1, "-t", 1, "--no-warmup", *flags, start_s=1800, under=under) as server:
        server.complete("Hello", n_predict=1)
        counts = []
        for i in range(N_COUNTED):
            tokens = _prompt(server, i, N_COUNTED_TOKENS)
            control("--zero")
            server.complete(tokens, n_predict=1)
            control("--dump")
            dump = max(folder.glob("out.*"), key=lambda f: int(f.suffix[1:]))
            counts.append(sum(map(int, re.findall(r"^(?:totals|summary): (\d+)", dump.read_text(errors="replace"), re.M)[:1])))
    return counts


def count_short(model: Path, maps: Path) -> dict:
    """Instructions of a prompt with maps loaded, over those of the same prompt without; callgrind knows no AVX-512."""
    if not shutil.which("callgrind_control"):
        raise ServerError("expected valgrind, found none: install it (Debian: apt-get install valgrind)")
    counts = {}
    for name, flags in (("stock", ()), ("ridge", ("--ridge-maps", maps))):
        with tempfile.TemporaryDirectory() as folder:
            counts[name] = _instructions(model, flags, Path(folder))
    more = [r / s - 1 for r, s in zip(counts["ridge"], counts["stock"], strict=True)]
    return {"n_tokens": N_COUNTED_TOKENS, "instructions": counts, "more": more, "limit": LIMIT_INSTRUCTIONS}


def show_counts(r: dict, console: Console) -> None:
    verdict = "within" if max(r["more"]) < r["limit"] else "NOT within"
    console.print(f"{len(r['more'])} prompts of {r['n_tokens']} tokens: with maps loaded {', '.join(f'{100 * m:+.3f}' for m in r['more'])} % "
                  f"instructions: {verdict} {100 * r['limit']:.0f} %")


def show_short(r: dict, console: Console) -> None:
    verdict = "within" if r["high_95"] < r["limit"] else "NOT within"
    console.print(f"{r['pairs']} pairs of {r['prompts_per_pair']} prompts of {r['n_tokens']} tokens: with maps loaded {100 * r['slowdown']:+.2f} % CPU time, "
                  f"95 % interval [{100 * r['low_95']:+.2f}, {100 * r['high_95']:+.2f}] %: {verdict} {100 * r['limit']:.0f} %")
