"""The set `splices` of an evaluation: its figures on records made by hand, its page and plot, and a run on a model that recalls."""

from __future__ import annotations

import csv
import json

import pytest
from ridgefill import lib
from ridgefill.evaluation import EvaluationError, page, plots, splices, study, texts
from ridgefill.evaluation.folder import Folder
from test_evaluate import check_cells
from test_evaluation_faults import MODEL, SPLIT, maps  # noqa: F401

# mean log-probability of the answer in prompts 0 and 1, and whether it was given
BY_HAND = {
    ("exact", -1): [(-0.1, True), (-0.3, True)],
    ("filled", -1): [(-4.0, False), (-2.0, True)],
    ("filled keys", 6): [(-0.2, True), (-0.8, True)],
    ("filled keys", 7): [(-3.1, False), (-1.3, False)],
    ("exact keys", 6): [(-1.0, True), (-1.0, True)],
    ("exact keys", 7): [(-4.0, False), (-2.5, False)],
    **{(name, il): [(-4.0, False), (-2.0, True)] for name in ("exact values", "exact both", "exact key norms") for il in (6, 7)},
}


def by_hand(n: int = 2) -> list[dict]:
    return [
        {"maps": "S5:kv", "seed": seed, "splice": name, "layer": il, "log_prob": log_prob, "hit": hit}
        for (name, il), items in BY_HAND.items() for seed, (log_prob, hit) in enumerate(items[:n])
    ]  # fmt: skip


def test_changes_are_counted_from_the_cache_that_rows_were_exchanged_in():
    summary = splices.summarise(by_hand())
    assert list(summary) == ["S5:kv"] and summary["S5:kv"]["n"] == 2
    rows = {(r["splice"], r["layer"]): r for r in summary["S5:kv"]["rows"]}
    assert rows["exact", "all"]["hits"] == 2 and rows["exact", "all"]["log_prob"] is None
    found = {key: (r["over"], r["hits"], pytest.approx(r["log_prob"]["value"])) for key, r in rows.items() if key[0] != "exact"}
    assert found["filled", "all"] == ("exact", 1, -2.8)  # -3.9 and -1.7
    assert found["filled keys", 6] == ("exact", 2, -0.3) and found["filled keys", 7] == ("exact", 0, -2.0)
    assert found["exact keys", 6] == ("filled", 2, 2.0)  # 3.0 and 1.0
    assert found["exact keys", 7] == ("filled", 0, -0.25) and found["exact values", 6] == ("filled", 1, 0.0)
    assert rows["filled keys", 7]["share"]["value"] == 0 and rows["filled keys", 7]["share"]["high"] > 0.5
    assert rows["filled keys", 7]["log_prob"]["low"] < -2 < rows["filled keys", 7]["log_prob"]["high"]


@pytest.mark.parametrize("n", [0, 1])
def test_fewer_than_two_answered_prompts_are_refused(n):
    with pytest.raises(EvaluationError, match=f"splices: expected at least 2 facts that exact recalls, found {n}"):
        splices.summarise(by_hand(n))


def test_bars_are_the_changes_of_single_layers():
    figure = plots.splices_by_layer(splices.summarise(by_hand())["S5:kv"]["rows"], "S5:kv")
    above, below = ({c.get_label(): [bar.get_height() for bar in c] for c in ax.containers if hasattr(c, "patches")} for ax in figure.axes)
    assert above == {"filled keys": pytest.approx([-0.3, -2.0])}
    assert list(below) == [name for name in splices.ALL if name != "filled keys"]
    assert below["exact keys"] == pytest.approx([2.0, -0.25]) and below["exact key norms"] == pytest.approx([0, 0])


@pytest.fixture(scope="module")
def finished(maps, text_set, tmp_path_factory):  # noqa: F811
    """Path and result of a study of three prompts."""
    settings = study.Settings(items=3, rows=512, item_tail=96)
    with lib.Model(MODEL) as model, lib.Maps(model, maps) as m, study.Study(model, [m], texts.documents(text_set), ["splices"], settings, 1) as s:
        place = Folder(tmp_path_factory.mktemp("results"), s.about)
        return place.path, place.finish(s.run(place.journal))


def test_a_run_exchanges_rows_of_every_layer_above_the_split(finished):
    path, result = finished
    rows = {(r["splice"], r["layer"]): r for r in result["splices"]["summary"][f"S{SPLIT}:kv"]["rows"]}
    assert set(rows) == {("exact", "all"), ("filled", "all"), *((name, il) for name in splices.ALL for il in (6, 7, "all"))}
    change = {key: r["log_prob"]["value"] for key, r in rows.items() if r["log_prob"]}
    # the fill loses little, and all keys and values of the exact prompt make it the exact prompt
    assert change["exact both", "all"] == pytest.approx(-change["filled", "all"], rel=0.02) and change["filled", "all"] < -1e-4
    assert rows["exact both", "all"]["hits"] == rows["exact", "all"]["hits"] == result["splices"]["summary"][f"S{SPLIT}:kv"]["n"]
    assert len(set(change.values())) > 12


def test_the_page_shows_the_splices(finished):
    path, result = finished
    assert json.loads((path / "result.json").read_text()) == result
    text = (path / "report.html").read_text()
    cells, n_intervals = check_cells(text, result)
    assert len(cells) > 17 * 4 and n_intervals > 20
    assert text.count("<img") == 1 and page.render(result) == text
    with (path / "splices.csv").open() as f:
        written = list(csv.DictReader(f))
    assert [(r["splice"], r["layer"]) for r in written] == [(r["splice"], str(r["layer"])) for r in result["splices"]["items"]]
    assert sorted(p.name for p in path.iterdir()) == ["report.html", "result.json", "splices.csv"]
