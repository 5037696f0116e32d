"""Maps of bounded rank (kind input_lr): the solver against least squares on rows, and the way from text to a filled prompt."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from calibrate_pico import SINK, config, corpus, hashes, inputs_by_hand, keys_of, library, model  # noqa: F401
from ridgefill import calibrate as cal
from ridgefill import cli, sidecar
from ridgefill.errors import RidgefillError
from ridgefill.low_rank import LowRank
from ridgefill.solve import LAMBDAS, Ridge
from ridgefill.text import read_documents
from test_solve import L, solved, sums

RANK = 32

runner = CliRunner()


#
# the solver
#


def objective(a: np.ndarray, x: np.ndarray, y: np.ndarray, lam: float) -> float:
    """What a map y ~ x + a x is fitted for, on rows."""
    xc, yc = x - x.mean(0), y - y.mean(0)
    return np.sum((yc - xc - xc @ a.T) ** 2) + lam * np.sum(xc**2) / x.shape[1] * np.sum(a**2)


def by_rows(x: np.ndarray, y: np.ndarray, lam: float, rank: int) -> np.ndarray:
    """The best a of this rank from rows: least squares with the penalty as rows below, fitted values cut by their SVD."""
    xc, yc = x - x.mean(0), y - y.mean(0)
    d = x.shape[1]
    rows = np.vstack([xc, np.sqrt(lam * np.sum(xc**2) / d) * np.eye(d)])
    b = np.linalg.lstsq(rows, np.vstack([yc - xc, np.zeros((d, d))]), rcond=1e-8)[0]
    kept = np.linalg.svd(rows @ b, full_matrices=False)[2][:rank]
    return (b @ kept.T @ kept).T


@st.composite
def problems(draw):
    """x and y [n, d], a rank, some constant and repeated columns."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n, d = draw(st.integers(2, 60)), draw(st.integers(1, 10))
    x = rng.normal(size=(n, d)) * 10 ** rng.uniform(-1, 1, d) + 5 * rng.normal(size=d)
    if draw(st.booleans()):
        x[:, draw(st.integers(0, d - 1))] = 7.0
    if draw(st.booleans()):
        x[:, 0] = x[:, -1]
    y = x + x @ rng.normal(size=(d, d)) + rng.normal(size=(n, d)) + 3
    return x, y, draw(st.integers(1, d))


@settings(max_examples=150)
@given(problems(), st.sampled_from([0.0, 1e-4, 0.03, 1.0, 100.0]))
def test_map_is_the_best_of_its_rank(problem, lam):
    x, y, rank = problem
    found = LowRank(solved(x, y), rank).solution(L, lam)
    assert found.up.shape == (x.shape[1], rank) and found.down.shape == (rank, x.shape[1])
    least = objective(by_rows(x, y, lam, rank), x, y, lam)
    scale = objective(np.zeros((x.shape[1], x.shape[1])), x, y, lam)
    assert np.isclose(objective(found.up @ found.down, x, y, lam), least, rtol=1e-7, atol=1e-7 * scale)


@settings(max_examples=60)
@given(problems(), st.sampled_from([1e-4, 0.03, 1.0]), st.integers(0, 2**32))
def test_no_neighbour_of_its_rank_is_better(problem, lam, seed):
    x, y, rank = problem
    found = LowRank(solved(x, y), rank).solution(L, lam)
    least = objective(found.up @ found.down, x, y, lam)
    rng = np.random.default_rng(seed)
    for size in (1e-3, 1e-2, 0.1, 1.0):
        up = found.up + size * rng.normal(size=found.up.shape)
        down = found.down + size * np.abs(found.down).max() * rng.normal(size=found.down.shape)
        assert objective(up @ down, x, y, lam) >= least * (1 - 1e-9)


def test_more_rank_fits_better_and_full_rank_is_ridge_regression():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(80, 12))
    y = x + x @ rng.normal(size=(12, 12)) + rng.normal(size=(80, 12))
    ridge = solved(x, y)
    fits = [objective(f.up @ f.down, x, y, 0.1) for f in (LowRank(ridge, r).solution(L, 0.1) for r in range(1, 13))]
    assert all(a > b * (1 + 1e-6) for a, b in zip(fits, fits[1:]))
    residual = Ridge(sums(x, y - x), sums(x, y - x))
    full = LowRank(ridge, 12).solution(L, 0.1)
    assert np.allclose(full.up @ full.down, residual.weight(L, 0.1))
    # without a penalty nothing is drawn to the identity: the map is that of kind input
    free = LowRank(ridge, 12).solution(L, 0.0)
    assert np.allclose(np.eye(12) + free.up @ free.down, ridge.weight(L, 0.0))


def test_a_map_of_low_rank_is_recovered():
    rng = np.random.default_rng(2)
    a = rng.normal(size=(20, 3)) @ rng.normal(size=(3, 20))
    x = rng.normal(size=(100, 20)) + 9
    found = LowRank(solved(x, x + x @ a.T + 4), 3).solution(L, 0.0)
    assert np.allclose(found.up @ found.down, a) and np.allclose(found.up.T @ found.up, np.eye(3))


def test_lambda_is_chosen_under_the_rank():
    """Few rows and much noise: the highest held-out R^2 of maps of this rank, which another rank need not share."""
    rng = np.random.default_rng(5)
    truth = rng.normal(size=(24, 2)) @ rng.normal(size=(2, 24))
    x, xh = rng.normal(size=(60, 24)), rng.normal(size=(400, 24))
    y, yh = (v + v @ truth.T + 6 * rng.normal(size=v.shape) for v in (x, xh))
    ridge, chosen = solved(x, y, xh, yh), {}
    for rank in (2, 24):
        low_rank = LowRank(ridge, rank)
        maps = [np.eye(24) + f.up @ f.down for f in (low_rank.solution(L, lam) for lam in LAMBDAS)]
        scores = [1 - np.sum((yh - xh @ a.T - ridge.bias(L, a)) ** 2) / np.sum((yh - yh.mean(0)) ** 2) for a in maps]
        best = low_rank.best(L)
        assert best.lam == LAMBDAS[int(np.argmax(scores))]
        assert np.allclose(np.eye(24) + best.up @ best.down, maps[int(np.argmax(scores))])
        chosen[rank] = best.lam
    assert chosen[2] < chosen[24]


#
# from text to maps
#


@pytest.fixture(scope="module")
def fitted(model, corpus, tmp_path_factory):
    """Maps of kind input_lr, f32, of split 2; and a file of their sums."""
    folder = tmp_path_factory.mktemp("maps")
    (result,) = cal.calibrate(config(model, corpus, folder / "m.gguf", kinds=["input_lr"], rank=RANK, sums=str(folder / "s.npz")))
    return result


@pytest.fixture(scope="module")
def rows(model, corpus) -> dict[str, dict[int, np.ndarray]]:
    """Inputs of layers 2 to 4 by partition of the text, float64, without sink rows."""
    documents, out = read_documents([corpus]), {}
    for partition in ("calibration", "heldout"):
        chunks = list(inputs_by_hand(model, [d for d in documents if d.partition == partition], range(2, 5)))
        out[partition] = {il: np.concatenate([inputs[il][SINK:] for inputs in chunks]) for il in range(2, 5)}
    return out


def assert_scored(result, rows) -> None:
    """The scores are those of the maps in the file, on rows; the mean row is exact whatever their rounding."""
    fit, held = rows["calibration"], rows["heldout"]
    for il, r2 in zip(result.layers, result.r2["input"], strict=True):
        weight, bias = sidecar.maps(result.path)[il]
        expected = 1 - np.sum((held[il] - held[2] @ weight.T - bias) ** 2) / np.sum((held[il] - held[il].mean(0)) ** 2)
        assert abs(r2 - expected) < 1e-6 and 0 < expected < 1
        assert np.allclose(weight @ fit[2].mean(0) + bias, fit[il].mean(0), atol=1e-5)


def test_maps_are_the_best_of_their_rank_on_rows(fitted, rows):
    fit = rows["calibration"]
    for i, (il, (weight, _)) in enumerate(sidecar.maps(fitted.path).items()):
        x, y, lam = fit[2], fit[il], fitted.lambdas["input"][i]
        least = objective(by_rows(x, y, lam, RANK), x, y, lam)
        assert np.isclose(objective(weight - np.eye(64), x, y, lam), least, rtol=1e-5)
        assert np.linalg.matrix_rank(weight - np.eye(64), tol=1e-5) == RANK
    assert_scored(fitted, rows)


def test_record_in_the_file(fitted):
    shown = json.loads(runner.invoke(cli.app, ["inspect", fitted.path, "--json"]).stdout)
    assert (shown["keys"]["ridge.kind"], shown["keys"]["ridge.rank"]) == ("input_lr", RANK)
    assert shown["tensors"]["blk.3.ridge.down"] == ["f32", [64, RANK]] and shown["tensors"]["blk.3.ridge.up"] == ["f32", [RANK, 64]]
    assert np.allclose(shown["keys"]["ridge.r2"], fitted.r2["input"])
    text = runner.invoke(cli.app, ["inspect", fitted.path]).stdout
    assert f"kind input_lr of rank {RANK}," in text and "held-out R²" in text


def test_sums_of_kind_input_serve_and_solve_makes_the_same_file(model, corpus, fitted, tmp_path):
    cal.calibrate(config(model, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz")))
    for sums_path in (tmp_path / "s.npz", Path(fitted.path).with_name("s.npz")):
        out = tmp_path / "lr.gguf"
        args = ["solve", str(sums_path), "--out", str(out), "--kind", "input_lr", "--map-type", "f32", "--threads", "1", "--force"]
        solved = runner.invoke(cli.app, [*args, "--rank", str(RANK)])
        assert solved.exit_code == 0, solved.output
        assert out.read_bytes() == Path(fitted.path).read_bytes()


def test_solve_makes_low_rank_maps_when_asked_only(fitted, tmp_path):
    args = ["solve", str(Path(fitted.path).with_name("s.npz")), "--out", str(tmp_path / "m.gguf"), "--map-type", "f32"]
    assert runner.invoke(cli.app, args).exit_code == 0
    assert list(hashes(tmp_path)) == ["m.gguf"] and keys_of(tmp_path / "m.gguf")["ridge.kind"] == "input"


@pytest.mark.parametrize("map_type", ["f16", "q8_0", "q4_1", "q4_0"])
def test_scores_are_of_the_factors_as_written(model, corpus, fitted, rows, map_type, tmp_path):
    (r,) = cal.calibrate(config(model, corpus, tmp_path / "m.gguf", kinds=["input_lr"], rank=RANK, map_type=map_type))
    assert_scored(r, rows)
    for r2, exact in zip(r.r2["input"], fitted.r2["input"], strict=True):
        assert 1e-9 < abs(r2 - exact) < {"f16": 1e-5, "q8_0": 1e-3}.get(map_type, 0.1)
        assert r2 < exact - 1e-4 or not map_type.startswith("q4")


def test_ranks_that_cannot_be_are_refused_before_the_work(model, corpus, fitted, tmp_path, monkeypatch):
    monkeypatch.setattr(cal, "Context", lambda *a, **kw: pytest.fail("found after the work"))

    def refusal(**kw) -> str:
        with pytest.raises(RidgefillError) as e:
            cal.calibrate(config(model, corpus, tmp_path / "m.gguf", kinds=["input_lr"], **kw))
        return str(e.value)

    assert refusal(rank=0) == "rank: expected 1 to 64, the width of the model, found 0"
    assert refusal() == "rank: expected 1 to 64, the width of the model, found 128"
    for map_type in ("q8_0", "q4_0"):
        message = f"map type {map_type} needs a rank that is a multiple of 32, found 33; use f16"
        assert refusal(rank=33, map_type=map_type) == message
        args = ["solve", str(Path(fitted.path).with_name("s.npz")), "--out", str(tmp_path / "m.gguf"), "--kind", "input_lr"]
        solved = runner.invoke(cli.app, [*args, "--map-type", map_type, "--rank", "33"])
        assert (solved.exit_code, solved.stderr) == (7, f"error: {message}\n")
    assert list(tmp_path.iterdir()) == []
