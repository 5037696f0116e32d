"""Scores of a mapper, of its maps as they are written, on documents that neither fitted nor chose anything (arXiv 2608.03893).

By target layer and head of K and V, over all rows but the sink rows:

    r2             R^2 of keys without rotation, and of values
    concentration  of keys: squared error along the directions of the model's own queries, weighted by their squares, over the mean
                   of all directions; of values: squared error of rows weighted by squared attention, over the mean of all rows.
                   1 if attention has nothing to do with where the error lies, more if it reads the error more than the rest
    cosine         mean cosine of what the heads of Q that share it read, from mapped and from true rows; sink rows are true
    cosine_mean    the same when the keys and values of every row that is mapped are their mean

The eigenvectors of Q^T Q are the right singular vectors of the rows of queries Q, and its eigenvalues their squared singular
values, so that the sum over directions is a trace: d tr(Q^T Q E^T E) / (tr Q^T Q tr E^T E) with errors E of width d.
Queries are those of every 16th row, after rotation, and their keys' errors too.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..capture import Chunk
from ..errors import StatisticsError
from ..fit import Report, no_report
from ..lib import Model
from ..score import LENGTH, N_TOKENS, QUERY_STRIDE, R2, Mean, cosines, document_pieces
from ..score import unseen as kept
from ..text import Document, read_documents
from . import sidecar
from .models import PARTS, KeysValues, Rows, captured, check_models
from .sidecar import Mapper, Scores
from .sums import with_row_before
from .verdict import verdict


class _Concentration:
    """Of the error of one layer's keys and values, summed over chunks."""

    def __init__(self):
        self._qq, self._ee, self._vv = 0.0, 0.0, 0.0

    def add_keys(self, q: np.ndarray, error: np.ndarray) -> None:
        """Rows [n, n_head, d] of queries and [m, n_head_kv, d] of errors, rotated both."""
        n, n_kv = len(q), error.shape[1]
        q, error = (x.astype(np.float64) for x in (q.reshape(n, n_kv, -1, q.shape[-1]), error))
        self._qq = self._qq + np.einsum("nhgi,nhgj->hij", q, q, optimize=True)
        self._ee = self._ee + np.einsum("mhi,mhj->hij", error, error, optimize=True)

    def add_values(self, weight: np.ndarray, seen: np.ndarray, error: np.ndarray) -> None:
        """Attention [n_head_kv, group, n, m] of queries to mapped rows, which of them [n, m] each query sees, errors [m, n_head_kv, d]."""
        square = np.einsum("mhd,mhd->hm", error, error, dtype=np.float64)
        weight = np.einsum("hgnm,hgnm->hnm", weight, weight, dtype=np.float64)
        mean = square @ seen.T / seen.sum(1)  # [n_head_kv, n]
        self._vv = self._vv + np.stack([np.einsum("hnm,hm->h", weight, square), np.einsum("hnm,hn->h", weight, mean)])

    def values(self) -> dict[str, np.ndarray]:
        q, e = (np.trace(x, axis1=1, axis2=2) for x in (self._qq, self._ee))
        along = np.einsum("hij,hij->h", self._qq, self._ee) * self._qq.shape[-1]
        return {"k": _over(along, q * e), "v": _over(*self._vv)}


def _over(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """a / b, and 1 where there is no error at all."""
    return np.divide(a, b, out=np.ones_like(b), where=b > 0)


class Scorer:
    """Judges one mapper by rows of both models, chunk by chunk."""

    def __init__(self, mapper: Mapper, target: KeysValues):
        self._mapper, self._target = mapper, target
        self._maps = {part: [mapper.weight(part, il).astype(np.float32) for il in target.layers] for part in PARTS}
        heads = mapper.target.heads
        self._r2 = {part: [R2(n) for n in heads] for part in PARTS}
        self._concentration = [_Concentration() for _ in heads]
        self._cosines = {name: [Mean() for _ in heads] for name in ("cosine", "cosine_mean")}

    def _predicted(self, part: str, il: int, rows: list[np.ndarray]) -> np.ndarray:
        maps = self._mapper.maps[part]
        x = np.concatenate([rows[s] for s in maps.sources[il]], axis=1)
        return (with_row_before(x) if self._mapper.previous else x) @ self._maps[part][il].T + maps.biases[il]

    def add(self, source: Rows, target: Rows, inputs: Mapping[int, np.ndarray]) -> None:
        """Rows of a chunk from position 0, and the target's inputs [n, d] of every layer."""
        rest = slice(self._mapper.sink_rows, None)
        for il in self._target.layers:
            true = {part: target[part][il] for part in PARTS}
            mapped, mean = {}, {}
            for part, y in true.items():
                mapped[part], mean[part] = y.copy(), y.copy()  # whose first rows are the target's own
                mapped[part][rest] = self._predicted(part, il, source[part])[rest]
                mean[part][rest] = y[rest].mean(0)
                self._r2[part][il].add(y[rest], mapped[part][rest])
            self._add_attention(il, inputs[il], true, {"cosine": mapped, "cosine_mean": mean})

    def _add_attention(self, il: int, x: np.ndarray, true: Mapping[str, np.ndarray], others: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        """What the queries of layer `il`, whose input is x [n, d], read from true rows and from others."""
        attention, sink = self._target, self._mapper.sink_rows
        at = np.arange(sink, len(x), QUERY_STRIDE)
        q, n_kv = attention.queries(il, x[at], at), attention.n_kv_heads(il)

        def read(rows: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            keys = attention.keys(il, rows["k"])
            weight = attention.weights(q, at, keys)
            return keys, weight, attention.mixed(weight, rows["v"])

        keys, weight, out = read(true)
        for name, rows in others.items():
            keys_here, _, out_here = read(rows)
            self._cosines[name][il].add(cosines(out, out_here).reshape(len(at), n_kv, -1).mean(2))
            if name == "cosine":
                error = (rows["v"] - true["v"])[sink:].reshape(len(x) - sink, n_kv, -1)
                self._concentration[il].add_keys(q, (keys_here - keys)[sink:])
                self._concentration[il].add_values(weight[..., sink:], np.arange(sink, len(x)) <= at[:, None], error)

    def scores(self, documents: Sequence[Document]) -> Scores:
        """Of all chunks, which are of these documents. Raises StatisticsError naming the layer of a score that is not finite."""
        concentrations = [c.values() for c in self._concentration]
        with np.errstate(invalid="ignore", divide="ignore"):
            found = Scores(
                r2={part: [r.value() for r in by_layer] for part, by_layer in self._r2.items()},
                concentration={part: [c[part] for c in concentrations] for part in PARTS},
                cosine=[m.value() for m in self._cosines["cosine"]],
                cosine_mean=[m.value() for m in self._cosines["cosine_mean"]],
                n_tokens=self._r2["k"][0].n,
                n_documents=len(documents),
                sources=sorted({f"{d.source}; {d.licence}" for d in documents}),
            )
        for name, layers in (("R^2 of keys", found.r2["k"]), ("R^2 of values", found.r2["v"]), ("cosine", found.cosine)):
            for il, heads in enumerate(layers):
                if not np.isfinite(heads).all():
                    raise StatisticsError(f"layer {il}: expected rows that give a finite {name}, found {heads}")
        return found


@dataclass(frozen=True)
class Judge:
    """Measures mappers between two models on pieces of `documents`. Direction 0 is from the first model to the second."""

    models: Sequence[Model]
    keys_values: Sequence[KeysValues]
    documents: Sequence[Document]
    pieces: Sequence[Chunk]
    n_threads: int = 2
    report: Report = no_report

    def measure(self, mappers: Sequence[tuple[int, Mapper]]) -> list[Scores]:
        """Scores of each mapper, given with its direction.

        Raises StatisticsError naming the layer of a score that is not finite.
        """
        scorers = [(d, Scorer(mapper, self.keys_values[1 - d])) for d, mapper in mappers]
        total, done = sum(len(p.tokens) for p in self.pieces), 0
        self.report("score", 0, total)
        with captured(self.models, self.keys_values, self.pieces, LENGTH, self.n_threads) as stream:
            for piece, inputs in zip(self.pieces, stream, strict=True):
                rows = [kv(x) for kv, x in zip(self.keys_values, inputs, strict=True)]
                for d, scorer in scorers:
                    scorer.add(rows[d], rows[1 - d], inputs[1 - d])
                done += len(piece.tokens)
                self.report("score", done, total)
        used = [self.documents[i] for i in sorted({p.document for p in self.pieces})]
        return [scorer.scores(used) for _, scorer in scorers]

    def judged(self, mappers: Mapping[int, Mapper]) -> dict[int, Mapper]:
        """Mappers by direction with scores and verdict; see measure()."""
        found = self.measure(list(mappers.items()))
        scored = {d: replace(m, scores=s) for (d, m), s in zip(mappers.items(), found, strict=True)}
        return {d: replace(m, verdict=verdict(m)) for d, m in scored.items()}

    def best(self, candidates: Sequence[tuple[int, Mapper]]) -> dict[int, Mapper]:
        """Of mappers given with their directions, each with a number of source layers of its own: for every target layer the keys
        and values of the one with the highest cosine. See measure().
        """
        cosines = [[heads.mean() for heads in s.cosine] for s in self.measure(candidates)]
        out = {}
        for d in {d for d, _ in candidates}:
            mappers, found = zip(*((m, c) for (of, m), c in zip(candidates, cosines, strict=True) if of == d), strict=True)
            out[d] = _merged(mappers, np.argmax(found, axis=0))
        return out


def _merged(mappers: Sequence[Mapper], best: Sequence[int]) -> Mapper:
    """The maps of each target layer from one of the mappers, given by its place."""
    maps = {}
    for part in PARTS:
        every = [m.maps[part] for m in mappers]
        names = ("sources", "lambdas", "r2_head", "weights", "biases")
        maps[part] = replace(
            every[0],
            tried=[k for m in every for k in m.tried],
            r2_by_number=np.concatenate([m.r2_by_number for m in every], axis=1),
            **{name: [getattr(every[i], name)[il] for il, i in enumerate(best)] for name in names},
        )
    return replace(mappers[0], maps=maps)


def judge_file(
    path: str | os.PathLike,
    source: str,
    target: str,
    text: Sequence[str],
    unseen: bool = False,
    n_tokens: int = N_TOKENS,
    n_threads: int = 2,
    report: Report = no_report,
) -> Mapper:
    """Put scores and verdict into a file, for two model files: of the documents of `text` that were kept for scores, or, where
    none of it was used, of all (`unseen`).

    Raises SidecarError for a file that is none, PairError for models that it is not for, TextError when there is no such text,
    and what Judge.measure() does.
    """
    mapper = sidecar.read(path)
    documents = read_documents(list(text))
    if not unseen:
        documents = kept(documents, {"ridge.calibration.heldout_sha256": mapper.calibration.scored})
    with Model(source) as a, Model(target) as b:
        keys_values = [KeysValues(a), KeysValues(b)]
        check_models(mapper.sides, [kv.side for kv in keys_values])
        pieces = document_pieces(a, documents, mapper.sink_rows, n_tokens)
        found = Judge([a, b], keys_values, documents, pieces, n_threads, report).judged({0: mapper})[0]
    sidecar.write(path, found, force=True)
    return found
