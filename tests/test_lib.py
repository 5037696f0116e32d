"""The bindings: models, decoding, layer inputs, prefills and selectors, against the GGUF file and against each other."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from ridgefill import lib, native
from ridgefill.errors import RidgeError

ROOT = Path(__file__).resolve().parents[1]
TEXT = "the ring and the sword is worn at the inn; the 27 others are in 3 towers. " * 40


@pytest.fixture(scope="module")
def model(patched_lib, pico_model):
    lib.load(patched_lib)
    with lib.Model(pico_model("llama", n_layer=5), use_extra_bufts=False) as m:
        yield m


@pytest.fixture
def ctx(model):
    with lib.Context(model, 1024, n_batch=256, n_ubatch=64, n_threads=1) as c:
        yield c


@pytest.fixture(scope="module")
def tokens(model):
    return model.tokenize(TEXT)[:300]


def tensor(model, name: str) -> np.ndarray:
    return next(np.array(t.data) for t in gguf.GGUFReader(model.path).tensors if t.name == name)


def test_model_reports_what_the_file_says(model):
    fields = {k: f.contents() for k, f in gguf.GGUFReader(model.path).fields.items()}
    assert model.architecture == fields["general.architecture"] == "llama"
    assert (model.n_layer, model.n_embd) == (fields["llama.block_count"], fields["llama.embedding_length"])
    assert (model.n_head, model.n_head_kv) == (fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"])
    assert model.head_size == fields["llama.attention.key_length"]
    assert model.n_vocab == len(fields["tokenizer.ggml.tokens"])
    assert model.meta("general.name") == fields["general.name"]
    assert model.meta("no.such.key") is None
    assert model.meta("tokenizer.chat_template") == fields["tokenizer.chat_template"]  # longer than the first buffer or not


def test_tokens_and_pieces_give_the_text_back(model):
    text = "the thin inn, 42 rings — über is\n"
    assert model.detokenize(model.tokenize(text)) == text
    assert b"".join(model.piece(t) for t in model.tokenize(text)) == text.encode()
    assert model.tokenize("") in ([], [model.bos])


def test_chat_template_holds_every_message(model):
    text = model.chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "x" * 5000}])
    assert text == f"<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\n{'x' * 5000}<|im_end|>\n<|im_start|>assistant\n"
    special = model.tokenize(text, parse_special=True)
    assert model.piece(special[0]) == b"<|im_start|>" and model.piece(special[0], special=False) == b""


def test_fingerprint_names_the_model_and_the_split(model):
    fp = model.fingerprint(2)
    assert (fp["architecture"], fp["block_count"], fp["embedding_length"]) == ("llama", model.n_layer, model.n_embd)
    assert any(name.startswith("blk.2.") for name in fp["anchors"])
    assert fp["anchors"] != model.fingerprint(3)["anchors"]
    assert {k: v for k, v in fp.items() if k != "anchors"} == {k: v for k, v in model.fingerprint(3).items() if k != "anchors"}


def test_logits_last_all_and_chosen_rows_are_the_same_rows(model, ctx, tokens):
    n = 64  # one ubatch, so that each row is computed by the same kernels
    every = ctx.decode(tokens[:n], logits="all")
    assert every.shape == (n, model.n_vocab) and every.dtype == np.float32
    ctx.clear()
    assert ctx.decode(tokens[:n], logits="none").shape == (0, model.n_vocab)
    ctx.clear()
    assert np.allclose(ctx.decode(tokens[:n])[0], every[-1], atol=1e-4)
    ctx.clear()
    assert np.allclose(ctx.decode(tokens[:n], logits=[3, 40]), every[[3, 40]], atol=1e-4)
    assert np.abs(every[3] - every[40]).max() > 0.1


def test_decode_in_batches_continues_positions(ctx, tokens):
    """300 rows at n_batch 256 are two batches; so are two calls cut at the same place."""
    whole = ctx.decode(tokens, logits="all")
    assert ctx.seq_pos_max() == 299
    ctx.clear()
    assert ctx.seq_pos_max() == -1
    first, second = ctx.decode(tokens[:256], logits="all"), ctx.decode(tokens[256:], pos0=256, logits="all")
    assert np.array_equal(whole, np.concatenate([first, second]))


def test_sequences_are_apart_and_can_be_removed(model, tokens):
    with lib.Context(model, 1024, n_seq_max=2, n_threads=1) as c:
        a = c.decode(tokens[:50], seq=1)
        c.decode(tokens[100:180], seq=0)
        assert (c.seq_pos_max(0), c.seq_pos_max(1)) == (79, 49)
        assert c.seq_rm(0, 70) and c.seq_pos_max(0) == 69
        assert c.seq_rm(1) and c.seq_pos_max(1) == -1
        assert np.allclose(c.decode(tokens[:50], seq=1), a, atol=1e-4)


def test_layer_inputs_are_the_residual_stream(model, ctx, tokens):
    """Layer 0 reads the token embeddings, bit by bit; deeper ones do not; rows of both batches are there, in order."""
    ctx.capture([0, 3])
    ctx.decode(tokens, logits="none")
    embeddings = tensor(model, "token_embd.weight")
    assert np.array_equal(ctx.layer_inputs(0), embeddings[tokens])
    deep = ctx.layer_inputs(3)
    assert deep.shape == (300, model.n_embd)
    assert np.abs(deep - embeddings[tokens]).max() > 0.1
    with pytest.raises(RidgeError, match="layer 2 was not captured"):
        ctx.layer_inputs(2)
    ctx.capture([2])
    ctx.clear()
    ctx.decode(tokens[:10], logits="none")
    assert ctx.layer_inputs(2).shape == (10, model.n_embd)
    with pytest.raises(RidgeError, match="layer 3 was not captured"):
        ctx.layer_inputs(3)


@pytest.mark.parametrize("layer", [-1, 5])
def test_capture_of_a_layer_that_does_not_exist_is_refused(ctx, layer):
    with pytest.raises(RidgeError, match=rf"expected layers 0..4, found \[{layer}\]"):
        ctx.capture([layer])


def test_plumb_then_decode_equals_decode(ctx, tokens):
    stock = ctx.decode(tokens[:256])
    ctx.clear()
    logits, prefill = ctx.fill_and_decode(tokens[:256], mode="plumb", split=2, n_tail=64)
    assert np.array_equal(logits, stock)
    assert prefill.stats["n_filled"] == 0 and prefill.stats["n_exact"] == 256
    assert prefill.n_done == prefill.stats["n_done"] == 192


def test_prefill_counts_its_rows(ctx, tokens):
    prefill = ctx.prefill(tokens, mode="identity", split=2, n_tail=64, n_sink=4, exact_rows=[100, 50, 100])
    assert not prefill.step()
    prefill.run()
    filled = prefill.filled.tolist()
    assert filled == [r for r in range(4, 300 - 64) if r not in (50, 100)]
    stats = prefill.stats
    assert (stats["n_rows"], stats["n_filled"], stats["n_exact"]) == (300, len(filled), 300 - len(filled))
    assert stats["i_step"] == stats["n_steps"]
    assert ctx.seq_pos_max() == prefill.n_done - 1


def test_cancel_removes_the_rows(ctx, tokens):
    prefill = ctx.prefill(tokens, mode="identity", split=2, n_tail=64)
    prefill.step()
    prefill.cancel()
    assert ctx.seq_pos_max() == -1
    prefill.close()
    with pytest.raises(RidgeError, match="this Prefill is closed"):
        prefill.step()


def test_get_kv_reads_the_rows_asked_for(model, ctx, tokens):
    ctx.decode(tokens[:20])
    k = ctx.get_kv(0, 1, "k", 0, 20)
    assert k.shape == (20, model.n_head_kv, model.head_size) and np.isfinite(k).all()
    assert np.array_equal(ctx.get_kv(0, 1, "k", 5, 9), k[5:9])
    assert np.abs(ctx.get_kv(0, 1, "v", 0, 20) - k).max() > 0.01
    # values of layer 0 follow from the file: V = W_v rms_norm(x) * w
    x = tensor(model, "token_embd.weight")[tokens[:20]].astype(np.float64)
    x /= np.sqrt((x * x).mean(1, keepdims=True) + float(model.meta("llama.attention.layer_norm_rms_epsilon")))
    v = (x * tensor(model, "blk.0.attn_norm.weight")) @ tensor(model, "blk.0.attn_v.weight").T
    found = ctx.get_kv(0, 0, "v", 0, 20).reshape(20, -1)
    assert np.abs(found - v).max() < 2e-3 * np.abs(v).max()  # the cache holds f16


def test_errors_name_expected_and_found(model, ctx, tokens, tmp_path):
    with pytest.raises(RidgeError, match="no such model file: /no/such.gguf"):
        lib.Model("/no/such.gguf")
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(RidgeError, match="text.gguf could not be loaded as a model: .+"):
        lib.Model(tmp_path / "text.gguf")
    with pytest.raises(RidgeError, match="type_k: expected one of f32, .* found 'q9'"):
        lib.Context(model, 64, type_k="q9")
    with pytest.raises(RidgeError, match="mode: expected off, .* found 'magic'"):
        ctx.prefill(tokens, mode="magic")
    with pytest.raises(RidgeError, match="logits: expected 'last', .* found 'first'"):
        ctx.decode(tokens, logits="first")
    with pytest.raises(RidgeError, match="expected at least one token"):
        ctx.decode([])
    with pytest.raises(RidgeError) as e:
        ctx.prefill(tokens, mode="identity", split=5)
    assert e.value.status == -1 and "5" in str(e.value)
    with pytest.raises(RidgeError) as e:
        lib.Maps(model, tmp_path / "text.gguf")
    assert "text.gguf" in str(e.value)
    with pytest.raises(RidgeError, match="no free cells"):
        ctx.decode(tokens * 4)


def test_greedy_takes_the_likeliest_token_each_time(model, ctx, tokens):
    logits = ctx.decode(tokens[:30])
    out = lib.greedy(ctx, logits[0], 5, stop_at_eog=False)
    assert ctx.seq_pos_max() == 30 + 5 - 2  # the last token is returned, not run
    ctx.clear()
    every = ctx.decode(tokens[:30] + out[:-1], logits="all")
    assert out == every[29:].argmax(1).tolist()
    end = np.full(model.n_vocab, -1.0)
    end[model.eos] = 1.0
    assert lib.greedy(ctx, end, 5) == []


def test_selectors_reach_the_library(model):
    tokens = model.tokenize("the 7 rings and 12 inns are 3")
    holds = {i for i, t in enumerate(tokens) if any(48 <= b <= 57 for b in model.piece(t))}
    digits = [i for i in range(len(tokens)) if i in holds or i - 1 in holds]
    assert len(digits) >= 3
    assert lib.select_rows("digits", model, tokens, 0, len(tokens)) == digits
    assert lib.select_rows("digits", model, tokens, digits[0] + 1, len(tokens), budget=1) == digits[-1:]
    drawn = lib.select_rows("random", model, tokens, 2, len(tokens), budget=4, seed=9)
    assert len(drawn) == 4 and drawn == sorted(set(drawn)) and drawn[0] >= 2
    assert drawn == lib.select_rows("random", model, tokens, 2, len(tokens), budget=4, seed=9)
    assert any(drawn != lib.select_rows("random", model, tokens, 2, len(tokens), budget=4, seed=s) for s in range(10, 20))
    assert lib.select_rows("none", model, tokens, 0, len(tokens), budget=4) == []
    with pytest.raises(RidgeError, match="rows: expected none, random or digits, found 'best'"):
        lib.select_rows("best", model, tokens, 0, 3)
    with pytest.raises(RidgeError, match="budget: .* found -1"):
        lib.select_rows("random", model, tokens, 0, 3, budget=-1)
    with pytest.raises(RidgeError, match="row1 99"):
        lib.select_rows("random", model, tokens, 0, 99)


def test_log_can_be_captured(model, tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with lib.captured_log() as lines:
        with pytest.raises(RidgeError):
            lib.Model(tmp_path / "x.gguf")
    assert any(level == native.LOG_LEVELS["error"] for level, _ in lines)
    n = len(lines)
    with pytest.raises(RidgeError):
        lib.Model(tmp_path / "x.gguf")
    assert len(lines) == n


def run_python(code: str, *options: str, **env) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), **env}
    return subprocess.run([sys.executable, *options, "-c", code], env=env, capture_output=True, text=True)


def test_a_missing_library_names_the_places_looked_at(tmp_path):
    code = "from ridgefill.native import load\nfrom ridgefill.errors import RidgeError\ntry: load()\nexcept RidgeError as e: print(e)"
    assert f"{tmp_path} (RIDGE_LIB_DIR)" in run_python(code, RIDGE_LIB_DIR=str(tmp_path)).stdout
    # a copy of the package that is neither installed with libraries nor in a checkout
    shutil.copytree(ROOT / "python" / "ridgefill", tmp_path / "ridgefill")
    # -S: without site-packages, where an editable install would lead back to the checkout
    out = run_python(code, "-S", RIDGE_LIB_DIR="", PYTHONPATH=str(tmp_path)).stdout
    assert f"{tmp_path / 'ridgefill' / 'bin'} (the installed package)" in out and "RIDGE_LIB_DIR" in out


def test_one_process_holds_one_library(patched_lib, model, tmp_path):
    (tmp_path / "libllama.so").touch()
    (tmp_path / "libllama.dylib").touch()
    with pytest.raises(RidgeError, match="loaded from .* already"):
        lib.load(tmp_path)
    assert lib.load() is lib.load(patched_lib)


def test_an_unpatched_library_serves_what_is_upstreams(stock_lib, model):
    code = f"""
from ridgefill import lib
from ridgefill.errors import RidgeError
with lib.Model({model.path!r}) as m, lib.Context(m, 256, n_threads=1) as c:
    t = m.tokenize("the ring")
    c.capture([1])
    print(c.decode(t).shape == (1, m.n_vocab), c.layer_inputs(1).shape == (len(t), m.n_embd), lib.is_patched())
    try: c.prefill(t, mode="plumb", split=1)
    except RidgeError as e: print(e)
"""
    p = run_python(code, RIDGE_LIB_DIR=str(stock_lib))
    assert p.returncode == 0, p.stderr
    assert p.stdout.splitlines()[0] == "True True False"
    assert "built without the RidgeFill patch" in p.stdout.splitlines()[1]
