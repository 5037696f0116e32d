"""Fitting ridge maps for a GGUF model: text -> layer inputs -> sums -> maps -> sidecar, one file per split and kind.

Every split and kind of one call is fitted in the same pass over the text; where memory is short, in several, each for some of
the layers. With a file of sums a pass can be stopped and gone on with, or done in shards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from . import score, sidecar
from .attention import Attention
from .capture import Chunk, activations
from .errors import RidgeError, RidgefillError
from .fit import Report, Result, Solution, Wanted, no_report
from .gather import Estimate, Plan, TextConfig, TextRun  # noqa: F401  (Plan is a public name of this module)
from .hf import Checkpoint, is_checkpoint
from .kinds import Targets, families
from .lib import Context, Model
from .model_file import check_copy, file_sha256
from .passes import Pass, layer_groups, sums_path
from .ranks import Ranks, of_torchrun
from .solve import LAMBDAS
from .statistics import memory_bytes
from .stopping import Stopped
from .sums import MAX_ROWS, Sums
from .sums_file import MapsHeader, Store


@dataclass(kw_only=True)
class Config(TextConfig):
    """What to calibrate and how."""

    model: str  # GGUF file, or a checkpoint (hf.is_checkpoint)
    out: str  # sidecar; see out_path(); "" for a shard, which makes none
    splits: list[int]  # split layers S, 1 <= S <= layers - 2
    kinds: list[str] = field(default_factory=lambda: ["input"])  # of kinds.KINDS
    map_type: str = "q8_0"  # of sidecar.MAP_TYPES
    tail: int = 512  # recommended tail, rows
    force: bool = False  # replace existing files
    prev_share: float = 1.0  # of the row before in K of kind kv_prev: 1 as regressed, 0 as in kind kv
    rank: int = 128  # of kind input_lr
    served: str = ""  # GGUF file that the maps are for, where `model` is a checkpoint or a copy of it at higher precision
    dtype: str = ""  # of a checkpoint: of hf.DTYPES; "": f32 on a CPU, else bf16
    device: str = ""  # of a checkpoint: cpu or cuda; "": cpu
    lambdas: tuple[float, ...] = field(default=LAMBDAS)
    layers_per_pass: int = 0  # most layers that are summed in one pass over the text, 0: all
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


def _check_model(config: Config, model: Model) -> None:
    for split in config.splits:
        if not 1 <= split <= model.n_layer - 2:
            n = model.n_layer
            raise RidgefillError(f"split: expected 1 to {n - 2} for a model of {n} layers, found {split}")
    if reason := model.unsupported():
        raise RidgeError(f"{model.path} cannot be filled: {reason}")


def _check(config: Config, n_processes: int) -> None:
    config.check()
    if config.layers_per_pass < 0:
        raise RidgefillError(f"layers per pass: expected at least 1, or 0 for all, found {config.layers_per_pass}")
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


class Calibration(TextRun):
    """One run: plan() to look before it starts, run() to do it. Owns model, context and files of sums; use it in `with`.

    Under torchrun each process has one; they share the text, and the first one solves and writes.

    `warn` is called with lines about text that is left out.
    """

    def __init__(self, config: Config, warn: Callable[[str], None] = lambda line: None):
        process, n_processes = of_torchrun()
        super().__init__(config, *((process + 1, n_processes) if n_processes > 1 else config.shard_of()))
        self.solves = bool(config.out) and process == 0  # and writes
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
            n_evaluation = self._prepare_text(self.model, warn)
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
        """Everything that the sums depend on."""
        fingerprint = self.model.fingerprint(min(self.config.splits))
        return {
            "model": fingerprint["name"],
            "layers": self.model.n_layer,
            "width": self.model.n_embd,
            "tokenizer": fingerprint["tokenizer_sha256"],
            "model file": file_sha256(self.file),
            **({"checkpoint": self.checkpoint.sha256(), "dtype": self.checkpoint.dtype} if self.checkpoint else {}),
            "splits": sorted(self.config.splits),
            "sums for kinds": [targets.layout.family for targets, _ in self.families],
            **self._text_settings(),
        }

    def _header(self, n_evaluation: int) -> MapsHeader:
        """Of the sums before the first chunk."""
        of_checkpoint = [f"checkpoint={Path(self.config.model).name}", f"dtype={self.checkpoint.dtype}"] if self.checkpoint else []
        return MapsHeader(
            settings=self._settings() if self.config.sums else {},
            n_layer=self.model.n_layer,
            splits=self.config.splits,
            fingerprints=self._fingerprints(),
            layouts=[targets.layout for targets, _ in self.families],
            **self._text_header(n_evaluation, of_checkpoint),
        )

    #
    # running
    #

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
    def _captured(self, chunks: list[Chunk], p: Pass) -> Iterator[Iterator[dict[int, np.ndarray]]]:
        """Inputs of the layers of a pass of each chunk, from the checkpoint or the library."""
        c, layers = self.config, p.captured
        if self.checkpoint:
            with closing(self.checkpoint.activations(chunks, layers)) as captured:
                yield captured
            return
        with (
            Context(self.model, c.ctx, n_batch=c.ctx, n_threads=c.threads) as ctx,
            closing(activations(ctx, chunks, layers)) as captured,
        ):
            yield captured

    def _add(self, sums: list[Sums], part: str, captured: dict[int, np.ndarray], chosen: slice) -> None:
        for (targets, _), s in zip(self.families, sums, strict=True):
            s.add(targets, part, captured, chosen)

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
