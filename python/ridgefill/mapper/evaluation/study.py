"""A study of a mapper: a gate, then sets of items, run through every arm and summarised.

Sets are `loss` (tokens after a prefix, one window per document), `single` and `passwords` (facts in mapped rows, answered freely, and
as the sets `single-choice` and `passwords-choice` picked among others by likelihood), `turns` (a conversation), and tasks of files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ... import lib
from ...evaluation import facts, loss, tasks
from ...evaluation.errors import EvaluationError
from ...evaluation.journal import Journal
from ...evaluation.study import about_model, make_windows
from ...evaluation.texts import Window
from ...fit import Report, no_report
from ...text import Document
from .. import sidecar
from . import choices, harness, report, turns
from .engine import Arm, Engine, with_other

CHOICE = "-choice"
FACTS = ("single", "passwords")
SETS = ("loss", *FACTS, turns.NAME)
ALONE = ("loss", turns.NAME)  # sets whose records have fields of their own
GATE_TOKENS = 500  # predictions that native must give as the target does
GATE_LOGITS = 1e-3  # largest change of a logit, or twice that of the arm noise where this is more: weights in f16 make much of a last bit
GATE_ROWS = 1e-5  # largest change of a number in the cache, relative to the largest of its layer


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured and how much of it; rows and tokens are counts.

    documents, prefix, tail, scored     loss: windows, rows before the scored tokens, last rows of these, scored tokens
    items, rows, item_tail, chat        prompts of each task made here, their length, last rows that the target runs, whether chats
    answer                              tokens of a free answer, at most
    turns, turn                         turns of a conversation, tokens of each; one in each of `documents`
    questions, question_tail, shots     of each file of a task: questions, last rows of a prompt, examples (None: the task's own)
    arms                                names of engine.ARMS
    """

    documents: int = 20
    prefix: int = 1024
    tail: int = 128
    scored: int = 256
    items: int = 48
    rows: int = 1024
    item_tail: int = 128
    chat: bool = True
    answer: int = facts.N_ANSWER
    turns: int = 10
    turn: int = 96
    questions: int = 100
    question_tail: int = 8
    shots: int | None = None
    seed: int = 1
    arms: tuple[str, ...] = ("target", "transfer")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and field.name != "seed" and value < 1:
                raise EvaluationError(f"{field.name}: expected a number of 1 or more, found {value}")
        if report.TARGET not in self.arms:
            raise EvaluationError(f"arms: expected {report.TARGET}, which the others are compared with, found {', '.join(self.arms)}")
        if self.turns < 2:
            raise EvaluationError(f"turns: expected 2 or more, found {self.turns}")

    def n_ctx(self, sets: Sequence[str]) -> int:
        """Cells that the longest item of these sets needs, files of tasks left out."""
        needs = {"loss": self.prefix + self.scored, turns.NAME: self.turns * self.turn}
        return max([needs["loss"], *(needs.get(what, self.rows + max(self.answer, choices.N_TOKENS)) for what in sets)])


def about(what: str) -> str:
    """What a set is, in a line."""
    ours = {"loss": "tokens of real text behind a prompt", turns.NAME: "a conversation in which the two models answer in turn"}
    if what in ours:
        return ours[what]
    task = what.removesuffix(CHOICE)
    if task not in FACTS:
        return "answered freely" if harness.TASKS[task].free else "multiple choice by summed log-probability"
    return tasks.TASKS[task].about + (", among others of its kind, by likelihood" if what != task else ", answered freely")


def check_sets(sets: Sequence[str], files: Mapping[str, str]) -> None:
    if unknown := sorted(set(sets) - set(SETS)):
        raise EvaluationError(f"sets: expected some of {', '.join(SETS)}, found {', '.join(unknown)}")
    if unknown := sorted(set(files) - set(harness.TASKS)):
        raise EvaluationError(f"task: expected some of {', '.join(harness.TASKS)}, found {', '.join(unknown)}")


class Study:
    """Items of several sets, all of them made and checked before the first one runs.

    source, target  lib.Model
    mapper, back    files of the mappers from source to target and, for the set `turns`, from target to source
    docs            text that neither was fitted on
    files           by task of harness.TASKS, the file of its records
    """

    def __init__(
        self, source: lib.Model, target: lib.Model, mapper: str, docs: Sequence[Document], sets: Sequence[str], s: Settings,
        back: str = "", files: Mapping[str, str] | None = None, n_threads: int = 2,
    ):  # fmt: skip
        files = dict(files or {})
        check_sets(sets, files)
        self.measured, self.settings = [*dict.fromkeys(sets), *files], s
        self.sets = [result for what in self.measured for result in ([what, what + CHOICE] if what in FACTS else [what])]
        if turns.NAME in sets and not back:
            raise EvaluationError(f"{turns.NAME}: expected a mapper from target to source too (--back), found none")
        self._arms = [Arm(name) for name in s.arms]
        n_sink = sidecar.read(mapper).sink_rows
        self._check_lengths(n_sink)
        self.items = {task: harness.load(target, task, path, s.questions, s.question_tail, n_sink, s.shots) for task, path in files.items()}
        n_ctx = max([s.n_ctx(sets), *(self._longest(item) for items in self.items.values() for item in items)])
        for model in (source, target):
            if n_ctx > model.n_ctx_train:
                raise EvaluationError(f"lengths: expected at most {model.n_ctx_train} rows, which {model.path} was trained for, found {n_ctx}")
        with ExitStack() as stack:
            self.engine = stack.enter_context(Engine(source, target, mapper, n_ctx, n_threads, s.seed))
            self.engine.require(self._arms)
            self._back = stack.enter_context(lib.Mapper(target, source, back)) if back else None
            self.windows = make_windows(target, docs, s.documents, s.prefix, s.scored, s.seed)
            self.items |= self._make(docs)
            self._stack = stack.pop_all()
        self.about = {
            "model": about_model(target),
            "source": about_model(source),
            "mapper": self._about_mapper(self.engine.mapper),
            "back": self._about_mapper(self._back) if self._back else None,
            "sources": sorted({d.source for d in docs}),
            "text": hashlib.sha256("".join(d.text for d in docs).encode()).hexdigest(),
            "files": {task: hashlib.sha256(Path(path).read_bytes()).hexdigest() for task, path in files.items()},
            "sets": self.sets,
            "settings": {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(s).items()} | {"n_sink": n_sink},
        }

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    def _check_lengths(self, n_sink: int) -> None:
        s = self.settings
        for whole, tail in (("prefix", "tail"), ("rows", "item_tail")):
            if getattr(s, whole) <= getattr(s, tail) + n_sink:
                raise EvaluationError(f"{tail}: expected fewer than {getattr(s, whole) - n_sink} rows, so that some are mapped, found {getattr(s, tail)}")
        if s.turn <= n_sink:
            raise EvaluationError(f"turn: expected more than the {n_sink} sink rows, found {s.turn}")

    @staticmethod
    def _longest(item: choices.Question | harness.Problem) -> int:
        if isinstance(item, harness.Problem):
            return len(item.tokens) + harness.N_GENERATED
        return max(len(prompt) + len(answer) for prompt, answer in item.requests)

    @staticmethod
    def _about_mapper(m: lib.Mapper) -> dict:
        file = sidecar.read(m.path)
        return {
            "file": Path(m.path).name,
            "hash": m.hash,
            "bytes": m.size,
            "previous": file.previous,
            "n_tokens": file.calibration.n_tokens,
            "parts": {
                part: {
                    "n_sources": [len(x) for x in maps.sources], "r2": maps.r2, "tried": maps.tried,
                    "r2_by_number": maps.r2_by_number.mean(axis=0).tolist(),
                }
                for part, maps in file.maps.items()
            },
        }  # fmt: skip

    def _make(self, docs: Sequence[Document]) -> dict[str, list]:
        s, model, out = self.settings, self.engine.model, {}
        if "loss" in self.measured:
            out["loss"] = self.windows
        if turns.NAME in self.measured:
            out[turns.NAME] = make_windows(model, docs, s.documents, s.turn, s.turn * (s.turns - 1), s.seed)
        wanted = [task for task in FACTS if task in self.measured]
        text = tasks.Text.of(model, docs) if wanted else None
        for task in wanted:
            made = tasks.make_items(model, text, task, s.items, s.seed, s.rows, s.item_tail, self.engine.n_sink, s.chat)
            out[task] = [dataclasses.replace(i, puzzle=dataclasses.replace(i.puzzle, n_answer=s.answer)) for i in made]
        return out

    def run(self, journal: Journal, progress: Report = no_report) -> dict:
        """{"gate": ..., set: {"items": records, "summary": by arm}, "comparisons": transfer beside each control}.

        Raises EvaluationError when native differs from the target.
        """
        found: dict = {"gate": journal.of("gate", lambda: [self.gate()])[0]}
        records_of, comparisons = {}, []
        for what in self.measured:
            records_of[what] = self._records(what, journal, progress)
            if what in FACTS:
                answers = records_of[what]
                records_of[what], records_of[what + CHOICE] = ([r for r in answers if ("n_choices" in r) == choice] for choice in (False, True))
        for what, records in records_of.items():
            if what == turns.NAME:
                found[what] = {"items": records, "summary": turns.summarise(records), "drift": turns.drift(records)}
                continue
            found[what] = {"items": records, "summary": report.losses(records) if what == "loss" else report.hits(records)}
            comparisons += report.compare(what, records)
        if comparisons:
            report.conclude(comparisons)
        return found | {"comparisons": comparisons}

    def _records(self, what: str, journal: Journal, progress: Report) -> list[dict]:
        """Records of all items of a set, those in the journal taken from it, in the order of the items."""
        items, records = self.items[what], []
        for i, item in enumerate(items):
            progress(what, i, len(items))
            name = item.document if what in ALONE else item.seed
            records += journal.of(f"{what} {name}", self._runner(what, i))
        progress(what, len(items), len(items))
        return records

    def _runner(self, what: str, i: int) -> Callable[[], list[dict]]:
        items, s, engine = self.items[what], self.settings, self.engine
        item = items[i]
        if what == turns.NAME:
            return lambda: turns.converse(engine, self._back, item, s.turn)
        prompts = [w.tokens[: s.prefix] for w in items] if what == "loss" else [it.tokens for it in items]
        arms = with_other(self._arms, choices.other_prompt(prompts, i))
        if what == "loss":
            return lambda: loss.score_window(engine, arms, item, s.tail, exact=Arm(report.TARGET), cut=Arm("empty+"))
        if what in FACTS:
            question = choices.of_fact(engine.model, item, s.chat)
            # one after the other, so that the engine begins the prompt of both once
            return lambda: [record for arm in arms for record in (tasks.ask(engine, arm, item), choices.ask(engine, arm, question))]
        ask = harness.ask if harness.TASKS[what].free else choices.ask
        return lambda: [ask(engine, arm, item) for arm in arms]

    #
    # gate
    #

    def gate(self) -> dict:
        """Give the target its own rows through the whole path and see that nothing changes: rows in the cache, logits, and the
        likeliest token of GATE_TOKENS predictions (or of as many as there are), where it leads the next by more than a logit may change.

        Raises EvaluationError naming what changed.
        """
        chosen = self.windows[: math.ceil(GATE_TOKENS / self.settings.scored)]
        rows, logits = zip(*map(self._through_the_path, chosen), strict=True)
        target, noise, native = (np.concatenate([x[name] for x in logits]) for name in ("target", "noise", "native"))
        change, floor = (float(np.abs(x - target).max()) for x in (native, noise))
        limit = max(GATE_LOGITS, 2 * floor)
        second, first = np.sort(target, axis=1)[:, -2:].T
        decided = first - second > limit
        n_equal = int((native.argmax(axis=1) == target.argmax(axis=1))[decided].sum())
        found = {"n": len(target), "n_decided": int(decided.sum()), "n_equal": n_equal, "rows": max(rows), "logits": change, "noise": floor, "limit": limit}
        if found["rows"] > GATE_ROWS:
            raise EvaluationError(f"native: expected the target's own rows back within {GATE_ROWS:g} of the largest, found {found['rows']:.3g}")
        if change > limit or n_equal < found["n_decided"]:
            raise EvaluationError(
                f"native: expected logits within {limit:.3g} and {found['n_decided']} equal tokens, found {change:.3g} and {n_equal}"
            )
        return found

    def _through_the_path(self, window: Window) -> tuple[float, dict[str, np.ndarray]]:
        """Largest change of a mapped row, relative to the largest number of its layer; and logits by arm."""
        s, engine = self.settings, self.engine
        logits, rows, end = {}, {}, s.prefix - s.tail
        for name in ("target", "noise", "native"):
            logits[name] = loss.read(engine, Arm(name), window, s.tail).logits
            if name != "noise":
                rows[name] = [engine.ctx.get_kv(0, il, part, engine.n_sink, end) for il in range(engine.model.n_layer) for part in sidecar.PARTS]
        return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(rows["native"], rows["target"], strict=True)), logits
