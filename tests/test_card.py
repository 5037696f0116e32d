"""Model cards and plots of sidecars."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from calibrate_pico import arguments, config, corpus, library, model, words  # noqa: F401
from ridgefill import calibrate as cal
from ridgefill import card, cli, sidecar

runner = CliRunner()


@pytest.fixture(scope="module")
def made(model, corpus, tmp_path_factory):  # noqa: F811
    """{"scored", "plain": sidecar}"""
    folder = tmp_path_factory.mktemp("maps")
    c = dict(kinds=["kv_prev"], map_type="q8_0", prev_share=0.25, row_stride=2, overlap="drop")
    for name, score in (("scored", True), ("plain", False)):
        cal.calibrate(config(model, corpus, folder / f"{name}.gguf", score=score, **c))
    return {name: folder / f"{name}.gguf" for name in ("scored", "plain")}


def write(made, tmp_path, name: str = "scored", *more: str, code: int = 0):
    path = tmp_path / "maps.gguf"
    if not path.exists():
        shutil.copy(made[name], path)
    done = runner.invoke(cli.app, ["card", str(path), *more])
    assert done.exit_code == code, done.output
    return done


def is_png(path: Path) -> bool:
    return path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 5000


def test_card_says_what_the_file_says(made, tmp_path):
    assert json.loads(write(made, tmp_path, "scored", "--json").stdout) == {
        "card": str(tmp_path / "maps.md"),
        "plots": str(tmp_path / "maps.png"),
    }
    text, found = (tmp_path / "maps.md").read_text(), sidecar.inspect(tmp_path / "maps.gguf")
    assert is_png(tmp_path / "maps.png") and "](maps.png)" in text
    keys = found["keys"]
    for row in sidecar.measured_scores(keys):
        cells = [str(row["layer"])] + [f"{row[n]:.3f}" for n in ("r2_k", "r2_v", "norm_k", "norm_v", "attention")]
        assert f"| {' | '.join(cells)} |" in text
    for source in keys["ridge.calibration.sources"]:
        assert f"- {source}\n" in text
    assert "- book 0; CC0-1.0\n" in text and found["sha256"] in text
    assert "kind kv_prev, split 2 of 5 layers" in text and "pico llama" in text
    assert "llama-server -m MODEL.gguf --ridge-maps maps.gguf --ridge-tail 512" in text
    assert str(tmp_path) not in text  # a card travels with its file


def test_the_command_on_the_card_makes_the_same_maps(made, model, corpus, tmp_path):  # noqa: F811
    write(made, tmp_path)
    command = re.search(r"^    (ridgefill-calibrate .*)$", (tmp_path / "maps.md").read_text(), re.M)[1]
    args = command.replace("MODEL.gguf", model).replace("TEXT", str(corpus)).split()[1:]
    done = runner.invoke(cli.calibrate_app, [*args, "--out", str(tmp_path / "again.gguf"), "--ctx", "128", "--threads", "1"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "again.gguf").read_bytes() == made["scored"].read_bytes()


def test_a_file_without_scores_has_a_card_too(made, tmp_path):
    write(made, tmp_path, "plain")
    text = (tmp_path / "maps.md").read_text()
    assert "| layer | λ K | held-out R² K | λ V | held-out R² V |" in text and "ridgefill score" in text
    assert is_png(tmp_path / "maps.png")


def test_cards_and_pictures_are_not_overwritten_unless_forced(made, tmp_path):
    (tmp_path / "maps.md").write_text("mine")
    refused = write(made, tmp_path, code=6)
    assert refused.exit_code == 6 and "maps.md exists already" in refused.stderr
    assert (tmp_path / "maps.md").read_text() == "mine" and not (tmp_path / "maps.png").exists()
    write(made, tmp_path, "scored", "--force")
    assert "Ridge maps" in (tmp_path / "maps.md").read_text()
    (tmp_path / "maps.md").unlink()
    assert "maps.png exists already" in write(made, tmp_path, code=6).stderr
    (tmp_path / "plots").mkdir()
    write(made, tmp_path, "scored", "--plots", str(tmp_path / "plots"))
    assert is_png(tmp_path / "plots" / "maps.png") and "](plots/maps.png)" in (tmp_path / "maps.md").read_text()


def test_without_matplotlib_there_is_a_card_without_plots(made, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "without plots, for which matplotlib is missing" in write(made, tmp_path).stderr
    assert not (tmp_path / "maps.png").exists() and ".png" not in (tmp_path / "maps.md").read_text()
    asked = write(made, tmp_path, "scored", "--force", "--plots", str(tmp_path), code=1)
    assert "pip install 'ridgefill[plots]'" in asked.stderr


def test_calibration_writes_cards_when_asked(model, corpus, tmp_path, monkeypatch):  # noqa: F811
    out = tmp_path / "{kind}.gguf"
    args = arguments(model, corpus, "--out", out, "--kind", "kv", "--kind", "input", "--card")
    done = runner.invoke(cli.calibrate_app, args)
    assert done.exit_code == 0, done.output
    assert sorted(p.name for p in tmp_path.iterdir()) == ["input.gguf", "input.md", "input.png", "kv.gguf", "kv.md", "kv.png"]
    for name in ("kv.gguf", "input.gguf"):
        (tmp_path / name).unlink()
    monkeypatch.setattr(cal, "Context", lambda *a, **kw: pytest.fail("found after the work"))
    refused = runner.invoke(cli.calibrate_app, args)
    assert refused.exit_code == 6 and "kv.md exists already" in refused.stderr


def test_a_run_that_goes_on_leaves_another_text_of_a_cards_name(model, corpus, tmp_path):  # noqa: F811
    args = arguments(model, corpus, "--out", tmp_path / "maps.gguf", "--kind", "kv", "--card", "--sums", tmp_path / "sums.npz")
    done = runner.invoke(cli.calibrate_app, args)
    assert done.exit_code == 0, done.output
    card = tmp_path / "maps.md"
    written = card.read_text()
    assert runner.invoke(cli.calibrate_app, args).exit_code == 0 and card.read_text() == written
    card.write_text("mine")
    refused = runner.invoke(cli.calibrate_app, args)
    assert refused.exit_code == 6 and "maps.md exists already" in refused.stderr and card.read_text() == "mine"
    assert runner.invoke(cli.calibrate_app, [*args, "--force"]).exit_code == 0 and card.read_text() == written


def test_a_card_is_not_made_of_what_is_no_sidecar(model):  # noqa: F811
    refused = runner.invoke(cli.app, ["card", model])
    assert refused.exit_code == 7 and "it is a model" in refused.stderr and not Path(model).with_suffix(".md").exists()


def test_every_kind_is_described():
    assert set(sidecar.PARTS) <= set(card.PREDICTED)
