"""Planted facts: does the model find in the filled rows what the question in the tail asks for?

One item is one chat prompt: natural text with one sentence that states a fact ("The secret number of Emily Stone is
4819273."), and a question at the end. The answer is decoded greedily and must give the value: every digit or word of it,
in order, and no further digits behind a number.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from .. import lib
from ..text import Document
from .arms import Arm, Engine, Filled
from .errors import EvaluationError
from .prompts import Filler, Form, check_length, check_question, compose, rows_of, sentences
from .texts import rng

N_ANSWER = 24  # tokens decoded at most: a sentence with a long name and seven digits
# Novels hold next to no numbers of their own: the digit rows are the fact's, and as many random rows a fair control.
# Manuals are the harder filler; they can be asked for.
FILLER_SOURCES = ("austen",)

FIRST = (
    "Emily Oliver Clara Henry Alice Martin Laura Peter Nora Simon Greta Victor Hazel Jasper Ingrid Felix Marta Conrad "
    "Bianca Rufus"
).split()
LAST = (
    "Stone Baker Wells Carter Hughes Morris Foster Grant Fisher Webb Lambert Norris Pruitt Quincy Sandoval Tilden "
    "Underhill Vance Whitlock Yates"
).split()
NOUNS = (
    "apple river candle mountain pencil garden silver window tiger bridge ocean violin castle lemon rocket forest button "
    "hammer island pepper saddle thunder velvet walnut anchor basket copper desert eagle feather guitar honey ladder "
    "marble needle orange pillow rabbit spider turtle"
).split()
N_DIGITS, N_NOUNS = 7, 3
OPENING = "Read the text, then answer the question at the end."


@dataclasses.dataclass(frozen=True)
class Fact:
    """What is planted. kind: digits (a number of N_DIGITS) or words (N_NOUNS common nouns)."""

    kind: str
    name: str
    value: str

    @property
    def sentence(self) -> str:
        if self.kind == "digits":
            return f"The secret number of {self.name} is {self.value}."
        return f'The password of {self.name} is "{self.value}".'

    @property
    def question(self) -> str:
        if self.kind == "digits":
            return f"What is the secret number of {self.name}? Answer with the number only."
        return f"What is the password of {self.name}? Answer with the password only."

    def answered(self, answer: str) -> bool:
        """Whether an answer gives the value: it is the first number in it, or the words stand together in it."""
        if self.kind == "digits":
            return first_number(answer) == self.value
        words = r"[^a-z0-9]+".join(self.value.split())
        return re.search(rf"(?<![a-z]){words}(?![a-z])", answer.lower()) is not None

    def decided(self, answer: str) -> bool:
        """Whether further tokens cannot change what answered() says."""
        if self.kind == "words":
            return self.answered(answer + "s")  # the last word has ended
        number = re.search(r"\d[\d ,.-]*", answer)
        return number is not None and (number.end() < len(answer) or len(first_number(answer)) > len(self.value))


def first_number(text: str) -> str:
    """Digits of the first number of a text, separators dropped; "" without one."""
    m = re.search(r"\d(?:[ ,.-]?\d)*", text)
    return re.sub(r"\D", "", m[0]) if m else ""


def make_fact(kind: str, seed: int) -> Fact:
    """The fact of a seed. Raises EvaluationError for an unknown kind."""
    r = rng(seed, "fact", kind)
    name = f"{r.choice(FIRST)} {r.choice(LAST)}"
    if kind == "digits":
        return Fact(kind, name, str(r.integers(10 ** (N_DIGITS - 1), 10**N_DIGITS)))
    if kind == "words":
        return Fact(kind, name, " ".join(r.choice(NOUNS, N_NOUNS, replace=False)))
    raise EvaluationError(f"kind of fact: expected digits or words, found {kind!r}")


@dataclasses.dataclass(frozen=True)
class FactItem:
    """One prompt. Row numbers count from its first token.

    fact_rows   [first, last + 1) rows that hold any part of the sentence
    value_rows  [first, last + 1) rows that hold any part of the value
    depth       where the sentence was to stand, as a share of the rows between sink and tail
    """

    seed: int
    fact: Fact
    document: str
    depth: float
    tokens: tuple[int, ...]
    n_tail: int
    fact_rows: tuple[int, int]
    value_rows: tuple[int, int]


def make_item(
    model, docs: Sequence[Document], kind: str, seed: int, n_rows: int, n_tail: int, depth: float, n_sink: int = 4
) -> FactItem:
    """The prompt of a seed: at most n_rows tokens and at least n_rows - SLACK, the fact at `depth` of its filled region.

    model  has tokenize, piece and chat
    docs   natural text to fill the prompt with; the seed draws the document and the place in it

    Raises EvaluationError when the item breaks a rule of check_item, or the document is too short.
    """
    fact, r = make_fact(kind, seed), rng(seed, "filler", kind)
    doc = docs[int(r.integers(len(docs)))]
    filler = sentences(doc.text)
    lengths = [len(model.tokenize(" " + s)) for s in filler]
    last_start = next((i for i in range(len(filler), -1, -1) if sum(lengths[i:]) >= n_rows), -1)
    if last_start < 0:
        raise EvaluationError(f"{doc.name}: expected at least {n_rows} tokens of sentences, found {sum(lengths)}")
    start = int(r.integers(last_start + 1))
    used = Filler(tuple(filler[start:]), tuple(lengths[start:]), (doc.name,))
    tokens = compose(model, Form(OPENING, fact.question), used, [(depth, fact.sentence)], n_rows, n_tail, n_sink, latest=n_rows)
    pieces = [model.piece(t) for t in tokens]
    item = FactItem(
        seed, fact, doc.name, depth, tuple(tokens), n_tail, rows_of(pieces, fact.sentence), rows_of(pieces, fact.value)
    )
    check_item(item, pieces, n_rows, n_sink)
    return item


def check_item(item: FactItem, pieces: Sequence[bytes], n_rows: int, n_sink: int) -> None:
    """The rules of an item. Raises EvaluationError naming the one that is broken."""
    n, (first, end), what = len(item.tokens), item.fact_rows, f"item {item.seed} ({item.fact.kind})"
    check_length(n, n_rows, what)
    if first < n_sink or end > n - item.n_tail:
        raise EvaluationError(f"{what}: expected the fact in rows {n_sink} to {n - item.n_tail}, found {first} to {end}")
    check_question(pieces, item.fact.question, item.n_tail, what)
    named = b"".join(pieces).count(item.fact.name.encode())
    if named != 2:
        raise EvaluationError(f"{what}: expected {item.fact.name} in fact and question only, found it {named} times")


def make_items(
    model, docs: Sequence[Document], kind: str, n: int, seed: int, n_rows: int, n_tail: int, n_sink: int = 4, n_depths: int = 8
) -> list[FactItem]:
    """n items with seeds of their own, at n_depths depths in turn."""
    return [
        make_item(model, docs, kind, seed * 10_000 + i, n_rows, n_tail, (i % n_depths + 0.5) / n_depths, n_sink)
        for i in range(n)
    ]


def answer_tokens(engine: Engine, logits: np.ndarray, judge, n_most: int = N_ANSWER) -> list[int]:
    """Greedy answer after logits [n_vocab] of the prompt's last row, up to n_most tokens or until judge.decided(answer)."""
    tokens, answer = [], ""
    while len(tokens) < n_most and not judge.decided(answer):
        new = lib.greedy(engine.ctx, logits, 1)
        if not new:
            break
        tokens += new
        answer = engine.model.detokenize(tokens)
        logits = engine.ctx.decode(new, pos0=engine.ctx.seq_pos_max() + 1)[0]
    return tokens


def respond(engine: Engine, arm: Arm, item, judge, n_most: int = N_ANSWER) -> tuple[str, Filled]:
    """The answer to an item with `tokens`, `n_tail` and `seed`, its prompt processed as the arm says, and what was filled."""
    rest, pos0, done = engine.begin(arm, item.tokens, item.n_tail, seed=item.seed)
    logits = engine.ctx.decode(rest, pos0=pos0)[0]
    return engine.model.detokenize(answer_tokens(engine, logits, judge, n_most)), done


def ask(engine: Engine, arm: Arm, item: FactItem) -> dict:
    """The record of one answer.

    Raises EvaluationError when the fact's rows are not treated as the arm says: all filled, or, with digit rows exact,
    every row of a number's digits exact.
    """
    answer, done = respond(engine, arm, item, item.fact)
    filled, value = set(done.filled.tolist()), range(*item.value_rows)
    n_fact = sum(r in filled for r in range(*item.fact_rows))
    n_value = sum(r in filled for r in value)
    if arm.is_ridge and arm.rows == "none" and n_fact != item.fact_rows[1] - item.fact_rows[0]:
        raise EvaluationError(f"{arm.name}, item {item.seed}: expected every row of the fact filled, found {n_fact}")
    if arm.rows == "digits" and item.fact.kind == "digits":
        digits = [r for r in value if re.search(rb"\d", engine.model.piece(item.tokens[r]))]
        if any(r in filled for r in digits):
            raise EvaluationError(
                f"{arm.name}, item {item.seed}: expected every digit of the fact exact, found {n_value} filled rows"
            )
    hit = item.fact.answered(answer)
    return {
        "arm": arm.name,
        "kind": item.fact.kind,
        "seed": item.seed,
        "document": item.document,
        "depth": item.depth,
        "n_rows": len(item.tokens),
        "n_filled": len(filled),
        "n_chosen": len(done.chosen),
        "cost": done.cost,
        "fact_rows": list(item.fact_rows),
        "n_fact_filled": n_fact,
        "n_value_filled": n_value,
        "value": item.fact.value,
        "answer": answer,
        "score": float(hit),
        "hit": hit,
    }
