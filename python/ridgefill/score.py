"""Scores of maps, from the file as it was written, on text that they were not fitted on.

    r2_input   R^2 of the layer's input, where maps predict it
    r2_k       R^2 of K as a cache would hold it without rotation: after the norm of heads that some models have
    r2_v       R^2 of V
    norm_k     mean over rows and heads of |predicted k| / |k|
    norm_v     the same of V
    attention  mean cosine of what attention adds to the residual stream, with the model's own queries: from predicted
               against from true K and V, over the keys of all rows before the query; those of sink rows are true in both

R^2 = 1 - sum |y - y_hat|^2 / sum |y - mean y|^2 over all channels. Every row but the sink rows counts, every 16th as a query.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from . import sidecar, verify
from .attention import Attention
from .capture import Chunk, activations, chunks, in_turns, select
from .errors import StatisticsError, TextError
from .fit import Report, no_report
from .kinds import InputTargets, KvTargets
from .lib import Context, Maps, Model, captured_log
from .text import Document

LENGTH = 1024  # most tokens that are run together
N_TOKENS = 16384  # of all documents, by default
QUERY_STRIDE = 16


@dataclass(frozen=True)
class Scores:
    """Of the maps of one file; lists run over the mapped layers."""

    layers: list[int]
    values: dict[str, list[float]]  # by name, of sidecar.SCORES
    n_tokens: int  # rows judged

    @property
    def means(self) -> dict[str, float]:
        """By name, over the layers."""
        return {name: float(np.mean(v)) for name, v in self.values.items()}

    def keys(self, documents: Sequence[Document]) -> dict[str, object]:
        """For sidecar.amend(): the scores, and the documents that they are of."""
        return {
            **{f"ridge.score.{name}": v for name, v in self.values.items()},
            "ridge.score.n_tokens": self.n_tokens,
            "ridge.score.n_documents": len(documents),
            "ridge.score.sources": sorted({f"{d.source}; {d.licence}" for d in documents}),
        }


class R2:
    """R^2 of each head over rows that come block by block, summed in float64 about the mean of the first block."""

    def __init__(self, n_heads: int = 1):
        self.n, self.sum, self.square, self.error, self.origin = 0, 0.0, 0.0, 0.0, None
        self._n_heads = n_heads

    def _squares(self, y: np.ndarray) -> np.ndarray:
        y = y.reshape(len(y), self._n_heads, -1)
        return np.einsum("nhd,nhd->h", y, y)

    def add(self, y: np.ndarray, predicted: np.ndarray) -> None:
        residual = np.subtract(y, predicted, dtype=np.float64)
        self.origin = y.mean(0, dtype=np.float64) if self.origin is None else self.origin
        y = y - self.origin
        self.n += len(y)
        self.sum = self.sum + y.sum(0)
        self.square += self._squares(y)
        self.error += self._squares(residual)

    def value(self) -> np.ndarray:
        return 1 - self.error / (self.square - self._squares(self.sum[None]) / self.n)


class Mean:
    """Mean of each of some columns of numbers [n] or [n, columns] that come block by block."""

    def __init__(self):
        self.n, self.sum = 0, 0.0

    def add(self, values: np.ndarray) -> None:
        self.n += len(values)
        self.sum = self.sum + values.sum(0, dtype=np.float64)

    def value(self) -> np.ndarray:
        return self.sum / self.n


def _norm_ratios(predicted: np.ndarray, true: np.ndarray, n_heads: int) -> np.ndarray:
    """|predicted| / |true| of each row and head, of rows [n, width]; a head of zeros has none."""
    norms = [np.linalg.norm(y.reshape(len(y), n_heads, -1).astype(np.float64), axis=2).ravel() for y in (predicted, true)]
    some = norms[1] > 0
    return norms[0][some] / norms[1][some]


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of vectors along the last axis."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):  # an output of zeros shows in the score
        return np.einsum("...j,...j->...", a, b) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


class Scorer:
    """Judges the maps of the file `path` by activations of the model file `model_path`, chunk by chunk.

    `sink` rows at the start of each chunk are exact, by default as many as the file says.

    Raises SidecarError for a file that is none, RidgefillError for a model whose projections cannot be computed.
    """

    def __init__(self, path: str | os.PathLike, model_path: str | os.PathLike, sink: int | None = None):
        self.header = sidecar.inspect(path)["keys"]
        kind = self.header["ridge.kind"]
        self.attention = Attention(model_path)
        self.split, self.sink = self.header["ridge.split"], self.header["ridge.sink_rows"] if sink is None else sink
        self.maps = sidecar.maps(path, np.float32)
        self.predicts_input = sidecar.PARTS[kind] == ("input",)
        if self.predicts_input:
            targets = InputTargets(self.attention.n_embd)
        else:
            targets = KvTargets(self.attention, self.attention.n_embd, range(0), kind == "kv_prev")
        self._features = targets.features
        names = [name for name in sidecar.SCORES if name != "r2_input" or self.predicts_input]
        self._sums = {il: {name: (R2 if name.startswith("r2") else Mean)() for name in names} for il in self.maps}

    def add(self, inputs: dict[int, np.ndarray]) -> None:
        """Inputs [n, d] of the split layer and all above, of the rows of a chunk from position 0."""
        x = self._features(inputs[self.split])[self.sink :]
        for il, (weight, bias) in self.maps.items():
            self._add_layer(il, inputs[il], x @ weight.T + bias)

    def _add_layer(self, il: int, x: np.ndarray, predicted: np.ndarray) -> None:
        """x [n, d], the true input of layer `il`; predicted [n - sink, d_out]."""
        sums, attention, rest = self._sums[il], self.attention, slice(self.sink, None)
        if self.predicts_input:
            sums["r2_input"].add(x[rest], predicted)
            predicted = attention.project(il, predicted)
        true = attention.project(il, x)
        filled = true.copy()
        filled[rest] = predicted
        n_k, n_v = attention.widths(il)
        k, k_filled = (attention.head_norm(il, "k", kv[:, :n_k]) for kv in (true, filled))
        v, v_filled = true[:, n_k:], filled[:, n_k:]
        n_heads = attention.n_kv_heads(il)
        for part, y, y_filled in (("k", k, k_filled), ("v", v, v_filled)):
            sums[f"r2_{part}"].add(y[rest], y_filled[rest])
            sums[f"norm_{part}"].add(_norm_ratios(y_filled[rest], y[rest], n_heads))
        at = np.arange(self.sink, len(x), QUERY_STRIDE)
        q = attention.queries(il, x[at], at)
        out = [attention.output(il, q, at, attention.keys(il, ks), vs) for ks, vs in ((k, v), (k_filled, v_filled))]
        sums["attention"].add(cosines(*out))

    def scores(self) -> Scores:
        """Raises StatisticsError naming the layer of a score that is not finite."""
        values: dict[str, list[float]] = {}
        for il, sums in self._sums.items():
            for name, s in sums.items():
                with np.errstate(invalid="ignore", divide="ignore"):
                    value = s.value().item()
                if not np.isfinite(value):
                    raise StatisticsError(f"layer {il}: expected activations that give a finite {name}, found {value}")
                values.setdefault(name, []).append(min(value, 1.0) if name == "attention" else value)
        return Scores(list(self._sums), values, next(iter(self._sums.values()))["r2_k"].n)


def pieces(chunk_list: Sequence[Chunk], sink: int, n_tokens: int = N_TOKENS) -> list[Chunk]:
    """Pieces of at most LENGTH tokens, the first of every document, then the second of every one, and so on, until there are
    n_tokens (0: all).
    """
    cut = (Chunk(c.tokens[at : at + LENGTH], c.document) for c in chunk_list for at in range(0, len(c.tokens), LENGTH))
    out, total = [], 0
    for piece in in_turns((p for p in cut if len(p.tokens) > sink), lambda p: p.document):
        if n_tokens and total >= n_tokens:
            break
        out.append(piece)
        total += len(piece.tokens)
    return out


def unseen(documents: list[Document], keys: dict) -> list[Document]:
    """Of the text that maps were fitted on (their file has these keys), the documents that were held out.

    Raises TextError when there are none, or the file does not say which they are and the text does not either.
    """
    known = keys.get("ridge.calibration.heldout_sha256")
    if known is None:
        return _marked(documents, keys)
    found = sorted((d for d in documents if d.sha256 in known), key=lambda d: known.index(d.sha256))
    if not found:
        raise TextError(
            f"expected the text that the maps were made of, with {len(known)} documents held out, found none of these among "
            f"{len(documents)}; --unseen judges by text that is no part of it"
        )
    return found


def _marked(documents: list[Document], keys: dict) -> list[Document]:
    """Those with the partition "heldout" that a calibration takes."""
    if not any(d.partition == "heldout" for d in documents):
        raise TextError(
            "expected documents that sources.json marks as heldout, since the file does not say which were, found none; "
            "--unseen judges by text that the maps were not made of"
        )
    return select(documents, keys["ridge.calibration.seed"], keys["ridge.calibration.n_heldout_documents"]).heldout


def document_pieces(model: Model, documents: list[Document], sink: int, n_tokens: int = N_TOKENS) -> list[Chunk]:
    """Pieces of documents. Raises TextError when there are not two rows in them to judge by."""
    found = pieces(chunks(documents, lambda _, d: model.tokenize(d.text), LENGTH, sink), sink, n_tokens)
    n = sum(len(p.tokens) - sink for p in found)
    if n < 2:
        raise TextError(f"expected text of at least {sink + 2} tokens to judge by, found {n} rows behind the first {sink}")
    return found


def memory_bytes(attention: Attention, split: int, n_layer: int, map_sizes: dict[int, tuple[int, int]]) -> int:
    """Bytes that scoring a file takes at most, whose maps have these d_in and d_out by layer."""
    d, layers = attention.n_embd, range(split + 1, n_layer)
    activations_bytes = 3 * 4 * LENGTH * d * (n_layer - split)  # the library's buffer, our copy, and one in the making
    held = sum(4 * d_in * d_out for d_in, d_out in map_sizes.values()) + sum(attention.weight_bytes(il) for il in layers)
    # of one layer: features and predictions, then true and predicted rows in float64 with what is computed of them
    widest = max(d_in + d_out for d_in, d_out in map_sizes.values())
    return activations_bytes + held + 8 * 4 * LENGTH * widest + 4 * 3 * attention.n_heads(split + 1) * LENGTH**2 // QUERY_STRIDE


def score(
    model: Model,
    path: str | os.PathLike,
    piece_list: Sequence[Chunk],
    n_threads: int = 2,
    sink: int | None = None,
    report: Report = no_report,
) -> Scores:
    """Scores of the maps in the file `path` on pieces of text; `model` is what they are for, or a copy at higher precision.

    Raises what Scorer does, and RidgeError when the library refuses the file for this model.
    """
    with captured_log():  # that it is another quantisation is no news
        Maps(model, path).close()  # the library refuses a file of another model
    scorer = Scorer(path, model.path, sink)
    total, done = sum(len(p.tokens) for p in piece_list), 0
    report("score", 0, total)
    for piece, inputs in zip(piece_list, _inputs(model, piece_list, scorer.split, n_threads), strict=True):
        scorer.add(inputs)
        done += len(piece.tokens)
        report("score", done, total)
    return scorer.scores()


def judge(
    model: Model,
    path: str | os.PathLike,
    piece_list: Sequence[Chunk],
    documents: Sequence[Document],
    n_threads: int = 2,
    served: Model | None = None,
    report: Report = no_report,
) -> tuple[Scores, list[Document], bool]:
    """Put scores and a self-test into the file `path`; pieces are of `documents`, the self-test of `served` (default: `model`).

    Returns the scores, the documents that they are of, and whether the text was long enough for a self-test. Raises what
    score() does.
    """
    found = score(model, path, piece_list, n_threads, report=report)
    longest = max(piece_list, key=lambda p: len(p.tokens)).tokens
    selftest = verify.selftest_keys(served or model, path, longest, n_threads)
    used = [documents[i] for i in sorted({p.document for p in piece_list})]
    sidecar.amend(path, found.keys(used) | selftest)
    return found, used, bool(selftest)


def _inputs(model: Model, piece_list: Sequence[Chunk], split: int, n_threads: int) -> Iterator[dict[int, np.ndarray]]:
    layers = list(range(split, model.n_layer))
    n_ctx = max(len(p.tokens) for p in piece_list)
    with (
        Context(model, n_ctx, n_batch=n_ctx, n_threads=n_threads) as ctx,
        closing(activations(ctx, piece_list, layers)) as captured,
    ):
        yield from captured
