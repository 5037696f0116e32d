"""The choice that `ridgefill tune` makes from what it measured, the cost that it counts, and models with a layer that does nothing."""
from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from calibrate_pico import corpus, library, model  # noqa: F401
from model_layers import with_noop
from ridgefill import calibrate, cli, lib
from ridgefill.cost import Cost, Recipe
from ridgefill.tune import Candidate, Config, Tuned, Tuner, critical_layers, mark_pareto


def candidate(split=19, kind="kv", tail=512, cost=0.7, recall=1.0, loss=0.02, key_loss=0.5) -> Candidate:
    return Candidate(split, kind, tail, cost, recall, round(24 * recall), loss, key_loss)


@pytest.fixture
def tuner(tmp_path, model):  # noqa: F811
    c = calibrate.Config(model=str(model), out=str(tmp_path / "t.gguf"), splits=[], text=[])
    with Tuner(Config(c)) as t:
        yield t


def test_the_cheapest_within_both_limits_is_chosen(tuner):
    cheap_but_forgets, cheap_but_loses = candidate(cost=0.5, recall=0.9), candidate(cost=0.6, loss=0.04)
    good, dearer = candidate(cost=0.7, loss=0.029), candidate(cost=0.8, loss=0.001)
    assert tuner.choose([dearer, cheap_but_forgets, good, cheap_but_loses]) is good


def test_where_none_is_within_the_limits_the_least_loss_is_chosen_and_said(tuner):
    a, b = candidate(cost=0.5, loss=0.2), candidate(cost=0.7, loss=0.1)
    assert tuner.choose([a, b, candidate(recall=0.2, loss=None)]) is b and not tuner.keeps(b)
    tuned = Tuned("o", 18, [], [a, b], b, 24, {"asked": 24, "exact": 20, "filled": 15}, tuner.keeps(b))
    assert "comes closest to keeping" in tuned.sentences()[1]


def test_pareto_front():
    best, cheaper, beaten, unmeasured = (
        candidate(cost=0.7, key_loss=0.2), candidate(cost=0.6, key_loss=0.4),
        candidate(cost=0.7, key_loss=0.3), candidate(cost=0.5, recall=0.1, key_loss=None),
    )  # fmt: skip
    found = [best, cheaper, beaten, unmeasured]
    mark_pareto(found)
    assert [c.pareto for c in found] == [True, True, False, True]


def splices(hits: dict[int, float]) -> list[dict]:
    """Ten prompts; filling the keys of a layer alone leaves this share of them."""
    records = []
    for i in range(10):
        records += [{"splice": s, "layer": -1, "log_prob": p, "hit": s == "exact"} for s, p in (("exact", -0.1), ("filled", -5.0))]
        for il, share in hits.items():
            hit = i < 10 * share
            records.append({"splice": "filled keys", "layer": il, "log_prob": -0.1 if hit else -4.1, "hit": hit})
            records.append({"splice": "exact keys", "layer": il, "log_prob": -4.5, "hit": False})
    return records


def test_layers_that_carry_recall():
    rows = critical_layers(splices({16: 1.0, 17: 0.5, 18: 0.0, 19: 0.6}))
    assert [(r["layer"], r["carries"]) for r in rows] == [(16, False), (17, True), (18, True), (19, False)]
    assert rows[2]["filled keys"] == {"hits": 0.0, "log_prob": pytest.approx(-4.0)}
    assert rows[2]["exact keys"]["log_prob"] == pytest.approx(0.5)


def test_splits_begin_with_the_highest_layer_that_carries_recall(tuner):
    tuner.model.n_layer = 30
    assert tuner._splits(critical_layers(splices({16: 0.5, 17: 1.0, 18: 0.0, 19: 1.0}))) == [18, 19, 20]
    assert tuner._splits(critical_layers(splices({16: 1.0, 17: 1.0}))) == [16, 17, 18]
    tuner.model.n_layer = 20
    assert tuner._splits(critical_layers(splices({17: 1.0, 18: 0.0}))) == [18]


def test_cost_counts_the_matrices_of_the_file(model):  # noqa: F811
    cost = Cost(str(model))
    tensors = gguf.GGUFReader(model).tensors
    per_layer = sum(int(np.prod(t.shape)) for t in tensors if t.name.startswith("blk.1.") and len(t.shape) > 1)
    with lib.Model(model) as m:
        n_layer, width = m.n_layer, m.n_head * m.head_size
        n_embd, kv = m.n_embd, 2 * m.n_head_kv * m.head_size
    n, r = 100, Recipe(2, "kv_prev", 20)
    assert cost.exact(n) == n_layer * (n * per_layer + 2 * width * n * (n + 1) // 2)
    kept = [*range(4), *range(80, 100)]
    upper = len(kept) * per_layer + 2 * width * sum(p + 1 for p in kept)
    fill = 76 * (n_embd * kv + (n_layer - 3) * 2 * n_embd * kv)
    assert cost.filled(n, r) == cost.exact(n) * 2 / n_layer + (n_layer - 2) * upper + fill
    by_kind = {kind: cost.filled(n, dataclasses.replace(r, kind=kind, rank=8)) for kind in ("kv", "kv_prev", "input", "input_lr")}
    assert by_kind["kv"] < by_kind["kv_prev"] and by_kind["kv"] < by_kind["input_lr"] < by_kind["input"]
    assert by_kind["input_lr"] - by_kind["kv"] == 76 * (n_layer - 3) * n_embd * 2 * 8


def test_a_noop_layer_changes_nothing_but_the_depth(model, tmp_path):  # noqa: F811
    longer = with_noop(model, tmp_path / "longer.gguf", after=2)
    tokens = list(range(5, 90))
    logits = {}
    for path in (model, longer):
        with lib.Model(path) as m, lib.Context(m, 128, n_threads=1) as ctx:
            logits[path] = ctx.decode(tokens, logits="all"), m.n_layer
    assert logits[longer][1] == logits[model][1] + 1
    assert np.array_equal(logits[longer][0], logits[model][0])


def test_a_model_that_recalls_nothing_cannot_be_tuned(model, corpus, tmp_path):  # noqa: F811
    """The random model: the run says so, and leaves no sidecar."""
    out = tmp_path / "t.gguf"
    result = CliRunner().invoke(cli.app, ["tune", str(model), "--text", str(corpus), "--out", str(out), "--threads", "1"])
    assert result.exit_code != 0
    assert "held-out text: expected a document with at least 768 tokens of sentences, found none" in result.stderr
    assert not out.exists()


def test_a_sidecar_that_exists_is_kept(model, tmp_path):  # noqa: F811
    out = tmp_path / "t.gguf"
    out.write_text("mine")
    result = CliRunner().invoke(cli.app, ["tune", str(model), "--text", str(tmp_path), "--out", str(out)])
    assert result.exit_code == 6 and out.read_text() == "mine"
