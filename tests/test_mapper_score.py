"""Scores of mappers, and what they are worth: against their definition, on documents that chose nothing, in the file."""
from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from calibrate_pico import inputs_by_hand
from mapper_pico import SINK, SOURCE, arguments, config, corpus, library, r2_by_head, ridge_by_hand, rows_by_hand, source  # noqa: F401
from ridgefill import cli
from ridgefill.attention import Attention
from ridgefill.capture import select
from ridgefill.errors import RidgefillError, TextError
from ridgefill.lib import Model
from ridgefill.mapper import fit, score, sidecar
from ridgefill.mapper.models import KeysValues
from ridgefill.mapper.sidecar import Scores
from ridgefill.mapper.verdict import share_read, verdict
from ridgefill.prepare import OverlapError
from ridgefill.reference import load_mapper
from ridgefill.score import LENGTH, QUERY_STRIDE
from ridgefill.text import read_documents
from test_projections import rewritten

TARGET = dict(n_layer=2, head=32, n_head=4, n_head_kv=2)  # two heads of Q for each of K
runner = CliRunner()


@pytest.fixture(scope="module")
def target(pico_model) -> str:
    return str(pico_model("qwen3", **TARGET))


@pytest.fixture(scope="module")
def made(source, target, corpus, tmp_path_factory) -> Path:  # noqa: F811
    """A mapper with scores, its way back, and its sums."""
    folder = tmp_path_factory.mktemp("made")
    c = config(source, target, corpus, folder / "{direction}.gguf", both=True, rotated=True, ks=(2,), sums=str(folder / "s.npz"))
    fit.fit(c)
    return folder


#
# what the scores are
#


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


class ByHand:
    """One layer, row by row and head by head, in float64."""

    def __init__(self):
        self.true = {"k": [], "v": []}
        self.mapped = {"k": [], "v": []}
        self.q, self.key_errors, self.read, self.spread = [], [], np.zeros(2), np.zeros(2)
        self.cosines, self.cosines_mean = [], []

    def add(self, attention: Attention, il: int, x: np.ndarray, true: dict, mapped: dict) -> None:
        """Rows [n, 64] of one chunk."""
        n = len(x)
        rows = {"true": true, "mapped": mapped, "mean": {p: np.repeat(y[SINK:].mean(0)[None], n, 0) for p, y in true.items()}}
        keys, values = {}, {}
        for name, by_part in rows.items():
            k, v = (np.concatenate([true[p][:SINK], by_part[p][SINK:]]).reshape(n, 2, 32) for p in "kv")
            keys[name], values[name] = attention.rotation(k, np.arange(n)).astype(np.float64), v.astype(np.float64)
        for part in "kv":
            self.true[part].append(true[part][SINK:])
            self.mapped[part].append(mapped[part][SINK:])
        self.key_errors.append((keys["mapped"] - keys["true"])[SINK:])
        for t in range(SINK, n, QUERY_STRIDE):
            [q] = attention.queries(il, x[t : t + 1].astype(np.float32), np.array([t])).astype(np.float64)
            self.q.append(q)
            cosines = {"mapped": [], "mean": []}
            for h in range(4):
                weight = {name: softmax(keys[name][: t + 1, h // 2] @ q[h] / np.sqrt(32)) for name in rows}
                out = {name: weight[name] @ values[name][: t + 1, h // 2] for name in rows}
                for name, found in cosines.items():
                    found.append(out["true"] @ out[name] / np.linalg.norm(out["true"]) / np.linalg.norm(out[name]))
                square = ((values["mapped"] - values["true"])[SINK : t + 1, h // 2] ** 2).sum(1)
                a = weight["true"][SINK:] ** 2
                self.read[h // 2] += (a * square).sum()
                self.spread[h // 2] += a.sum() * square.mean()
            self.cosines.append(cosines["mapped"])
            self.cosines_mean.append(cosines["mean"])

    def r2(self, part: str) -> np.ndarray:
        return r2_by_head(np.concatenate(self.true[part]), np.concatenate(self.mapped[part]), 2)

    def concentration(self) -> np.ndarray:
        """Of keys: by the singular vectors of the queries."""
        out = []
        for h in range(2):
            q = np.stack(self.q)[:, 2 * h : 2 * h + 2].reshape(-1, 32)
            _, values, directions = np.linalg.svd(q, full_matrices=False)
            along = (np.concatenate(self.key_errors)[:, h] @ directions.T) ** 2
            out.append((along.mean(0) * values**2).sum() / (values**2).sum() / along.mean())
        return np.array(out)


def test_scores_are_those_of_each_row_and_head(source, target, corpus, made):  # noqa: F811
    paths = (source, target)
    found = sidecar.read(made / "forward.gguf").scores
    oracle, attention = load_mapper(made / "forward.gguf"), Attention(target)
    documents = select(read_documents([str(corpus)]), 0, scored=True).score
    kv = []
    for path in paths:
        with Model(path) as model:
            kv.append(KeysValues(model))
    layers = [ByHand() for _ in range(2)]
    streams = [inputs_by_hand(path, documents, k.layers, LENGTH) for path, k in zip(paths, kv, strict=True)]
    for inputs in zip(*streams, strict=True):
        rows = [k({il: x.astype(np.float32) for il, x in by_layer.items()}) for k, by_layer in zip(kv, inputs, strict=True)]
        for il, layer in enumerate(layers):
            true = {part: rows[1][part][il] for part in "kv"}
            layer.add(attention, il, inputs[1][il], true, {part: oracle(part, il, rows[0][part]) for part in "kv"})
    assert found.n_tokens == sum(len(x) for x in layers[0].true["k"]) and found.n_documents == 1
    for il, layer in enumerate(layers):
        for part in "kv":
            assert np.allclose(found.r2[part][il], layer.r2(part), atol=1e-5)
        assert np.allclose(found.concentration["k"][il], layer.concentration(), rtol=1e-4)
        assert np.allclose(found.concentration["v"][il], layer.read / layer.spread, rtol=1e-4)
        for name, values in (("cosine", layer.cosines), ("cosine_mean", layer.cosines_mean)):
            assert np.allclose(getattr(found, name)[il], np.reshape(values, (-1, 2, 2)).mean((0, 2)), atol=1e-5)


@given(st.integers(0, 100), st.sampled_from([1, 2, 4]), st.booleans())
def test_concentration_tells_error_that_attention_reads(seed, group, reads):
    """Queries along one direction: error along it is read in full, and across it not at all; of as much in each, 1 is the measure."""
    rng = np.random.default_rng(seed)
    q = np.zeros((20, group, 8))
    q[..., 3] = rng.normal(size=(20, group)) + 3
    even = rng.choice([-1.0, 1.0], size=(50, 1, 8))
    some = even * (np.arange(8) == 3) if reads else even * (np.arange(8) != 3)
    weight = np.zeros((1, group, 20, 50))
    weight[..., 7] = 1  # all queries read row 7
    values = np.zeros((50, 1, 8))
    values[7 if reads else 8] = 1
    for keys, v, expected in ((even, even, (1, 1)), (some, values, (8, 50) if reads else (0, 0))):
        c = score._Concentration()
        c.add_keys(q, keys)
        c.add_values(weight, np.ones((20, 50), bool), v)
        assert np.allclose([c.values()["k"][0], c.values()["v"][0]], expected)
    c = score._Concentration()
    c.add_keys(q, 0 * even)
    c.add_values(weight, np.ones((20, 50), bool), 0 * values)
    assert [c.values()["k"][0], c.values()["v"][0]] == [1, 1]  # no error is nowhere


def test_true_rows_and_mean_rows_are_the_ends_of_the_scale(source, corpus, tmp_path):  # noqa: F811
    """From a model to itself: R^2 and cosine are 1, and nothing is lost. With weights of 0 the biases are left, the mean."""
    [result] = fit.fit(config(source, source, corpus, tmp_path / "m.gguf", ks=(1,), lambdas=(1e-9,)))
    s = result.mapper.scores
    assert min(np.min(x) for x in (*s.r2["k"], *s.r2["v"], *s.cosine)) > 1 - 1e-5
    assert (np.abs(share_read(s) - 1) < 1e-3).all() and result.mapper.verdict.word == "text"
    maps = {}
    for part, m in result.mapper.maps.items():
        means = [y.mean(0) for y in rows_by_hand(source, corpus, part, "score", n_ctx=LENGTH)]
        maps[part] = replace(m, weights=[np.zeros_like(w) for w in m.weights], biases=means)
    sidecar.write(tmp_path / "0.gguf", replace(result.mapper, maps=maps))
    none = score.judge_file(tmp_path / "0.gguf", source, source, [str(corpus)])
    assert max(np.abs(x).max() for x in (*none.scores.r2["k"], *none.scores.r2["v"])) < 1e-4
    assert (np.abs(share_read(none.scores)) < 1e-3).all() and none.verdict.word == "mlp"


#
# on which text
#


def test_what_is_scored_chose_nothing(corpus, made):  # noqa: F811
    c = sidecar.read(made / "forward.gguf").calibration
    shas = {name: {d.sha256 for d in documents} for name, documents in vars(select(read_documents([str(corpus)]), 0, scored=True)).items()}
    assert (set(c.heldout), set(c.scored)) == (shas["heldout"], shas["score"])
    assert not shas["score"] & (shas["heldout"] | shas["fit"]) and len(set.union(*shas.values())) == 6


def test_one_document_held_out_is_not_enough(source, target, corpus, tmp_path):  # noqa: F811
    with pytest.raises(TextError, match="expected at least two documents to hold out, one to choose by and one to score"):
        fit.MapperFit(config(source, target, corpus, tmp_path / "m.gguf", heldout_documents=1))


def test_text_that_chose_must_not_be_scored(source, target, corpus, tmp_path):  # noqa: F811
    """A passage in both of the documents that are held out."""
    entries = json.loads((corpus / "sources.json").read_text())
    texts = {e["file"]: (corpus / e["file"]).read_text() for e in entries}
    texts["5.txt"] = texts["4.txt"][:200] + texts["5.txt"]
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "sources.json").write_text(json.dumps(entries))
    with pytest.raises(OverlapError, match=r"[45].txt \(held out\) and [45].txt \(for scores\)"):
        fit.MapperFit(config(source, target, tmp_path, tmp_path / "m.gguf"))


def test_a_mapper_from_sums_is_scored_later(source, target, corpus, made, tmp_path):  # noqa: F811
    out, files = str(tmp_path / "m.gguf"), ["--source", source, "--target", target, "--text", str(corpus)]
    solved = runner.invoke(cli.app, ["mapper", "solve", str(made / "s.npz"), "--k", "2", "--map-type", "f32", "--out", out])
    assert solved.exit_code == 0 and "it was not scored" in solved.stdout, solved.output
    assert sidecar.read(out).scores is None
    scored = runner.invoke(cli.app, ["mapper", "score", out, *files, "--threads", "1"])
    assert scored.exit_code == 0, scored.output
    assert Path(out).read_bytes() == (made / "forward.gguf").read_bytes()
    verdict_line = next(line for line in scored.stdout.splitlines() if line.startswith("verdict"))
    assert verdict_line.split()[1] == sidecar.read(out).verdict.word + ":"
    other = runner.invoke(cli.app, ["mapper", "score", out, *files[:-1], str(tmp_path)])
    assert other.exit_code != 0 and "error: " in other.stderr


@pytest.mark.parametrize(
    "which, keys, named",
    [
        (0, dict(rope__freq_base=5e5), "source: (hparams|rotation: base): expected .*, found "),
        (1, dict(rope__freq_base=5e5), "target: (hparams|rotation: base): expected .*, found "),
    ],
)
def test_a_model_that_it_is_not_for_is_refused(source, target, corpus, made, tmp_path, which, keys, named):  # noqa: F811
    pair = [source, target]
    pair[which] = str(rewritten(Path(pair[which]), tmp_path / "x.gguf", dict, **keys))
    before = (made / "forward.gguf").read_bytes()
    with pytest.raises(RidgefillError, match=named):
        score.judge_file(made / "forward.gguf", *pair, [str(corpus)])
    assert (made / "forward.gguf").read_bytes() == before


#
# chosen by cosine
#


def test_the_number_of_layers_can_be_chosen_by_cosine(source, target, corpus, tmp_path):  # noqa: F811
    """Each number of layers on its own, judged on the documents that choose; forward has more source layers to try than back."""
    held_out = tmp_path / "heldout"
    held_out.mkdir()
    for d in select(read_documents([str(corpus)]), 0, scored=True).heldout:
        (held_out / d.name).write_text(d.text)
    found = fit.fit(config(source, target, corpus, tmp_path / "{direction}.gguf", both=True, criterion="cosine"))
    for result, pair, ks in zip(found, ((source, target), (target, source)), ((1, 2, 4), (1, 2)), strict=True):
        mapper, alone, cosines = result.mapper, {}, {}
        for k in ks:
            [one] = fit.fit(config(*pair, corpus, tmp_path / "one.gguf", ks=(k,), force=True))
            judged = score.judge_file(one.path, *pair, [str(held_out)], unseen=True)
            alone[k], cosines[k] = one.mapper, [heads.mean() for heads in judged.scores.cosine]
        chosen = [max(ks, key=lambda k, il=il: cosines[k][il]) for il in range(mapper.target.n_layer)]
        for part, maps in mapper.maps.items():
            assert list(map(len, maps.sources)) == chosen and maps.tried == list(ks)
            assert maps.sources == [alone[k].maps[part].sources[il] for il, k in enumerate(chosen)]
            assert np.allclose(maps.r2_by_number, np.stack([alone[k].maps[part].r2 for k in ks], axis=1), atol=1e-5)
            for il, k in enumerate(chosen):
                assert np.allclose(mapper.weight(part, il), alone[k].weight(part, il), atol=1e-6)
        assert "criterion=cosine" in mapper.calibration.options and mapper.scores and mapper.verdict


#
# verdict, single layers of rotated keys, pictures
#


def scores(r2: float, cosine: float, cosine_mean: float = 0.5) -> Scores:
    heads = [np.full(2, x) for x in (r2, r2)]
    by_part = {"k": heads, "v": heads}
    return Scores(by_part, by_part, [np.full(2, cosine)] * 2, [np.full(2, cosine_mean)] * 2, 100, 1, ["a; b"])


@pytest.mark.parametrize(
    "found, n_tokens, word, first",
    [
        (scores(0.7, 0.9), 10**6, "text", "whether facts are recalled was not measured"),
        (scores(0.7, 0.7), 10**6, "mlp", "attention regains of what it would lose by mean rows: 0.40 on average"),
        (scores(-0.1, 0.9), 10**6, "mlp", "keys: R^2 -0.10 on average"),
        (scores(-0.1, 0.9), 300, "no", "keys: R^2 -0.10 on average"),
        (scores(0.7, 0.9), 300, "text", "whether facts are recalled was not measured"),
    ],
)
def test_the_verdict_follows_from_scores(made, found, n_tokens, word, first):
    mapper = sidecar.read(made / "forward.gguf")
    mapper = replace(mapper, scores=found, calibration=replace(mapper.calibration, n_tokens=n_tokens))
    said = verdict(mapper)
    assert said.word == word and said.reasons[0].startswith(first)
    assert any("fitted rows for each feature: 4.7" in r for r in said.reasons) == (n_tokens == 300)


def test_single_layers_are_scored_on_rotated_keys_too(source, target, corpus, made):  # noqa: F811
    mapper = sidecar.read(made / "forward.gguf")

    def rotated(path: str, partition: str) -> list[np.ndarray]:
        attention, out = Attention(path), []
        documents = getattr(select(read_documents([str(corpus)]), 0, scored=True), partition)
        for inputs in inputs_by_hand(path, documents, range(attention._n_blocks)):
            rows = [attention.keys_values(il, x.astype(np.float32))[0] for il, x in inputs.items()]
            out.append([attention.keys(il, k).reshape(len(k), -1)[SINK:].astype(np.float64) for il, k in enumerate(rows)])
        return [np.concatenate(layer) for layer in zip(*out, strict=True)]

    x, y, xh, yh = (rotated(path, partition) for partition in ("fit", "heldout") for path in (source, target))
    for il in range(2):
        for s in range(SOURCE["n_layer"]):
            fits = [ridge_by_hand(x[s], y[il], lam) for lam in fit.LAMBDAS]
            best = max(r2_by_head(yh[il], xh[s] @ w.T + b, 2).mean() for w, b in fits)
            assert abs(mapper.r2_rotated[il, s] - best) < 1e-5
    assert np.abs(mapper.r2_rotated - mapper.maps["k"].r2_single).max() > 0.05


def test_the_picture_shows_what_there_is(source, target, corpus, made, tmp_path):  # noqa: F811
    pytest.importorskip("matplotlib")
    drawn = runner.invoke(cli.app, ["mapper", "plot", str(made / "forward.gguf"), "--out", str(tmp_path / "m.svg")])
    assert drawn.exit_code == 0, drawn.output
    again = runner.invoke(cli.app, ["mapper", "plot", str(made / "forward.gguf"), "--out", str(tmp_path / "m.svg")])
    assert again.exit_code != 0 and "exists already" in again.stderr
    plain = runner.invoke(cli.app, arguments(source, target, corpus, "--k", 1, "--out", tmp_path / "n.gguf"))
    assert plain.exit_code == 0, plain.output
    sizes = []
    for path in (made / "back.gguf", tmp_path / "n.gguf"):
        drawn = runner.invoke(cli.app, ["mapper", "plot", str(path), "--out", str(tmp_path / f"{path.stem}.png")])
        assert drawn.exit_code == 0, drawn.output
        sizes.append((tmp_path / f"{path.stem}.png").stat().st_size)
    assert min(sizes) > 10_000
