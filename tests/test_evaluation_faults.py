"""Faults planted into fills of a model that recalls: an evaluation must see each of them as a clear drop."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sidecar_files as sf
from ridgefill import calibrate, lib
from ridgefill.attention import Attention
from ridgefill.evaluation import Arm, report, stats, study, texts
from ridgefill.evaluation.journal import Journal
from ridgefill.splice import replace_keys

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
    """measure(maps, plant) -> result of a study with these maps, in which plant(study) put a fault."""

    def get(path: Path, plant=lambda s: None, sets=("loss", "single"), settings: study.Settings = SETTINGS) -> dict:
        with lib.Model(MODEL) as model, lib.Maps(model, path) as m:
            with study.Study(model, [m], texts.documents(text_set), sets, settings, n_threads=1) as s:
                plant(s)
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


def plant_unrotated_keys(s: study.Study) -> None:
    """Each fill writes the keys of its filled rows without their rotation."""
    ctx, prefill, rotation = s.engine._main, s.engine._main.prefill, Attention(MODEL).rotation

    def unrotated(prompt, **kw):
        done, keys = prefill(prompt, **kw).run(), {}
        for il in range(SPLIT, ctx.model.n_layer):
            keys[il] = ctx.get_kv(0, il, "k", 0, done.n_done)
            keys[il][done.filled] = rotation(keys[il][done.filled], -done.filled)
        replace_keys(ctx, 0, 0, keys)
        return SimpleNamespace(run=lambda: done)

    ctx.prefill = unrotated


def test_a_sound_fill_recalls_what_exact_recalls(good):
    s = good["single"]["summary"]
    assert s["exact"]["hits"] == s["noise"]["hits"] == N and s[FILL.name]["hits"] >= N - 1
    loss = good["loss"]["summary"]
    assert loss[FILL.name]["verdict"] == loss["noise"]["verdict"] == "equal"
    assert loss["noise"]["kl"]["value"] < loss[FILL.name]["kl"]["value"] / 3


def drop(good: dict, bad: dict) -> None:
    """The faulty fill answers less, loses more, and is not taken for exact."""
    loses(good, bad)
    hits = [{r["seed"]: r["hit"] for r in x["single"]["items"] if r["arm"] == FILL.name} for x in (good, bad)]
    assert stats.mcnemar(*(np.array(list(h.values())) for h in hits)).p < 0.05
    assert bad["single"]["summary"]["exact"]["hits"] == N  # the fault lies in the fill alone


def loses(good: dict, bad: dict) -> None:
    ours, theirs = (x["loss"]["summary"][FILL.name] for x in (good, bad))
    assert theirs["kl"]["low"] > 3 * ours["kl"]["high"] and theirs["verdict"] != "equal"
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
    drop(good, measure(maps, plant_stale_rows))


def test_keys_without_rotation_are_seen(measure, maps):
    """Such a key is that of a row at position 0, as far away as any. Facts are found by content at any distance, so hits stay; what
    is missed are the rows just in front of the tail, and the shorter the tail the more.
    """
    settings = dataclasses.replace(SETTINGS, tail=8, scored=32)
    good, bad = (measure(maps, *plant, sets=["loss"], settings=settings) for plant in ((), (plant_unrotated_keys,)))
    assert good["loss"]["summary"][FILL.name]["verdict"] == "equal"
    loses(good, bad)
