"""A small quality measurement of the shipped maps, with the criteria of the full one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ridgefill.evaluation import report

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "scripts" / "measure_quality.py"
DEEP, SHALLOW = 20, 15
BOUNDS = report.Bounds(n_documents=6, n_facts=8, loss=0.06, times=2.0, recall=0.85, kept=0.70, lost=0.25)  # the command's


def measure(*args) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, args)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def measured(smollm2_f32, text_set, tmp_path_factory) -> dict:
    """The result file of a reduced measurement; the command must have found every criterion to hold."""
    out = tmp_path_factory.mktemp("quality") / "quality.json"
    p = measure("--reduced", "--model", smollm2_f32, "--text", text_set, "--out", out, "--fresh")
    assert p.returncode == 0, p.stdout + p.stderr
    return json.loads(out.read_text())


def swapped(records: list[dict], arm: str, stand_in: str) -> list[dict]:
    """Records in which what was measured for `stand_in` passes for `arm`."""
    kept = [r for r in records if r["arm"] != arm]
    return kept + [r | {"arm": arm} for r in records if r["arm"] == stand_in]


def failing(criteria: list[report.Criterion]) -> list[str]:
    return [c.name for c in criteria if not c.holds]


def test_every_criterion_holds_and_was_checked(measured):
    assert measured["not_checked"] == []
    assert len(measured["criteria"]) == 8 and all(c["holds"] for c in measured["criteria"])
    expected = report.loss_criteria(measured["loss"]["items"], DEEP, BOUNDS)
    expected += report.facts_criteria(measured["digits"]["items"], DEEP, SHALLOW, BOUNDS)
    assert measured["criteria"] == [c.as_dict() for c in expected]


def test_maps_swapped_for_identity_are_found_out(measured):
    records = measured["loss"]["items"]
    assert failing(report.loss_criteria(records, DEEP, BOUNDS)) == []
    found = failing(report.loss_criteria(swapped(records, f"fill-S{DEEP}", f"identity-S{DEEP}"), DEEP, BOUNDS))
    assert found == [f"loss of fill-S{DEEP} over exact, nats", f"excess loss of identity-S{DEEP} over that of fill-S{DEEP}"]


def test_digit_rows_that_are_not_run_exactly_are_found_out(measured):
    records = measured["digits"]["items"]
    assert failing(report.facts_criteria(records, DEEP, SHALLOW, BOUNDS)) == []
    found = failing(
        report.facts_criteria(swapped(records, f"fill-S{SHALLOW}+digits", f"fill-S{SHALLOW}"), DEEP, SHALLOW, BOUNDS)
    )
    assert found == [f"recall of fill-S{SHALLOW}+digits, share of exact"]


def test_maps_of_the_shallow_split_in_place_of_the_deep_are_found_out(measured):
    records = measured["digits"]["items"]
    found = failing(report.facts_criteria(swapped(records, f"fill-S{DEEP}", f"fill-S{SHALLOW}"), DEEP, SHALLOW, BOUNDS))
    assert found == [f"recall of fill-S{DEEP}, share of exact"]


def test_records_say_what_was_filled(measured):
    for r in measured["digits"]["items"]:
        first, end = r["fact_rows"]
        if r["arm"] == "exact":
            assert r["n_filled"] == 0
        elif "+" not in r["arm"]:
            assert r["n_fact_filled"] == end - first and r["n_filled"] == r["n_rows"] - 4 - measured["settings"]["item_tail"]
        else:
            assert r["n_chosen"] >= 7 and r["n_value_filled"] == 0


@pytest.mark.parametrize(
    "args, message",
    [
        (["--sets", "loss,poems"], "sets: expected some of loss, digits, words, single, "),
        (["--loss-arms", "exact,fill-S99"], "fill-S99: expected one file of maps that this names, found 0"),
        (["--loss-arms", "exact,fill"], "expected a split layer for the ridge modes"),
        (["--text", "/nonexistent"], "no such file or folder: /nonexistent"),
        (["--maps", "/nonexistent.gguf"], "/nonexistent.gguf"),
        (["--filler", "poems"], "filler: expected sources among austen, "),
        (["--documents", "41"], "expected at least 41 documents, found 40"),
    ],
)
def test_user_errors_are_messages(patched_lib, smollm2, text_set, tmp_path, args, message):
    p = measure("--reduced", "--out", tmp_path / "q.json", *args)
    assert p.returncode not in (0, 1) and "Traceback" not in p.stderr
    assert message in p.stdout + p.stderr
    assert not (tmp_path / "q.json").exists()
