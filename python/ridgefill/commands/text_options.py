"""Options about the text that is run, and what is said of the run, of `ridgefill-calibrate` and `ridgefill mapper fit`."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from ..progress import duration
from .common import Threads, mib, stdout  # noqa: F401  (Threads goes with the other options)

Text = Annotated[list[str], typer.Option(help="file or folder of text, .jsonl or .parquet; or hf:NAME[:CONFIG[:SPLIT]], a data set, with --n-tokens; may be given several times")]
Sink = Annotated[int, typer.Option(help="first rows that are neither fitted nor filled")]
Seed = Annotated[int, typer.Option(help="order of the documents, hence which are held out")]
NTokens = Annotated[int, typer.Option(min=0, help="tokens to fit on, 0: all")]
HeldoutDocuments = Annotated[int | None, typer.Option(min=1, help="documents to hold out [default: those marked so in sources.json, else a sixth]")]
RowStride = Annotated[int, typer.Option(min=1, help="every how many rows one is used")]
ChatShare = Annotated[float, typer.Option(min=0, max=1, help="share of the documents that is put into the model's chat template")]
EvaluationText = Annotated[list[str] | None, typer.Option(help="file or folder of text that the maps will be judged on and must not have seen; may be given several times")]
Overlap = Annotated[str, typer.Option(help="where a document shares 50 tokens in a row with held-out or evaluation text: refuse, drop (leave it out) or keep")]
Ctx = Annotated[int, typer.Option(min=64, help="tokens run together from position 0")]
Dtype = Annotated[str, typer.Option(help="f32, bf16 or f16, in which a checkpoint is run [default: f32 on a CPU, else bf16]")]
Device = Annotated[str, typer.Option(help="cpu or cuda, where a checkpoint is run [default: cpu]")]
GpuLayers = Annotated[int, typer.Option(help="model layers on the accelerator, -1: all")]
SumsFile = Annotated[str, typer.Option(help="file that keeps the sums over the text: a run that was stopped goes on from it with the same command")]
SaveEvery = Annotated[float, typer.Option(min=0, help="seconds between two savings of the sums, 0: after each chunk of --ctx tokens")]


def check_shard(shard: str, sums: str, out: str, makes: str) -> None:
    """Raises BadParameter for a shard without a file for its sums, and unless there is one of shard and `out`."""
    if shard and not sums:
        raise typer.BadParameter("--shard needs --sums, the file for its sums")
    if bool(shard) == bool(out):
        raise typer.BadParameter(f"a shard makes no {makes}: give --shard or --out" if out else "--out is needed, except with --shard")


def say_plan(plan, say, way_out: str) -> None:
    """`way_out` is what helps when memory is short."""
    passes = f", in {plan.n_passes} passes" if plan.n_passes > 1 else ""
    say(
        f"{plan.n_documents} documents with {plan.n_tokens:,} tokens to fit, {plan.n_heldout_documents} with "
        f"{plan.n_heldout_tokens:,} held out{passes}; needs {mib(plan.memory_bytes)} besides the model"
    )
    if plan.n_tokens_done:
        say(f"goes on after {plan.n_tokens_done:,} tokens whose sums were kept")
    if plan.memory_bytes > plan.memory_available:
        print(
            f"warning: {mib(plan.memory_bytes)} needed, {mib(plan.memory_available)} free: {way_out}",
            file=sys.stderr,
        )


def estimate(e) -> str:
    return f"{e.tokens_per_second:,.0f} tokens/s in the first chunk: about {duration(e.seconds)} for the other {e.n_tokens_left:,}"


def print_shard(run, plan, json_output: bool) -> None:
    found = {
        "sums": ", ".join(str(p.store.path) for p in run.passes),
        "shard": run.config.shard,
        "n_tokens": plan.n_tokens,
        "n_heldout_tokens": plan.n_heldout_tokens,
        "bytes": plan.sums_bytes,
    }
    if json_output:
        print(json.dumps(found, indent=1))
    else:
        stdout.print(f"{found['sums']}: sums of shard {found['shard']}, {plan.n_tokens + plan.n_heldout_tokens:,} tokens", soft_wrap=True)
