"""Faults planted into fills of a model that recalls: an evaluation must see each of them as a clear drop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import sidecar_files as sf
from ridgefill import calibrate, lib
from ridgefill.evaluation import Arm, report, stats, study, texts
from ridgefill.evaluation.journal import Journal

MODEL = Path(__file__).resolve().parents[1] / "models" / "pico" / "pico-qwen3-s" / "pico-qwen3-s.f16.gguf"
SPLIT, N = 5, 8  # the layer that looks facts up is 6
FILL = Arm("fill", SPLIT, kind="kv")
ARMS = ("exact", "noise", FILL.name)
SETTINGS = study.Settings(
    documents=N, prefix=512, tail=96, scored=64, items=N, rows=512, item_tail=96, loss_arms=ARMS, item_arms=ARMS, share_margin=0.3
)


@pytest.fixture(scope="module")
def maps(patched_lib, text_set, tmp_path_factory) -> Path:
    lib.load(patched_lib)
    out = tmp_path_factory.mktemp("maps") / "good.gguf"
    config = calibrate.Config(
        model=str(MODEL), out=str(out), splits=[SPLIT], kinds=["kv"], text=[str(text_set)], n_tokens=16_000, heldout_documents=2,
        map_type="f32", overlap="drop", threads=1, score=False,
    )  # fmt: skip
    with calibrate.Calibration(config) as run:
        run.run()
    return out


@pytest.fixture(scope="module")
def measure(maps, text_set, tmp_path_factory):
    """measure(maps, stale=False) -> result of a study with these maps."""

    def get(path: Path, stale: bool = False) -> dict:
        with lib.Model(MODEL) as model, lib.Maps(model, path) as m:
            with study.Study(model, [m], texts.documents(text_set), ["loss", "single"], SETTINGS, n_threads=1) as s:
                if stale:
                    plant_stale_rows(s)
                return s.run(Journal(tmp_path_factory.mktemp("journal") / "j", {}))

    return get


@pytest.fixture(scope="module")
def good(measure, maps) -> dict:
    return measure(maps)


def plant_stale_rows(s: study.Study) -> None:
    """Each fill leaves in its filled rows what the prompt before it had there."""
    before, prefill = [], s.engine._main.prefill

    def stale(prompt, **kw):
        mixed = list(prompt)
        if before:
            end = min(len(before[0]), len(prompt)) - kw["n_tail"]
            mixed[s.engine.n_sink : end] = before[0][s.engine.n_sink : end]
        before[:] = [list(prompt)]
        return prefill(mixed, **kw)

    s.engine._main.prefill = stale


def test_a_sound_fill_recalls_what_exact_recalls(good):
    s = good["single"]["summary"]
    assert s["exact"]["hits"] == s["noise"]["hits"] == N and s[FILL.name]["hits"] >= N - 1
    loss = good["loss"]["summary"]
    assert loss[FILL.name]["verdict"] == loss["noise"]["verdict"] == "equal"
    assert loss["noise"]["kl"]["value"] < loss[FILL.name]["kl"]["value"] / 3


def drop(good: dict, bad: dict) -> None:
    """The faulty fill answers less, loses more, and is not taken for exact."""
    hits = [{r["seed"]: r["hit"] for r in x["single"]["items"] if r["arm"] == FILL.name} for x in (good, bad)]
    assert stats.mcnemar(*(np.array(list(h.values())) for h in hits)).p < 0.05
    ours, theirs = (x["loss"]["summary"][FILL.name] for x in (good, bad))
    assert theirs["kl"]["low"] > 3 * ours["kl"]["high"] and theirs["verdict"] != "equal"
    assert bad["single"]["summary"]["exact"]["hits"] == N  # the fault lies in the fill alone
    assert report.by_arm(bad["loss"]["items"], "document")["exact"] == report.by_arm(good["loss"]["items"], "document")["exact"]


def test_maps_of_a_layer_applied_in_the_next_one_are_seen(good, measure, maps, tmp_path):
    def shift(raw: sf.RawGguf) -> None:
        for part in ("weight", "bias"):
            six, seven = (raw.tensor(f"blk.{il}.ridge.{part}") for il in (6, 7))
            six.data, seven.data = seven.data, six.data

    bad = tmp_path / "shifted.gguf"
    bad.write_bytes(sf.operated(maps.read_bytes(), shift))
    drop(good, measure(bad))


def test_stale_rows_are_seen(good, measure, maps):
    drop(good, measure(maps, stale=True))
