"""Scores of maps from the file as it was written: against their definition, in the file, by the commands."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import sidecar_files as sf
from calibrate_pico import CTX, SINK, arguments, config, corpus, keys_of, library, model, words  # noqa: F401
from ridgefill import calibrate as cal
from ridgefill import cli, lib, score, sidecar
from ridgefill.capture import Chunk
from ridgefill.errors import RidgefillError, SidecarError, StatisticsError, TextError
from ridgefill.reference import Weights, forward, load_maps
from ridgefill.reference.fill import features
from ridgefill.reference.forward import _attend, _linear, _turned, rms_norm
from ridgefill.stopping import Stopped
from ridgefill.text import Document, read_documents
from test_projections import rewritten

SHAPE = dict(n_layer=5, head=32, n_head=4, n_head_kv=2)
KINDS = tuple(sidecar.PARTS)
runner = CliRunner()


def held_out(corpus):  # noqa: F811
    return [d for d in read_documents([corpus]) if d.partition == "heldout"]


@pytest.fixture(scope="module")
def scored(pico_model, corpus, tmp_path_factory):  # noqa: F811
    """get(arch) -> ({kind: result}, model) of maps of split 2 in f16, scored as they were made."""
    made = {}

    def get(arch: str):
        if arch not in made:
            path = pico_model(arch, **SHAPE)
            out = tmp_path_factory.mktemp(arch) / "{kind}.gguf"
            c = config(path, corpus, out, kinds=list(KINDS), map_type="f16", score=True)
            made[arch] = {r.kind: r for r in cal.calibrate(c)}, path
        return made[arch]

    return get


#
# what the scores are
#


class ByHand:
    """Rows of one layer of the oracle, true and predicted, chunk by chunk."""

    def __init__(self):
        self.pairs: dict[str, list] = {name: [] for name in ("input", "k", "v", "attention")}

    def add(self, name: str, predicted: np.ndarray, true: np.ndarray) -> None:
        self.pairs[name].append((predicted.reshape(len(true), -1), true.reshape(len(true), -1)))

    def both(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        return tuple(np.concatenate(rows) for rows in zip(*self.pairs[name], strict=True))

    def r2(self, name: str) -> float:
        predicted, true = self.both(name)
        return 1 - np.sum((true - predicted) ** 2) / np.sum((true - true.mean(0)) ** 2)

    def norm(self, name: str) -> float:
        predicted, true = (np.linalg.norm(y.reshape(-1, SHAPE["head"]), axis=1) for y in self.both(name))
        return float(np.mean(predicted / true))

    def cosine(self) -> float:
        a, b = self.both("attention")
        return float(np.mean(np.sum(a * b, 1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)))


def by_hand(w: Weights, path: str, kind: str, token_lists) -> dict[int, ByHand]:
    h, split, out = w.hparams, 2, {}
    weights = sidecar.maps(path) if kind == "input_lr" else load_maps(path).layers
    for tokens in token_lists:
        exact = forward(w, tokens)
        x_split, every = exact.x[split], np.arange(len(tokens))
        read = x_split if kind.startswith("input") else features(kind, x_split, h.eps)
        for il in range(split + 1, h.n_layer):
            rows = out.setdefault(il, ByHand())
            predicted = read @ weights[il][0].T + weights[il][1]
            norm = w.layer(il, "attn_norm.weight")

            def kv(x):
                return [_linear(w, il, which, rms_norm(x, norm, h.eps), h.n_head_kv) for which in "kv"]

            true = kv(exact.x[il])
            if kind.startswith("input"):
                rows.add("input", predicted[SINK:], exact.x[il][SINK:])
                filled = kv(predicted)
            else:
                filled = [y.reshape(true[0].shape) for y in np.split(predicted, 2, axis=1)]
            for f, t in zip(filled, true, strict=True):
                f[:SINK] = t[:SINK]
            head_norm = w.layer_or(il, "attn_k_norm.weight", None)
            unrotated = [y if head_norm is None else rms_norm(y, head_norm, h.eps) for y in (filled[0], true[0])]
            rows.add("k", *(y[SINK:] for y in unrotated))
            rows.add("v", filled[1][SINK:], true[1][SINK:])
            at = every[SINK :: score.QUERY_STRIDE]
            q = _turned(w, il, "q", _linear(w, il, "q", rms_norm(exact.x[il][at], norm, h.eps), h.n_head), at)
            read_out = [
                _attend(h, q, _turned(w, il, "k", k, every), v, at, every >= 0) @ w.layer(il, "attn_output.weight").T
                for k, v in (filled, true)
            ]
            rows.add("attention", *read_out)
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_scores_are_those_of_the_oracle(arch, kind, scored, corpus):  # noqa: F811
    """llama without, qwen3 with a norm of heads."""
    results, path = scored(arch)
    r = results[kind]
    with lib.Model(path) as m:
        lists = [t[at : at + CTX] for t in (m.tokenize(d.text) for d in held_out(corpus)) for at in range(0, len(t), CTX)]
    lists = [t for t in lists if len(t) > SINK]
    assert len(lists) > 4
    expected = by_hand(Weights(path), r.path, kind, lists)
    assert set(r.scores) == {name for name in sidecar.SCORES if name != "r2_input" or kind.startswith("input")}
    for i, il in enumerate(r.layers):
        rows = expected[il]
        assert abs(r.scores["r2_k"][i] - rows.r2("k")) < 1e-4
        assert abs(r.scores["r2_v"][i] - rows.r2("v")) < 1e-4
        assert abs(r.scores["norm_k"][i] - rows.norm("k")) < 1e-4
        assert abs(r.scores["norm_v"][i] - rows.norm("v")) < 1e-4
        assert abs(r.scores["attention"][i] - rows.cosine()) < 1e-4
        assert 0.05 < rows.cosine() < 0.9999 and 0 < rows.r2("k") < 0.9999  # neither noise nor the truth
        if kind.startswith("input"):
            assert abs(r.scores["r2_input"][i] - rows.r2("input")) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_r2_is_what_the_solver_found_from_sums(kind, scored):
    """Two ways to the same figure: sums over rows before the file was written, predictions from it afterwards."""
    r = scored("llama")[0][kind]
    for part, r2 in r.r2.items():
        np.testing.assert_allclose(r.scores[f"r2_{part}"], r2, atol=2e-5)


def test_maps_that_say_the_truth_score_1(scored, corpus, tmp_path):  # noqa: F811
    """Of a model whose layers add nothing to the stream the identity is the truth."""
    _, path = scored("llama")
    still = rewritten(
        path, tmp_path / "still.gguf",
        lambda t: {k: np.zeros_like(v) if "ffn_down" in k or "attn_output" in k else v for k, v in t.items()},
    )  # fmt: skip
    ones = {il: (np.eye(128, dtype=np.float32), np.zeros(128, np.float32)) for il in (3, 4)}
    with lib.Model(still) as m:
        fp = m.fingerprint(2)
        made = dict(arch="llama", n_layer=5, n_embd=128, split=2, map_type="f32", n_sink=SINK)
        made |= {k: fp[k] for k in ("tokenizer_sha256", "hparams")}
        sf.write_sidecar(tmp_path / "one.gguf", maps=ones, **made)
        pieces = score.document_pieces(m, held_out(corpus), SINK)
        s = score.Scorer(tmp_path / "one.gguf", still)
        for inputs in score._inputs(m, pieces, 2, 1):
            s.add(inputs)
            for il in (3, 4):
                assert np.array_equal(inputs[il], inputs[2])
    for values in (s._sums[il] for il in (3, 4)):
        assert values["r2_input"].value() == 1 and values["norm_k"].value() == 1 and values["norm_v"].value() == 1
    with pytest.raises(StatisticsError, match="layer 3: expected activations that give a finite attention, found nan"):
        s.scores()  # nothing comes out of a layer without an output projection


def test_sums_do_not_depend_on_where_blocks_are_cut():
    rng = np.random.default_rng(0)
    y, p = 1000 + rng.normal(size=(2, 300, 8)).astype(np.float32)
    whole, parts = score.R2(), score.R2()
    whole.add(y, p)
    for at in range(0, 300, 37):
        parts.add(y[at : at + 37], p[at : at + 37])
    expected = 1 - np.sum((y.astype(float) - p) ** 2) / np.sum((y.astype(float) - y.astype(float).mean(0)) ** 2)
    assert abs(whole.value() - parts.value()) < 1e-9 and abs(whole.value() - expected) < 1e-9


def test_memory_stays_below_the_estimate(pico_model, tmp_path):
    wide = pico_model("llama", n_layer=5, head=64, n_head=8, n_head_kv=4)
    with lib.Model(wide) as m:
        fp = m.fingerprint(1)
        sf.write_sidecar(
            tmp_path / "m.gguf", arch="llama", n_layer=5, n_embd=512, split=1, map_type="q8_0", n_sink=SINK,
            tokenizer_sha256=fp["tokenizer_sha256"], hparams=fp["hparams"],
        )  # fmt: skip
        tokens = m.tokenize(words(2000, 1))[: score.LENGTH]
        assert len(tokens) == score.LENGTH
        tracemalloc.start()
        score.score(m, tmp_path / "m.gguf", [Chunk(tokens, 0)], 1)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    need = score.memory_bytes(score.Attention(wide), 1, 5, {il: (512, 512) for il in (2, 3, 4)})
    assert 0.3 * need < peak < need


#
# which text
#


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8), st.integers(0, 8), st.integers(0, 6000))
def test_pieces_come_from_all_documents_in_turn(lengths, sink, n_tokens):
    found = score.pieces([Chunk(list(range(n)), i) for i, n in enumerate(lengths)], sink, n_tokens)
    assert all(sink < len(p.tokens) <= score.LENGTH for p in found)
    everything = score.pieces([Chunk(list(range(n)), i) for i, n in enumerate(lengths)], sink, 0)
    assert found == everything[: len(found)]
    of_document = [[p.tokens for p in everything if p.document == i] for i in range(len(lengths))]
    for n, tokens in zip(lengths, of_document, strict=True):
        cut = [list(range(at, min(n, at + score.LENGTH))) for at in range(0, n, score.LENGTH)]
        assert tokens == [c for c in cut if len(c) > sink]
    ranks = [sum(p.document == q.document for q in everything[:i]) for i, p in enumerate(everything)]
    assert ranks == sorted(ranks)
    total = sum(len(p.tokens) for p in found)
    assert len(found) == len(everything) or total >= n_tokens > 0
    assert not found or total - len(found[-1].tokens) < (n_tokens or np.inf)


def test_unseen_documents_are_those_that_the_calibration_held_out(model, corpus, tmp_path):  # noqa: F811
    free = tmp_path / "free"
    free.mkdir()
    for i in range(6):
        shutil.copy(corpus / f"{i}.txt", free / f"{i}.txt")
    for text, n in ((free, None), (free, 2), (corpus, None)):
        c = config(model, corpus, tmp_path / "m.gguf", text=[str(text)], seed=5, heldout_documents=n, force=True)
        with cal.Calibration(c) as run:
            expected = run.prepared.documents[1]
            run.run()
        assert score.unseen(read_documents([text]), keys_of(tmp_path / "m.gguf")) == expected
        # another file beside them changes nothing; without any of them there is nothing to judge by
        other = Document("x.txt", "Other text.", "x")
        keys = keys_of(tmp_path / "m.gguf")
        assert score.unseen([other, *read_documents([text])], keys) == expected
        with pytest.raises(TextError, match="documents held out, found none of these among 1"):
            score.unseen([other], keys)


def test_a_file_that_does_not_say_what_was_held_out_needs_marked_text(model, corpus, tmp_path):  # noqa: F811
    """As files are that were made before the record was."""
    cal.calibrate(config(model, corpus, tmp_path / "m.gguf"))
    keys = keys_of(tmp_path / "m.gguf")
    expected = score.unseen(read_documents([corpus]), keys)
    del keys["ridge.calibration.heldout_sha256"]
    assert score.unseen(read_documents([corpus]), keys) == expected
    with pytest.raises(TextError, match="expected documents that sources.json marks as heldout"):
        score.unseen([Document("x.txt", "Other text.", "x")], keys)


#
# in the file
#


@pytest.fixture(scope="module")
def plain(model, corpus, tmp_path_factory):  # noqa: F811
    """A sidecar without scores."""
    return Path(cal.calibrate(config(model, corpus, tmp_path_factory.mktemp("plain") / "m.gguf", map_type="q8_0"))[0].path)


def values(n: int, **changed) -> dict:
    keys = {f"ridge.score.{name}": [0.5] * n for name in sidecar.SCORES}
    return {**keys, "ridge.score.n_tokens": 7, "ridge.score.n_documents": 1, "ridge.score.sources": ["a; b"], **changed}


SELFTEST = {
    "ridge.selftest.tokens": list(range(40)),
    "ridge.selftest.tail": 8,
    "ridge.selftest.file_type": 7,
    "ridge.selftest.top_tokens": list(range(10)),
    "ridge.selftest.top_logits": [0.25] * 10,
}


def test_maps_and_other_keys_stay_what_they_were(plain, tmp_path):
    path = Path(shutil.copy(plain, tmp_path / "m.gguf"))
    before, tensors = keys_of(path), {t.name: t.data.tobytes() for t in gguf.GGUFReader(path).tensors}
    sidecar.amend(path, values(2) | SELFTEST)
    after = keys_of(path)
    assert {k: v for k, v in after.items() if k in before and k != sidecar.METADATA_HASH} == {
        k: v for k, v in before.items() if k != sidecar.METADATA_HASH
    }
    assert {k: v for k, v in after.items() if k not in before} == values(2) | SELFTEST
    assert [t.name for t in gguf.GGUFReader(path).tensors] == list(tensors)
    for t in gguf.GGUFReader(path).tensors:
        assert t.data.tobytes() == tensors[t.name]
    once = path.read_bytes()
    sidecar.amend(path, values(2, **{"ridge.score.n_tokens": 8}))
    assert keys_of(path)["ridge.score.n_tokens"] == 8 and keys_of(path)["ridge.selftest.tail"] == 8
    sidecar.amend(path, values(2))
    sidecar.amend(path, SELFTEST)
    assert path.read_bytes() == once
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_a_group_of_keys_is_replaced_as_a_whole(plain, tmp_path):
    path = Path(shutil.copy(plain, tmp_path / "m.gguf"))
    sidecar.amend(path, values(2))
    fewer = {k: v for k, v in values(2).items() if k != "ridge.score.r2_input"}
    sidecar.amend(path, fewer)
    assert "ridge.score.r2_input" not in keys_of(path)


def test_what_is_no_sidecar_is_not_amended(tmp_path, model):  # noqa: F811
    path = Path(shutil.copy(model, tmp_path / "m.gguf"))
    before = path.read_bytes()
    with pytest.raises(SidecarError, match="it is a model of architecture 'llama'"):
        sidecar.amend(path, values(2))
    assert path.read_bytes() == before


def test_keys_are_documented_as_optional_with_their_types(plain, tmp_path):
    text = (Path(__file__).resolve().parents[1] / "docs" / "SIDECAR.md").read_text()
    types = {gguf.GGUFValueType.UINT32: "u32", gguf.GGUFValueType.UINT64: "u64", gguf.GGUFValueType.FLOAT32: "f32", gguf.GGUFValueType.STRING: "string"}
    documented = {line.split("`")[1]: line for line in text.splitlines() if line.startswith(("| `ridge.score.", "| `ridge.selftest."))}
    assert set(documented) == sidecar.SCORE_KEYS.keys() | sidecar.SELFTEST_KEYS.keys()
    for key, (kind, is_array) in (sidecar.SCORE_KEYS | sidecar.SELFTEST_KEYS).items():
        assert documented[key].startswith(f"| `{key}` | {'array ' * is_array}{types[kind]}") and "| optional" in documented[key]


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("ridge.score.r2_k", [0.5], "key 'ridge.score.r2_k' holds 1 numbers, expected 2: one per layer 3 to 4"),
        ("ridge.score.r2_v", [0.5, 1.5], "key 'ridge.score.r2_v' is 1.5 for layer 4, expected a finite number from -inf to 1"),
        ("ridge.score.norm_v", [-0.5, 1.0], "key 'ridge.score.norm_v' is -0.5 for layer 3, expected a finite number from 0 to inf"),
        ("ridge.score.attention", [0.0, float("nan")], "key 'ridge.score.attention' is nan for layer 4"),
        ("ridge.score.n_tokens", None, "ridge.score.n_tokens"),
        ("ridge.score.sources", None, "ridge.score.sources"),
        ("ridge.selftest.tail", 40, "key 'ridge.selftest.tail' is 40, expected less than the 40 tokens"),
        ("ridge.selftest.tail", None, "ridge.selftest.tail"),
        ("ridge.selftest.file_type", None, "ridge.selftest.file_type"),
        ("ridge.selftest.top_tokens", [1] * 9, "key 'ridge.selftest.top_tokens' holds 9 tokens, expected 5 for each of some of the last 8 rows"),
        ("ridge.selftest.top_tokens", [1] * 45, "holds 45 tokens"),
        ("ridge.selftest.top_logits", [0.5] * 9, "key 'ridge.selftest.top_logits' holds 9 numbers, expected 10: one per token"),
        ("ridge.selftest.top_logits", [0.5] * 9 + [float("inf")], "key 'ridge.selftest.top_logits' holds a number that is not finite"),
    ],
)
def test_the_reader_refuses_lengths_and_values_out_of_range(key, value, message, plain, tmp_path):
    path = Path(shutil.copy(plain, tmp_path / "m.gguf"))
    good = values(2) | SELFTEST
    sidecar.amend(path, good)
    sidecar.inspect(path)
    sidecar.amend(path, {k: v for k, v in (good | {key: value}).items() if v is not None})
    with pytest.raises(SidecarError) as e:
        sidecar.inspect(path)
    assert message in str(e.value)


#
# the commands
#


def sha256(path) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def test_calibration_scores_what_it_wrote(model, corpus, plain, tmp_path):  # noqa: F811
    out = tmp_path / "m.gguf"
    args = [a for a in arguments(model, corpus, "--map-type", "q8_0", "--json", "--out", out) if a != "--no-score"]
    done = runner.invoke(cli.calibrate_app, args)
    assert done.exit_code == 0, done.output
    result, keys = json.loads(done.stdout)[0], keys_of(out)
    assert set(result["scores"]) == set(sidecar.SCORES)
    for name, found in result["scores"].items():
        np.testing.assert_allclose(keys[f"ridge.score.{name}"], found, rtol=1e-6)
    assert keys["ridge.score.n_documents"] == 2 and keys["ridge.score.n_tokens"] == keys["ridge.calibration.n_heldout_tokens"]
    assert keys["ridge.score.sources"] == ["book 4; CC0-1.0", "book 5; CC0-1.0"]
    assert len(keys["ridge.selftest.tokens"]) == CTX and len(keys["ridge.selftest.top_logits"]) == 80
    assert sidecar._same_maps(plain, out)
    shown = runner.invoke(cli.app, ["inspect", str(out)]).stdout
    assert "R² input" in shown and f"{keys['ridge.score.attention'][0]:.4f}" in shown
    assert "book 0; CC0-1.0" in shown and f"llama-server -m MODEL.gguf --ridge-maps {out} --ridge-tail 512" in shown


def test_a_file_that_has_been_scored_is_in_nobodys_way(model, corpus, tmp_path, monkeypatch):  # noqa: F811
    """The command of a run that was stopped while it scored, or that is repeated, gives the same bytes."""
    c = config(model, corpus, tmp_path / "m.gguf", score=True, sums=str(tmp_path / "s.npz"))

    def stop(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(score, "score", stop)
        with pytest.raises(Stopped, match="stopped while scoring; the maps are written, without scores in .*m.gguf"):
            cal.calibrate(c)
    assert "ridge.score.n_tokens" not in keys_of(tmp_path / "m.gguf")
    cal.calibrate(c)
    assert "ridge.score.n_tokens" in keys_of(tmp_path / "m.gguf")
    first = sha256(tmp_path / "m.gguf")
    cal.calibrate(c)
    assert sha256(tmp_path / "m.gguf") == first
    cal.calibrate(config(model, corpus, tmp_path / "n.gguf", score=True))
    assert sha256(tmp_path / "n.gguf") == first


def test_score_command(model, corpus, plain, tmp_path):  # noqa: F811
    path = shutil.copy(plain, tmp_path / "m.gguf")

    def run(*more, code=0):
        done = runner.invoke(cli.app, ["score", str(path), model, "--text", str(corpus), "--threads", "1", *more])
        assert done.exit_code == code, done.output
        return done

    found = json.loads(run("--json").stdout)
    assert (found["n_documents"], found["layers"], found["selftest"]) == (2, [3, 4], True)
    keys = keys_of(path)
    assert keys["ridge.score.sources"] == ["book 4; CC0-1.0", "book 5; CC0-1.0"]
    np.testing.assert_allclose(keys["ridge.score.r2_k"], found["scores"]["r2_k"], rtol=1e-6)
    # pieces of LENGTH here, of CTX in the calibration
    np.testing.assert_allclose(found["scores"]["r2_input"], keys["ridge.r2"], atol=0.1)
    assert "R² input" in run("--n-tokens", "200").stdout
    assert keys_of(path)["ridge.score.n_documents"] == 1
    seen = json.loads(run("--json", "--unseen").stdout)
    assert seen["n_documents"] == 8 and seen["scores"]["r2_input"][0] > found["scores"]["r2_input"][0]


def test_score_command_refuses_before_it_changes_the_file(model, corpus, plain, pico_model, tmp_path):  # noqa: F811
    path = shutil.copy(plain, tmp_path / "m.gguf")
    before = sha256(path)
    short = tmp_path / "short.txt"
    short.write_text("a b")

    def refusal(code, *args, text=corpus):
        done = runner.invoke(cli.app, ["score", *map(str, args), "--text", str(text)])
        assert done.exit_code == code and done.stderr.count("\n") == 1, done.output
        assert sha256(path) == before
        return done.stderr

    deeper = pico_model("llama", n_layer=6, head=32, n_head=2, n_head_kv=1)
    assert "it was made for a model of 5 layers, the model has 6" in refusal(3, path, deeper, text=corpus)
    other = rewritten(Path(model), tmp_path / "t.gguf", lambda t: t | {})
    other.write_bytes(other.read_bytes().replace("Ġthe".encode(), "Ġteh".encode()))
    assert "the tokenizers differ" in refusal(3, path, other)
    assert "expected text of at least 6 tokens to judge by, found 0 rows" in refusal(4, path, model, "--unseen", text=short)
    assert "found none of these among 1; --unseen" in refusal(4, path, model, text=short)
    assert "no such file" in refusal(7, tmp_path / "none.gguf", model)
    assert "it is a model of architecture" in refusal(7, model, model)


def test_a_full_disk_and_a_read_only_folder_leave_the_file_as_it_was(model, corpus, plain, tmp_path, monkeypatch):  # noqa: F811
    path = shutil.copy(plain, tmp_path / "m.gguf")
    before, args = sha256(path), ["score", str(path), model, "--text", str(corpus), "--threads", "1"]

    def full(path, header_end):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(sidecar, "_seal", full)
        refused = runner.invoke(cli.app, args)
    assert (refused.exit_code, refused.stderr.splitlines()[-1]) == (10, "error: No space left on device")
    monkeypatch.setattr(sidecar.os, "access", lambda path, mode: False)
    monkeypatch.setattr(score, "Context", lambda *a, **kw: pytest.fail("found after the work"))
    refused = runner.invoke(cli.app, args)
    assert (refused.exit_code, refused.stderr) == (10, f"error: {tmp_path}: no files can be written there\n")
    assert sha256(path) == before and [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


def test_an_architecture_without_support_is_refused_before_the_work(model, corpus, tmp_path, monkeypatch):  # noqa: F811
    other = rewritten(Path(model), tmp_path / "x.gguf", dict, "xverse")
    monkeypatch.setattr(cal, "Context", lambda *a, **kw: pytest.fail("found after the work"))
    refused = runner.invoke(cli.calibrate_app, [*arguments(other, corpus), "--out", str(tmp_path / "m.gguf")])
    assert refused.exit_code == 3
    assert f"{other} cannot be filled: architecture 'xverse' cannot be filled (supported: llama," in refused.stderr


def test_a_model_that_cannot_be_scored_is_refused_before_the_work(model, corpus, tmp_path, monkeypatch):  # noqa: F811
    bad = rewritten(Path(model), tmp_path / "x.gguf", dict, attention__clamp_kqv=8.0)
    monkeypatch.setattr(cal, "Context", lambda *a, **kw: pytest.fail("found after the work"))
    with pytest.raises(RidgefillError, match="the maps could not be scored: llama.attention.clamp_kqv: .*; --no-score leaves that out"):
        cal.Calibration(config(bad, corpus, tmp_path / "m.gguf", score=True))
    cal.Calibration(config(bad, corpus, tmp_path / "m.gguf")).__exit__()
