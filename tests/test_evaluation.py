"""Statistics, text windows, facts, journal and the loss path of ridgefill.evaluation."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ridgefill import lib
from ridgefill.evaluation import Arm, Engine, EvaluationError, facts, loss, prompts, report, stats, texts
from ridgefill.evaluation.errors import finite
from ridgefill.evaluation.journal import Journal
from ridgefill.text import Document
from scipy import stats as scipy_stats

#
# statistics
#


def test_mean_interval_covers_at_about_its_level():
    """Over 200 samples of a skewed law the BCa interval holds the true mean in at least 88 % (95 % nominal, n = 20)."""
    rng = np.random.default_rng(0)
    stats_small = [stats.mean(rng.gamma(2.0, 1.0, 20)) for _ in range(200)]
    covered = np.mean([e.low <= 2.0 <= e.high for e in stats_small])
    assert 0.88 <= covered <= 0.99


def test_mean_equals_scipy_bca():
    x = np.array([0.02, 0.05, -0.01, 0.03, 0.08, 0.01, 0.04, 0.12, 0.00, 0.02])
    found = stats.mean(x)
    expected = scipy_stats.bootstrap((x,), np.mean, n_resamples=10_000, method="BCa", rng=np.random.default_rng(stats.SEED))
    assert found.value == pytest.approx(x.mean())
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval))
    assert stats.mean(x) == found  # a fixed seed


def test_differences_are_paired():
    """A large spread between documents does not widen the interval of a small constant difference."""
    base = np.linspace(1, 9, 12)
    noise = np.random.default_rng(1).normal(0, 0.001, 12)
    found = stats.mean_difference(base + 0.03 + noise, base)
    assert 0.029 < found.low <= found.value <= found.high < 0.031
    same = stats.mean_difference(base, base)
    assert (same.value, same.low, same.high) == (0, 0, 0)


def test_ratio_is_of_means_and_paired():
    b = np.array([1.0, 2.0, 3.0, 10.0])
    found = stats.ratio(3 * b, b)
    assert found.value == pytest.approx(3) and found.low == pytest.approx(3) and found.high == pytest.approx(3)
    assert stats.ratio([1, 3], [1, 1]).value == pytest.approx(2)


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_equals_its_formula(case):
    k, n = case
    z, p = 1.959963984540054, k / n
    centre, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    found = stats.share(k, n)
    assert found.low == pytest.approx((centre - half) / (1 + z * z / n), abs=1e-9)
    assert found.high == pytest.approx((centre + half) / (1 + z * z / n), abs=1e-9)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_mcnemar_equals_the_binomial_sum(pairs):
    a, b = ([p[i] for p in pairs] for i in (0, 1))
    found = stats.mcnemar(a, b)
    more, less = sum(x and not y for x, y in pairs), sum(y and not x for x, y in pairs)
    assert (found.only_a, found.only_b) == (more, less)
    n, few = more + less, min(more, less)
    tail = sum(math.comb(n, i) for i in range(few + 1)) / 2**n
    assert found.p == pytest.approx(min(1.0, 2 * tail))


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_a_difference_of_shares_is_newcombes(pairs):
    """Against his formula for the lower end, written out for the four counts; the upper end mirrors it."""
    a, b = ([p[i] for p in pairs] for i in (0, 1))
    e, f, g, h = (sum((x, y) == case for x, y in pairs) for case in ((True, True), (True, False), (False, True), (False, False)))
    n, p1, p2 = len(pairs), (e + f) / len(pairs), (e + g) / len(pairs)
    one, two = stats.share(e + f, n), stats.share(e + g, n)
    product = (e + f) * (g + h) * (e + g) * (f + h)
    top = e * h - f * g
    phi = 0 if not product else (max(top - n / 2, 0) if top > 0 else top) / math.sqrt(product)
    found = stats.share_difference(a, b)
    assert found.value == pytest.approx(p1 - p2)
    below = (p1 - one.low) ** 2 - 2 * phi * (p1 - one.low) * (two.high - p2) + (two.high - p2) ** 2
    assert (found.value - found.low) ** 2 == pytest.approx(max(below, 0), abs=1e-9)
    mirrored = stats.share_difference(b, a)
    assert (mirrored.low, mirrored.high) == (pytest.approx(-found.high), pytest.approx(-found.low))
    assert -1 <= found.low + 1e-9 and found.low <= found.value <= found.high <= 1 + 1e-9


def test_shares_of_a_few_equal_items_differ_by_an_unknown_amount():
    found = stats.share_difference([True] * 8, [True] * 8)
    assert found.value == 0 and found.low < -0.25 and found.high > 0.25
    assert stats.verdict(found, 0.05) == "open"
    assert stats.verdict(stats.share_difference([True] * 400, [True] * 400), 0.05) == "equal"


def test_share_differences_cover_at_about_their_level():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(400):
        b = rng.random(40) < 0.8
        a = np.where(rng.random(40) < 0.7, b, rng.random(40) < 0.5)  # paired: P(a) = 0.7 * 0.8 + 0.3 * 0.5
        e = stats.share_difference(a, b)
        covered += e.low <= 0.71 - 0.8 <= e.high
    assert 0.92 <= covered / 400 <= 0.995


def test_paired_p_counts_the_exchanges():
    d = [0.3, 0.1, 0.2, 0.4]
    base = [1.0, 5.0, 2.0, 9.0]
    # of the 16 ways to exchange, one has a mean of 0.25 and one of -0.25
    assert stats.paired_p([x + y for x, y in zip(base, d, strict=True)], base) == pytest.approx(2 / 16)
    assert stats.paired_p(base, base) == 1
    many = np.random.default_rng(0).normal(0.3, 1, 60)
    found = stats.paired_p(many, np.zeros(60))
    assert found == stats.paired_p(many, np.zeros(60))
    assert found == pytest.approx(scipy_stats.ttest_1samp(many, 0).pvalue, abs=0.01)


def test_holm_by_hand():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.5, 0.6]) == [1.0, 1.0]
    with pytest.raises(EvaluationError, match="expected p-values from 0 to 1"):
        stats.holm([1.5, 0.2])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0.001, 0.2))
def test_holm_rejects_what_its_steps_reject(p, alpha):
    """The smallest p-values one after the other, as long as each is at most alpha over the number that are left."""
    order, rejected = sorted(range(len(p)), key=p.__getitem__), set()
    for step, i in enumerate(order):
        if p[i] * (len(p) - step) > alpha:
            break
        rejected.add(i)
    assert {i for i, x in enumerate(stats.holm(p)) if x <= alpha} == rejected


@pytest.mark.parametrize(
    "low, high, expected",
    [(-0.01, 0.01, "equal"), (0.03, 0.05, "apart"), (-0.05, -0.03, "apart"), (-0.01, 0.03, "open"), (0.01, 0.03, "open"), (-0.02, 0.0, "open")],
)
def test_verdicts(low, high, expected):
    assert stats.verdict(stats.Estimate((low + high) / 2, low, high, 20), 0.02) == expected


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), None])
def test_statistics_fail_closed(bad):
    for f in (
        lambda: stats.mean([0.1, bad, 0.3]),
        lambda: stats.mean_difference([0.1, bad], [0.1, 0.2]),
        lambda: stats.ratio([0.1, 0.2], [bad, 0.2]),
        lambda: stats.paired_p([0.1, bad], [0.1, 0.2]),
        lambda: stats.holm([0.1, bad]),
    ):
        with pytest.raises(EvaluationError, match="found nan|found inf"):
            f()


def test_statistics_refuse_what_they_cannot_compute():
    refusals = [
        (lambda: finite([], "loss"), "loss: expected at least one value, found none"),
        (lambda: stats.mean([1.0]), "at least 2 documents, found 1"),
        (lambda: stats.mean_difference([1, 2, 3], [1, 2]), "equal length"),
        (lambda: stats.share(3, 2), "found 3 of 2"),
        (lambda: stats.share(0, 0), "found 0 of 0"),
        (lambda: stats.mcnemar([True], [True, False]), "equal length"),
        (lambda: stats.mcnemar([1, 0], [True, False]), "lists of hits"),
        (lambda: stats.share_difference([1, 0], [True, False]), "lists of hits"),
        (lambda: stats.verdict(stats.Estimate(0, 0, 0, 2), 0), "margin: expected a number above 0"),
    ]
    for f, message in refusals:
        with pytest.raises(EvaluationError, match=message):
            f()


#
# arms
#


@pytest.mark.parametrize(
    "name",
    ["exact", "cut", "noise", "fill-S19", "identity-S1", "nofill-S15", "fill-S15+digits", "fill-S15:kv+random", "fill-S15:kv+random=0.1",
     "identity-S2+tail=0.25", "fill-S15:kv+attention=0.1", "pop", "nofill-S15:kv+equal", "nofill-S15+equal"],
)
def test_arm_names_round_trip(name):
    assert Arm.parse(name).name == name


@pytest.mark.parametrize(
    "name",
    ["", "fill", "fill-S", "fill-S0", "fill-Sx", "exact-S3", "fill-S15+", "fill-S15+all", "ridge-S3", "fill-S-1", "fill-S015", "fill:kv", "identity-S3:kv",
     "exact+digits", "cut+tail=0.1", "fill-S3+tail", "fill-S3+tail=1", "fill-S3+random=2", "fill-S3+digits=0.1", "fill-S3+equal", "fill-S3+random=nan", "fill-S3+random=0.10",
     "fill-S3+attention", "fill-S3+attention=1", "exact+attention=0.1", "pop-S3", "pop:kv", "pop+tail=0.1"],
)
def test_other_names_are_refused(name):
    with pytest.raises(EvaluationError):
        Arm.parse(name)


#
# text windows
#


class Bytes:
    """A tokenizer of single bytes, for tests of text handling."""

    def tokenize(self, text, add_special=True, parse_special=False):
        return list(text.encode())

    def piece(self, token, special=True):
        return bytes([token])

    def chat(self, messages):
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def prose(n: int, seed: int = 0) -> str:
    r = np.random.default_rng(seed)
    words = "harbour letter morning garden captain visit answer evening sister carriage".split()
    return " ".join(" ".join(r.choice(words, 9)).capitalize() + "." for _ in range(n))


DOCS = [Document(f"doc-{i}", prose(200, i), "austen (test)", "public domain", "evaluation") for i in range(4)]


def test_windows_are_reproducible_and_independent():
    a = texts.windows(Bytes(), DOCS, 300, 50, seed=1)
    assert a == texts.windows(Bytes(), DOCS, 300, 50, seed=1)
    assert a[1:] == texts.windows(Bytes(), DOCS[1:], 300, 50, seed=1)  # an item more changes no other
    assert [w.start for w in a] != [w.start for w in texts.windows(Bytes(), DOCS, 300, 50, seed=2)]
    for w, d in zip(a, DOCS, strict=True):
        assert bytes(w.tokens).decode() == d.text[w.start : w.start + 350] and w.n_prefix == 300


def test_windows_refuse_short_documents():
    with pytest.raises(EvaluationError, match=r"doc-0: expected at least 99999 tokens, found \d+"):
        texts.windows(Bytes(), DOCS, 99_990, 9, seed=1)


def test_spread_takes_the_sources_in_turn():
    docs = [Document(n, "x", s) for n, s in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("c1", "c"))]
    assert [d.name for d in texts.spread(docs, 4)] == ["a1", "b1", "c1", "a2"]
    with pytest.raises(EvaluationError, match="at least 6 documents, found 5"):
        texts.spread(docs, 6)


def test_documents_keeps_partitions_apart(tmp_path):
    entries = []
    for i, partition in enumerate(["calibration", "heldout", "evaluation", "evaluation"]):
        (tmp_path / f"{i}.txt").write_text(f"text {i}")
        entries.append({"file": f"{i}.txt", "source": f"s{i} (test)", "licence": "none", "partition": partition})
    (tmp_path / "sources.json").write_text(json.dumps(entries))
    assert [d.name for d in texts.documents(tmp_path)] == ["2.txt", "3.txt"]
    assert [d.name for d in texts.documents(tmp_path, "evaluation", ["s3"])] == ["3.txt"]
    with pytest.raises(EvaluationError, match="from nothing, found none"):
        texts.documents(tmp_path, "evaluation", ["nothing"])
    with pytest.raises(EvaluationError, match="found 'test'"):
        texts.documents(tmp_path, "test")


#
# facts
#


@pytest.mark.parametrize("kind", ["digits", "words"])
def test_items_keep_their_rules(kind):
    items = facts.make_items(Bytes(), DOCS, kind, 16, seed=3, n_rows=2400, n_tail=300)
    assert items == facts.make_items(Bytes(), DOCS, kind, 16, seed=3, n_rows=2400, n_tail=300)
    assert items[5:] == facts.make_items(Bytes(), DOCS, kind, 16, seed=3, n_rows=2400, n_tail=300)[5:]
    assert len({i.fact.value for i in items}) == 16 and len({i.seed for i in items}) == 16
    for item in items:
        text = bytes(item.tokens).decode()
        n, (first, end), (v0, v1) = len(item.tokens), item.fact_rows, item.value_rows
        assert 2400 - prompts.SLACK <= n <= 2400
        assert 4 <= first < end <= n - 300  # neither sink nor tail
        assert text[first:end] == item.fact.sentence and text[v0:v1] == item.fact.value
        assert text.count(item.fact.value) == 1 and text.count(item.fact.name) == 2
        assert item.fact.question in text[-300:]
        # a sentence is about 80 rows here: the fact stands within one of where it was to stand
        assert abs(first - (4 + item.depth * (n - 304))) < 100
    assert len({i.depth for i in items}) == 8


@pytest.mark.parametrize("kind", ["digits", "words"])
def test_other_seeds_are_other_facts(kind):
    made = {facts.make_fact(kind, seed) for seed in range(50)}
    assert len(made) == 50
    assert facts.make_fact(kind, 7) == facts.make_fact(kind, 7)


@pytest.mark.parametrize(
    "answer, hit",
    [
        ("The secret number of Nora Vance is 1234567.", True),
        ("1,234,567", True),
        ("1 2 3 4 5 6 7", True),
        ("1234567. It was 99 before.", True),
        ("12345678", False),
        ("01234567", False),
        ("1234568", False),
        ("123456", False),
        ("It is 12. No: 1234567", False),
        ("", False),
    ],
)
def test_numbers_are_matched_whole(answer, hit):
    fact = facts.Fact("digits", "Nora Vance", "1234567")
    assert fact.answered(answer) is hit


@pytest.mark.parametrize(
    "answer, hit",
    [
        ('The password is "apple river candle".', True),
        ("Apple-River-Candle", True),
        ("river apple candle", False),
        ("apple river candles", False),
        ("pineapple river candle", False),
        ("apple river", False),
        ("", False),
    ],
)
def test_words_are_matched_whole_and_in_order(answer, hit):
    fact = facts.Fact("words", "Nora Vance", "apple river candle")
    assert fact.answered(answer) is hit


@given(
    st.sampled_from(["digits", "words"]),
    st.integers(0, 20),
    st.text("1234567 ,.-\nas", max_size=6),
    st.text("1234567 .-as", max_size=8),
)
def test_a_decided_answer_stays_decided(kind, n, end, more):
    """Tokens after the point where decoding stops could not have changed the verdict."""
    fact = facts.Fact(kind, "Nora Vance", "1234567" if kind == "digits" else "apple river candle")
    answer = f"It is {fact.value}"[: 6 + n] + end
    if fact.decided(answer):
        assert fact.answered(answer) == fact.answered(answer + more)
    if fact.answered(answer):
        assert fact.decided(answer + "\n")


def test_items_that_break_a_rule_are_refused():
    item = facts.make_item(Bytes(), DOCS, "digits", 5, 2400, 300, 0.5)
    pieces = [bytes([t]) for t in item.tokens]
    for n_tail, n_sink, message in (
        (2000, 4, "expected the fact in rows"),
        (300, 2000, "expected the fact in rows"),
        (20, 4, "expected the question in the last 20"),
    ):
        moved = facts.dataclasses.replace(item, n_tail=n_tail)
        with pytest.raises(EvaluationError, match=message):
            facts.check_item(moved, pieces, 2400, n_sink)
    with pytest.raises(EvaluationError, match="found 2376"):
        facts.check_item(
            facts.dataclasses.replace(
                item, tokens=item.tokens[: 2376 - len(item.tokens)] if len(item.tokens) > 2376 else item.tokens
            ),
            pieces,
            2401,
            4,
        )
    with pytest.raises(EvaluationError, match="found it 0 times"):
        prompts.rows_of(pieces, "no such text")
    with pytest.raises(EvaluationError, match="found it 3 times"):
        prompts.rows_of([b"a", b"ba", b"b", b"ab"], "ab")
    assert prompts.rows_of([b"x", b"yab", b"c", b"d"], "abc") == (1, 3)


def test_a_document_too_short_is_refused():
    with pytest.raises(EvaluationError, match="expected at least 2400 tokens of sentences"):
        facts.make_item(Bytes(), [Document("short", prose(5), "t")], "words", 1, 2400, 300, 0.5)


#
# journal
#


def test_journal_goes_on_after_a_torn_line(tmp_path):
    path = tmp_path / "j.jsonl"
    j = Journal(path, {"seed": 1})
    j.add("a", [{"x": 1.5}])
    j.add("b", [{"x": 2.5}])
    path.write_text(path.read_text()[:-9])  # killed while writing b
    again = Journal(path, {"seed": 1})
    assert again.done == {"a": [{"x": 1.5}]}
    again.add("b", [{"x": 3.5}])
    assert Journal(path, {"seed": 1}).done == {"a": [{"x": 1.5}], "b": [{"x": 3.5}]}
    with pytest.raises(EvaluationError, match="item b"):
        again.add("b", [])
    with pytest.raises(ValueError):
        again.add("c", [{"x": float("nan")}])


def test_journal_of_other_settings_is_not_reused(tmp_path):
    Journal(tmp_path / "j", {"seed": 1}).add("a", [])
    assert Journal(tmp_path / "j", {"seed": 2}).done == {}


#
# report
#


def loss_records(excess: dict[str, float], n: int = 20, key: bool = True) -> list[dict]:
    r = np.random.default_rng(0)
    out = []
    for i in range(n):
        base, jitter = r.normal(2.4, 0.5), r.normal(1, 0.1)
        for arm, more in excess.items():
            out.append(
                {
                    "arm": arm,
                    "document": f"d{i}",
                    "loss": base + more * jitter,
                    "top1": 0.9,
                    "kl": more,
                    "kl_median": more / 2,
                    "decode": 0.75,
                    "quoted": 0.5 if arm == "exact" else 0.25,
                    "cost": 0.5,
                    "n_new": 100,
                    "new_loss_sum": 100 * (base + 2 * more),
                    "n_key": 3 if key else None,
                    "key_loss_sum": 10 + 30 * more if key else None,
                }
            )
    return out


def fact_records(hits: dict[str, int], n: int = 40) -> list[dict]:
    return [
        {
            "arm": arm,
            "seed": i,
            "hit": i < k,
            "score": float(i < k),
            "depth": (i % 4 + 0.5) / 4,
            "cost": 0.5,
            "n_rows": 1000,
            "n_filled": 0 if arm == "exact" else 900,
            "n_chosen": 7 if "+" in arm else 0,
        }
        for arm, k in hits.items()
        for i in range(n)
    ]


def test_loss_summary():
    s = report.summarise_loss(loss_records({"exact": 0.0, "fill-S19": 0.02, "identity-S19": 0.1}))
    assert s["fill-S19"]["over_exact"]["value"] == pytest.approx(0.02, rel=0.1)
    assert s["fill-S19"]["over_exact"]["low"] > 0 and s["exact"]["loss"]["n"] == 20
    assert s["fill-S19"]["key_over_exact"]["value"] == pytest.approx(30 * 0.02 / 3)
    assert s["fill-S19"]["new_over_exact"]["value"] == pytest.approx(2 * 0.02) and s["fill-S19"]["new_over_exact"]["n_tokens"] == 2000
    assert (s["fill-S19"]["kl"]["value"], s["fill-S19"]["kl_median"]["value"]) == (pytest.approx(0.02), pytest.approx(0.01))
    assert (s["fill-S19"]["decode"]["value"], s["fill-S19"]["cost"]) == (0.75, 0.5)
    assert (s["exact"]["quoted"]["value"], s["fill-S19"]["quoted"]["value"]) == (0.5, 0.25)
    assert report.summarise_loss(loss_records({"exact": 0, "fill-S19": 0.1}, key=False))["fill-S19"]["key_over_exact"] is None


@pytest.mark.parametrize("n_with, found", [(5, 30 * 0.1 / 3), (1, None), (0, None)])
def test_documents_without_key_tokens_say_nothing_of_them(n_with, found):
    records = loss_records({"exact": 0, "fill-S19": 0.1})
    for r in records:
        if int(r["document"][1:]) >= n_with:
            r |= {"n_key": 0, "key_loss_sum": 0.0}
    key = report.summarise_loss(records)["fill-S19"]["key_over_exact"]
    assert key == found if found is None else (key["value"], key["n"], key["n_tokens"]) == (pytest.approx(found), n_with, 3 * n_with)


@pytest.mark.parametrize(
    "excess, failing",
    [
        ({"fill-S19": 0.02, "identity-S19": 0.12}, []),
        ({"fill-S19": 0.05, "identity-S19": 0.20}, ["loss of fill-S19 over exact, nats"]),
        ({"fill-S19": 0.02, "identity-S19": 0.05}, ["excess loss of identity-S19 over that of fill-S19"]),
        (
            {"fill-S19": 0.12, "identity-S19": 0.12},
            ["loss of fill-S19 over exact, nats", "excess loss of identity-S19 over that of fill-S19"],
        ),
    ],
)
def test_loss_criteria(excess, failing):
    found = report.loss_criteria(loss_records({"exact": 0.0} | excess), 19)
    assert [c.name for c in found if not c.holds] == failing
    few = report.loss_criteria(loss_records({"exact": 0.0} | excess, n=19), 19)
    assert not few[0].holds


@pytest.mark.parametrize(
    "kv, kv_prev, failing",
    [
        (0.005, -0.12, []),
        (-0.02, -0.18, ["loss of fill-S15:kv over fill-S15:input, either way"]),
        (0.0, -0.06, ["loss of fill-S15:kv_prev over fill-S15:kv, key tokens"]),
        (0.0, 0.12, ["loss of fill-S15:kv_prev over fill-S15:kv, upper end", "loss of fill-S15:kv_prev over fill-S15:kv, key tokens"]),
    ],
)
def test_kinds_criteria(kv, kv_prev, failing):
    """kv and kv_prev: loss over input's. On the key tokens of loss_records() arms differ ten times as much."""
    arms = [Arm("fill", 15, kind=k) for k in ("kv_prev", "input", "kv")]
    excess = {"exact": 0.0, arms[1].name: 0.1, arms[2].name: 0.1 + kv, arms[0].name: 0.1 + kv_prev}
    records = loss_records(excess)
    pairs = [report.compare_loss(records, a.name, b.name) for a, b in report.kind_pairs([Arm("exact"), *arms])]
    assert [(p["a"], p["b"]) for p in pairs] == [(arms[0].name, arms[2].name), (arms[2].name, arms[1].name)]
    assert sorted(c.name for c in report.kinds_criteria(pairs, 15) if not c.holds) == sorted(failing)
    assert not [c for c in report.kinds_criteria(pairs, 19) if "key tokens" in c.name]


@pytest.mark.parametrize(
    "hits, failing",
    [
        ({"exact": 40, "fill-S19": 38, "fill-S15": 2, "fill-S15+digits": 38}, []),
        ({"exact": 35, "fill-S19": 35, "fill-S15": 0, "fill-S15+digits": 35}, ["recall of exact"]),
        ({"exact": 40, "fill-S19": 37, "fill-S15": 0, "fill-S15+digits": 40}, ["recall of fill-S19, share of exact"]),
        ({"exact": 40, "fill-S19": 40, "fill-S15": 3, "fill-S15+digits": 40}, ["recall of fill-S15, share of exact"]),
        ({"exact": 40, "fill-S19": 40, "fill-S15": 0, "fill-S15+digits": 0}, ["recall of fill-S15+digits, share of exact"]),
    ],
)
def test_facts_criteria(hits, failing):
    assert [c.name for c in report.facts_criteria(fact_records(hits), 19, 15) if not c.holds] == failing


def test_reports_fail_closed():
    good = loss_records({"exact": 0.0, "fill-S19": 0.02})
    with pytest.raises(EvaluationError, match="the same items in every arm"):
        report.summarise_loss(good[:-1])
    with pytest.raises(EvaluationError, match="found two"):
        report.summarise_loss([*good, good[0]])
    with pytest.raises(EvaluationError, match="expected the arm exact"):
        report.summarise_loss(loss_records({"fill-S19": 0.02}))
    with pytest.raises(EvaluationError, match="expected the arm exact"):
        report.summarise_facts(fact_records({"fill-S15": 1}))
    with pytest.raises(EvaluationError, match="found nan"):
        report.summarise_loss([r | {"kl": float("nan")} for r in good])
    with pytest.raises(EvaluationError, match="expected exact to answer"):
        report.facts_criteria(fact_records({"exact": 0, "fill-S19": 0, "fill-S15": 0, "fill-S15+digits": 0}), 19, 15)


#
# with the library
#


@pytest.fixture(scope="module")
def engine(patched_lib, pico_model):
    lib.load(patched_lib)
    with lib.Model(pico_model("llama", n_layer=6)) as model, Engine(model, [], 512, n_threads=1) as e:
        yield e


@pytest.fixture
def window(engine):
    tokens = tuple(np.random.default_rng(5).integers(3, 259, 260).tolist())
    return texts.Window("doc", "test", 0, tokens, 200)


def test_loss_of_exact_equals_a_direct_decode(engine, window):
    found = loss.score_window(engine, [Arm("exact")], window, 64)[0]
    with lib.Context(engine.model, 512, n_threads=1) as ctx:
        logits = ctx.decode(window.tokens, logits="all").astype(np.float64)[199:259]
    expected = np.mean([np.log(np.exp(row - row[t]).sum()) for row, t in zip(logits, window.tokens[200:], strict=True)])
    assert found["loss"] == pytest.approx(expected, abs=1e-4)
    assert found["top1"] == 1 and found["kl"] == 0


def test_arms_change_the_loss_as_they_should(engine, window):
    arms = [Arm.parse(a) for a in ("exact", "cut", "identity-S2", "nofill-S2", "identity-S2+digits")]
    rows = {r["arm"]: r for r in loss.score_window(engine, arms, window, 64)}
    assert rows["exact"]["kl"] == 0
    for name in ("cut", "identity-S2", "nofill-S2"):
        assert rows[name]["kl"] > 1e-3, name
    assert len({r["loss"] for r in rows.values()}) == len(rows)
    assert all(r["n_key"] == rows["cut"]["n_key"] for r in rows.values())
    nll = {a.name: -loss.log_softmax(loss.read(engine, a, window, 64).logits)[range(60), window.tokens[200:]] for a in arms[:2]}
    assert rows["cut"]["n_key"] == int((nll["cut"] - nll["exact"] >= 2).sum())


def test_random_rows_are_as_many_as_the_selector_chooses(engine, window):
    prompt = window.tokens[:200]

    def choose(rows: str, seed: int = 1) -> list[int]:
        return engine.choose(Arm.parse(f"identity-S2+{rows}"), prompt, 64, seed)

    digits = choose("digits")
    holds = {i for i in range(4, 136) if any(c in b"0123456789" for c in engine.model.piece(prompt[i]))}
    assert digits == [i for i in range(4, 136) if i in holds or i - 1 in holds]
    random = choose("random")
    assert len(random) == len(digits) > 0 and random != digits
    assert all(4 <= r < 136 for r in random)
    assert random == choose("random") != choose("random", seed=2)
    tenth = choose("random=0.1")
    assert len(tenth) == 13 and all(4 <= r < 136 for r in tenth) and tenth == sorted(set(tenth))
    # the same rows for every arm
    assert tenth == engine.choose(Arm.parse("nofill-S3+random=0.1"), prompt, 64, 1) != choose("random=0.1", seed=2)
    assert choose("tail=0.1") == list(range(136 - 13, 136))


def test_rows_in_front_of_the_tail_are_a_longer_tail(engine, window):
    """The same cache, whether the rows are named or the tail is longer by as many."""
    named = loss.read(engine, Arm.parse("identity-S2+tail=0.1"), window, 64)
    longer = loss.read(engine, Arm("identity", 2), window, 64 + 13)
    assert named.filled.filled.tolist() == longer.filled.filled.tolist() and named.filled.cost == longer.filled.cost
    without = loss.read(engine, Arm("identity", 2), window, 64)
    # other rows run together, so not the same bits
    assert np.abs(named.logits - longer.logits).max() < 0.02 < 0.2 < np.abs(without.logits - longer.logits).max()


def test_an_arm_without_its_maps_is_refused(engine, window):
    with pytest.raises(EvaluationError, match="fill-S2: expected one file of maps that this names, found 0 among none"):
        engine.begin(Arm("fill", 2), window.tokens, 64)
    for arm in ("fill-S2", "identity-S6"):
        with pytest.raises(EvaluationError, match=f"{arm}: expected"):
            engine.require([Arm("exact"), Arm.parse(arm)])
    engine.require([Arm("exact"), Arm("cut"), Arm("identity", 5)])
    with pytest.raises(EvaluationError, match="expected the arm exact"):
        loss.score_window(engine, [Arm("cut")], window, 64)


def test_an_arm_names_the_kind_of_its_maps_where_there_are_several(engine):
    kv, prev, other = (SimpleNamespace(split=s, kind=k) for s, k in ((2, "kv"), (2, "kv_prev"), (3, "kv")))
    with Engine(engine.model, [kv, prev, other], 64, n_threads=1) as e:
        e.require([Arm.parse(a) for a in ("fill-S2:kv", "fill-S2:kv_prev", "fill-S3", "fill-S3:kv")])
        for arm, found in (("fill-S2", 2), ("fill-S3:input", 0)):
            with pytest.raises(EvaluationError, match=f"{arm}: .*found {found} among S2:kv, S2:kv_prev, S3:kv"):
                e.require([Arm.parse(arm)])
    with pytest.raises(EvaluationError, match="one of each split and kind"):
        Engine(engine.model, [kv, kv], 64)


def test_asking_records_what_was_filled(engine):
    docs = [Document("d", prose(300), "austen (test)")]
    item = facts.make_item(engine.model, docs, "digits", 1, 460, 200, 0.5)
    for arm in ("exact", "identity-S2", "identity-S2+digits", "identity-S2+random"):
        r = facts.ask(engine, Arm.parse(arm), item)
        assert r["n_rows"] == len(item.tokens) and isinstance(r["answer"], str) and r["hit"] is False
        n_fact = item.fact_rows[1] - item.fact_rows[0]
        if arm == "exact":
            assert r["n_filled"] == 0
        else:
            assert r["n_filled"] == len(item.tokens) - 204 - r["n_chosen"]
        if arm == "identity-S2":
            assert r["n_fact_filled"] == n_fact
        if arm == "identity-S2+digits":
            assert r["n_chosen"] >= 7 and r["n_value_filled"] == 0


def test_median_ratio_is_of_pairs_and_heeds_no_outlier():
    first = np.array([2.0, 4.0, 6.0, 8.0, 1000.0])
    half = stats.median_ratio(first / 2, first)
    assert (half.value, half.low, half.high, half.n) == (0.5, 0.5, 0.5, 5)  # drawn in pairs, every resample gives the same
    other = stats.median_ratio([1.0, 9.0, 2.0, 3.0, 4.0], first)
    assert other.value == 3 / 6 and other.low < 0.5 < other.high
    for bad in (([1.0], [2.0]), ([1.0, 2.0], [1.0]), ([1.0, math.nan], [1.0, 2.0])):
        with pytest.raises(EvaluationError):
            stats.median_ratio(*bad)
