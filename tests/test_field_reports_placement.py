"""Field reports about where and in which types things lie: caches, maps, graphs of many layers, batches. Each request is sent twice."""
from __future__ import annotations

import ast
from pathlib import Path

import gguf
import numpy as np
import pytest

import sidecar_files
from conftest import ROOT
from ridgefill import lib
from server_util import N, Server, prompt_tokens, random_maps, ridge_of, start_failure
from server_util import maps, model, plain, prompt  # noqa: F401  (fixtures)

#
# types of the cache
#

# how far K and V of the first layer, which see no cache, may lie from those in f32, as a share of their deviation
KV_ERROR = {"f32": 0.001, "f16": 0.001, "bf16": 0.01, "q8_0": 0.02, "q5_1": 0.08, "q5_0": 0.1, "q4_1": 0.15, "q4_0": 0.2}
UNQUANTISED = ("f32", "f16", "bf16")


def filled_rows(m: lib.Model, loaded: lib.Maps, kv: str, flash: bool) -> tuple[list[np.ndarray], list[str]]:
    """K and V of every layer after a fill, read back as numbers, and the types they lay in."""
    types = [kv, kv if flash or kv in UNQUANTISED else "f16"]  # upstream refuses other values without flash attention
    tokens = np.random.default_rng(3).integers(3, 280, 200).tolist()
    with lib.Context(m, 512, n_batch=128, n_ubatch=64, n_threads=1, flash_attn=flash, type_k=types[0], type_v=types[1]) as ctx:
        for _ in range(2):
            ctx.clear()
            logits, p = ctx.fill_and_decode(tokens, mode="fill", maps=loaded, n_tail=32)
            assert len(p.filled) > 100 and np.isfinite(logits).all()
        return [ctx.get_kv(0, il, what, 0, len(tokens)) for il in range(m.n_layer) for what in "kv"], types


@pytest.mark.field_report(25, "llama-ridge-kv.cpp", "derotate(kv.attn_rot_hadamard.at(n_rot), n_rot, dst + r*n, n);")
@pytest.mark.parametrize("flash", [True, False], ids=["fa", "nofa"])
@pytest.mark.parametrize("kv", KV_ERROR)
def test_field_report_25_a_fill_writes_its_rows_into_caches_of_every_type(model, maps, kv, flash):
    """Rotated or not, transposed or not: what is read back is what an f32 cache holds, and every filled row holds something."""
    with lib.Model(model) as m, lib.Maps(m, maps) as loaded:
        wanted, _ = filled_rows(m, loaded, "f32", True)
        found, types = filled_rows(m, loaded, kv, flash)
    for a, b, kind in zip(wanted[:2], found[:2], types, strict=True):
        assert np.abs(a - b).mean() <= KV_ERROR[kind] * a.std(), kind
    assert all(rows.std(axis=(1, 2)).min() > 0 for rows in found)


@pytest.mark.field_report(25)
@pytest.mark.parametrize("keys, values, flash", [
    ("q8_0", "q8_0", "on"), ("q4_0", "q4_1", "on"), ("iq4_nl", "iq4_nl", "on"), ("q5_1", "q5_0", "on"), ("bf16", "bf16", "on"), ("q8_0", "f16", "off"), ("f32", "f32", "off"),
])  # fmt: skip
def test_field_report_25_the_server_fills_with_caches_of_every_type(model, maps, prompt, keys, values, flash):
    """Values without flash attention must be unquantised, see the next test."""
    with Server(model, "-ctk", keys, "-ctv", values, "-fa", flash, maps=maps) as s:
        for _ in range(2):
            off, plumb = (s.completion(prompt, mode, cache_prompt=False, n_predict=4, n_probs=3)["completion_probabilities"] for mode in ("off", "plumb"))
            assert off == plumb
            filled = s.completion(prompt, "fill", cache_prompt=False, n_predict=4, n_probs=3)
            assert ridge_of(filled)["filled"] > 0 and filled["completion_probabilities"] != off


@pytest.mark.field_report(26)
@pytest.mark.parametrize("kv", ["q8_0", "q4_0"])
def test_field_report_26_quantised_values_without_flash_attention_are_refused_by_name(model, maps, kv):
    """Upstream's check: the server says what it needs, and does not end on a signal."""
    message = start_failure(model, "--ridge-maps", maps, "-ctv", kv, "-fa", "off").lower()
    assert "quantized v cache" in message and "flash_attn" in message.replace("flash attention", "flash_attn")


#
# graphs
#


def lora_for_all(path, n_layer: int, n_embd: int) -> None:
    """A LoRA with two small random factors for every projection of the attention's output."""
    w, rng = gguf.GGUFWriter(path, "llama"), np.random.default_rng(4)
    w.add_type("adapter")
    w.add_string("adapter.type", "lora")
    w.add_float32("adapter.lora.alpha", 4.0)
    for il in range(n_layer):
        w.add_tensor(f"blk.{il}.attn_output.weight.lora_a", rng.standard_normal((4, n_embd), np.float32) / 8)
        w.add_tensor(f"blk.{il}.attn_output.weight.lora_b", rng.standard_normal((n_embd, 4), np.float32) / 8)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


@pytest.mark.field_report(17, "llama-ridge-maps.cpp", "const ggml_init_params params = { 3*n_layer*ggml_tensor_overhead(), nullptr, true };", "const ggml_init_params params = { n_layer*ggml_tensor_overhead(), nullptr, true };")
@pytest.mark.parametrize("kind", sidecar_files.KINDS)
def test_field_report_17_a_model_of_70_layers_with_maps_and_loras_builds_its_graphs(pico_model, tmp_path, kind):
    """Two LoRAs for every layer, at work in one request and not in the next: exact under them, filled without."""
    deep = pico_model("llama", ftype="f16", n_layer=70, head=32, n_head=2, n_head_kv=1)
    loras = [tmp_path / f"lora{i}.gguf" for i in range(2)]
    for path in loras:
        lora_for_all(path, 70, 64)
    with Server(deep, "--lora", f"{loras[0]},{loras[1]}", maps=random_maps(deep, tmp_path, split=20, kind=kind)) as s:
        p = prompt_tokens(s, 300)
        for _ in range(2):
            under = s.completion(p, "fill", cache_prompt=False, n_predict=4)
            assert ridge_of(under)["reason"] == "lora" and ridge_of(under)["filled"] == 0
            without = s.completion(p, "fill", cache_prompt=False, n_predict=4, lora=[{"id": 0, "scale": 0}, {"id": 1, "scale": 0}])
            assert ridge_of(without)["reason"] is None and ridge_of(without)["filled"] > 0


#
# placement
#


@pytest.mark.field_report(38, "llama-ridge-maps.cpp", "map.b    = place(allocs, ggml_backend_dev_buffer_type(model.dev_layer(il)), ggml_ridge_sidecar_bias(sc, il), n_layer);", "map.b    = nullptr;")
def test_field_report_38_results_do_not_depend_on_where_tensors_lie(model, maps, prompt):
    """On one device here: the maps follow their layer whatever buffers the model is in."""
    answers = {}
    for flags in ((), ("-ot", r"blk\.[4-7]\.=CPU"), ("--no-kv-offload",), ("--load-mode", "none"), ("--no-repack",), ("-sm", "none")):
        with Server(model, *flags, maps=maps) as s:
            for mode in ("off", "fill"):
                first, again = (s.completion(prompt, mode, cache_prompt=False, n_predict=8) for _ in range(2))
                assert first["tokens"] == again["tokens"] and (ridge_of(first)["filled"] > 0) == (mode == "fill")
                assert answers.setdefault(mode, first["tokens"]) == first["tokens"], flags
    assert answers["off"] != answers["fill"]


#
# equality
#


@pytest.mark.field_report(34, "server_util.py", '"-b", BATCH, "-ub", UBATCH, "-t", 1, "-tb", 1,')
def test_field_report_34_batches_and_threads_are_fixed_where_answers_are_compared(plain):
    """Of every server that tests make; another batch gives other bits, as test_a_moved_cut_differs of test_plumb.py shows."""
    command = Path(f"/proc/{plain.process.pid}/cmdline").read_bytes().decode().split("\0")
    assert {"-b", "-ub", "-t", "-tb"} <= set(command)
    for path in (ROOT / "tests").glob("test_*.py"):
        made = [ast.unparse(c.func) for c in ast.walk(ast.parse(path.read_text())) if isinstance(c, ast.Call)]
        assert not [m for m in made if m.endswith("LlamaServer")], f"{path.name}: servers of tests are server_util.Server"
