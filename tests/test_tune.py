"""The choice that `ridgefill tune` makes from what it measured, the cost that it counts, and models with a layer that does nothing."""
from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

from calibrate_pico import config, corpus, library, model  # noqa: F401
from model_layers import with_noop
from ridgefill import calibrate, cli, lib, score, sidecar, tune
from ridgefill.cost import Cost, Recipe
from ridgefill.errors import RidgefillError
from ridgefill.tune import Candidate, Config, Found, Tuned, Tuner, critical_layers, mark_pareto


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
    tuned = Tuned("o", 15, 18, [], [a, b], b, 24, {"asked": 24, "exact": 20, "filled": 15}, tuner.keeps(b))
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


@pytest.mark.parametrize(
    "n_layer, keeps, hits, splits",
    [
        (30, False, {16: 0.5, 17: 1.0, 18: 0.0, 19: 1.0}, [18, 19, 20]),  # from the highest layer that carries recall on
        (20, False, {17: 1.0, 18: 0.0}, [18]),  # and no further than the model goes
        (30, True, {16: 1.0, 17: 1.0}, [15, 16, 17]),  # nothing is forgotten: the lowest that were looked at
        (30, False, {16: 1.0, 17: 1.0}, [16, 22, 28]),  # it is, and no single layer tells why: look everywhere above
    ],
)
def test_splits_to_be_measured(tuner, n_layer, keeps, hits, splits):
    tuner.model.n_layer = n_layer
    assert tuner._splits(Found(15, keeps, critical_layers(splices(hits)))) == splits


def test_recall_in_the_last_layer_leaves_nothing_to_fill(tuner):
    tuner.model.n_layer = 20
    with pytest.raises(RidgefillError, match="below layer 19, the last, found them there"):
        tuner._splits(Found(15, False, critical_layers(splices({18: 1.0, 19: 0.0}))))


CRITICAL = 3  # of five layers; the middle is 2


@dataclasses.dataclass
class Oracle:
    """Stands in for what a model would answer: keys of layer CRITICAL carry recall, kv forgets a third, losses by kind and tail."""

    loss: dict = dataclasses.field(default_factory=lambda: {"kv": 0.01, "kv_prev": 0.02})
    asked: int = 0

    def splice(self, splicer, item, judge, maps, layers):
        self.asked += 1
        whole = [{"splice": s, "layer": -1, "log_prob": p, "hit": s == "exact"} for s, p in (("exact", -0.1), ("filled", -5.0))]
        return whole + [{"splice": "filled keys", "layer": il, "log_prob": -4.0, "hit": il != CRITICAL} for il in layers]

    def ask(self, engine, arm, item):
        self.asked += 1
        return {"arm": arm.name, "seed": item.seed, "hit": arm.kind != "kv" or item.seed % 3 > 0}

    def score_window(self, engine, arms, window, n_tail):
        self.asked += 1
        more = {arm.name: self.loss.get(arm.kind, 0.0) * (64 / n_tail) for arm in arms}
        common = {"document": window.document, "top1": 1.0, "kl": 0.0, "kl_median": 0.0, "decode": None, "quoted": None, "cost": 1.0, "n_new": 0, "n_key": 1}
        return [common | {"arm": name, "loss": 2.0 + x, "key_loss_sum": x} for name, x in more.items()]


@pytest.fixture
def oracle(monkeypatch):
    o = Oracle()
    monkeypatch.setattr(tune, "splice", o.splice)
    monkeypatch.setattr(tune.facts, "ask", o.ask)
    monkeypatch.setattr(tune.loss, "score_window", o.score_window)
    monkeypatch.setattr(Tuner, "_facts", lambda self, documents, kind, n: [SimpleNamespace(seed=i, fact=None) for i in range(n)])
    monkeypatch.setattr(Tuner, "_windows", lambda self, documents: [SimpleNamespace(document=f"d{i}") for i in range(3)])
    return o


def run(model, corpus, out, **kw) -> Tuned:  # noqa: F811
    c = config(model, corpus, out, splits=[], kinds=[], n_tokens=300)
    with Tuner(Config(c, splice_tokens=300, splice_probes=3, probes=9, probe_rows=64, window_prefix=64, window_scored=16, **kw)) as t:
        return t.run()


def test_a_whole_run_writes_the_recipe_that_was_measured_best(model, corpus, oracle, tmp_path):  # noqa: F811
    tuned = run(model, corpus, tmp_path / "t.gguf", tails=[64])
    assert (tuned.base, tuned.critical, tuned.n_exact, tuned.keeps) == (2, CRITICAL, 9, True)
    assert {(c.split, c.kind): c.recall for c in tuned.candidates} == {(3, "kv"): pytest.approx(2 / 3), (3, "kv_prev"): 1.0}
    assert [c.loss for c in tuned.candidates] == [None, pytest.approx(0.02)]  # what forgets is not measured further
    keys = sidecar.inspect(tmp_path / "t.gguf")["keys"]
    assert (keys["ridge.split"], keys["ridge.kind"], keys["ridge.tail"]) == (3, "kv_prev", 64)
    assert keys["ridge.score.n_tokens"] > 0


def test_a_run_stopped_at_its_end_asks_nothing_again(model, corpus, oracle, tmp_path, monkeypatch):  # noqa: F811
    out, judge = tmp_path / "t.gguf", score.judge
    stop = lambda *a: (_ for _ in ()).throw(KeyboardInterrupt)  # noqa: E731
    monkeypatch.setattr(score, "judge", stop)
    with pytest.raises(KeyboardInterrupt):
        run(model, corpus, out)
    asked, oracle.asked = oracle.asked, 0
    assert asked > 0 and not out.exists()
    monkeypatch.setattr(score, "judge", judge)
    assert run(model, corpus, out).keeps and oracle.asked == 0 and out.exists()


def test_each_tail_is_judged_by_its_own_loss(model, corpus, oracle, tmp_path):  # noqa: F811
    """The shorter tail costs less and loses too much; tails beyond the windows' differ by cost alone."""
    tuned = run(model, corpus, tmp_path / "t.gguf", tails=[32, 64, 128], window_tail=64)
    losses = {c.tail: c.loss for c in tuned.candidates if c.kind == "kv_prev"}
    assert losses == {32: pytest.approx(0.04), 64: pytest.approx(0.02), 128: pytest.approx(0.02)}
    assert tuned.chosen.tail == 64


def test_cost_counts_the_matrices_of_the_file(model):  # noqa: F811
    tensors = gguf.GGUFReader(model).tensors
    per_layer = sum(int(np.prod(t.shape)) for t in tensors if t.name.startswith("blk.1.") and len(t.shape) > 1)
    with lib.Model(model) as m:
        n_layer, width = m.n_layer, m.n_head * m.head_size
        n_embd, kv = m.n_embd, 2 * m.n_head_kv * m.head_size
    cost = Cost(str(model), n_layer)
    # where a model passes its blocks twice, a row passes twice as many layers of the same size
    assert Cost(str(model), 2 * n_layer).exact(100) == 2 * cost.exact(100)
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
