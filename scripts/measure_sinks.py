#!/usr/bin/env python3
"""What sink rows do to a fit: maps of kind input fitted with and without the first rows of each sequence.

    scripts/measure_sinks.py --model out/smollm2-f32.gguf        writes results/calibrate-sinks.json

One pass over the text serves both fits. They are judged on the same held-out rows, those without sink rows: the rows that are
filled. Exit status: 0 when the mean R^2 over the layers is below .3 with sink rows and above .6 without, else 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

from ridgefill import calibrate, fit, score
from ridgefill.capture import activations
from ridgefill.lib import Context
from ridgefill.machine import machine
from ridgefill.progress import progress
from ridgefill.sums import Sums

SINK = 4
AT_MOST, AT_LEAST = 0.3, 0.6  # mean R^2 with sink rows in the fit, and without


def measure(run: calibrate.Calibration, folder: Path, report) -> list[dict]:
    """Fit with and without sink rows, and judge."""
    c, targets = run.config, run.families[0][0]
    captured, total, done = range(c.splits[0], run.model.n_layer), run.plan(), 0
    n_tokens = total.n_tokens + total.n_heldout_tokens
    sums = {sink: Sums(targets.layout, c.splits, list(captured)[1:]) for sink in (0, SINK)}
    with Context(run.model, c.ctx, n_batch=c.ctx, n_threads=c.threads) as ctx:
        for part, chunks in (("fit", run.prepared.fit), ("heldout", run.prepared.heldout)):
            for chunk, inputs in zip(chunks, activations(ctx, chunks, list(captured)), strict=True):
                for sink, s in sums.items():
                    s.add(targets, part, inputs, slice(sink, None))
                done += len(chunk.tokens)
                report("capture", done, n_tokens)
        results, scorers = {}, {}
        for sink, s in sums.items():
            header = dataclasses.replace(run.header, sink=sink, done=dict(run.header.total))
            wanted = dataclasses.replace(c.wanted(), out=str(folder / f"{sink}.gguf"))
            results[sink] = fit.solve(wanted, header, [s])[0]
            scorers[sink] = score.Scorer(results[sink].path, c.model, SINK)
        for inputs in activations(ctx, score.pieces(run.prepared.heldout, SINK), list(captured)):
            for scorer in scorers.values():
                scorer.add(inputs)
    return [_record(results[sink], scorer.scores(), sink) for sink, scorer in scorers.items()]


def _record(result: fit.Result, found: score.Scores, sink: int) -> dict:
    r2 = found.values["r2_input"]
    return {
        "sink": sink,
        "n_fitted": result.n_tokens,
        "n_judged": found.n_tokens,
        "lambdas": result.lambdas["input"],
        "r2": r2,
        "mean_r2": float(np.mean(r2)),
        "mean_r2_with_own_rows": result.r2_mean["input"],  # on held-out rows that hold sink rows if the fitted ones do
    }


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="GGUF model file")
    p.add_argument("--text", default=str(ROOT / "out" / "text"), help="folder of scripts/fetch_text.sh")
    p.add_argument("--split", type=int, default=11)
    p.add_argument("--n-tokens", type=int, default=20_000)
    p.add_argument("--heldout-documents", type=int, default=2)
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--out", type=Path, default=ROOT / "results" / "calibrate-sinks.json")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = calibrate.Config(
            model=args.model, out=str(Path(folder) / "maps.gguf"), splits=[args.split], text=[args.text], map_type="f32", sink=0,
            overlap="drop", n_tokens=args.n_tokens, heldout_documents=args.heldout_documents, threads=args.threads, score=False,
        )  # fmt: skip
        with calibrate.Calibration(config) as run, progress(False) as report:
            fits = measure(run, Path(folder), report)
    about = {k: v for k, v in vars(args).items() if k != "out"}
    settings = {**about, "model": Path(args.model).name, "text": "scripts/fetch_text.sh", "kind": "input"}
    holds = fits[0]["mean_r2"] < AT_MOST and fits[1]["mean_r2"] > AT_LEAST
    record = {"settings": settings, "fits": fits, "at_most": AT_MOST, "at_least": AT_LEAST, "holds": holds, "machine": machine()}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=1) + "\n")
    for f in fits:
        print(f"{'with' if f['sink'] == 0 else 'without'} sink rows in the fit: mean R² {f['mean_r2']:.3f} over {len(f['r2'])} layers")
    print(args.out)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
