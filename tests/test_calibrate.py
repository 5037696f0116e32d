"""ridgefill-calibrate from end to end on pico models: maps, scores, records, refusals."""
from __future__ import annotations

import errno
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

import sidecar_files
from calibrate_pico import CTX, SINK, WORDS, arguments, config, corpus, inputs_by_hand, keys_of, library, model  # noqa: F401  (fixtures too)
from ridgefill import calibrate as cal
from ridgefill import cli, lib, native, sidecar
from ridgefill.errors import OutputExists, RidgefillError, StatisticsError, TextError
from ridgefill.kinds import KINDS
from ridgefill.text import read_documents

@pytest.fixture(scope="module")
def fitted(model, corpus, tmp_path_factory):
    """Splits 1 and 2 fitted in one call: (results, folder)."""
    folder = tmp_path_factory.mktemp("maps")
    return cal.calibrate(config(model, corpus, folder / "maps.gguf", splits=[1, 2])), folder


def layer_inputs(model_path: str, documents, layers) -> dict[int, np.ndarray]:
    """Rows of every document without sink rows, float64."""
    chunks = list(inputs_by_hand(model_path, documents, layers))
    return {il: np.concatenate([inputs[il][SINK:] for inputs in chunks]) for il in layers}


def solution(x: np.ndarray, y: np.ndarray, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Ridge by least squares on rows: the penalty as sqrt(alpha) I below the centred rows."""
    mu, d = x.mean(0), x.shape[1]
    alpha = lam * np.sum((x - mu) ** 2) / d
    rows = np.vstack([x - mu, np.sqrt(alpha) * np.eye(d)])
    a = np.linalg.lstsq(rows, np.vstack([y - y.mean(0), np.zeros((d, y.shape[1]))]), rcond=None)[0].T
    return a, y.mean(0) - a @ mu


def r2_of(y: np.ndarray, predicted: np.ndarray) -> float:
    return 1 - np.sum((y - predicted) ** 2) / np.sum((y - y.mean(0)) ** 2)


def rows_of(model: str, corpus, layers) -> tuple[dict, dict]:
    """layer_inputs() of the fitted and of the held-out documents."""
    documents = read_documents([corpus])
    return tuple(layer_inputs(model, [d for d in documents if d.partition == p], layers) for p in ("calibration", "heldout"))


def test_maps_are_the_ridge_solution_of_the_activations(model, corpus, fitted):
    results, _ = fitted
    fit, held = rows_of(model, corpus, range(5))
    for r in results:
        assert (r.kind, r.n_tokens, r.n_heldout_tokens) == ("input", len(fit[0]), len(held[0]))
        assert r.layers == list(range(r.split + 1, 5))
        maps = sidecar.maps(r.path)
        for il, lam, r2 in zip(r.layers, r.lambdas["input"], r.r2["input"], strict=True):
            a, b = solution(fit[r.split], fit[il], lam)
            weight, bias = maps[il]
            assert np.abs(weight - a).max() < 1e-5 * np.abs(a).max()
            assert np.abs(bias - b).max() < 1e-4 * np.abs(fit[il]).max()
            assert abs(r2 - r2_of(held[il], held[r.split] @ weight.T + bias)) < 1e-6
            assert 0 < r2 < 1


@pytest.fixture(scope="module")
def fitted_kv(model, corpus, tmp_path_factory):
    """All kinds and splits 1 and 2 in one call, by (kind, split)."""
    folder = tmp_path_factory.mktemp("maps")
    results = cal.calibrate(config(model, corpus, folder / "m.gguf", splits=[1, 2], kinds=["kv_prev", "input", "kv", "input_lr"], rank=32))
    return {(r.kind, r.split): r for r in results}


def normalised(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5)  # the epsilon of a pico model


def features_by_hand(model_path: str, documents, kind: str, split: int) -> np.ndarray:
    """As the contract has it, chunk by chunk: the row before the first fitted one is the last sink row."""
    out = []
    for inputs in inputs_by_hand(model_path, documents, [split]):
        n = normalised(inputs[split])
        own, before = n[SINK:], n[SINK - 1 : -1]
        out.append(own if kind == "kv" else np.hstack([own, before]))
    return np.concatenate(out)


@pytest.mark.parametrize("kind", ["kv", "kv_prev"])
def test_kv_maps_are_the_ridge_solution_of_projections(model, corpus, fitted_kv, kind):
    documents = read_documents([corpus])
    fit, held = rows_of(model, corpus, range(5))
    tensors = {t.name: np.array(t.data, np.float64) for t in gguf.GGUFReader(model).tensors}
    for split in (1, 2):
        r = fitted_kv[kind, split]
        x, xh = (
            features_by_hand(model, [d for d in documents if d.partition == p], kind, split) for p in ("calibration", "heldout")
        )
        assert (r.n_tokens, r.n_heldout_tokens) == (len(x), len(xh))
        maps = sidecar.maps(r.path)
        assert sorted(maps) == r.layers == list(range(split + 1, 5))
        for i, il in enumerate(r.layers):
            norm = tensors[f"blk.{il}.attn_norm.weight"]
            weight, bias = maps[il]
            assert weight.shape == (64, 64 if kind == "kv" else 128)
            for part, rows in (("k", slice(0, 32)), ("v", slice(32, 64))):
                w = tensors[f"blk.{il}.attn_{part}.weight"]
                y, yh = (normalised(inputs[il]) * norm @ w.T for inputs in (fit, held))
                a, b = solution(x, y, r.lambdas[part][i])
                assert np.abs(weight[rows] - a).max() < 1e-4 * np.abs(a).max()
                assert np.abs(bias[rows] - b).max() < 1e-4 * np.abs(y).max()
                scores = [r2_of(yh, xh @ a.T + b) for a, b in (solution(x, y, lam) for lam in cal.LAMBDAS)]
                assert r.lambdas[part][i] == cal.LAMBDAS[int(np.argmax(scores))]
                assert abs(r.r2[part][i] - r2_of(yh, xh @ weight[rows].T + bias[rows])) < 1e-5
                assert 0 < r.r2[part][i] < 1


def test_share_of_the_row_before_mixes_the_maps_of_k(model, corpus, fitted_kv, tmp_path):
    cal.calibrate(config(model, corpus, tmp_path / "m.gguf", kinds=["kv_prev"], prev_share=0.25))
    assert keys_of(tmp_path / "m.gguf")["ridge.prev_share"] == 0.25
    mixed, prev, kv = (sidecar.maps(p) for p in (tmp_path / "m.gguf", fitted_kv["kv_prev", 2].path, fitted_kv["kv", 2].path))
    for il, (weight, bias) in mixed.items():
        n_k = len(bias) // 2
        without = np.hstack([kv[il][0], np.zeros_like(kv[il][0])])
        np.testing.assert_allclose(weight[:n_k], 0.25 * prev[il][0][:n_k] + 0.75 * without[:n_k], atol=1e-5)
        np.testing.assert_allclose(bias[:n_k], 0.25 * prev[il][1][:n_k] + 0.75 * kv[il][1][:n_k], atol=1e-4)
        np.testing.assert_array_equal(weight[n_k:], prev[il][0][n_k:])
        assert np.abs(weight[:n_k] - prev[il][0][:n_k]).max() > 1e-3


def test_kinds_fitted_together_equal_those_fitted_alone(model, corpus, fitted, fitted_kv, tmp_path):
    assert list(fitted_kv) == [(k, s) for k in ("kv_prev", "input", "kv", "input_lr") for s in (1, 2)]
    alone = [*fitted[0], *cal.calibrate(config(model, corpus, tmp_path / "m.gguf", splits=[1, 2], kinds=["kv"]))]
    for r in alone:
        together = fitted_kv[r.kind, r.split]
        assert (together.lambdas, together.layers) == (r.lambdas, r.layers)
        for il, (weight, bias) in sidecar.maps(together.path).items():
            other_weight, other_bias = sidecar.maps(r.path)[il]
            assert np.allclose(weight, other_weight, rtol=1e-5, atol=1e-6 * np.abs(weight).max())
            assert np.allclose(bias, other_bias, rtol=1e-5, atol=1e-6)


def test_without_sink_rows_the_row_before_the_first_is_zero(model, corpus, tmp_path):
    r = cal.calibrate(config(model, corpus, tmp_path / "m.gguf", kinds=["kv_prev"], sink=0))[0]
    with lib.Model(model) as m:
        fit = [d for d in read_documents([corpus]) if d.partition == "calibration"]
        assert r.n_tokens == sum(len(m.tokenize(d.text)) for d in fit)  # every row, those at position 0 too


def test_record_in_the_file(model, corpus, fitted):
    results, folder = fitted
    assert sorted(p.name for p in folder.iterdir()) == ["maps.s1.gguf", "maps.s2.gguf"]
    for r in results:
        keys = keys_of(r.path)
        with lib.Model(model) as m:
            fp = m.fingerprint(r.split)
        assert (keys["ridge.split"], keys["ridge.block_count"], keys["ridge.embedding_length"]) == (r.split, 5, 64)
        assert (keys["ridge.sink_rows"], keys["ridge.tail"], keys["ridge.map_type"]) == (SINK, 512, "f32")
        assert keys["ridge.model.tokenizer_sha256"] == fp["tokenizer_sha256"]
        assert keys["ridge.model.hparams"] == fp["hparams"]
        assert dict(zip(keys["ridge.model.anchors"], keys["ridge.model.anchors_sha256"])) == fp["anchors"]
        assert np.allclose(keys["ridge.r2"], r.r2["input"]) and np.allclose(keys["ridge.lambda"], r.lambdas["input"])
        assert keys["ridge.calibration.sources"] == [f"book {i}; CC0-1.0" for i in range(6)]  # evaluation text is not there
        assert (keys["ridge.calibration.n_documents"], keys["ridge.calibration.n_heldout_documents"]) == (4, 2)
        tensors = {t.name: hashlib.sha256(t.data.tobytes()).hexdigest() for t in gguf.GGUFReader(r.path).tensors}
        assert dict(zip(keys["ridge.tensors"], keys["ridge.tensors_sha256"])) == tensors


@pytest.mark.parametrize("kind", KINDS)
def test_keys_are_those_of_the_format(fitted_kv, kind):
    """docs/SIDECAR.md and the writer name the same keys."""
    documented = set(sidecar_files.documented_keys(kind))
    assert len(documented) > 20
    optional = {sidecar.METADATA_HASH, "ridge.calibration.options", "ridge.calibration.heldout_sha256"}
    assert set(keys_of(fitted_kv[kind, 2].path)) == documented | optional


def test_kv_record_in_the_file(fitted_kv):
    for kind in ("kv", "kv_prev"):
        r = fitted_kv[kind, 1]
        keys = keys_of(r.path)
        assert (keys["ridge.kind"], keys["ridge.k_length"], keys["ridge.v_length"]) == (kind, [32] * 3, [32] * 3)
        for part in "kv":
            assert np.allclose(keys[f"ridge.lambda_{part}"], r.lambdas[part]) and np.allclose(keys[f"ridge.r2_{part}"], r.r2[part])
        order = [k for k in keys if k.startswith("ridge.")]
        at = order.index("ridge.map_type")
        assert order[at + 1 : at + 7] == [f"ridge.{k}" for k in ("k_length", "v_length", "lambda_k", "lambda_v", "r2_k", "r2_v")]


@pytest.mark.parametrize("kind", KINDS)
def test_the_library_loads_and_uses_the_maps(model, fitted_kv, kind):
    """Filled upper-layer keys are those of the map: closer to the exact ones than identity's, and not the same."""
    result = fitted_kv[kind, 2]
    with lib.Model(model) as m, lib.Context(m, 512, n_ubatch=64, n_threads=1) as ctx, lib.Maps(m, result.path) as maps:
        assert (maps.split, maps.n_tail, maps.n_sink, maps.kind) == (result.split, 512, SINK, kind)
        assert maps.hash == hashlib.sha256(Path(result.path).read_bytes()).hexdigest()
        assert maps.size >= 2 * {"input": 64 * 65, "input_lr": 64 * 65, "kv": 64 * 65, "kv_prev": 64 * 129}[kind] * 4
        tokens = m.tokenize(" ".join(np.random.default_rng(7).choice(WORDS, 80)))
        ctx.decode(tokens)
        exact = ctx.get_kv(0, 4, "k", SINK, 100)
        error = {}
        for mode in ("fill", "identity"):
            ctx.clear()
            ctx.fill_and_decode(tokens, mode=mode, maps=maps if mode == "fill" else None, split=2, n_tail=32)
            error[mode] = np.linalg.norm(ctx.get_kv(0, 4, "k", SINK, 100) - exact)
        assert 0 < error["fill"] < 0.8 * error["identity"]


def test_the_library_refuses_maps_of_other_widths(model, tmp_path):
    with lib.Model(model) as m:
        fp = m.fingerprint(2)
        path = sidecar_files.write_sidecar(
            tmp_path / "m.gguf", arch="llama", n_layer=5, n_embd=64, split=2, map_type="f32", kind="kv", kv_lengths=(32, 64),
            tokenizer_sha256=fp["tokenizer_sha256"], hparams=fp["hparams"],
        )  # fmt: skip
        with pytest.raises(RidgefillError, match="layer 3 give 32 and 64 values .* the model has 32 and 32"):
            lib.Maps(m, path)


@pytest.mark.parametrize("map_type", ["f16", "q8_0"])
def test_scores_are_of_the_maps_as_written(model, corpus, fitted, map_type, tmp_path):
    """Rounded maps score otherwise than the solution, by what the rows say of the maps in the file."""
    r = cal.calibrate(config(model, corpus, tmp_path / "m.gguf", map_type=map_type))[0]
    full = next(f for f in fitted[0] if f.split == 2)
    held = layer_inputs(model, [d for d in read_documents([corpus]) if d.partition == "heldout"], range(2, 5))
    for il, r2, exact in zip(r.layers, r.r2["input"], full.r2["input"], strict=True):
        weight, bias = sidecar.maps(r.path)[il]
        y = held[il]
        found = 1 - np.sum((y - held[2] @ weight.T - bias) ** 2) / np.sum((y - y.mean(0)) ** 2)
        assert abs(r2 - found) < 1e-6
        assert 1e-9 < abs(r2 - exact) < 0.01


def test_same_seed_same_bytes_other_seed_other_documents(model, corpus, fitted, tmp_path):
    def one(name, **kw):
        cal.calibrate(config(model, corpus, tmp_path / name, **kw))
        return (tmp_path / name).read_bytes()

    free = tmp_path / "free"  # without partitions the seed decides what is held out
    free.mkdir()
    for i in range(6):
        shutil.copy(corpus / f"{i}.txt", free / f"{i}.txt")
    a, b = one("a.gguf", text=[str(free)], seed=3), one("b.gguf", text=[str(free)], seed=3)
    assert a == b
    assert a != one("c.gguf", text=[str(free)], seed=4)


def test_names_of_the_files():
    def names(out, *splits, kinds=("input",)):
        c = config("m", "t", out, splits=list(splits), kinds=list(kinds))
        return [str(c.out_path(s, k)) for s in splits for k in kinds]

    assert names("a/b.gguf", 3) == ["a/b.gguf"]
    assert names("a/b.c.gguf", 3, 12) == ["a/b.c.s3.gguf", "a/b.c.s12.gguf"]
    assert names("a/s{split}.q8_0.gguf", 3) == ["a/s3.q8_0.gguf"]
    assert names("a/s{split}.q8_0.gguf", 3, 12) == ["a/s3.q8_0.gguf", "a/s12.q8_0.gguf"]
    assert names("a/b.gguf", 3, kinds=["kv", "kv_prev"]) == ["a/b.kv.gguf", "a/b.kv_prev.gguf"]
    assert names("a/b.gguf", 3, 12, kinds=["kv", "input"])[:2] == ["a/b.s3.kv.gguf", "a/b.s3.input.gguf"]
    assert names("{kind}/s{split}.gguf", 3, kinds=["kv"]) == ["kv/s3.gguf"]
    assert names("{kind}.gguf", 3, 12, kinds=["kv"]) == ["kv.s3.gguf", "kv.s12.gguf"]
    assert names("s{split}.gguf", 3, kinds=["kv", "input"]) == ["s3.kv.gguf", "s3.input.gguf"]


def test_n_tokens_limits_what_is_fitted(model, corpus, tmp_path):
    c = config(model, corpus, tmp_path / "m.gguf", n_tokens=300)
    with cal.Calibration(c) as run:
        lengths = [len(k.tokens) for k in run.prepared.fit]
        assert sum(lengths) == 300 and max(lengths) <= CTX
        assert run.run()[0].n_tokens == 300 - SINK * len(lengths)


def test_existing_files_stay_unless_forced(model, corpus, tmp_path):
    out = tmp_path / "m.gguf"
    out.write_text("mine")
    with pytest.raises(OutputExists, match="m.gguf exists already"):
        cal.Calibration(config(model, corpus, out))
    assert out.read_text() == "mine"
    cal.calibrate(config(model, corpus, out, force=True))
    assert sidecar.inspect(out)["keys"]["ridge.split"] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]  # no temporary files are left


def test_a_write_that_fails_leaves_nothing(model, corpus, fitted, tmp_path, monkeypatch):
    def fail(path, header_end):
        raise OSError("disk full")

    monkeypatch.setattr(sidecar, "_seal", fail)
    with pytest.raises(OSError, match="disk full"):
        cal.calibrate(config(model, corpus, tmp_path / "m.gguf"))
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_does_not_state_its_file_type(model, tmp_path):
    with lib.Model(model) as m:
        fingerprint = {**m.fingerprint(3), "file_type": -1}
    record = sidecar.Calibration(["a; b"], 1, 1, 1, 1, 0)
    stored, _ = sidecar.encode(np.eye(64), "f32")
    scores = {"input": [0.1]}, {"input": [0.5]}
    made = sidecar.Sidecar(fingerprint, 3, 4, 512, "f32", *scores, [{"weight": stored}], [np.zeros(64)], record)
    sidecar.write(tmp_path / "m.gguf", made)
    assert sidecar.inspect(tmp_path / "m.gguf")["keys"]["ridge.model.file_type"] == 2**32 - 1


def poisoned(model: str, out: Path, name: str, value: float, whole: bool = False) -> str:
    """A copy of a model in which one number of one tensor, or each of them, is `value`."""
    t = next(t for t in gguf.GGUFReader(model).tensors if t.name == name)
    data, n = bytearray(Path(model).read_bytes()), t.n_elements if whole else 1
    data[t.data_offset : t.data_offset + 4 * n] = np.float32(value).tobytes() * n
    out.write_bytes(data)
    return str(out)


def test_field_report_33_activations_that_are_not_finite_are_refused_by_layer(model, corpus, tmp_path):
    bad = poisoned(model, tmp_path / "nan.gguf", "blk.2.ffn_down.weight", np.nan)
    for kind in ("input", "kv"):
        with pytest.raises(StatisticsError, match=r"layer 3: expected finite activations, found nan in row \d+, channel 0"):
            cal.calibrate(config(bad, corpus, tmp_path / "m.gguf", kinds=[kind]))
    worse = poisoned(model, tmp_path / "huge.gguf", "blk.4.attn_k.weight", np.inf)
    with pytest.raises(StatisticsError, match=r"layer 4: expected finite activations"):
        cal.calibrate(config(worse, corpus, tmp_path / "m.gguf", kinds=["kv"]))
    assert not (tmp_path / "m.gguf").exists()


def test_field_report_33_statistics_that_are_empty_or_of_low_rank_are_refused_by_layer(model, corpus, tmp_path):
    def refusal(model=model, corpus=corpus, **kw) -> str:
        with pytest.raises(StatisticsError) as e:
            cal.calibrate(config(model, corpus, tmp_path / "m.gguf", **kw))
        return str(e.value)

    # too few rows
    assert "layer 2: expected at least 128 rows to fit" in refusal(n_tokens=100)
    assert "layer 2: expected at least 256 rows to fit (twice its 128 features)" in refusal(n_tokens=200, kinds=["kv_prev"])
    # rows enough, but few that differ
    same = tmp_path / "same"
    same.mkdir()
    for i in range(40):
        (same / f"{i}.txt").write_text("the ring and the river")
    found = refusal(corpus=same, overlap="keep")
    match = re.fullmatch(r"layer 2: expected rows that span at least half of its 64 .*, found (\d+) directions in (\d+) rows: .*", found)
    assert match and int(match[1]) < 32 and int(match[2]) >= 128, found
    # rows that are all alike
    still = poisoned(model, tmp_path / "still.gguf", "token_embd.weight", 0.5, whole=True)
    assert re.match(r"layer 2: its input is the same in all \d+ fitted rows", refusal(model=still))
    silent = poisoned(model, tmp_path / "silent.gguf", "blk.4.attn_v.weight", 0.0, whole=True)
    assert re.match(r"layer 4: its v is the same in all \d+ fitted rows", refusal(model=silent, kinds=["kv"]))
    assert not (tmp_path / "m.gguf").exists()


def test_values_out_of_range_are_refused(model, corpus, tmp_path):
    def refusal(error=RidgefillError, **kw) -> str:
        with pytest.raises(error) as e:
            cal.calibrate(config(model, corpus, tmp_path / "m.gguf", **kw))
        return str(e.value)

    assert refusal(splits=[4]) == "split: expected 1 to 3 for a model of 5 layers, found 4"
    assert "found 0" in refusal(splits=[0])
    assert "each once" in refusal(splits=[2, 2])
    assert refusal(map_type="q5_0") == "map type: expected one of f32, f16, q8_0, q4_1, q4_0, found 'q5_0'"
    assert "sink rows: expected 0 to 127, found 128" in refusal(sink=CTX)
    assert "kinds: expected some of input, input_lr, kv, kv_prev, each once, found k" == refusal(kinds=["k"])
    assert "found kv, kv" in refusal(kinds=["kv", "kv"])
    assert "no such file or folder" in refusal(TextError, text=["/no/such/text"])
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no text found" in refusal(TextError, text=[str(empty)])
    assert "expected 0 to 1, found 1.5" in refusal(kinds=["kv_prev"], prev_share=1.5)
    assert "found 0 and 1" in refusal(TextError, text=[str(corpus / "0.txt")])
    for i in range(3):
        (empty / f"{i}.txt").write_text("a b")
    assert refusal(TextError, text=[str(empty)]) == "expected documents of more than 4 tokens to fit and to hold out, found 0 and 0"
    assert list(tmp_path.glob("*.gguf")) == []


def test_a_width_that_the_map_type_cannot_hold_is_refused_before_the_work(pico_model, corpus, tmp_path):
    odd = pico_model("llama", n_layer=5, head=32, n_head=2, n_head_kv=1, n_embd=80)
    with pytest.raises(RidgefillError, match="q8_0 needs a width that is a multiple of 32, found 80"):
        cal.Calibration(config(odd, corpus, tmp_path / "m.gguf", map_type="q8_0"))


runner = CliRunner()


def test_commands(model, corpus, tmp_path):
    out = str(tmp_path / "m.gguf")
    args = [model, "--out", out, "--split", "2", "--text", str(corpus), "--ctx", "128", "--threads", "1"]
    done = runner.invoke(cli.calibrate_app, [*args, "--json"])
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)[0]
    assert (result["path"], result["split"], result["layers"]) == (out, 2, [3, 4])
    again = runner.invoke(cli.calibrate_app, args)
    assert again.exit_code == 6 and "exists already" in again.stderr and again.stderr.count("\n") == 1
    plain = runner.invoke(cli.calibrate_app, [*args, "--force"])
    assert plain.exit_code == 0 and "4 documents with" in plain.stderr and "held-out R²" in plain.stdout
    assert re.search(r"capture: ([\d,]+) of \1 after \d+ s, [\d,]+/s, about 0 s left", plain.stderr)

    shown = json.loads(runner.invoke(cli.app, ["inspect", out, "--json"]).stdout)
    assert shown["keys"]["ridge.map_type"] == "q8_0"
    assert shown["tensors"]["blk.3.ridge.weight"] == ["q8_0", [64, 64]]
    assert np.allclose(shown["keys"]["ridge.r2"], result["r2"]) and 0 < result["r2_mean"] < 1
    text = runner.invoke(cli.app, ["inspect", out])
    assert text.exit_code == 0 and "kind input, split 2 of 5 layers" in text.stdout and "book 0; CC0-1.0" in text.stdout


def test_commands_for_kinds(model, corpus, tmp_path):
    args = [model, "--out", str(tmp_path / "{kind}.gguf"), "--split", "2", "--text", str(corpus), "--ctx", "128", "--threads", "1"]
    done = runner.invoke(cli.calibrate_app, [*args, "--kind", "kv", "--kind", "kv_prev", "--json"])
    assert done.exit_code == 0, done.output
    kv, kv_prev = json.loads(done.stdout)
    assert (kv["kind"], kv_prev["kind"], kv_prev["path"]) == ("kv", "kv_prev", str(tmp_path / "kv_prev.gguf"))
    plain = runner.invoke(cli.calibrate_app, [*args, "--kind", "kv", "--force"])
    assert plain.exit_code == 0 and "mean held-out R² K 0." in plain.stdout

    shown = json.loads(runner.invoke(cli.app, ["inspect", kv_prev["path"], "--json"]).stdout)
    assert shown["tensors"]["blk.3.ridge.weight"] == ["q8_0", [128, 64]]
    for part in "kv":
        assert np.allclose(shown["keys"][f"ridge.r2_{part}"], kv_prev[f"r2_{part}"])
        assert np.allclose(shown["keys"][f"ridge.lambda_{part}"], kv_prev[f"lambda_{part}"])
    text = runner.invoke(cli.app, ["inspect", kv_prev["path"]]).stdout
    assert "kind kv_prev, split 2 of 5 layers" in text
    row = next(line for line in text.splitlines() if "│ 3 " in line)
    expected = ["3"] + [f"{kv_prev[f'{name}_{part}'][0]:{fmt}}" for part in "kv" for name, fmt in (("lambda", ".2g"), ("r2", ".4f"))]
    assert [cell.strip() for cell in row.strip("│").split("│")] == expected


def test_exit_codes_say_what_was_wrong(model, corpus, tmp_path):
    args = ["--out", str(tmp_path / "m.gguf"), "--split", "2", "--text", str(corpus), "--threads", "1", "--ctx", "128"]
    assert runner.invoke(cli.calibrate_app, [model, "--out", str(tmp_path / "m.gguf")]).exit_code == 2
    assert runner.invoke(cli.calibrate_app, ["/no/model.gguf", *args]).exit_code == 3
    assert runner.invoke(cli.calibrate_app, [model, *args[:4], "--text", "/no/text"]).exit_code == 4
    assert runner.invoke(cli.calibrate_app, [model, *args, "--n-tokens", "50"]).exit_code == 5
    lora = sidecar_files.write_lora(tmp_path / "lora.gguf", arch="llama", n_embd=64)
    refused = runner.invoke(cli.app, ["inspect", str(lora)])
    assert refused.exit_code == 7 and "LoRA" in refused.stderr and refused.stderr.count("\n") == 1
    assert runner.invoke(cli.app, ["inspect", model]).exit_code == 7
    assert runner.invoke(cli.app, ["inspect", "/no/file"]).exit_code == 7


def test_a_full_disk_and_a_read_only_folder_have_a_code_of_their_own(model, corpus, tmp_path, monkeypatch):
    def full(path, header_end):
        raise OSError(errno.ENOSPC, "No space left on device")

    args = arguments(model, corpus, "--out", tmp_path / "m.gguf")
    with monkeypatch.context() as m:
        m.setattr(sidecar, "_seal", full)
        refused = runner.invoke(cli.calibrate_app, [*args, "--json"])
    assert (refused.exit_code, refused.stderr) == (10, "error: No space left on device\n")
    monkeypatch.setattr(sidecar.os, "access", lambda path, mode: False)
    monkeypatch.setattr(cal, "Context", lambda *a, **kw: pytest.fail("found after the work"))
    refused = runner.invoke(cli.calibrate_app, args)
    assert (refused.exit_code, refused.stderr) == (10, f"error: {tmp_path}: no files can be written there\n")
    refused = runner.invoke(cli.calibrate_app, [*args, "--out", "/no/folder/m.gguf"])
    assert (refused.exit_code, refused.stderr) == (10, "error: no such folder: /no/folder\n")
    assert list(tmp_path.iterdir()) == []


def test_maps_for_a_quantised_file_from_a_copy_at_higher_precision(pico_model, corpus, tmp_path):
    """The fingerprint is the served file's; a copy whose weights differ is refused, naming the tensor."""
    served, other = str(pico_model("llama", ftype="q8_0")), str(pico_model("llama", ftype="q8_0", seed=1))
    copy = str(tmp_path / "copy.gguf")
    quantize = [native.loaded_dir() / "llama-quantize", "--allow-requantize", served, copy, "F32"]
    subprocess.run(quantize, check=True, capture_output=True)

    cal.calibrate(config(copy, corpus, tmp_path / "m.gguf", served=served))
    with lib.Model(served) as model, lib.captured_log() as log:
        assert keys_of(tmp_path / "m.gguf")["ridge.model.file_type"] == model.fingerprint(2)["file_type"] != 0
        lib.Maps(model, tmp_path / "m.gguf").close()
    assert not [line for line in log if "another quantisation" in line]

    with pytest.raises(RidgefillError, match=r"copy.gguf is no copy of .*: the values of \S+ differ"):
        cal.calibrate(config(copy, corpus, tmp_path / "n.gguf", served=other))
    deeper = str(pico_model("llama", n_layer=6))
    with pytest.raises(RidgefillError, match=r"tensor blk\.\d\.attn_k\.weight is in one of them only"):
        cal.calibrate(config(copy, corpus, tmp_path / "n.gguf", served=deeper))
    assert not (tmp_path / "n.gguf").exists()
