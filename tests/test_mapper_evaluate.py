"""`ridgefill mapper evaluate`: what each arm has in its cache, the gate, figures against what they are defined as, and the run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from ridgefill import cli, lib
from ridgefill.evaluation import EvaluationError, loss, tasks, texts
from ridgefill.evaluation.folder import Folder
from ridgefill.evaluation.journal import Journal
from ridgefill.mapper import sidecar as mapper_file
from ridgefill.mapper.evaluation import choices, harness, nulls, page, report, study, turns
from ridgefill.mapper.evaluation import engine as arms
from ridgefill.mapper.evaluation.engine import Arm, Engine
from ridgefill.mapper.models import PARTS
from ridgefill.reference import Fill, Weights, forward
from test_evaluate import check_cells
from test_evaluation_tasks import natural
from test_transfer import identity_mapper, random_weights, side_of, turned, write_mapper
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
PICO = ROOT / "models" / "pico" / "pico-qwen3-s" / "pico-qwen3-s.f16.gguf"
SHAPE = {"head": 32, "n_head": 2, "n_head_kv": 1}
N, TAIL, SINK = 90, 30, 4  # rows of a prompt, and the sinks that write_mapper() records
END = N - TAIL
DOCS = natural(4, 120)


@pytest.fixture(scope="module", autouse=True)
def library(patched_lib):
    lib.load(patched_lib)


def mapper_between(folder: Path, source: Path, target: Path, name: str = "m.gguf") -> Path:
    """Random weights from the first two source layers."""
    a, b = side_of(source), side_of(target)
    layers = [[0, 1]] * b.n_layer
    return write_mapper(folder / name, a, b, layers, random_weights(a, b, layers, previous=False))


@pytest.fixture(scope="module")
def pair(pico_model) -> tuple[Path, Path]:
    """Two models of equal heads and unequal depth."""
    return pico_model("llama", n_layer=4, **SHAPE), pico_model("qwen3", n_layer=3, **SHAPE)


@pytest.fixture(scope="module")
def engine(pair, tmp_path_factory):
    mapper = mapper_between(tmp_path_factory.mktemp("mapper"), *pair)
    with lib.Model(pair[0]) as source, lib.Model(pair[1]) as target, Engine(source, target, str(mapper), 512, n_threads=1) as e:
        yield e


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return np.random.default_rng(1).integers(3, 259, N).tolist()


@pytest.fixture(scope="module")
def other() -> list[int]:
    return np.random.default_rng(2).integers(3, 259, N).tolist()


def rows(ctx: lib.Context, p0: int, p1: int) -> dict[str, list[np.ndarray]]:
    return {part: [ctx.get_kv(0, il, part, p0, p1) for il in range(ctx.model.n_layer)] for part in PARTS}


def computed(model: lib.Model, tokens) -> dict[str, list[np.ndarray]]:
    """A model's own rows, run in pieces as arms run them: attention rounds otherwise where more rows are run together."""
    with lib.Context(model, 512, n_threads=1, type_k="f32", type_v="f32") as ctx:
        for p0, p1 in ((0, SINK), (SINK, END), (END, len(tokens))):
            ctx.decode(tokens[p0:p1], pos0=p0, logits="none")
        return rows(ctx, 0, len(tokens))


def close(a: dict, b: dict, within: float = 1e-3) -> bool:
    return all(np.abs(x - y).max() < within * np.abs(y).max() for part in PARTS for x, y in zip(a[part], b[part], strict=True))


def part_of(kv: dict, p0: int, p1: int) -> dict:
    return {part: [x[p0:p1] for x in layers] for part, layers in kv.items()}


def mapped(file: mapper_file.Mapper, kv: dict) -> dict[str, list[np.ndarray]]:
    """Rows of the target in float64 from rows of the source at positions 0.."""
    n = len(kv["k"][0])
    flat = {"k": [turned(file.source, x, -1).reshape(n, -1) for x in kv["k"]], "v": [x.astype(np.float64).reshape(n, -1) for x in kv["v"]]}
    out = {part: [] for part in PARTS}
    for part in PARTS:
        for il, heads in enumerate(file.target.heads):
            x = np.hstack([flat[part][s] for s in file.maps[part].sources[il]])
            y = (x @ file.weight(part, il).T + file.maps[part].biases[il]).reshape(n, heads, -1)
            out[part].append(turned(file.target, y, 1) if part == "k" else y)
    return out


#
# arms
#


@pytest.mark.parametrize("name", arms.ARMS)
def test_an_arm_has_in_its_cache_what_it_says(name, engine, prompt, other):
    rest, pos0, done = engine.begin(Arm(name, tuple(other)), prompt, TAIL)
    assert (rest, pos0, done.n_rows) == (prompt[END:], END, N)
    assert done.filled.tolist() == ([] if name in ("target", "noise", "source") else list(range(SINK, END)))
    if name in arms.EMPTY:
        assert engine.ctx.seq_pos_max() == (END - 1 if name == "empty+" else -1)
        return
    assert engine.ctx.model is (engine.source if name == "source" else engine.model) and engine.ctx.seq_pos_max() == END - 1
    found = rows(engine.ctx, 0, END)
    giver = computed(engine.source, prompt if name != "wrong" else other)
    own = computed(engine.model, prompt)
    if name == "source":
        assert close(found, part_of(giver, 0, END))
        return
    assert close(part_of(found, 0, SINK), part_of(own, 0, SINK))
    middle = part_of(found, SINK, END)
    if name in ("target", "noise", "native"):
        assert close(middle, part_of(own, SINK, END))
    elif name in ("transfer", "wrong"):
        assert close(middle, part_of(mapped(engine.file, giver), SINK, END))
    elif name == "identity":
        layers = [0, 2, 3]  # of four layers for three: 0, 1.5 and 3
        unturned = {"k": [turned(engine.file.source, giver["k"][il], -1) for il in layers], "v": [giver["v"][il] for il in layers]}
        expected = {"k": [turned(engine.file.target, k, 1) for k in unturned["k"]], "v": unturned["v"]}
        assert close(middle, part_of(expected, SINK, END))
    else:
        file = mapper_file.read(engine._random.path)
        assert close(middle, part_of(mapped(file, giver), SINK, END)) and not close(middle, part_of(mapped(engine.file, giver), SINK, END), 0.5)


def test_random_weights_have_the_scale_of_the_fitted_ones(engine):
    drawn, fitted = mapper_file.read(engine._random.path), engine.file
    for part in PARTS:
        assert drawn.maps[part].sources == fitted.maps[part].sources
        for il in range(fitted.target.n_layer):
            a, b = drawn.weight(part, il), fitted.weight(part, il)
            assert a.std() == pytest.approx(b.std(), rel=0.1) and abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.1


@pytest.mark.parametrize("name, n_sink", [("empty+", SINK), ("empty", 0)])
def test_a_tail_behind_nothing_sees_sinks_at_their_positions_and_no_other_row(name, n_sink, engine, prompt):
    """Against the oracle in float64, in which layers 0 and up do not see the rows between sinks and tail."""
    rest, pos0, _ = engine.begin(Arm(name), prompt, TAIL)
    found = engine.ctx.decode(rest, pos0=pos0, logits="all")
    weights = Weights(engine.model.path)
    expected = forward(weights, prompt, Fill("nofill", split=0, n_tail=TAIL, n_sink=n_sink)).logits[n_sink:]
    whole = forward(weights, prompt).logits[END:]
    assert found.shape == expected.shape and np.abs(found - expected).max() < 0.05 < np.abs(found - whole).max() / 10  # attention here rounds to half precision


def test_a_prompt_that_is_begun_again_gives_the_same(engine, prompt, other):
    def logits(name: str) -> np.ndarray:
        rest, pos0, _ = engine.begin(Arm(name, tuple(other)), prompt, TAIL)
        return engine.ctx.decode(rest, pos0=pos0)

    engine.forget()
    names = [n for n in arms.ARMS if n != "noise"]
    first = {n: logits(n) for n in names}
    again = {n: (logits(n), logits(n)) for n in reversed(names)}
    assert all((x == first[n]).all() for n, pair in again.items() for x in pair)
    assert len({x.tobytes() for x in first.values()}) >= len(names) - 1  # target and native may be one


def test_a_prompt_without_a_row_to_map_is_refused(engine, prompt):
    with pytest.raises(EvaluationError, match="expected more than 34 rows .sinks and tail., so that some are mapped, found 34"):
        engine.begin(Arm("transfer"), prompt[:34], TAIL)
    with pytest.raises(EvaluationError, match="wrong: expected another prompt of at least 60 rows, found 59"):
        engine.begin(Arm("wrong", tuple(prompt[:59])), prompt, TAIL)
    with pytest.raises(EvaluationError, match="arm: expected one of target, .*, found 'exact'"):
        Arm("exact")


def test_identity_is_left_out_where_shapes_differ(pico_model, pair, tmp_path):
    wide = pico_model("llama", n_layer=4, head=64, n_head=2, n_head_kv=1)
    file = mapper_between(tmp_path, wide, pair[1])
    with lib.Model(wide) as source, lib.Model(pair[1]) as target:
        names = arms.allowed(source, target, mapper_file.read(file))
        assert set(arms.ARMS) - set(names) == {"identity"}
        with Engine(source, target, str(file), 128, n_threads=1) as e, pytest.raises(EvaluationError, match="identity: K of the two models differ"):
            e.require([Arm("identity")])


def test_layers_are_paired_by_depth():
    assert nulls.pairs_of_layers(4, 4) == [0, 1, 2, 3] and nulls.pairs_of_layers(8, 3) == [0, 4, 7]
    assert nulls.pairs_of_layers(3, 6) == [0, 0, 1, 1, 2, 2] and nulls.pairs_of_layers(5, 1) == [0]


#
# choices
#


def test_a_choice_is_scored_by_the_sum_of_its_log_probabilities(engine, prompt):
    answers = [[5, 6, 7], [8], [9, 10]]
    question = choices.Question("t", 1, "d", tuple((tuple(prompt), tuple(a)) for a in answers), ("a", "b", "c"), 1, TAIL)
    found, done = choices.log_likelihoods(engine, Arm("target"), question)
    for sum_, answer in zip(found, answers, strict=True):
        with lib.Context(engine.model, 512, n_threads=1, type_k="f32", type_v="f32") as ctx:
            logits = ctx.decode(prompt + answer, logits=range(N - 1, N + len(answer) - 1)).astype(np.float64)
        lp = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) - logits.max(1, keepdims=True)
        assert sum_ == pytest.approx(lp[np.arange(len(answer)), answer].sum(), abs=0.05)  # as above
    record = choices.ask(engine, Arm("target"), question)
    assert record["answer"] == "abc"[int(np.argmax(found))] and record["hit"] == (int(np.argmax(found)) == 1)
    assert record["score"] == pytest.approx(np.exp(found[1]) / np.exp(found).sum()) and (record["n_choices"], record["value"]) == (3, "b")


def test_each_choice_may_have_a_prompt_of_its_own(engine, prompt, other):
    question = choices.Question("t", 1, "d", ((tuple(prompt), (7, 8)), (tuple(other), (7, 8))), ("a", "b"), 0, TAIL)
    found, _ = choices.log_likelihoods(engine, Arm("transfer"), question)
    alone = [choices.log_likelihoods(engine, Arm("transfer"), dataclasses.replace(question, requests=(r, r)))[0][0] for r in question.requests]
    assert found.tolist() == pytest.approx(alone, abs=1e-6) and found[0] != found[1]


@pytest.mark.parametrize("task", study.FACTS)
def test_distractors_are_of_the_same_kind_and_not_in_the_prompt(task, engine):
    text = tasks.Text.of(engine.model, DOCS)
    items = tasks.make_items(engine.model, text, task, 6, 1, 700, 300, SINK, True)
    places = set()
    for item in items:
        q = choices.of_fact(engine.model, item, chat=True)
        value, shown = item.puzzle.references[0], engine.model.detokenize(item.tokens)
        assert q.answers[q.gold] == value and len(set(q.answers)) == 4 and [a for a in q.answers if a in shown] == [value]
        assert all(len(a) == 7 and a.isdigit() for a in q.answers) if task == "single" else all(len(a.split()) == 3 for a in q.answers)
        assert [engine.model.detokenize(answer) for _, answer in q.requests] == list(q.answers)
        places.add(q.gold)
    assert len(places) > 1 and choices.of_fact(engine.model, items[0], chat=True) == choices.of_fact(engine.model, items[0], chat=True)


def test_the_other_prompt_is_as_long():
    prompts = [[1] * 5, [2] * 3, [3] * 9]
    assert choices.other_prompt(prompts, 0) == [2] * 3 + [3] * 9 and choices.other_prompt(prompts, 1) == [3] * 9
    assert choices.other_prompt(prompts, 2) == [1] * 5 + [2] * 3  # too short: the arm that needs it refuses


#
# figures
#


def loss_records(**by_arm) -> list[dict]:
    fixed = {"n_new": 1, "n_key": 0, "key_loss_sum": 0.0, "quoted": None, "decode": None, "cost": 1.0, "top1": 1.0, "kl": 0.0, "kl_median": 0.0}
    return [
        {"arm": arm, "document": f"d{i}", "loss": x, "new_loss_sum": x, **fixed} for arm, values in by_arm.items() for i, x in enumerate(values)
    ]


def test_retention_of_a_loss_is_the_share_of_the_gap_that_is_closed():
    by_arm = {"target": [1.0, 2.0, 3.0, 2.5], "transfer": [1.3, 2.2, 3.1, 2.9], "empty+": [2.0, 3.0, 4.5, 3.4], "empty": [3.0, 4.0, 5.5, 4.4]}
    s = report.losses(loss_records(**by_arm))
    mean = {name: float(np.mean(x)) for name, x in by_arm.items()}
    for floor in ("empty+", "empty"):
        expected = (mean[floor] - mean["transfer"]) / (mean[floor] - mean["target"])
        assert s["transfer"]["retention"][floor]["value"] == pytest.approx(expected)
        assert s["target"]["retention"][floor]["value"] == 1 and str(s[floor]["retention"][floor]["value"]) == "0.0"
    assert s["transfer"]["over_exact"]["value"] == pytest.approx(0.25)  # .3 .2 .1 .4
    e = s["transfer"]["retention"]["empty+"]
    assert e["low"] < e["value"] < e["high"] and set(s["transfer"]["retention"]) == {"empty+", "empty"}


def test_there_is_no_retention_where_the_floor_is_not_apart():
    by_arm = {"target": [1.0, 2.0, 3.0, 2.5], "transfer": [1.1, 2.1, 3.1, 2.6], "empty+": [1.5, 1.5, 3.4, 2.2]}
    assert report.losses(loss_records(**by_arm))["transfer"]["retention"] == {"empty+": None}


def hit_records(n_choices: int | None = None, **by_arm) -> list[dict]:
    fixed = {"depth": None, "n_rows": 9, "n_filled": 5, "n_chosen": 0, "cost": 1.0} | ({"n_choices": n_choices} if n_choices else {})
    return [
        {"arm": arm, "seed": i, "hit": h == "1", "score": float(h == "1"), **fixed} for arm, hits in by_arm.items() for i, h in enumerate(hits)
    ]


def test_retention_of_hits_is_over_the_empty_cache_and_over_chance():
    n = {"target": 18, "transfer": 12, "empty+": 4}
    s = report.hits(hit_records(4, **{arm: "1" * k + "0" * (20 - k) for arm, k in n.items()}))
    assert s["transfer"]["retention"]["empty+"]["value"] == pytest.approx((12 - 4) / (18 - 4))
    assert s["transfer"]["retention"]["chance"]["value"] == pytest.approx((12 / 20 - 0.25) / (18 / 20 - 0.25))
    assert s["transfer"]["of_exact"] == pytest.approx(12 / 18) and s["empty+"]["retention"]["chance"]["value"] < 0
    assert set(report.hits(hit_records(**{"target": "1110", "transfer": "1100"}))["transfer"]["retention"]) == set()


def test_what_transfer_beats_is_said_with_adjusted_p():
    base = np.linspace(1, 2, 14)
    spread = np.linspace(-0.01, 0.01, 14)
    records = loss_records(target=base, transfer=base + 0.2 + spread, **{"empty+": base + 0.9, "wrong": base + 0.2 - spread, "empty": base + 0.1})
    found = {c["control"]: c for c in report.compare("loss", records)}
    report.conclude(list(found.values()))
    assert {name: c["beats"] for name, c in found.items()} == {"empty+": True, "wrong": False, "empty": False}
    assert found["empty+"]["better"]["value"] == pytest.approx(0.7) and found["empty+"]["p_holm"] >= 2 * found["empty+"]["p"]
    assert "transfer beats empty+: +0.700" in found["empty+"]["line"] and "is worse than empty" in found["empty"]["line"]
    assert "is not shown to beat wrong" in found["wrong"]["line"]
    hits = report.compare("single", hit_records(target="1" * 12, transfer="1" * 12, **{"empty+": "0" * 12}))
    report.conclude(hits)
    assert hits[0]["beats"] and hits[0]["better"]["value"] == 1 and hits[0]["unit"] == "of the items"
    assert report.compare("loss", loss_records(target=base)) == []


#
# the gate, and a whole study
#

SMALL = study.Settings(
    documents=3, prefix=160, tail=40, scored=24, items=2, rows=640, item_tail=280, answer=3, turns=4, turn=20, arms=("target", "transfer", "native", "empty+", "empty")
)


@pytest.fixture(scope="module")
def open_study(pair, tmp_path_factory):
    """open_study(sets, settings, ...) -> Study of the pair with random mappers both ways."""
    folder = tmp_path_factory.mktemp("mappers")
    forth, back = mapper_between(folder, *pair), mapper_between(folder, *pair[::-1], name="back.gguf")
    with lib.Model(pair[0]) as source, lib.Model(pair[1]) as target:
        yield lambda sets, s=SMALL, **kw: study.Study(source, target, str(forth), DOCS, sets, s, **({"back": str(back), "n_threads": 1} | kw))


def test_the_targets_own_rows_pass_the_gate(open_study):
    with open_study(["loss"]) as s:
        gate = s.gate()
    assert gate["n"] == 72 >= gate["n_decided"] == gate["n_equal"] > 50 and gate["rows"] < 1e-6
    assert gate["logits"] < 1e-3 and 0 < gate["noise"] < 0.1 and gate["limit"] == max(1e-3, 2 * gate["noise"])


def test_maps_that_change_the_rows_do_not_pass(open_study, monkeypatch):
    write = nulls._write

    def changed(path, source, target, layers, weights, biases, like, previous):
        weights["v"][1][3, 3] += 0.01
        return write(path, source, target, layers, weights, biases, like, previous)

    monkeypatch.setattr(nulls, "_write", changed)
    with open_study(["loss"]) as s, pytest.raises(EvaluationError, match="native: expected the target's own rows back within 1e-05 of the largest, found 0.00"):
        s.run(Journal(s.engine._folder / "j", {}))


def test_a_path_that_spoils_what_it_does_not_transfer_does_not_pass(open_study, monkeypatch):
    """The rows come back as they were, but the sinks in front of them are those of other tokens."""
    with open_study(["loss"]) as s:
        monkeypatch.setattr(s.engine, "_sinks", lambda prompt: s.engine.ctx.decode([7] * SINK, logits="none"))
        with pytest.raises(EvaluationError, match="native: expected logits within .* and .* equal tokens, found"):
            s.gate()


def test_a_study_goes_on_where_it_was_and_its_page_shows_its_figures(open_study, tmp_path):
    sets = ["loss", "single", "turns"]
    with open_study(sets) as s:
        place = Folder(tmp_path, s.about)
        calls = []
        ask = s._runner

        def stop_at_turns(what, i):
            calls.append(what)
            if what == "turns":
                raise KeyboardInterrupt
            return ask(what, i)

        s._runner = stop_at_turns
        with pytest.raises(KeyboardInterrupt):
            s.run(place.journal)
        n_done = len(calls) - 1
        s._runner = lambda what, i: ask(what, i) if what == "turns" else lambda: pytest.fail(f"{what} runs again")
        place = Folder(tmp_path, s.about)
        assert place.n_done == 1 + n_done == 1 + 3 + 2
        s.gate = lambda: pytest.fail("the gate runs again")
        result = place.finish(s.run(place.journal), page.render, study.ALONE)
    assert result["sets"] == ["loss", "single", "single-choice", "turns"]
    assert [f.name for f in sorted(place.path.iterdir())] == ["loss.csv", "report.html", "result.json", "retrieval.csv", "turns.csv"]
    assert json.loads((place.path / "result.json").read_text()) == result
    text = (place.path / "report.html").read_text()
    cells, n_intervals = check_cells(text, result)
    assert n_intervals > 10 and {"loss/summary/transfer/over_exact", "turns/summary/turn 2/kl", "single-choice/summary/target/hits"} <= set(cells)
    assert all(c["line"] in text for c in result["comparisons"] if "<" not in c["line"]) and result["comparisons"]
    assert all(r["n_planted_filled"] == r["n_planted"] for r in result["single"]["items"] if r["arm"] == "transfer")


def test_a_study_refuses_before_anything_runs(open_study):
    refusals = [
        (["poems"], SMALL, {}, "sets: expected some of loss, single, passwords, turns, found poems"),
        (["turns"], SMALL, {"back": ""}, "turns: expected a mapper from target to source too"),
        (["loss"], dataclasses.replace(SMALL, tail=156), {}, "tail: expected fewer than 156 rows, so that some are mapped, found 156"),
        (["loss"], dataclasses.replace(SMALL, prefix=9000), {}, "expected at most 8192 rows, which .* was trained for, found 9024"),
        (["turns"], dataclasses.replace(SMALL, turn=4), {}, "turn: expected more than the 4 sink rows, found 4"),
        (["loss"], SMALL, {"files": {"poems": "x"}}, "task: expected some of arc_challenge, .*, found poems"),
    ]
    for sets, s, kw, message in refusals:
        with pytest.raises(EvaluationError, match=message):
            open_study(sets, s, **kw)
    with pytest.raises(EvaluationError, match="arms: expected target, which the others are compared with, found transfer"):
        dataclasses.replace(SMALL, arms=("transfer",))
    with pytest.raises(EvaluationError, match="items: expected a number of 1 or more, found 0"):
        dataclasses.replace(SMALL, items=0)


#
# conversations
#


def window_of(n: int, seed: int = 3) -> texts.Window:
    tokens = np.random.default_rng(seed).integers(3, 259, n)
    return texts.Window("doc", "test", 0, tuple(map(int, tokens)), n)


def test_models_that_are_one_do_not_drift(pair, tmp_path):
    """Both roles are played by one model, and the mappers copy: every turn is as if its model had run all of them."""
    file = identity_mapper(tmp_path / "m.gguf", pair[1])
    with lib.Model(pair[1]) as a, lib.Model(pair[1]) as b, Engine(a, b, str(file), 256, n_threads=1) as e, lib.Mapper(b, a, file) as back:
        records = turns.converse(e, back, window_of(120), 20)
        for ctx in (e.source_ctx, e.target_ctx):  # each has all rows up to its last turn, and none twice
            n = ctx.seq_pos_max() + 1
            assert close(rows(ctx, 0, n), part_of(computed(a, window_of(120).tokens), 0, n), 0.02)
        assert (e.source_ctx.seq_pos_max(), e.target_ctx.seq_pos_max()) == (99, 119)
    assert [r["model"] for r in records] == ["source", "target"] * 3
    assert all(abs(r["loss"] - r["alone"]) < 1e-3 and r["kl"] < 1e-4 and r["top1"] == 1 for r in records)


def test_drift_begins_with_the_first_hand_over(engine, pair, tmp_path):
    file, window = mapper_between(tmp_path, *pair[::-1]), window_of(80)
    with lib.Mapper(engine.model, engine.source, file) as back:
        records = turns.converse(engine, back, window, 20)
    first, *later = records
    assert first["loss"] == pytest.approx(first["alone"], abs=1e-5) and all(r["kl"] > 1e-3 for r in later)
    with lib.Context(engine.model, 256, n_threads=1) as ctx:
        logits = ctx.decode(window.tokens, logits=range(20, 39)).astype(np.float64)
    nll = np.log(np.exp(logits).sum(1)) - logits[np.arange(19), window.tokens[21:40]]
    assert records[1]["alone"] == pytest.approx(nll.mean(), abs=2e-3)
    summary = turns.summarise([r | {"document": d} for d in "ab" for r in records])
    assert summary["turn 2"]["over_alone"]["value"] == pytest.approx(records[1]["loss"] - records[1]["alone"])


def test_drift_is_the_last_turn_less_the_first_of_each_model():
    extra = {1: 0.0, 2: 0.1, 3: 0.2, 4: 0.5, 5: 0.9, 6: 0.4}
    records = [
        {"arm": f"turn {t}", "model": turns.role_of(t - 1), "document": d, "loss": 1 + x + d / 10, "alone": 1 + d / 10}
        for d in range(3) for t, x in extra.items()
    ]  # fmt: skip
    source, target = turns.drift(records)
    assert (source["from"], source["to"], target["from"], target["to"]) == ("turn 3", "turn 5", "turn 2", "turn 6")
    assert source["loss"]["value"] == pytest.approx(0.7) and target["loss"]["value"] == pytest.approx(0.3)


#
# records of benchmark tasks
#

RECORDS = {
    "arc_challenge": {"question": "What is ice?", "choices": {"text": ["a fire", "cold water"], "label": ["A", "B"]}, "answerKey": "B"},
    "arc_easy": {"question": "2?", "choices": {"text": ["one", "two"], "label": ["1", "2"]}, "answerKey": "1"},
    "hellaswag": {
        "activity_label": "Cooking", "ctx_a": "A man [step] stirs.", "ctx_b": "he then", "label": "1",
        "endings": ["flies [title] away.", " eats  it.", "sings.", "rows."],
    },
    "winogrande": {"sentence": "Ann paid Eve because _ had sold it.", "option1": "Ann", "option2": "Eve", "answer": "2"},
    "mmlu": {"question": " Which? ", "subject": "x", "choices": ["p", "q", "r", "s"], "answer": 2},
    "piqa": {"goal": "Open it", "sol1": "pull", "sol2": "sleep", "label": 0},
    "boolq": {"passage": "Cats purr.", "question": "do cats purr", "label": True},
    "gsm8k": {"question": "1+1?", "answer": "One and one.\n#### 1,002"},
}  # fmt: skip
ASKED = {
    "arc_challenge": (("Question: What is ice?\nAnswer:",), (" a fire", " cold water"), 1),
    "arc_easy": (("Question: 2?\nAnswer:",), (" one", " two"), 0),
    "hellaswag": (("Cooking: A man stirs. He then",), (" flies. away.", " eats it.", " sings.", " rows."), 1),
    "winogrande": (("Ann paid Eve because Ann", "Ann paid Eve because Eve"), (" had sold it.", " had sold it."), 1),
    "mmlu": (("Which?\nA. p\nB. q\nC. r\nD. s\nAnswer:",), (" A", " B", " C", " D"), 2),
    "piqa": (("Question: Open it\nAnswer:",), (" pull", " sleep"), 0),
    "boolq": (("Cats purr.\nQuestion: do cats purr?\nAnswer:",), (" no", " yes"), 1),
    "gsm8k": (("Question: 1+1?\nAnswer:",), (" One and one.\n#### 1,002",), 0),
}


def task_file(folder: Path, task: str, n: int) -> Path:
    path = folder / f"{task}.jsonl"
    path.write_text("\n".join([json.dumps(RECORDS[task])] * n) + "\n\n")
    return path


@pytest.mark.parametrize("task", harness.TASKS)
def test_a_record_is_asked_as_the_harness_asks_it(task, tmp_path):
    (doc,) = harness.read_docs(task, task_file(tmp_path, task, 1))
    assert (doc.contexts, doc.choices, doc.gold) == ASKED[task]


def test_examples_stand_in_front_and_answers_are_cut_where_the_context_ends(engine, tmp_path):
    items = harness.load(engine.model, "winogrande", task_file(tmp_path, "winogrande", 6), 2, 8, SINK, shots=3)
    assert [i.seed for i in items] == [3, 4] and items[0].gold == 1
    example = "Ann paid Eve because Eve had sold it.\n\n"
    for (prompt, answer), name in zip(items[0].requests, ("Ann", "Eve"), strict=True):
        assert engine.model.detokenize(prompt) == example * 3 + f"Ann paid Eve because {name}" and engine.model.detokenize(answer) == " had sold it."
    found, _ = choices.log_likelihoods(engine, Arm("transfer"), items[0])
    assert np.isfinite(found).all() and found[0] != found[1]
    assert harness.TASKS["mmlu"].shots == 5 and harness.TASKS["gsm8k"].shots == 8


def test_files_that_are_not_what_they_should_be_are_refused(engine, tmp_path):
    path = tmp_path / "f.jsonl"
    for line, message in [
        ("nothing", "line 1: expected a record of boolq, found something else: JSONDecodeError"),
        ('{"passage": "x"}', "line 1: expected a record of boolq, found something else: KeyError: 'question'"),
        (json.dumps(RECORDS["boolq"] | {"label": 2}), "line 1: expected the right answer among 2, found number 2"),
    ]:
        path.write_text(line)
        with pytest.raises(EvaluationError, match=message):
            harness.read_docs("boolq", path)
    with pytest.raises(EvaluationError, match="expected 5 examples and 2 questions, found 6 records"):
        harness.load(engine.model, "mmlu", task_file(tmp_path, "mmlu", 6), 2, 8, SINK)
    with pytest.raises(EvaluationError, match=r"record 0: expected more than 54 rows \(sinks and tail\), found .*; a shorter tail or more examples"):
        harness.load(engine.model, "piqa", task_file(tmp_path, "piqa", 3), 2, 50, SINK)
    with pytest.raises(EvaluationError, match="task: expected one of arc_challenge, .*, found 'poems'"):
        harness.read_docs("poems", path)


@pytest.mark.parametrize(
    "answer, right", [("So 1,000 and 2 make 1,002.\nQuestion: 7", True), ("1002", True), ("1002 or 1003", False), ("none", False), ("It is 1002.0", False)]
)
def test_a_free_answer_is_judged_by_its_last_number(answer, right):
    problem = harness.Problem("gsm8k", 0, "f", (1,), "1002", 1)
    assert problem.answered(answer) == right and problem.decided(answer) == ("Question:" in answer)


def test_tasks_of_files_are_measured_beside_the_other_sets(open_study, tmp_path):
    s = dataclasses.replace(SMALL, questions=2, question_tail=6, shots=2, arms=("target", "transfer", "wrong", "empty+"))
    files = {task: str(task_file(tmp_path, task, 5)) for task in ("boolq", "gsm8k")}
    with open_study([], s, files=files) as run:
        harness_n, harness.N_GENERATED = harness.N_GENERATED, 3
        try:
            found = run.run(Journal(tmp_path / "j", {}))
        finally:
            harness.N_GENERATED = harness_n
    assert [r["arm"] for r in found["boolq"]["items"]] == ["target", "transfer", "wrong", "empty+"] * 2
    assert {r["n_choices"] for r in found["boolq"]["items"]} == {2} and "n_choices" not in found["gsm8k"]["items"][0]
    assert found["gsm8k"]["items"][0]["value"] == "1002"


#
# the command
#


def evaluate(*args: object) -> dict:
    p = CliRunner().invoke(cli.app, ["mapper", "evaluate", *map(str, args), "--unseen", "--threads", "1", "--json"])
    assert p.exit_code == 0, p.output
    return json.loads(p.stdout)


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("book")
    for d in DOCS:
        (folder / f"{d.name}.txt").write_text(d.text)
    return folder


def test_a_model_that_hands_over_to_itself_loses_nothing(book, tmp_path):
    """A trained model as its own source: transferred rows are the target's, and every figure says so."""
    mapper = identity_mapper(tmp_path / "m.gguf", PICO)
    result = evaluate(
        mapper, "--source", PICO, "--target", PICO, "--text", book, "--out", tmp_path / "out", "--back", mapper, "--arms", "target,transfer,wrong,empty+",
        "--sets", "loss,single,turns", "--documents", 3, "--prefix", 200, "--tail", 40, "--scored", 32, "--items", 3, "--rows", 512, "--item-tail", 110,
        "--turns", 4, "--turn", 24,
    )  # fmt: skip
    s = result["loss"]["summary"]
    assert abs(s["transfer"]["over_exact"]["value"]) < 1e-4 and s["transfer"]["kl"]["value"] < 1e-6 and s["transfer"]["top1"]["value"] == 1
    assert s["wrong"]["kl"]["value"] > 1e-3 < s["empty+"]["kl"]["value"]
    recall = {name: a["hits"] for name, a in result["single"]["summary"].items()}
    assert recall == {"target": 3, "transfer": 3, "wrong": 0, "empty+": 0}
    assert result["single"]["summary"]["transfer"]["retention"]["empty+"]["value"] == 1
    assert result["single-choice"]["summary"]["transfer"]["hits"] == 3
    assert all(abs(t["over_alone"]["value"]) < 1e-4 for t in result["turns"]["summary"].values())
    assert (Path(result["folder"]) / "report.html").is_file()


def test_a_random_mapper_is_not_said_to_be_good(pair, book, tmp_path):
    mapper = mapper_between(tmp_path, *pair)
    args = (
        mapper, "--source", pair[0], "--target", pair[1], "--text", book, "--out", tmp_path / "out", "--sets", "loss", "--documents", 3,
        "--prefix", 120, "--tail", 40, "--scored", 24,
    )  # fmt: skip
    result = evaluate(*args)
    assert set(result["loss"]["summary"]) == set(arms.ARMS) and not any(c["beats"] for c in result["comparisons"])
    assert {c["control"] for c in result["comparisons"]} == set(report.CONTROLS)
    assert result["loss"]["summary"]["native"]["kl"]["value"] < 1e-6 < result["loss"]["summary"]["transfer"]["kl"]["value"]
    again = CliRunner().invoke(cli.app, ["mapper", "evaluate", *map(str, args), "--unseen", "--threads", "1"])
    assert again.exit_code == 6 and "holds the finished result of these settings" in again.output
    other = CliRunner().invoke(cli.app, ["mapper", "evaluate", *map(str, args), "--unseen", "--threads", "1", "--task", "mmlu"])
    assert other.exit_code == 2 and "expected NAME=FILE" in other.output
