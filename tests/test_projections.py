"""K and V computed from captured layer inputs against those the library put into its cache, for every architecture."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

import pico
from ridgefill import lib
from ridgefill.errors import RidgefillError
from ridgefill.projections import Projections, rms_normalise

SHAPE = dict(n_layer=3, head=32, n_head=4, n_head_kv=2)
N_ROWS = 40


@pytest.fixture(scope="module", autouse=True)
def library(patched_lib):
    lib.load(patched_lib)


def rewritten(source: Path, path: Path, change: Callable[[dict], dict], arch: str | None = None, **keys) -> Path:
    """A copy of a model as architecture `arch`, with tensors {name: f32 array} changed and keys added or replaced: u32, f32, or arrays of i32."""
    reader = gguf.GGUFReader(source)
    old = reader.fields["general.architecture"].contents()
    w = gguf.GGUFWriter(path, arch or old)
    gone = {"general.architecture", *(f"{old}.{name.replace('__', '.')}" for name in keys)}
    for name, f in reader.fields.items():
        if not name.startswith("GGUF.") and name not in gone:
            name = name.replace(f"{old}.", f"{arch or old}.", 1)
            w.add_key_value(name, f.contents(), f.types[0], f.types[-1] if len(f.types) > 1 else None)
    for name, value in keys.items():
        write = w.add_array if isinstance(value, list) else w.add_uint32 if isinstance(value, int) else w.add_float32
        write(f"{arch or old}.{name.replace('__', '.')}", value)
    tensors = {t.name: np.array(t.data) for t in reader.tensors}
    for name, data in change(tensors).items():
        w.add_tensor(name, np.ascontiguousarray(data, None if data.dtype == np.int8 else np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def fused(tensors: dict, kinds=("weight", "bias")) -> dict:
    """Q, K and V matrices (and biases) of each layer in one tensor."""
    out = dict(tensors)
    for il in range(SHAPE["n_layer"]):
        for kind in kinds:
            names = [f"blk.{il}.attn_{which}.{kind}" for which in "qkv"]
            if names[0] in out:
                out[f"blk.{il}.attn_qkv.{kind}"] = np.concatenate([out.pop(name) for name in names])
    return out


def minimax(tensors: dict) -> dict:
    """From qwen3moe: head norms over all heads together, and an offset for each expert's choice."""
    out, rng = dict(tensors), np.random.default_rng(0)
    for il in range(SHAPE["n_layer"]):
        out[f"blk.{il}.exp_probs_b.bias"] = rng.normal(size=8) * 0.1
        for which, n in (("q", SHAPE["n_head"]), ("k", SHAPE["n_head_kv"])):
            out[f"blk.{il}.attn_{which}_norm.weight"] = 1 + 0.1 * rng.normal(size=n * SHAPE["head"])
    return out


@pytest.fixture(scope="module")
def variant(pico_model, tmp_path_factory):
    """get(name) -> path of a model file: an architecture of pico, or one made of it."""
    folder = tmp_path_factory.mktemp("models")
    made = {
        "fused": lambda p: rewritten(pico_model("llama", **SHAPE), p, fused),
        "fused with biases": lambda p: rewritten(pico_model("qwen2", **SHAPE), p, fused),
        "fused with separate biases": lambda p: rewritten(pico_model("qwen2", **SHAPE), p, lambda t: fused(t, ("weight",))),
        "nanbeige": lambda p: rewritten(pico_model("llama", **SHAPE), p, dict, "nanbeige", num_loops=2),
        "minimax-m2": lambda p: rewritten(
            pico_model("qwen3moe", **SHAPE), p, minimax, "minimax-m2", feed_forward_length=128, expert_gating_func=2
        ),
    }

    def get(name: str) -> Path:
        return made[name](folder / f"{name}.gguf") if name in made else pico_model(name, **SHAPE)

    return get


def head_normed(path: Path, il: int, k: np.ndarray, eps: float) -> np.ndarray:
    """K [n, width] after the norm over each head (or over all of them) that some architectures have."""
    weight = next((t.data for t in gguf.GGUFReader(path).tensors if t.name == f"blk.{il % 3}.attn_k_norm.weight"), None)
    if weight is None:
        return k
    rows = k.astype(np.float64).reshape(-1, len(weight))
    return (rows / np.sqrt((rows**2).mean(1, keepdims=True) + eps) * weight).reshape(k.shape)


NAMES = [*pico.ARCHS, "fused", "fused with biases", "fused with separate biases", "nanbeige", "minimax-m2"]


@pytest.mark.parametrize("name", NAMES)
def test_projections_of_layer_inputs_are_what_the_cache_holds(name, variant):
    """V of every row; K of rows at position 0, where there is no rotation."""
    path = variant(name)
    projections = Projections(path)
    tokens = np.random.default_rng(1).integers(3, 259, N_ROWS).tolist()
    with lib.Model(path) as model, lib.Context(model, 64, type_k="f32", type_v="f32", flash_attn=False, n_threads=1) as ctx:
        assert model.n_layer == (6 if name == "nanbeige" else 3)
        assert model.unsupported() is None
        layers = range(model.n_layer)
        ctx.capture(layers)

        def both(il: int, n: int, what: str):
            """K or V of the last decode's n rows: the library's, and from its layer inputs."""
            kv = projections.project(il, ctx.layer_inputs(il))
            n_k, n_v = projections.widths(il)
            assert (n_k, n_v) == (64, 64)
            computed = head_normed(path, il, kv[:, :n_k], projections.eps) if what == "k" else kv[:, n_k:]
            return ctx.get_kv(0, il, what, 0, n).reshape(n, -1), computed

        ctx.decode(tokens)
        for il in layers:
            assert_close(*both(il, N_ROWS, "v"))
        for token in tokens[:5]:
            ctx.clear()
            ctx.decode([token])
            for il in layers:
                assert_close(*both(il, 1, "k"))


def assert_close(found: np.ndarray, computed: np.ndarray) -> None:
    size = np.abs(found).max()
    assert size > 0.5
    assert np.abs(computed - found).max() < 1e-5 * size


@pytest.mark.parametrize("ftype", ["f16", "q8_0"])
def test_quantised_weights_are_read(ftype, pico_model):
    exact, rounded = (Projections(pico_model("llama", **SHAPE, ftype=t)) for t in ("f32", ftype))
    x = np.random.default_rng(2).normal(size=(20, 128)).astype(np.float32)
    error = np.abs(exact.project(1, x) - rounded.project(1, x)).max()
    assert 0 < error < 0.05


def test_rms_normalise_is_that_of_the_definition():
    x = (np.random.default_rng(3).normal(size=(5, 64)) * [[1e-4], [1], [1e3], [0], [1e-2]]).astype(np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-5)
    assert np.allclose(rms_normalise(x, 1e-5), expected, rtol=1e-6)
    assert rms_normalise(x, 1e-5).dtype == np.float32


def test_models_that_cannot_be_projected_are_refused_by_name(pico_model, tmp_path):
    source = pico_model("llama", **SHAPE)

    def refusal(change=dict, **keys) -> str:
        path = rewritten(source, tmp_path / "x.gguf", change, **keys)
        with pytest.raises(RidgefillError) as e:
            Projections(path).layer(1)
        return str(e.value)

    assert re.fullmatch("architecture: expected one of llama, .*nanbeige, found gemma", refusal(arch="gemma"))
    assert refusal(attention__clamp_kqv=8.0).startswith("llama.attention.clamp_kqv: expected projections that are not clamped, found")
    missing = refusal(lambda t: {k: v for k, v in t.items() if k != "blk.1.attn_v.weight"})
    assert missing == "expected tensor blk.1.attn_v.weight in the model file, found none"
    narrow = refusal(lambda t: {**t, "blk.1.attn_k.weight": t["blk.1.attn_k.weight"][:32]})
    whole_numbers = refusal(lambda t: {**t, "blk.1.attn_k.weight": np.ones((64, 128), np.int8)})
    assert whole_numbers.startswith("blk.1.attn_k.weight: type I8 cannot be read here")
    assert narrow == "layer 1: expected 64 rows of K and 64 of V, found 96 in all"


def test_a_model_in_several_files_is_read_as_one(pico_model, tmp_path):
    source = pico_model("llama", **SHAPE)
    whole = {t.name: np.array(t.data) for t in gguf.GGUFReader(source).tensors}
    names = sorted(whole)
    for i, part in enumerate((names[:10], names[10:])):
        out = tmp_path / f"m-{i + 1:05d}-of-00002.gguf"
        rewritten(source, tmp_path / "part.gguf", lambda t: {k: t[k] for k in part})
        reader, w = gguf.GGUFReader(tmp_path / "part.gguf"), gguf.GGUFWriter(out, "llama")
        for name, f in reader.fields.items():
            if name.startswith("llama.") and i == 0:
                w.add_key_value(name, f.contents(), f.types[0])
        w.add_key_value("split.no", i, gguf.GGUFValueType.UINT16)
        w.add_key_value("split.count", 2, gguf.GGUFValueType.UINT16)
        for t in reader.tensors:
            w.add_tensor(t.name, np.array(t.data))
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
    x = np.random.default_rng(4).normal(size=(3, 128)).astype(np.float32)
    both, one = Projections(tmp_path / "m-00001-of-00002.gguf"), Projections(source)
    assert np.array_equal(both.project(2, x), one.project(2, x))
    assert np.array_equal(both.project(0, x), one.project(0, x))
