"""A study: sets of items, run through every arm of a model and summarised.

Sets are `loss` (tokens after a prefix, one window per document), `digits` and `words` (facts), the tasks of tasks.TASKS, and
`splices` (rows of single layers exchanged in the prompts of `single`, for each file of maps instead of each arm).
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path

from .. import lib, sidecar
from ..fit import Report, no_report
from ..model_file import file_sha256
from ..splice import Splicer
from ..text import Document
from . import facts, loss, report, splices, tasks, texts
from .arms import Arm, Engine
from .errors import EvaluationError
from .journal import Journal

FACTS = {"digits": "a number in a sentence, judged whole", "words": "a password in a sentence, judged whole"}
SETS = ("loss", *FACTS, *tasks.TASKS, splices.NAME)
N_SINK = 4  # where no maps say so


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured and how much of it; rows and tokens are counts.

    documents, prefix, tail, scored, decode   loss: windows, P, T, tokens scored, tokens decoded greedily in each
    items, rows, item_tail, chat              prompts of each other set, their length, T, whether they are chats
    sources                                   first words of the sources of the text around facts; none: all text
    loss_margin, share_margin                 two arms are taken to be equal when their difference lies within this (nats, share
                                              of the items)
    """

    documents: int = 20
    prefix: int = 2048
    tail: int = 256
    scored: int = 256
    decode: int = 0
    items: int = 48
    rows: int = 1024
    item_tail: int = 128
    chat: bool = True
    sources: tuple[str, ...] = ()
    seed: int = 1
    loss_arms: tuple[str, ...] = ("exact",)
    item_arms: tuple[str, ...] = ("exact",)
    loss_margin: float = 0.02
    share_margin: float = 0.05

    def __post_init__(self):
        for name in ("documents", "prefix", "tail", "scored", "items", "rows", "item_tail"):
            if getattr(self, name) < 1:
                raise EvaluationError(f"{name}: expected a number of 1 or more, found {getattr(self, name)}")
        for name in ("loss_margin", "share_margin"):
            if not getattr(self, name) > 0:
                raise EvaluationError(f"{name}: expected a number above 0, found {getattr(self, name):g}")
        for name in ("loss_arms", "item_arms"):
            if "exact" not in getattr(self, name):
                raise EvaluationError(f"{name}: expected the arm exact, which the others are compared with, found {', '.join(getattr(self, name))}")
        for whole, tail in (("prefix", "tail"), ("rows", "item_tail")):
            if getattr(self, whole) <= getattr(self, tail) + N_SINK:
                raise EvaluationError(
                    f"{tail}: expected fewer than {getattr(self, whole) - N_SINK} rows, so that some can be filled, found {getattr(self, tail)}"
                )

    def arms(self, what: str) -> list[Arm]:
        names = {"loss": self.loss_arms, splices.NAME: ()}.get(what, self.item_arms)
        return [Arm.parse(name) for name in names]

    def n_ctx(self, sets: Sequence[str]) -> int:
        """Cells that the longest item of these sets needs."""
        after = max(facts.N_ANSWER, max(tasks.N_ANSWER.values()))
        needs = [self.prefix + max(self.scored, self.decode) if what == "loss" else self.rows + after for what in sets]
        return max(needs)


def about(what: str) -> str:
    """What a set is, in a line."""
    ours = {"loss": "tokens of real text behind a prompt", splices.NAME: "rows of single layers exchanged between exact and filled prompts"}
    return (ours | FACTS).get(what) or tasks.TASKS[what].about


def about_model(model: lib.Model) -> dict:
    """What a result says of a model."""
    return {
        "file": Path(model.path).name,
        "sha256": file_sha256(model.path),
        "architecture": model.architecture,
        "n_layer": model.n_layer,
        "file_type": model.meta("general.file_type"),
    }


def make_windows(model: lib.Model, docs: Sequence[Document], n: int, n_prefix: int, n_scored: int, seed: int) -> list[texts.Window]:
    """One window in each of n documents of all sources. Raises EvaluationError where they are too few, too short or have one name."""
    chosen = texts.spread(docs, n)
    if twice := sorted({d.name for d in chosen if [c.name for c in chosen].count(d.name) > 1}):
        raise EvaluationError(f"documents: expected names that differ, found {twice[0]} more than once")
    return texts.windows(model, chosen, n_prefix, n_scored, seed)


def check_sets(sets: Sequence[str]) -> None:
    if unknown := sorted(set(sets) - set(SETS)):
        raise EvaluationError(f"sets: expected some of {', '.join(SETS)}, found {', '.join(unknown)}")


def common_sink(maps: Sequence[lib.Maps]) -> int:
    """Rows at the start that all arms leave exact. Raises EvaluationError where maps do not agree on them."""
    found = {m.n_sink for m in maps} or {N_SINK}
    if len(found) > 1:
        raise EvaluationError(f"maps: expected the same number of sink rows in all, found {', '.join(map(str, sorted(found)))}")
    return found.pop()


def default_arms(maps: Sequence[lib.Maps], share: float) -> list[Arm]:
    """Exact, the noise floor, the cut context, POP; per split identity and nofill; per file of maps the fill, the fill with a
    `share` of the filled rows exact (random ones, those attended to most, or a longer tail), and nofill at the cost of the fill.
    """
    arms = [Arm("exact"), Arm("noise"), Arm("cut"), Arm("pop")]
    for split in sorted({m.split for m in maps}):
        arms += [Arm("nofill", split), Arm("identity", split)]
        for kind in sorted(m.kind for m in maps if m.split == split):
            fill = Arm("fill", split, kind=kind)
            more = [dataclasses.replace(fill, rows=rows, budget=share) for rows in ("random", "attention", "tail")] if share else []
            arms += [fill, *more, Arm("nofill", split, "equal", kind)]
    return arms


class Study:
    """Items of several sets, all of them made and checked before the first one runs.

    model, maps  lib.Model, and lib.Maps of every arm that needs some
    docs         text that no map was fitted on
    """

    def __init__(self, model: lib.Model, maps: Sequence[lib.Maps], docs: Sequence[Document], sets: Sequence[str], s: Settings, n_threads: int = 2):
        check_sets(sets)
        self.sets, self.settings = list(dict.fromkeys(sets)), s
        self._maps, self._n_sink, self._n_threads = maps, common_sink(maps), n_threads
        if splices.NAME in sets and not maps:
            raise EvaluationError(f"{splices.NAME}: expected maps, whose rows are exchanged with exact ones, found none")
        n_ctx = s.n_ctx(sets)
        if n_ctx > model.n_ctx_train:
            raise EvaluationError(
                f"lengths: expected at most {model.n_ctx_train} rows, which the model was trained for, found {n_ctx} with what is decoded"
            )
        self._stack = ExitStack()
        self.engine = self._stack.enter_context(Engine(model, maps, n_ctx, n_threads=n_threads, n_sink=self._n_sink))
        try:
            self.engine.require([a for what in sets for a in s.arms(what)])
            around = [d for d in docs if not s.sources or d.source.split()[0] in s.sources]
            if not around:
                known = ", ".join(sorted({d.source.split()[0] for d in docs}))
                raise EvaluationError(f"filler: expected sources among {known}, found {', '.join(s.sources)}")
            text = tasks.Text.of(model, around) if set(sets) & {*tasks.TASKS, splices.NAME} else None
            self.items = {what: self._make(what, docs, around, text) for what in self.sets}
        except BaseException:
            self._stack.close()
            raise
        self.about = {
            "model": about_model(model),
            "maps": [
                {
                    "split": m.split, "kind": m.kind, "file": Path(m.path).name, "hash": m.hash,
                    "scores": sidecar.measured_scores(sidecar.inspect(m.path)["keys"]),
                }
                for m in maps
            ],
            "sources": sorted({d.source for d in docs}),
            "text": hashlib.sha256("".join(d.text for d in docs).encode()).hexdigest(),
            "sets": self.sets,
            "settings": {k: list(v) if isinstance(v, tuple) else v for k, v in dataclasses.asdict(s).items()} | {"n_sink": self._n_sink, "n_answer": facts.N_ANSWER},
        }

    def __enter__(self) -> Study:
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    @cached_property
    def _splicer(self) -> Splicer:
        n_rows = self.settings.rows + facts.N_ANSWER
        return self._stack.enter_context(Splicer(self.engine.model, n_rows, self._n_threads, self._n_sink))

    def _make(self, what: str, docs: Sequence[Document], around: Sequence[Document], text: tasks.Text | None) -> list:
        s, model = self.settings, self.engine.model
        if what == "loss":
            return make_windows(model, docs, s.documents, s.prefix, s.scored, s.seed)
        if what in FACTS:
            return facts.make_items(model, around, what, s.items, s.seed, s.rows, s.item_tail, self._n_sink)
        task = splices.TASK if what == splices.NAME else what
        return tasks.make_items(model, text, task, s.items, s.seed, s.rows, s.item_tail, self._n_sink, s.chat)

    def run(self, journal: Journal, progress: Report = no_report) -> dict:
        """{set: {"items": records, "summary": by arm, "pairs": comparisons}}, with verdicts and adjusted p-values; splices are
        summarised by file of maps, without either.

        Each family is Holm's over all arms of the loss, over all arms of all other sets, and over all pairs of either.
        """
        found, families = {}, {}
        for what in self.sets:
            records = self._records(what, journal, progress)
            if what == splices.NAME:
                found[what] = {"items": records, "summary": splices.summarise(records), "pairs": []}
                continue
            is_loss = what == "loss"
            summary = report.summarise_loss(records) if is_loss else report.summarise_facts(records)
            margin = self.settings.loss_margin if is_loss else self.settings.share_margin
            pairs = [(report.compare_loss if is_loss else report.compare_facts)(records, a, b) for a, b in self._pairs(what)]
            families.setdefault(("arms", is_loss), []).extend(report.conclude(summary, margin))
            families.setdefault(("pairs", is_loss), []).extend(pairs)
            found[what] = {"items": records, "summary": summary, "pairs": pairs}
        for family in families.values():
            report.adjust(family)
        return found

    def _pairs(self, what: str) -> list[tuple[str, str]]:
        arms = self.settings.arms(what)
        pairs = report.control_pairs(arms)
        if what in FACTS:  # digit rows beside as many random ones
            pairs += [(a, b) for a in arms for b in arms if a.rows == "digits" and b == dataclasses.replace(a, rows="random")]
        return [(a.name, b.name) for a, b in pairs]

    def _records(self, what: str, journal: Journal, progress: Report) -> list[dict]:
        """Records of all items of a set, those in the journal taken from it, in the order of the items."""
        items, records = self.items[what], []
        for i, item in enumerate(items):
            progress(what, i, len(items))
            name = item.document if what == "loss" else item.seed
            records += journal.of(f"{what} {name}", self._runner(what, item))
        progress(what, len(items), len(items))
        return records

    def _runner(self, what: str, item) -> Callable[[], list[dict]]:
        s, engine = self.settings, self.engine
        if what == "loss":
            return lambda: loss.score_window(engine, s.arms("loss"), item, s.tail, s.seed, s.decode)
        if what == splices.NAME:
            return lambda: splices.measure(self._splicer, item, self._maps)
        ask = facts.ask if what in FACTS else tasks.ask
        return lambda: [ask(engine, arm, item) for arm in s.arms(what)]
