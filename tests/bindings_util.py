"""What the tests of `ridgefill.Llama` share: objects, prompts, and answers to the bit.

The model is a pico one and the maps are random, so that a single filled row in an exact answer shows. Batch, ubatch and
threads are fixed: equality is of bits.
"""
from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import server_util
from ridgefill import lib
from server_util import BATCH, N, TAIL, UBATCH
from server_util import maps, model  # noqa: F401  (fixtures)

ROOT = Path(__file__).resolve().parents[1]
SETTINGS = {"n_ctx": 2048, "n_batch": BATCH, "n_ubatch": UBATCH, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
RIDGE = ["ridge_mode", "ridge_tail", "ridge_rows", "ridge_budget", "ridge_seed", "ridge_min_prompt"]
MODES = ["fill", "identity", "nofill"]



def answer(llm, prompt, n: int = 12, **keywords) -> tuple[list[int], np.ndarray]:
    """Greedy tokens after a prompt and the logits that each was chosen from, [n, n_vocab]."""
    from llama_cpp import LogitsProcessorList

    rows = []
    processor = LogitsProcessorList([lambda ids, logits: rows.append(np.array(logits)) or logits])
    tokens = list(itertools.islice(llm.generate(prompt, temp=0.0, logits_processor=processor, **keywords), n))
    return tokens, np.stack(rows)


def same(a, b) -> bool:
    """Whether two answers are the same, logits to the bit."""
    return a[0] == b[0] and a[1].tobytes() == b[1].tobytes()


def counts(llm) -> tuple[int, int, int, str | None]:
    """Filled, exact and cached rows of the last prompt, and why it ran exactly; checks what must hold for every prompt."""
    r = llm.ridge_last
    assert r.filled + r.exact + r.cached == r.rows and 0 <= r.cached_filled <= r.cached
    one_ubatch = r.mode == "plumb" and r.exact <= UBATCH  # the end of the prompt is upstream's, here all of it
    assert (r.lower_seconds > 0) == (r.reason is None and not one_ubatch) and not (r.filled and r.reason)
    assert r.seconds > r.lower_seconds + r.upper_seconds >= 0
    return r.filled, r.exact, r.cached, r.reason


def environment(**changes: str) -> dict[str, str]:
    """Of a process that imports this checkout's package."""
    path = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), **changes}


def python(code: str, **env) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment(**env), capture_output=True, text=True, timeout=300
    )


#
# fixtures, imported by the test files
#


@pytest.fixture(scope="module")
def make(model, maps):
    """make(**keywords) -> a new object with maps (ridge_maps=None: without), closed when the tests of this file are done."""
    from ridgefill import Llama

    made = []

    def get(path=model, **keywords) -> Llama:
        ridge = {"ridge_maps": maps, "ridge_tail": TAIL} if "ridge_maps" not in keywords else {}
        made.append(Llama(str(path), **{**SETTINGS, **ridge, **keywords}))
        return made[-1]

    yield get
    for llm in made:
        llm.close()


@pytest.fixture(scope="module")
def shared(make):
    return make()


@pytest.fixture
def llm(shared):
    """One object for all tests that need nothing special, with an empty cache."""
    shared.reset()
    shared.set_cache(None)
    return shared


@pytest.fixture(scope="module")
def texts(model) -> list[int]:
    """Tokens of real text, enough for several prompts."""
    with lib.Model(model) as m:
        return m.tokenize(server_util._text())


@pytest.fixture(scope="module")
def prompt(texts):
    return texts[:N]


@pytest.fixture(scope="module")
def exact(make, prompt):
    """What a fresh object without maps says to `prompt`."""
    return answer(make(ridge_maps=None), prompt)


@pytest.fixture(scope="module")
def filled(make, prompt):
    """What fresh objects say to `prompt`, by mode."""
    return {mode: answer(make(), prompt, ridge_mode=mode) for mode in MODES}
