"""`ridgefill mapper`: fit mappers between the caches of two models, solve their sums again, score, look at and draw one."""

from __future__ import annotations

import json
import os
from typing import Annotated

import typer
from rich.table import Table

from ..progress import progress, stderr
from . import text_options as t
from .common import AsJson, Force, Threads, errors_for_people, say, stdout
from .mapper_evaluate import evaluate

app = typer.Typer(name="mapper", no_args_is_help=True, help="Mappers: one model's cache from that of another.")
app.command("evaluate")(evaluate)

Out = Annotated[str, typer.Option(help="sidecar to write; with --both, {direction} in it stands for forward and back, else NAME.gguf becomes NAME.forward.gguf and NAME.back.gguf")]
Both = Annotated[bool, typer.Option("--both", help="a second mapper from the target to the source, from the same pass over the text")]
Select = Annotated[str, typer.Option(help="how source layers are chosen: r2 (those that predict best alone) or greedy (those that add most to the ones before, which takes longer)")]
Criterion = Annotated[str, typer.Option(help="how the number of source layers is chosen: r2, or cosine of attention outputs, which takes longer and has one number for K and V of a layer")]
Numbers = Annotated[list[str] | None, typer.Option("--k", help="number of source layers to try, or all; may be given several times [default: 1, 2, 4, 6, 8, 10, 12, 16, 20, 24, all]")]
Lambdas = Annotated[list[float] | None, typer.Option("--lambda", help="scale-free penalty to try; may be given several times [default: seven from 1e-6 to 1]")]
MapType = Annotated[str, typer.Option(help="f32, f16, q8_0, q4_1 or q4_0")]
Tail = Annotated[int, typer.Option(min=0, help="recommended tail to record: last rows that the target runs itself")]


def _wanted(out, both, select, numbers, lambdas, map_type, tail, force, criterion="r2"):
    from ..mapper import fit, solve

    try:
        ks = tuple(solve.ALL_LAYERS if k == "all" else int(k) for k in numbers or [])
    except ValueError:
        raise typer.BadParameter(f"--k: expected numbers or all, found {', '.join(numbers)}") from None
    return fit.Wanted(
        out=out, both=both, select=select, criterion=criterion, ks=ks or solve.KS, lambdas=tuple(lambdas or solve.LAMBDAS), map_type=map_type, tail=tail, force=force,
    )  # fmt: skip


@app.command("fit")
def fit_command(
    source: Annotated[str, typer.Option(help="GGUF of the model whose cache is there")],
    target: Annotated[str, typer.Option(help="GGUF of the model whose cache is wanted; same tokenizer")],
    text: t.Text,
    out: Out = "",
    both: Both = False,
    previous: Annotated[bool, typer.Option("--previous-row", help="predict from the row before too")] = False,
    rotated: Annotated[bool, typer.Option("--rotated-keys", help="also score each source layer on keys as caches hold them: a third set of sums")] = False,
    source_checkpoint: Annotated[str, typer.Option(help="folder, or OWNER/NAME of the hub, of the source as a Hugging Face checkpoint, which then runs the text")] = "",
    target_checkpoint: Annotated[str, typer.Option(help="the same of the target")] = "",
    dtype: t.Dtype = "",
    device: t.Device = "",
    select: Select = "r2",
    criterion: Criterion = "r2",
    k: Numbers = None,
    lam: Lambdas = None,
    map_type: MapType = "f16",
    sink: t.Sink = 4,
    tail: Tail = 128,
    seed: t.Seed = 0,
    n_tokens: t.NTokens = 0,
    heldout_documents: t.HeldoutDocuments = None,
    row_stride: t.RowStride = 1,
    chat_share: t.ChatShare = 0.0,
    evaluation_text: t.EvaluationText = None,
    overlap: t.Overlap = "refuse",
    ctx: t.Ctx = 1024,
    threads: Threads = 2,
    gpu_layers: t.GpuLayers = 0,
    sums: t.SumsFile = "",
    save_every: t.SaveEvery = 120.0,
    shard: Annotated[str, typer.Option(help="i/n: only make the sums of the i-th of n shares of the text; then `ridgefill merge` and `ridgefill mapper solve`")] = "",
    force: Force = False,
    json_output: AsJson = False,
) -> None:
    """Fit linear maps from the keys and values of one model to those of another, in one pass over the text."""
    t.check_shard(shard, sums, out, "mapper")
    wanted = _wanted(out, both, select, k, lam, map_type, tail, force, criterion)
    with errors_for_people("" if sums else "; --sums FILE keeps what was done"):
        from ..mapper import fit

        config = fit.Config(
            source=source, target=target, wanted=wanted, previous=previous, rotated=rotated, source_checkpoint=source_checkpoint,
            target_checkpoint=target_checkpoint, dtype=dtype, device=device, text=text, sink=sink, seed=seed, n_tokens=n_tokens,
            heldout_documents=heldout_documents, row_stride=row_stride, chat_share=chat_share, evaluation_text=evaluation_text or [],
            overlap=overlap, ctx=ctx, threads=threads, gpu_layers=gpu_layers, sums=sums, save_every=save_every, shard=shard,
        )  # fmt: skip
        tell = (lambda line: None) if json_output else lambda line: stderr.print(line, soft_wrap=True, highlight=False)
        with fit.MapperFit(config, tell) as run:
            plan = run.plan()
            t.say_plan(plan, tell, "fit one direction, without the row before, or fewer --k")
            with progress(json_output) as report:
                results = run.run(report, lambda e: e.n_tokens_left and tell(t.estimate(e)))
    if shard:
        t.print_shard(run, plan, json_output)
    else:
        _print_results(results, json_output)


@app.command()
def solve(
    file: Annotated[str, typer.Argument(help="file of sums")],
    out: Out,
    both: Both = False,
    select: Select = "r2",
    k: Numbers = None,
    lam: Lambdas = None,
    map_type: MapType = "f16",
    tail: Tail = 128,
    threads: Threads = 2,
    force: Force = False,
    json_output: AsJson = False,
) -> None:
    """Solve sums again, with other numbers of layers, penalties or map types, and write mappers. Needs neither text nor models."""
    wanted = _wanted(out, both, select, k, lam, map_type, tail, force)
    with errors_for_people():
        from time import monotonic

        from threadpoolctl import threadpool_limits

        from .. import sums_file
        from ..mapper import fit
        from ..mapper.sums import PairHeader
        from ..sidecar import check_writable

        started = monotonic()
        wanted.check()
        for direction in wanted.directions:
            check_writable(wanted.path(direction), force)
        with sums_file.Reader(file, PairHeader) as reader:
            sums = reader.sums()
        with threadpool_limits(threads), progress(json_output) as report:
            results = fit.write(wanted, fit.solve(wanted, reader.header, sums, report), started)
    _print_results(results, json_output)


@app.command("score")
def score_command(
    file: Annotated[str, typer.Argument(help="mapper to judge")],
    source: Annotated[str, typer.Option(help="GGUF of its source")],
    target: Annotated[str, typer.Option(help="GGUF of its target")],
    text: Annotated[list[str], typer.Option(help="what it was fitted on, of which the documents kept for scores are used; may be given several times")],
    unseen: Annotated[bool, typer.Option("--unseen", help="it was not fitted on any of this text: use all of it")] = False,
    n_tokens: Annotated[int, typer.Option(min=0, help="tokens to use, 0: all")] = 16384,
    threads: Threads = 2,
    json_output: AsJson = False,
) -> None:
    """Judge a mapper as it is written on text that neither fitted nor chose anything; scores and a verdict go into the file."""
    with errors_for_people():
        from threadpoolctl import threadpool_limits

        from ..mapper import score

        with threadpool_limits(threads), progress(json_output) as report:
            mapper = score.judge_file(file, source, target, text, unseen, n_tokens, threads, report)
    if json_output:
        print(json.dumps(_record(file, mapper), indent=1))
    else:
        _print_mapper(mapper)


@app.command()
def plot(
    file: Annotated[str, typer.Argument(help="mapper to draw")],
    out: Annotated[str, typer.Option(help="picture to write: .png or .svg")],
    force: Force = False,
) -> None:
    """Draw what a mapper was chosen by and how well it does: each source layer alone, heads, numbers of layers (pip install 'ridgefill[plots]')."""
    with errors_for_people():
        from ..mapper import plots, sidecar
        from ..sidecar import check_writable

        check_writable(out, force)
        plots.plot(sidecar.read(file), out)
    say(f"{out}: picture of {file}")


@app.command()
def inspect(
    file: Annotated[str, typer.Argument(help="mapper to look at")],
    json_output: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Check a mapper and show what it is, what it was fitted on, and how well."""
    with errors_for_people():
        from ..mapper import sidecar

        mapper = sidecar.read(file)
    if json_output:
        print(json.dumps(_record(file, mapper), indent=1))
        return
    c = mapper.calibration
    for label, side in (("source", mapper.source), ("target", mapper.target)):
        heads = "/".join(str(n) for n in sorted(set(side.heads)))
        say(f"{label:<8}  {side.fingerprint['name']}, {side.fingerprint['architecture']}, {side.n_layer} layers of {heads} heads of {side.head_size['k']}")
    say(f"{'file':<8}  {os.path.getsize(file) / 2**20:,.1f} MiB, maps of type {mapper.map_type}")
    say(f"{'always':<8}  the first {mapper.sink_rows} rows and, recommended, the last {mapper.tail} are run by the target")
    say(f"{'fitted':<8}  {c.n_tokens:,} rows of {c.n_documents} documents, seed {c.seed}; {c.n_heldout_tokens:,} rows of {c.n_heldout_documents} held out")
    for option in c.options:
        say(f"{'option':<8}  {option}")
    if mapper.selftest:
        say(f"{'selftest':<8}  {len(mapper.selftest.tokens)} tokens, the last {mapper.selftest.tail} run by the target")
    _print_mapper(mapper)


def _print_results(results: list, json_output: bool) -> None:
    if json_output:
        print(json.dumps([{**_record(r.path, r.mapper), "seconds": r.seconds} for r in results], indent=1))
        return
    for r in results:
        stdout.print(f"{r.path}: {r.mapper.calibration.n_tokens:,} rows fitted, {r.seconds:.0f} s", soft_wrap=True)
        _print_mapper(r.mapper)


def _print_mapper(mapper) -> None:
    if mapper.verdict:
        say(f"{'verdict':<8}  {mapper.verdict.word}: {'; '.join(mapper.verdict.reasons)}")
        say(f"{'scored':<8}  {mapper.scores.n_tokens:,} rows of {mapper.scores.n_documents} documents that chose nothing")
        _print_scores(mapper)
    else:
        say(f"{'verdict':<8}  none: it was not scored (ridgefill mapper score)")
    table = Table("layer", *(f"{name} {part.upper()}" for part in mapper.maps for name in ("sources of", "λ", "held-out R²", "best alone")))
    for il in range(mapper.target.n_layer):
        row = [str(il)]
        for m in mapper.maps.values():
            best = int(m.r2_single[il].argmax())
            row += [_span(m.sources[il]), f"{m.lambdas[il]:.2g}", f"{m.r2[il]:.4f}", f"{best}: {m.r2_single[il, best]:.4f}"]
        table.add_row(*row)
    stdout.print(table)
    curves = Table("source layers", *(f"held-out R² of {part.upper()}" for part in mapper.maps))
    rows = {}
    for i, m in enumerate(mapper.maps.values()):
        for n, r2 in zip(m.tried, m.r2_by_number.mean(0), strict=True):
            rows.setdefault(n, ["", ""])[i] = f"{r2:.4f}"
    for n, cells in sorted(rows.items()):
        curves.add_row(str(n), *cells)
    stdout.print(curves)


def _print_scores(mapper) -> None:
    from ..mapper.verdict import rows_per_feature, share_read

    s, share = mapper.scores, share_read(mapper.scores)
    ratio = {part: rows_per_feature(mapper, part) for part in mapper.maps}
    names = ("R²", "worst head", "conc.", "rows per feature")
    table = Table("layer", *(f"{name} {part.upper()}" for part in mapper.maps for name in names), "cosine", "of mean rows", "regained")
    for il in range(mapper.target.n_layer):
        cells = [
            x
            for part in mapper.maps
            for x in (s.r2[part][il].mean(), s.r2[part][il].min(), s.concentration[part][il].mean(), ratio[part][il])
        ]
        table.add_row(str(il), *(f"{x:.3g}" for x in (*cells, s.cosine[il].mean(), s.cosine_mean[il].mean(), share[il])))
    stdout.print(table)


def _span(layers: list[int]) -> str:
    """Layers as ranges: 0-2,5."""
    ranges: list[list[int]] = []
    for il in layers:
        if ranges and ranges[-1][1] == il - 1:
            ranges[-1][1] = il
        else:
            ranges.append([il, il])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)


def _record(path: str, mapper) -> dict:
    """A mapper as plain data for JSON, without its tensors."""
    from dataclasses import asdict

    maps = {
        part: {
            "sources": m.sources, "lambda": list(m.lambdas), "r2": m.r2, "r2_head": m.r2_head, "r2_single": m.r2_single.tolist(),
            "tried": m.tried, "r2_by_number": m.r2_by_number.tolist(),
        }
        for part, m in mapper.maps.items()
    }  # fmt: skip
    plain = {name: getattr(mapper, name) for name in ("previous", "sink_rows", "tail", "map_type", "select")}
    sides = {"source": asdict(mapper.source), "target": asdict(mapper.target), "calibration": asdict(mapper.calibration)}
    rotated = None if mapper.r2_rotated is None else mapper.r2_rotated.tolist()
    measured = {name: _plain(getattr(mapper, name)) for name in ("scores", "verdict", "selftest")}
    return {"path": path, **plain, **sides, "maps": maps, "r2_single_rotated": rotated, **measured}


def _plain(found) -> dict | None:
    """A dataclass of arrays, or None, as JSON has it."""
    from dataclasses import asdict

    def lists(x):
        if isinstance(x, dict):
            return {name: lists(v) for name, v in x.items()}
        return [lists(v) for v in x] if isinstance(x, list) else x.tolist() if hasattr(x, "tolist") else x

    return found and lists(asdict(found))
