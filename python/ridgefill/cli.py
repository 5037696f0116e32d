"""The commands `ridgefill-calibrate` and `ridgefill`.

Exit codes: 0 done; 1 a value out of range, or a fault of ours; 2 wrong usage; 3 the native library refused or is
missing, or a checkpoint cannot be used; 4 text that cannot be used; 5 activations that cannot be fitted; 6 a file
exists already; 7 not a sidecar, or a damaged one; 8 sums of something else, unfinished, damaged or in use; 9 documents
share text; 10 a file cannot be read or written (full disk, no permission); 11 maps that a model fails to verify; 12 the
doctor found a problem; 13 the doctor cannot tell; 14 a measurement that cannot be trusted; 15 models between which no
mapper can be fitted; 130 stopped.
"""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer

from .commands import card, inspect, mapper, score, verify
from .commands import text_options as t
from .commands.common import AsJson, Force, errors_for_people, score_table, stdout
from .commands.doctor import doctor
from .commands.evaluate import evaluate
from .commands.tune import tune
from .progress import progress, stderr

EPILOG = __doc__.split("\n\n", 1)[1]
calibrate_app = typer.Typer(add_completion=False)
app = typer.Typer(add_completion=False, no_args_is_help=True, help="Sidecars of ridge maps.", epilog=EPILOG)


Splits = Annotated[list[int], typer.Option("--split", help="split layer S, 1 to layers - 2; may be given several times")]
Kinds = Annotated[list[str] | None, typer.Option("--kind", help="input: predict layer inputs; input_lr: the same, with maps of bounded rank; kv: keys and values; kv_prev: keys and values, from the row before too; may be given several times [default: input]")]
MapType = Annotated[str, typer.Option(help="f32, f16, q8_0, q4_1 or q4_0")]
Tail = Annotated[int, typer.Option(help="recommended tail to record, rows")]
Lambdas = Annotated[list[float] | None, typer.Option("--lambda", help="scale-free penalty to try; may be given several times [default: 13 from 1e-4 to 1]")]
PrevShare = Annotated[float, typer.Option(min=0, max=1, help="kind kv_prev: weight of the regression with the row before in the maps of K, the rest is kind kv's; below 1 numbers are copied more faithfully, at a higher loss")]
Rank = Annotated[int, typer.Option(help="kind input_lr: rank of what its maps add to the state at the split")]
OUT = "sidecar to write; {split} and {kind} in it stand for the split and the kind, else with several NAME.gguf becomes NAME.s19.kv.gguf"


@calibrate_app.command(epilog=EPILOG)
def calibrate(
    model: Annotated[str, typer.Argument(help="GGUF model file; or, with --for, a Hugging Face checkpoint: a folder with config.json or OWNER/NAME")],
    split: Splits,
    text: t.Text,
    out: Annotated[str, typer.Option(help=OUT + "; a shard makes none")] = "",
    kind: Kinds = None,
    map_type: MapType = "q8_0",
    sink: t.Sink = 4,
    tail: Tail = 512,
    seed: t.Seed = 0,
    n_tokens: t.NTokens = 0,
    heldout_documents: t.HeldoutDocuments = None,
    row_stride: t.RowStride = 1,
    chat_share: t.ChatShare = 0.0,
    evaluation_text: t.EvaluationText = None,
    overlap: t.Overlap = "refuse",
    ctx: t.Ctx = 2048,
    threads: t.Threads = 2,
    gpu_layers: t.GpuLayers = 0,
    dtype: t.Dtype = "",
    device: t.Device = "",
    sums: t.SumsFile = "",
    save_every: t.SaveEvery = 120.0,
    layers_per_pass: Annotated[int, typer.Option(min=0, help="sum at most so many layers in one pass over the text, 0: all; more passes, less memory, the same sidecar")] = 0,
    shard: Annotated[str, typer.Option(help="i/n: only make the sums of the i-th of n shares of the text; then `ridgefill merge` and `ridgefill solve`")] = "",
    lam: Lambdas = None,
    prev_share: PrevShare = 1.0,
    rank: Rank = 128,
    force: Force = False,
    served: Annotated[str, typer.Option("--for", help="GGUF that the maps are for, where {model} is a checkpoint, or a copy of the file at higher precision, which many CPUs run faster; the weights are compared")] = "",
    no_score: Annotated[bool, typer.Option("--no-score", help="do not judge the written maps on held-out text, which takes a pass over at most 16,384 tokens of it")] = False,
    with_card: Annotated[bool, typer.Option("--card", help="write a model card beside each sidecar: see `ridgefill card`")] = False,
    json_output: AsJson = False,
) -> None:
    """Fit ridge maps for a model and write them as a sidecar, one file per split and kind, in one pass over the text."""
    t.check_shard(shard, sums, out, "sidecar")
    with errors_for_people("" if sums else "; --sums FILE keeps what was done"):
        from . import calibrate as c
        from . import card as model_card
        from .solve import LAMBDAS

        config = c.Config(
            model=model, out=out, splits=split, text=text, kinds=kind or ["input"], map_type=map_type, sink=sink, tail=tail,
            seed=seed, n_tokens=n_tokens, heldout_documents=heldout_documents, ctx=ctx, threads=threads, gpu_layers=gpu_layers,
            force=force, prev_share=prev_share, rank=rank, served=served, lambdas=tuple(lam or LAMBDAS), sums=sums, save_every=save_every,
            shard=shard, row_stride=row_stride, chat_share=chat_share, evaluation_text=evaluation_text or [], overlap=overlap,
            score=not no_score, layers_per_pass=layers_per_pass, dtype=dtype, device=device,
        )  # fmt: skip
        quiet = json_output or c.of_torchrun()[0] > 0  # the first process speaks for all
        say = (lambda line: None) if quiet else lambda line: stderr.print(line, soft_wrap=True, highlight=False)
        resumes = bool(sums) and os.path.exists(sums)  # then the cards may be there already, as the sidecars may
        for s, k in config.wanted().files() if with_card and out and not resumes else []:
            model_card.check_writable(config.out_path(s, k), force)
        with c.Calibration(config, say) as run:
            plan = run.plan()
            t.say_plan(plan, say, "fit fewer splits or kinds at a time, or --layers-per-pass N")
            with progress(quiet) as report:
                results = run.run(report, lambda e: e.n_tokens_left and say(t.estimate(e)))
        for r in results if with_card else []:
            card.write(r.path, force, same_is_fine=resumes)
    if shard:
        t.print_shard(run, plan, json_output)
    elif run.solves:
        _print_results(results, json_output)


def _print_results(results: list, json_output: bool) -> None:
    from .fit import result_dict

    if json_output:
        print(json.dumps([result_dict(r) for r in results], indent=1))
        return
    for r in results:
        _print_result(r)


def _print_result(r) -> None:
    stdout.print(f"{r.path}: kind {r.kind}, split {r.split}, {r.n_tokens:,} rows fitted", soft_wrap=True)
    rows = []
    for i, il in enumerate(r.layers):
        rows.append({"layer": il})
        for part in r.r2:
            end = "" if part == "input" else f"_{part}"
            rows[-1] |= {f"lambda{end}": r.lambdas[part][i], f"r2{end}": r.r2[part][i]}
    stdout.print(score_table(rows))
    if r.scores:
        stdout.print(score_table([{"layer": il, **{name: v[i] for name, v in r.scores.items()}} for i, il in enumerate(r.layers)]))
    means = ", ".join(("" if part == "input" else f"{part.upper()} ") + f"{mean:.4f}" for part, mean in r.r2_mean.items())
    stdout.print(f"mean held-out R² {means} over {r.n_heldout_tokens:,} rows; {r.seconds:.0f} s")


for command in (inspect.inspect, score.score, verify.verify, card.card, tune, doctor, evaluate):
    app.command()(command)
app.add_typer(mapper.app)


@app.command()
def merge(
    files: Annotated[list[str], typer.Argument(help="files of sums, of shards of one calibration or mapper")],
    out: Annotated[str, typer.Option(help="file of sums to write")],
    force: Force = False,
    json_output: AsJson = False,
) -> None:
    """Add up the sums of shards (ridgefill-calibrate or ridgefill mapper fit, with --shard i/n --sums FILE)."""
    with errors_for_people():
        from . import sums_file

        header = sums_file.merge(files, out, force)
    if json_output:
        print(json.dumps({"sums": out, "shards": header.shards, "n_shards": header.n_shards, "missing": header.missing}, indent=1))
        return
    missing = f"; still missing: {', '.join(map(str, header.missing))}" if header.missing else ""
    stdout.print(f"{out}: sums of shards {', '.join(map(str, header.shards))} of {header.n_shards}{missing}", soft_wrap=True)


@app.command()
def solve(
    file: Annotated[str, typer.Argument(help="file of sums")],
    out: Annotated[str, typer.Option(help=OUT)],
    split: Annotated[list[int] | None, typer.Option(help="split layer in the sums; may be given several times [default: all]")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="kind that the sums serve; may be given several times [default: all but input_lr]")] = None,
    map_type: MapType = "q8_0",
    tail: Tail = 512,
    lam: Lambdas = None,
    prev_share: PrevShare = 1.0,
    rank: Rank = 128,
    threads: t.Threads = 2,
    force: Force = False,
    json_output: AsJson = False,
) -> None:
    """Solve sums again, with other penalties or another map type, and write sidecars. Needs neither text nor model."""
    with errors_for_people():
        from threadpoolctl import threadpool_limits

        from . import fit, sidecar, sums_file

        with sums_file.Reader(file, sums_file.MapsHeader) as reader:
            header = reader.header
            wanted = fit.Wanted(
                out=out, splits=split or header.splits, kinds=kind or [k for k in header.kinds if k != "input_lr"], map_type=map_type, tail=tail,
                lambdas=tuple(lam or fit.LAMBDAS), prev_share=prev_share, rank=rank, force=force,
            )  # fmt: skip
            wanted.check()
            wanted.check_widths(header.layouts[0].n_embd)
            fit.check_holds(wanted, header)
            for s, k in wanted.files():
                sidecar.check_writable(wanted.path(s, k), force)
            sums = reader.sums()
        with threadpool_limits(threads), progress(json_output) as report:
            results = fit.solve(wanted, header, sums, report)
    _print_results(results, json_output)


def calibrate_main() -> None:
    calibrate_app()


def main() -> None:
    app()
