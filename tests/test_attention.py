"""Attention computed from captured layer inputs against the library's, for every architecture and way of rotation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ridgefill import lib
from ridgefill.attention import Attention
from ridgefill.errors import RidgefillError
from test_projections import NAMES, SHAPE, assert_close, library, rewritten, variant  # noqa: F401  (fixtures too)

N_ROWS = 150  # more than the 64 tokens after which mistral3's temperature grows here


def without_ffn(tensors: dict) -> dict:
    """What a layer adds to its input is then what attention does."""
    return {name: np.zeros_like(t) if ".ffn_down" in name else t for name, t in tensors.items()}


def scaled(tensors: dict) -> dict:
    return {**tensors, "rope_freqs.weight": np.linspace(1, 8, SHAPE["head"] // 2, dtype=np.float32)}


@pytest.fixture(scope="module")
def any_model(variant, pico_model, tmp_path_factory):  # noqa: F811
    """get(name) -> path: the models of test_projections, and some with other rotations."""
    folder = tmp_path_factory.mktemp("rotations")
    made = {
        "yarn and temperature": lambda p: pico_model("mistral3", temperature=True, **SHAPE),
        "yarn multiplier": lambda p: rewritten(
            pico_model("mistral3", temperature=True, **SHAPE), p, dict,
            rope__scaling__yarn_log_multiplier=0.5, rope__scaling__yarn_beta_fast=4.0, rope__scaling__yarn_beta_slow=2.0,
        ),
        "linear scaling": lambda p: rewritten(pico_model("qwen3", **SHAPE), p, dict, rope__scaling__factor=4.0),
        "frequency factors": lambda p: rewritten(pico_model("llama", **SHAPE), p, scaled),
        "part of a head": lambda p: rewritten(variant("minimax-m2"), p, dict, rope__dimension_count=16),
    }  # fmt: skip
    return lambda name: Path(made[name](folder / f"{name}.gguf")) if name in made else variant(name)


ROTATIONS = ["yarn and temperature", "yarn multiplier", "linear scaling", "frequency factors", "part of a head"]


@pytest.mark.parametrize("name", [*NAMES, *ROTATIONS])
def test_keys_and_attention_output_are_the_librarys(name, any_model, tmp_path):
    """K as the cache holds it, and the difference of two layers' inputs where there is no feed-forward."""
    path = rewritten(any_model(name), tmp_path / "m.gguf", without_ffn)
    attention, at = Attention(path), np.arange(N_ROWS)
    tokens = np.random.default_rng(1).integers(3, 259, N_ROWS).tolist()
    with lib.Model(path) as model, lib.Context(model, 256, type_k="f32", type_v="f32", flash_attn=False, n_threads=1) as ctx:
        layers = range(model.n_layer)
        ctx.capture(layers)
        ctx.decode(tokens)
        x = {il: ctx.layer_inputs(il) for il in layers}
        for il in layers:
            attention.check(il)
            n_k, _ = attention.widths(il)
            kv = attention.project(il, x[il])
            keys = attention.keys(il, attention.head_norm(il, "k", kv[:, :n_k]))
            assert_close(ctx.get_kv(0, il, "k", 0, N_ROWS), keys)
            if il + 1 == model.n_layer or (name == "nanbeige" and (il + 1) % 3 == 0):
                continue  # the output is normed before it is the next input
            out = attention.output(il, attention.queries(il, x[il], at), at, keys, kv[:, n_k:])
            some = np.array([5, 77, N_ROWS - 1])
            few = attention.output(il, attention.queries(il, x[il][some], some), some, keys, kv[:, n_k:])
            assert np.abs(few - out[some]).max() < 1e-5 * np.abs(out).max()
            found = x[il + 1] - x[il]
            assert np.abs(out).max() > 0.5
            assert np.abs(out - found).max() < 2e-5 * max(np.abs(found).max(), np.abs(x[il + 1]).max())


def test_types_that_cannot_be_read_are_named_without_loading_a_layer(pico_model, tmp_path):
    whole = rewritten(pico_model("llama", **SHAPE), tmp_path / "m.gguf", lambda t: {**t, "blk.1.attn_output.weight": np.ones((128, 128), np.int8)})
    attention = Attention(whole)
    attention.check(0)
    with pytest.raises(RidgefillError, match="blk.1.attn_output.weight: type I8 cannot be read here"):
        attention.check(1)
