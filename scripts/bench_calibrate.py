#!/usr/bin/env python3
"""What collecting statistics costs beside running the text, and whether the stated memory is what it takes.

    scripts/bench_calibrate.py MODEL --text out/text --out results/bench-calibrate.json

Time: the chunks of a calibration of one split (the middle layer) and one kind are run plainly and with the sums, in turn, in
one process; process CPU time, median of the ratios. Memory: the peak of a whole calibration of several splits in a process of
its own, less what a process holds that only ran the text, against the figure that the command states. (Linux)

Exit status 0: at most 1.2 times the time, and within 10 % of the stated memory.
"""
from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

from ridgefill import calibrate, lib
from ridgefill.machine import write_record

MAX_TIME, MEMORY_WITHIN = 1.2, 0.1


def config(a: argparse.Namespace, splits: list[int], **kw) -> calibrate.Config:
    return calibrate.Config(**{
        "model": a.model, "out": "", "splits": splits, "text": a.text, "kinds": [a.kind], "n_tokens": a.n_tokens, "overlap": "keep",
        "heldout_documents": 1, "threads": a.threads, "save_every": 1e9, **kw,
    })  # fmt: skip


def run_plainly(run: calibrate.Calibration) -> None:
    """The engine's forward pass over the chunks of a calibration, without keeping anything."""
    c = run.config
    with lib.Context(run.model, c.ctx, n_batch=c.ctx, n_threads=c.threads) as ctx:
        for chunk in (k for part in run.chunks.values() for k in part):
            ctx.clear()
            ctx.decode(chunk.tokens, logits="none")


def seconds(job) -> float:
    start = time.process_time()
    job()
    return time.process_time() - start


def measure_time(a: argparse.Namespace, folder: Path) -> dict:
    with lib.Model(a.model) as model:
        split = model.n_layer // 2
    pairs = []
    for i in range(a.repeats):
        c = config(a, [split], shard="1/1", sums=str(folder / f"{i}.npz"))
        with calibrate.Calibration(c) as run:
            jobs = {"plain": lambda: run_plainly(run), "sums": run.run}  # noqa: B023
            pairs.append({name: seconds(jobs[name]) for name in list(jobs)[:: 1 if i % 2 == 0 else -1]})
    ratios = [p["sums"] / p["plain"] for p in pairs]
    return {"split": split, "kind": a.kind, "seconds": pairs, "ratio": statistics.median(ratios), "ratios": ratios, "limit": MAX_TIME}


def run_apart(a: argparse.Namespace, job: str, folder: Path) -> dict:
    """What run_job() prints in a process of its own."""
    command = [sys.executable, __file__, a.model, "--job", job, "--folder", str(folder), "--n-tokens", str(a.n_tokens), "--kind", a.kind,
               "--threads", str(a.threads), *(x for t in a.text for x in ("--text", t))]
    p = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(p.stdout)


def resident() -> int:
    """Bytes of this process in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run_job(a: argparse.Namespace) -> None:
    with lib.Model(a.model) as model:
        splits = list(range(model.n_layer // 4, model.n_layer - 2, 2))
    c = config(a, splits, out=str(Path(a.folder) / "m.s{split}.gguf"), map_type="f32")
    with calibrate.Calibration(c) as run:
        found = {"stated": run.plan().memory_bytes, "splits": splits}
        if a.job == "plain":
            run_plainly(run)
            found["held"] = resident()
        else:
            run.run()
            found["peak"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps(found))


def measure_memory(a: argparse.Namespace, folder: Path) -> dict:
    plain, whole = (run_apart(a, job, folder) for job in ("plain", "calibrate"))
    used = whole["peak"] - plain["held"]
    return whole | plain | {"kind": a.kind, "used": used, "ratio": used / whole["stated"], "within": MEMORY_WITHIN}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", action="append", required=True)
    parser.add_argument("--kind", default="kv_prev")
    parser.add_argument("--n-tokens", type=int, default=12_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--job", choices=("plain", "calibrate"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.job:
        run_job(a)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = {"time": measure_time(a, Path(folder)), "memory": measure_memory(a, Path(folder))}
    t, m = found["time"], found["memory"]
    print(f"sums of {t['kind']} at split {t['split']}: {t['ratio']:.3f} times a plain pass [{min(t['ratios']):.3f}, {max(t['ratios']):.3f}]")
    print(f"memory of {len(m['splits'])} splits: {m['used'] / 2**20:,.0f} MiB, stated {m['stated'] / 2**20:,.0f} MiB: {m['ratio']:.2f}")
    if a.out:
        write_record(a.out, {"model": Path(a.model).name, "n_tokens": a.n_tokens} | found)
    return 0 if t["ratio"] <= MAX_TIME and abs(m["ratio"] - 1) <= MEMORY_WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
