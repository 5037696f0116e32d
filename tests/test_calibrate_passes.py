"""Calibration in several passes, each for some of the layers, and in several processes under torchrun."""
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import ridgefill
from calibrate_pico import CTX, arguments, config, corpus, hashes, library, model  # noqa: F401
from ridgefill import calibrate as cal
from ridgefill import cli, sums_file
from ridgefill.errors import RidgefillError
from ridgefill.passes import layer_groups
from ridgefill.sums_file import Reader, SumsError
from test_calibrate_shards import assert_same_maps, assert_same_sums

ALL = dict(splits=[1, 2], kinds=["kv_prev", "input"], score=False)

runner = CliRunner()
needs_torch = pytest.mark.skipif(not importlib.util.find_spec("torch"), reason="torch is not installed (pip install torch)")


@pytest.fixture(scope="module")
def whole(model, corpus, tmp_path_factory) -> Path:
    """A folder with the sums and the sidecars of one pass."""
    folder = tmp_path_factory.mktemp("whole")
    cal.calibrate(config(model, corpus, folder / "m.gguf", sums=str(folder / "s.npz"), **ALL))
    return folder


#
# passes
#


def test_layers_are_parted_in_ascending_groups():
    assert layer_groups(range(2, 7), 2) == [[2, 3], [4, 5], [6]]
    assert layer_groups(range(2, 7), 0) == [[2, 3, 4, 5, 6]] == layer_groups(range(2, 7), 9)


@pytest.mark.parametrize("n, passes", [(1, 3), (2, 2), (3, 1)])
def test_several_passes_write_the_same_bytes(model, corpus, whole, tmp_path, n, passes):
    seen = []
    c = config(model, corpus, tmp_path / "m.gguf", layers_per_pass=n, **ALL)
    with cal.Calibration(c) as run:
        plan = run.plan()
        run.run(lambda *report: seen.append(report))
    assert plan.n_passes == passes
    assert hashes(tmp_path) == hashes(whole)
    tokens = plan.n_tokens + plan.n_heldout_tokens
    assert [s for s in seen if s[0] == "capture"][-1] == ("capture", passes * tokens, passes * tokens)
    assert seen[-1] == ("solve", 10, 10)  # layers 2-4 and 3-4, two kinds


def test_passes_of_fewer_layers_need_less_memory(model, corpus, tmp_path):
    def plan(n: int) -> cal.Plan:
        with cal.Calibration(config(model, corpus, tmp_path / "m.gguf", layers_per_pass=n, **ALL)) as run:
            return run.plan()

    assert plan(1).memory_bytes < plan(2).memory_bytes < plan(0).memory_bytes == plan(3).memory_bytes
    # X^T X of a split is in the file of each pass
    assert plan(1).sums_bytes > plan(0).sums_bytes


def test_inputs_of_other_layers_are_not_captured(model, corpus, tmp_path, monkeypatch):
    asked = []
    original = cal.Context.capture
    monkeypatch.setattr(cal.Context, "capture", lambda self, layers: [asked.append(list(layers)), original(self, layers)][1])
    cal.calibrate(config(model, corpus, tmp_path / "m.gguf", layers_per_pass=1, **ALL))
    assert [x for x in asked if x] == [[1, 2], [1, 2, 3], [1, 2, 4]]


def test_each_pass_goes_on_from_its_own_sums(model, corpus, whole, tmp_path):
    c = config(model, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"), layers_per_pass=2, save_every=0, **ALL)
    for at in (3, 16, 25):  # in the first pass and in the second

        def report(stage, done, total, at=at):
            if stage == "capture" and done > at * total / 36:
                raise RuntimeError("a fault")

        with pytest.raises(RuntimeError, match="a fault"):
            cal.calibrate(c, report)
    assert hashes(tmp_path) == {}
    cal.calibrate(c)
    assert hashes(tmp_path) == hashes(whole)
    assert sorted(hashes(tmp_path, "*.npz")) == ["s.l2-3.npz", "s.l4-4.npz"]
    solved = runner.invoke(cli.app, ["solve", str(tmp_path / "s.l2-3.npz"), "--out", str(tmp_path / "n.gguf")])
    assert solved.exit_code == 8
    assert "the sums are of layers 2-3 only: make sidecars with the command that made the sums" in solved.stderr.replace("\n", " ")


def test_sums_of_other_passes_are_refused(model, corpus, tmp_path):
    cal.calibrate(config(model, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"), layers_per_pass=2, **ALL))
    (tmp_path / "s.l2-3.npz").rename(tmp_path / "s.npz")
    with pytest.raises(SumsError, match="layers summed: expected None, found 2-3"):
        cal.calibrate(config(model, corpus, tmp_path / "n.gguf", sums=str(tmp_path / "s.npz"), **ALL))


def test_shards_in_passes_are_merged_pass_by_pass(model, corpus, whole, tmp_path):
    for i in (1, 2):
        args = arguments(model, corpus, "--shard", f"{i}/2", "--sums", tmp_path / f"{i}.npz", "--layers-per-pass", 2,
                         "--split", 1, "--kind", "kv_prev", "--kind", "input")  # fmt: skip
        made = runner.invoke(cli.calibrate_app, args)
        assert made.exit_code == 0, made.output
        assert f"{tmp_path}/{i}.l2-3.npz, {tmp_path}/{i}.l4-4.npz: sums of shard {i}/2" in made.stdout.replace("\n", "")
    for layers in ("l2-3", "l4-4"):
        sums_file.merge([tmp_path / f"{i}.{layers}.npz" for i in (1, 2)], tmp_path / f"s.{layers}.npz")
    cal.calibrate(config(model, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"), layers_per_pass=2, **ALL | dict(splits=[2, 1])))
    for path in tmp_path.glob("*.gguf"):
        assert_same_maps(path, whole / path.name)


def test_a_count_of_layers_below_zero_is_refused(model, corpus, tmp_path):
    with pytest.raises(RidgefillError, match="layers per pass: expected at least 1, or 0 for all, found -1"):
        cal.Calibration(config(model, corpus, tmp_path / "m.gguf", layers_per_pass=-1))


#
# torchrun
#

# keeps what the first process solves from
WORKER = """
    import json, sys
    from ridgefill import calibrate as cal, fit
    from ridgefill.sums_file import Store

    out, settings = sys.argv[1], json.loads(sys.argv[2])

    class Kept(fit.Solution):
        def add(self, header, sums):
            with Store(f"{out}/reduced.{len(header.layers) and header.layer_names()}.npz") as store:
                store.write(header, sums)
            super().add(header, sums)

    cal.Solution = Kept
    print(len(cal.calibrate(cal.Config(**settings))), "sidecars")
"""


def torchrun(n: int, *command: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(Path(ridgefill.__file__).parents[1])}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), *command]
    return subprocess.run(run, capture_output=True, text=True, env=env, timeout=300)


@pytest.fixture
def of_this_build(patched_lib, monkeypatch):
    monkeypatch.setenv("RIDGE_LIB_DIR", str(patched_lib))


@needs_torch
def test_two_processes_equal_one_pass(model, corpus, whole, tmp_path, of_this_build):
    """Sums to 1e-9, maps to the float32 in which they are stored."""
    (tmp_path / "worker.py").write_text("\n".join(line[4:] for line in WORKER.split("\n")))
    settings = vars(config(model, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"), **ALL))
    p = torchrun(2, str(tmp_path / "worker.py"), str(tmp_path), json.dumps(settings))
    assert p.returncode == 0, p.stderr
    assert sorted(p.stdout.split("\n")) == ["", "0 sidecars", "4 sidecars"]
    with Reader(tmp_path / "reduced.0.npz") as a, Reader(whole / "s.npz") as b:
        for x, y in zip(a.sums(), b.sums(), strict=True):
            for (part, split, m), (_, _, n) in zip(x.each(), y.each(), strict=True):
                assert_same_sums(m, n)
                assert np.array_equal(m.origin_x, n.origin_x), (part, split)  # the first process has the first chunk
    assert sorted(hashes(tmp_path)) == sorted(hashes(whole)) != []
    for path in tmp_path.glob("*.gguf"):
        assert_same_maps(path, whole / path.name)
    # and the files that the two kept are those of shards
    assert sums_file.merge([tmp_path / "s.1of2.npz", tmp_path / "s.2of2.npz"], tmp_path / "merged.npz").missing == []


@needs_torch
def test_the_command_under_torchrun(model, corpus, whole, tmp_path, of_this_build):
    """Three processes in two passes; only the first one speaks."""
    args = arguments(model, corpus, "--split", 1, "--kind", "kv_prev", "--kind", "input", "--layers-per-pass", 2, "--no-score",
                     "--out", tmp_path / "m.gguf")  # fmt: skip
    code = "from ridgefill.cli import calibrate_main; calibrate_main()"
    p = torchrun(3, "--no-python", sys.executable, "-c", code, *args, "--json")
    assert p.returncode == 0, p.stderr
    assert len(json.loads(p.stdout)) == 4
    for path in whole.glob("*.gguf"):
        assert_same_maps(tmp_path / path.name, path)


def test_a_shard_under_torchrun_is_refused(model, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(RidgefillError, match="shard: expected none under torchrun, whose 2 processes share the text, found 1/2"):
        cal.Calibration(config(model, corpus, "", sums=str(tmp_path / "s.npz"), shard="1/2"))


def test_torchrun_without_torch(model, corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    with pytest.raises(RidgefillError, match="connected by torch, which is missing: pip install torch"):
        cal.Calibration(config(model, corpus, tmp_path / "m.gguf"))
