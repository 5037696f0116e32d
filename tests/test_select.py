"""Row selectors of ggml-ridge against oracles in NumPy and plain Python."""
from __future__ import annotations

import ctypes as ct
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from ridge_native import ridge

GUARD = -12345  # the selectors must not write behind the rows they return


def select_random(row0: int, row1: int, n: int, seed: int) -> np.ndarray:
    rows = np.full(max(min(n, row1 - row0), 0) + 1, GUARD, np.int32)
    count = ridge("select_random")(row0, row1, n, seed, rows)
    assert rows[count:].tolist() == [GUARD]
    return rows[:count]


def select_digits(row0: int, row1: int, pieces: list[bytes], n_max: int) -> list[int]:
    rows = np.full(len(pieces) + 1, GUARD, np.int32)
    lengths = np.array([len(p) for p in pieces] or [0], np.int32)
    count = ridge("select_digits")(row0, row1, (ct.c_char_p * len(pieces))(*pieces), lengths, n_max, rows)
    assert (rows[count:] == GUARD).all()
    return rows[:count].tolist()


def splitmix64(seed: int):
    mask = (1 << 64) - 1
    while True:
        seed = (seed + 0x9E3779B97F4A7C15) & mask
        z = ((seed ^ seed >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        yield z ^ z >> 31


def test_generator_of_the_oracle_gives_the_published_numbers():
    # first outputs of splitmix64 for the seed 1234567, as its reference implementation prints them
    g = splitmix64(1234567)
    assert [next(g) for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def oracle_random(row0: int, row1: int, n: int, seed: int) -> list[int]:
    """Selection sampling: row i is taken with probability (rows still wanted) / (rows still there)."""
    g, out = splitmix64(seed), []
    for row in range(row0, row1):
        if len(out) < n and next(g) % (row1 - row) < min(n, row1 - row0) - len(out):
            out.append(row)
    return out


ranges = st.tuples(st.integers(0, 2000), st.integers(0, 400)).map(lambda t: (t[0], t[0] + t[1]))
seeds = st.integers(0, 2**64 - 1)


@given(ranges, st.integers(0, 500), seeds)
def test_random_rows_equal_the_oracle_so_that_a_seed_means_the_same_on_every_platform(r, n, seed):
    assert select_random(*r, n, seed).tolist() == oracle_random(*r, n, seed)


@given(ranges, st.integers(0, 500), seeds)
def test_random_rows_are_sorted_unique_in_range_and_as_many_as_asked_for(r, n, seed):
    rows = select_random(*r, n, seed)
    assert len(rows) == min(n, r[1] - r[0])
    assert (np.diff(rows) > 0).all()
    assert ((rows >= r[0]) & (rows < r[1])).all()


@given(seeds, seeds)
def test_random_rows_repeat_for_one_seed_and_differ_between_two(a, b):
    rows = select_random(100, 1100, 100, a).tolist()
    assert rows == select_random(100, 1100, 100, a).tolist()
    assert (rows == select_random(100, 1100, 100, b).tolist()) == (a == b)


def chi_square_p(draws: np.ndarray, n_rows: int) -> float:
    """p of the hypothesis that every row is equally likely. draws: [n_draws, n], each without replacement."""
    n_draws, n = draws.shape
    counts = np.bincount(draws.ravel(), minlength=n_rows)
    expected = n_draws * n / n_rows
    # rows drawn without replacement vary less than independent ones by (n_rows - n) / (n_rows - 1)
    statistic = ((counts - expected) ** 2 / expected).sum() * (n_rows - 1) / (n_rows - n)
    return float(stats.chi2.sf(statistic, n_rows - 1))


@pytest.mark.parametrize("n", [1, 8, 39])
def test_random_rows_are_uniform_by_chi_square(n):
    draws = np.stack([select_random(0, 40, n, seed) for seed in range(4000)])
    assert chi_square_p(draws, 40) > 1e-3


def test_the_chi_square_check_notices_a_bias_of_a_tenth():
    rng = np.random.default_rng(0)
    weights = np.where(np.arange(40) < 20, 1.05, 0.95)
    draws = np.stack([rng.choice(40, 8, replace=False, p=weights / weights.sum()) for _ in range(4000)])
    assert chi_square_p(draws, 40) < 1e-3


def test_every_set_of_rows_is_equally_likely():
    draws = [tuple(select_random(0, 6, 3, seed)) for seed in range(8000)]
    counts = np.unique(draws, axis=0, return_counts=True)[1]
    assert len(counts) == math.comb(6, 3)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_random_refuses_negative_rows_and_counts_and_takes_nothing_of_an_empty_range():
    none = np.full(1, GUARD, np.int32)
    assert ridge("select_random")(-1, 10, 1, 0, none) == -1
    assert ridge("select_random")(0, 10, -1, 0, none) == -1
    assert ridge("select_random")(10, 10, 5, 0, none) == 0
    assert ridge("select_random")(10, 3, 5, 0, none) == 0
    assert none[0] == GUARD


def test_random_works_at_the_end_of_the_number_range():
    top = 2**31 - 1
    assert select_random(top - 5, top, 5, 3).tolist() == list(range(top - 5, top))


# pieces as tokenizers give them: words, digits, other scripts' digits, cut UTF-8, NUL, nothing
pieces = st.lists(
    st.one_of(
        st.text(max_size=6).map(lambda s: s.encode("utf-8", "surrogatepass")),
        st.binary(max_size=4),
        st.sampled_from([b" the", b"7", b" 42nd", b"", "１".encode(), "٣".encode(), "²".encode(), b"\x00", b"a\x005", b"/", b":"]),
    ),
    max_size=40,
)


def holds_digit(piece: bytes) -> bool:
    return any(chr(c) in "0123456789" for c in piece)


@given(pieces, st.integers(-1, 45), st.data())
@example([b"a\x005"], 0, None)
def test_digit_rows_are_those_that_hold_a_digit_and_those_behind_them_the_last_ones_if_limited(texts, n_max, data):
    row0 = data.draw(st.integers(0, len(texts))) if data else 0
    row1 = data.draw(st.integers(row0, len(texts))) if data else len(texts)
    digits = {row for row in range(row0, row1) if holds_digit(texts[row])}
    expected = [row for row in range(row0, row1) if row in digits or row - 1 in digits]
    if n_max > 0:
        expected = expected[-n_max:]
    assert select_digits(row0, row1, texts, n_max) == expected


def test_of_all_bytes_alone_the_ten_digits_are_taken():
    rows = select_digits(0, 256, [bytes([c]) for c in range(256)], 0)
    assert rows == [ord(c) for c in "0123456789:"]


def test_digit_rows_with_a_limit_write_no_more_than_the_limit():
    texts = [b"1"] * 10
    rows = np.full(4, GUARD, np.int32)
    lengths = np.ones(10, np.int32)
    assert ridge("select_digits")(0, 10, (ct.c_char_p * 10)(*texts), lengths, 3, rows) == 3
    assert rows.tolist() == [7, 8, 9, GUARD]


def test_digits_refuses_a_negative_row():
    rows = np.full(1, GUARD, np.int32)
    assert ridge("select_digits")(-1, 1, (ct.c_char_p * 1)(b"1"), np.ones(1, np.int32), 0, rows) == -1


budgets = st.floats(0, 1e6, width=32)


@settings(max_examples=300)
@given(budgets, st.integers(0, 2**31 - 1))
@example(np.float32(0.7), 10)  # 0.7f * 10 is a little less than 7
@example(np.float32(0.1), 6000)
@example(np.float32(1e-6), 100)
def test_budget_is_the_nearest_number_of_rows_at_least_one_and_at_most_all(budget, n_rows):
    budget = float(budget)
    wanted = budget * n_rows if budget < 1 else budget
    got = ridge("budget_rows")(budget, n_rows)
    if budget == 0 or n_rows == 0:
        assert got == 0
    else:
        assert 1 <= got <= n_rows
        assert abs(got - min(max(wanted, 1), n_rows)) <= 0.5


@pytest.mark.parametrize("budget, n_rows", [(-0.1, 10), (math.nan, 10), (math.inf, 10), (-math.inf, 10), (0.5, -1)])
def test_budget_that_is_negative_or_not_finite_is_refused(budget, n_rows):
    assert ridge("budget_rows")(budget, n_rows) == -1


def test_selector_names_go_both_ways_and_unknown_ones_are_refused():
    for i, name in enumerate([b"none", b"random", b"digits"]):
        assert ridge("selector_from_name")(name) == i
        assert ridge("selector_name")(i) == name
    for name in (b"", b"Random", b"digit", b"attention"):
        assert ridge("selector_from_name")(name) == -1
    assert ridge("selector_name")(3) is None
    assert ridge("selector_name")(-1) is None
