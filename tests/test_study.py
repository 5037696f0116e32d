"""scripts/study.sh and the page of its results: a small study runs to its end, and the page shows the committed files and nothing else."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from ridgefill.evaluation import report
from test_evaluation import fact_records, loss_records

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import results_tables  # noqa: E402

QUICK = ROOT / "out" / "study-quick"


def test_the_page_is_that_of_the_results():
    assert results_tables.PAGE.read_text() == results_tables.render(results_tables.STUDY), "run scripts/results_tables.py"


def facts_summary(hits: dict[str, int]) -> dict:
    return report.summarise_facts(fact_records(hits))


def table_rows(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]


def test_recall_by_split_says_from_where_on_it_is_back():
    hits = {"identity-S2": 0, "fill-S2:kv": 38, "identity-S3": 10, "fill-S3:kv": 0, "identity-S4": 38, "fill-S4:kv": 39, "fill-S4:kv+random=0.1": 5, "fill-S3:input": 40}
    head, _, *rows = table_rows(results_tables.by_split(facts_summary({"exact": 40} | hits)))
    assert head == ["split", "identity", "kv", "input"]
    assert [r[0] for r in rows] == ["2", "3", "4", "back from"]
    assert rows[1][1].startswith("0.250 [0.14") and rows[0][2].startswith("0.950 [0.8")
    assert [r[3] for r in rows[:3]] == ["", "1.000 [0.912, 1.000]", ""]
    assert rows[3][1:] == ["4", "4", "3"]  # kv kept enough at 2, and lost it again at 3
    head, _, *rows = table_rows(results_tables.by_split(facts_summary({"exact": 40, "fill-S2:kv": 3, "fill-S3:kv": 2})))
    assert rows[-1] == ["back from", "none of these"]
    assert results_tables.by_split(facts_summary({"exact": 40, "fill-S2:kv": 3})) == ""


def test_all_models_and_tasks_stand_in_one_table():
    of = lambda **hits: {"summary": facts_summary({"exact": 40} | {k.replace("_", "-").replace("kv", ":kv"): v for k, v in hits.items()})}  # noqa: E731
    results = {
        "a": {"sets": ["loss", "single", "passwords"], "model": {"n_layer": 8}, "loss": {}, "single": of(fill_S2kv=0, fill_S3kv=40), "passwords": of(fill_S2kv=1)},
        "b": {"sets": ["single"], "model": {"n_layer": 9}, "single": of(identity_S2=40, identity_S5=40, fill_S2kv=1, fill_S5kv=2)},
    }
    head, _, *rows = table_rows(results_tables.back_from(results))
    assert head == ["model", "layers", "task", "exact", "kv", "identity"]
    assert [[*r[:3], *r[4:]] for r in rows] == [["a", "8", "single", "3", ""], ["b", "9", "single", "none of these", "2"]]
    assert rows[0][3].startswith("1.000 [0.912") and rows[0][3].endswith("of 40")
    assert results_tables.back_from({"a": {"sets": ["loss"], "loss": {}}}) == ""


def test_a_loss_beside_another_implementations_is_judged_by_its_tolerance():
    summary = report.summarise_loss(loss_records({"exact": 0.0, "fill-S19:input": 0.0245, "fill-S15:input": 0.12}))
    rows = {r[0]: r for r in table_rows(results_tables.beside(summary))}
    assert rows["`fill-S19:input`"][2:] == ["+0.024 ± 0.005", "yes"] and rows["`fill-S15:input`"][3] == "no"
    assert results_tables.beside(report.summarise_loss(loss_records({"exact": 0.0, "identity-S2": 0.1}))) == ""


def single(hits: dict[str, list[bool]], seed: int = 0) -> dict:
    """A result of one task, with only what the tables over models read."""
    items = [{"arm": arm, "seed": seed + i, "document": "d", "value": str(i), "hit": hit} for arm, of_arm in hits.items() for i, hit in enumerate(of_arm)]
    return {"sets": ["single"], "single": {"items": items}}


def test_models_with_and_without_a_norm_are_compared_prompt_by_prompt():
    some = [True] * 6 + [False] * 4
    results = {
        "pico-qwen3-s": single({"exact": [True] * 10, "noise": [True] * 10, "fill-S2:kv": some, "fill-S2:kv+random=0.1": some, "fill-S3:kv": some}),
        "pico-llama": single({"exact": [True] * 10, "noise": [True] * 10, "fill-S2:kv": [False] * 10, "fill-S2:kv+random=0.1": some}),
    }
    head, _, *rows = table_rows(results_tables.head_norm(results))
    assert head == ["task", "arm", "pico-qwen3-s", "pico-llama", "difference", "n"]
    assert [r[1] for r in rows] == ["`exact`", "`fill-S2:kv`"]
    assert rows[1][2].startswith("0.600 [0.3") and rows[1][3].startswith("0.000 [0.000") and rows[1][4].startswith("+0.600 [+0.") and rows[1][5] == "10"
    other = {"pico-qwen3-s": results["pico-qwen3-s"], "pico-llama": single({"exact": [True] * 10}, seed=1)}
    with pytest.raises(SystemExit, match="expected the same prompts of single"):
        results_tables.head_norm(other)
    assert results_tables.head_norm({"pico-llama": other["pico-llama"]}) == ""


def test_rows_chosen_by_attention_stand_beside_random_ones_and_a_longer_tail():
    def pair(a: str, b: str, value: float, p: float, what: str) -> dict:
        return {"a": f"fill-S2:kv+{a}=0.1", "b": f"fill-S2:kv+{b}=0.1", what: {"value": value, "low": value - 1, "high": value + 1}, "p_holm": p}

    pairs = {what: [pair("attention", "random", x, 0.01, key), pair("attention", "tail", -x, 0.5, key), pair("random", "tail", 9.0, 1, key)]
             for what, key, x in (("loss", "loss", -0.25), ("single", "share", 0.125))}  # fmt: skip
    text = results_tables.chosen_rows({"m": {"sets": ["loss", "single", "splices"], **{w: {"pairs": p} for w, p in pairs.items()}}})
    assert table_rows(text)[2:] == [
        ["m", "loss", "fill-S2:kv", "-0.250 [-1.250, +0.750]", "0.01", "+0.250 [-0.750, +1.250]", "0.5"],
        ["m", "single", "fill-S2:kv", "+0.125 [-0.875, +1.125]", "0.01", "-0.125 [-1.125, +0.875]", "0.5"],
    ]
    assert results_tables.chosen_rows({"m": {"sets": ["loss"], "loss": {"pairs": []}}}) == ""


@pytest.fixture(scope="module")
def study(patched_lib, text_set):
    """study(arguments) -> the finished process of a quick study."""
    command, env = [ROOT / "scripts" / "study.sh", "--quick"], os.environ | {"RIDGE_LIB_DIR": str(patched_lib)}
    return lambda *args: subprocess.run([*command, *args], capture_output=True, text=True, check=False, env=env)


@pytest.fixture(scope="module")
def quick(study, smollm2) -> tuple[dict[str, dict], float]:
    """Results of the whole of it by name, and the CPU time it took, seconds."""
    shutil.rmtree(QUICK, ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    p = study()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert p.returncode == 0, p.stdout + p.stderr
    results = {path.stem: json.loads(path.read_text()) for path in (QUICK / "results").glob("*.json")}
    return results, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_quick_study_measures_every_set(quick):
    results, seconds = quick
    assert set(results) == {"smollm2", "pico-qwen3-s", "pico-qwen3-s-splices"}
    assert seconds < 8 * 60 * 2  # eight minutes of two cores
    for name, r in results.items():
        assert [w for w in r["sets"] if not r[w]["items"]] == [], name
    s = results["pico-qwen3-s"]["single"]["summary"]
    assert s["exact"]["hits"] >= 7 and s["fill-S5:kv"]["hits"] > s["nofill-S3"]["hits"] == 0
    assert {"fill-S3:kv+attention=0.1", "fill-S3:kv+random=0.1", "fill-S3:kv+tail=0.1", "pop"} <= set(s)
    pairs = {(p["a"], p["b"]) for p in results["pico-qwen3-s"]["single"]["pairs"]}
    assert {("fill-S3:kv+attention=0.1", "fill-S3:kv+random=0.1"), ("fill-S3:kv+attention=0.1", "fill-S3:kv+tail=0.1")} <= pairs


def test_the_page_of_a_study_shows_its_figures(quick):
    results, _ = quick
    text = (QUICK / "RESULTS.md").read_text()
    assert text == results_tables.render(QUICK / "results") and text != results_tables.render(ROOT / "nowhere")
    arm = results["smollm2"]["loss"]["summary"]["fill-S20:kv"]
    (row,) = (r for r in table_rows(text) if r[0] == "`fill-S20:kv`" and len(r) == 13)
    assert float(row[1]) == pytest.approx(arm["cost"], abs=6e-4) and row[3].startswith(f"{arm['over_exact']['value']:+.4f}")
    assert all(f"\n## {name}\n" in text for name in results)


def test_a_finished_study_is_not_measured_again(quick, study):
    before = {p: p.stat().st_mtime_ns for p in QUICK.rglob("result.json")}
    p = study("pico-qwen3-s")
    assert p.returncode == 0, p.stdout + p.stderr
    assert {p: p.stat().st_mtime_ns for p in QUICK.rglob("result.json")} == before and len(before) == 3


@pytest.mark.parametrize("args, message", [(["--fast"], "unknown option --fast"), (["pico-none"], "expected a model models/pico/pico-none/pico-none.f16.gguf")])
def test_errors_are_messages(study, args, message):
    p = study(*args)
    assert p.returncode not in (0, 6) and message in p.stderr
