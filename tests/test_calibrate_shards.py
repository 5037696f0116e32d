"""Shards of the text and merging their sums: equal to one pass but for rounding, and what does not belong together is refused."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from calibrate_pico import OPTIONS, arguments, config, corpus, hashes, keys_of, library, model  # noqa: F401
from ridgefill import calibrate as cal
from ridgefill import cli, sidecar, sums_file
from ridgefill.errors import OutputExists, RidgefillError
from ridgefill.solve import Ridge
from ridgefill.statistics import Moments, about
from ridgefill.sums_file import Reader, SumsError

ALL = dict(splits=[1, 2], kinds=["kv_prev", "input"])
CLOSE = 1e-9  # of the largest value: how near merged sums come to those of one pass

runner = CliRunner()


#
# adding sums
#


def moments(x: np.ndarray, y: np.ndarray, origin_x: np.ndarray, origin_y: np.ndarray) -> Moments:
    m = Moments(1, origin_x, {2: origin_y})
    xc = about(x, m.origin_x, 1)
    m.add_features(xc)
    m.add_targets(2, xc, about(y, m.origin_y[2], 2))
    return m


def close(a: np.ndarray, b: np.ndarray, tolerance: float = CLOSE) -> bool:
    return bool(np.abs(a - b).max() <= tolerance * np.abs(b).max())


def assert_same_sums(merged: Moments, whole: Moments, tolerance: float = CLOSE) -> None:
    assert merged.n == whole.n
    assert close(merged.xx, whole.xx, tolerance)
    # sums about the mean may be zero but for rounding: their scale is that of the rows
    scale = np.sqrt(whole.n * np.diag(whole.xx).max())
    assert np.abs(merged.sum_x - whole.sum_x).max() <= tolerance * scale
    for il in whole.layers:
        assert close(merged.xy[il], whole.xy[il], tolerance) and close(merged.yy[il], whole.yy[il], tolerance)
        assert np.abs(merged.sum_y[il] - whole.sum_y[il]).max() <= tolerance * np.sqrt(whole.n * whole.yy[il].max())


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(2, 80), st.integers(1, 9), st.integers(1, 7), st.floats(-3, 3), st.data())
def test_merged_sums_do_not_depend_on_the_origins(seed, n, d, e, log_spread, data):
    """Each share about an origin of its own, some far from its mean, merged about the first one's."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * 10**log_spread + rng.normal(size=d) * 10
    y = rng.normal(size=(n, e)) + x @ rng.normal(size=(d, e))
    cuts = sorted(data.draw(st.lists(st.integers(1, n - 1), max_size=4)))
    shares = [s for s in np.split(np.arange(n), cuts) if len(s)]
    parts = [moments(x[s], y[s], x[s[0]], y[s[0]]) for s in shares]
    whole = moments(x, y, x[0], y[0])
    for other in parts[1:]:
        parts[0].merge(other)
    assert_same_sums(parts[0], whole)
    assert np.array_equal(parts[0].origin_x, x[0])


#
# from end to end
#


def shard(model, corpus, folder: Path, i: int, n: int, **kw) -> str:
    """Sums of shard i of n; their path."""
    path = str(folder / f"{i}of{n}.npz")
    assert cal.calibrate(config(model, corpus, "", sums=path, shard=f"{i}/{n}", **{**ALL, **kw})) == []
    return path


@pytest.fixture(scope="module")
def whole(model, corpus, tmp_path_factory) -> Path:
    """A folder with the sums and the sidecars of one pass."""
    folder = tmp_path_factory.mktemp("whole")
    cal.calibrate(config(model, corpus, folder / "m.gguf", sums=str(folder / "s.npz"), **ALL))
    return folder


@pytest.fixture(scope="module")
def shards(model, corpus, tmp_path_factory) -> list[str]:
    """Sums of four shards."""
    folder = tmp_path_factory.mktemp("shards")
    return [shard(model, corpus, folder, i, 4) for i in (1, 2, 3, 4)]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 0, 2, 1]])
def test_four_shards_merged_equal_one_pass(whole, shards, tmp_path, order):
    merged = sums_file.merge([shards[i] for i in order], tmp_path / "s.npz")
    assert (merged.shards, merged.missing, merged.done) == ([1, 2, 3, 4], [], {"fit": 12, "heldout": 6})
    with Reader(tmp_path / "s.npz") as a, Reader(whole / "s.npz") as b:
        for x, y in zip(a.sums(), b.sums(), strict=True):
            for (part, split, m), (_, _, n) in zip(x.each(), y.each(), strict=True):
                assert_same_sums(m, n)
                # the first chunk of the first shard is the first of all
                assert np.array_equal(m.origin_x, n.origin_x), (part, split)
            assert close(*(Ridge(s.moments["fit"][1], s.moments["heldout"][1]).cov for s in (x, y)))


def test_maps_of_merged_sums_equal_those_of_one_pass(whole, shards, tmp_path):
    merge = runner.invoke(cli.app, ["merge", *shards, "--out", str(tmp_path / "s.npz"), "--json"])
    assert merge.exit_code == 0, merge.output
    assert json.loads(merge.stdout) == {"sums": str(tmp_path / "s.npz"), "shards": [1, 2, 3, 4], "n_shards": 4, "missing": []}
    args = ["solve", str(tmp_path / "s.npz"), "--out", str(tmp_path / "m.gguf"), "--map-type", "f32"]
    solved = runner.invoke(cli.app, [*args, "--kind", "kv_prev", "--kind", "input"])
    assert solved.exit_code == 0, solved.output
    assert [p.name for p in sorted(tmp_path.glob("*.gguf"))] == [p.name for p in sorted(whole.glob("*.gguf"))]
    for path in tmp_path.glob("*.gguf"):
        assert_same_maps(path, whole / path.name)
        a, b = keys_of(path), keys_of(whole / path.name)
        assert a.pop("ridge.calibration.options") == [*OPTIONS, "shards=4"] and b.pop("ridge.calibration.options") == OPTIONS
        for name in [k for k in b if k.startswith(("ridge.r2", "ridge.lambda"))]:
            assert np.allclose(a.pop(name), b.pop(name), rtol=1e-6)
        hashed = ("ridge.tensors_sha256", "ridge.metadata_sha256")
        assert {k: v for k, v in a.items() if k not in hashed} == {k: v for k, v in b.items() if k not in hashed}


def assert_same_maps(path, other) -> None:
    """To the rounding of float32, in which they are stored."""
    mine, theirs = sidecar.maps(path), sidecar.maps(other)
    for il, (weight, bias) in theirs.items():
        assert close(mine[il][0], weight, 1e-6) and close(mine[il][1], bias, 1e-6)


def test_the_ordinary_command_solves_merged_sums(model, corpus, whole, shards, tmp_path, monkeypatch):
    sums_file.merge(shards, tmp_path / "s.npz")
    monkeypatch.setattr(cal, "Context", lambda *a, **kw: pytest.fail("the text was run again"))
    cal.calibrate(config(model, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"), **ALL))
    for path in tmp_path.glob("*.gguf"):
        assert_same_maps(path, whole / path.name)
        assert keys_of(path)["ridge.calibration.options"] == [*OPTIONS, "shards=4"]


def test_shards_can_be_merged_some_at_a_time(shards, tmp_path):
    half = sums_file.merge([shards[2], shards[1]], tmp_path / "half.npz")
    assert (half.shards, half.missing) == ([2, 3], [1, 4])
    done = runner.invoke(cli.app, ["solve", str(tmp_path / "half.npz"), "--out", str(tmp_path / "m.gguf")])
    assert (done.exit_code, done.stderr) == (8, "error: the sums lack shards 1, 4 of 4; merge them first\n")
    rest = sums_file.merge([tmp_path / "half.npz", shards[3], shards[0]], tmp_path / "all.npz")
    assert rest.missing == []
    sums_file.merge(shards, tmp_path / "s.npz")
    with Reader(tmp_path / "s.npz") as a, Reader(tmp_path / "all.npz") as b:
        for x, y in zip(a.sums(), b.sums(), strict=True):
            for (_, _, m), (_, _, n) in zip(x.each(), y.each(), strict=True):
                assert_same_sums(m, n)


def test_a_shard_takes_every_nth_chunk_and_goes_on_after_a_fault(model, corpus, shards, tmp_path):
    with Reader(shards[1]) as r:
        assert (r.header.total, r.header.done, r.header.shards) == ({"fit": 3, "heldout": 2}, {"fit": 3, "heldout": 2}, [2])
    path = str(tmp_path / "s.npz")
    c = config(model, corpus, "", sums=path, shard="2/4", save_every=0, **ALL)

    def report(stage, done, total):
        if done > 300:
            raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        cal.calibrate(c, report)
    with pytest.raises(SumsError, match=r"s.npz is unfinished: 2 of 5 chunks; run its command again"):
        sums_file.merge([shards[0], path], tmp_path / "m.npz")
    cal.calibrate(c)
    assert Path(path).read_bytes() == Path(shards[1]).read_bytes()


def test_more_shards_than_held_out_chunks(model, corpus, whole, tmp_path):
    merged = sums_file.merge([shard(model, corpus, tmp_path, i, 8) for i in range(1, 9)], tmp_path / "s.npz")
    assert merged.done == {"fit": 12, "heldout": 6}
    with Reader(tmp_path / "s.npz") as a, Reader(whole / "s.npz") as b:
        assert_same_sums(a.sums()[0].moments["heldout"][2], b.sums()[0].moments["heldout"][2])
    with pytest.raises(RidgefillError, match="expected at most 12 shards of 12 chunks, found 13"):
        shard(model, corpus, tmp_path, 1, 13)


def test_what_does_not_belong_together_is_not_merged(model, corpus, shards, tmp_path):
    def refusal(*paths, out=tmp_path / "m.npz", error=SumsError) -> str:
        with pytest.raises(error) as e:
            sums_file.merge(paths, out)
        assert not (tmp_path / "m.npz").exists()
        return str(e.value)

    assert refusal(shards[0]) == "merge: expected at least two files of sums, found 1"
    assert refusal(shards[0], shards[1], shards[0]) == f"shard 1 of 4 is in both {shards[0]} and {shards[0]}"
    assert "3of3.npz: expected a shard of 4 as in" in refusal(shards[0], shard(model, corpus, tmp_path, 3, 3))
    other = shard(model, corpus, tmp_path, 2, 4, seed=3)
    assert f"{other} does not belong to {shards[0]}: seed: expected 0, found 3" in refusal(shards[0], other)
    fewer = shard(model, corpus, tmp_path, 4, 4, kinds=["input"])
    assert "sums for kinds: expected ['input', 'kv_prev'], found ['input']" in refusal(shards[0], fewer)
    assert "no such file of sums: /no/sums" in refusal(shards[0], "/no/sums")
    (tmp_path / "taken.npz").write_text("mine")
    assert "taken.npz exists already" in refusal(*shards, out=tmp_path / "taken.npz", error=OutputExists)
    assert (tmp_path / "taken.npz").read_text() == "mine"


def test_shards_for_different_served_files_are_not_merged(model, corpus, shards, tmp_path, monkeypatch):
    """Sums are the same, but the fingerprint in the sidecar would be one of two."""
    original = cal.Model.fingerprint
    monkeypatch.setattr(cal.Model, "fingerprint", lambda self, split: {**original(self, split), "file_type": 7})
    other = shard(model, corpus, tmp_path, 2, 4)
    with pytest.raises(SumsError, match="they are for different model files"):
        sums_file.merge([shards[0], other], tmp_path / "m.npz")


def test_commands_for_shards(model, corpus, tmp_path):
    sums = str(tmp_path / "1.npz")
    args = arguments(model, corpus, "--shard", "1/2", "--sums", sums)
    made = runner.invoke(cli.calibrate_app, [*args, "--json"])
    assert made.exit_code == 0, made.output
    found = json.loads(made.stdout)
    assert (found["sums"], found["shard"], found["n_tokens"] > 128) == (sums, "1/2", True)
    plain = runner.invoke(cli.calibrate_app, args)
    assert plain.exit_code == 0 and f"{sums}: sums of shard 1/2" in plain.stdout.replace("\n", "")
    for more in (["--out", "m.gguf"], ["--shard", "3/2"], ["--shard", "one"]):
        refused = runner.invoke(cli.calibrate_app, [*args, *more])
        assert refused.exit_code == (2 if "--out" in more else 1), refused.output
    assert runner.invoke(cli.calibrate_app, arguments(model, corpus, "--shard", "1/2")).exit_code == 2
    assert runner.invoke(cli.calibrate_app, arguments(model, corpus)).exit_code == 2
    for shard_of, out in (("1/2", str(tmp_path / "m.gguf")), ("", "")):
        with pytest.raises(RidgefillError, match="expected a file for the sidecar or a shard, which makes none, found both or neither"):
            cal.Calibration(config(model, corpus, out, shard=shard_of, sums=str(tmp_path / "3.npz")))
    second = arguments(model, corpus, "--shard", "2/2", "--sums", tmp_path / "2.npz")
    assert runner.invoke(cli.calibrate_app, second).exit_code == 0
    merge = ["merge", sums, str(tmp_path / "2.npz"), "--out", str(tmp_path / "s.npz")]
    merged = runner.invoke(cli.app, merge)
    assert merged.exit_code == 0 and "sums of shards 1, 2 of 2" in merged.stdout.replace("\n", " ")
    assert runner.invoke(cli.app, merge).exit_code == 6
    assert runner.invoke(cli.app, [*merge, "--force"]).exit_code == 0
    assert hashes(tmp_path) == {}
