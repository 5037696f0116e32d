"""Retrieval tasks in the style of RULER (Hsieh et al. 2024, arXiv 2404.06654), made here from natural text given by path.

Needles, hops, numbers of answers and the tokens of an answer are those that the paper gives; wording, names and filler are
our own, and so are the counts of `common`, which grow with the prompt. The measure is the paper's: the share of the expected
strings that occur in the answer, capitals or not. All that answers a question lies between the sink rows and the tail.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np

from ..text import Document
from .arms import Arm, Engine
from .errors import EvaluationError
from .facts import FIRST, LAST, N_NOUNS, NOUNS, OPENING, Fact, respond
from .prompts import SLACK, Filler, Form, check_length, check_question, compose, deal, measured, rows_of
from .texts import rng

N_NEEDLES, N_CHAIN, N_COMMON, N_FREQUENT = 4, 5, 10, 3
N_ANSWER = {"needles": 128, "variables": 30, "common": 120, "frequent": 50}  # tokens, at most
COMMON_COUNT, COMMON_RATIO = 30, 10  # of each common word, at most; how many times as often as a rare one
ZETA = 2.0
LETTERS = np.array(list("abcdefghijklmnopqrstuvwxyz"))


@dataclasses.dataclass(frozen=True)
class Puzzle:
    """What a prompt hides and asks for.

    statements  to plant; the first of them stands at the depth of the item, the others anywhere, unless they are `ordered`
    references  strings that the answer must hold
    n_answer    tokens of an answer, at most
    """

    statements: tuple[str, ...]
    question: str
    references: tuple[str, ...]
    n_answer: int
    ordered: bool = False

    def score(self, answer: str) -> float:
        """Share of the references that occur in the answer."""
        return sum(r.lower() in answer.lower() for r in self.references) / len(self.references)

    def answered(self, answer: str) -> bool:
        """Whether an answer gives all references."""
        return self.score(answer) == 1

    def decided(self, answer: str) -> bool:
        """Whether further tokens cannot change the score."""
        return self.answered(answer)


@dataclasses.dataclass(frozen=True)
class Room:
    """What a puzzle may use.

    n_rows  of the text that its statements may take
    count   tokens of a text
    filler  all text of the prompt that is not the puzzle's
    words   of natural text, in small letters
    """

    n_rows: int
    count: Callable[[str], int]
    filler: str
    words: Sequence[str]


def _numbers(r: np.random.Generator, n: int) -> list[str]:
    return [str(x) for x in r.choice(np.arange(1_000_000, 10_000_000), n, replace=False)]


def _facts(r: np.random.Generator, n_names: int, n_values: int) -> list[Fact]:
    names = [f"{FIRST[i // len(LAST)]} {LAST[i % len(LAST)]}" for i in r.choice(len(FIRST) * len(LAST), n_names, replace=False)]
    values = _numbers(r, n_names * n_values)
    return [Fact("digits", name, values.pop()) for name in names for _ in range(n_values)]


def _single(r: np.random.Generator, room: Room, n_names: int = 1) -> Puzzle:
    facts = _facts(r, n_names, 1)
    return Puzzle(tuple(f.sentence for f in facts), facts[0].question, (facts[0].value,), N_ANSWER["needles"])


def _passwords(r: np.random.Generator, room: Room) -> Puzzle:
    name, words = _facts(r, 1, 1)[0].name, " ".join(r.choice(NOUNS, N_NOUNS, replace=False))
    fact = Fact("words", name, words)
    return Puzzle((fact.sentence,), fact.question, (words,), N_ANSWER["needles"])


def _multikey(r: np.random.Generator, room: Room) -> Puzzle:
    return _single(r, room, N_NEEDLES)


def _multivalue(r: np.random.Generator, room: Room) -> Puzzle:
    facts = _facts(r, 1, N_NEEDLES)
    question = f"{N_NEEDLES} secret numbers of {facts[0].name} are in the text. What are they? Answer with the numbers only."
    return Puzzle(tuple(f.sentence for f in facts), question, tuple(f.value for f in facts), N_ANSWER["needles"])


def _multiquery(r: np.random.Generator, room: Room) -> Puzzle:
    facts = _facts(r, N_NEEDLES, 1)
    names = ", ".join(f.name for f in facts[:-1]) + f" and {facts[-1].name}"
    question = f"What are the secret numbers of {names}? Answer with the numbers only, in this order."
    return Puzzle(tuple(f.sentence for f in facts), question, tuple(f.value for f in facts), N_ANSWER["needles"])


def _variables(r: np.random.Generator, room: Room) -> Puzzle:
    names = _words(r, N_CHAIN, 5, room.filler, upper=True)
    value = str(r.integers(10_000, 100_000))
    holds = [value, *(f"VAR {name}" for name in names[:-1])]
    statements = tuple(f"VAR {name} = {held}." for name, held in zip(names, holds, strict=True))
    question = f"Which {N_CHAIN} variables hold the value {value}, given to them directly or through others? Answer with their names only."
    return Puzzle(statements, question, tuple(names), N_ANSWER["variables"], ordered=True)


def _words(r: np.random.Generator, n: int, n_letters: int, filler: str, upper: bool = False) -> list[str]:
    """n invented words that are not in the filler. They have the same length, so that none is part of another."""
    found: dict[str, None] = {}
    while len(found) < n:
        word = "".join(r.choice(LETTERS, n_letters))
        if word not in filler.lower():
            found[word.upper() if upper else word] = None
    return list(found)


def _common(r: np.random.Generator, room: Room) -> Puzzle:
    pool = [room.words[i] for i in r.permutation(len(room.words))]
    common: list[str] = []
    for word in pool:
        if len(common) < N_COMMON and word not in room.filler.lower() and not any(word in c or c in word for c in common):
            common.append(word)
    rare = [w for w in pool if not any(c in w for c in common)]

    def entries(n: int) -> list[str]:
        count = min(COMMON_COUNT, n // (2 * N_COMMON))
        times = max(1, count // COMMON_RATIO)
        return common * count + rare[: (n - count * N_COMMON) // times] * times

    n = _fitting(room, lambda n: _listed(entries(n)))
    if len(common) < N_COMMON or n < 8 * N_COMMON:
        raise EvaluationError(
            f"common: expected {N_COMMON} words that are nowhere else in the prompt and room for {8 * N_COMMON} in its filled "
            f"rows, found {len(common)} and room for {n}"
        )
    question = f"Which {N_COMMON} words stand most often in the list? Answer with these words only."
    return Puzzle((_listed(r.permutation(entries(n))),), question, tuple(common), N_ANSWER["common"])


def _fitting(room: Room, text: Callable[[int], str]) -> int:
    """A size n for which text(n) takes up nearly all of the room."""
    n = room.n_rows
    while n and room.count(text(n)) > 0.95 * room.n_rows:
        n = int(0.95 * n)
    return n


def _listed(words: Sequence[str]) -> str:
    return "List of words: " + " ".join(f"{i}. {word}" for i, word in enumerate(words, 1))


def _frequent(r: np.random.Generator, room: Room) -> Puzzle:
    coded = _words(r, 200, 6, room.filler)

    def entries(n: int) -> np.ndarray:
        weights = np.arange(1, len(coded) + 2) ** -ZETA
        # the likeliest word is dots, which nobody asks for
        return np.repeat(["......", *coded], np.round(n * weights / weights.sum()).astype(int))

    n = _fitting(room, lambda n: " ".join(entries(n)))
    if n < 50:
        raise EvaluationError(f"frequent: expected room for 50 words in the filled rows, found it for {n}")
    question = f"Leave the dots out. Which {N_FREQUENT} words stand most often in the coded text? Answer with these words only."
    text = "Coded text: " + " ".join(r.permutation(entries(n))) + "."
    return Puzzle((text,), question, tuple(coded[:N_FREQUENT]), N_ANSWER["frequent"])


@dataclasses.dataclass(frozen=True)
class Task:
    """How a puzzle is made, and what it is, in a line."""

    puzzle: Callable[[np.random.Generator, Room], Puzzle]
    about: str


TASKS = {
    "single": Task(_single, "one number of one person"),
    "passwords": Task(_passwords, "three words of one person; not a task of RULER"),
    "multikey": Task(_multikey, f"numbers of {N_NEEDLES} persons, one of them is asked for"),
    "multivalue": Task(_multivalue, f"{N_NEEDLES} numbers of one person, all of them are asked for"),
    "multiquery": Task(_multiquery, f"numbers of {N_NEEDLES} persons, all of them are asked for"),
    "variables": Task(_variables, f"a chain of {N_CHAIN} variables that hold one number: which ones hold it?"),
    "common": Task(_common, f"a list of words: which {N_COMMON} stand there most often?"),
    "frequent": Task(_frequent, f"invented words whose counts follow a zeta law: which {N_FREQUENT} are the most frequent?"),
}
DEPTH_TASKS = ("single", "passwords", "multikey")  # one needle answers, at the depth of the item
BLOCKS = ("common", "frequent")  # one statement fills all rows between sink and tail


@dataclasses.dataclass(frozen=True)
class TaskItem:
    """One prompt. Row numbers count from its first token.

    depth  where the needle was to stand, as a share of the rows between sink and tail; None where there are several
    rows   [first, last + 1) of each statement
    """

    task: str
    seed: int
    puzzle: Puzzle
    documents: tuple[str, ...]
    depth: float | None
    tokens: tuple[int, ...]
    n_tail: int
    rows: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Text:
    """Natural text in sentences: prompts.measured(), and its words of four to eight small letters."""

    sentences: list[tuple[str, str, int]]
    words: tuple[str, ...]

    @classmethod
    def of(cls, model, docs: Sequence[Document]) -> Text:
        words = {w for d in docs for w in re.findall(r"(?<![\w'])[a-z]{4,8}(?![\w'])", d.text)}
        return cls(measured(model, docs), tuple(sorted(words)))


def make_items(
    model, text: Text, task: str, n: int, seed: int, n_rows: int, n_tail: int, n_sink: int = 4, chat: bool = True, n_depths: int = 8
) -> list[TaskItem]:
    """n prompts of n_rows tokens, less SLACK at most; no two of them share a sentence of the text.

    model  has tokenize, piece and, for a chat, chat

    Raises EvaluationError for an unknown task, for too little text, and for an item that breaks a rule of check_item.
    """
    if task not in TASKS:
        raise EvaluationError(f"task: expected one of {', '.join(TASKS)}, found {task!r}")
    dealt = deal(text.sentences, n_rows, seed, task)
    if len(dealt) < n:
        raise EvaluationError(f"{task}: expected text for {n} prompts of {n_rows} rows, none used twice, found it for {len(dealt)}")
    items = []
    for i in range(n):
        depth = (i % n_depths + 0.5) / n_depths
        items.append(make_item(model, dealt[i], text.words, task, seed * 10_000 + i, n_rows, n_tail, depth, n_sink, chat))
    return items


def make_item(
    model, filler: Filler, words: Sequence[str], task: str, seed: int, n_rows: int, n_tail: int, depth: float, n_sink: int, chat: bool
) -> TaskItem:
    """The prompt of a seed around this filler."""
    r, form = rng(seed, "task", task), Form(OPENING, "", chat)
    n_around = len(form.tokens(model, []))
    latest = n_rows - SLACK - n_tail - n_around  # what stands around a text is before it for the most part

    def count(s: str) -> int:
        return len(model.tokenize(s))

    puzzle = TASKS[task].puzzle(r, Room(latest, count, " ".join(filler.sentences), words))
    form = dataclasses.replace(form, question=puzzle.question)
    depths = [0.0] if task in BLOCKS else [depth, *r.random(len(puzzle.statements) - 1)]
    if puzzle.ordered:
        depths = sorted(r.random(len(depths)))
    planted = list(zip(depths, puzzle.statements, strict=True))
    tokens = compose(model, form, filler, planted, n_rows, n_tail, n_sink, latest)
    pieces = [model.piece(t) for t in tokens]
    item = TaskItem(
        task, seed, puzzle, filler.documents, depth if task in DEPTH_TASKS else None, tuple(tokens), n_tail,
        tuple(rows_of(pieces, s) for s in puzzle.statements),
    )  # fmt: skip
    check_item(item, pieces, n_rows, n_sink)
    return item


def check_item(item: TaskItem, pieces: Sequence[bytes], n_rows: int, n_sink: int) -> None:
    """The rules of an item. Raises EvaluationError naming the one that is broken."""
    n, puzzle, what = len(item.tokens), item.puzzle, f"item {item.seed} ({item.task})"
    check_length(n, n_rows, what)
    for first, end in item.rows:
        if first < n_sink or end > n - item.n_tail:
            raise EvaluationError(f"{what}: expected every statement in rows {n_sink} to {n - item.n_tail}, found {first} to {end}")
    check_question(pieces, puzzle.question, item.n_tail, what)
    prompt, planted = b"".join(pieces).decode("utf-8", "replace").lower(), " ".join(puzzle.statements).lower()
    for reference in puzzle.references:
        n_planted, n_found = planted.count(reference.lower()), prompt.count(reference.lower())
        if not 0 < n_planted == n_found:
            raise EvaluationError(f"{what}: expected {reference!r} in the statements only ({n_planted} times), found it {n_found} times")


def ask(engine: Engine, arm: Arm, item: TaskItem) -> dict:
    """The record of one answer. Raises EvaluationError when an arm without exact rows leaves a row of a statement unfilled."""
    answer, done = respond(engine, arm, item, item.puzzle, item.puzzle.n_answer)
    planted = np.concatenate([np.arange(*rows) for rows in item.rows])
    n_planted_filled = int(np.isin(planted, done.filled).sum())
    if arm.is_ridge and arm.rows == "none" and n_planted_filled != len(planted):
        raise EvaluationError(f"{arm.name}, item {item.seed}: expected every statement filled, found {n_planted_filled} of {len(planted)} rows")
    score = item.puzzle.score(answer)
    return {
        "arm": arm.name,
        "kind": item.task,
        "seed": item.seed,
        "document": ", ".join(item.documents),
        "depth": item.depth,
        "n_rows": len(item.tokens),
        "n_filled": len(done.filled),
        "n_chosen": len(done.chosen),
        "cost": done.cost,
        "n_planted": len(planted),
        "n_planted_filled": n_planted_filled,
        "value": ", ".join(item.puzzle.references),
        "answer": answer,
        "score": score,
        "hit": item.puzzle.answered(answer),
    }
