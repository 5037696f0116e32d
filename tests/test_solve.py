"""The solver against numpy's least squares, and the sums it solves from. No library is needed."""
from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgefill.errors import StatisticsError
from ridgefill.solve import LAMBDAS, Ridge, check_fit
from ridgefill.statistics import Moments, about, memory_bytes

S, L = 3, 4  # split layer and the one mapped layer


def add(m: Moments, x: np.ndarray, y: np.ndarray) -> None:
    x = about(x, m.origin_x, S)
    m.add_features(x)
    m.add_targets(L, x, about(y, m.origin_y[L], L))


def sums(x: np.ndarray, y: np.ndarray, origin: tuple | None = None) -> Moments:
    origin_x, origin_y = origin or (x.mean(0), y.mean(0))
    m = Moments(S, origin_x, {L: origin_y})
    add(m, x, y)
    return m


def solved(x, y, xh=None, yh=None) -> Ridge:
    origin = x.mean(0), y.mean(0)
    return Ridge(sums(x, y, origin), sums(x if xh is None else xh, y if yh is None else yh, origin))


def direct(x: np.ndarray, y: np.ndarray, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Ridge by least squares on rows: the penalty as sqrt(alpha) I below the centred rows."""
    xc, yc = x - x.mean(0), y - y.mean(0)
    d = x.shape[1]
    alpha = lam * np.sum(xc * xc) / d
    rows = np.vstack([xc, np.sqrt(alpha) * np.eye(d)])
    a = np.linalg.lstsq(rows, np.vstack([yc, np.zeros((d, y.shape[1]))]), rcond=1e-8)[0].T
    return a, y.mean(0) - a @ x.mean(0)


@st.composite
def problems(draw):
    """x [n, d] and y [n, e] with some constant columns, repeated columns and repeated rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, d, e = draw(st.integers(2, 60)), draw(st.integers(1, 12)), draw(st.integers(1, 9))
    x = rng.normal(size=(n, d)) * 10 ** rng.uniform(-1, 1, d) + rng.normal(size=d) * 5
    y = x @ rng.normal(size=(d, e)) + rng.normal(size=(n, e)) + 3
    if draw(st.booleans()):
        x[:, draw(st.integers(0, d - 1))] = 7.0
    if draw(st.booleans()) and d > 1:
        x[:, 0] = x[:, -1]
    if draw(st.booleans()):
        x[n // 2 :] = x[: n - n // 2]
        y[n // 2 :] = y[: n - n // 2]
    return x, y


@settings(max_examples=150)
@given(problems(), st.sampled_from([0.0, 1e-4, 0.03, 1.0, 100.0]))
def test_map_is_the_least_squares_solution(problem, lam):
    x, y = problem
    ridge = solved(x, y)
    a, b = direct(x, y, lam)
    weight = ridge.weight(L, lam)
    size = 1 + np.abs(a).max()
    assert np.allclose(weight, a, atol=1e-6 * size)
    assert np.allclose(ridge.bias(L, weight), b, atol=1e-5 * size * (1 + np.abs(x).max()))


@settings(max_examples=60)
@given(problems(), st.sampled_from([0.0, 0.03, 1.0]), st.integers(2, 4), st.floats(-2, 2))
def test_map_does_not_change_with_the_number_of_copies_or_the_unit(problem, lam, copies, log_unit):
    """Every row several times over: the same map, lambda being free of scale. Features in another unit: the inverse of it."""
    x, y = problem
    unit, weight = 10**log_unit, solved(x, y).weight(L, lam)
    tolerance = dict(rtol=1e-6, atol=1e-6 * (1e-9 + np.abs(weight).max()))
    assert np.allclose(solved(np.tile(x, (copies, 1)), np.tile(y, (copies, 1))).weight(L, lam), weight, **tolerance)
    assert np.allclose(solved(x * unit, y).weight(L, lam) * unit, weight, **tolerance)


@settings(max_examples=60)
@given(problems())
def test_ends_of_the_penalty(problem):
    """Without one the fitted values are those of numpy's least squares with an intercept, full rank or not; a huge one leaves
    the mean."""
    x, y = problem
    ridge, ones = solved(x, y), np.ones((len(x), 1))
    design = np.hstack([ones, x - x.mean(0)])
    expected = design @ np.linalg.lstsq(design, y, rcond=1e-8)[0]
    weight = ridge.weight(L, 0.0)
    scale = np.abs(y).max()
    assert np.allclose(x @ weight.T + ridge.bias(L, weight), expected, atol=1e-6 * scale)
    weight = ridge.weight(L, 1e9)
    assert np.allclose(x @ weight.T + ridge.bias(L, weight), y.mean(0), atol=1e-6 * scale)


@settings(max_examples=60)
@given(problems(), st.sampled_from([0.0, 1e-4, 1.0]), st.integers(0, 11))
def test_a_constant_column_gets_no_weight(problem, lam, column):
    x, y = problem
    column %= x.shape[1]
    x[:, column] = -3.0
    weight = solved(x, y).weight(L, lam)
    assert np.abs(weight[:, column]).max() <= 1e-9 * (1 + np.abs(weight).max())
    if x.shape[1] > 1:
        rest = np.delete(x, column, axis=1)
        # lambda is in units of the mean variance of a feature, of which there is one more here
        alone = solved(rest, y).weight(L, lam * rest.shape[1] / x.shape[1])
        assert np.allclose(np.delete(weight, column, axis=1), alone, rtol=1e-6, atol=1e-6 * (1e-9 + np.abs(alone).max()))


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 5), st.sampled_from([1e-4, 0.03, 1.0]))
def test_a_repeated_column_shares_its_weight(seed, d, e, lam):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(60, d)), rng.normal(size=(60, e))
    weight = solved(np.hstack([x, x]), y).weight(L, lam)
    assert np.allclose(weight[:, :d], weight[:, d:], atol=1e-9)
    assert np.allclose(2 * weight[:, :d], direct(x, y, lam / 2)[0], atol=1e-9)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(2, 40), st.integers(2, 20), st.integers(1, 6))
def test_rows_that_span_few_directions_are_refused(seed, d, n_distinct, copies):
    """Rows repeated, and columns that never vary, which do not count."""
    rng = np.random.default_rng(seed)
    x = np.tile(rng.normal(size=(n_distinct, d)), (copies, 1))
    x = np.hstack([x, np.full((len(x), 3), 7.0)])
    ridge, rank = solved(x, x[:, :1]), min(d, n_distinct - 1)
    if 2 * rank >= d:
        ridge.check_rank()
    else:
        expected = rf"layer {S}: .* at least half of its {d} varying features, found {rank} directions in {len(x)} rows"
        with pytest.raises(StatisticsError, match=expected):
            ridge.check_rank()


@settings(max_examples=100)
@given(problems(), st.integers(0, 2**32))
def test_held_out_r2_is_that_of_the_rows(problem, seed):
    """The score from sums, for the whole grid and for one map, equals the score from predicting held-out rows."""
    x, y = problem
    rng = np.random.default_rng(seed)
    xh = x[rng.integers(0, len(x), 25)] + rng.normal(size=(25, x.shape[1]))
    yh = y[rng.integers(0, len(y), 25)] + rng.normal(size=(25, y.shape[1])) + 1
    ridge = solved(x, y, xh, yh)
    grid = ridge.r2_grid(L)
    total = np.sum((yh - yh.mean(0)) ** 2)
    for lam, r2 in zip(LAMBDAS, grid):
        a, b = direct(x, y, lam)
        expected = 1 - np.sum((yh - xh @ a.T - b) ** 2) / total
        assert np.isclose(r2, expected, rtol=1e-6, atol=1e-6)
        assert np.isclose(ridge.r2(L, a, b), expected, rtol=1e-6, atol=1e-6)
    off = b + rng.normal(size=b.shape)
    expected = 1 - np.sum((yh - xh @ a.T - off) ** 2) / total
    assert np.isclose(ridge.r2(L, a, off), expected, rtol=1e-6, atol=1e-6)


def test_best_takes_the_lambda_of_the_highest_held_out_score():
    """Few rows and much noise: the least penalty wins on fitted rows, a larger one on others."""
    rng = np.random.default_rng(5)
    truth = rng.normal(size=(6, 20))
    x, xh = rng.normal(size=(45, 20)), rng.normal(size=(400, 20))
    y, yh = (v @ truth.T + 8 * rng.normal(size=(len(v), 6)) for v in (x, xh))
    ridge = solved(x, y, xh, yh)
    best = ridge.best(L)
    scores = ridge.r2_grid(L)
    assert best.lam == LAMBDAS[int(scores.argmax())]
    assert LAMBDAS[0] < best.lam
    assert np.isclose(best.r2, scores.max())
    assert solved(x, y).best(L).lam == LAMBDAS[0]


@settings(max_examples=60)
@given(problems(), st.lists(st.integers(0, 60), max_size=4), st.integers(0, 3))
def test_sums_do_not_depend_on_blocks(problem, cuts, n_merged):
    x, y = problem
    whole = sums(x, y, (np.ones(x.shape[1]), np.ones(y.shape[1])))
    edges = sorted({0, len(x), *(c for c in cuts if c < len(x))})
    parts = [Moments(S, whole.origin_x, whole.origin_y) for _ in range(n_merged + 1)]
    for i, (a, b) in enumerate(zip(edges, edges[1:])):
        add(parts[i % len(parts)], x[a:b], y[a:b])
    for other in parts[1:]:
        parts[0].merge(other)
    assert parts[0].n == whole.n
    merged = parts[0]
    for a, b in (
        (merged.xx, whole.xx), (merged.xy[L], whole.xy[L]), (merged.yy[L], whole.yy[L]),
        (merged.sum_x, whole.sum_x), (merged.sum_y[L], whole.sum_y[L]),
    ):  # fmt: skip
        assert np.allclose(a, b, rtol=1e-10, atol=1e-10 * (1 + np.abs(b).max()))


def test_large_means_do_not_cost_precision():
    """float32 activations about a mean ten thousand times their spread, as in a residual stream's loud channels."""
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(500, 8)) + 1e4).astype(np.float32)
    y = (x.astype(np.float64) @ rng.normal(size=(8, 5)) + rng.normal(size=(500, 5))).astype(np.float32)
    origin = x[:50].mean(0, dtype=np.float64), y[:50].mean(0, dtype=np.float64)
    ridge = Ridge(sums(x, y, origin), sums(x, y, origin))
    a, b = direct(x.astype(np.float64), y.astype(np.float64), 0.01)
    assert np.abs(ridge.weight(L, 0.01) - a).max() < 1e-9
    assert np.abs(ridge.bias(L, ridge.weight(L, 0.01)) - b).max() < 1e-5


def test_bias_makes_a_rounded_map_exact_for_the_mean_row():
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(100, 6)) + 50, rng.normal(size=(100, 4)) - 20
    ridge = solved(x, y)
    rounded = np.round(ridge.weight(L, 0.1), 1)
    assert np.abs(ridge.weight(L, 0.1) - rounded).max() > 0.001
    assert np.allclose(rounded @ x.mean(0) + ridge.bias(L, rounded), y.mean(0))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_by_place(bad):
    y = np.ones((10, 2), np.float32)
    y[7, 1] = bad
    with pytest.raises(StatisticsError, match=rf"layer {L}: expected finite activations, found {bad} in row 7, channel 1"):
        about(y, np.zeros(2), L)
    y[0, 0] = -bad  # infinities of both signs, or another NaN
    with pytest.raises(StatisticsError, match=r"in row 0, channel 0 \(2 values"):
        about(y, np.zeros(2), L)


def test_the_largest_finite_values_are_not_refused():
    largest = np.full((100, 4), np.finfo(np.float32).max)
    assert np.array_equal(about(largest, np.zeros(4), L), largest.astype(np.float64))


def test_too_few_rows_are_refused():
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(9, 5)), rng.normal(size=(9, 2))
    with pytest.raises(StatisticsError, match=rf"layer {S}: expected at least 10 rows .*twice its 5 features.* found 9"):
        check_fit(sums(x, y), sums(x, y))
    x, y = rng.normal(size=(10, 5)), rng.normal(size=(10, 2))
    check_fit(sums(x, y), sums(x, y))
    with pytest.raises(StatisticsError, match="held-out rows, found 0"):
        check_fit(sums(x, y), Moments(S, x[0], {L: y[0]}))


def test_a_layer_that_never_varies_is_refused_by_name():
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(20, 4)), np.full((20, 2), 3.0)
    with pytest.raises(StatisticsError, match=rf"layer {L}: its input is the same in all 20 fitted rows"):
        check_fit(sums(x, y), sums(x, y))
    with pytest.raises(StatisticsError, match=rf"layer {S}: its input is the same"):
        check_fit(sums(np.zeros((20, 4)), x), sums(x, x))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_rows_that_differ_by_the_rounding_of_float32_count_as_the_same(scale):
    rng = np.random.default_rng(10)
    x = rng.normal(size=(20, 4))
    ones = scale * np.ones((20, 4), np.float32)
    same = np.where(rng.random((20, 4)) < 0.5, ones, np.nextafter(ones, np.float32(np.inf)))
    with pytest.raises(StatisticsError, match=rf"layer {S}: its input is the same"):
        check_fit(sums(same, x), sums(same, x))
    with pytest.raises(StatisticsError, match=rf"layer {L}: its input is the same"):
        check_fit(sums(x, same), sums(x, same))
    check_fit(sums(ones + 1e-4 * scale * x, ones + 1e-4 * scale * x), sums(x, x))


def test_a_part_that_never_varies_is_refused_by_name():
    rng = np.random.default_rng(6)
    x, y = rng.normal(size=(20, 4)), np.hstack([rng.normal(size=(20, 2)), np.full((20, 3), 2.0)])

    def parts(il):
        return {"k": slice(0, 2), "v": slice(2, 5)}

    with pytest.raises(StatisticsError, match=rf"layer {L}: its v is the same in all 20 fitted rows"):
        check_fit(sums(x, y), sums(x, y), parts)
    check_fit(sums(x, y[:, ::-1]), sums(x, rng.normal(size=(20, 5))))


def test_columns_of_a_target_are_solved_and_scored_on_their_own():
    """K and V share sums and eigenvectors, but nothing else."""
    rng = np.random.default_rng(8)
    x, xh = rng.normal(size=(60, 6)), rng.normal(size=(40, 6))
    truth = rng.normal(size=(6, 9))
    y, yh = (v @ truth + rng.normal(size=(len(v), 9)) * np.repeat([0.1, 9.0], (4, 5)) for v in (x, xh))
    both = solved(x, y, xh, yh)
    for columns in (slice(0, 4), slice(4, 9)):
        alone, found = solved(x, y[:, columns], xh, yh[:, columns]).best(L), both.best(L, columns=columns)
        assert np.allclose(found.weight, alone.weight) and np.allclose(found.bias, alone.bias)
        assert (found.lam, found.weight.shape) == (alone.lam, (columns.stop - columns.start, 6))
        assert np.isclose(found.r2, alone.r2)
    assert both.best(L, columns=slice(0, 4)).lam < both.best(L, columns=slice(4, 9)).lam


def test_the_first_features_alone_are_sums_over_them():
    rng = np.random.default_rng(9)
    x, y = rng.normal(size=(50, 8)), rng.normal(size=(50, 3))
    origin = np.ones(8), np.zeros(3)
    part, alone = sums(x, y, origin).first(5), sums(x[:, :5], y, (origin[0][:5], origin[1]))
    assert (part.width, part.n) == (5, 50)
    assert np.allclose(part.sum_x, alone.sum_x) and np.allclose(part.xx, alone.xx) and np.allclose(part.xy[L], alone.xy[L])
    assert np.allclose(Ridge(part, part).best(L).weight, Ridge(alone, alone).best(L).weight)


def test_memory_counts_every_matrix():
    """Against the arrays themselves: two sets of sums of 64 features for each of the splits 1 and 2 of 5 layers."""
    d_in, d_out = 64, {2: 32, 3: 16, 4: 48}
    for split in (1, 2):
        m = Moments(split, np.zeros(d_in), {il: np.zeros(n) for il, n in d_out.items() if il > split})
        held = 2 * (m.xx.nbytes + sum(a.nbytes for a in m.xy.values()))
        assert held == memory_bytes(split, d_in, d_out)
