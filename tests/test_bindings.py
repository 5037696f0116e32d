"""`ridgefill.Llama`: off is llama_cpp.Llama, fills are those of the library, and no exact prompt stands on a filled row.

The model is a pico one and the maps are random, so that a single filled row in an exact answer shows. Equality is of bits,
with batch, ubatch and threads fixed. The class shares a process with the tests; llama_cpp.Llama on the unpatched library
runs in one of its own.
"""
from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import json
import os
import pickle
import random
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

import server_util
import sidecar_files
from ridgefill import lib
from ridgefill.errors import RidgeError
from server_util import BATCH, N, TAIL, UBATCH, random_maps
from server_util import maps, model  # noqa: F401  (fixtures)

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {"n_ctx": 2048, "n_batch": BATCH, "n_ubatch": UBATCH, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
RIDGE = ["ridge_mode", "ridge_tail", "ridge_rows", "ridge_budget", "ridge_seed", "ridge_min_prompt"]
MODES = ["fill", "identity", "nofill"]


@pytest.fixture(scope="module")
def make(model, maps):
    """make(**keywords) -> a new object with maps (ridge_maps=None: without), closed when the tests of this file are done."""
    from ridgefill import Llama

    made = []

    def get(path=model, **keywords) -> Llama:
        ridge = {"ridge_maps": maps, "ridge_tail": TAIL} if "ridge_maps" not in keywords else {}
        made.append(Llama(str(path), **{**SETTINGS, **ridge, **keywords}))
        return made[-1]

    yield get
    for llm in made:
        llm.close()


@pytest.fixture(scope="module")
def shared(make):
    return make()


@pytest.fixture
def llm(shared):
    """One object for all tests that need nothing special, with an empty cache."""
    shared.reset()
    shared.set_cache(None)
    return shared


@pytest.fixture(scope="module")
def texts(model) -> list[int]:
    """Tokens of real text, enough for several prompts."""
    with lib.Model(model) as m:
        return m.tokenize(server_util._text())


@pytest.fixture(scope="module")
def prompt(texts):
    return texts[:N]


@pytest.fixture(scope="module")
def exact(make, prompt):
    """What a fresh object without maps says to `prompt`."""
    return answer(make(ridge_maps=None), prompt)


@pytest.fixture(scope="module")
def filled(make, prompt):
    """What fresh objects say to `prompt`, by mode."""
    return {mode: answer(make(), prompt, ridge_mode=mode) for mode in MODES}


def answer(llm, prompt, n: int = 12, **keywords) -> tuple[list[int], np.ndarray]:
    """Greedy tokens after a prompt and the logits that each was chosen from, [n, n_vocab]."""
    from llama_cpp import LogitsProcessorList

    rows = []
    processor = LogitsProcessorList([lambda ids, logits: rows.append(np.array(logits)) or logits])
    tokens = list(itertools.islice(llm.generate(prompt, temp=0.0, logits_processor=processor, **keywords), n))
    return tokens, np.stack(rows)


def same(a, b) -> bool:
    """Whether two answers are the same, logits to the bit."""
    return a[0] == b[0] and a[1].tobytes() == b[1].tobytes()


def counts(llm) -> tuple[int, int, int, str | None]:
    """Filled, exact and cached rows of the last prompt, and why it ran exactly; checks what must hold for every prompt."""
    r = llm.ridge_last
    assert r.filled + r.exact + r.cached == r.rows and 0 <= r.cached_filled <= r.cached
    one_ubatch = r.mode == "plumb" and r.exact <= UBATCH  # the end of the prompt is upstream's, here all of it
    assert (r.lower_seconds > 0) == (r.reason is None and not one_ubatch) and not (r.filled and r.reason)
    assert r.seconds > r.lower_seconds + r.upper_seconds >= 0
    return r.filled, r.exact, r.cached, r.reason


def environment(**changes: str) -> dict[str, str]:
    """Of a process that imports this checkout's package."""
    path = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **changes}


def python(code: str, **env) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment(**env), capture_output=True, text=True, timeout=120
    )


#
# importing
#


def test_importing_the_package_loads_nothing():
    p = python("""
        import sys, ridgefill
        print([m for m in ("numpy", "llama_cpp", "ridgefill.native", "ridgefill.llama") if m in sys.modules])
        print(hasattr(ridgefill, "Lama"), "Llama" in ridgefill.__all__)
        from ridgefill import Llama
        import llama_cpp
        print(issubclass(Llama, llama_cpp.Llama), ridgefill.Llama is Llama)
        """)
    assert p.stdout.splitlines() == ["[]", "False True", "True True"], p.stderr


def test_another_libllama_in_the_process_is_named(stock_lib):
    code = "import llama_cpp\ntry: from ridgefill import Llama\nexcept Exception as e: print(type(e).__name__, e)"
    p = python(code, LLAMA_CPP_LIB_PATH=str(stock_lib))
    assert p.stdout.startswith(f"RidgeError llama_cpp was imported before ridgefill and loaded {stock_lib.resolve()}; expected "), p.stderr


def test_without_the_patch_only_what_is_upstreams_works(stock_lib, model, maps):
    p = python(f"""
        from ridgefill import Llama
        llm = Llama({str(model)!r}, verbose=False)
        print(llm.ridge_last, len(list(zip(range(4), llm.generate([3, 4, 5])))), llm.ridge_last.reason)
        try: Llama({str(model)!r}, verbose=False, ridge_maps={str(maps)!r})
        except Exception as e: print(type(e).__name__, e)
        """, RIDGE_LIB_DIR=str(stock_lib))  # fmt: skip
    lines = p.stdout.splitlines()
    assert lines[0] == "None 4 off", p.stdout + p.stderr
    assert lines[1].startswith("RidgeError") and "built without the RidgeFill patch" in lines[1]


def test_the_package_is_typed():
    import ridgefill

    assert (Path(ridgefill.__file__).parent / "py.typed").is_file()


#
# equal to upstream, equal to the library
#

SAME_PROGRAM = """
import hashlib, itertools, json, sys
class_from, path, settings, prompts = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
if class_from == "ridgefill":
    from ridgefill import Llama
else:
    from llama_cpp import Llama
from llama_cpp import LogitsProcessorList
llm, digest, out = Llama(path, **settings), hashlib.sha256(), []
watch = LogitsProcessorList([lambda ids, logits: digest.update(logits.tobytes()) or logits])
for p in prompts:  # the second and later ones find a prefix of the one before in the cache
    out.append(list(itertools.islice(llm.generate(p, temp=0.0, logits_processor=watch), 8)))
out.append(llm.create_completion(prompts[0], max_tokens=8, seed=3, temperature=1.5)["choices"][0]["text"])
state = llm.save_state()
out.append(hashlib.sha256(state.llama_state).hexdigest())
print(json.dumps([out, digest.hexdigest()]))
"""


@pytest.mark.parametrize("arch, ftype, settings", [
    ("llama", "f16", {}),
    ("llama", "q8_0", {"flash_attn": True, "type_k": 8, "type_v": 8}),
    ("qwen3", "f16", {"logits_all": True}),
])  # fmt: skip
def test_off_is_llama_cpp_on_the_unpatched_library(stock_lib, patched_lib, pico_model, texts, tmp_path, arch, ftype, settings):
    path = pico_model(arch, ftype=ftype)
    prompts = [texts[:N], texts[:N], texts[:300] + texts[700:800], texts[:300], texts[50:90]]

    def run(library, class_from, **ridge):
        argv = [class_from, str(path), json.dumps(SETTINGS | settings | ridge), json.dumps(prompts)]
        env = environment(LLAMA_CPP_LIB_PATH=str(library), RIDGE_LIB_DIR=str(library))
        p = subprocess.run([sys.executable, "-c", SAME_PROGRAM, *argv], env=env, capture_output=True, text=True, timeout=120)
        assert p.returncode == 0, p.stderr
        return json.loads(p.stdout.splitlines()[-1])

    stock = run(stock_lib, "llama_cpp")
    assert len({tuple(t) for t in stock[0][:5]}) > 2
    assert run(patched_lib, "ridgefill") == stock
    assert run(patched_lib, "ridgefill", ridge_mode="off", ridge_maps=str(random_maps(path, tmp_path))) == stock


@pytest.mark.parametrize("n", [2 * TAIL, BATCH - 1, BATCH, BATCH + 1, 2 * BATCH - 1, 2 * BATCH, 2 * BATCH + 1, N])
def test_plumb_equals_off(llm, texts, n):
    off = answer(llm, texts[:n], ridge_mode="off")
    llm.reset()
    assert same(answer(llm, texts[:n], ridge_mode="plumb"), off)
    assert counts(llm) == (0, n, 0, None)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [{}, {"rows": "random", "budget": 0.2, "seed": 5}, {"rows": "digits"}], ids=lambda r: r.get("rows", ""))
def test_a_fill_is_the_fill_of_the_library(llm, model, maps, prompt, mode, rows):
    tokens, logits = answer(llm, prompt, ridge_mode=mode, **{f"ridge_{k}": v for k, v in rows.items()})
    with lib.Model(model) as m, lib.Maps(m, maps) as loaded:
        with lib.Context(m, 2048, n_batch=BATCH, n_ubatch=UBATCH, n_threads=1, flash_attn=False) as ctx:
            exact_rows = lib.select_rows(rows["rows"], m, prompt, 4, N - TAIL, *list(rows.values())[1:]) if rows else []
            first, prefill = ctx.fill_and_decode(prompt, mode=mode, maps=loaded, n_tail=TAIL, exact_rows=exact_rows)
            assert len(exact_rows) > 10 or not rows
            assert counts(llm) == (len(prefill.filled), N - len(prefill.filled), 0, None)
            assert logits[0].tobytes() == first[-1].tobytes()
            assert tokens == lib.greedy(ctx, first[-1], len(tokens), stop_at_eog=False)


@pytest.mark.parametrize("mode", ["off", "plumb"])
@pytest.mark.parametrize("before", MODES)
def test_exact_after_filled_equals_a_fresh_object(llm, prompt, exact, filled, before, mode):
    assert same(answer(llm, prompt, ridge_mode=before), filled[before]) and counts(llm)[0] > 0
    assert not same(filled[before], exact)
    assert same(answer(llm, prompt, ridge_mode=mode), exact)
    assert counts(llm) == (0, N, 0, "off" if mode == "off" else None)
    # now the rows are pure
    answer(llm, prompt, ridge_mode="off")
    assert counts(llm) == (0, 1, N - 1, "off")


def test_a_short_prompt_runs_exactly(llm, make, texts):
    for n in (TAIL, 2 * TAIL - 1):
        assert same(answer(llm, texts[:n]), answer(make(ridge_maps=None), texts[:n]))
        assert counts(llm) == (0, n, 0, "short")
        llm.reset()
    answer(llm, texts[: 2 * TAIL])
    assert counts(llm) == (TAIL - 4, TAIL + 4, 0, None)


@pytest.mark.parametrize("keywords, expected", [
    ({}, (N - TAIL - 4, None)),
    ({"ridge_mode": "off"}, (0, "off")),
    ({"ridge_tail": 2 * TAIL}, (N - 2 * TAIL - 4, None)),
    ({"ridge_tail": N // 2 + 1}, (0, "short")),
    ({"ridge_tail": N, "ridge_min_prompt": 1}, (0, "short")),
    ({"ridge_min_prompt": N}, (N - TAIL - 4, None)),
    ({"ridge_min_prompt": N + 1}, (0, "short")),
    ({"ridge_rows": "random", "ridge_budget": 100}, (N - TAIL - 104, None)),
    ({"ridge_rows": "digits", "ridge_budget": 2}, (N - TAIL - 6, None)),
])  # fmt: skip
def test_each_keyword_changes_what_is_filled(llm, make, prompt, keywords, expected):
    """For a call and for the object alike."""
    answer(llm, prompt, n=1, **keywords)
    assert counts(llm)[::3] == expected
    other = make(**keywords)
    answer(other, prompt, n=1)
    assert counts(other)[::3] == expected
    assert llm.ridge_last.mode == other.ridge_last.mode == keywords.get("ridge_mode", "fill")


def test_seed_chooses_the_random_rows(llm, prompt):
    a, b, again = [], [], []
    for out, seed in ((a, 1), (b, 2), (again, 1)):
        llm.reset()
        out.append(answer(llm, prompt, n=2, ridge_rows="random", ridge_budget=0.5, ridge_seed=seed))
    assert same(a[0], again[0]) and not same(a[0], b[0])


#
# what is reused
#


def test_filled_twice_is_reused(llm, prompt, filled):
    answer(llm, prompt)
    again = answer(llm, prompt)
    assert counts(llm) == (0, 1, N - 1, "short") and llm.ridge_last.cached_filled == N - TAIL - 4
    assert again[0] == filled["fill"][0]


def test_a_prompt_just_run_needs_no_row(llm, prompt):
    llm.eval(prompt, ridge_mode="fill")
    logits = answer(llm, prompt, n=1)[1]
    assert counts(llm) == (0, 0, N, "short")
    answer(llm, prompt, n=1, ridge_mode="off")
    assert counts(llm) == (0, N, 0, "off")
    assert not same(([], logits), ([], answer(llm, prompt, n=1)[1]))


def test_each_mode_has_its_own_rows(llm, prompt, filled):
    for mode in ("fill", "identity", "nofill", "fill"):
        assert same(answer(llm, prompt, ridge_mode=mode), filled[mode])
        assert counts(llm) == (N - TAIL - 4, TAIL + 4, 0, None)
        answer(llm, prompt, ridge_mode=mode)
        assert counts(llm) == (0, 1, N - 1, "short")


def test_conversation_keeps_its_fills(llm, prompt, texts):
    """A short turn reuses the filled prefix, a long one is filled behind it, an exact one uses nothing of either."""
    turn = prompt + answer(llm, prompt)[0] + texts[900:920]
    turn += answer(llm, turn)[0]
    assert counts(llm)[::3] == (0, "short") and llm.ridge_last.cached >= N and llm.ridge_last.cached_filled == N - TAIL - 4
    turn += texts[950:1250]
    answer(llm, turn)
    n_filled, n_exact, cached, reason = counts(llm)
    assert reason is None and n_exact == TAIL and cached > N and llm.ridge_last.cached_filled == N - TAIL - 4
    # a further turn has the filled rows of both behind it
    answer(llm, turn + texts[:10])
    assert llm.ridge_last.cached_filled == N - TAIL - 4 + n_filled
    answer(llm, turn, ridge_mode="off")
    assert counts(llm) == (0, len(turn), 0, "off")


def test_filled_rows_in_the_tail_run_again(llm, prompt):
    """A prompt that ends where another was filled must have its own exact tail."""
    answer(llm, prompt)
    part = prompt[: N - 2 * TAIL]
    answer(llm, part)
    assert counts(llm) == (0, TAIL, len(part) - TAIL, "short")
    assert llm.ridge_last.cached_filled == len(part) - TAIL - 4
    answer(llm, prompt)
    llm.reset()
    answer(llm, prompt)
    answer(llm, prompt, ridge_tail=3 * TAIL)
    assert counts(llm) == (0, 3 * TAIL, N - 3 * TAIL, "short")


def test_pure_rows_before_a_fill_stay_of_use(llm, make, prompt, texts, exact):
    """An exact prompt after a fill behind pure rows reuses those and no more."""
    answer(llm, prompt[:200], n=1, ridge_mode="off")
    answer(llm, prompt, n=1)
    assert counts(llm) == (N - TAIL - 200, TAIL, 200, None)
    off = answer(llm, prompt, ridge_mode="off")
    assert counts(llm) == (0, N - 200, 200, "off")
    fresh = make(ridge_maps=None)
    answer(fresh, prompt[:200], n=1)
    assert same(off, answer(fresh, prompt))


def test_a_call_that_fails_forgets_nothing(llm, prompt, texts, exact, monkeypatch):
    """Filled rows of the call before stay known as such when the next one fails before it runs a row."""
    answer(llm, prompt[:200], n=1, ridge_mode="off")
    answer(llm, prompt, n=1)
    with monkeypatch.context() as m, pytest.raises(ZeroDivisionError):
        m.setattr(type(llm), "_init_sampler", lambda *a, **k: 1 // 0)
        answer(llm, prompt[:100] + texts[900:910])
    answer(llm, prompt, ridge_mode="off")
    assert counts(llm) == (0, N - 100, 100, "off")


@pytest.mark.parametrize("error", [RidgeError("it broke", -4), RidgeError("no room", -3), KeyboardInterrupt()], ids=str)
def test_a_sweep_that_breaks_off_leaves_no_row(llm, prompt, exact, filled, monkeypatch, error):
    step, n = lib.Prefill.step, itertools.count()

    def broken(prefill):
        if next(n) == 3:
            raise error
        return step(prefill)

    monkeypatch.setattr(lib.Prefill, "step", broken)
    if isinstance(error, RidgeError):
        assert same(answer(llm, prompt), exact)
        assert counts(llm) == (0, N, 0, "no_space" if error.status == -3 else "error") and llm.ridge_last.message == str(error)
    else:
        with pytest.raises(KeyboardInterrupt):
            answer(llm, prompt)
    assert same(answer(llm, prompt), filled["fill"]) or counts(llm)[2] == N - 1
    llm.reset()
    assert same(answer(llm, prompt), filled["fill"])
    assert same(answer(llm, prompt, ridge_mode="off"), exact)


@pytest.mark.parametrize("seed", range(3))
def test_no_history_leaks_fills_into_exact_answers(make, texts, tmp_path, seed):
    """Prompts of every mode that grow, shrink and branch, states, caches and rewinds: exact answers stay exact.

    Not bitwise: a reused prefix cuts the prompt elsewhere. The bound lies between that and what a filled prefix does.
    """
    from llama_cpp import LlamaRAMCache

    rng, fresh, llm, states = random.Random(seed), make(ridge_maps=None), make(), []
    long = [texts[:600], texts[600:1200]]
    errors = {"off": [], "plumb": [], "filled": []}
    n_reused = 0
    for _ in range(40):
        a, b = rng.sample(long, 2)
        n = rng.randrange(130, 600)
        p = a[:n] if rng.random() < 0.7 else a[:200] + b[200:n]
        event = rng.random()
        if event < 0.15 and llm.ridge_last and llm.ridge_last.mode != "nofill":
            states = [*states[-3:], llm.save_state()]
        elif event < 0.3 and states:
            llm.load_state(rng.choice(states))
        elif event < 0.35:
            llm.set_cache(rng.choice([None, LlamaRAMCache()]))
        elif event < 0.4 and llm.n_tokens:
            llm.n_tokens -= rng.randrange(llm.n_tokens)
            llm.eval(a[:5])
        mode = rng.choice(["off", "off", "off", "plumb", "fill", "identity", "nofill"])
        logits = answer(llm, p, n=2, ridge_mode=mode)[1][0]
        fresh.reset()
        wanted = answer(fresh, p, n=1)[1][0]
        error = float(np.abs(logits - wanted).max())
        counts(llm)
        if mode in errors:
            assert llm.ridge_last.cached_filled == llm.ridge_last.filled == 0
            n_reused += llm.ridge_last.cached > 0
            errors[mode].append(error)
        elif llm.ridge_last.filled:
            errors["filled"].append(error)
    bound = 0.1
    assert n_reused > 0 and max(errors["off"] + errors["plumb"]) < bound < min(errors["filled"]) / 2, errors


#
# states and caches
#


@pytest.mark.parametrize("mode", ["off", "fill", "identity"])
def test_save_load_continue_equals_uninterrupted(make, prompt, mode):
    whole = make(ridge_mode=mode)
    tokens, logits = answer(whole, prompt, n=20)
    first = make(ridge_mode=mode)
    begun = answer(first, prompt, n=8)
    assert counts(first)[0] == (0 if mode == "off" else N - TAIL - 4)
    state = pickle.loads(pickle.dumps(first.save_state()))
    first.close()
    second = make(ridge_mode=mode)
    second.load_state(state)
    rest = answer(second, prompt + begun[0], n=12)
    assert counts(second)[1:3] == (1, N + 7) and second.ridge_last.cached_filled == (0 if mode == "off" else N - TAIL - 4)
    assert same((begun[0] + rest[0], np.concatenate([begun[1], rest[1]])), (tokens, logits))
    assert second.save_state().llama_state == whole.save_state().llama_state


def test_state_knows_its_filled_rows_by_content(make, model, maps, prompt, exact, tmp_path):
    """A copy of the maps under another name reuses the rows, other maps under the same name do not, an exact prompt never."""
    first = make()
    answer(first, prompt)
    state = first.save_state()
    copy = shutil.copy(maps, tmp_path / "copy.ridge.gguf")
    other = shutil.copy(random_maps(model, tmp_path, seed=1), tmp_path / Path(maps).name)
    for path, reused in ((copy, True), (other, False)):
        llm = make(ridge_maps=path, ridge_tail=TAIL)
        llm.load_state(state)
        answer(llm, prompt)
        assert (counts(llm)[2] == N - 1) == reused and (llm.ridge_last.cached_filled > 0) == reused
        llm.load_state(state)
        assert same(answer(llm, prompt, ridge_mode="off"), exact)
    plain = make(ridge_maps=None)
    plain.load_state(state)
    assert same(answer(plain, prompt), exact) and counts(plain) == (0, N, 0, "off")


def test_a_pure_state_replaces_what_was_known(llm, prompt, exact):
    answer(llm, prompt, ridge_mode="off")
    state = llm.save_state()
    answer(llm, prompt)
    llm.reset()
    answer(llm, prompt)
    llm.load_state(state)
    again = answer(llm, prompt, ridge_mode="off")
    assert counts(llm) == (0, 1, N - 1, "off") and again[0] == exact[0]


def test_rows_of_nofill_cannot_be_saved(llm, prompt):
    answer(llm, prompt, ridge_mode="nofill")
    with pytest.raises(RidgeError, match="mode 'nofill' cannot be saved"):
        llm.save_state()
    answer(llm, prompt, ridge_mode="off")
    llm.save_state()


def test_cache_never_gives_filled_rows_to_an_exact_prompt(llm, prompt, texts):
    from llama_cpp import LlamaRAMCache

    def text(p, **keywords):
        out = llm.create_completion(p, max_tokens=8, temperature=0.0, logit_bias={2: -100.0}, **keywords)
        return out["choices"][0]["text"]

    other = texts[700 : 700 + N]
    cold = {}
    for mode in ("off", "fill"):
        llm.reset()
        cold[mode] = text(prompt, ridge_mode=mode)
    assert cold["off"] != cold["fill"]
    for first in ("off", "fill"):
        llm.reset()
        llm.set_cache(LlamaRAMCache())
        text(prompt, ridge_mode=first)
        text(other, ridge_mode=first)
        # back from the cache
        assert text(prompt, ridge_mode=first) == cold[first] and counts(llm)[2] == N - 1
        assert (llm.ridge_last.cached_filled > 0) == (first == "fill")
    # the cache holds filled rows only
    for _ in range(2):
        assert text(prompt, ridge_mode="off") == cold["off"] and llm.ridge_last.cached_filled == 0
        assert text(other, ridge_mode="off") and llm.ridge_last.cached_filled == 0
    text(prompt, ridge_mode="nofill")
    assert counts(llm)[::3] == (0, "cache")


#
# other calls
#


def test_eval_fills_when_asked(llm, prompt, filled):
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


def test_a_chat_handler_of_images_gets_exact_prompts(make, prompt, exact):
    from llama_cpp.llama_chat_format import MTMDChatHandler

    class Handler(MTMDChatHandler):
        def __init__(self):
            pass

        def __call__(self, *, llama, messages, stream, **_):
            llama.reset()
            llama.eval(prompt[:300])
            return llama.create_completion(prompt, max_tokens=1, stream=stream)

    llm = make(chat_handler=Handler())
    answer(llm, prompt)
    for stream in (False, True):
        out = llm.create_chat_completion([], stream=stream)
        if stream:
            list(out)
        assert counts(llm) == (0, N - 300, 300, "multimodal") and "images" in llm.ridge_last.message
    answer(llm, prompt[:10] + prompt[200:])
    assert counts(llm)[3] is None


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


#
# refused, or run exactly with a reason
#


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


def test_what_cannot_go_together_is_refused(make, maps):
    for keywords, message in (
        ({"ridge_maps": None, "ridge_mode": "fill"}, "ridge_mode='fill' needs ridge_maps, found none"),
        ({"ridge_maps": maps, "embedding": True}, "ridge_maps cannot be used with embedding=True"),
        ({"ridge_maps": "/no/such.gguf"}, "ridge_maps: expected a file of ridge maps, found no file '/no/such.gguf'"),
    ):
        with pytest.raises(RidgeError, match=message), warnings.catch_warnings():
            warnings.simplefilter("error")  # an object that was not finished goes quietly
            make(**keywords)
        gc.collect()


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


def test_under_a_lora_prompts_run_exactly(make, model, maps, tmp_path, prompt, exact):
    lora = sidecar_files.write_lora(tmp_path / "lora.gguf", arch="llama", n_embd=256)
    with pytest.warns(RuntimeWarning, match=r"\(lora\)"):
        llm = make(lora_path=str(lora))
    exact_with_reason(llm, prompt, exact, "lora", "fitted without it")


def test_a_lora_set_behind_our_back_runs_exactly(make, model, tmp_path, prompt, exact):
    import ctypes

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
    """As it stands in docs/BINDINGS.md, with the files that it names."""
    example = code_blocks()[0]
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
