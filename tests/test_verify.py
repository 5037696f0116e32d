"""ridgefill verify: the fields of the fingerprint, the self-test, exit codes."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import sidecar_files as sf
from calibrate_pico import CTX, SINK, config, corpus, keys_of, library, model  # noqa: F401
from ridgefill import calibrate as cal
from ridgefill import cli, lib, native, sidecar, verify
from test_projections import rewritten

KINDS = ("input", "kv", "kv_prev")
runner = CliRunner()


@pytest.fixture(scope="module")
def made(model, corpus, tmp_path_factory):  # noqa: F811
    """{kind: sidecar with scores and self-test}"""
    c = config(model, corpus, tmp_path_factory.mktemp("maps") / "{kind}.gguf", kinds=list(KINDS), map_type="q8_0", score=True)
    return {r.kind: Path(r.path) for r in cal.calibrate(c)}


def run(file, model_path, *more: str, code: int = 0):
    done = runner.invoke(cli.app, ["verify", str(file), str(model_path), "--threads", "1", *more])
    assert done.exit_code == code, done.output
    return done


@pytest.mark.parametrize("kind", KINDS)
def test_maps_pass_on_their_own_model(kind, made, model):  # noqa: F811
    found = json.loads(run(made[kind], model, "--json").stdout)
    assert found["ok"] and found["refusal"] == "" and all(f["matches"] for f in found["fields"])
    names = [f["name"] for f in found["fields"]]
    assert names[:3] == ["architecture", "layers", "width"] and {"vocab_size", "tokenizer", "blk.2.attn_norm.weight"} < set(names)
    test = found["selftest"]
    assert test["passed"] and test["difference"] < 1e-5 and test["same_first"] == test["n_rows"] == verify.N_ROWS
    assert test["n_filled"] == CTX - verify.TAIL - SINK
    assert test["tolerance"] == verify.TOLERANCE and test["same_file_type"]


def test_what_the_selftest_holds_is_what_a_filled_prompt_gives(made, model):  # noqa: F811
    """Found again by other calls: the whole prompt filled in small ubatches, with every logit of the tail."""
    keys = keys_of(made["kv"])
    tokens, tail = keys["ridge.selftest.tokens"], keys["ridge.selftest.tail"]
    with lib.Model(model) as m, lib.Context(m, 256, n_ubatch=64, n_threads=2) as ctx, lib.Maps(m, made["kv"]) as maps:
        logits, p = ctx.fill_and_decode(tokens, mode="fill", maps=maps, n_tail=tail, logits="all")
        assert len(p.filled) == len(tokens) - tail - SINK
        ctx.clear()
        exact = ctx.decode(tokens, logits="all")[-16:]
    logits = logits[-16:]
    top = np.argsort(-logits, axis=1)[:, :5]
    assert np.array_equal(np.reshape(keys["ridge.selftest.top_tokens"], (16, 5)), top)
    recorded = np.reshape(keys["ridge.selftest.top_logits"], (16, 5))
    assert np.abs(recorded - np.take_along_axis(logits, top, axis=1)).max() < 1e-2
    assert np.abs(recorded - np.take_along_axis(exact, top, axis=1)).max() > 0.1


def test_another_quantisation_runs_with_a_warning_and_passes(made, model, tmp_path):  # noqa: F811
    path = tmp_path / "q8.gguf"
    quantize = [native.loaded_dir() / "llama-quantize", model, path, "Q8_0"]
    subprocess.run(quantize, check=True, capture_output=True)
    shown = run(made["input"], path).stdout
    line = next(line for line in shown.splitlines() if "file type" in line)
    assert "differs: warns" in line and "passed" in shown
    found = json.loads(run(made["input"], path, "--json").stdout)
    assert [f["name"] for f in found["fields"] if not f["matches"]] == ["file type"]
    assert 1e-4 < found["selftest"]["difference"] < verify.TOLERANCE
    assert not found["selftest"]["same_file_type"]


def test_a_fine_tune_differs_in_its_anchors(made, model, tmp_path):  # noqa: F811
    tuned = rewritten(Path(model), tmp_path / "m.gguf", lambda t: t | {"output_norm.weight": t["output_norm.weight"] * 1.001})
    found = json.loads(run(made["kv"], tuned, "--json").stdout)
    (differs,) = [f for f in found["fields"] if not f["matches"]]
    assert (differs["name"], differs["refuses"], found["refusal"]) == ("output_norm.weight", False, "")


def test_another_model_is_refused_with_the_readers_message(made, pico_model):
    deeper = pico_model("llama", n_layer=6, head=32, n_head=2, n_head_kv=1)
    refused = run(made["kv"], deeper, code=11)
    line = next(line for line in refused.stdout.splitlines() if " layers " in line)
    assert [c.strip() for c in line.strip("│").split("│")] == ["layers", "5", "6", "differs: refused"]
    assert refused.stderr.startswith("error: ") and "made for a model of 5 layers, the model has 6" in refused.stderr
    found = json.loads(run(made["kv"], deeper, "--json", code=11).stdout)
    assert not found["ok"] and "of 5 layers" in found["refusal"] and found["selftest"] is None


def test_every_refused_field_is_one_that_the_library_refuses(made, model, pico_model):  # noqa: F811
    """The fields say of each difference what the library then does."""
    others = [
        pico_model("qwen3", n_layer=5, head=32, n_head=2, n_head_kv=1),
        pico_model("llama", n_layer=5, head=32, n_head=2, n_head_kv=1, n_ff=64),
        pico_model("llama", n_layer=5, head=32, n_head=4, n_head_kv=1),
        pico_model("llama", n_layer=5, head=32, n_head=2, n_head_kv=1, seed=1),
        Path(model),
    ]
    keys = sidecar.inspect(made["kv"])["keys"]
    seen = set()
    for other in others:
        with lib.Model(other) as m:
            differing = [f for f in verify.fields(keys, m.fingerprint(2)) if not f.matches]
            assert bool(verify.refusal(m, made["kv"])) == any(f.refuses for f in differing)
            seen |= {f.name for f in differing}
    assert {"architecture", "feed_forward", "head_count", "output_norm.weight"} < seen


def resealed(path: Path, out: Path, part: str, change) -> Path:
    """A copy whose tensors of a part ("weight", "bias") are changed, with right hashes."""

    def surgery(raw):
        for t in raw.tensors:
            if t.name.endswith(part):
                t.data = change(np.frombuffer(t.data, np.float32)).astype(np.float32).tobytes()

    out.write_bytes(sf.operated(path.read_bytes(), surgery))
    return out


def test_maps_that_do_something_else_fail(made, model, tmp_path):  # noqa: F811
    """A file whose hashes are right and whose maps are not those that the self-test was made with."""
    other = resealed(made["kv"], tmp_path / "m.gguf", "bias", lambda b: b + 0.5)
    failed = run(other, model, code=11)
    assert "failed" in failed.stdout and "the self-test failed: logits differ by" in failed.stderr
    found = json.loads(run(other, model, "--json", code=11).stdout)
    assert not found["ok"] and not found["refusal"] and not found["selftest"]["passed"]


def test_a_library_that_fills_otherwise_fails(made, model, monkeypatch):  # noqa: F811
    """As if maps were not used at all, or those of the split alone."""
    with lib.Model(model) as m:
        keys = sidecar.inspect(made["kv"])["keys"]
        assert verify.selftest(m, made["kv"], keys, 1).passed
        prefill = lib.Context.prefill
        for mode in ("plumb", "identity", "nofill"):
            monkeypatch.setattr(lib.Context, "prefill", lambda self, t, mode=mode, **kw: prefill(self, t, **kw | {"mode": mode}))
            assert not verify.selftest(m, made["kv"], keys, 1).passed


def test_a_damaged_file_and_a_file_without_a_selftest(made, model, corpus, tmp_path):  # noqa: F811
    data = bytearray(made["kv"].read_bytes())
    data[-40] ^= 1
    (tmp_path / "bad.gguf").write_bytes(data)
    assert "is damaged" in run(tmp_path / "bad.gguf", model, code=7).stderr
    assert "no such model file" in run(made["kv"], "/no/model.gguf", code=3).stderr
    cal.calibrate(config(model, corpus, tmp_path / "m.gguf"))
    assert "self-test: none in this file" in run(tmp_path / "m.gguf", model).stdout
    assert json.loads(run(tmp_path / "m.gguf", model, "--json").stdout)["selftest"] is None


def test_text_too_short_to_be_filled_gives_no_selftest(made, model):  # noqa: F811
    with lib.Model(model) as m:
        assert verify.selftest_keys(m, made["kv"], [5] * 31, 1) == {}
        keys = verify.selftest_keys(m, made["kv"], [5] * 40, 1)
        assert keys["ridge.selftest.tail"] == 20 and len(keys["ridge.selftest.top_tokens"]) == 80
        deep = sf.operated(made["kv"].read_bytes(), lambda raw: raw.set("ridge.sink_rows", 30))
    with lib.Model(model) as m:
        path = Path(shutil.copy(made["kv"], made["kv"].with_name("sink.gguf")))
        path.write_bytes(deep)
        assert verify.selftest_keys(m, path, [5] * 40, 1) == {}
