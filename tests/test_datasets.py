"""Text from data sets (`--text hf:NAME`), here of local files, which the same library streams in the same way."""
from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calibrate_pico import arguments, config, corpus, keys_of, library, model, words  # noqa: F401
from ridgefill import calibrate as cal
from ridgefill import cli
from ridgefill.errors import TextError
from ridgefill.text import Limit, read_documents

runner = CliRunner()
needs_datasets = pytest.mark.skipif(
    not importlib.util.find_spec("datasets"), reason="datasets is not installed (pip install -e '.[datasets]')"
)
N_ROWS = 30


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(r) + "\n" for r in rows)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A data set of two splits; a row of the first one in ten is empty."""
    folder = tmp_path_factory.mktemp("data") / "prose"
    folder.mkdir()
    rows = [{"id": i, "text": "" if i % 10 == 9 else words(120, i)} for i in range(N_ROWS)]
    (folder / "train.jsonl").write_text(lines(rows))
    (folder / "test.jsonl").write_text(lines([{"id": 0, "text": None}, {"id": 1, "text": "the last one"}]))
    return folder


def by_words(n: int) -> Limit:
    return Limit(n, lambda text: len(text.split()))


@needs_datasets
@pytest.mark.parametrize("wanted, rows", [(1, 1), (120, 1), (121, 2), (120 * 9 + 1, 11), (10**9, N_ROWS)])
def test_rows_are_taken_in_order_until_there_is_enough(folder, wanted, rows):
    found = read_documents([f"hf:{folder}"], by_words(wanted))
    assert [d.name for d in found] == [f"hf:prose:{i}" for i in range(1, rows + 1) if i % 10]
    assert [d.text for d in found] == [words(120, i) for i in range(rows) if i % 10 != 9]
    assert {(d.source, d.licence, d.partition) for d in found} == {("hf:prose", "licence not stated", "")}


@needs_datasets
def test_parquet_and_a_named_split(folder, tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", "two"]}), tmp_path / "train.parquet")
    assert [d.text for d in read_documents([f"hf:{tmp_path}"], by_words(9))] == ["one", "two"]
    (d,) = read_documents([f"hf:{folder}:default:test"], by_words(9))
    assert (d.name, d.text) == ("hf:prose:default:test:2", "the last one")


@needs_datasets
def test_calibration_reads_no_more_than_it_needs(model, folder, tmp_path):
    c = config(model, f"hf:{folder}", tmp_path / "m.gguf", n_tokens=1500, score=False)
    with cal.Calibration(c) as run:
        (result,) = run.run()
        documents = [*run.prepared.selection.fit, *run.prepared.selection.heldout]
        lengths = {int(d.name.rpartition(":")[2]): len(run.model.tokenize(d.text)) for d in documents}
    assert sum(lengths.values()) >= 2250 > sum(lengths.values()) - lengths[max(lengths)]  # half as much again as is fitted
    assert max(lengths) < N_ROWS and len(run.prepared.selection.heldout) == round(len(documents) / 6)
    assert 1200 < result.n_tokens <= 1500
    assert keys_of(result.path)["ridge.calibration.sources"] == ["hf:prose; licence not stated"]


@needs_datasets
@pytest.mark.parametrize(
    "name, message",
    [
        ("hf:{folder}:other", "cannot be read: .*other"),
        ("hf:{folder}:default:none", "cannot be read: .*none"),
        ("hf:{folder}:a:b:c", "data set: expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT, found"),
        ("hf:", "data set: expected hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT, found hf:"),
        ("hf:{folder}/nowhere", "cannot be read: "),
        ("hf:{other}", r'row 1: expected a string in column "text", found content \(str\), n \(int\)'),
        ("hf:{numbers}", r'row 2: expected a string in column "text", found text \(int\)|cannot be read'),
    ],
)
def test_data_sets_that_cannot_be_used(folder, tmp_path, name, message):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.jsonl").write_text(lines([{"content": "words", "n": 1}]))
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "train.jsonl").write_text(lines([{"text": None}, {"text": 7}]))
    with pytest.raises(TextError, match=message):
        read_documents([name.format(folder=folder, other=tmp_path / "other", numbers=tmp_path / "numbers")], by_words(9))


def test_an_amount_is_needed(model, corpus, folder, tmp_path):
    failed = runner.invoke(cli.calibrate_app, arguments(model, f"hf:{folder}", "--out", tmp_path / "m.gguf"))
    assert failed.exit_code == 4
    assert "a data set is read until there is enough: say how much with --n-tokens" in failed.stderr.replace("\n", " ")
    with pytest.raises(TextError, match="expected files or folders here, which are read to their end, found a data set"):
        cal.Calibration(config(model, corpus, tmp_path / "m.gguf", evaluation_text=[f"hf:{folder}"]))


def test_the_missing_package_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(TextError, match="data sets are read with the package datasets, which is missing: pip install datasets"):
        read_documents([f"hf:{folder}"], by_words(9))
