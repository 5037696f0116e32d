#!/usr/bin/env python3
"""Newcomers with long prompts while others are being answered: what a fill changes for both.

    scripts/bench_serve.py --users 4 --newcomers 20     writes results/bench-serve.json
    scripts/bench_serve.py                              1, 2, 4 and 8 users: hours on two cores
    scripts/bench_serve.py --reduced                    a small one, under two minutes

One trial: the users begin together, in one request; once each has some tokens a newcomer's prompt arrives, and is
processed exactly (off) or filled. Pairs of trials, the same prompt in both, change places within one run of one server.
A gap is the time between two tokens of one user; those that overlap the newcomer's time to first token count. The users
are also run without a newcomer: until the batch that ends a filled prompt their tokens must be the same.

A run that was stopped goes on where it was. Exit status: 0 when every criterion holds, 1 when one does not, another when
the measurement itself failed.
"""
from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

from filler import passages
from llama_server import BINARY, Answer, LlamaServer, ServerError, check_arm
from ridgefill.errors import RidgefillError
from ridgefill.evaluation import EvaluationError, report, stats
from ridgefill.evaluation.journal import Journal
from ridgefill.machine import machine

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MAPS = ROOT / "models" / "smollm2-135m-instruct.s20.q8_0.ridge.gguf"
OUT, OUT_REDUCED = Path("results/bench-serve.json"), Path("out/bench-serve-reduced.json")
ARMS = ("off", "fill")
MIN_RATIO = 1.2  # of the newcomers' times to first token

WARM = 8  # tokens of each user before the newcomer comes
USER_ROWS = 64  # of a user's own prompt
MIN_CTX = 4096  # of a slot: users go on until the newcomer is served, however fast they are
ANSWER = 16  # tokens of a newcomer

console = Console(width=max(120, Console().width))


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of the server and its newcomers; rows and tokens are counts.

    tokens         of a newcomer's prompt
    batch, ubatch  as llama-server's -b and -ub, whose defaults these are
    """

    tokens: int = 6000
    batch: int = 2048
    ubatch: int = 512
    threads: int = os.cpu_count() or 1

    @property
    def slot_ctx(self) -> int:
        """Rows of a slot: upstream rounds up to 256."""
        return 256 * -(-max(self.tokens + ANSWER, MIN_CTX) // 256)


class Users:
    """People who are being answered, while inside `with`. A thread notes when each token came.

    One request holds them all: they share a batch from their first row on, whatever else happens in the server, and their
    tokens can be compared between two runs. Tokens whose bytes are no character yet are missing: upstream does not send them.
    """

    def __init__(self, server: LlamaServer, prompts: Sequence[list[int]], n_predict: int):
        self.times: list[list[float]] = [[] for _ in prompts]  # of each event that brought tokens
        self.tokens: list[list[int]] = [[] for _ in prompts]
        body = {"prompt": list(prompts), "n_predict": n_predict, "temperature": 0, "ignore_eos": True, "return_tokens": True,
                "cache_prompt": False, "ridge": {"mode": "off"}}
        self._changed, self._leave, self._ended = threading.Condition(), False, ""
        self._thread = threading.Thread(target=self._read, args=(server, body))

    def __enter__(self) -> Users:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._leave = True
        self._thread.join()

    def _read(self, server: LlamaServer, body: dict) -> None:
        reason = "their answers were at an end"
        try:
            with server.stream_events(body) as events:
                for e in events:
                    now = time.perf_counter()
                    if e.get("tokens"):
                        with self._changed:
                            self.times[e["index"]].append(now)
                            self.tokens[e["index"]] += e["tokens"]
                            self._changed.notify_all()
                    if self._leave:
                        return
        except (ServerError, OSError) as e:
            reason = str(e)
        with self._changed:
            self._ended = reason
            self._changed.notify_all()

    def counts(self) -> list[int]:
        """Tokens that each has so far."""
        with self._changed:
            return [len(t) for t in self.tokens]

    def wait(self, counts: Sequence[int]) -> None:
        """Until each has that many tokens. Raises ServerError if their request ends before."""

        def there() -> bool:
            return all(len(t) >= n for t, n in zip(self.tokens, counts, strict=True))

        with self._changed:
            self._changed.wait_for(lambda: self._ended or there())
            if not there():
                raise ServerError(f"users: expected {list(counts)} tokens, found {[len(t) for t in self.tokens]}: {self._ended}")

    def gaps_ms(self, start: float, end: float) -> list[list[float]]:
        """Of each user, the times between two events that overlap [start, end]."""
        pairs = [zip(t, t[1:]) for t in self.times]
        return [[round(1000 * (b - a), 2) for a, b in p if b > start and a < end] for p in pairs]


class Bench:
    """One server with a slot for each user and one for the newcomers, and texts of which the prompts are made."""

    def __init__(self, server: LlamaServer, n_users: int, settings: Settings, texts: Sequence[str]):
        self.server, self.settings, self.texts, self.n_tail = server, settings, texts, server.loaded_maps()["tail"]
        self.users = [self._text(f"Page {i} of the notes.", 40 * i, USER_ROWS) for i in range(n_users)]

    def _text(self, title: str, i: int, n: int) -> list[int]:
        """n tokens: a title, then texts from another place on."""
        at = i % len(self.texts)
        tokens = self.server.tokenize(title + "\n\n" + "\n\n".join([*self.texts[at:], *self.texts[:at]])[: 12 * n])
        if len(tokens) < n:
            raise ServerError(f"texts: expected {n} tokens, found {len(tokens)}")
        return tokens[:n]

    def begin(self) -> Users:
        return Users(self.server, self.users, self.settings.slot_ctx - USER_ROWS)

    def pair(self, i: int) -> list[dict]:
        """One newcomer's prompt in both arms."""
        prompt = self._text(f"A long report, number {i}, is to be read.", 89 * i + 700, self.settings.tokens)
        return [self.trial(arm, prompt) for arm in (ARMS if i % 2 == 0 else ARMS[::-1])]

    def trial(self, arm: str, prompt: list[int]) -> dict:
        """A newcomer among users. Times in milliseconds; `until`: tokens of each user before the batch that ends the prompt."""
        body = {"prompt": prompt, "ridge": {"mode": arm}, "n_predict": ANSWER, "temperature": 0, "ignore_eos": True,
                "return_tokens": True, "return_progress": True, "cache_prompt": False}
        answer, timings, first, until = [], {}, None, None
        with self.begin() as users:
            users.wait([WARM] * len(self.users))
            start = time.perf_counter()
            with self.server.stream_events(body) as events:
                for e in events:
                    if "prompt_progress" in e:
                        if until is None and e["prompt_progress"]["processed"] >= len(prompt) - self.n_tail:
                            until = users.counts()
                        continue  # it brings no token
                    if first is None:
                        first, counts = time.perf_counter(), users.counts()
                    answer += e.get("tokens", [])
                    timings = e.get("timings", timings)
            if first is None or until is None:
                raise ServerError(f"newcomer: the stream ended without tokens or progress:\n{self.server.log_tail()}")
            users.wait([n + 1 for n in counts])
        check_arm(arm, Answer("", 1000 * (first - start), timings), len(prompt))
        received = [sum(start < t <= first for t in times) for times in users.times]
        return {
            "arm": arm, "ttft_ms": 1000 * (first - start), "prompt_ms": timings["prompt_ms"], "ridge": timings["ridge"],
            "answer": answer[:ANSWER], "gaps_ms": users.gaps_ms(start, first), "until": until,
            "tokens_per_s": float(np.mean(received)) / (first - start), "tokens": [t[:n] for t, n in zip(users.tokens, until)],
        }  # fmt: skip

    def alone(self, n: int) -> list[dict]:
        """The users without a newcomer, n tokens each."""
        with self.begin() as users:
            users.wait([n] * len(self.users))
        start = [t[WARM] for t in users.times]
        seconds = max(t[-1] for t in users.times) - min(start)
        return [{"tokens": [t[:n] for t in users.tokens], "gaps_ms": users.gaps_ms(min(start), float("inf")),
                 "tokens_per_s": (n - WARM) / seconds}]


def n_leading_equal(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def summarise_arm(trials: Sequence[dict], alone: dict) -> dict:
    """Figures of one arm with their spread. Gaps of all users and newcomers together."""
    gaps = np.array([g for t in trials for g in chain(*t["gaps_ms"])])
    same = [n_leading_equal(a, b) for t in trials for a, b in zip(t["tokens"], alone["tokens"], strict=True)]
    return {
        "ttft_ms": spread([t["ttft_ms"] for t in trials]),
        "tokens_per_s": spread([t["tokens_per_s"] for t in trials]),
        "gaps_ms": {f"p{q}": float(np.percentile(gaps, q)) for q in (50, 95, 99)} | {"longest": float(gaps.max()), "n": len(gaps)},
        # of the users, before the end of the prompt, against those of the users alone
        "tokens_compared": sum(sum(t["until"]) for t in trials),
        "tokens_equal": sum(same),
    }


def spread(values: Sequence[float]) -> dict:
    return {"median": float(np.median(values)), "min": min(values), "max": max(values)}


def compare(off: Sequence[dict], fill: Sequence[dict]) -> dict:
    """Fill against off, newcomers in pairs; intervals by bootstrap over newcomers."""
    gaps = [[list(chain(*t["gaps_ms"])) for t in trials] for trials in (fill, off)]
    equal = [n_leading_equal(a["answer"], b["answer"]) for a, b in zip(off, fill, strict=True)]
    return {
        "ttft_ratio": stats.ratio(*([t["ttft_ms"] for t in x] for x in (off, fill)), "time to first token").as_dict(),
        "tokens_per_s_ratio": stats.ratio(*([t["tokens_per_s"] for t in x] for x in (fill, off)), "users' tokens/s").as_dict(),
        "p99_gap_difference_ms": stats.pooled_difference(*gaps, lambda g: np.percentile(g, 99), "p99 gap").as_dict(),
        "longest_gap_difference_ms": stats.pooled_difference(*gaps, np.max, "longest gap").as_dict(),
        "longest_gap_per_newcomer_difference_ms": stats.mean_difference(*(list(map(max, g)) for g in gaps), "longest gap").as_dict(),
        # of the newcomers' answers
        "agreement": {"answers": len(equal), "first_token": sum(n > 0 for n in equal), "whole": sum(n == ANSWER for n in equal), "tokens": ANSWER},
    }


def criteria(n_users: int, result: dict, reduced: bool) -> list[report.Criterion]:
    fill, c, head = result["arms"]["fill"], result["comparison"], f"{n_users} users"
    out = [report.Criterion(f"{head}: tokens before the end of a filled prompt unlike those without a newcomer",
                            fill["tokens_compared"] - fill["tokens_equal"], "<=", 0)]
    for gap in ("p99", "longest"):
        value = c[f"{gap}_gap_difference_ms"]["value" if reduced else "high"]
        out.append(report.Criterion(f"{head}: {gap} gap, fill less off{'' if reduced else ', upper end'}, ms", value, "<=", 0))
    return [*out, report.Criterion(f"{head}: newcomers' time to first token, off over fill", c["ttft_ratio"]["value"], ">=", 1 if reduced else MIN_RATIO)]


def table(results: Sequence[dict], settings: Settings) -> Table:
    title = f"Newcomers of {settings.tokens:,} tokens; gaps of all users together, medians with \\[min, max] over newcomers"
    t = Table("users", "newcomers", "", "first token, s", "users' tokens/s each", "gap p50", "p95", "p99", "longest, ms", "tokens as alone", title=title)
    for r in results:
        alone = np.array(list(chain(*r["alone"]["gaps_ms"])))
        quantiles = [f"{np.percentile(alone, q):.0f}" for q in (50, 95, 99, 100)]
        t.add_row(str(r["users"]), "", "alone", "", f"{r['alone']['tokens_per_s']:.2f}", *quantiles, "")
        for name, a in r["arms"].items():
            seconds = {k: v / 1000 for k, v in a["ttft_ms"].items()}
            t.add_row("", str(r["newcomers"]), name, shown(seconds), shown(a["tokens_per_s"]), *(f"{a['gaps_ms'][k]:.0f}" for k in ("p50", "p95", "p99", "longest")),
                      f"{a['tokens_equal']} of {a['tokens_compared']}")
        t.add_section()
    return t


def shown(s: dict) -> str:
    return f"{s['median']:.2f} [{s['min']:.2f}, {s['max']:.2f}]"


def show(results: Sequence[dict], checks: Sequence[report.Criterion], settings: Settings) -> None:
    console.print(table(results, settings))
    for r in results:
        c, a = r["comparison"], r["comparison"]["agreement"]
        console.print(
            f"{r['users']} users, fill against off [95 %]: first token {report.span(c['ttft_ratio'], 2, '')} times sooner, users' tokens/s times "
            f"{report.span(c['tokens_per_s_ratio'], 2, '')}; gaps, ms: p99 {report.span(c['p99_gap_difference_ms'], 0)}, longest "
            f"{report.span(c['longest_gap_difference_ms'], 0)}, longest of each newcomer {report.span(c['longest_gap_per_newcomer_difference_ms'], 0)}; "
            f"newcomers' answers as with off: first token {a['first_token']} of {a['answers']}, all {a['tokens']} tokens {a['whole']}",
            highlight=False,
        )
    console.print(report.criteria_table(checks))


def measure(n_users: int, newcomers: int, model: Path, maps: Path, s: Settings, texts: Sequence[str], journal: Journal, tick) -> dict:
    """All trials among so many users, those in the journal taken from it."""
    arguments = ("-m", model, "--ridge-maps", maps, "-np", n_users + 1, "--no-kv-unified", "-c", s.slot_ctx * (n_users + 1), "-b", s.batch,
                 "-ub", s.ubatch, "-t", s.threads, "-tb", s.threads, "--cache-ram", 0)
    with LlamaServer(*arguments) as server:
        bench = Bench(server, n_users, s, texts)
        server.complete("Hello", n_predict=4)  # the first request pages the weights in
        trials: dict[str, list[dict]] = {arm: [] for arm in ARMS}
        for i in range(newcomers):
            for t in journal.of(f"{n_users} users, newcomer {i}", lambda i=i: bench.pair(i)):
                trials[t["arm"]].append(t)
            tick()
        n = max(max(t["until"]) for t in chain(*trials.values()))
        (alone,) = journal.of(f"{n_users} users alone, {n} tokens", lambda: bench.alone(n))
    return {"users": n_users, "newcomers": newcomers, "alone": alone, "trials": trials, "comparison": compare(trials["off"], trials["fill"]),
            "arms": {arm: summarise_arm(t, alone) for arm, t in trials.items()}}


def main(
    model: Annotated[Path, typer.Option(help="model file")] = MODEL,
    maps: Annotated[Path, typer.Option(help="sidecar")] = MAPS,
    users: Annotated[str, typer.Option(help="numbers of users, one server after the other [default: 1,2,4,8]")] = "",
    newcomers: Annotated[int | None, typer.Option(help="pairs of newcomers for each [default: 20]", min=2)] = None,
    tokens: Annotated[int | None, typer.Option(help="of a newcomer's prompt [default: 6000]", min=1)] = None,
    batch: Annotated[int, typer.Option(help="llama-server's -b", min=1)] = Settings.batch,
    ubatch: Annotated[int, typer.Option(help="llama-server's -ub", min=1)] = Settings.ubatch,
    threads: Annotated[int, typer.Option(help="CPU threads", min=1)] = Settings.threads,
    out: Annotated[Path | None, typer.Option(help=f"result file [default: {OUT}, or {OUT_REDUCED}]")] = None,
    reduced: Annotated[bool, typer.Option(help="2 users, 2 newcomers of 1,500 tokens; the gaps' means are judged, not their intervals")] = False,
    fresh: Annotated[bool, typer.Option(help="measure everything anew instead of going on with a run that was stopped")] = False,
) -> None:
    counts = users or ("2" if reduced else "1,2,4,8")
    settings = Settings(tokens or (1500 if reduced else Settings.tokens), batch, ubatch, threads)
    newcomers = newcomers or (2 if reduced else 20)
    out = out or ROOT / (OUT_REDUCED if reduced else OUT)
    path = out.with_suffix(".journal.jsonl")
    if fresh:
        path.unlink(missing_ok=True)
    try:
        if not all(n.isdecimal() and int(n) for n in counts.split(",")):
            raise EvaluationError(f"users: expected numbers such as 1,2,4,8, found {counts}")
        about = {"model": model.name, "maps": maps.name, "settings": dataclasses.asdict(settings)}
        build = max(f.stat().st_mtime_ns for f in (*BINARY.parent.glob("*.so*"), model, maps))
        journal, results = Journal(path, about | {"newest_file": build}), []
        n_list, texts = [int(n) for n in counts.split(",")], passages()
        with Progress(console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("pairs of newcomers", total=newcomers * len(n_list))
            for n in n_list:
                results.append(measure(n, newcomers, model, maps, settings, texts, journal, lambda: progress.advance(task)))
                console.print(f"{n} users: done", highlight=False)
        checks = [c for r in results for c in criteria(r["users"], r, reduced)]
        show(results, checks, settings)
    except (RidgefillError, ServerError) as e:
        console.print(f"bench_serve: {e}", style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(EvaluationError.exit_code) from None
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine()} | about | {"results": results, "criteria": [c.as_dict() for c in checks]}
    out.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    path.unlink()  # its records are in the result now
    console.print(f"written: {out}", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if all(c.holds for c in checks) else 1)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command(help=__doc__)(main)
    app()
