"""`ridgefill evaluate`: figures of an arm against what they are defined as, the run, its folder and its report."""

from __future__ import annotations

import base64
import csv
import dataclasses
import html.parser
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ridgefill import cli, lib, machine, native
from ridgefill.cost import Cost
from ridgefill.errors import OutputExists
from ridgefill.evaluation import Arm, Engine, EvaluationError, arms, loss, page, plots, report, study, tasks, texts
from ridgefill.evaluation.attended import AttendedRows
from ridgefill.evaluation.folder import Folder, folder_name
from ridgefill.evaluation.journal import Journal
from ridgefill.reference import Weights, forward
from ridgefill.reference.forward import _linear, _turned, rms_norm, softmax
from test_evaluation import fact_records, loss_records
from test_evaluation_tasks import natural
from typer.testing import CliRunner

N_SINK = 4
SHAPE = {"n_layer": 6, "head": 32, "n_head": 2, "n_head_kv": 1}


#
# figures
#


def window(tokens, n_prefix: int, name: str = "doc") -> texts.Window:
    return texts.Window(name, "test", 0, tuple(map(int, tokens)), n_prefix)


def test_new_tokens_are_those_that_no_run_of_the_prompt_holds():
    prompt = list(range(20))
    # 5..8 continue the prompt's end only in part; 3..6 are a run of four that the prompt holds
    scored = [50, 3, 4, 5, 6, 51, 7, 8, 9, 52]
    found = loss.new_tokens(window(prompt + scored, 20), n=4)
    assert found.tolist() == [True, False, False, False, False, True, True, True, True, True]
    # a run may begin in the prompt: 18 19 | 60 61 is in it before
    found = loss.new_tokens(window([18, 19, 60, 61, *range(20), 60, 61, 62], 24), n=4)
    assert found.tolist() == [False, False, True]
    # a run that the scored tokens repeat among themselves is new
    assert loss.new_tokens(window([*prompt, *[70, 71, 72, 73] * 2], 20), n=4).all()
    assert loss.new_tokens(window(range(30), 20)).all() and loss.N_GRAM == 8


@pytest.mark.parametrize("found, share", [([1, 2, 3, 4], 1), ([1, 2, 9, 4], 0.5), ([9, 2, 3, 4], 0), ([1, 9, 3, 4], 0.25)])
def test_agreement_ends_at_the_first_other_token(found, share):
    assert loss.agreement(np.array(found), [1, 2, 3, 4]) == share


def test_what_is_quoted_stands_in_the_source_as_it_is():
    source = [10, 11, 12, 13, 14, 15]
    # of 9 11 12 13 | 11 12 13 14 | 12 13 14 15 | 13 14 15 10 the source holds two
    assert loss.quoted([9, 11, 12, 13, 14, 15, 10], source, n=4) == 0.5
    assert loss.quoted([11, 12, 13, 14], source, n=4) == 1 and loss.quoted([14, 13, 12, 11], source, n=4) == 0
    assert loss.quoted([10, 11, 12, 13], [10, 11, 12, 9, 13], n=4) == 0
    assert loss.quoted([11, 12, 13], source, n=4) is None
    assert loss.quoted(source * 2, source * 2) == 1 and loss.quoted(source, source) is None  # 8 tokens


@pytest.fixture(scope="module")
def engine(patched_lib, pico_model):
    lib.load(patched_lib)
    maps = [SimpleNamespace(split=2, kind=kind) for kind in ("kv", "input")]
    with lib.Model(pico_model("llama", **SHAPE)) as model, Engine(model, maps, 512, n_threads=1, n_sink=N_SINK) as e:
        yield e


@pytest.fixture
def text(engine):
    return window(np.random.default_rng(5).integers(3, 259, 260), 200)


def test_kl_is_that_of_the_definition(engine, text):
    record = {r["arm"]: r for r in loss.score_window(engine, [Arm("exact"), Arm("identity", 2)], text, 64)}["identity-S2"]
    p, q = (loss.read(engine, a, text, 64).logits.astype(np.float64) for a in (Arm("exact"), Arm("identity", 2)))
    p, q = (np.exp(x - x.max(1, keepdims=True)) for x in (p, q))
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    kl = (p * np.log(p / q)).sum(1)
    assert record["kl"] == pytest.approx(kl.mean(), rel=1e-3) and record["kl_median"] == pytest.approx(np.median(kl), rel=1e-3)
    assert sum(record["kl_counts"]) == 60
    lower = [10 ** (-8 + i / 4) for i in range(40)]  # four bins to a factor of ten
    expected = [sum(low <= x < low * 10**0.25 for x in kl) for low in lower]
    assert np.abs(np.array(record["kl_counts"]) - expected).sum() <= 2  # single precision may move one over an edge


@pytest.mark.parametrize("arm", ["identity-S2", "nofill-S3", "cut", "identity-S4+tail=0.5"])
def test_greedy_text_is_compared_with_exacts(engine, text, arm):
    def greedy(a: Arm) -> list[int]:
        rest, pos0, _ = engine.begin(a, text.tokens[:200], 64)
        return lib.greedy(engine.ctx, engine.ctx.decode(rest, pos0=pos0)[0], 12, stop_at_eog=False)

    mine, exact = greedy(Arm.parse(arm)), greedy(Arm("exact"))
    first = next((i for i, (a, b) in enumerate(zip(mine, exact, strict=True)) if a != b), 12)
    records = loss.score_window(engine, [Arm("exact"), Arm.parse(arm)], text, 64, n_decode=12)
    assert [r["decode"] for r in records] == [1.0, first / 12]
    plain = loss.score_window(engine, [Arm("exact"), Arm.parse(arm)], text, 64)
    assert [r["decode"] for r in plain] == [None, None]
    # what is decoded behind the prompt leaves the scored tokens alone
    assert [r["loss"] for r in plain] == [r["loss"] for r in records]


def test_quotes_of_the_tail_do_not_count(engine, text, monkeypatch):
    continued = list(text.tokens[127:139])  # five runs of 8, of which the tail, from 136 on, leaves the first two
    monkeypatch.setattr(loss.lib, "greedy", lambda *_, **__: continued)
    records = loss.score_window(engine, [Arm("exact"), Arm("identity", 2)], text, 64, n_decode=12)
    assert [r["quoted"] for r in records] == [2 / 5, 2 / 5]


def test_pop_fills_every_row_but_the_last_above_two_thirds_of_the_layers(engine, text):
    found, cost = loss.read(engine, Arm("pop"), text, 64), Cost(engine.model.path, 6)
    assert found.filled.filled.tolist() == list(range(199)) and found.filled.chosen == ()
    kept = np.arange(200) == 199
    assert found.filled.cost == pytest.approx(cost.partly(kept, 4, cost.fill(4, "identity")) / cost.exact(200))
    with lib.Context(engine.model, 512, n_threads=1) as ctx:
        ctx.prefill(text.tokens[:200], mode="identity", split=4, n_tail=1, n_sink=0).run()
        expected = ctx.decode(text.tokens[199:259], pos0=199, logits="all")
    assert np.array_equal(found.logits, expected)


def test_rows_are_chosen_by_the_attention_of_the_last_ones(engine, text):
    """Against the oracle's keys and queries of its own, summed over heads and the layers below the split."""
    prompt, weights = text.tokens[:200], Weights(engine.model.path)
    run, h, last = forward(weights, prompt), weights.hparams, np.arange(136, 200)
    mass = np.zeros((6, 200))
    for il in range(6):
        z = rms_norm(run.x[il][last], weights.layer(il, "attn_norm.weight"), h.eps)
        q = _turned(weights, il, "q", _linear(weights, il, "q", z, h.n_head), last)
        for head in range(h.n_head):
            scores = q[:, head] @ run.k[il][:, head // (h.n_head // h.n_head_kv)].T * h.attention_scale
            mass[il] += softmax(np.where(np.arange(200) > last[:, None], -np.inf, scores)).sum(0)
    found = AttendedRows(engine.model).masses(engine.ctx, prompt, 6)
    assert found.sum() == pytest.approx(6 * 64 * h.n_head) and np.abs(found - mass).max() < 0.01 * mass.max()
    for split in (2, 4):
        of_split = mass[:split].sum(0)[N_SINK:136]
        chosen = engine.choose(Arm.parse(f"identity-S{split}+attention=0.1"), prompt, 64, seed=0)
        assert chosen == sorted(set(chosen)) and len(chosen) == 13 and all(N_SINK <= r < 136 for r in chosen)
        got = of_split[np.array(chosen) - N_SINK].sum()
        assert np.sort(of_split)[-13:].sum() * 0.999 < got
    assert engine.ctx.seq_pos_max() == -1 and engine.ctx._layers == ()


def test_the_attention_of_a_prompt_is_computed_once(engine, text, monkeypatch):
    rows, decoded = AttendedRows(engine.model), []
    compute = rows._compute
    monkeypatch.setattr(rows, "_compute", lambda ctx, prompt, n: decoded.append(n) or compute(ctx, prompt, n))
    deep = rows.select(engine.ctx, text.tokens[:200], 4, 136, 13, 4, 0)
    assert rows.select(engine.ctx, text.tokens[:200], 4, 136, 13, 2, 5) and decoded == [4, 5]
    assert rows.select(engine.ctx, text.tokens[:200], 4, 136, 13, 4, 5) == deep and decoded == [4, 5]
    rows.select(engine.ctx, text.tokens[1:200], 4, 135, 13, 4, 5)
    assert decoded == [4, 5, 5]


def test_noise_is_exact_in_other_pieces(engine, text):
    exact, noise = loss.score_window(engine, [Arm("exact"), Arm("noise")], text, 64)
    assert 0 <= abs(noise["kl"]) < 1e-4 and noise["cost"] == exact["cost"] == 1 and noise["n_filled"] == 0
    engine.begin(Arm("noise"), text.tokens[:200], 64)
    assert engine.ctx.n_ubatch == arms.NOISE_UBATCH < 200
    engine.begin(Arm("exact"), text.tokens[:200], 64)
    assert engine.ctx.n_ubatch > 200


@pytest.mark.parametrize("kind", ["kv", "input"])
def test_the_tail_of_equal_cost_is_the_shortest_that_costs_as_much(engine, text, kind):
    prompt, cost = text.tokens[:200], Cost(engine.model.path, engine.model.n_layer)
    rows = engine.choose(Arm("nofill", 2, "equal", kind), prompt, 64, 0)
    assert rows == list(range(136 - len(rows), 136)) and 0 < len(rows) < 132

    def nofill(n: int) -> float:
        kept = np.array([i < N_SINK or i >= 136 - n for i in range(200)])
        return cost.partly(kept, 2, 0.0, hidden=True)

    kept = np.array([i < N_SINK or i >= 136 for i in range(200)])
    fill = cost.partly(kept, 2, cost.fill(2, kind))
    assert nofill(len(rows) - 1) < fill <= nofill(len(rows))
    if kind == "kv":
        assert len(rows) < len(engine.choose(Arm("nofill", 2, "equal", "input"), prompt, 64, 0))


def test_costs_of_records_are_counted_as_the_arms_say(engine, text):
    names = ["exact", "cut", "nofill-S2", "identity-S2", "identity-S2+tail=0.1", "identity-S4"]
    costs = {r["arm"]: r["cost"] for r in loss.score_window(engine, [Arm.parse(a) for a in names], text, 64)}
    cost = Cost(engine.model.path, engine.model.n_layer)
    assert costs["exact"] == 1 and costs["cut"] == cost.exact(64) / cost.exact(200)
    kept = np.array([i < N_SINK or i >= 136 for i in range(200)])
    kv = 2 * engine.model.n_head_kv * engine.model.head_size * engine.model.n_embd
    assert costs["identity-S2"] == pytest.approx(cost.partly(kept, 2, 4 * kv) / cost.exact(200))
    assert costs["cut"] < costs["nofill-S2"] < costs["identity-S2"] < costs["identity-S2+tail=0.1"] < costs["identity-S4"] < 1


#
# conclusions
#


def test_conclusions_leave_the_noise_floor_out_of_the_family():
    summary = report.summarise_loss(loss_records({"exact": 0.0, "noise": 0.0, "fill-S19": 0.005, "identity-S19": 0.1}))
    family = report.conclude(summary, 0.02)
    report.adjust(family)
    assert [s["verdict"] for s in summary.values() if "verdict" in s] == ["equal", "equal", "apart"]
    assert "p_holm" not in summary["noise"] and "verdict" not in summary["exact"]
    assert summary["fill-S19"]["p_holm"] == pytest.approx(2 * summary["fill-S19"]["p"], abs=1e-9)


def test_hits_by_depth():
    depths = report.summarise_facts(fact_records({"exact": 40, "fill-S15": 6}))["fill-S15"]["depths"]
    assert [(d["depth"], d["hits"], d["n"]) for d in depths] == [(0.125, 2, 10), (0.375, 2, 10), (0.625, 1, 10), (0.875, 1, 10)]


CONTROLS = (("random", "tail"), ("attention", "random"), ("attention", "tail"))


def test_controls_stand_beside_what_they_control():
    found = study.default_arms([SimpleNamespace(split=2, kind="kv"), SimpleNamespace(split=2, kind="kv_prev")], 0.1)
    names = [a.name for a in found]
    assert len(set(names)) == len(names) == 4 + 2 + 2 * 5
    pairs = {(a.name, b.name) for a, b in report.control_pairs(found)}
    assert pairs == {
        ("fill-S2:kv_prev", "fill-S2:kv"),
        ("fill-S2:kv_prev+random=0.1", "fill-S2:kv+random=0.1"),
        ("fill-S2:kv_prev+tail=0.1", "fill-S2:kv+tail=0.1"),
        ("fill-S2:kv_prev+attention=0.1", "fill-S2:kv+attention=0.1"),
        *((f"fill-S2:{k}", b) for k in ("kv", "kv_prev") for b in ("identity-S2", f"nofill-S2:{k}+equal", "pop")),
        *((f"fill-S2:{k}+{a}=0.1", f"fill-S2:{k}+{b}=0.1") for k in ("kv", "kv_prev") for a, b in CONTROLS),
    }
    assert [a.name for a in study.default_arms([], 0.1)] == ["exact", "noise", "cut", "pop"]


#
# a run
#

ARMS = ("exact", "noise", "pop", "identity-S4", "identity-S4+random=0.1", "identity-S4+attention=0.1", "identity-S4+tail=0.1")
SMALL = study.Settings(
    documents=2, prefix=160, tail=48, scored=24, decode=9, items=2, rows=700, item_tail=220, seed=5, loss_arms=ARMS, item_arms=ARMS
)
DOCS = natural(4, 120)


@pytest.fixture
def run(engine):
    with study.Study(engine.model, [], DOCS, ["loss", "single", "frequent"], SMALL, n_threads=1) as s:
        yield s


def test_a_study_measures_every_set_and_goes_on_where_it_was(run, tmp_path, monkeypatch):
    whole = run.run(Journal(tmp_path / "whole", run.about))
    assert list(whole) == ["loss", "single", "frequent"]
    for what, found in whole.items():
        assert list(found["summary"]) == list(ARMS) and len(found["items"]) == 2 * len(ARMS)
        assert ("identity-S4+random=0.1", "identity-S4+tail=0.1") not in {(p["a"], p["b"]) for p in found["pairs"]}  # of fills only
        assert all(0 <= s["p_holm"] <= 1 for name, s in found["summary"].items() if name not in ("exact", "noise")), what
    asked, ask = [], tasks.ask

    def until_the_second(engine, arm, item):
        asked.append(item.seed)
        if len(set(asked)) > 1:
            raise KeyboardInterrupt
        return ask(engine, arm, item)

    monkeypatch.setattr(tasks, "ask", until_the_second)
    with pytest.raises(KeyboardInterrupt):
        run.run(Journal(tmp_path / "parts", run.about))
    monkeypatch.setattr(tasks, "ask", lambda *a: asked.append(a[2].seed) or ask(*a))
    asked.clear()
    assert run.run(Journal(tmp_path / "parts", run.about)) == whole
    assert len(asked) == 3 * len(ARMS)  # of four items one was done


def test_random_rows_are_the_same_for_every_arm_and_others_in_every_item(engine, monkeypatch):
    chosen: dict[tuple, list] = {}
    choose = engine.choose
    monkeypatch.setattr(engine, "choose", lambda arm, prompt, n_tail, seed: chosen.setdefault((arm.name, tuple(prompt)), choose(arm, prompt, n_tail, seed)))
    names = ["exact", "identity-S2+random=0.1", "nofill-S4+random=0.1"]
    tokens = np.random.default_rng(1).integers(3, 259, 220)
    for name in ("a", "b"):
        loss.score_window(engine, [Arm.parse(n) for n in names], window([*tokens[:199], 5 if name == "a" else 6, *tokens[200:]], 200, name), 64, seed=1)
    a, a2, b, b2 = chosen.values()
    assert a == a2 != b == b2 and len(a) == 13


def test_a_study_refuses_before_anything_runs(engine):
    refusals = [
        (["loss", "poems"], SMALL, "sets: expected some of loss, .*found poems"),
        (["loss"], dataclasses.replace(SMALL, documents=9), "expected at least 9 documents, found 4"),
        (["loss"], dataclasses.replace(SMALL, loss_arms=("exact", "fill-S2")), "fill-S2: expected one file of maps"),
        (["loss"], dataclasses.replace(SMALL, loss_arms=("exact", "nofill-S2+equal")), r"nofill-S2\+equal: expected one file of maps"),
        (["single"], dataclasses.replace(SMALL, items=999), "single: expected text for 999 prompts"),
        (["single"], dataclasses.replace(SMALL, sources=("poems",)), "filler: expected sources among novel, found poems"),
    ]
    for sets, s, message in refusals:
        with pytest.raises(EvaluationError, match=message):
            study.Study(engine.model, [], DOCS, sets, s, n_threads=1)
    maps = [SimpleNamespace(split=2, kind=kind, n_sink=n) for kind, n in (("kv", 4), ("input", 8))]
    with pytest.raises(EvaluationError, match="same number of sink rows in all, found 4, 8"):
        study.Study(engine.model, maps, DOCS, ["loss"], SMALL, n_threads=1)
    with pytest.raises(EvaluationError, match="expected names that differ, found doc-0 more than once"):
        study.Study(engine.model, [], [DOCS[0], DOCS[0]], ["loss"], SMALL, n_threads=1)
    with pytest.raises(EvaluationError, match="expected at most 8192 rows, which the model was trained for, found 9128"):
        study.Study(engine.model, [], DOCS, ["single"], dataclasses.replace(SMALL, rows=9000), n_threads=1)
    with pytest.raises(EvaluationError, match="tail: expected fewer than 156 rows, so that some can be filled, found 156"):
        dataclasses.replace(SMALL, tail=156)
    with pytest.raises(EvaluationError, match="items: expected a number of 1 or more, found 0"):
        dataclasses.replace(SMALL, items=0)


#
# folder and report
#


class Cells(html.parser.HTMLParser):
    """Cells of a page with the path of their value, and every address in it."""

    def __init__(self):
        super().__init__()
        self.cells, self.addresses, self._path = {}, [], None

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        self.addresses += [a[k] for k in ("src", "href") if k in a]
        self._path = a.get("data-path") if tag == "td" else None

    def handle_endtag(self, tag):
        self._path = None

    def handle_data(self, data):
        if self._path:
            self.cells[self._path] = data


@pytest.fixture(scope="module")
def finished(engine, tmp_path_factory):
    """A finished folder and its result as read back."""
    with study.Study(engine.model, [], DOCS, ["loss", "single", "frequent"], SMALL, n_threads=1) as s:
        place = Folder(tmp_path_factory.mktemp("results"), s.about)
        result = place.finish(s.run(place.journal))
    read = json.loads((place.path / "result.json").read_text())
    assert read == result
    return place.path, read


def numbers(value) -> list[float]:
    if isinstance(value, dict):
        return [value["value"]] if value["low"] == value["high"] else [value["value"], value["low"], value["high"]]
    return [value]


def check_values(cells: dict[str, str], result: dict) -> int:
    """Compare texts, each by the path of its value, with what stands there in a result: how many hold an interval."""
    n_intervals = 0
    for where, text in cells.items():
        value = result
        for key in where.split("/"):
            value = value[int(key)] if isinstance(value, list) else value[key]
        if isinstance(value, str):
            assert text == value
            continue
        written = re.findall(r"[+-]?(?:\d[\d,]*\.?\d*(?:e[+-]?\d+)?)", text)
        expected = numbers(value)
        n_intervals += len(expected) == 3
        assert len(written) == len(expected), (where, text)
        for w, e in zip(written, expected, strict=True):
            assert float(w.replace(",", "")) == pytest.approx(e, abs=0.51 * 10 ** -len(w.partition(".")[2].partition("e")[0]), rel=0.06), where
    return n_intervals


def check_cells(text: str, result: dict) -> tuple[dict[str, str], int]:
    """check_values() of a page: its cells, and how many hold an interval."""
    cells = Cells()
    cells.feed(text)
    return cells.cells, check_values(cells.cells, result)


def test_the_numbers_of_the_page_are_those_of_the_json(finished):
    path, result = finished
    cells, n_intervals = check_cells((path / "report.html").read_text(), result)
    shown = {tuple(c.split("/")[:3]) for c in cells}
    assert shown >= {(what, "summary", arm) for what in ("loss", "single", "frequent") for arm in ARMS}
    for what in ("single", "frequent"):
        assert tasks.TASKS[what].about in (path / "report.html").read_text()
    assert n_intervals > 10 and "loss/summary/identity-S4/over_exact" in cells


def test_the_page_needs_nothing_else(finished):
    path, _ = finished
    text = (path / "report.html").read_text()
    cells = Cells()
    cells.feed(text)
    assert len(cells.addresses) == 5 and all(a.startswith("data:image/svg+xml;base64,") for a in cells.addresses)
    assert "url(" not in text and "@import" not in text and "<script" not in text
    for a in cells.addresses:
        picture = base64.b64decode(a.partition(",")[2]).decode()
        assert "<svg" in picture and not re.search(r"(?:href|src)=\"(?!#|data:)", picture)


def test_scores_of_the_maps_are_shown_by_layer(finished):
    _, result = finished
    scores = [{"layer": il, "r2_k": 0.9 - il / 100, "r2_v": 0.8, "attention": 0.99} for il in (3, 4, 5)]
    maps = [{"split": 2, "kind": "kv", "file": "m.gguf", "hash": "h", "scores": scores}]
    (line_k, line_v) = plots.layer_scores(maps).axes[0].lines
    assert line_k.get_xydata().tolist() == [[3, 0.87], [4, 0.86], [5, 0.85]] and list(line_v.get_ydata()) == [0.8] * 3
    assert page.render(result | {"maps": maps}).count("<img") == page.render(result).count("<img") + 1
    assert plots.layer_scores([maps[0] | {"scores": []}]) is None


def test_a_page_is_the_same_each_time_it_is_made(finished):
    path, result = finished
    assert page.render(result) == (path / "report.html").read_text()


def test_a_result_names_the_machine_and_the_commit(finished, tmp_path, monkeypatch):
    path, result = finished
    made_on = machine.machine()
    assert {k: result["machine"][k] for k in made_on} == made_on and made_on["cpu"] and result["machine"]["library"]
    git = ["git", "-C", machine.CHECKOUT, "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    commit = made_on["commit"].removesuffix("-dirty").rpartition("-g")[2]  # behind a tag: TAG-COUNT-gHASH
    assert head.startswith(commit) if head else commit == "unknown"
    assert result["machine"]["cpu"] in (path / "report.html").read_text()
    monkeypatch.setattr(machine, "CHECKOUT", tmp_path)  # as installed
    assert machine.machine()["commit"] == "unknown"


def test_csv_holds_a_record_for_each_item_and_arm(finished):
    path, result = finished
    for name, records in (("loss.csv", result["loss"]["items"]), ("retrieval.csv", result["single"]["items"] + result["frequent"]["items"])):
        with (path / name).open() as f:
            rows = list(csv.DictReader(f))
        assert [r["arm"] for r in rows] == [r["arm"] for r in records]
        for row, record in zip(rows, records, strict=True):
            assert {k: row[k] for k in ("cost", "n_filled")} == {k: str(record[k]) for k in ("cost", "n_filled")}
    assert {r["set"] for r in rows} == {"single", "frequent"}
    assert sorted(p.name for p in path.iterdir()) == ["loss.csv", "report.html", "result.json", "retrieval.csv"]


def test_a_folder_is_named_after_its_settings_and_never_written_twice(finished, tmp_path):
    path, result = finished
    about = {k: result[k] for k in ("model", "maps", "sources", "text", "sets", "settings")}
    assert folder_name(about) == path.name and "-P160T48x2-N700T220x2-seed5-" in path.name
    before = {p.name: p.stat().st_mtime_ns for p in path.iterdir()}
    with pytest.raises(OutputExists, match="holds the finished result of these settings"):
        Folder(path.parent, about)
    assert {p.name: p.stat().st_mtime_ns for p in path.iterdir()} == before
    for changed in (
        about | {"settings": about["settings"] | {"loss_margin": 0.03}},
        about | {"maps": [{"split": 2, "kind": "kv", "file": "m", "hash": "h"}]},
        about | {"model": about["model"] | {"sha256": "0"}},
        about | {"text": "0"},
    ):
        assert folder_name(changed) != path.name
    unfinished = Folder(tmp_path, about)
    unfinished.journal.add("loss doc-0", [])
    assert Folder(tmp_path, about).n_done == 1


#
# command
#


def evaluate(*args):
    """Exit code, output and errors of the command."""
    r = CliRunner().invoke(cli.app, ["evaluate", *map(str, args)])
    assert r.exception is None or isinstance(r.exception, SystemExit), r.exception
    return r.exit_code, r.stdout, r.stderr


@pytest.fixture(scope="module")
def command(engine, tmp_path_factory):
    """Arguments of a small run."""
    folder = tmp_path_factory.mktemp("text")
    for d in DOCS:
        (folder / f"{d.name}.txt").write_text(d.text)
    return [
        engine.model.path, "--text", folder, "--unseen", "--sets", "loss,single", "--arms", "exact,noise,identity-S4", "--documents", 2,
        "--prefix", 160, "--tail", 48, "--scored", 16, "--decode", 4, "--items", 2, "--rows", 700, "--item-tail", 220, "--threads", 1,
    ]  # fmt: skip


def test_the_command_writes_a_folder_and_refuses_to_write_it_again(command, tmp_path):
    code, out, err = evaluate(*command, "--out", tmp_path, "--json")
    assert code == 0, err
    found = json.loads(out)
    result = json.loads((Path(found["folder"]) / "result.json").read_text())
    assert found["loss"]["summary"] == result["loss"]["summary"] and set(found["single"]) == {"summary", "pairs"}
    assert Path(found["folder"]).parent == tmp_path
    code, _, err = evaluate(*command, "--out", tmp_path)
    assert code == 6 and "holds the finished result" in err
    code, out, _ = evaluate(*command, "--out", tmp_path, "--seed", 2)
    assert code == 0 and "identity-S4" in out and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    "args, code, message",
    [
        (["--sets", "loss,poems"], 14, "sets: expected some of loss, digits"),
        (["--sets", "splices"], 14, "splices: expected maps, whose rows are exchanged with exact ones, found none"),
        (["--arms", "exact,fill-S2"], 14, "fill-S2: expected one file of maps that this names, found 0 among none"),
        (["--arms", "exact,identity-S9"], 14, "identity-S9: expected a split layer from 1 to 5, found 9"),
        (["--arms", "identity-S4"], 14, "expected the arm exact"),
        (["--maps", "/nonexistent.gguf"], 3, "/nonexistent.gguf"),
        (["--text", "/nonexistent"], 4, "no such file or folder: /nonexistent"),
        (["--tail", 159], 14, "tail: expected fewer than 156 rows"),
        (["--loss-margin", 0], 14, "loss_margin: expected a number above 0, found 0"),
        (["--documents", 9], 14, "expected at least 9 documents, found 4"),
    ],
)
def test_user_errors_are_messages(command, tmp_path, args, code, message):
    found, _, err = evaluate(*command, "--out", tmp_path, *args)
    assert found == code and message in err and err.count("error: ") == 1 and "Traceback" not in err
    assert not list(tmp_path.iterdir())


def test_text_that_maps_may_have_seen_is_refused(command, tmp_path):
    seen = [a for a in command if a != "--unseen"]
    code, _, err = evaluate(*seen, "--out", tmp_path)
    assert code == 14 and "expected documents of partition evaluation" in err


def test_missing_matplotlib_is_said_before_anything_runs(command, tmp_path):
    """In a process of its own: the import fails there."""
    program = "import sys; sys.modules['matplotlib'] = None; from ridgefill.cli import main; main()"
    args = [sys.executable, "-c", program, "evaluate", *map(str, command), "--out", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1]), "RIDGE_LIB_DIR": str(native.loaded_dir())}
    p = subprocess.run(args, capture_output=True, text=True, check=False, env=env)
    assert p.returncode == 14 and "matplotlib, which is missing: pip install matplotlib" in p.stderr
    assert not list(tmp_path.iterdir())
