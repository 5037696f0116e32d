"""The calls of `ridgefill.Llama`: which keywords reach a prompt, what is refused, what runs exactly and why, what docs/BINDINGS.md says."""
from __future__ import annotations

import ctypes
import dataclasses
import gc
import inspect
import os
import pickle
import re
import runpy
import subprocess
import sys
import time

import numpy as np
import pytest

import server_util
import sidecar_files
from bindings_util import RIDGE, ROOT, answer, counts, environment, same
from bindings_util import exact, filled, llm, make, maps, model, prompt, shared, texts  # noqa: F401  (fixtures)
from ridgefill.errors import RidgeError
from server_util import BATCH, N, TAIL, random_maps


#
# calls
#


def test_eval_fills_when_asked(llm, prompt, texts, filled):
    from llama_cpp import llama_get_logits

    llm.eval(prompt, ridge_mode="fill")
    assert counts(llm) == (N - TAIL - 4, TAIL + 4, 0, None)
    logits = np.ctypeslib.as_array(llama_get_logits(llm.ctx), (llm.n_vocab(),)).copy()
    assert logits.tobytes() == filled["fill"][1][0].tobytes()
    tokens = []
    for _ in range(4):
        tokens.append(llm.sample(temp=0.0))
        llm.eval(tokens[-1:])
    assert tokens == filled["fill"][0][:4]
    # what the call says nothing about is as upstream has it
    llm.reset()
    llm.eval(prompt)
    assert llm.ridge_last.rows == N and llm.n_tokens == N
    answer(llm, prompt + [5], n=1, ridge_mode="off")
    assert counts(llm) == (0, 1, N, "off")
    # and what it writes over is forgotten
    answer(llm, prompt[:10] + prompt[20:], n=1)
    assert counts(llm)[0] > 0
    llm.n_tokens = 3
    llm.eval(texts[900:1200])
    answer(llm, prompt[:3] + texts[900:1200] + [5], n=1, ridge_mode="off")
    assert counts(llm) == (0, 1, 303, "off")


def test_exact_rows_are_not_put_behind_filled_ones(llm, prompt, texts):
    llm.eval(prompt, ridge_mode="fill")
    n = llm.n_tokens
    for call in (
        lambda: llm.eval(texts[900:910], ridge_mode="off"),
        lambda: llm.eval(texts[900:1200], ridge_mode="identity"),
        lambda: next(llm.generate(texts[900:910], reset=False, ridge_mode="plumb")),
    ):
        with pytest.raises(RidgeError, match=rf"holds {N - TAIL - 4} filled rows"):
            call()
    assert llm.n_tokens == n
    # filled ones are
    answer(llm, texts[900:1200], n=1, reset=False)
    assert counts(llm) == (300 - TAIL, TAIL, N, None) and llm.ridge_last.cached_filled == N - TAIL - 4
    llm.reset()
    llm.eval(texts[900:910], ridge_mode="off")
    assert counts(llm) == (0, 10, 0, "off")


@pytest.mark.field_report(24, "options.py", "if name not in CALL_KEYWORDS:", "if False:")
def test_every_call_takes_the_keywords(llm, prompt, texts):
    text = llm.detokenize(prompt).decode("utf-8", "replace")
    calls = {
        "completion": lambda **k: llm.create_completion(text, max_tokens=2, **k),
        "call": lambda **k: llm(text, max_tokens=2, **k),
        "chat": lambda **k: llm.create_chat_completion([{"role": "user", "content": text}], max_tokens=2, **k),
        "stream": lambda **k: list(llm.create_completion(text, max_tokens=2, stream=True, **k)),
        "chat stream": lambda **k: list(llm.create_chat_completion([{"role": "user", "content": text}], max_tokens=2, stream=True, **k)),
        "generate": lambda **k: next(llm.generate(prompt, **k)),
        "eval": lambda **k: llm.eval(prompt, **k),
    }  # fmt: skip
    for name, call in calls.items():
        for mode, tail in (("fill", TAIL), ("identity", 100), ("off", 100)):
            llm.reset()
            call(ridge_mode=mode, ridge_tail=tail)
            n_filled, n_exact, cached, reason = counts(llm)
            assert (llm.ridge_last.mode, llm.ridge_last.tail, cached) == (mode, tail, 0), name
            assert (n_filled > 0, reason) == ((False, "off") if mode == "off" else (True, None)), name
            assert n_exact == (tail + 4 if n_filled else llm.ridge_last.rows), name
        for wrong, message in ({"ridge_mdoe": "off"}, "unknown keyword 'ridge_mdoe'"), ({"ridge_maps": "x"}, "when the object is made"):
            with pytest.raises(TypeError, match=message) as e:
                call(**wrong)
            assert all(known in str(e.value) for known in RIDGE), name


def test_a_stream_keeps_the_options_of_its_call(llm, prompt, texts):
    streams = [
        llm.create_completion(prompt, max_tokens=2, stream=True, ridge_mode="off"),
        llm.create_completion(texts[700 : 700 + N], max_tokens=2, stream=True, ridge_mode="identity"),
        llm.create_completion(prompt, max_tokens=2, stream=True),
    ]
    generators = [llm.generate(prompt, ridge_mode="nofill"), llm.generate(prompt)]
    seen = []
    for s in streams + generators:
        next(s)
        seen.append((llm.ridge_last.mode, llm.ridge_last.filled > 0))
        s.close()
    assert seen == [("off", False), ("identity", True), ("fill", True), ("nofill", True), ("fill", True)]


@pytest.mark.field_report(11, "llama.py", '"multimodal" if images else None', "None")
def test_a_chat_handler_of_images_gets_exact_prompts(make, prompt):
    import llama_cpp
    from llama_cpp.llama_chat_format import MTMDChatHandler

    class Handler(MTMDChatHandler):
        def __init__(self):
            pass

        def __call__(self, *, llama, messages, stream, **_):
            llama.reset()
            llama_cpp.Llama.eval(llama, prompt[:300])  # as the image part does: behind our back
            return llama.create_completion(prompt, max_tokens=1, stream=stream)

    llm = make(chat_handler=Handler())
    for stream in (False, True):
        llm.reset()  # rows that the last round left are exact, and would be used again
        answer(llm, prompt)
        assert counts(llm)[0] > 0
        out = llm.create_chat_completion([], stream=stream)
        if stream:
            list(out)
        assert counts(llm) == (0, N - 300, 300, "multimodal") and "images" in llm.ridge_last.message


def test_signatures_show_both_kinds_of_keywords(llm):
    for name, theirs in (("generate", "top_k"), ("create_completion", "logit_bias"), ("create_chat_completion", "tools"), ("__call__", "echo")):
        parameters = inspect.signature(getattr(type(llm), name)).parameters
        assert theirs in parameters and all(r in parameters for r in RIDGE), name


def test_pickle_keeps_the_options(make, prompt):
    a = make(ridge_tail=100, ridge_rows="random", ridge_budget=0.25, ridge_seed=7, ridge_min_prompt=300, ridge_maps=make().ridge_props["maps"])
    b = pickle.loads(pickle.dumps(a))
    assert a.ridge_props == b.ridge_props and b.ridge_props["seed"] == 7
    assert same(answer(a, prompt), answer(b, prompt)) and counts(b)[0] > 0
    b.close()
    with pytest.raises(RidgeError, match="closed"):
        b._ridge_maps.ptr


#
# refused, or run exactly with a reason
#


@pytest.mark.field_report(24, "options.py", 'if name.startswith("ridge") or near:', "if False:")
def test_misspelt_keywords_of_a_new_object_raise(model, make):
    for wrong, near in (("ridge_mpas", "ridge_maps"), ("rigde_maps", "ridge_maps"), ("ridgemode", "ridge_mode"), ("ridge", None)):
        with pytest.raises(TypeError, match=f"unknown keyword '{wrong}'") as e:
            make(**{wrong: "x"})
        assert "ridge_min_prompt" in str(e.value) and (near is None or f"did you mean '{near}'" in str(e.value))
    make(mul_mat_q=True)  # what upstream swallows is none of our business


@pytest.mark.parametrize("keywords, message", [
    ({"ridge_mode": "ful"}, "ridge_mode: expected off, plumb, identity, nofill or fill, found 'ful'"),
    ({"ridge_tail": 0}, "ridge_tail: expected a whole number of rows, 1 or more, found 0"),
    ({"ridge_tail": 1.5}, "ridge_tail: .* found 1.5"),
    ({"ridge_min_prompt": -1}, "ridge_min_prompt: expected a whole number of rows, 0 or more, found -1"),
    ({"ridge_min_prompt": True}, "ridge_min_prompt: .* found True"),
    ({"ridge_rows": "best"}, "ridge_rows: expected none, random or digits, found 'best'"),
    ({"ridge_budget": -1}, "ridge_budget: .* found -1"),
    ({"ridge_budget": float("nan")}, "ridge_budget: .* found nan"),
    ({"ridge_seed": 2**64}, "ridge_seed: .* found 18446744073709551616"),
    ({"ridge_rows": "random"}, "ridge_rows='random' needs ridge_budget"),
    ({"ridge_budget": 3}, "ridge_budget needs ridge_rows"),
])  # fmt: skip
def test_values_out_of_range_are_named(llm, make, prompt, keywords, message):
    for call in (lambda: make(**keywords), lambda: next(llm.generate(prompt, **keywords))):
        with pytest.raises(RidgeError, match=message):
            call()


@pytest.mark.field_report(30, "llama_prefill.py", 'if self._ridge_path is not None and kwargs.get("embedding"):', "if False:")
def test_what_cannot_go_together_is_refused(make, maps, monkeypatch):
    noise = []
    monkeypatch.setattr(sys, "unraisablehook", noise.append)
    for keywords, message in (
        ({"ridge_maps": None, "ridge_mode": "fill"}, "ridge_mode='fill' needs ridge_maps, found none"),
        ({"ridge_maps": maps, "embedding": True}, "ridge_maps cannot be used with embedding=True"),
        ({"ridge_maps": "/no/such.gguf"}, "ridge_maps: expected a file of ridge maps, found no file '/no/such.gguf'"),
    ):
        with pytest.raises(RidgeError, match=message):
            make(**keywords)
    gc.collect()
    assert not noise  # an object that was not finished goes quietly


def exact_with_reason(llm, prompt, exact, reason: str, says: str) -> None:
    for _ in range(2):
        assert same(answer(llm, prompt, ridge_mode="fill"), exact)
        assert counts(llm) == (0, N, 0, reason) and says in llm.ridge_last.message
        llm.reset()


def test_without_maps_a_call_for_a_fill_runs_exactly(make, prompt, exact):
    exact_with_reason(make(ridge_maps=None), prompt, exact, "no_maps", "")


def test_maps_of_another_model_are_refused(make, pico_model, tmp_path, prompt, exact):
    other = random_maps(pico_model("qwen3", ftype="f16"), tmp_path)
    with pytest.warns(RuntimeWarning, match=r"every prompt runs exactly \(refused\): .*expected .*llama.*qwen3|qwen3.*llama"):
        llm = make(ridge_maps=other)
    exact_with_reason(llm, prompt, exact, "refused", "qwen3")
    assert llm.ridge_props["reason"] == "refused" and "qwen3" in llm.ridge_props["message"]


@pytest.mark.field_report(29, "llama_prefill.py", "if self.lora_path:", "if False:")
def test_under_a_lora_prompts_run_exactly(make, model, maps, tmp_path, prompt, exact):
    lora = sidecar_files.write_lora(tmp_path / "lora.gguf", arch="llama", n_embd=256)
    with pytest.warns(RuntimeWarning, match=r"\(lora\)"):
        llm = make(lora_path=str(lora))
    exact_with_reason(llm, prompt, exact, "lora", "fitted without it")


@pytest.mark.field_report(29, "llama-ridge-prefill.cpp", "if (llama_ridge_access::has_lora(*ctx) || llama_ridge_access::has_cvec(*ctx)) {", "if (false) {")
def test_a_lora_set_behind_our_back_runs_exactly(make, model, tmp_path, prompt, exact):
    import llama_cpp

    lora = sidecar_files.write_lora(tmp_path / "lora.gguf", arch="llama", n_embd=256)
    llm = make()
    adapter = llama_cpp.llama_adapter_lora_init(llm.model, os.fsencode(lora))
    assert llama_cpp.llama_set_adapters_lora(llm.ctx, (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter), 1, (ctypes.c_float * 1)(1.0)) == 0
    exact_with_reason(llm, prompt, exact, "unsupported", "LoRA")
    llama_cpp.llama_set_adapters_lora(llm.ctx, None, 0, None)
    answer(llm, prompt)
    assert counts(llm)[3] is None


def test_with_a_draft_model_prompts_run_exactly(make, prompt):
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    with pytest.warns(RuntimeWarning, match=r"\(speculative\)"):
        llm = make(draft_model=LlamaPromptLookupDecoding(), logits_all=True)  # upstream's buffer is too small without
    answer(llm, prompt)
    assert counts(llm) == (0, N, 0, "speculative")


def test_log_probabilities(make, texts, prompt, filled):
    """Those of the answer go with a fill, those of the prompt make it run exactly, also behind rows of a sweep."""
    llm, fresh = make(logits_all=True), make(logits_all=True, ridge_maps=None)
    short = texts[:200]
    text = llm.detokenize(short).decode()
    assert llm.tokenize(text.encode()) == short

    def logprobs(llm, **keywords):
        out = llm.create_completion(text, max_tokens=4, temperature=0.0, logprobs=1, **keywords)["choices"][0]["logprobs"]
        return [x for x in out["token_logprobs"] if x is not None]

    assert answer(llm, prompt)[0] == filled["fill"][0] and counts(llm)[0] > 0
    assert np.isnan(llm.scores[: N - TAIL]).all() and np.isfinite(llm.scores[N - TAIL : N]).all()
    llm.reset()
    of_answer = logprobs(llm)
    assert len(of_answer) >= 4 and np.isfinite(of_answer).all() and counts(llm)[0] > 0
    whole = logprobs(fresh, echo=True)
    assert len(whole) >= 199 and np.isfinite(whole).all()
    assert logprobs(llm, echo=True) == whole and counts(llm) == (0, 200, 0, "logprobs")
    for mode, reason in (("fill", "logprobs"), ("plumb", "logprobs"), ("off", "off")):
        # pure rows of a sweep have no logits either
        llm.reset()
        answer(llm, short, ridge_mode="plumb")
        assert counts(llm)[3] is None
        assert logprobs(llm, echo=True, ridge_mode=mode) == whole and counts(llm) == (0, 200, 0, reason)
        assert np.allclose(logprobs(llm, echo=True, ridge_mode=mode), whole, atol=0.01) and counts(llm) == (0, 1, 199, reason)


def test_a_context_that_cannot_be_filled_runs_exactly(make, prompt):
    with pytest.warns(RuntimeWarning, match=r"\(unsupported\): .*non-causal"):
        llm = make(attention_type=1, n_ubatch=BATCH)
    answer(llm, prompt[:200], n=1)
    assert counts(llm) == (0, 200, 0, "unsupported") and "non-causal" in llm.ridge_last.message


def test_a_prompt_longer_than_the_context_fails_as_upstream(make, texts):
    llm = make(n_ctx=500)
    with pytest.raises(ValueError, match="exceed context window"):
        llm.create_completion(texts[:600])
    with pytest.raises((ValueError, RuntimeError)):
        next(llm.generate(texts[:600]))
    assert llm.ridge_last.reason == "no_space" and "found 600" in llm.ridge_last.message
    llm.reset()
    answer(llm, texts[:400])
    assert counts(llm) == (400 - TAIL - 4, TAIL + 4, 0, None)


#
# docs/BINDINGS.md
#


def code_blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "BINDINGS.md").read_text(), re.DOTALL)


def test_the_example_runs(model, maps, tmp_path, monkeypatch, capsys, texts):
    """As it stands in docs/BINDINGS.md and in README.md, with the files that it names."""
    example = code_blocks()[0]
    assert f"```python\n{example}```" in (ROOT / "README.md").read_text()
    assert len(example.strip().splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    for name, source in (("model.gguf", model), ("model.ridge.gguf", maps)):
        assert name in example
        (tmp_path / name).symlink_to(source)
    (tmp_path / "report.txt").write_text(server_util._text()[:6000])
    (tmp_path / "example.py").write_text(example)
    runpy.run_path("example.py")
    out = capsys.readouterr().out
    assert "filled=" in out and int(re.search(r"filled=(\d+)", out)[1]) > 0


def test_every_reason_field_and_keyword_is_documented(patched_lib):
    from ridgefill import llama_prefill

    text = (ROOT / "docs" / "BINDINGS.md").read_text()
    source = inspect.getsource(llama_prefill)
    reasons = set(re.findall(r'(?:return |reason=|_ridge_message = )"(\w+)"', source)) | set(llama_prefill._MESSAGES)
    reasons |= set(llama_prefill._FAILED.values()) | {"error"}
    assert {"off", "short", "lora", "refused", "no_maps", "unsupported", "multimodal"} <= reasons
    names = reasons | {f.name for f in dataclasses.fields(llama_prefill.RidgePrefill)} | {*RIDGE, "ridge_maps"}
    assert not [name for name in names if f"`{name}`" not in text]


def test_llama_cpp_server_uses_the_class(model, maps, tmp_path, texts):
    """The script of docs/BINDINGS.md, started as it says there."""
    pytest.importorskip("llama_cpp.server.app", reason="llama-cpp-python[server] is not installed")
    import requests

    import llama_server

    script = next(b for b in code_blocks() if "llama_cpp.server" in b)
    (tmp_path / "serve.py").write_text(script.replace("model.ridge.gguf", str(maps)))
    port = llama_server.free_port()
    command = [sys.executable, "serve.py", "--model", str(model), "--n_ctx", "8192", "--port", str(port), "--n_threads", "1"]
    log = tmp_path / "log"
    with open(log, "w") as out:
        p = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out, env=environment())
    try:
        until = time.monotonic() + 60
        while "Uvicorn running" not in log.read_text():
            assert p.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.1)
        for start, stream in ((0, False), (20, True)):
            body = {"prompt": server_util._text()[start:6000], "max_tokens": 4, "stream": stream}
            answer = requests.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200 and "choices" in answer.text, answer.text
    finally:
        p.terminate()
        p.wait(20)
    filled = [int(n) for n in re.findall(r"ridge: RidgePrefill\(.* filled=(\d+), exact", log.read_text())]
    assert len(filled) == 2 and min(filled) > 0, log.read_text()
