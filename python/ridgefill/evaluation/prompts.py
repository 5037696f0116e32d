"""Prompts of a given length: natural text with statements planted in it and a question behind it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from ..text import Document
from .errors import EvaluationError
from .texts import rng

SLACK = 24  # rows that a prompt may be short of its length: it is filled up with whole words


@dataclasses.dataclass(frozen=True)
class Form:
    """What stands around the text: an opening and a question, as one turn of a chat, or plain, with a cue for the answer."""

    opening: str
    question: str
    chat: bool = True

    def tokens(self, model, body: Sequence[str]) -> list[int]:
        """The prompt around these pieces of text. model has tokenize and, for a chat, chat."""
        text = f"{self.opening}\n\n{' '.join(body).strip()}\n\n{self.question}"
        if self.chat:
            return model.tokenize(model.chat([{"role": "user", "content": text}]), add_special=True, parse_special=True)
        return model.tokenize(f"{text}\nAnswer:")


def sentences(text: str) -> list[str]:
    """Sentences of a text on one line each, without the very long ones (tables, listings)."""
    parts = re.split(r"(?<=[.!?]) (?=[A-Z\"'(])", re.sub(r"\s+", " ", text))
    return [s for s in parts if 20 <= len(s) <= 600]


@dataclasses.dataclass(frozen=True)
class Filler:
    """Sentences that follow each other, the tokens of each, and the documents that they are from."""

    sentences: tuple[str, ...]
    lengths: tuple[int, ...]
    documents: tuple[str, ...]


def measured(model, docs: Sequence[Document]) -> list[tuple[str, str, int]]:
    """(document, sentence, tokens) of every sentence, in order."""
    return [(d.name, s, len(model.tokenize(" " + s))) for d in docs for s in sentences(d.text)]


def deal(text: Sequence[tuple[str, str, int]], n_rows: int, seed: int, name: str) -> list[Filler]:
    """Pieces of measured() text, each of n_rows tokens or a little more, in an order drawn by `seed` and `name`. No sentence is in
    two of them.
    """
    pieces, open_, n = [], [], 0
    for entry in text:
        open_.append(entry)
        n += entry[2]
        if n >= n_rows:
            documents, texts, lengths = zip(*open_, strict=True)
            pieces.append(Filler(texts, lengths, tuple(dict.fromkeys(documents))))
            open_, n = [], 0
    return [pieces[i] for i in rng(seed, "filler", name).permutation(len(pieces))]


def compose(
    model, form: Form, filler: Filler, planted: Sequence[tuple[float, str]], n_rows: int, n_tail: int, n_sink: int, latest: int
) -> list[int]:
    """Tokens of a prompt of at most n_rows, and as many of them as whole words of the filler allow.

    planted  (depth, statement), each to stand at its depth in the rows between sink and tail, in the order of depths
    latest   the statements must end by this token of the text, opening not counted; filler before them is left out for it
    """
    statements = sorted(planted, key=lambda p: p[0])
    n_statements = [len(model.tokenize(" " + s)) for _, s in statements]
    n_head = len(form.tokens(model, [])) - len(model.tokenize(form.question))
    before, seen, at = [], 0, 0
    for i, (depth, statement) in enumerate(statements):
        target = n_sink + depth * (n_rows - n_tail - n_sink) - n_head
        room = latest - sum(n_statements[i:])
        while at < len(filler.sentences) and seen + filler.lengths[at] / 2 < target and seen + filler.lengths[at] <= room:
            before.append(filler.sentences[at])
            seen += filler.lengths[at]
            at += 1
        before.append(statement)
        seen += n_statements[i]
    words = " ".join(filler.sentences[at:]).split(" ")

    def with_words(n: int) -> list[int]:
        return form.tokens(model, [*before, " ".join(words[:n])])

    def most() -> int:
        low, high = 0, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(with_words(middle)) <= n_rows else (low, middle - 1)
        return low

    # a word of so many tokens that it alone leaves the prompt short makes room for the next one
    while len(with_words(n := most())) < n_rows - SLACK and n < len(words):
        del words[n]
    return with_words(n)


def rows_of(pieces: Sequence[bytes], text: str) -> tuple[int, int]:
    """[first, last + 1) tokens that hold any byte of `text`, which must occur exactly once.

    Raises EvaluationError if it does not.
    """
    whole, needle = b"".join(pieces), text.encode()
    if whole.count(needle) != 1:
        raise EvaluationError(f"expected {text!r} once in the prompt, found it {whole.count(needle)} times")
    begin = whole.index(needle)
    end, at, rows = begin + len(needle), 0, []
    for i, piece in enumerate(pieces):
        if at < end and at + len(piece) > begin:
            rows.append(i)
        at += len(piece)
    return rows[0], rows[-1] + 1


def check_length(n: int, n_rows: int, what: str) -> None:
    """Raises EvaluationError for a prompt of n rows that is to have n_rows, less SLACK at most."""
    if not n_rows - SLACK <= n <= n_rows:
        raise EvaluationError(f"{what}: expected {n_rows - SLACK} to {n_rows} rows, found {n}")


def check_question(pieces: Sequence[bytes], question: str, n_tail: int, what: str) -> None:
    """Raises EvaluationError when the question does not lie in the tail as a whole."""
    first = rows_of(pieces, question)[0]
    if first < len(pieces) - n_tail:
        raise EvaluationError(f"{what}: expected the question in the last {n_tail} of {len(pieces)} rows, found row {first}")
