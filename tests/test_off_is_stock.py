"""The patched library without ridge is the unpatched library, to the bit.

The same program (this file, run as a script) runs in two processes, one per library, and prints a hash over the bytes of
all logits of a prompt and of a few generated tokens. Nothing of ridgefill is imported in it: it must run with upstream's
library alone. Batch, ubatch and threads are fixed per case; between two sizes the logits may differ, between the two
libraries they may not.
"""
from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import sys

import pytest

N_PROMPT, N_GENERATED = 150, 6

# name, model, type, keywords of the pico model, context settings
CASES = [
    ("smollm2-q4_1-fa",      "smollm2", None, {}, dict(flash=True,  n_batch=128, n_ubatch=64)),
    ("smollm2-q4_1-nofa",    "smollm2", None, {}, dict(flash=False, n_batch=128, n_ubatch=64)),
    ("smollm2-q4_1-ubatch",  "smollm2", None, {}, dict(flash=True,  n_batch=512, n_ubatch=96)),
    ("smollm2-q4_1-kv-q8_0", "smollm2", None, {}, dict(flash=True,  n_batch=128, n_ubatch=64, kv="q8_0")),
    ("llama-f16-fa",         "llama", "f16",  {}, dict(flash=True,  n_batch=128, n_ubatch=64)),
    ("llama-f16-nofa",       "llama", "f16",  {}, dict(flash=False, n_batch=128, n_ubatch=64)),
    ("llama-f16-ubatch",     "llama", "f16",  {}, dict(flash=True,  n_batch=512, n_ubatch=96)),
    ("llama-q8_0-fa",        "llama", "q8_0", {}, dict(flash=True,  n_batch=128, n_ubatch=64)),
    ("llama-q8_0-head32",    "llama", "q8_0", {"head": 32}, dict(flash=True, n_batch=128, n_ubatch=64, kv="q8_0")),
    ("qwen2-f32-fa",         "qwen2", "f32",  {}, dict(flash=True,  n_batch=128, n_ubatch=64)),
    ("qwen2-q8_0-nofa",      "qwen2", "q8_0", {}, dict(flash=False, n_batch=128, n_ubatch=64)),
    ("qwen3-f16-fa",         "qwen3", "f16",  {}, dict(flash=True,  n_batch=128, n_ubatch=64)),
    ("qwen3-q8_0-nofa",      "qwen3", "q8_0", {}, dict(flash=False, n_batch=512, n_ubatch=96)),
    ("qwen3moe-f16-fa",      "qwen3moe", "f16",  {}, dict(flash=True,  n_batch=128, n_ubatch=64)),
    ("qwen3moe-q8_0-nofa",   "qwen3moe", "q8_0", {}, dict(flash=False, n_batch=128, n_ubatch=64)),
    ("mistral3-f16-fa",      "mistral3", "f16",  {}, dict(flash=True,  n_batch=128, n_ubatch=64)),
    ("mistral3-temperature", "mistral3", "q8_0", {"temperature": True}, dict(flash=False, n_batch=128, n_ubatch=64)),
]


def run_case(path: str, *, flash: bool, n_batch: int, n_ubatch: int, kv: str = "f16") -> dict:
    """Decode a prompt with logits for every row, then greedy tokens one by one. Hash of all logits, and the tokens."""
    import llama_cpp
    import numpy as np

    mparams = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(path.encode(), mparams)
    assert model, f"{path} does not load"
    n_vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    cparams = llama_cpp.llama_context_default_params()
    cparams.n_ctx, cparams.n_batch, cparams.n_ubatch = 512, n_batch, n_ubatch
    cparams.n_threads = cparams.n_threads_batch = 1
    cparams.flash_attn_type = int(flash)
    cparams.type_k = cparams.type_v = llama_cpp.GGML_TYPE_Q8_0 if kv == "q8_0" else llama_cpp.GGML_TYPE_F16
    ctx = llama_cpp.llama_init_from_model(model, cparams)
    assert ctx, "no context"

    rng = np.random.default_rng(7)
    prompt = [int(t) for t in rng.integers(3, min(n_vocab, 280), N_PROMPT)]
    digest, generated, spread = hashlib.sha256(), [], []

    def decode(tokens: list[int], pos0: int) -> np.ndarray:
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, pos0 + i, 1, 0, 1
        rc = llama_cpp.llama_decode(ctx, batch)
        assert rc == 0, f"llama_decode: {rc}"
        rows = llama_cpp.llama_get_logits(ctx)
        out = np.ctypeslib.as_array(rows, shape=(len(tokens) * n_vocab,)).copy().reshape(len(tokens), n_vocab)
        llama_cpp.llama_batch_free(batch)
        digest.update(out.tobytes())
        return out

    for i in range(0, N_PROMPT, n_batch):
        out = decode(prompt[i:i + n_batch], i)
        spread.append(float(out.std()))
    for pos in range(N_PROMPT, N_PROMPT + N_GENERATED):
        generated.append(int(out[-1].argmax()))
        out = decode(generated[-1:], pos)

    llama_cpp.llama_free(ctx)
    llama_cpp.llama_model_free(model)
    return {"sha256": digest.hexdigest(), "generated": generated, "spread": min(spread)}


def worker() -> None:
    """Cases from standard input, one result per case on standard output."""
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, ctypes.c_void_p(0))
    results = {name: run_case(path, **settings) for name, path, settings in json.load(sys.stdin)}
    json.dump(results, sys.stdout)


def run_library(folder: str, cases: list) -> dict:
    """Results of all cases with the libllama of `folder`."""
    env = {**os.environ, "LLAMA_CPP_LIB_PATH": str(folder), "LD_LIBRARY_PATH": str(folder)}
    p = subprocess.run([sys.executable, __file__], input=json.dumps(cases), env=env, capture_output=True, text=True)
    assert p.returncode == 0, f"with {folder}:\n{p.stderr[-3000:]}"
    return json.loads(p.stdout)


@pytest.fixture(scope="module")
def both(pico_model, smollm2, patched_lib, stock_lib):
    cases = []
    for name, arch, ftype, shape, settings in CASES:
        path = smollm2 if arch == "smollm2" else pico_model(arch, ftype=ftype, **shape)
        cases.append((name, str(path), settings))
    return run_library(stock_lib, cases), run_library(patched_lib, cases)


@pytest.mark.parametrize("name", [c[0] for c in CASES])
def test_same_bytes(both, name):
    stock, patched = (r[name] for r in both)
    assert stock["spread"] > 0.1, "degenerate logits prove nothing"
    assert patched == stock


def test_hash_sees_the_settings(both):
    """Cases of another model, attention or cache type have another hash. (Another ubatch may give the same bits.)"""
    groups: dict[tuple, set[str]] = {}
    for name, arch, ftype, shape, settings in CASES:
        key = (arch, ftype, *shape.items(), settings["flash"], settings.get("kv"))
        groups.setdefault(key, set()).add(both[0][name]["sha256"])
    for key, hashes in groups.items():
        others = set().union(*(h for k, h in groups.items() if k != key))
        assert not hashes & others, key
    assert len(groups) >= 12


if __name__ == "__main__":
    worker()
