"""scripts/bench_serve.py on a pico model: what it measures, that it notices a disturbed neighbour, that it can be stopped."""
from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from bindings_util import environment
from ridgefill.evaluation import EvaluationError, stats
from server_util import BATCH, UBATCH
from server_util import maps, model  # noqa: F401  (fixtures)

import bench_serve  # scripts/ is in the path since server_util
import readme_tables

N = 1500


def command(model, maps, out, **options):
    options = {"users": "2", "newcomers": 3, "tokens": N, "batch": BATCH, "ubatch": UBATCH, "threads": 1} | options
    flags = [str(x) for k, v in options.items() for x in (f"--{k}", v)]
    return [sys.executable, bench_serve.__file__, "--model", str(model), "--maps", str(maps), "--out", str(out), *flags]


@pytest.fixture(scope="module")
def result(model, maps, tmp_path_factory):
    out = tmp_path_factory.mktemp("bench") / "r.json"
    p = subprocess.run(command(model, maps, out), env=environment(), capture_output=True, text=True, timeout=120)
    assert out.is_file(), p.stdout + p.stderr
    assert not out.with_suffix(".journal.jsonl").exists()
    return json.loads(out.read_text()), p


def test_every_figure_follows_from_the_trials(result):
    found, p = result
    (r,) = found["results"]
    assert (r["users"], r["newcomers"]) == (2, 3)
    for arm, trials in r["trials"].items():
        assert len(trials) == 3 and {t["arm"] for t in trials} == {arm}
        assert all((t["ridge"]["filled"] > 0) == (arm == "fill") and t["ridge"]["cached"] == 0 for t in trials)
        gaps = [g for t in trials for user in t["gaps_ms"] for g in user]
        a = r["arms"][arm]
        assert a["gaps_ms"]["n"] == len(gaps) and a["gaps_ms"]["longest"] == max(gaps)
        assert a["gaps_ms"]["p99"] == pytest.approx(np.percentile(gaps, 99))
        assert a["ttft_ms"]["median"] == sorted(t["ttft_ms"] for t in trials)[1]
        # the gaps of a user cover the newcomer's wait
        assert all(sum(user) > t["ttft_ms"] * 0.99 for t in trials for user in t["gaps_ms"])
        assert f"{a['tokens_equal']} of {a['tokens_compared']}" in p.stdout
    assert len({tuple(t["answer"]) for t in r["trials"]["off"]}) > 1
    # a step at a time: many tokens of each user while a prompt fills
    assert all(min(t["until"]) > bench_serve.WARM + N // BATCH for t in r["trials"]["fill"])


def test_the_result_becomes_a_table(result, tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "bench-serve.json").write_text(json.dumps(result[0]))
    text = readme_tables.render("<!-- results/bench-serve.json -->\n<!-- end -->", tmp_path)
    fill = result[0]["results"][0]["arms"]["fill"]
    assert text.count("\n| 2 | ") == 2 and f"| {fill['tokens_equal']:,} of {fill['tokens_compared']:,} |" in text


def test_a_fill_leaves_the_users_tokens_as_they_are(result):
    found, p = result
    (r,) = found["results"]
    fill = r["arms"]["fill"]
    assert fill["tokens_equal"] == fill["tokens_compared"] > 60
    assert p.returncode == (0 if all(c["holds"] for c in found["criteria"]) else 1)
    assert found["criteria"][0]["holds"] and len(found["criteria"]) == 4


def test_another_token_of_one_user_is_seen(result):
    (r,) = result[0]["results"]
    trials = json.loads(json.dumps(r["trials"]["fill"]))
    trials[1]["tokens"][0][-1] += 1
    a = bench_serve.summarise_arm(trials, r["alone"])
    assert a["tokens_equal"] == a["tokens_compared"] - 1
    changed = r | {"arms": r["arms"] | {"fill": a}}
    assert not bench_serve.criteria(2, changed, reduced=False)[0].holds


def test_a_stopped_run_keeps_its_newcomers(model, maps, tmp_path):
    out = tmp_path / "r.json"
    journal = out.with_suffix(".journal.jsonl")
    p = subprocess.Popen(command(model, maps, out, newcomers=200), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until = time.monotonic() + 60
    while not journal.exists() or len(journal.read_text().splitlines()) < 3:
        assert p.poll() is None and time.monotonic() < until, p.stdout.read()
        time.sleep(0.1)
    p.send_signal(signal.SIGINT)
    p.wait(20)
    kept = journal.read_text().splitlines()[1:3]
    subprocess.run(command(model, maps, out, newcomers=2), env=environment(), capture_output=True, timeout=60)
    (r,) = json.loads(out.read_text())["results"]
    for line in kept:
        for t in json.loads(line)["records"]:
            assert t in r["trials"][t["arm"]]


def test_what_cannot_be_measured_is_named(model, maps, tmp_path):
    for options, message in (({"users": "2,x"}, "users: expected numbers such as 1,2,4,8, found 2,x"), ({"newcomers": 1}, "--newcomers")):
        p = subprocess.run(command(model, maps, tmp_path / "r.json", **options), env=environment(), capture_output=True, text=True, timeout=60)
        assert p.returncode in (2, EvaluationError.exit_code) and message in p.stdout + p.stderr
    p = subprocess.run(command(model, model, tmp_path / "r.json"), env=environment(), capture_output=True, text=True, timeout=60)
    assert p.returncode == EvaluationError.exit_code and "runs without maps" in p.stdout


def test_pooled_difference_draws_groups_in_pairs():
    rng = np.random.default_rng(3)
    a = [rng.normal(10 + i, 1, 30) for i in range(12)]
    same = stats.pooled_difference(a, a, np.max)
    assert (same.value, same.low, same.high) == (0, 0, 0)
    shifted = stats.pooled_difference([g - 5 for g in a], a, lambda g: np.percentile(g, 99))
    assert shifted.value == pytest.approx(-5) and shifted.low == pytest.approx(-5) and shifted.high == pytest.approx(-5)
    other = stats.pooled_difference([rng.normal(0, 1, 30) for _ in range(12)], [rng.normal(0, 1, 30) for _ in range(12)], np.mean)
    assert other.low < other.value < other.high and other.n == 12
    for bad in ([a, a[:5]], [[[]] * 2, [[1]] * 2], [[[1]], [[1]]], [[[1], [np.nan]], [[1], [2]]]):
        with pytest.raises(EvaluationError):
            stats.pooled_difference(*bad, np.max)
