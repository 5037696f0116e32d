"""Text for the calibrator: records, shared passages, the chat template, the row stride, and what the sidecar says of them."""
from __future__ import annotations

import gzip
import json
import shutil
import sys

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import pico
from calibrate_pico import OPTIONS, SHAPE, SINK, arguments, config, corpus, inputs_by_hand, keys_of, library, model, words  # noqa: F401
from ridgefill import calibrate as cal
from ridgefill import cli, lib, sidecar
from ridgefill.capture import as_conversation, in_share
from ridgefill.errors import RidgeError, RidgefillError, TextError
from ridgefill.overlap import N, Overlap, gram_hashes, overlaps
from ridgefill.prepare import OverlapError
from ridgefill.text import Document, read_documents

runner = CliRunner()


#
# records
#


def test_each_line_of_json_is_a_document(tmp_path):
    lines = [{"text": "one\nmore\u2028same"}, {"text": " ", "id": 7}, {"text": "two", "source": "ignored"}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(x) for x in lines) + "\n\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\r\n'))
    expected = [Document("a.jsonl:1", "one\nmore\u2028same", "a.jsonl"), Document("a.jsonl:3", "two", "a.jsonl")]
    assert read_documents([tmp_path / "a.jsonl"]) == expected
    assert [(d.name, d.text) for d in read_documents([tmp_path])][2:] == [("b.jsonl.gz:1", "three")]


def test_sources_say_of_a_file_of_records_what_each_of_them_is(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    entry = {"file": "a.jsonl", "source": "book", "licence": "CC0-1.0", "partition": "heldout"}
    (tmp_path / "sources.json").write_text(json.dumps([entry]))
    expected = [Document(f"a.jsonl:{i}", text, "book", "CC0-1.0", "heldout") for i, text in ((1, "one"), (2, "two"))]
    assert read_documents([tmp_path]) == expected


@pytest.mark.parametrize(
    "line, found",
    [
        ("{", "line 2: expected a JSON object, found something else"),
        ('{"content": "x", "id": 1}', 'line 2: expected an object with a string "text", found content, id'),
        ('{"text": null}', 'line 2: expected an object with a string "text", found text'),
        ('["text"]', 'line 2: expected an object with a string "text", found list'),
        ('{"text": "\\ud800"}', "line 2: expected text, found half of a surrogate pair"),
    ],
)
def test_lines_without_text_are_refused_by_number(tmp_path, line, found):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(TextError, match=f"a.jsonl, {found}"):
        read_documents([tmp_path / "a.jsonl"])


def test_each_row_of_parquet_is_a_document(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": ["one", None, "two"]}), tmp_path / "a.parquet")
    assert [(d.name, d.text, d.source) for d in read_documents([tmp_path])] == [
        ("a.parquet:1", "one", tmp_path.name),
        ("a.parquet:3", "two", tmp_path.name),
    ]
    parquet.write_table(pyarrow.table({"content": ["x"]}), tmp_path / "b.parquet")
    with pytest.raises(TextError, match='b.parquet: expected a column "text", found content'):
        read_documents([tmp_path / "b.parquet"])
    parquet.write_table(pyarrow.table({"text": [1]}), tmp_path / "b.parquet")
    with pytest.raises(TextError, match='expected strings in column "text", found int64'):
        read_documents([tmp_path / "b.parquet"])
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(TextError, match="b.parquet cannot be read"):
        read_documents([tmp_path / "b.parquet"])


def test_without_pyarrow_parquet_is_refused_and_the_rest_is_read(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.txt").write_text("text")
    assert len(read_documents([tmp_path])) == 1
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(TextError, match="b.parquet: parquet files are read with pyarrow, which is missing: pip install pyarrow"):
        read_documents([tmp_path])


def test_records_are_calibrated_on_like_files(model, corpus, tmp_path):
    """The same maps from the documents of a folder and from the lines of a file."""
    texts = [(corpus / f"{i}.txt").read_text() for i in range(6)]
    (tmp_path / "text").mkdir()
    for i, text in enumerate(texts):
        (tmp_path / "text" / f"{i}.txt").write_text(text)
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    a, b = (cal.calibrate(config(model, tmp_path / t, tmp_path / f"{t}.gguf"))[0] for t in ("text", "text.jsonl"))
    assert (a.r2, a.lambdas, a.n_tokens) == (b.r2, b.lambdas, b.n_tokens)
    assert keys_of(b.path)["ridge.calibration.sources"] == ["text.jsonl; licence not stated"]


#
# shared passages
#

tokens = st.lists(st.integers(0, 3), max_size=3 * N)


@settings(max_examples=150)
@given(st.lists(tokens, min_size=1, max_size=4), st.lists(tokens, min_size=1, max_size=4), st.data())
def test_overlaps_are_those_found_by_comparing_every_run(documents, others, data):
    source = data.draw(st.sampled_from(others))
    length = data.draw(st.integers(0, len(source)))
    start = data.draw(st.integers(0, len(source) - length))
    documents = [*documents, data.draw(tokens) + source[start : start + length] + data.draw(tokens)]

    def runs(t: list[int]) -> list[tuple]:
        return [tuple(t[i : i + N]) for i in range(len(t) - N + 1)] if len(t) >= N else [tuple(t)] if t else []

    expected = []
    for i, d in enumerate(documents):
        for j, other in enumerate(others):
            shared = [k for k, run in enumerate(runs(d)) if run in set(runs(other))]
            if shared:
                expected.append(Overlap(i, j, shared[0], min(N, len(d))))
    assert overlaps(documents, others) == expected


def test_different_runs_have_different_hashes():
    rng = np.random.default_rng(0)
    hashes = gram_hashes(rng.integers(0, 2, 100_000))  # of 2^50 possible runs
    assert len(np.unique(hashes)) == len(hashes)


def copy_of(corpus, folder):
    shutil.copytree(corpus, folder)
    return folder


@pytest.fixture
def mixed(corpus, tmp_path):
    """A copy of the corpus in which 1 (to fit) shares a passage with 5 (held out) and 2 (to fit) with 6 (for evaluation)."""
    folder = copy_of(corpus, tmp_path / "mixed")
    passage = words(60, 100)
    for name, text in (("1", f"{words(100, 1)} {passage}"), ("5", f"{passage} {words(100, 5)}")):
        (folder / f"{name}.txt").write_text(text)
    (folder / "6.txt").write_text((folder / "2.txt").read_text()[-300:])
    return folder


def test_text_that_is_fitted_and_held_out_or_for_evaluation_is_refused_by_name(model, mixed, tmp_path):
    with pytest.raises(OverlapError) as e:
        cal.Calibration(config(model, mixed, tmp_path / "m.gguf"))
    message = str(e.value)
    assert message.startswith("expected no 50 tokens in a row in both of two documents that are kept apart, found some in 2 pairs: ")
    assert "1.txt (to fit) and 5.txt (held out): '" in message and "2.txt (to fit) and 6.txt (for evaluation): '" in message
    assert words(60, 100)[:30].split(" ", 1)[1] in message  # the passage itself
    assert message.endswith("--overlap drop leaves out the first document of each pair, --overlap keep goes on with both")
    refused = runner.invoke(cli.calibrate_app, arguments(model, mixed, "--out", tmp_path / "m.gguf"))
    assert refused.exit_code == 9 and refused.stderr == f"error: {message}\n"


def test_documents_that_share_text_are_dropped_on_request(model, mixed, corpus, tmp_path):
    said = []
    with cal.Calibration(config(model, mixed, tmp_path / "m.gguf", overlap="drop"), said.append) as run:
        fit, heldout = run.prepared.documents
        assert sorted(d.name for d in fit) == ["0.txt", "3.txt"] and sorted(d.name for d in heldout) == ["4.txt", "5.txt"]
        run.run()
    assert [line.split(":")[:2] for line in sorted(said)] == [
        ["left out", " 1.txt (to fit) and 5.txt (held out)"],
        ["left out", " 2.txt (to fit) and 6.txt (for evaluation)"],
    ]
    assert sorted(keys_of(tmp_path / "m.gguf")["ridge.calibration.options"]) == [*OPTIONS, "dropped=1.txt", "dropped=2.txt"]
    # the same as without these documents
    entries = json.loads((mixed / "sources.json").read_text())
    (mixed / "sources.json").write_text(json.dumps([e for e in entries if e["file"] not in ("1.txt", "2.txt")]))
    cal.calibrate(config(model, mixed, tmp_path / "n.gguf"))
    for il, (weight, bias) in sidecar.maps(tmp_path / "n.gguf").items():
        assert all(np.array_equal(a, b) for a, b in zip(sidecar.maps(tmp_path / "m.gguf")[il], (weight, bias)))


def test_documents_that_share_text_are_kept_on_request(model, mixed, tmp_path):
    said = []
    with cal.Calibration(config(model, mixed, tmp_path / "m.gguf", overlap="keep"), said.append) as run:
        assert len(run.prepared.documents[0]) == 4
        run.run()
    assert len(said) == 2 and said[0].startswith("shared text: ")
    assert keys_of(tmp_path / "m.gguf")["ridge.calibration.options"] == [*OPTIONS, "overlap=keep"]
    with pytest.raises(RidgefillError, match="overlap: expected one of refuse, drop, keep, found 'ignore'"):
        cal.Calibration(config(model, mixed, tmp_path / "n.gguf", overlap="ignore"))


def test_dropping_goes_on_until_nothing_is_shared(model, corpus, tmp_path):
    """With a limit on tokens another document moves up to take the place of one that was dropped; it shares text too."""
    folder = copy_of(corpus, tmp_path / "text")
    (folder / "6.txt").write_text("\n".join((folder / f"{i}.txt").read_text()[50:300] for i in (0, 1, 2)))
    with cal.Calibration(config(model, folder, tmp_path / "m.gguf", overlap="drop", n_tokens=200)) as run:
        assert [d.name for d in run.prepared.documents[0]] == ["3.txt"]
        first = len(run.prepared.dropped)
    (folder / "6.txt").write_text("\n".join((folder / f"{i}.txt").read_text()[50:300] for i in range(4)))
    with pytest.raises(TextError, match="expected documents of more than 4 tokens to fit and to hold out, found 0 and 2"):
        cal.Calibration(config(model, folder, tmp_path / "m.gguf", overlap="drop", n_tokens=200))
    assert first >= 1


def test_evaluation_text_that_is_given_is_kept_apart(model, corpus, tmp_path):
    (tmp_path / "judged.txt").write_text("x " + (corpus / "4.txt").read_text()[40:400])
    given = dict(evaluation_text=[str(tmp_path / "judged.txt")])
    with pytest.raises(OverlapError, match=r"4.txt \(held out\) and judged.txt \(for evaluation\)"):
        cal.Calibration(config(model, corpus, tmp_path / "m.gguf", **given))
    cal.calibrate(config(model, corpus, tmp_path / "m.gguf", overlap="drop", **given))
    keys = keys_of(tmp_path / "m.gguf")
    assert keys["ridge.calibration.options"] == [*OPTIONS, "dropped=4.txt", "evaluation_documents=3"]  # with the two of the corpus
    assert keys["ridge.calibration.n_heldout_documents"] == 1
    # of a set of text, what is not for evaluation is not judged on
    cal.Calibration(config(model, corpus, tmp_path / "n.gguf", evaluation_text=[str(corpus)])).__exit__()


#
# chat template and row stride
#


@settings(max_examples=50)
@given(st.integers(1, 400), st.floats(0, 1))
def test_a_share_is_spread_evenly(n, share):
    taken = np.cumsum([in_share(i, share) for i in range(n)])
    assert np.abs(taken - np.arange(1, n + 1) * share).max() <= 1


@settings(max_examples=50)
@given(st.lists(st.text("ab \n", max_size=900), max_size=6))
def test_a_conversation_holds_the_text_by_turns(paragraphs):
    text = "\n\n".join(paragraphs)
    messages = as_conversation(text)
    assert [m["role"] for m in messages] == [("user", "assistant")[i % 2] for i in range(len(messages))]
    assert all(m["content"].strip() for m in messages)
    assert all(len(m["content"]) >= 600 for m in messages[:-1])
    joined = "\n\n".join(m["content"] for m in messages)
    assert joined == text or (text.startswith(joined) and not text[len(joined) :].strip())


@pytest.fixture
def one_long(tmp_path):
    """Documents of several paragraphs, half of which would become a conversation."""
    folder = tmp_path / "long"
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.txt").write_text("\n\n".join(words(150, 10 * i + k) for k in range(2)))
    return folder


def test_a_share_of_the_documents_is_run_as_chat(model, one_long, tmp_path):
    c = config(model, one_long, tmp_path / "m.gguf", chat_share=0.5)
    with cal.Calibration(c) as run, lib.Model(model) as m:
        fit, heldout = run.prepared.documents
        for part, documents in (("fit", fit), ("heldout", heldout)):
            for i, d in enumerate(documents):
                found = [t for k in run.chunks[part] if k.document == i for t in k.tokens]
                turns = [{"role": r, "content": p} for r, p in zip(("user", "assistant"), d.text.split("\n\n"))]
                expected = m.tokenize(m.chat(turns, add_assistant=False), parse_special=True) if i % 2 else m.tokenize(d.text)
                assert found == expected
                assert (1 in found) == bool(i % 2)  # <|im_start|>
        run.run()
    assert keys_of(tmp_path / "m.gguf")["ridge.calibration.options"] == [*OPTIONS, "chat_share=0.5"]


def test_a_model_without_a_chat_template_is_refused(one_long, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf.GGUFWriter, "add_chat_template", lambda self, template: None)
    plain = pico.build(tmp_path / "plain.gguf", "llama", **SHAPE)
    with pytest.raises(RidgeError, match="plain.gguf has no chat template"):
        cal.Calibration(config(plain, one_long, tmp_path / "m.gguf", chat_share=1.0))


def test_row_stride_takes_every_nth_row(model, corpus, tmp_path):
    """Rows 4, 7, 10, ... of each chunk; the row before, of kind kv_prev, is the one before in the text."""
    c = config(model, corpus, tmp_path / "m.gguf", kinds=["kv_prev"], row_stride=3, sums=str(tmp_path / "s.npz"))
    with cal.Calibration(c) as run:
        (result,) = run.run()
        documents = run.prepared.selection.fit
    rows = []
    for inputs in inputs_by_hand(model, documents, [2]):
        n = inputs[2] / np.sqrt((inputs[2] ** 2).mean(1, keepdims=True) + 1e-5)
        rows += [np.concatenate([n[t], n[t - 1]]) for t in range(SINK, len(n), 3)]
    rows = np.array(rows)
    assert result.n_tokens == len(rows)
    with np.load(tmp_path / "s.npz") as z:
        about = rows - z["kv_prev/fit/2/origin_x"]
        assert np.allclose(z["kv_prev/fit/2/xx"], about.T @ about, rtol=1e-5, atol=1e-5 * np.abs(about.T @ about).max())
    assert keys_of(tmp_path / "m.gguf")["ridge.calibration.options"] == [*OPTIONS, "row_stride=3"]
    for bad, message in ((dict(row_stride=0), "row stride: expected at least 1"), (dict(chat_share=1.5), "chat share: expected 0 to 1")):
        with pytest.raises(RidgefillError, match=message):
            cal.Calibration(config(model, corpus, tmp_path / "n.gguf", **bad))


#
# the record
#


def test_the_library_reads_a_sidecar_with_options_and_ordinary_ones_have_none(model, corpus, tmp_path):
    cal.calibrate(config(model, corpus, tmp_path / "a.gguf", ctx=2048))
    cal.calibrate(config(model, corpus, tmp_path / "b.gguf", ctx=2048, row_stride=2))
    assert "ridge.calibration.options" not in sidecar.inspect(tmp_path / "a.gguf")["keys"]
    assert sidecar.inspect(tmp_path / "b.gguf")["keys"]["ridge.calibration.options"] == ["row_stride=2"]
    with lib.Model(model) as m, lib.Maps(m, tmp_path / "b.gguf") as maps:
        assert maps.split == 2


def test_commands_pass_the_options_on(model, one_long, corpus, tmp_path):
    args = arguments(model, one_long, "--out", tmp_path / "m.gguf", "--row-stride", 2, "--chat-share", 0.25)
    more = ["--evaluation-text", str(corpus), "--overlap", "drop", "--heldout-documents", "2"]
    done = runner.invoke(cli.calibrate_app, [*args, *more])
    assert done.exit_code == 0, done.output
    found = keys_of(tmp_path / "m.gguf")["ridge.calibration.options"]
    assert found == [*OPTIONS, "heldout_documents=2", "row_stride=2", "chat_share=0.25", "evaluation_documents=2"]
    assert "tokens/s in the first chunk: about" in done.stderr
