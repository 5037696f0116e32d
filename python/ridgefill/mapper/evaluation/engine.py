"""Arms: the ways in which a prompt comes into a cache before it is answered, and the engine that brings it there."""

from __future__ import annotations

import dataclasses
import struct
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

import numpy as np

from ... import lib
from ...cost import Cost
from ...evaluation.arms import NOISE_UBATCH, Filled
from ...evaluation.errors import EvaluationError
from .. import sidecar
from ..models import PARTS
from . import nulls

# the rows between sinks and tail go through a mapper; `wrong` last, as the source runs another prompt for it
MAPPED = ("transfer", "random", "identity", "native", "wrong")
EMPTY = ("empty+", "empty")  # these rows are not there
ARMS = ("target", "noise", "source", *MAPPED, *EMPTY)
KV_TYPE = "f32"  # of every cache: what native changes must be seen, and not the rounding of a cache


@dataclasses.dataclass(frozen=True)
class Arm:
    """How the rows of a prompt before its tail come into the cache; the tail is always run by the model that answers.

    target    the target runs every row; the others are compared with it
    noise     the same, NOISE_UBATCH rows at a time: what differs from target is the noise floor
    source    the source runs every row and answers
    transfer  the target runs the sinks; the rows between them and the tail are the source's, mapped
    wrong     the same with the source's cache of `other`, another prompt
    random    the same through random weights of the fitted ones' scale
    identity  the same, the source's rows taken as they are
    native    the same with the target's own rows, through the identity: must be exact
    empty+    the target runs sinks and tail, at their positions; nothing is between them
    empty     the target runs the tail alone

    other  tokens that `wrong` takes the rows from
    """

    name: str
    other: tuple[int, ...] = ()

    rows = "none"  # no arm chooses rows that are exact besides: evaluation.tasks.ask looks at this

    def __post_init__(self):
        if self.name not in ARMS:
            raise EvaluationError(f"arm: expected one of {', '.join(ARMS)}, found {self.name!r}")

    @property
    def is_ridge(self) -> bool:
        """Whether the rows between sinks and tail are others than those of the model that answers."""
        return self.name in MAPPED + EMPTY


def with_other(arms: Sequence[Arm], other: Sequence[int]) -> list[Arm]:
    """The arms of one prompt, to which `other` is the wrong one."""
    return [dataclasses.replace(a, other=tuple(other)) if a.name == "wrong" else a for a in arms]


def allowed(source: lib.Model, target: lib.Model, file: sidecar.Mapper) -> tuple[str, ...]:
    """Names of the arms that two models and the mapper between them allow."""
    return tuple(name for name in ARMS if not _why_not(name, source, target, file))


def _why_not(arm: str, source: lib.Model, target: lib.Model, file: sidecar.Mapper) -> str | None:
    if arm == "source" and source.n_vocab != target.n_vocab:
        return f"expected logits of {target.n_vocab} tokens as the target has them, found {source.n_vocab}"
    return nulls.why_not_identity(file.source, file.target) if arm == "identity" else None


class Engine:
    """Two models and the mappers between them, with a context for each role, reused for every prompt.

    source, target  models with the same tokenizer
    mapper          file of the mapper from source to target
    n_ctx           cells of each context: the longest prompt and what is decoded after it

    `ctx` is the context that holds the prompt begun last. Raises RidgeError for a mapper that is refused.
    """

    def __init__(self, source: lib.Model, target: lib.Model, mapper: str, n_ctx: int, n_threads: int = 2, seed: int = 1):
        self.source, self.model, self.file = source, target, sidecar.read(mapper)
        self._seed = seed
        self._stack = ExitStack()
        try:
            self.mapper = self._stack.enter_context(lib.Mapper(source, target, mapper))
            self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="ridgefill-")))
            self._options = dict(n_ctx=n_ctx, n_threads=n_threads, type_k=KV_TYPE, type_v=KV_TYPE)
            self.target_ctx, self.source_ctx = (self._stack.enter_context(lib.Context(m, **self._options)) for m in (target, source))
        except BaseException:
            self._stack.close()
            raise
        self.ctx, self.n_sink = self.target_ctx, self.mapper.n_sink
        self._held: dict[lib.Context, tuple[int, ...]] = {}  # tokens whose rows, run by themselves, a context begins with
        self._begun: tuple | None = None  # what `ctx` holds the rows before the tail of

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    @cached_property
    def twin(self) -> lib.Context:
        """A second context of the target, whose rows `native` takes."""
        return self._stack.enter_context(lib.Context(self.model, **self._options))

    @cached_property
    def _noise(self) -> lib.Context:
        return self._stack.enter_context(lib.Context(self.model, **self._options, n_ubatch=NOISE_UBATCH))

    @cached_property
    def own(self) -> lib.Mapper:
        """The identity from the target to itself."""
        file = nulls.identity(self._folder / "native.gguf", self.file.target, self.file.target, self.file)
        return self._stack.enter_context(lib.Mapper(self.model, self.model, file))

    @cached_property
    def _identity(self) -> lib.Mapper:
        file = nulls.identity(self._folder / "identity.gguf", self.file.source, self.file.target, self.file)
        return self._stack.enter_context(lib.Mapper(self.source, self.model, file))

    @cached_property
    def _random(self) -> lib.Mapper:
        file = nulls.random(self._folder / "random.gguf", self.file, self._seed)
        return self._stack.enter_context(lib.Mapper(self.source, self.model, file))

    def require(self, arms: Sequence[Arm]) -> None:
        """Raises EvaluationError for an arm that these two models do not allow."""
        for arm in arms:
            if reason := _why_not(arm.name, self.source, self.model, self.file):
                raise EvaluationError(f"{arm.name}: {reason}")

    def begin(self, arm: Arm, prompt: Sequence[int], n_tail: int, seed: int = 0) -> tuple[list[int], int, Filled]:
        """Put the rows of a prompt before its tail into a cache, as the arm says.

        Returns (tokens left to decode in `ctx`, position of the first of them, what was filled): filled rows are those between
        sinks and tail that are mapped, or missing. `seed` is not used; ridgefill.evaluation's engine draws rows by it.

        Raises EvaluationError for a prompt without a row between sinks and tail.
        """
        n, end = len(prompt), len(prompt) - n_tail
        if end <= self.n_sink:
            raise EvaluationError(f"prompt: expected more than {self.n_sink + n_tail} rows (sinks and tail), so that some are mapped, found {n}")
        wanted = arm, tuple(prompt), n_tail
        begun, self._begun = self._begun, None
        if begun == wanted:
            self.ctx.seq_rm(0, end)
        elif arm.is_ridge:
            self.ctx = self.target_ctx
            self._held.pop(self.ctx, None)
            self.ctx.clear()
            if arm.name in MAPPED:
                self._map(arm, prompt, end)
            elif arm.name == "empty+" and self.n_sink:
                self._sinks(prompt)
                self._move_sinks(end)
        else:
            ctx = {"target": lambda: self.target_ctx, "noise": lambda: self._noise, "source": lambda: self.source_ctx}[arm.name]()
            self.ctx = self._holding(ctx, prompt[:end])
        self._begun = wanted
        filled = np.arange(self.n_sink, end) if arm.is_ridge else np.empty(0, int)
        return list(prompt[end:]), end, Filled(n, filled, (), self._cost_of(arm, n, end))

    def forget(self) -> None:
        """Let the next prompt be run anew: somebody else uses the contexts."""
        self._begun = None
        self._held.clear()

    def _sinks(self, prompt: Sequence[int]) -> None:
        if self.n_sink:
            self.ctx.decode(prompt[: self.n_sink], logits="none")

    def _map(self, arm: Arm, prompt: Sequence[int], end: int) -> None:
        """Sinks by the target, and the rows up to `end` by a mapper."""
        self._sinks(prompt)
        mapper = {"native": lambda: self.own, "identity": lambda: self._identity, "random": lambda: self._random}.get(arm.name, lambda: self.mapper)()
        rows = arm.other if arm.name == "wrong" else prompt
        if len(rows) < end:
            raise EvaluationError(f"{arm.name}: expected another prompt of at least {end} rows, found {len(rows)}")
        giver = self._holding(self.twin if arm.name == "native" else self.source_ctx, rows[:end])
        lib.Transfer(giver, self.ctx, mapper, self.n_sink, end).run().close()

    def _holding(self, ctx: lib.Context, tokens: Sequence[int]) -> lib.Context:
        """`ctx` with the rows of these tokens and no others, run anew unless it begins with them. The sinks are run by themselves,
        as they are in front of mapped rows.
        """
        tokens = tuple(tokens)
        if self._held.pop(ctx, None) == tokens:
            ctx.seq_rm(0, len(tokens))
        else:
            ctx.clear()
            for begin, end in ((0, self.n_sink), (self.n_sink, len(tokens))):
                if end > begin:
                    ctx.decode(tokens[begin:end], pos0=begin, logits="none")
        self._held[ctx] = tokens
        return ctx

    def _move_sinks(self, end: int) -> None:
        """Let the sinks, which `ctx` holds alone, count as rows end - n_sink to end - 1, so that the row at `end` may follow them.

        The library takes rows only at the position after the last. Keys are not turned: to every later row they are as far away as
        they were, at positions 0 to n_sink - 1.
        """

        def cells(first: int) -> bytes:
            return b"".join(struct.pack("<iIi", p, 1, 0) for p in range(first, first + self.n_sink))  # position, sequences, sequence

        first = end - self.n_sink
        before = [self.ctx.get_kv(0, il, part, 0, self.n_sink) for il in range(self.model.n_layer) for part in PARTS]
        state = self.ctx.state(0)
        if state.count(cells(0)) != 1:
            raise EvaluationError(f"empty+: expected the positions of {self.n_sink} cells once in the saved state, found them {state.count(cells(0))} times")
        self.ctx.set_state(0, state.replace(cells(0), cells(first)))
        after = [self.ctx.get_kv(0, il, part, first, end) for il in range(self.model.n_layer) for part in PARTS]
        if self.ctx.seq_pos_max() != end - 1 or not all(np.array_equal(a, b) for a, b in zip(before, after, strict=True)):
            raise EvaluationError("empty+: expected the same keys and values at other positions, found others")

    #
    # cost
    #

    @cached_property
    def _costs(self) -> tuple[Cost, Cost, float]:
        """Of target and source, and multiply-adds of the maps for one row."""
        maps = sum(self.file.d_in(p, il) * w for p in PARTS for il, w in enumerate(self.file.target.widths(p)))
        return Cost(self.model.path, self.model.n_layer), Cost(self.source.path, self.source.n_layer), float(maps)

    def _cost_of(self, arm: Arm, n: int, end: int) -> float:
        """Multiply-adds for the prompt once the source has run it, over those of the target alone; of `source`, all of its own."""
        target, source, maps = self._costs
        if not arm.is_ridge:
            return source.exact(n) / target.exact(n) if arm.name == "source" else 1.0
        kept = np.arange(n) >= end
        if arm.name != "empty":
            kept |= np.arange(n) < self.n_sink
        fill = maps if arm.name in MAPPED else 0.0
        return target.partly(kept, 0, fill, hidden=arm.name in EMPTY) / target.exact(n)
