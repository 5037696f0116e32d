"""Whether maps belong to a model, field by field, and whether they still do there what they did when they were made.

The self-test: a sidecar may hold some tokens and the likeliest tokens that its maker found behind the last rows of that
prompt when it was filled, with their logits. Filled again, the same model gives the same but for rounding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .errors import RidgeError, RidgefillError
from .lib import Context, Maps, Model, captured_log

N_TOKENS = 384  # of the prompt
TAIL = 64
N_ROWS = 16  # last rows whose logits are kept
N_TOP = 5  # likeliest tokens of each
# Of the root mean square of the differences of logits. Measured with SmolLM2 (docs/CALIBRATE.md): the same weights in types that
# also round activations, as some backends do of any type, differ by up to .44; mode identity by .99 and more.
TOLERANCE = 0.5


class VerifyError(RidgefillError):
    """A model is not the one that maps were made for, or they do not do what they did."""

    exit_code = 11


@dataclass(frozen=True)
class Field:
    """One thing in which a model can differ from the one that maps were made for."""

    name: str
    expected: object
    found: object
    refuses: bool  # whether a model that differs in it is refused, or run with a warning

    @property
    def matches(self) -> bool:
        return self.expected == self.found


def short(value: object) -> str:
    """A value of a field for people: hashes cut short."""
    text = str(value)
    return text[:12] + "…" if len(text) == 64 else text


def fields(keys: dict, fingerprint: dict) -> list[Field]:
    """A sidecar's keys beside lib.Model.fingerprint(split) of a model, those that are refused first."""

    def items(text: str) -> dict[str, str]:
        return dict(item.partition("=")[::2] for item in text.split(";"))

    def anchor(hashes: dict, name: str) -> str:
        return hashes.get(name, "no such tensor in F32")

    expected, found = items(keys["ridge.model.hparams"]), items(fingerprint["hparams"])
    anchors = dict(zip(keys["ridge.model.anchors"], keys["ridge.model.anchors_sha256"], strict=True))
    return [
        Field("architecture", keys["general.architecture"], fingerprint["architecture"], True),
        Field("layers", keys["ridge.block_count"], fingerprint["block_count"], True),
        Field("width", keys["ridge.embedding_length"], fingerprint["embedding_length"], True),
        *(Field(name, expected.get(name, "none"), found.get(name, "none"), True) for name in expected | found),
        Field("tokenizer", keys["ridge.model.tokenizer_sha256"], fingerprint["tokenizer_sha256"], True),
        Field("file type", keys["ridge.model.file_type"], fingerprint["file_type"] % 2**32, False),
        Field("name", keys["ridge.model.name"], fingerprint["name"], False),
        *(Field(name, sha256, anchor(fingerprint["anchors"], name), False) for name, sha256 in anchors.items()),
    ]


def refusal(model: Model, path: str | os.PathLike) -> str:
    """Why the library refuses a file for a model, "" if it does not."""
    try:
        with captured_log():
            Maps(model, path).close()
        return ""
    except RidgeError as e:
        return str(e)


#
# self-test
#


def _fill(
    model: Model, path: str | os.PathLike, tokens: Sequence[int], tail: int, n_rows: int, n_threads: int
) -> tuple[np.ndarray, int]:
    """Logits [n_rows, n_vocab] of the last rows of a prompt that the maps filled, and the number of filled rows."""
    n = len(tokens)
    with (
        captured_log(),  # that it is another quantisation is said elsewhere
        Maps(model, path) as maps,
        Context(model, n, n_batch=n, n_ubatch=n, n_threads=n_threads) as ctx,
    ):
        prefill = ctx.prefill(tokens, maps=maps, n_tail=tail).run()
        rest = tokens[prefill.n_done :]
        assert len(rest) >= n_rows  # the last ubatch of a prompt is upstream's, up to its tail
        logits = ctx.decode(rest, pos0=prefill.n_done, logits=range(len(rest) - n_rows, len(rest)))
        return logits, prefill.stats["n_filled"]


def selftest_keys(model: Model, path: str | os.PathLike, tokens: Sequence[int], n_threads: int = 2) -> dict[str, object]:
    """For sidecar.amend(): what the first N_TOKENS of `tokens`, filled, give now. {} when they are too few to be filled."""
    tokens = list(tokens[:N_TOKENS])
    tail = min(TAIL, len(tokens) // 2)
    if tail < N_ROWS:
        return {}
    logits, n_filled = _fill(model, path, tokens, tail, N_ROWS, n_threads)
    if not n_filled:
        return {}
    top = np.argsort(-logits, axis=1, kind="stable")[:, :N_TOP]
    return {
        "ridge.selftest.tokens": tokens,
        "ridge.selftest.tail": tail,
        "ridge.selftest.file_type": _file_type(model),
        "ridge.selftest.top_tokens": top.ravel().tolist(),
        "ridge.selftest.top_logits": np.take_along_axis(logits, top, axis=1).ravel().tolist(),
    }


def _file_type(model: Model) -> int:
    return model.fingerprint(1)["file_type"] % 2**32


@dataclass(frozen=True)
class SelfTest:
    """What filling the recorded prompt gave now, beside what it gave when the maps were made."""

    n_rows: int
    n_filled: int
    difference: float  # root mean square of the differences of the recorded logits
    largest: float  # the largest of them
    same_first: int  # rows whose likeliest token is the same
    same_file_type: bool  # as the model that it was made with
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance

    def sentence(self) -> str:
        """What came of it."""
        return (
            f"self-test: {self.n_rows} rows behind {self.n_filled} filled ones: logits differ by {self.difference:.3f} (root mean "
            f"square; at most {self.tolerance:g} expected), the likeliest token is the same in {self.same_first}: "
            f"{'passed' if self.passed else 'failed'}"
        )

    def failure(self) -> str:
        """Why it did not pass, in a sentence."""
        why = "the model or the library fills otherwise than those that it was made with"
        if not self.same_file_type:
            why += "; where weights were rounded anew, and coarsely, that is to be expected"
        return f"the self-test failed: logits differ by {self.difference:.3f}, expected at most {self.tolerance:g}: {why}"


def selftest(model: Model, path: str | os.PathLike, keys: dict, n_threads: int = 2) -> SelfTest | None:
    """Run the self-test of the maps in `path`, whose keys these are; None when the file holds none.

    Raises RidgeError when the library refuses the file for this model.
    """
    if "ridge.selftest.tokens" not in keys:
        return None
    tokens, tail = keys["ridge.selftest.tokens"], keys["ridge.selftest.tail"]
    top = np.reshape(keys["ridge.selftest.top_tokens"], (-1, N_TOP))
    expected = np.reshape(keys["ridge.selftest.top_logits"], top.shape)
    logits, n_filled = _fill(model, path, tokens, tail, len(top), n_threads)
    difference = np.take_along_axis(logits, top, axis=1).astype(np.float64) - expected
    return SelfTest(
        n_rows=len(top),
        n_filled=n_filled,
        difference=float(np.sqrt((difference**2).mean())),
        largest=float(np.abs(difference).max()),
        same_first=int((logits.argmax(1) == top[:, 0]).sum()),
        same_file_type=_file_type(model) == keys["ridge.selftest.file_type"],
        tolerance=TOLERANCE,
    )
