"""One run over text that sums over its rows: what calibrations of maps and fits of mappers have in common.

Text is read, parted, compared and cut; chunks are run one after the other, and what is summed over them can be kept in a file,
stopped and gone on with, or done in shards. What is captured of a chunk, and what is summed, is up to the kind of run.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from .capture import Chunk
from .errors import RidgefillError
from .fit import Report
from .lib import Model
from .passes import Pass, Saver
from .prepare import OVERLAP, Cutting, evaluation_documents, prepare
from .stopping import Stopped, StopRequest
from .text import Document, Limit, read_documents


@dataclass(kw_only=True)
class TextConfig:
    """Which text to run, and how."""

    text: list[str]  # files, folders and data sets (text.DATASET)
    sink: int = 4  # rows at the start of each sequence that are not used
    seed: int = 0  # order of the documents, hence which are held out
    n_tokens: int = 0  # tokens to fit on, 0: all
    heldout_tokens: int = 0  # tokens to hold out, 0: all of the documents held out
    heldout_documents: int | None = None  # None: those marked so, else a sixth
    ctx: int = 2048  # tokens run together from position 0
    threads: int = 2
    gpu_layers: int = 0
    sums: str = ""  # file that keeps the sums; one that is there is gone on with
    save_every: float = 120.0  # seconds between two savings of the sums, 0: after each chunk
    shard: str = ""  # "i/n": only make the sums of every n-th chunk, from the i-th on
    row_stride: int = 1  # every how many rows one is used
    chat_share: float = 0.0  # of the documents that are put into the model's chat template
    evaluation_text: list[str] = field(default_factory=list)  # files and folders that must share nothing with the text
    overlap: str = "refuse"  # documents that share text: of prepare.OVERLAP

    def cutting(self) -> Cutting:
        return Cutting(
            ctx=self.ctx,
            sink=self.sink,
            seed=self.seed,
            n_tokens=self.n_tokens,
            heldout_tokens=self.heldout_tokens,
            heldout_documents=self.heldout_documents,
            chat_share=self.chat_share,
            overlap=self.overlap,
        )

    def shard_of(self) -> tuple[int, int]:
        """Which shard, of how many. Raises RidgefillError when it does not read so."""
        if not self.shard:
            return 1, 1
        m = re.fullmatch(r"(\d+)/(\d+)", self.shard)
        if not m or not 1 <= int(m[1]) <= int(m[2]):
            raise RidgefillError(f"shard: expected i/n with 1 <= i <= n, found {self.shard!r}")
        return int(m[1]), int(m[2])

    def options(self) -> list[str]:
        """For the record: what is not at its default, besides what has a key of its own in the sidecar."""
        recorded = ("ctx", "n_tokens", "heldout_tokens", "heldout_documents", "row_stride", "chat_share")
        default = {f.name: f.default for f in fields(TextConfig)}
        out = [f"{name}={getattr(self, name)}" for name in recorded if getattr(self, name) != default[name]]
        return out + (["overlap=keep"] if self.overlap == "keep" else [])

    def check(self) -> None:
        """Raises RidgefillError for a value out of range."""
        if not 0 <= self.sink < self.ctx:
            raise RidgefillError(f"sink rows: expected 0 to {self.ctx - 1}, found {self.sink}")
        if self.row_stride < 1:
            raise RidgefillError(f"row stride: expected at least 1, found {self.row_stride}")
        if self.overlap not in OVERLAP:
            raise RidgefillError(f"overlap: expected one of {', '.join(OVERLAP)}, found {self.overlap!r}")
        if not 0 <= self.chat_share <= 1:
            raise RidgefillError(f"chat share: expected 0 to 1, found {self.chat_share}")
        if self.shard and not self.sums:
            raise RidgefillError("a shard needs a file for its sums")


@dataclass(frozen=True)
class Plan:
    """What a run is about to do, for the user to see before it starts."""

    n_documents: int
    n_heldout_documents: int
    n_tokens: int
    n_heldout_tokens: int
    n_passes: int
    n_tokens_done: int  # of both and all passes, in files of sums already
    memory_bytes: int  # sums and captured activations; the model itself comes on top
    memory_available: int
    sums_bytes: int  # of the files of sums


@dataclass(frozen=True)
class Estimate:
    """How long the text will take in all passes, from the first chunk of this run."""

    tokens_per_second: float
    n_tokens_left: int

    @property
    def seconds(self) -> float:
        """For the rest of the text, without solving."""
        return self.n_tokens_left / self.tokens_per_second


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _memory_available() -> int:
    """Bytes that can be had, caches of files included; where the system does not say, free memory."""
    with suppress(OSError, StopIteration), open("/proc/meminfo") as f:
        return 1024 * int(next(line for line in f if line.startswith("MemAvailable:")).split()[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _describe_text(documents: Sequence[Document]) -> str:
    parts = (f for d in documents for f in (d.name, d.text, d.source, d.licence, d.partition))
    return f"{len(documents)} documents with sha256 {_sha256(*(f.encode() for f in parts))}"


class TextRun:
    """A run over the text of `config`. Subclasses set `passes` and say what is captured and summed.

    prepared  documents and chunks, all shards
    chunks    of this shard, by part of the text
    passes    passes.Pass, each of which runs all chunks
    """

    config: TextConfig
    passes: list[Pass]

    def __init__(self, config: TextConfig, shard: int, n_shards: int):
        self.config, self.shard, self.n_shards = config, shard, n_shards
        self.started = time.monotonic()
        self._estimated = False

    #
    # of each kind of run
    #

    def _captured(self, chunks: list[Chunk], p: Pass) -> AbstractContextManager[Iterator[Any]]:
        """What add() takes of each chunk, in their order."""
        raise NotImplementedError

    def _add(self, sums: list, part: str, captured: Any, chosen: slice) -> None:
        """Add the `chosen` rows of a chunk of "fit" or "heldout"."""
        raise NotImplementedError

    def _sums_bytes(self, p: Pass) -> int:
        raise NotImplementedError

    def _memory_bytes(self) -> int:
        """Of sums, captured activations and the solver."""
        raise NotImplementedError

    #
    # text
    #

    def _prepare_text(self, model: Model, warn: Callable[[str], None]) -> int:
        """Read, part and cut by the tokenizer of `model`; the number of documents for evaluation that were given, and that the
        text was compared with.

        Raises TextError when a part is empty, RidgefillError when there are more shards than chunks.
        """
        # a sixth of what a data set gives is held out, and documents differ in length
        limit = Limit(3 * self.config.n_tokens // 2, lambda text: len(model.tokenize(text)))
        documents = read_documents(self.config.text, limit)
        given = read_documents(self.config.evaluation_text) if self.config.evaluation_text else []
        evaluation = evaluation_documents(documents, given)
        self.prepared = prepare(model, documents, evaluation, self.config.cutting(), warn)
        n, chunks = len(self.prepared.fit), {"fit": self.prepared.fit, "heldout": self.prepared.heldout}
        if n < self.n_shards:
            raise RidgefillError(f"shard: expected at most {n} shards of {n} chunks, found {self.n_shards}")
        self.chunks = {part: c[self.shard - 1 :: self.n_shards] for part, c in chunks.items()}
        return len(evaluation) if given else 0

    def _text_settings(self) -> dict[str, object]:
        """What sums depend on of the text and its cutting. Threads and accelerators change them by rounding only."""
        c = self.config
        tokens = (np.asarray(k.tokens, "<i4").tobytes() for k in (*self.prepared.fit, *self.prepared.heldout))
        used, heldout = self.prepared.documents
        return {
            "ctx": c.ctx,
            "sink": c.sink,
            "row stride": c.row_stride,
            "chat share": c.chat_share,
            "seed": c.seed,
            "n_tokens": c.n_tokens,
            "text to fit": _describe_text(used),
            "text held out": _describe_text(heldout),
            "tokens": _sha256(*tokens),
        }

    def _text_header(self, n_evaluation: int, options: Sequence[str] = ()) -> dict:
        """Fields of sums_file.Header that are about text, before the first chunk. `options` are recorded too."""
        used, heldout = self.prepared.documents
        dropped = [f"dropped={name}" for name in self.prepared.dropped]
        evaluation = [f"evaluation_documents={n_evaluation}"] if n_evaluation else []
        return {
            "sink": self.config.sink,
            "record": {
                "sources": sorted({f"{d.source}; {d.licence}" for d in used + heldout}),
                "n_documents": len(used),
                "n_heldout_documents": len(heldout),
                "seed": self.config.seed,
                "options": self.config.options() + dropped + list(options) + evaluation,
                "heldout": [d.sha256 for d in self.prepared.selection.heldout],
                "scored": [d.sha256 for d in self.prepared.selection.score],
            },
            "n_shards": self.n_shards,
            "shards": [self.shard],
            "done": {part: 0 for part in self.chunks},
            "total": {part: len(c) for part, c in self.chunks.items()},
        }

    #
    # running
    #

    def plan(self) -> Plan:
        used, heldout = self.prepared.documents
        tokens = {part: sum(len(k.tokens) for k in c) for part, c in self.chunks.items()}
        return Plan(
            n_documents=len(used),
            n_heldout_documents=len(heldout),
            n_tokens=tokens["fit"],
            n_heldout_tokens=tokens["heldout"],
            n_passes=len(self.passes),
            n_tokens_done=self._tokens_done(),
            memory_bytes=self._memory_bytes(),
            memory_available=_memory_available(),
            sums_bytes=sum(map(self._sums_bytes, self.passes)),
        )

    def _tokens_done(self) -> int:
        return sum(len(k.tokens) for p in self.passes for part, c in self.chunks.items() for k in c[: p.header.done[part]])

    def _collect(self, p: Pass, report: Report, on_estimate: Callable[[Estimate], None]) -> list:
        """Fitted and held-out sums of all chunks.

        Raises StatisticsError naming the layer of a value that is not finite, SumsError when sums cannot be written, Stopped when
        the user asked for it and there is a file that keeps them.
        """
        sums, pending = p.begin(), [(part, k) for part, c in self.chunks.items() for k in c[p.header.done[part] :]]
        done = self._tokens_done()
        total = len(self.passes) * sum(len(k.tokens) for c in self.chunks.values() for k in c)
        report("capture", done, total)
        if not pending:
            return sums
        c = self.config
        saver = Saver(p.store, p.header, sums, c.save_every) if p.store else None
        chosen = slice(c.sink, None, c.row_stride)
        with (
            StopRequest() if saver else nullcontext() as stop,
            self._captured([chunk for _, chunk in pending], p) as all_captured,
        ):
            began = time.monotonic()
            for (part, chunk), captured in zip(pending, all_captured, strict=True):
                self._add(sums, part, captured, chosen)
                p.header.done[part] += 1
                done += len(chunk.tokens)
                report("capture", done, total)
                if not self._estimated:
                    self._estimated = True
                    on_estimate(Estimate(len(chunk.tokens) / (time.monotonic() - began), total - done))
                if saver and (stop.asked or saver.due()):
                    saver.save()
                if saver and stop.asked:
                    raise Stopped(f"stopped after {done:,} of {total:,} tokens; the same command goes on from {c.sums}")
        if saver:
            saver.save()
        return sums
