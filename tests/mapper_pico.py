"""What the tests of mappers share: two pico models of unequal shapes, the corpus of the calibrator's tests, rows by hand."""
from __future__ import annotations

import json
import string
from pathlib import Path

import numpy as np
import pytest

from calibrate_pico import CTX, SINK, inputs_by_hand, library  # noqa: F401
from ridgefill.capture import select
from ridgefill.lib import Model
from ridgefill.mapper import fit
from ridgefill.mapper.models import KeysValues
from ridgefill.text import read_documents

SOURCE = dict(n_layer=4, head=32, n_head=4, n_head_kv=1)  # width 128; 32 keys a layer
TARGET = dict(n_layer=3, head=64, n_head=2, n_head_kv=2)  # width 128; 128 keys a layer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Six documents of three chunks each, of many tokens: keys of layer 0 span no more directions than there are tokens.

    Of the two that are held out one is kept for scores.
    """
    folder, entries, rng = tmp_path_factory.mktemp("corpus"), [], np.random.default_rng(0)
    for i in range(6):
        (folder / f"{i}.txt").write_text("".join(rng.choice(list(string.ascii_letters + string.digits + string.punctuation + " "), 350)))
        partition = "heldout" if i > 3 else "calibration"
        entries.append({"file": f"{i}.txt", "source": f"book {i}", "licence": "CC0-1.0", "partition": partition})
    (folder / "sources.json").write_text(json.dumps(entries))
    return folder


@pytest.fixture(scope="module")
def source(pico_model) -> str:
    return str(pico_model("llama", **SOURCE))


@pytest.fixture(scope="module")
def target(pico_model) -> str:
    """Of another architecture, with head norms, and of other heads and depth."""
    return str(pico_model("qwen3", **TARGET))


def config(source, target, corpus, out, **kw) -> fit.Config:
    """Keywords of fit.Wanted go there."""
    names = ("both", "select", "criterion", "ks", "lambdas", "map_type", "tail", "force")
    wanted = {"map_type": "f32", **{name: kw.pop(name) for name in names if name in kw}}
    return fit.Config(**{
        "source": str(source), "target": str(target), "text": [str(corpus)], "wanted": fit.Wanted(out=str(out), **wanted), "sink": SINK,
        "ctx": CTX, "threads": 1, **kw,
    })  # fmt: skip


def arguments(source, target, corpus, *more: object) -> list[str]:
    """Of `ridgefill`, as config() has them."""
    args = ["mapper", "fit", "--source", source, "--target", target, "--text", corpus, "--map-type", "f32", "--ctx", CTX, "--threads", 1]
    return [str(a) for a in [*args, *more]]


def rows_by_hand(path: str, corpus: Path, part: str, partition: str, previous: bool = False, n_ctx: int = CTX) -> list[np.ndarray]:
    """Keys ("k") or values of every layer [n, width] over all rows after the sinks of all chunks of a part, float64.

    partition  of the documents: "fit", "heldout" or "score"

    With `previous` those of the row before each.
    """
    documents = getattr(select(read_documents([str(corpus)]), 0, scored=True), partition)
    with Model(path) as model:
        kv = KeysValues(model)
    chunks = [kv({il: x.astype(np.float32) for il, x in inputs.items()})[part] for inputs in inputs_by_hand(path, documents, kv.layers, n_ctx)]
    chosen = slice(SINK - 1, -1) if previous else slice(SINK, None)
    return [np.concatenate([c[il][chosen] for c in chunks]).astype(np.float64) for il in kv.layers]


def side_by_side(rows: list[np.ndarray], layers) -> np.ndarray:
    return np.concatenate([rows[il] for il in layers], axis=1)


def ridge_by_hand(x: np.ndarray, y: np.ndarray, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """W [d_out, d_in] and b by least squares on rows, centred and with the penalty as further rows."""
    mx, my = x.mean(0), y.mean(0)
    xc, yc = x - mx, y - my
    alpha = lam * (xc**2).sum() / x.shape[1]
    xa = np.concatenate([xc, np.sqrt(alpha) * np.eye(x.shape[1])])
    ya = np.concatenate([yc, np.zeros((x.shape[1], y.shape[1]))])
    w = np.linalg.lstsq(xa if lam else xc, ya if lam else yc, rcond=None)[0].T
    return w, my - w @ mx


def r2_by_head(y: np.ndarray, predicted: np.ndarray, n_heads: int) -> np.ndarray:
    def squares(x: np.ndarray) -> np.ndarray:
        return (x**2).sum(0).reshape(n_heads, -1).sum(1)

    return 1 - squares(y - predicted) / squares(y - y.mean(0))
