"""Layer inputs from a Hugging Face checkpoint: the same as the library's, the same maps, and another model is refused.

Run where torch and transformers are installed; what a user sees without them is tested everywhere.
"""
from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

import pico
from calibrate_pico import CTX, OPTIONS, SHAPE, arguments, config, corpus, hashes, inputs_by_hand, keys_of, library, model, words  # noqa: F401
from ridgefill import calibrate as cal
from ridgefill import cli, hf, lib, sums_file
from ridgefill.capture import Chunk
from ridgefill.errors import RidgefillError
from ridgefill.hf import Checkpoint, CheckpointError
from ridgefill.text import read_documents

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import compare_sources  # noqa: E402

runner = CliRunner()
missing = [name for name in ("torch", "transformers") if not importlib.util.find_spec(name)]
needs_transformers = pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)} (pip install -e '.[hf]')")

ALL = dict(splits=[1, 2], kinds=["kv_prev", "input"], score=False)


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory):
    """checkpoint_of(GGUF) -> folder with the same weights, each made once."""
    made = {}

    def get(path) -> Path:
        if path not in made:
            made[path] = tmp_path_factory.mktemp("checkpoint")
            compare_sources.write_checkpoint(Path(path), made[path])
        return made[path]

    return get


@pytest.fixture(scope="module")
def checkpoint(model, checkpoint_of) -> Path:
    return checkpoint_of(model)


def changed(checkpoint: Path, folder: Path, change=lambda tensors: None, **settings) -> str:
    """A copy of a checkpoint with other weights, or other settings in config.json."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    c = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(c | settings))
    return str(folder)


#
# the same inputs and the same maps
#


@needs_transformers
@pytest.mark.parametrize("arch, kind", [*((arch, "") for arch in pico.ARCHS), ("llama", "mistral")])
def test_inputs_are_those_of_the_library(pico_model, corpus, checkpoint_of, tmp_path, arch, kind):
    path = str(pico_model(arch, **SHAPE))
    documents = read_documents([corpus])[:1]
    layers = [0, 2, 4]
    expected = list(inputs_by_hand(path, documents, layers))
    with lib.Model(path) as served:
        tokens = served.tokenize(documents[0].text)
        chunks = [Chunk(tokens[at : at + CTX], 0) for at in range(0, len(tokens), CTX)]
        folder = str(checkpoint_of(path))
        source = Checkpoint(changed(folder, tmp_path / "c", model_type=kind) if kind else folder, served)
    assert len(expected) > 1
    for mine, theirs in zip(source.activations(chunks, layers), expected, strict=True):
        assert list(mine) == layers
        for il in layers:
            assert mine[il].dtype == np.float32 and mine[il].shape == theirs[il].shape
            error = np.linalg.norm(mine[il] - theirs[il]) / np.linalg.norm(theirs[il])
            assert error < (1e-6 if il == 0 else 2e-3), (il, error)  # the library keeps K and V as f16


@needs_transformers
def test_both_sources_give_the_same_maps(model, corpus, tmp_path):
    """The reduced form of scripts/compare_sources.py."""
    entries = compare_sources.compare(
        Path(model), ["f32", "bf16"], tmp_path, text=[str(corpus)], splits=[1, 2], kinds=["input", "kv_prev"], ctx=CTX, threads=1)
    assert [(e["kind"], e["split"], e["part"]) for e in entries] == [
        ("input", 1, "input"), ("input", 2, "input"), ("kv_prev", 1, "k"), ("kv_prev", 1, "v"), ("kv_prev", 2, "k"), ("kv_prev", 2, "v")]
    assert all(set(e["r2"]) == {"gguf", "f32", "bf16"} and len(e["r2"]["f32"]) == len(e["layers"]) for e in entries)
    assert 0 < compare_sources.largest_difference(entries) < 0.005


@needs_transformers
def test_the_sidecar_is_for_the_served_file(model, pico_model, checkpoint, corpus, tmp_path):
    """Quantised and named as `--for` says, and its source on record."""
    served = str(pico_model("llama", ftype="q8_0", **SHAPE))
    out = str(tmp_path / "m.gguf")
    more = ["--for", served, "--out", out, "--dtype", "bf16", "--kind", "kv"]
    done = runner.invoke(cli.calibrate_app, arguments(checkpoint, corpus, *more))
    assert done.exit_code == 0, done.output
    keys = keys_of(out)
    assert keys["ridge.model.file_type"] == int(gguf.LlamaFileType.MOSTLY_Q8_0)
    assert keys["ridge.calibration.options"] == [*OPTIONS, f"checkpoint={checkpoint.name}", "dtype=bf16"]
    with lib.Model(served) as m, lib.Maps(m, out) as maps:
        assert maps.split == 2


#
# sums, shards and faults
#


@needs_transformers
def test_sums_of_a_checkpoint_are_resumed_and_merged(model, checkpoint, corpus, tmp_path):
    def of(name: str, **kw) -> cal.Config:
        out = "" if "shard" in kw else tmp_path / name / "m.gguf"
        (tmp_path / name).mkdir(exist_ok=True)
        return config(checkpoint, corpus, out, served=model, sums=str(tmp_path / name / "s.npz"), save_every=0, **{**ALL, **kw})

    def fault(stage, done, total):
        if stage == "capture" and done > total // 2:
            raise RuntimeError("a fault")

    cal.calibrate(of("whole"))
    with pytest.raises(RuntimeError, match="a fault"):
        cal.calibrate(of("resumed"), fault)
    cal.calibrate(of("resumed"))
    assert hashes(tmp_path / "resumed", "*") == hashes(tmp_path / "whole", "*")
    for i in (1, 2):
        cal.calibrate(of(f"shard{i}", shard=f"{i}/2"))
    sums_file.merge([tmp_path / f"shard{i}" / "s.npz" for i in (1, 2)], tmp_path / "s.npz")
    with sums_file.Reader(tmp_path / "s.npz") as a, sums_file.Reader(tmp_path / "whole" / "s.npz") as b:
        for x, y in zip(a.sums(), b.sums(), strict=True):
            for (_, _, m), (_, _, n) in zip(x.each(), y.each(), strict=True):
                assert np.abs(m.xx - n.xx).max() <= 1e-9 * np.abs(n.xx).max()
    with pytest.raises(sums_file.SumsError, match="dtype: expected bf16, found f32"):
        cal.calibrate(of("whole", dtype="bf16", force=True))
    with pytest.raises(sums_file.SumsError, match="checkpoint: expected [0-9a-f]{64}, found None"):
        cal.calibrate(config(checkpoint, corpus, tmp_path / "n.gguf", served=model, sums=str(gguf_sums(model, corpus, tmp_path)), **ALL))


def gguf_sums(model, corpus, folder: Path) -> Path:
    cal.calibrate(config(model, corpus, folder / "g.gguf", sums=str(folder / "g.npz"), **ALL))
    return folder / "g.npz"


#
# another model
#


@needs_transformers
@pytest.mark.parametrize(
    "name, change, message",
    [
        ("norm of one layer, one channel, by the least step of bf16",
         lambda t: t["model.layers.3.input_layernorm.weight"][5].mul_(1 + 2**-7), "blk.3.attn_norm differs"),
        ("last norm", lambda t: t["model.norm.weight"].add_(0.01), "output_norm differs"),
        ("feed-forward norm", lambda t: t["model.layers.0.post_attention_layernorm.weight"].mul_(1.1), "blk.0.ffn_norm differs"),
        ("V of one layer", lambda t: t["model.layers.4.self_attn.v_proj.weight"].mul_(1.03),
         r"blk.4.attn_v: expected within 0.0\d+ of its norm as Q8_0 allows, found 0.03"),
        ("the feed-forward of one layer, by a matrix of rank 1",
         lambda t: t["model.layers.2.mlp.down_proj.weight"].add_(0.03 * t["model.norm.weight"][:, None]),
         r"blk.2.ffn_down: expected within 0.0\d+ of its norm as Q8_0 allows, found 0.\d+"),
        ("weights that are not there", lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
         "expected weights for the whole model, found none for layers.1.mlp.up_proj.weight"),
    ],
)  # fmt: skip
def test_a_fine_tune_is_refused(pico_model, checkpoint, tmp_path, name, change, message):
    with lib.Model(pico_model("llama", ftype="q8_0", **SHAPE)) as served:
        Checkpoint(str(checkpoint), served, dtype="bf16")  # the model itself passes, rounded twice
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(changed(checkpoint, tmp_path / "c", change), served, dtype="bf16")


@needs_transformers
def test_a_fine_tune_of_experts_is_refused(pico_model, checkpoint_of, tmp_path):
    path = str(pico_model("qwen3moe", **SHAPE))

    def change(tensors):
        for name in [n for n in tensors if "layers.1.mlp.experts" in n and "down_proj" in n]:
            tensors[name].mul_(1.001)

    with lib.Model(path) as served, pytest.raises(CheckpointError, match="blk.1.ffn_down_exps: expected within 2e-05 of its norm as F32"):
        Checkpoint(changed(checkpoint_of(path), tmp_path / "c", change), served)


@needs_transformers
@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(num_hidden_layers=4), "expected 5 layers as in .*, found 4"),
        (dict(hidden_size=128), "expected 64 width as in .*, found 128"),
        (dict(vocab_size=320), r"expected \d+ tokens in the vocabulary as in .*, found 320"),
        (dict(num_key_value_heads=2), "expected 1 heads of keys and values as in .*, found 2"),
        (dict(rms_norm_eps=1e-6), "expected 1e-05 epsilon of the norms as in .*, found 1e-06"),
        (dict(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), "expected 10000 base of the rotation as in .*, found 500000"),
        (dict(model_type="qwen2"), "expected model type llama or mistral for a GGUF of architecture llama, found qwen2"),
        (dict(model_type="no such"), "could not be loaded by transformers: "),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused(model, checkpoint, tmp_path, settings, message):
    with lib.Model(model) as served, pytest.raises(CheckpointError, match=message):
        Checkpoint(changed(checkpoint, tmp_path / "c", **settings), served)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_rounding_covers_a_type_and_little_more(kind):
    """What it allows is more than the type's own error on weights of a normal distribution, and at most four times that."""
    kind = gguf.GGMLQuantizationType[kind]
    w = np.random.default_rng(1).standard_normal((64, 512), dtype=np.float32)
    error = np.linalg.norm(gguf.dequantize(gguf.quantize(w, kind), kind) - w) / np.linalg.norm(w)
    assert error < hf.rounding(kind) < 4 * error


#
# what the user has to give
#


@pytest.mark.parametrize(
    "name, expected", [("/no/such/model.gguf", False), ("owner/name", True), ("owner/model.gguf", False), ("model.gguf", False), ("/no/such", False)]
)
def test_what_is_taken_for_a_checkpoint(tmp_path, monkeypatch, name, expected):
    monkeypatch.chdir(tmp_path)
    assert hf.is_checkpoint(name) is expected
    assert hf.is_checkpoint(str(tmp_path))
    (tmp_path / "owner").mkdir()
    (tmp_path / "owner" / "name").write_text("a file")
    assert not hf.is_checkpoint("owner/name")


def test_a_checkpoint_needs_the_served_file_and_a_gguf_takes_no_dtype(model, corpus, tmp_path):
    with pytest.raises(RidgefillError, match="is a checkpoint: expected with --for the GGUF that the maps are for, found none"):
        cal.Calibration(config(tmp_path, corpus, tmp_path / "m.gguf"))
    for more in (dict(dtype="f32"), dict(device="cuda")):
        with pytest.raises(RidgefillError, match="dtype and device: expected a checkpoint to go with them, found .*gguf"):
            cal.Calibration(config(model, corpus, tmp_path / "m.gguf", **more))


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_missing_packages_are_named(model, corpus, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    if package == "transformers" and "torch" in missing:
        monkeypatch.setitem(sys.modules, "torch", object())
    (tmp_path / "config.json").write_text("{}")
    failed = runner.invoke(cli.calibrate_app, arguments(tmp_path, corpus, "--for", model, "--out", tmp_path / "m.gguf"))
    assert failed.exit_code == 3
    assert f"of which {package} is missing: pip install torch transformers" in failed.stderr


@needs_transformers
@pytest.mark.parametrize(
    "kw, message",
    [
        (dict(dtype="f64"), "dtype: expected one of f32, bf16, f16, found 'f64'"),
        (dict(device="tpu"), "device: expected cpu or cuda, found 'tpu'"),
        (dict(device="cuda:99"), r"device: expected a GPU that torch .* can use, found \d+ and 'cuda:99'"),
    ],
)
def test_devices_and_types_that_are_none(model, checkpoint, kw, message):
    with lib.Model(model) as served, pytest.raises(CheckpointError, match=message):
        Checkpoint(str(checkpoint), served, **kw)


@needs_transformers
def test_a_folder_without_a_checkpoint(model, tmp_path):
    with lib.Model(model) as served, pytest.raises(CheckpointError, match="expected a checkpoint with config.json, found none in"):
        Checkpoint(str(tmp_path), served)
