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
from ridgefill.splice import EXACT, FILLED, SPLICES, Splicer, splice
from ridgefill.tune import critical_layers

ROOT = Path(__file__).resolve().parents[1]
N, TAIL, SINK = 200, 40, 4


@pytest.fixture(scope="module")
def sidecar(model, corpus, tmp_path_factory):  # noqa: F811
    c = config(model, corpus, tmp_path_factory.mktemp("splice") / "kv.gguf", kinds=["kv"])
    cal.calibrate(c)
    return c.out


@pytest.fixture(scope="module")
def splicer(model, sidecar):  # noqa: F811
    with lib.Model(model) as m, lib.Maps(m, sidecar) as maps, Splicer(m, maps, 256, 1, SINK) as s:
        yield s


def item(seed: int = 0, answered: bool = True) -> SimpleNamespace:
    """A random prompt whose answer, whatever the random model says, counts as right after five tokens."""
    tokens = tuple(np.random.default_rng(seed).integers(5, 100, N).tolist())
    count = iter(range(1, 100))
    fact = SimpleNamespace(answered=lambda answer: answered, decided=lambda answer: next(count) > 5)
    return SimpleNamespace(tokens=tokens, n_tail=TAIL, fact=fact)


def test_copied_rows_are_the_source_rows_and_no_others_change(splicer):
    splicer.begin(item())
    ctx, il = splicer.ctx, splicer.model.n_layer - 1
    read = lambda seq, what: ctx.get_kv(seq, il, what, 0, N - TAIL)  # noqa: E731
    exact, filled, values = read(EXACT, "k"), read(FILLED, "k"), read(FILLED, "v")
    ctx.copy_kv(EXACT, FILLED, il, "k", 30, 60)
    found = read(FILLED, "k")
    assert np.array_equal(found[30:60], exact[30:60]) and np.abs(found[30:60] - filled[30:60]).max() > 0
    rest = np.r_[0:30, 60 : N - TAIL]
    assert np.array_equal(found[rest], filled[rest]) and np.array_equal(read(FILLED, "v"), values)


def test_every_upper_layer_copied_gives_the_exact_logits(splicer):
    prompt = item(1)
    splicer.begin(prompt)
    ctx, tail = splicer.ctx, list(prompt.tokens[-TAIL:])
    expected, before = (ctx.decode(tail, pos0=N - TAIL, seq=seq).tobytes() for seq in (EXACT, FILLED))
    assert before != expected
    for seq in (EXACT, FILLED):
        ctx.seq_rm(seq, N - TAIL)
    for il in range(splicer.model.n_layer):
        for what in "kv":
            ctx.copy_kv(EXACT, FILLED, il, what, 0, N - TAIL)
    assert ctx.decode(tail, pos0=N - TAIL, seq=FILLED).tobytes() == expected


def test_a_splice_leaves_nothing_behind(splicer):
    splicer.begin(item(2))
    exact, filled = splicer.score(EXACT), splicer.score(FILLED)
    assert exact.hit and exact.log_prob > filled.log_prob
    spliced = splicer.score(FILLED, splicer.model.n_layer - 1, "kv")
    assert spliced != filled
    assert splicer.score(FILLED) == filled and splicer.score(EXACT) == exact


def test_records_hold_every_splice_of_every_layer(splicer):
    layers = [3, 4]
    records = splice(splicer, item(3), layers)
    assert [(r["splice"], r["layer"]) for r in records] == [("exact", -1), ("filled", -1), *((s, il) for s in SPLICES for il in layers)]
    assert splice(splicer, item(3, answered=False), layers) == []


def test_what_cannot_be_copied_is_refused(splicer, model):  # noqa: F811
    splicer.begin(item(4))
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
        with Splicer(m, maps, 512, 2, SINK) as s:
            records = [r for i in items for r in splice(s, i, [17, 18])]
    by_layer = {row["layer"]: row for row in critical_layers(records)}
    print(by_layer)
    assert [row["carries"] for row in by_layer.values()] == [False, True]
    drop, gain = ({il: row[name]["log_prob"] for il, row in by_layer.items()} for name in ("filled keys", "exact keys"))
    assert drop[18] < 3 * min(drop[17], 0) and drop[18] < 0
    assert gain[18] > 2 * max(gain[17], 0)
