"""What the tests of the calibrator share: a pico model, a corpus of eight documents, a configuration for both."""
from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from ridgefill import calibrate as cal
from ridgefill import lib

SHAPE = dict(n_layer=5, head=32, n_head=2, n_head_kv=1)  # width 64
SINK, CTX = 4, 128
OPTIONS = [f"ctx={CTX}"]  # recorded of config(), as not at its default
WORDS = "the and ring inn sword town is of thin other hint worn fasten river cat 7 12 500 a in on he she it".split()


@pytest.fixture(scope="module", autouse=True)
def library(patched_lib):
    lib.load(patched_lib)


@pytest.fixture(scope="module")
def model(pico_model) -> str:
    return str(pico_model("llama", **SHAPE))


def words(n: int, seed: int) -> str:
    """Text of n words; texts of two seeds share no long passage."""
    return " ".join(np.random.default_rng(seed).choice(WORDS, n))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Eight documents of a few hundred tokens; two are held out, the last two for evaluation only."""
    folder, entries = tmp_path_factory.mktemp("corpus"), []
    for i in range(8):
        (folder / f"{i}.txt").write_text(words(130, i))
        partition = "evaluation" if i > 5 else "heldout" if i > 3 else "calibration"
        entries.append({"file": f"{i}.txt", "source": f"book {i}", "licence": "CC0-1.0", "partition": partition})
    (folder / "sources.json").write_text(json.dumps(entries))
    return folder


def inputs_by_hand(model_path: str, documents, layers, n_ctx: int = CTX) -> Iterator[dict[int, np.ndarray]]:
    """Inputs [n, d] of layers of each chunk from position 0, float64: captured here, not by what is tested."""
    with lib.Model(model_path) as m, lib.Context(m, n_ctx, n_threads=1) as ctx:
        ctx.capture(layers)
        for d in documents:
            tokens = m.tokenize(d.text)
            for at in range(0, len(tokens), n_ctx):
                if len(piece := tokens[at : at + n_ctx]) > SINK:
                    ctx.clear()
                    ctx.decode(piece)
                    yield {il: ctx.layer_inputs(il).astype(np.float64) for il in layers}


def config(model, corpus, out, **kw) -> cal.Config:
    return cal.Config(**{
        "model": str(model), "out": str(out), "splits": [2], "text": [str(corpus)], "map_type": "f32", "sink": SINK,
        "ctx": CTX, "threads": 1, "score": False, **kw,
    })  # fmt: skip


def arguments(model, corpus, *more: object, split: int = 2) -> list[str]:
    """Of ridgefill-calibrate, as config() has them."""
    args = [model, "--split", split, "--text", corpus, "--map-type", "f32", "--ctx", CTX, "--threads", 1, "--no-score", *more]
    return [str(a) for a in args]


def keys_of(path) -> dict:
    return {k: f.contents() for k, f in gguf.GGUFReader(path).fields.items() if not k.startswith("GGUF.")}


def hashes(folder: Path, pattern: str = "*.gguf") -> dict[str, str]:
    """sha256 by name of the files in a folder."""
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.glob(pattern))}
