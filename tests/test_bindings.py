"""`ridgefill.Llama`: off is llama_cpp.Llama, fills are those of the library, and no exact prompt stands on a filled row.

The class shares a process with the tests; llama_cpp.Llama on the unpatched library runs in one of its own.
"""
from __future__ import annotations

import itertools
import json
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bindings_util import MODES, SETTINGS, answer, counts, environment, python, same
from bindings_util import exact, filled, llm, make, maps, model, prompt, shared, texts  # noqa: F401  (fixtures)
from ridgefill import lib
from ridgefill.errors import RidgeError
from server_util import BATCH, N, TAIL, UBATCH, random_maps


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
        p = subprocess.run([sys.executable, "-c", SAME_PROGRAM, *argv], env=env, capture_output=True, text=True, timeout=300)
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
@pytest.mark.field_report(1, "llama_prefill.py", "self._ridge_cells.first_filled(0 if pure_only else len(tokens) - tail)", "self._ridge_cells.first_filled(len(tokens) - tail)")
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
    ({"ridge_tail": N - 5, "ridge_min_prompt": 0}, (1, None)),
    ({"ridge_tail": N - 4, "ridge_min_prompt": 0}, (0, "short")),
    ({"ridge_min_prompt": N + 1}, (0, "short")),
    ({"ridge_rows": "random", "ridge_budget": 100}, (N - TAIL - 104, None)),
    ({"ridge_tail": np.int32(TAIL), "ridge_rows": "random", "ridge_budget": np.float32(9), "ridge_seed": np.int64(3)}, (N - TAIL - 13, None)),
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


@pytest.mark.field_report(10, "llama_prefill.py", "pure_only = bool(reason) or self._ridge_cells.made_by", "pure_only = True or self._ridge_cells.made_by")
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
@pytest.mark.field_report(31, "llama.py", 'self._ridge_cells = getattr(state, "ridge_cells", Cells())', "self._ridge_cells = Cells()")
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


@pytest.mark.field_report(2, "llama_prefill.py", 'return f"{maps.hash}/{maps.kind}', "return f\"{maps.path.rpartition('/')[2]}/{maps.kind}")
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


@pytest.mark.field_report(4, "llama.py", "self.reset()  # it may be half written", "pass")
def test_a_state_that_is_refused_leaves_an_empty_cache(llm, prompt, exact):
    answer(llm, prompt)
    state = llm.save_state()
    answer(llm, prompt, ridge_mode="off")
    state.llama_state = state.llama_state[: len(state.llama_state) // 2]
    state.llama_state_size = len(state.llama_state)
    with pytest.raises(RuntimeError, match="state data"):
        llm.load_state(state)
    assert llm.n_tokens == 0
    assert same(answer(llm, prompt, ridge_mode="off"), exact)


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
    # mode nofill does not go together with a cache, and then its rows are of no use to it either
    llm.set_cache(None)
    text(prompt, ridge_mode="nofill")
    assert counts(llm)[0] > 0
    llm.set_cache(LlamaRAMCache())
    assert text(prompt, ridge_mode="nofill") == cold["off"] and counts(llm) == (0, N, 0, "cache")
