"""Runs of `ridgefill mapper fit`: stopped and gone on with, in shards, refused by name; and the command line."""
from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import pico
from calibrate_pico import arguments as calibrator_arguments
from calibrate_pico import hashes, words
from mapper_pico import CTX, SOURCE, arguments, config, corpus, library, source, target  # noqa: F401
from ridgefill import cli, sums_file
from ridgefill.attention import Attention
from ridgefill.errors import OutputExists, RidgeError, RidgefillError, StatisticsError
from ridgefill.hf import CheckpointError
from ridgefill.mapper import fit, sidecar
from ridgefill.mapper.sums import PairHeader
from ridgefill.sums_file import Reader, SumsError
from test_calibrate_sums import stopping_at
from test_hf import checkpoint_of, needs_transformers  # noqa: F401
from test_projections import rewritten

ALL = dict(both=True, previous=True, ks=(1, 2))
runner = CliRunner()


@pytest.fixture(scope="module")
def whole(source, target, corpus, tmp_path_factory) -> Path:  # noqa: F811
    """Mappers and sums of one run in both directions."""
    folder = tmp_path_factory.mktemp("whole")
    fit.fit(config(source, target, corpus, folder / "m.gguf", sums=str(folder / "s.npz"), **ALL))
    return folder


#
# sums
#


def test_a_run_without_sums_writes_the_same_bytes(source, target, corpus, whole, tmp_path):  # noqa: F811
    fit.fit(config(source, target, corpus, tmp_path / "m.gguf", **ALL))
    assert hashes(tmp_path) == hashes(whole)


@pytest.mark.parametrize("stops", [[1], [13, 1], [5, 5, 5], [15]])
def test_resume_after_faults_gives_the_same_files(source, target, corpus, whole, tmp_path, stops):  # noqa: F811
    c = config(source, target, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"), save_every=0, **ALL)
    for at in stops:
        with pytest.raises(RuntimeError, match="a fault"):
            fit.fit(c, stopping_at(at))
    assert hashes(tmp_path) == {}
    with fit.MapperFit(c) as run:
        assert sum(run.passes[0].header.done.values()) == sum(stops) - len(stops)
        run.run()
    assert hashes(tmp_path) == hashes(whole)


def test_a_run_that_was_stopped_between_two_files_goes_on(source, target, corpus, whole, tmp_path):  # noqa: F811
    shutil.copy(whole / "s.npz", tmp_path / "s.npz")
    shutil.copy(whole / "m.forward.gguf", tmp_path / "m.forward.gguf")
    fit.fit(config(source, target, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"), **ALL))
    assert hashes(tmp_path) == hashes(whole)


@pytest.fixture(scope="module")
def shards(source, target, corpus, tmp_path_factory) -> list[Path]:  # noqa: F811
    folder = tmp_path_factory.mktemp("shards")
    for i in (1, 2, 3):
        assert fit.fit(config(source, target, corpus, "", sums=str(folder / f"{i}.npz"), shard=f"{i}/3", **ALL)) == []
    return [folder / f"{i}.npz" for i in (1, 2, 3)]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_merged_shards_are_solved_to_the_same_mappers(whole, shards, tmp_path, order):
    merged = runner.invoke(cli.app, ["merge", *(str(shards[i]) for i in order), "--out", str(tmp_path / "s.npz")])
    assert merged.exit_code == 0, merged.output
    args = ["mapper", "solve", str(tmp_path / "s.npz"), "--both", "--k", "1", "--k", "2", "--map-type", "f32", "--out", str(tmp_path / "m.gguf")]
    solved = runner.invoke(cli.app, args)
    assert solved.exit_code == 0, solved.output
    for name in ("m.forward.gguf", "m.back.gguf"):
        a, b = sidecar.read(whole / name), sidecar.read(tmp_path / name)
        assert (b.calibration.n_tokens, b.calibration.n_heldout_tokens) == (a.calibration.n_tokens, a.calibration.n_heldout_tokens)
        for part in "kv":
            assert a.maps[part].sources == b.maps[part].sources
            for il in range(a.target.n_layer):
                assert np.abs(a.weight(part, il) - b.weight(part, il)).max() < 1e-6 * np.abs(a.weight(part, il)).max()


def test_shards_that_are_missing_are_named(shards, tmp_path):
    sums_file.merge(shards[:2], tmp_path / "s.npz")
    solved = runner.invoke(cli.app, ["mapper", "solve", str(tmp_path / "s.npz"), "--out", str(tmp_path / "m.gguf")])
    assert (solved.exit_code, solved.stderr) == (8, "error: the sums lack shards 3 of 3; merge them first\n")


def test_solving_again_needs_no_text_and_takes_other_penalties(whole, tmp_path):
    out = str(tmp_path / "m.gguf")
    args = ["mapper", "solve", str(whole / "s.npz"), "--k", "all", "--lambda", "0.5", "--map-type", "q8_0", "--tail", "7", "--out", out, "--json"]
    solved = runner.invoke(cli.app, args)
    assert solved.exit_code == 0, solved.output
    [found] = json.loads(solved.stdout)
    mapper = sidecar.read(out)
    assert (found["maps"]["k"]["tried"], mapper.tail, mapper.map_type, mapper.maps["v"].lambdas) == ([4], 7, "q8_0", [0.5] * 3)
    assert mapper.calibration.options == [f"ctx={CTX}", "lambda=0.5"]


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(seed=1), "seed: expected 1, found 0"),
        (dict(previous=False), "previous row: expected False, found True"),
        (dict(both=False), "both directions: expected False, found True"),
        (dict(sink=5), "sink: expected 5, found 4"),
    ],
)
def test_sums_of_something_else_are_refused(source, target, corpus, whole, change, named):  # noqa: F811
    with pytest.raises(SumsError, match=named):
        fit.fit(config(source, target, corpus, whole / "n.gguf", sums=str(whole / "s.npz"), **{**ALL, **change}))


def test_sums_of_a_calibration_and_of_a_mapper_are_told_apart(source, corpus, whole, tmp_path):  # noqa: F811
    made = runner.invoke(
        cli.calibrate_app, calibrator_arguments(source, corpus, "--sums", tmp_path / "c.npz", "--out", tmp_path / "c.gguf", split=1)
    )
    assert made.exit_code == 0, made.output
    for command, sums, expected, found in (
        (["mapper", "solve"], tmp_path / "c.npz", "ridgefill mapper fit", "ridgefill-calibrate"),
        (["solve"], whole / "s.npz", "ridgefill-calibrate", "ridgefill mapper fit"),
    ):
        refused = runner.invoke(cli.app, [*command, str(sums), "--out", str(tmp_path / "x.gguf")])
        assert refused.exit_code == 8
        assert refused.stderr == f"error: {sums}: expected sums of `{expected}`, found those of `{found}`\n"
    with pytest.raises(SumsError, match="does not belong to"):
        sums_file.merge([tmp_path / "c.npz", whole / "s.npz"], tmp_path / "x.npz")


def test_one_direction_is_not_solved_for_both(source, target, corpus, tmp_path):  # noqa: F811
    fit.fit(config(source, target, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz")))
    with Reader(tmp_path / "s.npz", PairHeader) as reader, pytest.raises(SumsError, match="expected both, found forward"):
        fit.solve(fit.Wanted(out=str(tmp_path / "n.gguf"), both=True), reader.header, reader.sums())


#
# checkpoints
#


@needs_transformers
def test_a_checkpoint_runs_the_text_in_place_of_its_file(source, target, corpus, checkpoint_of, tmp_path):  # noqa: F811
    """The same maps but for rounding: the library keeps K and V as f16 while it runs. What ran is on record."""
    how = dict(ks=(2,), lambdas=(0.01,))
    checkpoints = dict(source_checkpoint=str(checkpoint_of(source)), target_checkpoint=str(checkpoint_of(target)))
    a, b = (fit.fit(config(source, target, corpus, tmp_path / f"{i}.gguf", **how, **kw))[0].mapper for i, kw in enumerate(({}, checkpoints)))
    for part in "kv":
        assert a.maps[part].sources == b.maps[part].sources
        assert 0 < np.abs(np.subtract(a.maps[part].r2_head, b.maps[part].r2_head)).max() < 5e-3
    names = [f"{role}_checkpoint={Path(name).name} in f32" for role, name in (("source", checkpoint_of(source)), ("target", checkpoint_of(target)))]
    assert b.calibration.options[-3:] == [*names, "lambda=0.01"]
    with pytest.raises(CheckpointError, match="expected model type llama or mistral"):
        fit.MapperFit(config(source, target, corpus, tmp_path / "x.gguf", source_checkpoint=str(checkpoint_of(target))))
    with pytest.raises(RidgefillError, match="checkpoint: expected a folder, or OWNER/NAME of the hub, found 'nowhere.gguf'"):
        fit.MapperFit(config(source, target, corpus, tmp_path / "x.gguf", target_checkpoint="nowhere.gguf"))


#
# refused
#


def test_another_tokenizer_is_refused(source, corpus, tmp_path):  # noqa: F811
    other = pico.build(tmp_path / "o.gguf", "qwen3", n_layer=2, head=32, tokenizer=pico.Tokenizer(merges=("q q",)))
    refused = runner.invoke(cli.app, arguments(source, other, corpus, "--out", tmp_path / "m.gguf"))
    assert refused.exit_code == 15
    assert "error: tokenizer: expected the same in both models, found " in refused.stderr
    assert "in the source (pico llama) and " in refused.stderr and "in the target (pico qwen3)" in refused.stderr


@pytest.mark.parametrize("which", [0, 1])
def test_positions_in_more_than_one_dimension_are_refused(source, target, corpus, tmp_path, which):  # noqa: F811
    pair = [source, target]
    pair[which] = rewritten(Path(pair[which]), tmp_path / "x.gguf", dict, rope__dimension_sections=[4, 6, 6, 0])
    with pytest.raises(RidgefillError, match=r"rope.dimension_sections: expected positions in one dimension, found M-RoPE with \[4, 6, 6, 0\]"):
        fit.fit(config(*pair, corpus, tmp_path / "m.gguf"))


def test_an_architecture_that_cannot_be_captured_is_refused(source, corpus, tmp_path):  # noqa: F811
    other = rewritten(Path(source), tmp_path / "x.gguf", dict, "xverse")
    with pytest.raises(RidgeError, match="x.gguf cannot be captured: architecture 'xverse'"):
        fit.fit(config(source, other, corpus, tmp_path / "m.gguf"))


def test_too_few_rows_are_refused(source, target, corpus, tmp_path):  # noqa: F811
    c = config(source, target, corpus, tmp_path / "m.gguf", n_tokens=60, heldout_tokens=60)
    with pytest.raises(StatisticsError, match=r"keys of the source: layer 0: expected at least 64 rows to fit \(twice its 32 features\), found 56"):
        fit.fit(c)
    c = config(source, target, corpus, tmp_path / "m.gguf", n_tokens=100, heldout_tokens=60, ks=(2, 0))
    with pytest.raises(StatisticsError, match=r"keys of the source: expected at least 128 rows to fit \(twice the features of 2 layers\), found 96"):
        fit.fit(c)
    # numbers of layers that have enough are tried
    c = config(source, target, corpus, tmp_path / "m.gguf", n_tokens=200, heldout_tokens=60, ks=(1, 2, 0))
    assert fit.fit(c)[0].mapper.maps["k"].tried == [1, 2]


def test_text_that_repeats_itself_is_refused(source, target, tmp_path):  # noqa: F811
    entries = []
    held_out = (("b.txt", words(200, 1), "heldout"), ("c.txt", words(200, 2), "heldout"))
    for name, text, partition in (("a.txt", "ring " * 4000, "calibration"), *held_out):
        (tmp_path / name).write_text(text)
        entries.append({"file": name, "source": "none", "licence": "CC0-1.0", "partition": partition})
    (tmp_path / "sources.json").write_text(json.dumps(entries))
    with pytest.raises(StatisticsError, match="keys of the source: layer 0: .*: the text repeats itself"):
        fit.fit(config(source, target, tmp_path, tmp_path / "m.gguf"))


@pytest.mark.parametrize("which, name", [(0, "first"), (1, "second")])
def test_values_that_are_not_finite_are_named_by_model_and_layer(source, target, corpus, tmp_path, monkeypatch, which, name):  # noqa: F811
    files, original = (source, target), Attention.keys_values

    def broken(self, il, x):
        k, v = original(self, il, x)
        if il == 2 and self.arch == ("llama", "qwen3")[which]:
            v = v.copy()
            v[17, 5] = np.inf
        return k, v

    monkeypatch.setattr(Attention, "keys_values", broken)
    with pytest.raises(StatisticsError, match=f"layer 2: expected finite values of the {name} model, found inf in row 13, channel 5"):
        fit.fit(config(*files, corpus, tmp_path / "m.gguf"))


def test_a_head_of_the_target_that_never_varies_is_refused(source, target, corpus, tmp_path):  # noqa: F811
    def dead(tensors: dict) -> dict:
        v = tensors["blk.1.attn_v.weight"].copy()
        v[64:] = 0  # the second of two heads
        return {**tensors, "blk.1.attn_v.weight": v}

    other = rewritten(Path(target), tmp_path / "x.gguf", dead)
    with pytest.raises(StatisticsError, match="values of the target: layer 1: head 1 is the same in all [0-9]+ fitted rows"):
        fit.fit(config(source, other, corpus, tmp_path / "m.gguf"))


def test_features_that_depend_on_each_other_need_a_penalty(source, corpus, tmp_path):  # noqa: F811
    def twice(tensors: dict) -> dict:
        k = tensors["blk.1.attn_k.weight"].copy()
        k[16:] = k[:16]
        return {**tensors, "blk.1.attn_k.weight": k}

    other = rewritten(Path(source), tmp_path / "x.gguf", twice)
    with pytest.raises(StatisticsError, match="source layers 1: their features depend on each other; take a larger lambda"):
        fit.fit(config(other, source, corpus, tmp_path / "m.gguf", lambdas=(0.0,)))
    assert fit.fit(config(other, source, corpus, tmp_path / "m.gguf", lambdas=(0.01,)))


def test_values_out_of_range_are_named(source, target, corpus, tmp_path):  # noqa: F811
    for kw, named in (
        (dict(select="best"), "select: expected one of r2, greedy, found 'best'"),
        (dict(map_type="q6"), "map type: expected one of f32, f16, q8_0, q4_1, q4_0, found 'q6'"),
        (dict(ks=(1, -1)), "numbers of source layers: expected some of 1 or more, or all"),
        (dict(lambdas=(float("nan"),)), "lambdas: expected finite numbers"),
        (dict(row_stride=0), "row stride: expected at least 1, found 0"),
        (dict(device="cuda"), "dtype and device: expected a checkpoint to go with them, found none"),
    ):
        with pytest.raises(RidgefillError, match=named):
            fit.MapperFit(config(source, target, corpus, tmp_path / "m.gguf", **kw))
    usage = runner.invoke(cli.app, arguments(source, target, corpus, "--out", tmp_path / "m.gguf", "--k", "some"))
    assert usage.exit_code == 2 and "expected numbers or all, found some" in usage.stderr


def test_an_existing_file_is_replaced_only_when_asked(source, target, corpus, tmp_path):  # noqa: F811
    (tmp_path / "m.back.gguf").write_text("mine")
    with pytest.raises(OutputExists, match="m.back.gguf exists already"):
        fit.MapperFit(config(source, target, corpus, tmp_path / "m.gguf", both=True))
    fit.fit(config(source, target, corpus, tmp_path / "m.gguf", both=True, force=True))
    assert sidecar.read(tmp_path / "m.back.gguf").target.fingerprint["name"] == "pico llama"


#
# the command
#


def test_the_command_says_what_it_will_need_fits_and_shows(source, target, corpus, tmp_path):  # noqa: F811
    out = tmp_path / "m.gguf"
    done = runner.invoke(cli.app, arguments(source, target, corpus, "--out", out))
    assert done.exit_code == 0, done.output
    assert "documents with" in done.stderr and "besides the model" in done.stderr and "tokens/s in the first chunk: about" in done.stderr
    shown = runner.invoke(cli.app, ["mapper", "inspect", str(out)])
    assert shown.exit_code == 0, shown.output
    assert "source    pico llama, llama, 4 layers of 1 heads of 32" in shown.stdout
    assert "the first 4 rows and, recommended, the last 128 are run by the target" in shown.stdout
    plain = json.loads(runner.invoke(cli.app, ["mapper", "inspect", str(out), "--json"]).stdout)
    mapper = sidecar.read(out)
    assert plain["maps"]["k"]["sources"] == mapper.maps["k"].sources and plain["target"]["heads"] == [2, 2, 2]
    other = runner.invoke(cli.app, ["mapper", "inspect", source])
    assert other.exit_code == 7 and "expected an adapter with adapter.type = 'kv_mapper'" in other.stderr


def test_the_memory_that_is_stated_holds_the_sums(source, target, corpus, tmp_path):  # noqa: F811
    def plan(**kw):
        with fit.MapperFit(config(source, target, corpus, tmp_path / "m.gguf", **kw)) as run:
            return run.plan()

    d_source, d_target = SOURCE["n_layer"] * 32, 3 * 128
    sums = 2 * 2 * 8 * d_source * (d_source + d_target)  # keys and values, fitted and held out
    assert plan().sums_bytes == sums < plan().memory_bytes
    assert plan(both=True).sums_bytes == sums + 2 * 2 * 8 * d_target * (d_target + d_source)
    assert plan(previous=True).sums_bytes == 2 * 2 * 8 * 2 * d_source * (2 * d_source + d_target)
    assert plan(select="greedy").memory_bytes >= plan().memory_bytes
