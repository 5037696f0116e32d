"""What llama-server refuses, and how it says so: damaged and foreign sidecars, files at the wrong flag, bad flags.

A sidecar that is refused never stops the server: it answers exactly, as if there were no maps.
"""
from __future__ import annotations

import os
import subprocess

import pytest

import sidecar_files
from server_util import Server, cold, llama_server, ridge_of, start_failure
from server_util import maps, model, plain, prompt  # noqa: F401  (fixtures)

# what the message about each kind of damage must say, its file's name apart; the pico model has 8 layers of width 256
DAMAGE = {
    "truncated": ["truncated"],
    "bit_flipped": ["sha256"],
    "wrong_architecture": ["architecture", "llama", "qwen3"],
    "wrong_width": ["length 288", "256"],
    "wrong_layer_count": ["9 layers", "8"],
    "other_tokenizer": ["tokenizer"],
    "nan_map": ["finite"],
    "duplicate_tensor": ["twice"],
    "unknown_version": ["version", "1", "2"],
    "lora_file": ["lora adapter", "ridge_maps"],
    "empty_file": ["empty"],
}


@pytest.fixture(scope="module")
def damaged(maps, tmp_path_factory):
    return sidecar_files.damaged_variants(maps, tmp_path_factory.mktemp("damaged"))


@pytest.fixture(scope="module")
def exact(plain, prompt):
    return plain.completion(prompt[:200], cache_prompt=False, n_probs=3)["completion_probabilities"]


def test_every_kind_of_damage_is_known(damaged):
    assert set(damaged) == set(DAMAGE)


def assert_refused_and_exact(server, prompt, exact, reason, names, path):
    lines = [line for line in server.log_text().splitlines() if "ridge" in line and "ridge: mode" not in line]
    assert len(lines) == 1, lines
    message = lines[0].replace(str(path), "").lower()
    assert str(path) in lines[0] and all(name in message for name in names), lines
    for ridge in ({}, {"mode": "fill"}):
        answer = server.completion(prompt[:200], ridge=ridge, cache_prompt=False, n_probs=3)
        assert answer["completion_probabilities"] == exact
        assert ridge_of(answer)["reason"] == reason and ridge_of(answer)["filled"] == 0
    p = server.get("/props")["ridge"]
    assert not p["loaded"] and p["reason"] == reason and p["message"] in lines[0]


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.field_report(4, "ridge-sidecar.cpp", "if (found != expected) {\n            throw", "if (false) {\n            throw")
@pytest.mark.field_report(21, "ridge-sidecar.cpp", "if (sc.n_embd != expect.embedding_length) {", "if (false) {")
@pytest.mark.field_report(22, "ridge-sidecar.cpp", "if (version != GGML_RIDGE_FORMAT_VERSION) {", "if (false) {")
@pytest.mark.field_report(23, "ridge-sidecar.cpp", "if (found != \"an adapter with adapter.type = 'ridge_maps'\") {", "if (false) {")
def test_refused_maps_leave_an_exact_server(model, damaged, prompt, exact, kind):
    with Server(model, maps=damaged[kind]) as s:
        assert_refused_and_exact(s, prompt, exact, "refused", DAMAGE[kind], damaged[kind])


def test_missing_file_leaves_an_exact_server(model, prompt, exact, tmp_path):
    with Server(model, maps=tmp_path / "none.gguf") as s:
        assert_refused_and_exact(s, prompt, exact, "refused", ["no such file"], tmp_path / "none.gguf")


def test_model_as_maps_leaves_an_exact_server(model, prompt, exact):
    with Server(model, maps=model) as s:
        assert_refused_and_exact(s, prompt, exact, "refused", ["model", "adapter"], model)


#
# prompts that run exactly although the maps are good
#


@pytest.mark.field_report(29, "server-ridge.cpp", 'return "lora";')
def test_prompts_under_a_lora_run_exactly(model, maps, prompt, exact, tmp_path):
    lora = sidecar_files.write_lora(tmp_path / "lora.gguf", arch="llama", n_embd=256)
    with Server(model, "--lora", lora, maps=maps) as s:
        for _ in range(2):
            answer = s.completion(prompt, cache_prompt=False)
            assert ridge_of(answer)["reason"] == "lora" and ridge_of(answer)["filled"] == 0
            # without it in this request, though the last batch still ran under it
            answer = s.completion(prompt, lora=[{"id": 0, "scale": 0}])
            assert ridge_of(answer)["reason"] is None and ridge_of(answer)["filled"] > 0


@pytest.mark.field_report(29, "server-ridge.cpp", '!params.control_vectors.empty() ? "control_vector" : "";', '"";')
def test_prompts_under_a_control_vector_run_exactly(model, maps, prompt, tmp_path):
    path = tmp_path / "control.gguf"
    sidecar_files.write_control_vector(path, arch="llama", n_embd=256)
    with Server(model, "--control-vector", path, maps=maps) as s:
        assert ridge_of(s.completion(prompt))["reason"] == "control_vector"
        assert s.get("/props")["ridge"]["reason"] == "control_vector"


def test_prompts_with_speculative_decoding_run_exactly(model, maps, prompt):
    with Server(model, "--spec-type", "ngram-simple", maps=maps) as s:
        assert ridge_of(s.completion(prompt))["reason"] == "speculative"


def test_a_model_that_cannot_be_filled_is_served_exactly(patched_lib, pico_model, maps, tmp_path):
    # smollm3 has llama's tensors and a graph without our hook
    raw = sidecar_files.read_raw(pico_model("llama").read_bytes())
    for kv in raw.kvs:
        kv.key = kv.key.replace("llama.", "smollm3.")
    raw.set("general.architecture", "smollm3")
    other = tmp_path / "smollm3.gguf"
    other.write_bytes(raw.to_bytes())
    with Server(other, maps=maps) as s:
        lines = [line for line in s.log_text().splitlines() if "every prompt runs exactly" in line]
        assert len(lines) == 1 and "smollm3" in lines[0]
        assert ridge_of(s.completion([5] * 300, "fill", n_predict=2))["reason"] == "unsupported"


#
# a file at the wrong flag
#


def test_field_report_1_rows_made_under_a_lora_are_not_reused_without_it(model, maps, prompt, tmp_path):
    """Upstream keeps them when the next request names no adapter."""
    lora = sidecar_files.write_lora(tmp_path / "lora.gguf", arch="llama", n_embd=256, scale=0.3)
    wanted = cold(model, maps, prompt, "off")
    with Server(model, "--lora-scaled", f"{lora}:0", "--cache-ram", 0, maps=maps) as s:
        for _ in range(2):
            under = s.completion(prompt, lora=[{"id": 0, "scale": 1}])
            assert ridge_of(under)["reason"] == "lora" and under["tokens"] != wanted
            assert s.completion(prompt, lora=[{"id": 0, "scale": 1}])["timings"]["prompt_n"] <= 1
            after = s.completion(prompt, "off")
            assert after["timings"]["cache_n"] == 0 and after["tokens"] == wanted
        s.completion(prompt, lora=[{"id": 0, "scale": 1}])
        assert ridge_of(s.completion(prompt, "fill"))["cached"] == 0


@pytest.mark.parametrize("flag", ["--lora", "--control-vector", "--model-draft"])
@pytest.mark.field_report(23, "common-ridge-args.cpp", 'refuse_maps("--lora", lora.path, "a LoRA adapter");')
def test_maps_at_another_flag_are_named(model, maps, flag):
    message = start_failure(model, flag, maps)
    assert "ridge maps" in message and "--ridge-maps" in message and flag in message and str(maps) in message


@pytest.mark.field_report(23, "common-ridge-args.cpp", 'refuse_maps("--model",       params.model.path,                       "a model");')
def test_maps_as_the_model_are_named(maps):
    message = start_failure(maps)
    assert "ridge maps" in message and "--ridge-maps" in message and "--model" in message


#
# flags
#


@pytest.mark.parametrize(
    "arguments, names",
    [
        (["--ridge-mode", "ful"], ["--ridge-mode", "ful", "identity"]),
        (["--ridge-tail", "0"], ["--ridge-tail", "'0'", "1 or more"]),
        (["--ridge-tail", "12x"], ["--ridge-tail", "'12x'"]),
        (["--ridge-tail", "99999999999"], ["--ridge-tail", "'99999999999'"]),
        (["--ridge-rows", "digit"], ["--ridge-rows", "digit", "random"]),
        (["--ridge-budget", "-1", "--ridge-rows", "digits"], ["--ridge-budget", "'-1'"]),
        (["--ridge-budget", "nan", "--ridge-rows", "digits"], ["--ridge-budget", "nan"]),
        (["--ridge-seed", "-3"], ["--ridge-seed", "'-3'"]),
        (["--ridge-min-prompt", "-1"], ["--ridge-min-prompt", "'-1'", "0 or more"]),
        (["--ridge-mode", "fill"], ["--ridge-mode fill", "--ridge-maps"]),
        (["--ridge-rows", "random"], ["--ridge-rows random", "--ridge-budget"]),
        (["--ridge-budget", "0.1"], ["--ridge-budget", "--ridge-rows"]),
        (["--ridge-hazard", "maybe"], ["--ridge-hazard", "'maybe'", "refill"]),
        (["--ridge-step-rows", "0"], ["--ridge-step-rows", "'0'"]),
        (["--ridge-seed", "3"], ["--ridge-seed", "--ridge-rows random"]),
        *((["--ridge-" + flag, value], ["--ridge-" + flag, "--ridge-maps"]) for flag, value in (
            ("tail", "64"), ("min-prompt", "64"), ("min-prompt", "0"), ("step-rows", "64"), ("hazard", "allow"), ("rows", "digits"))),
        (["--ridge-maps", "x.gguf", "--embeddings"], ["--ridge-maps", "--embeddings"]),
        (["--ridge-maps", "x.gguf", "--reranking"], ["--ridge-maps", "--reranking"]),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) and v[0].startswith("--") else "",
)
@pytest.mark.field_report(30, "common-ridge-args.cpp", "refuse_with_maps(params);")
def test_bad_flags_are_refused_by_name(model, arguments, names):
    message = start_failure(model, *arguments)
    assert all(name in message for name in names), message


def run(*arguments, **env) -> subprocess.CompletedProcess:
    return subprocess.run([llama_server.BINARY, *arguments], capture_output=True, text=True, timeout=60,
                          env={**os.environ, **env}, stdin=subprocess.DEVNULL)


def test_help_shows_every_flag_in_its_section(patched_lib):
    text = run("--help").stdout
    section = text[text.index("----- ridge params -----") :]
    for flag in ("maps", "mode", "tail", "rows", "budget", "seed", "min-prompt", "step-rows", "hazard"):
        assert f"--ridge-{flag}" in section
        assert f"LLAMA_ARG_RIDGE_{flag.upper().replace('-', '_')}" in section
        assert f"--ridge-{flag} " not in text[: text.index(section)]


def test_environment_sets_flags(patched_lib):
    p = run("-m", "none.gguf", LLAMA_ARG_RIDGE_TAIL="-5")
    assert p.returncode == 1 and "LLAMA_ARG_RIDGE_TAIL" in p.stderr and "'-5'" in p.stderr
