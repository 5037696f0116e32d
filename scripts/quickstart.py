#!/usr/bin/env python3
"""The main job: a long real prompt answered sooner. Called by scripts/quickstart.sh, which sets everything up.

A prompt of about 6,000 tokens, documentation of the Python standard library with one fact planted in it, goes to
llama-server --ridge-maps exactly and filled in turn. The fact stands among filled rows: its K/V in the upper layers come
from the maps, not from the model. Exit status 0 only if both answers hold the fact and the filled first token comes at
least 1.15 times sooner.
"""
from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from filler import passages
from llama_server import Answer, LlamaServer, ServerError, check_arm
from ridgefill.machine import write_record

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MAPS = ROOT / "models" / "smollm2-135m-instruct.s20.q8_0.ridge.gguf"

MIN_RATIO = 1.15
N_TOKENS = 6000
MAX_SECONDS = 120  # of one seed: a slow machine does fewer repetitions, one pair at least
DEFAULT_SEED = 1

INTRO = "Read these notes. A question follows at the end.\n\n"
FACT = "Note: the serial number of the lighthouse lamp is {code}."
QUESTION = "\n\nWhat is the serial number of the lighthouse lamp?"

console = Console(width=max(100, Console().width))


@dataclasses.dataclass
class Prompt:
    """A prompt as token ids, with the rows [fact0, fact1) that hold the fact's sentence."""

    code: str
    tokens: list[int]
    fact0: int
    fact1: int


def make_prompt(server: LlamaServer, seed: int, n_tail: int) -> Prompt:
    """Filler, code and position from `seed`; the fact ends before the tail, so that its rows are filled."""
    rng = random.Random(seed)
    texts = passages()
    rng.shuffle(texts)
    code = str(rng.randrange(10**6, 10**7))
    place = rng.uniform(0.1, 0.8)

    chosen, n = [], len(server.tokenize(server.apply_template(INTRO + FACT.format(code=code) + QUESTION)))
    for text in texts:
        n += len(server.tokenize(text + "\n\n"))
        if n > N_TOKENS:
            break
        chosen.append(text)
    i = round(place * len(chosen))
    before, after = ("\n\n".join(part) for part in (chosen[:i], chosen[i:]))
    fact = FACT.format(code=code)
    prompt = server.apply_template(INTRO + before + "\n\n" + fact + "\n\n" + after + QUESTION)

    head, _, rest = prompt.partition(fact)
    tokens = server.tokenize(prompt)
    p = Prompt(code, tokens, len(server.tokenize(head)), len(tokens) - len(server.tokenize(rest)))
    if not 0 < p.fact0 < p.fact1 < len(tokens) - n_tail:
        raise ServerError(f"the fact's rows {p.fact0}..{p.fact1} reach into the tail of {len(tokens)} rows")
    return p


@dataclasses.dataclass
class Result:
    """What one seed gave. Times are medians over the repetitions, in milliseconds."""

    seed: int
    code: str
    n_prompt: int
    n_filled: int
    n_exact: int
    fact_rows: tuple[int, int]
    fact_filled: bool
    exact_ms: float
    filled_ms: float
    exact_server_ms: float
    filled_server_ms: float
    ratio: float
    exact_answer: str
    filled_answer: str
    exact_recalls: bool
    filled_recalls: bool
    exact_all_ms: list[float]
    filled_all_ms: list[float]

    @property
    def good(self) -> bool:
        return self.exact_recalls and self.filled_recalls and self.fact_filled and self.ratio >= MIN_RATIO


def fact_is_filled(prompt: Prompt, ridge: dict, n_sink: int) -> bool:
    """Filled rows are all but sinks, tail and chosen rows; without chosen rows the counts say which they are."""
    first, end = n_sink, len(prompt.tokens) - ridge["tail"]
    return ridge["filled"] == end - first and first <= prompt.fact0 and prompt.fact1 <= end


def run_seed(server: LlamaServer, seed: int, repeats: int, n_tail: int, n_sink: int, tick) -> Result:
    """Pairs of runs, the arms changing places, until there are `repeats` or MAX_SECONDS would be exceeded."""
    prompt = make_prompt(server, seed, n_tail)
    answers: dict[str, list[Answer]] = {"off": [], "fill": []}
    start = time.monotonic()
    for i in range(repeats):
        if i and (time.monotonic() - start) * (i + 1) / i > MAX_SECONDS:
            break
        for arm in ("off", "fill") if i % 2 == 0 else ("fill", "off"):
            answer = server.complete(prompt.tokens, ridge={"mode": arm})
            check_arm(arm, answer, len(prompt.tokens))
            answers[arm].append(answer)
            tick()
    for arm, given in answers.items():
        if len({a.text for a in given}) > 1:
            raise ServerError(f"{arm}: the same greedy request gave different answers: {sorted({a.text for a in given})}")
    exact, filled = answers["off"], answers["fill"]
    ms = {arm: statistics.median(a.first_token_ms for a in given) for arm, given in answers.items()}
    ridge = filled[0].ridge
    return Result(
        seed=seed, code=prompt.code, n_prompt=len(prompt.tokens), n_filled=ridge["filled"], n_exact=ridge["exact"],
        fact_rows=(prompt.fact0, prompt.fact1), fact_filled=fact_is_filled(prompt, ridge, n_sink),
        exact_ms=ms["off"], filled_ms=ms["fill"], ratio=ms["off"] / ms["fill"],
        exact_server_ms=statistics.median(a.timings["prompt_ms"] for a in exact),
        filled_server_ms=statistics.median(a.timings["prompt_ms"] for a in filled),
        exact_answer=exact[0].text.strip(), filled_answer=filled[0].text.strip(),
        exact_recalls=prompt.code in exact[0].text, filled_recalls=prompt.code in filled[0].text,
        exact_all_ms=[a.first_token_ms for a in exact], filled_all_ms=[a.first_token_ms for a in filled],
    )


def show_one(r: Result) -> None:
    t = Table("", "exact", "filled", title=f"seed {r.seed}, medians of {len(r.exact_all_ms)}")
    t.add_row("prompt tokens", f"{r.n_prompt:,}", f"{r.n_prompt:,}")
    t.add_row("rows filled / exact", f"0 / {r.n_prompt:,}", f"{r.n_filled:,} / {r.n_exact:,}")
    t.add_row(f"fact, rows {r.fact_rows[0]:,} to {r.fact_rows[1] - 1:,}", "exact", "filled" if r.fact_filled else "NOT filled")
    t.add_row("time to first token, client", f"{r.exact_ms / 1000:.2f} s", f"{r.filled_ms / 1000:.2f} s")
    t.add_row("prompt time, server", f"{r.exact_server_ms / 1000:.2f} s", f"{r.filled_server_ms / 1000:.2f} s")
    t.add_row("sooner by", "", f"{r.ratio:.2f}x")
    t.add_row(f"answer (the fact is {r.code})", r.exact_answer, r.filled_answer)
    t.add_row("holds the fact", "yes" if r.exact_recalls else "NO", "yes" if r.filled_recalls else "NO")
    console.print(t)


def show_many(results: list[Result]) -> bool:
    t = Table("seed", "tokens", "filled", "fact rows", "exact s", "filled s", "ratio", "exact answer", "filled answer")
    for r in results:
        mark = ["" if ok else " (wrong)" for ok in (r.exact_recalls, r.filled_recalls)]
        t.add_row(str(r.seed), f"{r.n_prompt:,}", f"{r.n_filled:,}", f"{r.fact_rows[0]}-{r.fact_rows[1] - 1}",
                  f"{r.exact_ms / 1000:.2f}", f"{r.filled_ms / 1000:.2f}", f"{r.ratio:.2f}x",
                  r.exact_answer + mark[0], r.filled_answer + mark[1])
    console.print(t)
    n_exact, n_filled = (sum(getattr(r, f) for r in results) for f in ("exact_recalls", "filled_recalls"))
    slow = [r.seed for r in results if r.ratio < MIN_RATIO]
    outside = [r.seed for r in results if not r.fact_filled]
    console.print(f"facts recalled: exact {n_exact}, filled {n_filled} of {len(results)}; "
                  f"ratio {min(r.ratio for r in results):.2f}x to {max(r.ratio for r in results):.2f}x")
    if slow:
        console.print(f"below {MIN_RATIO}x: seeds {slow}")
    forgiven = 1 if len(results) >= 10 else 0  # of ten facts the filled runs may miss one that exact finds
    return not slow and not outside and n_exact > 0 and n_filled >= n_exact - forgiven


def save(path: Path, results: list[Result], settings: dict) -> None:
    write_record(path, {"settings": settings, "seeds": [dataclasses.asdict(r) for r in results]})
    console.print(f"written to {os.path.relpath(path)}")


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    group = p.add_mutually_exclusive_group()
    group.add_argument("--seed", type=int, default=DEFAULT_SEED, help="sets code, position and filler (default %(default)s)")
    group.add_argument("--seeds", metavar="A-B", help="run several seeds and write a table")
    p.add_argument("--repeats", type=int, default=3, help="runs of each arm, interleaved, fewer on a slow machine (default %(default)s)")
    p.add_argument("--maps", type=Path, default=MAPS, help="the sidecar (default: the shipped one)")
    p.add_argument("--out", type=Path, help="JSON file (default out/quickstart.json, for --seeds results/quickstart-seeds.json)")
    args = p.parse_args()
    args.list = [args.seed]
    if args.seeds:
        first, dash, last = args.seeds.partition("-")
        if not (first.isdecimal() and dash and last.isdecimal() and int(first) <= int(last)):
            p.error(f"--seeds: expected two numbers such as 1-10, found {args.seeds!r}")
        args.list = list(range(int(first), int(last) + 1))
    if args.repeats < 1:
        p.error(f"--repeats: expected 1 or more, found {args.repeats}")
    return args


def main() -> int:
    args = parse()
    for path, hint in ((MODEL, "scripts/fetch_model.py"), (args.maps, "scripts/quickstart.sh --calibrate")):
        if not path.exists():
            raise ServerError(f"expected {path}, found none: run {hint}")
    settings = {"model": MODEL.name, "maps": args.maps.name, "threads": os.cpu_count(), "context": 8192, "repeats": args.repeats}
    results = []
    with LlamaServer("-m", MODEL, "--ridge-maps", args.maps, "-c", 8192, "-np", 1, "-t", os.cpu_count()) as server:
        ridge = server.loaded_maps()
        server.complete("Hello", n_predict=4)  # the first request pages the weights in
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("exact and filled in turn", total=2 * args.repeats * len(args.list))
            for seed in args.list:
                r = run_seed(server, seed, args.repeats, ridge["tail"], ridge["sink"], lambda: progress.advance(task))
                results.append(r)
                if args.seeds:
                    console.print(f"seed {seed}: {r.ratio:.2f}x, the fact is {r.code}, exact: {r.exact_answer!r}, filled: {r.filled_answer!r}")
    if args.seeds:
        good, out = show_many(results), args.out or ROOT / "results" / "quickstart-seeds.json"
    else:
        show_one(results[0])
        good, out = results[0].good, args.out or ROOT / "out" / "quickstart.json"
    save(out, results, settings)
    console.print("good" if good else f"NOT good: expected both answers to hold the fact and a ratio of {MIN_RATIO} or more")
    return 0 if good else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerError as e:
        sys.exit(f"quickstart: {e}")
