"""Mappers from one pass over the text against regressions done by hand on the rows, one by one."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from calibrate_pico import inputs_by_hand
from mapper_pico import SINK, config, corpus, library, r2_by_head, ridge_by_hand, rows_by_hand, side_by_side, source, target  # noqa: F401
from ridgefill import lib
from ridgefill.attention import Attention
from ridgefill.capture import select
from ridgefill.mapper import fit, sidecar
from ridgefill.mapper.models import KeysValues
from ridgefill.mapper.solve import KS, LAMBDAS, Solver
from ridgefill.mapper.sums import PairLayout, PairSums
from ridgefill.reference import Weights, load_mapper, rope_of, transfer
from ridgefill.reference.rope import rotate, unrotate
from ridgefill.text import read_documents
from test_attention import ROTATIONS, any_model  # noqa: F401
from test_projections import rewritten, variant  # noqa: F401

TINY = 1e-9  # a lambda that is no penalty


@pytest.fixture(scope="module")
def rows(source, target, corpus):  # noqa: F811
    """get(model, part, partition) -> rows by layer; model 0 is the source."""
    made = {}

    def get(model: int, part: str, partition: str = "fit") -> list[np.ndarray]:
        key = (model, part, partition)
        if key not in made:
            made[key] = rows_by_hand((source, target)[model], corpus, part, partition)
        return made[key]

    return get


@pytest.fixture(scope="module")
def fitted(source, target, corpus, tmp_path_factory) -> Path:  # noqa: F811
    """A mapper of all defaults but the types."""
    out = tmp_path_factory.mktemp("fitted") / "m.gguf"
    fit.fit(config(source, target, corpus, out))
    return out


#
# keys and values
#


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral3", *ROTATIONS])
def test_keys_are_those_of_the_cache_without_their_rotation(name, any_model):  # noqa: F811
    """The library's own K, turned back by the oracle's rotation; V as it is."""
    path = any_model(name)
    tokens = np.random.default_rng(1).integers(3, 259, 150).tolist()
    with lib.Model(path) as model, lib.Context(model, 256, type_k="f32", type_v="f32", flash_attn=False, n_threads=1) as ctx:
        kv = KeysValues(model)
        ctx.capture(kv.layers)
        ctx.decode(tokens)
        found = kv({il: ctx.layer_inputs(il) for il in kv.layers})
        for il in kv.layers:
            k, v = (ctx.get_kv(0, il, what, 0, len(tokens)).astype(np.float64) for what in "kv")
            turned = kv.rotation(found["k"][il].reshape(k.shape), np.arange(len(tokens)))
            assert np.abs(turned - k).max() < 1e-4 * np.abs(k).max()
            if kv.arch != "minimax-m2":  # which the oracle does not have
                rope = rope_of(Weights(path))
                assert np.abs(rope.unrotate(k) - found["k"][il].reshape(k.shape)).max() < 1e-4 * np.abs(k).max()
            assert np.abs(v.reshape(len(v), -1) - found["v"][il]).max() < 1e-4 * np.abs(v).max()


@pytest.mark.parametrize("name", ["llama", "qwen3", "yarn and temperature", "linear scaling", "frequency factors", "partial"])
def test_turning_back_and_forth_is_the_identity(name, any_model, pico_model, tmp_path):  # noqa: F811
    """Of the oracle, which turns as the rest of the package does. The library has no model of the oracle's that turns a part."""
    path = tmp_path / "m.gguf"
    if name == "partial":
        rewritten(pico_model("qwen3", n_layer=1, head=64, n_head=2), path, dict, rope__dimension_count=48)
    else:
        path = any_model(name)
    rope, rng = rope_of(Weights(path)), np.random.default_rng(0)
    h, factors = rope.hparams, rope.factors
    x, positions = rng.normal(size=(40, 3, h.head)), rng.uniform(0, 1e4, 40)
    turned = rotate(h, x, positions, factors)
    assert np.abs(turned - x)[..., : h.n_rot].max() > 1
    assert np.abs(unrotate(h, turned, positions, factors) - x).max() < 1e-12
    assert np.abs(rotate(h, unrotate(h, x, positions, factors), positions, factors) - x).max() < 1e-12
    assert (turned[..., h.n_rot :] == x[..., h.n_rot :]).all() and h.n_rot == (48 if name == "partial" else h.head)
    assert np.abs(Attention(path).rotation(x, positions) - turned).max() < 1e-6


#
# the shared sums
#


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("lam", [0.0, 0.01, 1.0])
def test_solutions_from_shared_sums_are_those_of_each_layers_rows(source, target, corpus, rows, tmp_path, k, lam):  # noqa: F811
    [result] = fit.fit(config(source, target, corpus, tmp_path / "m.gguf", ks=(k,), lambdas=(lam,)))
    for part, maps in result.mapper.maps.items():
        assert maps.tried == [k] and maps.lambdas == [lam] * 3
        for il, layers in enumerate(maps.sources):
            assert len(layers) == k
            y = rows(1, part)[il]
            w, b = ridge_by_hand(side_by_side(rows(0, part), layers), y, lam)
            assert np.abs(result.mapper.weight(part, il) - w).max() < 1e-6 * np.abs(w).max()
            assert np.abs(maps.biases[il] - b).max() < 1e-6 * max(np.abs(b).max(), np.abs(y).max())


def test_layers_k_and_lambda_are_chosen_on_held_out_documents(rows, fitted):
    """All of it by hand: R^2 of each source layer alone, of the best k, and of each penalty."""
    mapper = sidecar.read(fitted)
    for part in "kv":
        maps, x, xh = mapper.maps[part], rows(0, part), rows(0, part, "heldout")
        assert maps.tried == [1, 2, 4]
        for il in range(3):
            y, yh = rows(1, part)[il], rows(1, part, "heldout")[il]

            def r2(layers, lam, x=x, xh=xh, y=y, yh=yh) -> np.ndarray:
                w, b = ridge_by_hand(side_by_side(x, layers), y, lam)
                return r2_by_head(yh, side_by_side(xh, layers) @ w.T + b, 2)

            single = np.array([max(r2([s], lam).mean() for lam in LAMBDAS) for s in range(4)])
            assert np.allclose(maps.r2_single[il], single, atol=1e-6)
            order = np.argsort(-single)
            found = {(k, lam): r2(sorted(order[:k]), lam) for k in maps.tried for lam in LAMBDAS}
            k, lam = max(found, key=lambda key: found[key].mean())
            assert (maps.sources[il], maps.lambdas[il]) == (sorted(order[:k]), np.float32(lam))
            assert np.allclose(maps.r2_head[il], found[k, lam], atol=1e-5)
            assert np.allclose(maps.r2_by_number[il], [max(found[k, lam].mean() for lam in LAMBDAS) for k in maps.tried], atol=1e-5)


def test_greedy_selection_adds_what_helps_most():
    """Each step against explicit regressions from all sets of one layer more, with the same penalty throughout.

    Layer 1 says nearly what layer 0 says, so that it is the second best alone, and of no help to layer 0.
    """
    rng, n = np.random.default_rng(0), 400
    layers = [rng.normal(size=(n, 4)) for _ in range(4)]
    layers[1] = layers[0] + 0.1 * layers[1]
    targets = [a @ rng.normal(size=(4, 4)) + 0.5 * b @ rng.normal(size=(4, 4)) for a, b in (layers[0::2], layers[0::3])]
    targets = [y + 0.1 * rng.normal(size=y.shape) for y in targets]
    sums = PairSums(PairLayout("k", [[4] * 4, [4] * 2], both=False, previous=False))
    parts = {"fit": slice(0, 300), "heldout": slice(300, n)}
    for part, chosen in parts.items():
        sums.add(part, [layers, targets], chosen)
    layout = sums.layout
    solver = Solver(sums.moments["fit"][0], sums.moments["heldout"][0], layout.sources(0), layout.targets(0), [2, 2])
    alpha = 0.01 * np.trace(solver.cov) / len(solver.cov)
    for t, y in enumerate(targets):

        def score(some, y=y) -> float:
            a, yf = side_by_side(layers, some)[:300], y[:300]
            w = np.linalg.solve((a - a.mean(0)).T @ (a - a.mean(0)) + alpha * np.eye(a.shape[1]), (a - a.mean(0)).T @ (yf - yf.mean(0)))
            return r2_by_head(y[300:], (side_by_side(layers, some)[300:] - a.mean(0)) @ w + yf.mean(0), 2).mean()

        chosen: list[int] = []
        for _ in range(3):
            chosen.append(max((il for il in range(4) if il not in chosen), key=lambda il: score([*chosen, il])))  # noqa: B023
        assert solver.greedy(t, 3, alpha) == chosen
        assert chosen[:2] == [0, (2, 3)[t]] != sorted(range(4), key=lambda il: -score([il]))[:2]


def test_the_row_before_is_a_feature_when_asked_for(source, target, corpus, rows, tmp_path):  # noqa: F811
    c = config(source, target, corpus, tmp_path / "m.gguf", previous=True, ks=(2,), lambdas=(0.01,))
    mapper = fit.fit(c)[0].mapper
    assert mapper.previous and mapper.maps["k"].weights[0].shape == (128, 2 * 2 * 32)
    for part in "kv":
        before = rows_by_hand(source, corpus, part, "fit", previous=True)
        for il, layers in enumerate(mapper.maps[part].sources):
            x = np.concatenate([side_by_side(rows(0, part), layers), side_by_side(before, layers)], axis=1)
            w, _ = ridge_by_hand(x, rows(1, part)[il], 0.01)
            assert np.abs(mapper.weight(part, il) - w).max() < 1e-6 * np.abs(w).max()


def test_both_directions_of_one_run_are_those_of_two(source, target, corpus, tmp_path):  # noqa: F811
    there, back = fit.fit(config(source, target, corpus, tmp_path / "m.gguf", both=True))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.back.gguf", "m.forward.gguf"]
    alone = [fit.fit(config(*pair, corpus, tmp_path / "x.gguf", force=True))[0] for pair in ((source, target), (target, source))]
    for one, other in zip((there, back), alone, strict=True):
        a, b = sidecar.read(one.path), other.mapper
        for part in "kv":
            assert a.maps[part].sources == b.maps[part].sources
            for il in range(b.target.n_layer):
                assert np.abs(a.weight(part, il) - b.weight(part, il)).max() < 1e-6 * np.abs(b.weight(part, il)).max()


#
# a pair whose mapper is known
#

PERMUTED = [2, 0, 3, 1]  # layer i of the target is layer PERMUTED[i] of the source


def silent(tensors: dict) -> dict:
    """Layers that add nothing, so that all of them read the embeddings, in whatever order they stand."""
    return {name: np.zeros_like(t) if "attn_output" in name or "ffn_down" in name else t for name, t in tensors.items()}


def permuted(tensors: dict) -> dict:
    out = dict(tensors)
    for il, of in enumerate(PERMUTED):
        out |= {name.replace(f"blk.{of}.", f"blk.{il}."): t for name, t in tensors.items() if name.startswith(f"blk.{of}.")}
    return silent(out)


@pytest.fixture(scope="module")
def planted(source, tmp_path_factory) -> tuple[Path, Path]:  # noqa: F811
    """A source, and a target of the same layers in another order and with another base of the rotation."""
    folder = tmp_path_factory.mktemp("planted")
    return rewritten(source, folder / "a.gguf", silent), rewritten(source, folder / "b.gguf", permuted, rope__freq_base=5e5)


@pytest.mark.parametrize("select", ["r2", "greedy"])
def test_the_planted_source_layer_is_found(planted, corpus, tmp_path, select):  # noqa: F811
    c = config(*planted, corpus, tmp_path / "m.gguf", ks=(1, 2), lambdas=(TINY,), select=select)
    for maps in fit.fit(c)[0].mapper.maps.values():
        assert maps.r2_single.argmax(1).tolist() == PERMUTED
        assert (maps.r2_single.max(1) > 1 - 1e-9).all()
        others = np.delete(maps.r2_single.ravel(), [4 * il + of for il, of in enumerate(PERMUTED)])
        assert others.max() < 0.95
        assert all(of in layers for layers, of in zip(maps.sources, PERMUTED, strict=True))


def test_the_oracle_turns_the_sources_cache_into_the_targets(planted, corpus, tmp_path):  # noqa: F811
    """From the library's cache of one model to its cache of the other, whose rotation differs."""
    out = tmp_path / "m.gguf"
    fit.fit(config(*planted, corpus, out, ks=(1,), lambdas=(TINY,)))
    tokens, caches = np.random.default_rng(1).integers(3, 259, 60).tolist(), []
    for path in planted:
        with lib.Model(path) as model, lib.Context(model, 64, type_k="f32", type_v="f32", flash_attn=False, n_threads=1) as ctx:
            ctx.decode(tokens)
            caches.append([[ctx.get_kv(0, il, what, 0, 60).astype(np.float64) for il in range(4)] for what in "kv"])
    ropes = [rope_of(Weights(path)) for path in planted]
    made = transfer(load_mapper(out), *ropes, *caches[0])
    for part in range(2):
        for il in range(4):
            size = np.abs(caches[1][part][il]).max()
            assert np.abs(made[part][il] - caches[1][part][il]).max() < 1e-3 * size
    # rotated with the source's base they would be others
    wrong = transfer(load_mapper(out), ropes[0], ropes[0], *caches[0])[0]
    assert all(np.abs(a - b).max() > 0.1 * np.abs(b).max() for a, b in zip(wrong, caches[1][0], strict=True))


@pytest.mark.parametrize("previous", [False, True])
def test_the_oracle_applies_the_maps_to_the_rows_they_were_fitted_on(source, target, corpus, rows, tmp_path, previous):  # noqa: F811
    """R^2 of the oracle's predictions without rotations is what the file says."""
    out = tmp_path / "m.gguf"
    mapper = fit.fit(config(source, target, corpus, out, previous=previous, ks=(2,)))[0].mapper
    oracle = load_mapper(out)
    documents = select(read_documents([str(corpus)]), 0, scored=True).heldout
    with lib.Model(source) as a:
        kv = KeysValues(a)
    for part in "kv":
        predicted: list[list[np.ndarray]] = [[], [], []]
        for inputs in inputs_by_hand(source, documents, kv.layers):
            whole = kv({il: x.astype(np.float32) for il, x in inputs.items()})[part]
            for il in range(3):
                predicted[il].append(oracle(part, il, [x.astype(np.float64) for x in whole])[SINK:])
        for il in range(3):
            found = r2_by_head(rows(1, part, "heldout")[il], np.concatenate(predicted[il]), 2)
            assert np.allclose(found, mapper.maps[part].r2_head[il], atol=1e-6)


def test_numbers_of_layers_that_do_not_exist_are_not_tried(fitted):
    assert KS[-1] == 0 and 24 in KS and sidecar.read(fitted).maps["v"].tried == [1, 2, 4]
