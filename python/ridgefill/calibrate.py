"""Fitting ridge maps for a GGUF model: text -> layer inputs -> sums -> maps -> sidecar, one file per split and kind.

Every split and kind of one call is fitted in the same pass over the text; where memory is short, in several, each for some of
the layers. With a file of sums a pass can be stopped and gone on with, or done in shards.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from . import score, sidecar
from .attention import Attention
from .capture import Chunk, activations
from .errors import RidgeError, RidgefillError
from .fit import Report, Result, Solution, Wanted, no_report
from .hf import Checkpoint, is_checkpoint
from .kinds import Targets, families
from .lib import Context, Model
from .model_file import check_copy, file_sha256
from .passes import Pass, Saver, layer_groups, sums_path
from .prepare import OVERLAP, Cutting, evaluation_documents, prepare
from .ranks import Ranks, of_torchrun
from .solve import LAMBDAS
from .statistics import memory_bytes
from .stopping import Stopped, StopRequest
from .sums import MAX_ROWS, Sums
from .sums_file import Header, Store
from .text import Document, Limit, read_documents


@dataclass
class Config:
    """What to calibrate and how."""

    model: str  # GGUF file, or a checkpoint (hf.is_checkpoint)
    out: str  # sidecar; see out_path(); "" for a shard, which makes none
    splits: list[int]  # split layers S, 1 <= S <= layers - 2
    text: list[str]  # files, folders and data sets (text.DATASET)
    kinds: list[str] = field(default_factory=lambda: ["input"])  # of kinds.KINDS
    map_type: str = "q8_0"  # of sidecar.MAP_TYPES
    sink: int = 4  # rows at the start of each sequence that are neither fitted nor filled
    tail: int = 512  # recommended tail, rows
    seed: int = 0  # order of the documents, hence which are held out
    n_tokens: int = 0  # tokens to fit on, 0: all
    heldout_tokens: int = 0  # tokens to hold out, 0: all of the documents held out
    heldout_documents: int | None = None  # None: those marked so, else a sixth
    ctx: int = 2048  # tokens run together from position 0
    threads: int = 2
    gpu_layers: int = 0
    force: bool = False  # replace existing files
    prev_share: float = 1.0  # of the row before in K of kind kv_prev: 1 as regressed, 0 as in kind kv
    rank: int = 128  # of kind input_lr
    served: str = ""  # GGUF file that the maps are for, where `model` is a checkpoint or a copy of it at higher precision
    dtype: str = ""  # of a checkpoint: of hf.DTYPES; "": f32 on a CPU, else bf16
    device: str = ""  # of a checkpoint: cpu or cuda; "": cpu
    lambdas: tuple[float, ...] = field(default=LAMBDAS)
    sums: str = ""  # file that keeps the sums; one that is there is gone on with
    save_every: float = 120.0  # seconds between two savings of the sums, 0: after each chunk
    layers_per_pass: int = 0  # most layers that are summed in one pass over the text, 0: all
    shard: str = ""  # "i/n": only make the sums of every n-th chunk, from the i-th on
    row_stride: int = 1  # every how many rows one is used
    chat_share: float = 0.0  # of the documents that are put into the model's chat template
    evaluation_text: list[str] = field(default_factory=list)  # files and folders that must share nothing with the text
    overlap: str = "refuse"  # documents that share text: of prepare.OVERLAP
    score: bool = True  # judge the maps as written on held-out text, and record that and a self-test in their files

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
            rank=self.rank,
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
        default = Config(model="", out="", splits=[], text=[])
        out = [f"{name}={getattr(self, name)}" for name in recorded if getattr(self, name) != getattr(default, name)]
        return out + (["overlap=keep"] if self.overlap == "keep" else [])


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


def _check_model(config: Config, model: Model) -> None:
    for split in config.splits:
        if not 1 <= split <= model.n_layer - 2:
            n = model.n_layer
            raise RidgefillError(f"split: expected 1 to {n - 2} for a model of {n} layers, found {split}")
    if reason := model.unsupported():
        raise RidgeError(f"{model.path} cannot be filled: {reason}")


def _check(config: Config, n_processes: int) -> None:
    if not 0 <= config.sink < config.ctx:
        raise RidgefillError(f"sink rows: expected 0 to {config.ctx - 1}, found {config.sink}")
    if config.row_stride < 1:
        raise RidgefillError(f"row stride: expected at least 1, found {config.row_stride}")
    if config.overlap not in OVERLAP:
        raise RidgefillError(f"overlap: expected one of {', '.join(OVERLAP)}, found {config.overlap!r}")
    if config.layers_per_pass < 0:
        raise RidgefillError(f"layers per pass: expected at least 1, or 0 for all, found {config.layers_per_pass}")
    if not 0 <= config.chat_share <= 1:
        raise RidgefillError(f"chat share: expected 0 to 1, found {config.chat_share}")
    if config.shard and not config.sums:
        raise RidgefillError("a shard needs a file for its sums")
    if bool(config.shard) == bool(config.out):
        raise RidgefillError("expected a file for the sidecar or a shard, which makes none, found both or neither")
    if config.shard and n_processes > 1:
        why = f"under torchrun, whose {n_processes} processes share the text"
        raise RidgefillError(f"shard: expected none {why}, found {config.shard}")


def _model_file(config: Config, from_checkpoint: bool) -> str:
    """The GGUF whose tokenizer, fingerprint and projections are used."""
    if not from_checkpoint and (config.dtype or config.device):
        raise RidgefillError(f"dtype and device: expected a checkpoint to go with them, found {config.model}")
    if from_checkpoint and not config.served:
        raise RidgefillError(f"{config.model} is a checkpoint: expected with --for the GGUF that the maps are for, found none")
    return config.served if from_checkpoint else config.model


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
    fields = (f for d in documents for f in (d.name, d.text, d.source, d.licence, d.partition))
    return f"{len(documents)} documents with sha256 {_sha256(*(f.encode() for f in fields))}"


class Calibration:
    """One run: plan() to look before it starts, run() to do it. Owns model, context and files of sums; use it in `with`.

    Under torchrun each process has one; they share the text, and the first one solves and writes.

    `warn` is called with lines about text that is left out.
    """

    def __init__(self, config: Config, warn: Callable[[str], None] = lambda line: None):
        self.config = config
        self.started = time.monotonic()
        process, n_processes = of_torchrun()
        self.shard, self.n_shards = (process + 1, n_processes) if n_processes > 1 else config.shard_of()
        self.solves = bool(config.out) and process == 0  # and writes
        self._estimated = False
        config.wanted().check()
        _check(config, n_processes)
        with ExitStack() as stack:
            self.ranks = stack.enter_context(Ranks()) if n_processes > 1 else None
            self._open_model(stack)
            mapped = range(min(config.splits) + 1, self.model.n_layer)
            groups = layer_groups(mapped, config.layers_per_pass)
            stores = [stack.enter_context(Store(p)) if p else None for p in self._sums_paths(groups)]
            # what was kept in a file of sums is not lost by finding out late that a sidecar exists, perhaps this very one
            resumes = any(store and store.path.exists() for store in stores)
            for split, kind in config.wanted().files() if config.out else []:
                sidecar.check_writable(config.out_path(split, kind), config.force or resumes)
            self.families = families(config.kinds, self.file, self.model.n_embd, mapped)
            self.attention = self._attention(mapped) if config.score and self.solves else None
            n_evaluation = self._prepare_text(warn)
            self.header = self._header(n_evaluation)
            self.passes = [self._pass(group, store, len(groups)) for group, store in zip(groups, stores, strict=True)]
            for p in self.passes:
                p.look_at_file(self._sums_bytes(p))
            self._stack = stack.pop_all()

    def _open_model(self, stack: ExitStack) -> None:
        c, from_checkpoint = self.config, is_checkpoint(self.config.model)
        self.file = _model_file(c, from_checkpoint)
        self.model = stack.enter_context(Model(self.file, n_gpu_layers=c.gpu_layers))
        _check_model(c, self.model)
        # what the map type cannot hold should not show after an hour of work
        c.wanted().check_widths(self.model.n_embd)
        self.checkpoint = Checkpoint(c.model, self.model, c.dtype, c.device, c.threads) if from_checkpoint else None

    def _prepare_text(self, warn: Callable[[str], None]) -> int:
        """Read, part and cut; the number of documents for evaluation that were given, and that the text was compared with."""
        # a sixth of what a data set gives is held out, and documents differ in length
        limit = Limit(3 * self.config.n_tokens // 2, lambda text: len(self.model.tokenize(text)))
        documents = read_documents(self.config.text, limit)
        given = read_documents(self.config.evaluation_text) if self.config.evaluation_text else []
        evaluation = evaluation_documents(documents, given)
        self.prepared = prepare(self.model, documents, evaluation, self.config.cutting(), warn)
        self.chunks = self._of_this_shard(self.prepared.fit, self.prepared.heldout)
        return len(evaluation) if given else 0

    def _sums_paths(self, groups: list[list[int]]) -> list[Path | None]:
        """Files of sums by pass, if any: each pass and each process has one of its own."""
        mine = [f"{self.shard}of{self.n_shards}"] if self.ranks else []
        marks = [[f"l{group[0]}-{group[-1]}"] if len(groups) > 1 else [] for group in groups]
        return [sums_path(self.config.sums, m + mine) if self.config.sums else None for m in marks]

    def _pass(self, layers: list[int], store: Store | None, n_passes: int) -> Pass:
        header = self.header
        if n_passes > 1:
            header = replace(
                header,
                settings={**header.settings, "layers summed": f"{layers[0]}-{layers[-1]}"},
                splits=[s for s in header.splits if s < layers[-1]],
                layers=layers,
                done=dict(header.done),
            )
        return Pass(layers, header, store)

    def _attention(self, mapped: range) -> Attention:
        """What scoring reads of the model, checked before the work."""
        try:
            attention = Attention(self.file)
            for il in mapped:
                attention.check(il)
            return attention
        except RidgefillError as e:
            raise RidgefillError(f"the maps could not be scored: {e}; --no-score leaves that out") from e

    def _of_this_shard(self, fitted: list[Chunk], heldout: list[Chunk]) -> dict[str, list[Chunk]]:
        """Chunks by part. Raises TextError when nothing is left to fit."""
        if len(fitted) < self.n_shards:
            raise RidgefillError(f"shard: expected at most {len(fitted)} shards of {len(fitted)} chunks, found {self.n_shards}")
        return {part: c[self.shard - 1 :: self.n_shards] for part, c in (("fit", fitted), ("heldout", heldout))}

    def _fingerprints(self) -> dict[int, dict]:
        """By split, of the file that the maps are for."""
        splits, served = self.config.splits, self.config.served
        if not served or self.checkpoint:
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
            "model file": file_sha256(self.file),
            **({"checkpoint": self.checkpoint.sha256(), "dtype": self.checkpoint.dtype} if self.checkpoint else {}),
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
        if self.checkpoint:
            options += [f"checkpoint={Path(self.config.model).name}", f"dtype={self.checkpoint.dtype}"]
        return Header(
            settings=self._settings() if self.config.sums else {},
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
                "heldout": [d.sha256 for d in self.prepared.selection.heldout],
            },
            layouts=[targets.layout for targets, _ in self.families],
            n_shards=self.n_shards,
            shards=[self.shard],
            done={part: 0 for part in self.chunks},
            total={part: len(c) for part, c in self.chunks.items()},
        )

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

    def _sums_bytes(self, p: Pass) -> int:
        sizes = [(t.layout.d_in(), {il: t.layout.d_out(il) for il in p.layers}) for t, _ in self.families]
        return sum(memory_bytes(s, d_in, widths) for d_in, widths in sizes for s in p.header.splits)

    def _summing_bytes(self, p: Pass) -> int:
        ctx, splits = self.config.ctx, p.header.splits
        captured = 4 * ctx * self.model.n_embd * len(p.captured)  # of a GGUF the library has them too
        # while a chunk is summed for one family: its features, float32 and the block in float64; between chunks: the next one's inputs
        features = max((4 * ctx + 8 * min(ctx, MAX_ROWS)) * t.layout.d_in() * len(splits) for t, _ in self.families)
        return (1 if self.checkpoint else 2) * captured + max(features, captured) + self._sums_bytes(p)

    def _solving_bytes(self) -> int:
        """The solver works on five square matrices, and on five more where maps with and without the row before are mixed, or
        the rank is bounded."""
        def of(targets: Targets, kinds: list[str]) -> int:
            more = ("kv_prev" in kinds and self.config.prev_share < 1) or "input_lr" in kinds
            return 8 * 5 * (targets.layout.d_in() ** 2 + more * self.model.n_embd**2)

        return max(of(targets, kinds) for targets, kinds in self.families)

    def _maps_bytes(self, p: Pass) -> int:
        """Of all maps of a pass as float32: at most these wait until every pass is solved."""
        sizes = ((4 * t.layout.d_in() * t.layout.d_out(il) * len(kinds), il) for t, kinds in self.families for il in p.layers)
        return sum(size for size, il in sizes for s in self.config.splits if il > s)

    def _memory_bytes(self) -> int:
        held, most = sum(targets.weight_bytes for targets, _ in self.families), self._scoring_bytes()
        for p in self.passes:
            most = max(most, held + self._summing_bytes(p))
            held += self._maps_bytes(p)
            most = max(most, held + self._sums_bytes(p) + self._solving_bytes())
        return most

    def _scoring_bytes(self) -> int:
        if not self.attention:
            return 0
        n_layer, sizes = self.model.n_layer, []
        for targets, kinds in self.families:
            for split, kind in ((s, k) for s in self.config.splits for k in kinds):
                maps = {il: (targets.layout.d_in(kind), targets.layout.d_out(il)) for il in range(split + 1, n_layer)}
                sizes.append(score.memory_bytes(self.attention, split, n_layer, maps))
        return max(sizes)

    @contextmanager
    def _captured(self, chunks: list[Chunk], layers: list[int]) -> Iterator[Iterator[dict[int, np.ndarray]]]:
        """Inputs of `layers` of each chunk, from the checkpoint or the library."""
        c = self.config
        if self.checkpoint:
            with closing(self.checkpoint.activations(chunks, layers)) as captured:
                yield captured
            return
        with (
            Context(self.model, c.ctx, n_batch=c.ctx, n_threads=c.threads) as ctx,
            closing(activations(ctx, chunks, layers)) as captured,
        ):
            yield captured

    def _collect(self, p: Pass, report: Report, on_estimate: Callable[[Estimate], None]) -> list[Sums]:
        """Fitted and held-out sums of all chunks, by family of kinds."""
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
            self._captured([chunk for _, chunk in pending], p.captured) as captured,
        ):
            began = time.monotonic()
            for (part, chunk), inputs in zip(pending, captured, strict=True):
                for (targets, _), s in zip(self.families, sums, strict=True):
                    s.add(targets, part, inputs, chosen)
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

    def run(self, report: Report = no_report, on_estimate: Callable[[Estimate], None] = lambda estimate: None) -> list[Result]:
        """Capture, solve and write; a shard, and under torchrun any process but the first, captures only. Nothing is written
        before every split is solved.

        Raises StatisticsError naming the layer when activations cannot be fitted, OutputExists when a file appeared
        meanwhile, SumsError when a file of sums cannot be written, Stopped when the user asked for it.
        """
        with threadpool_limits(self.config.threads):
            solution = Solution(self.config.wanted(), self.model.n_layer, report)
            for p in self.passes:
                sums = self._collect(p, report, on_estimate)
                if self.ranks:
                    self.ranks.reduce(sums)
                if self.solves:
                    solution.add(p.header, sums)
                del sums  # the next pass, and scoring, need the memory
            if not self.solves:
                return []
            # a run that was stopped while it wrote may have left some
            results = solution.write(self.started, same_is_fine=bool(self.config.sums))
            del solution
            return self._score(results, report) if results and self.config.score else results

    def _score(self, results: list[Result], report: Report) -> list[Result]:
        """Judge the files that were written and put scores and self-test into them. Raises Stopped on Ctrl-C."""
        pieces, served = score.pieces(self.prepared.heldout, self.config.sink), self.config.served
        n, out = sum(len(p.tokens) for p in pieces), []
        try:
            with Model(served) if served and not self.checkpoint else nullcontext(self.model) as model:
                for i, r in enumerate(results):

                    def of_all(stage: str, done: int, total: int, i: int = i) -> None:
                        report(stage, i * n + done, len(results) * n)

                    heldout, n_threads = self.prepared.selection.heldout, self.config.threads
                    found, _, _ = score.judge(self.model, r.path, pieces, heldout, n_threads, model, of_all)
                    out.append(replace(r, scores=found.values, seconds=time.monotonic() - self.started))
        except KeyboardInterrupt:
            left = ", ".join(r.path for r in results[len(out) :])
            raise Stopped(f"stopped while scoring; the maps are written, without scores in {left}: see `ridgefill score`") from None
        return out


def calibrate(config: Config, report: Report = no_report) -> list[Result]:
    """Fit and write the sidecars of `config`; see Calibration."""
    with Calibration(config) as run:
        return run.run(report)
