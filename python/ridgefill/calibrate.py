"""Fitting ridge maps for a GGUF model: text -> layer inputs -> sums -> maps -> sidecar, one file per split and kind.

Every split and kind of one call is fitted in the same pass over the text. With a file of sums the pass can be stopped and
gone on with, or done in shards.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from . import fit, sidecar
from .capture import Chunk, activations
from .errors import RidgeError, RidgefillError
from .fit import Report, Result, Wanted, no_report
from .kinds import families
from .lib import Context, Model
from .model_file import check_copy, file_sha256
from .prepare import OVERLAP, Cutting, evaluation_documents, prepare
from .solve import LAMBDAS
from .statistics import memory_bytes
from .stopping import Stopped, StopRequest
from .sums import MAX_ROWS, Sums
from .sums_file import Header, Reader, Store, SumsError, differences
from .text import Document, read_documents


@dataclass
class Config:
    """What to calibrate and how."""

    model: str  # GGUF file
    out: str  # sidecar; see out_path(); "" for a shard, which makes none
    splits: list[int]  # split layers S, 1 <= S <= layers - 2
    text: list[str]  # files and folders
    kinds: list[str] = field(default_factory=lambda: ["input"])  # of kinds.KINDS
    map_type: str = "q8_0"  # f32, f16 or q8_0
    sink: int = 4  # rows at the start of each sequence that are neither fitted nor filled
    tail: int = 512  # recommended tail, rows
    seed: int = 0  # order of the documents, hence which are held out
    n_tokens: int = 0  # tokens to fit on, 0: all
    heldout_documents: int | None = None  # None: those marked so, else a sixth
    ctx: int = 2048  # tokens run together from position 0
    threads: int = 2
    gpu_layers: int = 0
    force: bool = False  # replace existing files
    prev_share: float = 1.0  # of the row before in K of kind kv_prev: 1 as regressed, 0 as in kind kv
    served: str = ""  # GGUF file that the maps are for, where `model` is a copy of it at higher precision
    lambdas: tuple[float, ...] = field(default=LAMBDAS)
    sums: str = ""  # file that keeps the sums; one that is there is gone on with
    save_every: float = 120.0  # seconds between two savings of the sums, 0: after each chunk
    shard: str = ""  # "i/n": only make the sums of every n-th chunk, from the i-th on
    row_stride: int = 1  # every how many rows one is used
    chat_share: float = 0.0  # of the documents that are put into the model's chat template
    evaluation_text: list[str] = field(default_factory=list)  # files and folders that must share nothing with the text
    overlap: str = "refuse"  # documents that share text: of prepare.OVERLAP

    def wanted(self) -> Wanted:
        """The sidecars to make."""
        return Wanted(
            out=self.out,
            splits=self.splits,
            kinds=self.kinds,
            map_type=self.map_type,
            tail=self.tail,
            lambdas=self.lambdas,
            prev_share=self.prev_share,
            force=self.force,
        )

    def out_path(self, split: int, kind: str) -> Path:
        """File for one split and kind; see fit.Wanted.path()."""
        return self.wanted().path(split, kind)

    def cutting(self) -> Cutting:
        return Cutting(
            ctx=self.ctx,
            sink=self.sink,
            seed=self.seed,
            n_tokens=self.n_tokens,
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
        out = [f"row_stride={self.row_stride}"] if self.row_stride != 1 else []
        out += [f"chat_share={self.chat_share:g}"] if self.chat_share else []
        return out + (["overlap=keep"] if self.overlap == "keep" else [])


@dataclass(frozen=True)
class Plan:
    """What a run is about to do, for the user to see before it starts."""

    n_documents: int
    n_heldout_documents: int
    n_tokens: int
    n_heldout_tokens: int
    n_tokens_done: int  # of both, in the file of sums already
    memory_bytes: int  # sums and captured activations; the model itself comes on top
    memory_available: int
    sums_bytes: int  # of the file of sums


@dataclass(frozen=True)
class Estimate:
    """How long the text will take, from the first chunk of this run."""

    tokens_per_second: float
    n_tokens_left: int

    @property
    def seconds(self) -> float:
        """For the rest of the text, without solving."""
        return self.n_tokens_left / self.tokens_per_second


def _check(config: Config, model: Model) -> None:
    for split in config.splits:
        if not 1 <= split <= model.n_layer - 2:
            n = model.n_layer
            raise RidgefillError(f"split: expected 1 to {n - 2} for a model of {n} layers, found {split}")
    if not 0 <= config.sink < config.ctx:
        raise RidgefillError(f"sink rows: expected 0 to {config.ctx - 1}, found {config.sink}")
    if config.row_stride < 1:
        raise RidgefillError(f"row stride: expected at least 1, found {config.row_stride}")
    if config.overlap not in OVERLAP:
        raise RidgefillError(f"overlap: expected one of {', '.join(OVERLAP)}, found {config.overlap!r}")
    if not 0 <= config.chat_share <= 1:
        raise RidgefillError(f"chat share: expected 0 to 1, found {config.chat_share}")
    if config.shard and not config.sums:
        raise RidgefillError("a shard needs a file for its sums")
    if bool(config.shard) == bool(config.out):
        raise RidgefillError("expected a file for the sidecar or a shard, which makes none, found both or neither")
    if reason := model.unsupported():
        raise RidgeError(f"{config.model} cannot be filled: {reason}")


def _sha256(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _describe_text(documents: Sequence[Document]) -> str:
    fields = (f for d in documents for f in (d.name, d.text, d.source, d.licence, d.partition))
    return f"{len(documents)} documents with sha256 {_sha256(*(f.encode() for f in fields))}"


class _Saver:
    """Saves the sums from time to time: at most every `every` seconds, and never for more than a twentieth of the time."""

    def __init__(self, store: Store, header: Header, sums: list[Sums], every: float):
        self._store, self._header, self._sums, self._every = store, header, sums, every
        self._next = time.monotonic() + every

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def save(self) -> None:
        began = time.monotonic()
        self._store.write(self._header, self._sums)
        took = time.monotonic() - began
        self._next = began + took + max(self._every, 20 * took if self._every else 0)


class Calibration:
    """One run: plan() to look before it starts, run() to do it. Owns model, context and file of sums; use it in `with`.

    `warn` is called with lines about text that is left out.
    """

    def __init__(self, config: Config, warn: Callable[[str], None] = lambda line: None):
        self.config = config
        self.started = time.monotonic()
        self.shard, self.n_shards = config.shard_of()
        config.wanted().check()
        # what was kept in a file of sums is not lost by finding out late that a sidecar exists, perhaps this very one
        resumes = bool(config.sums) and Path(config.sums).exists()
        for split, kind in config.wanted().files() if config.out else []:
            sidecar.check_writable(config.out_path(split, kind), config.force or resumes)
        documents = read_documents(config.text)
        given = read_documents(config.evaluation_text) if config.evaluation_text else []
        with ExitStack() as stack:
            self.store = stack.enter_context(Store(config.sums)) if config.sums else None
            self.model = stack.enter_context(Model(config.model, n_gpu_layers=config.gpu_layers))
            _check(config, self.model)
            mapped = range(min(config.splits) + 1, self.model.n_layer)
            self.families = families(config.kinds, config.model, self.model.n_embd, mapped)
            # a width that the map type cannot hold should not show after an hour of work
            sidecar.encode(np.zeros((1, self.model.n_embd)), config.map_type)
            evaluation = evaluation_documents(documents, given)
            self.prepared = prepare(self.model, documents, evaluation, config.cutting(), warn)
            self.chunks = self._of_this_shard(self.prepared.fit, self.prepared.heldout)
            self.header = self._header(n_evaluation=len(evaluation) if given else 0)
            if self.store:
                self._look_at_sums()
            self._stack = stack.pop_all()

    def _of_this_shard(self, fitted: list[Chunk], heldout: list[Chunk]) -> dict[str, list[Chunk]]:
        """Chunks by part. Raises TextError when nothing is left to fit."""
        if len(fitted) < self.n_shards:
            raise RidgefillError(f"shard: expected at most {len(fitted)} shards of {len(fitted)} chunks, found {self.n_shards}")
        return {part: c[self.shard - 1 :: self.n_shards] for part, c in (("fit", fitted), ("heldout", heldout))}

    def _fingerprints(self) -> dict[int, dict]:
        """By split, of the file that the maps are for."""
        splits, served = self.config.splits, self.config.served
        if not served:
            return {s: self.model.fingerprint(s) for s in splits}
        check_copy(self.config.model, served)
        with Model(served) as model:
            return {s: model.fingerprint(s) for s in splits}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    #
    # what a file of sums says
    #

    def _settings(self) -> dict[str, object]:
        """Everything that the sums depend on. Threads and accelerators change them by rounding only."""
        c, fingerprint = self.config, self.model.fingerprint(min(self.config.splits))
        tokens = (np.asarray(k.tokens, "<i4").tobytes() for k in (*self.prepared.fit, *self.prepared.heldout))
        used, heldout = self.prepared.documents
        return {
            "model": fingerprint["name"],
            "layers": self.model.n_layer,
            "width": self.model.n_embd,
            "tokenizer": fingerprint["tokenizer_sha256"],
            "model file": file_sha256(c.model),
            "splits": sorted(c.splits),
            "sums for kinds": [targets.layout.family for targets, _ in self.families],
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

    def _header(self, n_evaluation: int) -> Header:
        """Of the sums before the first chunk."""
        used, heldout = self.prepared.documents
        options = self.config.options() + [f"dropped={name}" for name in self.prepared.dropped]
        return Header(
            settings=self._settings() if self.store else {},
            n_layer=self.model.n_layer,
            sink=self.config.sink,
            splits=self.config.splits,
            fingerprints=self._fingerprints(),
            record={
                "sources": sorted({f"{d.source}; {d.licence}" for d in used + heldout}),
                "n_documents": len(used),
                "n_heldout_documents": len(heldout),
                "seed": self.config.seed,
                "options": options + ([f"evaluation_documents={n_evaluation}"] if n_evaluation else []),
            },
            layouts=[targets.layout for targets, _ in self.families],
            n_shards=self.n_shards,
            shards=[self.shard],
            done={part: 0 for part in self.chunks},
            total={part: len(c) for part, c in self.chunks.items()},
        )

    def _look_at_sums(self) -> None:
        """Take over what a file of sums has done, if there is one. Raises SumsError when it is of something else."""
        if not self.store.path.exists():
            need, free = self._sums_bytes(), shutil.disk_usage(self.store.path.absolute().parent).free
            if free < need:
                raise SumsError(f"{self.store.path}: sums take {need:,} bytes, {free:,} are free there")
            return
        with Reader(self.store.path) as reader:
            found = reader.header
        mine, theirs = ({**h.settings, "shards": "all" if not h.missing else h.shard_names()} for h in (self.header, found))
        if differing := differences(mine, theirs):
            way_out = "name another file, or remove this one to begin anew"
            raise SumsError(f"{self.store.path} holds sums of something else: {differing}; {way_out}")
        self.header.done, self.header.n_shards, self.header.shards = found.done, found.n_shards, found.shards

    #
    # running
    #

    @property
    def layers(self) -> list[int]:
        """Layers whose inputs are captured."""
        return list(range(min(self.config.splits), self.model.n_layer))

    def plan(self) -> Plan:
        used, heldout = self.prepared.documents
        tokens = {part: sum(len(k.tokens) for k in c) for part, c in self.chunks.items()}
        return Plan(
            n_documents=len(used),
            n_heldout_documents=len(heldout),
            n_tokens=tokens["fit"],
            n_heldout_tokens=tokens["heldout"],
            n_tokens_done=self._tokens_done(),
            memory_bytes=self._memory_bytes(),
            memory_available=os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            sums_bytes=self._sums_bytes(),
        )

    def _tokens_done(self) -> int:
        return sum(len(k.tokens) for part, c in self.chunks.items() for k in c[: self.header.done[part]])

    def _widths(self, targets) -> dict[int, int]:
        return {il: targets.layout.d_out(il) for il in self.layers[1:]}

    def _sums_bytes(self) -> int:
        splits = self.config.splits
        return sum(memory_bytes(s, t.layout.d_in(), self._widths(t)) for t, _ in self.families for s in splits)

    def _memory_bytes(self) -> int:
        c = self.config
        # the library's buffer, our copy, and one set in the making
        need = 3 * 4 * c.ctx * self.model.n_embd * len(self.layers) + self._sums_bytes()
        solving = 0
        for targets, kinds in self.families:
            d_in, widths = targets.layout.d_in(), self._widths(targets)
            need += targets.weight_bytes
            # features of a chunk, float32 and the block in float64
            need += (4 * c.ctx + 8 * min(c.ctx, MAX_ROWS)) * d_in * len(c.splits)
            # maps wait as float32 at most until all are solved; the solver works on five square matrices, and on five more
            # where maps with and without the row before are mixed
            need += sum(4 * d_in * widths[il] for s in c.splits for il in widths if il > s) * len(kinds)
            mixed = "kv_prev" in kinds and c.prev_share < 1
            solving = max(solving, 8 * 5 * (d_in**2 + mixed * self.model.n_embd**2))
        return need + solving

    def _begin(self) -> list[Sums]:
        """Sums to add to: those on disk, or new ones."""
        if any(self.header.done.values()):
            with Reader(self.store.path) as reader:
                return reader.sums()
        return [Sums(targets.layout, self.config.splits, self.model.n_layer) for targets, _ in self.families]

    def _collect(self, report: Report, on_estimate: Callable[[Estimate], None]) -> list[Sums]:
        """Fitted and held-out sums of all chunks, by family of kinds."""
        sums, pending = self._begin(), [(p, k) for p, c in self.chunks.items() for k in c[self.header.done[p] :]]
        done = self._tokens_done()
        total = done + sum(len(k.tokens) for _, k in pending)
        report("capture", done, total)
        if not pending:
            return sums
        c, estimated = self.config, False
        saver = _Saver(self.store, self.header, sums, c.save_every) if self.store else None
        chosen = slice(c.sink, None, c.row_stride)
        with (
            StopRequest() if saver else nullcontext() as stop,
            Context(self.model, c.ctx, n_batch=c.ctx, n_threads=c.threads) as ctx,
            closing(activations(ctx, [chunk for _, chunk in pending], self.layers)) as captured,
        ):
            began = time.monotonic()
            for (part, chunk), inputs in zip(pending, captured, strict=True):
                for (targets, _), s in zip(self.families, sums, strict=True):
                    s.add(targets, part, inputs, chosen)
                self.header.done[part] += 1
                done += len(chunk.tokens)
                report("capture", done, total)
                if not estimated:
                    estimated = True
                    on_estimate(Estimate(len(chunk.tokens) / (time.monotonic() - began), total - done))
                if saver and (stop.asked or saver.due()):
                    saver.save()
                if saver and stop.asked:
                    raise Stopped(f"stopped after {done:,} of {total:,} tokens; the same command goes on from {c.sums}")
        if saver:
            saver.save()
        return sums

    def run(self, report: Report = no_report, on_estimate: Callable[[Estimate], None] = lambda estimate: None) -> list[Result]:
        """Capture, solve and write; a shard is captured only. Nothing is written before every split is solved.

        Raises StatisticsError naming the layer when activations cannot be fitted, OutputExists when a file appeared
        meanwhile, SumsError when the file of sums cannot be written, Stopped when the user asked for it.
        """
        with threadpool_limits(self.config.threads):
            sums = self._collect(report, on_estimate)
            if not self.config.out:
                return []
            same_is_fine = bool(self.store)  # a run that was stopped while it wrote may have left some
            return fit.solve(self.config.wanted(), self.header, sums, report, same_is_fine, self.started)


def calibrate(config: Config, report: Report = no_report) -> list[Result]:
    """Fit and write the sidecars of `config`; see Calibration."""
    with Calibration(config) as run:
        return run.run(report)
