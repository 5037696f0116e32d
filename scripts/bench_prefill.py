#!/usr/bin/env python3
"""Time to first token, stock against filled, in one process, interleaved.

    bench_prefill.py                                  SmolLM2 as Q8_0, one thread, process CPU time
    bench_prefill.py --clock wall --threads 2         what a user waits
    bench_prefill.py --model shipped                  the Q4_1 file as shipped
    bench_prefill.py --short                          what loaded maps cost a prompt too short to be filled, in CPU time
    RIDGE_BUILD=build-portable bench_prefill.py --short --instructions      the same, counted by callgrind

The bound counts only work that no implementation of this split, tail and choice of rows can leave out, each part
measured, as stock runs it:

    bound = t_exact / (t_lower + t_upper + t_fill)
    t_lower   stock with the layers from S on cut off the model, all rows
    t_upper   sweep 2, and for the rows left to decode: stock at their place, less the same with the cut model
    t_fill    one ubatch of sweep 1 with maps less the same without, median of FILL_PAIRS pairs, times the filled rows:
              it does not depend on the prompt's length, and would drown in the noise of a long sweep
"""
from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from filler import passages
from llama_server import ServerError
from ridgefill.errors import RidgefillError
from ridgefill.lib import Context, Maps, Model, select_rows
from ridgefill.machine import write_record
from model_layers import truncate

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(os.environ.get("RIDGE_BUILD", ROOT / "build")) / "bin"
SHIPPED = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MAPS = ROOT / "models" / "smollm2-135m-instruct.s15.q8_0.ridge.gguf"
N_CTX, N_BATCH, N_UBATCH = 8192, 2048, 512
FILL_PAIRS = 20

console = Console(width=max(150, Console().width))
CLOCKS = {"cpu": time.process_time, "wall": time.perf_counter}


@dataclasses.dataclass(frozen=True)
class Setting:
    """One line of the table. Lengths in rows; budget as in llama-server's --ridge-budget."""

    n: int
    tail: int
    rows: str
    budget: float


@dataclasses.dataclass
class Spread:
    """Seconds over the repetitions."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.min:.2f}, {self.max:.2f}]"


@dataclasses.dataclass
class Timer:
    """Seconds of each named piece of work, one list entry per repetition."""

    clock: str
    seconds: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def __call__(self, name: str, work) -> None:
        now = CLOCKS[self.clock]
        start = now()
        work()
        self.seconds.setdefault(name, []).append(now() - start)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


def sweeps(timer: Timer, name: str, prefill) -> None:
    """Run a prefill, sweep 1 and sweep 2 timed apart."""
    def run(n: int) -> None:
        for _ in range(n):
            prefill.step()

    s = prefill.stats
    timer(f"{name} sweep 1", lambda: run(s["n_steps_lower"]))
    timer(f"{name} sweep 2", lambda: run(s["n_steps"] - s["n_steps_lower"]))


def text_tokens(model: Model, n: int) -> list[int]:
    tokens = model.tokenize("\n\n".join(passages()[: n // 20]), add_special=False)
    assert len(tokens) >= n, f"expected {n} tokens of text, found {len(tokens)}"
    return tokens[:n]


def fill_times(
    model: Model, maps: list[Maps], tokens: list[int], threads: int, clock: str, rounds: int = FILL_PAIRS
) -> list[list[float]]:
    """Seconds to fill one row in one upper layer, of each of `maps` (of one split) in each round.

    tokens  one ubatch for sweep 1, one row for decode
    """
    times = []
    with Context(model, n_ctx=2 * N_UBATCH, n_batch=N_BATCH, n_ubatch=N_UBATCH, n_threads=threads) as ctx:
        for i in range(rounds + 1):
            timer, n_filled = Timer(clock), 0
            for j in range(-1, len(maps))[:: 1 if i % 2 == 0 else -1]:
                ctx.clear()
                kw = dict(mode="fill" if j >= 0 else "nofill", maps=maps[max(j, 0)], split=maps[0].split, n_tail=1)
                with ctx.prefill(tokens, **kw) as p:
                    sweeps(timer, str(j), p)
                    n_filled = p.stats["n_filled"]
            plain = timer.median("-1 sweep 1")
            rows = n_filled * (model.n_layer - maps[0].split)
            times.append([(timer.median(f"{j} sweep 1") - plain) / rows for j in range(len(maps))])
    return [list(t) for t in zip(*times[1:], strict=True)]  # the first round warms up


class Bench:
    """The model, the same model without its upper layers, the maps, and one context of each model."""

    def __init__(self, path: Path, maps: Path, threads: int, clock: str):
        self.model = Model(path)
        self.maps = Maps(self.model, maps)
        self.split, self.clock, self.threads = self.maps.split, clock, threads
        cut = truncate(path, ROOT / "out" / f"{path.stem}.first{self.split}.gguf", self.split)
        self.cut_model = Model(cut)
        kw = dict(n_ctx=N_CTX, n_batch=N_BATCH, n_ubatch=N_UBATCH, n_threads=threads)
        self.ctx, self.cut = Context(self.model, **kw), Context(self.cut_model, **kw)

    def once(self, timer: Timer, tokens: list[int], setting: Setting, exact: list[int], order: int) -> dict:
        """Every piece of work once; the two arms change places from one repetition to the next."""
        ctx, stats = self.ctx, {}
        kw = dict(n_tail=setting.tail, exact_rows=exact, split=self.split)

        def exactly() -> None:
            ctx.clear()
            timer("exact", lambda: ctx.decode(tokens))

        def filled() -> None:
            ctx.clear()
            p = None

            def work() -> None:
                nonlocal p
                _, p = ctx.fill_and_decode(tokens, mode="fill", maps=self.maps, **kw)

            timer("filled", work)
            stats.update(p.stats)
            p.close()

        for arm in (exactly, filled) if order % 2 == 0 else (filled, exactly):
            arm()
        pos = stats["n_done"]
        rest = tokens[pos:]
        ctx.seq_rm(0, pos)
        timer("rest", lambda: ctx.decode(rest, pos0=pos))
        ctx.clear()
        with ctx.prefill(tokens, mode="fill", maps=self.maps, **kw) as p:
            sweeps(timer, "fill", p)
        self.cut.clear()
        timer("lower", lambda: self.cut.decode(tokens))
        self.cut.seq_rm(0, pos)
        timer("lower rest", lambda: self.cut.decode(rest, pos0=pos))
        return stats

    @functools.cached_property
    def fill_unit(self) -> float:
        """Seconds to fill one row in one upper layer; the same for every setting, so measured once."""
        return statistics.median(fill_times(self.model, [self.maps], text_tokens(self.model, N_UBATCH + 1), self.threads, self.clock)[0])

    def run(self, setting: Setting, repeats: int, tick) -> dict:
        tokens = text_tokens(self.model, setting.n)
        exact = select_rows(setting.rows, self.model, tokens, self.maps.n_sink, setting.n - setting.tail, setting.budget)
        timer, stats = Timer(self.clock), {}
        for i in range(repeats):
            stats = self.once(timer, tokens, setting, exact, i)
            tick()
        return self.result(setting, timer, stats)

    def result(self, setting: Setting, timer: Timer, stats: dict) -> dict:
        m, n_layer = timer.median, self.model.n_layer
        t_upper = m("fill sweep 2") + m("rest") - m("lower rest")
        t_fill = self.fill_unit * stats["n_filled"] * (n_layer - self.split)
        bound = m("exact") / (m("lower") + t_upper + t_fill)
        ratio = m("exact") / m("filled")
        layer_unit = m("exact") / (setting.n * n_layer)
        return {
            **dataclasses.asdict(setting), "split": self.split, "n_filled": stats["n_filled"], "n_exact": stats["n_exact"],
            "exact_s": dataclasses.asdict(Spread.of(timer.seconds["exact"])),
            "filled_s": dataclasses.asdict(Spread.of(timer.seconds["filled"])),
            "ratio": ratio, "bound": bound, "share_of_bound": ratio / bound,
            "t_lower_s": m("lower"), "t_upper_s": t_upper, "t_fill_s": t_fill,
            "fill_us_per_row_and_layer": 1e6 * self.fill_unit, "layer_us_per_row": 1e6 * layer_unit,
            "fill_share_of_layer": self.fill_unit / layer_unit,
            "all_seconds": timer.seconds,
        }


def show(results: list[dict], title: str) -> None:
    t = Table("N", "S", "T", "exact rows", "exact s [min, max]", "filled s [min, max]", "ratio", "bound",
              "% of bound", "fill µs", "% of layer", title=title)
    for r in results:
        rows = f"{r['n_exact'] - r['tail']:,}" + ("" if r["rows"] == "none" else f" ({r['rows']})")
        t.add_row(f"{r['n']:,}", str(r["split"]), str(r["tail"]), rows, str(Spread(**r["exact_s"])), str(Spread(**r["filled_s"])),
                  f"{r['ratio']:.2f}x", f"{r['bound']:.2f}x", f"{100 * r['share_of_bound']:.0f}",
                  f"{r['fill_us_per_row_and_layer']:.2f}", f"{100 * r['fill_share_of_layer']:.1f}")
    console.print(t)


def requantised(kind: str = "Q8_0") -> Path:
    """The shipped model as Q8_0 in out/, made by llama-quantize when it is not there."""
    target = ROOT / "out" / f"SmolLM2-135M-Instruct.{kind}.gguf"
    if not target.exists():
        target.parent.mkdir(exist_ok=True)
        part = target.with_suffix(".part")
        p = subprocess.run([BIN / "llama-quantize", "--allow-requantize", SHIPPED, part, kind], capture_output=True, text=True)
        if p.returncode:
            raise RidgefillError(f"llama-quantize stopped with status {p.returncode}:\n{p.stdout[-2000:]}{p.stderr[-2000:]}")
        part.rename(target)
    return target


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    p.add_argument("--model", default="q8_0", help="q8_0 (default), shipped, or a GGUF file")
    p.add_argument("--maps", type=Path, default=MAPS, help="sidecar of the model; its split is the one measured (default: the shipped S=15)")
    p.add_argument("-n", type=int, nargs="+", default=[2048, 4096, 7500], help="prompt lengths in tokens")
    p.add_argument("--tail", type=int, default=512, help="rows (default %(default)s)")
    p.add_argument("--rows", nargs="+", default=["none"], choices=["none", "random", "digits"], help="selectors to measure")
    p.add_argument("--budget", type=float, default=0.15, help="of random rows; digits are all taken (default %(default)s)")
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--clock", choices=list(CLOCKS), default="cpu", help="process CPU time or wall clock (default %(default)s)")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--short", action="store_true", help="below the minimum length: server with maps against server without")
    p.add_argument("--instructions", action="store_true", help="with --short: count them with callgrind, on a build without AVX-512 (-DGGML_NATIVE=OFF)")
    p.add_argument("--out", type=Path, help="JSON file (default under out/)")
    args = p.parse_args()
    bad = [n for n in args.n if not args.tail < n <= N_CTX]
    if bad:
        p.error(f"-n: expected lengths above the tail of {args.tail} and at most {N_CTX}, found {bad}")
    return args


def main() -> int:
    args = parse()
    path = {"q8_0": requantised, "shipped": lambda: SHIPPED}.get(args.model, lambda: Path(args.model))()
    settings = {"model": path.name, "maps": args.maps.name, "threads": args.threads, "clock": args.clock, "repeats": args.repeats}
    if args.short:
        import bench_short

        if args.instructions:
            results = bench_short.count_short(path, args.maps)
            bench_short.show_counts(results, console)
        else:
            results = bench_short.measure_short(path, args.maps, console)
            bench_short.show_short(results, console)
        name = "bench-short" + "-instructions" * args.instructions
    else:
        bench = Bench(path, args.maps, args.threads, args.clock)
        lines = [Setting(n, args.tail, rows, {"random": args.budget}.get(rows, 0.0)) for rows in args.rows for n in args.n]
        results = []
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task("interleaved runs", total=len(lines) * args.repeats)
            for line in lines:
                results.append(bench.run(line, args.repeats, lambda: progress.advance(task)))
        clock = "process CPU time" if args.clock == "cpu" else "wall clock"
        show(results, f"{path.name}, {args.threads} thread{'s' * (args.threads > 1)}, {clock}, medians of {args.repeats}")
        name = f"bench-{args.clock}-{args.model if args.model in ('q8_0', 'shipped') else path.stem}-s{bench.split}"
    out = args.out or ROOT / "out" / f"{name}.json"
    write_record(out, {"settings": settings, "results": results})
    console.print(f"written to {os.path.relpath(out)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (RidgefillError, ServerError) as e:
        sys.exit(f"bench_prefill: {e}")
