"""Splices: rows of single layers exchanged between an exact and a filled prompt, and what that says of SmolLM2."""
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from calibrate_pico import config, corpus, library, model  # noqa: F401
from ridgefill import calibrate as cal
from ridgefill import lib
from ridgefill.errors import RidgeError
from ridgefill.evaluation import facts, texts
from ridgefill.splice import EXACT, FILLED, NORMED, NORMS, SPLICES, WORK, Splicer, replace_keys, splice
from ridgefill.tune import critical_layers

ROOT = Path(__file__).resolve().parents[1]
N, TAIL, SINK = 200, 40, 4


@pytest.fixture(scope="module")
def sidecar(model, corpus, tmp_path_factory):  # noqa: F811
    c = config(model, corpus, tmp_path_factory.mktemp("splice") / "kv.gguf", kinds=["kv"])
    cal.calibrate(c)
    return c.out


@pytest.fixture(scope="module")
def splicer(model):  # noqa: F811
    with lib.Model(model) as m, Splicer(m, 256, 1, SINK) as s:
        yield s


@pytest.fixture(scope="module")
def maps(splicer, sidecar):
    with lib.Maps(splicer.model, sidecar) as maps:
        yield maps


def item(seed: int = 0, answered: bool = True) -> SimpleNamespace:
    """A random prompt whose answer, whatever the random model says, counts as right after five tokens."""
    tokens = tuple(np.random.default_rng(seed).integers(5, 100, N).tolist())
    count = iter(range(1, 100))
    fact = SimpleNamespace(answered=lambda answer: answered, decided=lambda answer: next(count) > 5)
    return SimpleNamespace(tokens=tokens, n_tail=TAIL, fact=fact)


def begin(splicer: Splicer, prompt: SimpleNamespace, maps: lib.Maps) -> None:
    assert splicer.begin(prompt, prompt.fact, maps)


def test_copied_rows_are_the_source_rows_and_no_others_change(splicer, maps):
    begin(splicer, item(), maps)
    ctx, il = splicer.ctx, splicer.model.n_layer - 1
    read = lambda seq, what: ctx.get_kv(seq, il, what, 0, N - TAIL)  # noqa: E731
    exact, filled, values = read(EXACT, "k"), read(FILLED, "k"), read(FILLED, "v")
    ctx.copy_kv(EXACT, FILLED, il, "k", 30, 60)
    found = read(FILLED, "k")
    assert np.array_equal(found[30:60], exact[30:60]) and np.abs(found[30:60] - filled[30:60]).max() > 0
    rest = np.r_[0:30, 60 : N - TAIL]
    assert np.array_equal(found[rest], filled[rest]) and np.array_equal(read(FILLED, "v"), values)


def test_every_upper_layer_copied_gives_the_exact_logits(splicer, maps):
    prompt = item(1)
    begin(splicer, prompt, maps)
    ctx, tail = splicer.ctx, list(prompt.tokens[-TAIL:])
    expected, before = (ctx.decode(tail, pos0=N - TAIL, seq=seq).tobytes() for seq in (EXACT, FILLED))
    assert before != expected
    for seq in (EXACT, FILLED):
        ctx.seq_rm(seq, N - TAIL)
    for il in range(splicer.model.n_layer):
        for what in "kv":
            ctx.copy_kv(EXACT, FILLED, il, what, 0, N - TAIL)
    assert ctx.decode(tail, pos0=N - TAIL, seq=FILLED).tobytes() == expected


def test_a_splice_leaves_nothing_behind(splicer, maps):
    begin(splicer, item(2), maps)
    exact, filled = splicer.score(EXACT), splicer.score(FILLED)
    assert exact.hit and exact.log_prob > filled.log_prob
    spliced = splicer.score(FILLED, EXACT, [splicer.model.n_layer - 1], "kv")
    assert spliced != filled
    assert splicer.score(FILLED) == filled and splicer.score(EXACT) == exact


def test_records_hold_every_splice_of_every_layer(splicer, maps):
    layers = [3, 4]
    records = splice(splicer, item(3), item(3).fact, maps, layers)
    assert [(r["splice"], r["layer"]) for r in records] == [("exact", -1), ("filled", -1), *((s, il) for s in SPLICES for il in layers)]
    assert splice(splicer, item(3), item(3, answered=False).fact, maps, layers) == []


def test_splices_of_all_layers_at_once(splicer, maps):
    records = splice(splicer, item(5), item(5).fact, maps, [3, 4], SPLICES | NORMS, together=True)
    found = {(r["splice"], r["layer"]): r["log_prob"] for r in records}
    assert len(found) == len(records) == 2 + 3 * 5
    # up to layer 2 both hold nearly the same: with all others exchanged one is the other
    assert abs(found["exact both", -1] - found["exact", -1]) < 1e-3 < 0.1 < abs(found["filled", -1] - found["exact", -1])
    assert len({found["exact keys", il] for il in (-1, 3, 4)}) == 3


def test_keys_of_exact_length_keep_their_direction(splicer, maps):
    begin(splicer, item(6), maps)
    ctx, filled = splicer.ctx, splicer.score(FILLED)
    assert splicer.score(FILLED, NORMED, [3], "k") != filled == splicer.score(FILLED)
    for il in range(splicer.model.n_layer):
        exact, mine, normed = (ctx.get_kv(seq, il, "k", 0, N - TAIL) for seq in (EXACT, FILLED, NORMED))
        assert np.array_equal(ctx.get_kv(NORMED, il, "v", 0, N - TAIL), ctx.get_kv(FILLED, il, "v", 0, N - TAIL))
        if il <= maps.split:
            assert np.array_equal(normed, mine)
            continue
        lengths = [np.linalg.norm(k, axis=-1) for k in (exact, mine, normed)]
        assert np.abs(lengths[2] / lengths[0] - 1).max() < 2e-3 < 0.05 < np.abs(lengths[1] / lengths[0] - 1).max()
        assert ((normed * mine).sum(-1) / lengths[1] / lengths[2]).min() > 0.9999


def test_keys_are_replaced_in_their_layer_and_rows_alone(splicer, maps):
    begin(splicer, item(7), maps)
    ctx, n = splicer.ctx, N - TAIL
    before = {(il, what): ctx.get_kv(EXACT, il, what, 0, n) for il in range(splicer.model.n_layer) for what in "kv"}
    keys = before[3, "k"].copy()
    keys[50] = 0.5
    for target in (WORK, EXACT):  # another sequence, and the same one
        replace_keys(ctx, EXACT, target, {3: keys})
        for (il, what), expected in before.items():
            assert np.array_equal(ctx.get_kv(target, il, what, 0, n), keys if (il, what) == (3, "k") else expected)
    assert ctx.seq_pos_max(EXACT) == n - 1


def test_keys_of_other_types_cannot_be_replaced(splicer):
    with lib.Context(splicer.model, 256, type_k="q8_0", n_threads=1) as ctx:
        ctx.decode(list(item().tokens[:20]))
        with pytest.raises(RidgeError, match="keys of layer 3: expected them once in the state of sequence 0, found them 0 times"):
            replace_keys(ctx, 0, 0, {3: ctx.get_kv(0, 3, "k", 0, 20)})


def test_what_cannot_be_copied_is_refused(splicer, maps, model):  # noqa: F811
    begin(splicer, item(4), maps)
    with pytest.raises(RidgeError, match="expected 10 rows of sequence 0 in the cache, found 0"):
        splicer.ctx.copy_kv(EXACT, FILLED, 3, "k", 500, 510)
    with pytest.raises(RidgeError, match="layer 99 has no KV cache"):
        splicer.ctx.copy_kv(EXACT, FILLED, 99, "k", 0, 10)
    tokens = list(item().tokens[:20])
    with lib.Context(splicer.model, 256, n_seq_max=2, kv_unified=True, n_threads=1) as ctx:
        ctx.decode(tokens)
        ctx.seq_cp(0, 1)  # the same cells
        with pytest.raises(RidgeError, match="position 0 shared by 2 sequences"):
            ctx.copy_kv(0, 1, 3, "k", 0, 10)
    with lib.Context(splicer.model, 512, n_seq_max=2, flash_attn=False, n_threads=1) as ctx:
        for seq in (0, 1):
            ctx.decode(tokens, seq=seq)
        ctx.copy_kv(0, 1, 3, "k", 0, 10)
        with pytest.raises(RidgeError, match="found them transposed"):
            ctx.copy_kv(0, 1, 3, "v", 0, 10)


def test_layer_18_of_smollm2_carries_recall(patched_lib, smollm2_f32, text_set):
    lib.load(patched_lib)
    novels = texts.documents(text_set, "evaluation", facts.FILLER_SOURCES)
    with lib.Model(smollm2_f32) as m, lib.Maps(m, ROOT / "models" / "smollm2-135m-instruct.s15.q8_0.ridge.gguf") as maps:
        items = facts.make_items(m, novels, "digits", 2, 5, 448, 96)
        with Splicer(m, 512, 2, SINK) as s:
            records = [r for i in items for r in splice(s, i, i.fact, maps, [17, 18])]
    by_layer = {row["layer"]: row for row in critical_layers(records)}
    print(by_layer)
    assert [row["carries"] for row in by_layer.values()] == [False, True]
    drop, gain = ({il: row[name]["log_prob"] for il, row in by_layer.items()} for name in ("filled keys", "exact keys"))
    assert drop[18] < 3 * min(drop[17], 0) and drop[18] < 0
    assert gain[18] > 2 * max(gain[17], 0)
