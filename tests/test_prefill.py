"""The prefill object at its edges: what it leaves behind when it fails, is cancelled or meets other users of the cache."""
from __future__ import annotations

import numpy as np
import pytest

from ridgefill.lib import Context, Model, RidgeError, load

load()
import llama_cpp  # noqa: E402  (after load(), which says where libllama is)

UBATCH = 32
N = 5 * UBATCH + 9


@pytest.fixture(scope="module")
def model(pico_model, patched_lib):
    with Model(pico_model("llama", ftype="f16")) as m:
        yield m


def context(model, n_ctx=512, n_seq_max=1, **kw) -> Context:
    return Context(model, n_ctx=n_ctx * (1 if kw.get("kv_unified") else n_seq_max), n_batch=64, n_ubatch=UBATCH,
                   n_seq_max=n_seq_max, n_threads=1, **kw)


def tokens(n=N, seed=3) -> list[int]:
    return np.random.default_rng(seed).integers(3, 280, n).tolist()


def exact_after(ctx, toks, seq=0) -> bytes:
    """Logits of the prompt run exactly, as bytes: equal to a fresh context's only if nothing was left behind."""
    ctx.seq_rm(seq)
    return ctx.decode(toks, seq=seq, logits="all").tobytes()


@pytest.fixture(scope="module")
def fresh(model) -> bytes:
    with context(model) as ctx:
        return exact_after(ctx, tokens())


@pytest.mark.parametrize("mode", ["plumb", "identity", "nofill"])
def test_cancel_at_every_step_leaves_nothing(model, fresh, mode):
    with context(model) as ctx:
        with ctx.prefill(tokens(), mode=mode, split=3, n_tail=16) as p:
            n_steps = p.stats["n_steps"]
        for n in range(n_steps):
            with ctx.prefill(tokens(), mode=mode, split=3, n_tail=16) as p:
                for _ in range(n):
                    p.step()
                p.cancel()
            assert ctx.seq_pos_max(0) == -1, f"after {n} of {n_steps} steps"
        assert exact_after(ctx, tokens()) == fresh


def test_cancel_keeps_the_rows_before_the_prompt(model):
    with context(model) as ctx:
        ctx.decode(tokens(40, seed=5), logits="none")
        before = [ctx.get_kv(0, il, w, 0, 40).tobytes() for il in range(model.n_layer) for w in "kv"]
        with ctx.prefill(tokens(), pos0=40, mode="identity", split=3, n_tail=16) as p:
            p.step()
            p.step()
        assert ctx.seq_pos_max(0) == 39
        assert before == [ctx.get_kv(0, il, w, 0, 40).tobytes() for il in range(model.n_layer) for w in "kv"]


@pytest.mark.parametrize("unified", [True, False])
@pytest.mark.field_report(15, "llama-ridge-prefill.cpp", "remove_rows(*pf);")
def test_a_full_cache_costs_only_the_prompt_that_does_not_fit(model, unified):
    """Four prompts at once: the ones that find no cells fail by name and leave none behind, the others finish."""
    size = 512 if unified else 1024
    with Context(model, n_ctx=size, n_batch=64, n_ubatch=UBATCH, n_seq_max=4, kv_unified=unified, n_threads=1) as ctx:
        # together more than the unified cache holds, in a split cache the longest one more than its own share
        lengths = [N, N, N, N] if unified else [N, N, N, 400]
        running, lost = {}, {}
        for s, n in enumerate(lengths):
            try:
                running[s] = ctx.prefill(tokens(n, seed=s), seq=s, mode="identity", split=3, n_tail=16)
            except RidgeError as e:  # a share of the cache that is too small is seen before the first step
                lost[s] = str(e)
        n_done = {s: p.n_done for s, p in running.items()}
        while running:
            for s in list(running):
                try:
                    if running[s].step():
                        running.pop(s).close()
                except RidgeError as e:
                    lost[s] = str(e)
                    assert ctx.seq_pos_max(s) == -1  # at once, not when it is closed
                    running.pop(s).close()
        assert len(lost) == 1 and "free cells in the KV cache for the rest of the prompt, found" in next(iter(lost.values()))
        for s in range(4):
            assert ctx.seq_pos_max(s) == (-1 if s in lost else n_done[s] - 1)


def test_a_prefill_that_ends_removes_its_own_rows_and_no_others(model):
    """What came into the sequence by other ways stays, whether the prefill was never stepped, failed, or found others' rows."""
    prompt = tokens()
    with context(model) as ctx:
        idle, late = (ctx.prefill(prompt, mode="identity", split=3, n_tail=16) for _ in range(2))
        ctx.decode(prompt)
        rows = lambda: [ctx.get_kv(0, il, w, 0, N).tobytes() for il in range(model.n_layer) for w in "kv"]  # noqa: E731
        before = rows()
        idle.close()
        with pytest.raises(RidgeError, match="changed meanwhile"):
            late.step()
        late.close()
        assert ctx.seq_pos_max(0) == N - 1 and rows() == before
    with context(model) as ctx:
        first, second = (ctx.prefill(prompt, mode="identity", split=3, n_tail=16) for _ in range(2))
        first.run()
        with pytest.raises(RidgeError, match="changed meanwhile"):
            second.step()
        second.close()
        assert ctx.seq_pos_max(0) == first.n_done - 1
        first.close()


def test_rows_of_a_copied_sequence_are_read_as_they_will_be(model):
    """In a split cache a copy waits for the next decode: who looks before it must not see what lay there."""
    with context(model, n_seq_max=2) as ctx:
        ctx.decode(tokens(40), seq=0)
        ctx.decode(tokens(40, seed=9), seq=1)
        ctx.seq_cp(0, 1)
        for il in range(model.n_layer):
            assert ctx.get_kv(1, il, "k", 0, 40).tobytes() == ctx.get_kv(0, il, "k", 0, 40).tobytes()


@pytest.mark.parametrize("p0, p1", [(-1, 3), (0, 2**31 - 1), (-(2**31), 2**31 - 1)])
def test_impossible_positions_are_refused(model, p0, p1):
    with context(model) as ctx:
        ctx.decode(tokens(8))
        with pytest.raises(RidgeError, match="expected positions from 0 on"):
            ctx.get_kv(0, 0, "k", p0, p1)


@pytest.mark.field_report(16, "llama-ridge-prefill.cpp", "if (!cache_is_ours(*pf, kv)) {", "if (false) {")
def test_a_cache_changed_under_the_prefill_is_an_error(model, fresh):
    with context(model) as ctx:
        with ctx.prefill(tokens(), mode="identity", split=3, n_tail=16) as p:
            p.step()
            p.step()
            ctx.seq_rm(0, 10, 12)
            with pytest.raises(RidgeError, match="changed meanwhile"):
                p.step()
            with pytest.raises(RidgeError, match="failed or was cancelled"):
                p.step()
        assert ctx.seq_pos_max(0) == -1
        assert exact_after(ctx, tokens()) == fresh


def test_logits_of_the_last_decode_survive_a_step(model):
    """A caller may sample its other sequences after a step of this one."""
    with context(model, n_seq_max=2) as ctx, ctx.prefill(tokens(), mode="identity", split=3, n_tail=16) as p:
        before = ctx.decode(tokens(7, seed=8), seq=1, logits="last")[-1]
        p.step()
        after = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(ctx.ptr, -1), (model.n_vocab,))
        assert after.tobytes() == before.tobytes()


def test_nofill_is_gone_with_its_rows(model, fresh):
    with context(model) as ctx:
        ctx.fill_and_decode(tokens(), mode="nofill", split=3, n_tail=16)
        assert exact_after(ctx, tokens()) == fresh


def test_nofill_hides_its_rows_from_later_tokens_and_from_no_other_sequence(model):
    with context(model, n_seq_max=2) as ctx:
        alone = ctx.decode(tokens(50, seed=4), seq=1).tobytes()
        ctx.clear()
        ctx.fill_and_decode(tokens(), mode="nofill", split=3, n_tail=16)
        assert ctx.decode(tokens(50, seed=4), seq=1).tobytes() == alone
        hidden = ctx.decode([7], pos0=N, logits="last")
        ctx.clear()
        ctx.decode(tokens(), logits="none")
        assert np.abs(ctx.decode([7], pos0=N, logits="last") - hidden).max() > 1e-3


def test_nofill_at_two_splits_is_refused(model):
    with context(model, n_seq_max=2) as ctx:
        ctx.fill_and_decode(tokens(), mode="nofill", split=3, n_tail=16)
        with pytest.raises(RidgeError, match="at layer 3, found 4"):
            ctx.prefill(tokens(), seq=1, mode="nofill", split=4, n_tail=16)


@pytest.mark.parametrize("n", [1, 15, 16])
def test_a_prompt_no_longer_than_the_tail_has_no_steps(model, n):
    with context(model) as ctx, ctx.prefill(tokens(n), mode="identity", split=3, n_tail=16) as p:
        assert (p.n_done, p.stats["n_filled"], p.stats["n_steps"]) == (0, 0, 0)
        assert p.step()


def test_rows_are_exact_by_choice_sink_or_tail(model):
    rows = [7, 8, 40, 100]
    with context(model) as ctx, ctx.prefill(tokens(), mode="identity", split=3, n_tail=50, n_sink=4, exact_rows=rows) as p:
        p.run()
        expected = sorted(set(range(4, N - 50)) - set(rows))
        assert p.filled.tolist() == expected
        assert p.stats["n_exact"] == N - len(expected)


def test_sinks_are_rows_of_the_sequence_not_of_the_prompt(model):
    with context(model) as ctx:
        ctx.decode(tokens(2), logits="none")
        with ctx.prefill(tokens(), pos0=2, mode="identity", split=3, n_tail=16, n_sink=4) as p:
            p.run()
            assert p.filled[0] == 2  # positions 2 and 3 are sinks


def test_exact_rows_are_nearer_to_exact_than_filled_ones(model):
    """More exact rows, smaller error: the second sweep really overwrites the fill."""
    with context(model) as ctx:
        truth = ctx.decode(tokens(), logits="last")
        errors = []
        for rows in ((), range(4, 100), range(4, N - 16)):
            ctx.clear()
            logits, p = ctx.fill_and_decode(tokens(), mode="identity", split=3, n_tail=16, exact_rows=rows)
            errors.append(float(np.abs(logits[-1] - truth[-1]).max()))
        assert errors[0] > errors[1] > errors[2]


def test_a_deep_model_builds_its_graphs(pico_model, patched_lib):
    with Model(pico_model("qwen3", ftype="f16", n_layer=70, head=32)) as m, context(m) as ctx:
        truth = ctx.decode(tokens(), logits="last").tobytes()
        ctx.clear()
        logits, _ = ctx.fill_and_decode(tokens(), mode="plumb", split=35)
        assert logits[-1].tobytes() == np.frombuffer(truth, np.float32).reshape(1, -1)[-1].tobytes()
        ctx.clear()
        ctx.fill_and_decode(tokens(), mode="identity", split=35, n_tail=16)
