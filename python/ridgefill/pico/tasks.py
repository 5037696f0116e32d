"""Prompts with planted facts, as tokens: which of them are answers, what they are copied from, and who is asked for.

A prompt states facts of `evaluation.facts` among real text, in full ("The secret number of Emily Stone is 4819273.") or short
("Emily Stone is 481."), and then asks for them, in chat turns or by stating them again. A fact may name another in place of a
value ("The secret number of Emily Stone is that of Clara Baker."): answering it takes two hops.

Names are pairs of a first and a last name. One pair in five is held out: training never shows it in a prompt, while each
of its two names occurs there with others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from tokenizers import Tokenizer

from ..evaluation.facts import FIRST, LAST, N_DIGITS, N_NOUNS, NOUNS, OPENING, Fact
from .recipes import SPECIAL, PicoError, Stage

NAMES = {
    heldout: [f"{a} {b}" for i, a in enumerate(FIRST) for j, b in enumerate(LAST) if ((i + j) % 5 == 0) == heldout]
    for heldout in (False, True)
}
N_QUESTION = 36  # tokens that a question and its answer take in a chat, about
N_SLACK = 4  # tokens that a sentence may take more where no blank stands before it
FIRST_WEIGHT = 2.0  # of the first token of a value, which takes the lookup; the others can be copied along

# filler(r, n): sentences of real text that follow each other, n tokens or fewer
Filler = Callable[[np.random.Generator, int], list[str]]


@dataclasses.dataclass(frozen=True)
class Planted:
    """A fact as a prompt states it. A name `of` stands in place of the value; a short one is name and value alone."""

    fact: Fact
    of: str = ""
    short: bool = False

    def parts(self, restated: bool = False) -> tuple[str, str, str]:
        """Its sentence before, in and after what names the value. Restated, the value itself stands there."""
        f = self.fact
        before, _, after = f.sentence.rpartition(f.value)
        if self.short:
            before = before[before.index(f.name) :]
        if self.of and not restated:
            return before[: before.index(f.name)] + f"{f.name} is that of ", self.of, "."
        return before, f.value, after


@dataclasses.dataclass(frozen=True)
class Sample:
    """One sequence of t tokens.

    tokens  [t] int64, padded with the first special token
    answer  [t] float32, weight of each token as part of an answer
    text    [t] bool, tokens of real text
    copies  [n, 2] (row that has a token of an answer to predict, earlier row that holds it)
    hops    [n, 2] (row that has the first token of an answer to predict, row where the name ends that stands in place of the value)
    answers [(first, last + 1)] rows of each value that was asked for
    """

    tokens: np.ndarray
    answer: np.ndarray
    text: np.ndarray
    copies: np.ndarray
    hops: np.ndarray
    answers: list[tuple[int, int]]


class Draft:
    """A prompt that grows: its text, and which spans of it are what. `planted` are its facts; spans carry their numbers."""

    def __init__(self, tokenizer: Tokenizer, planted: Sequence[Planted], chat: bool):
        self.tokenizer, self.planted, self.chat = tokenizer, planted, chat
        self.text, self.n_tokens, self.n_asked = "", 0, 0
        self.spans: list[tuple[int, int, str, int]] = []  # (first character, last + 1, what, number of the fact)
        by_name = {p.fact.name: i for i, p in enumerate(planted)}
        self.holder = [by_name[p.of] if p.of else i for i, p in enumerate(planted)]  # number of the fact that has the value
        if chat:
            self.add(f"<|im_start|>user\n{OPENING}\n\n")

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text).ids)

    def add(self, *pieces: str | tuple[str, str, int]) -> None:
        """Pieces are text, or (text, what, number of the fact) with `what` of: text, value, name, answer, end."""
        begin = len(self.text)
        for piece in pieces:
            text, *tag = (piece,) if isinstance(piece, str) else piece
            if tag:
                self.spans.append((len(self.text), len(self.text) + len(text), *tag))
            self.text += text
        self.n_tokens += self.count(self.text[begin:])

    def state(self, filler: Sequence[str], places: Sequence[int]) -> None:
        """Add every fact, each before the sentence of `filler` at its place."""
        for i in range(len(filler) + 1):
            for number in (n for n, place in enumerate(places) if place == i):
                before, value, after = self.planted[number].parts()
                self.add(self._blank() + before, (value, "name" if self.planted[number].of else "value", number), after)
            if i < len(filler):
                self.add((self._blank() + filler[i], "text", -1))

    def _blank(self) -> str:
        return "" if self.text.endswith("\n") else " "

    def ask(self, number: int) -> None:
        """Add a question for a fact and its answer, or, outside of a chat, the fact once more with its value as the answer."""
        p, self.n_asked = self.planted[number], self.n_asked + 1
        before, value, after = p.parts(restated=True)
        if self.chat:
            turn = "\n\n" if self.n_asked == 1 else "\n<|im_start|>user\n"  # the first one ends the turn that holds the text
            before, after = f"{turn}{p.fact.question}<|im_end|>\n<|im_start|>assistant\n", SPECIAL[2]
        self.add(before if self.chat else f" {before}", (value, "answer", number), (after, "end", number))

    def sample(self, n_tokens: int) -> Sample:
        """The prompt as tokens, cut or padded to n_tokens."""
        encoding = self.tokenizer.encode(self.text)
        ids, starts, ends = np.array(encoding.ids), *np.array(encoding.offsets).T
        tokens = np.full(n_tokens, self.tokenizer.token_to_id(SPECIAL[0]))
        tokens[: len(ids)] = ids[:n_tokens]
        answer, text = np.zeros(n_tokens, np.float32), np.zeros(n_tokens, bool)
        values: dict[int, list[np.ndarray]] = {}
        names: dict[int, int] = {}
        copies, hops, answers = [], [], []
        for begin, end, what, number in self.spans:
            rows = np.flatnonzero((starts < end) & (ends > begin))
            if rows[-1] >= n_tokens:
                break
            if what == "text":
                text[rows] = True
            elif what == "name":
                names[number] = rows[-1]
            elif what == "value":
                values[number] = [rows]
            elif what == "end":
                answer[rows[0]] = 1
            else:
                earlier = values[self.holder[number]]
                assert all(np.array_equal(ids[e], ids[rows]) for e in earlier), "a value has other tokens where it is asked for"
                answer[rows], answer[rows[0]] = 1, FIRST_WEIGHT
                copies += [(a - 1, source) for e in earlier for a, source in zip(rows, e)]
                hops += [(rows[0] - 1, names[number])] if number in names else []
                answers.append((int(rows[0]), int(rows[-1]) + 1))
                earlier.append(rows)
        return Sample(tokens, answer, text, np.array(copies, int).reshape(-1, 2), np.array(hops, int).reshape(-1, 2), answers)


def draw_facts(
    r: np.random.Generator, names: Sequence[str], n: int, n_hops: int, kinds: Sequence[str], n_digits: tuple[int, int],
    n_words: tuple[int, int], short: bool = False,
) -> list[Planted]:  # fmt: skip
    """n facts under different names, then n_hops more, each of which names one of the others."""
    chosen = [names[i] for i in r.choice(len(names), n + n_hops, replace=False)]
    planted = []
    for name in chosen[:n]:
        kind = kinds[int(r.integers(len(kinds)))]
        if kind == "digits":
            value = "".join(map(str, [r.integers(1, 10), *r.integers(0, 10, r.integers(n_digits[0], n_digits[1] + 1) - 1)]))
        else:
            value = " ".join(r.choice(NOUNS, r.integers(n_words[0], n_words[1] + 1), replace=False))
        planted.append(Planted(Fact(kind, name, value), short=short))
    for name in chosen[n:]:
        other = planted[int(r.integers(n))]
        planted.append(dataclasses.replace(other, fact=dataclasses.replace(other.fact, name=name), of=other.fact.name))
    return planted


def training_prompt(tokenizer: Tokenizer, r: np.random.Generator, stage: Stage, filler: Filler) -> Sample:
    """One prompt of a stage, with questions for every fact as far as there is room."""
    chat = r.random() < stage.chat
    n_hops = int(r.integers(1, 3)) if r.random() < stage.hops else 0
    n = int(r.integers(stage.facts[0], stage.facts[1] + 1))
    short = not chat and (stage.filler[1] == 0 or r.random() < 0.5)
    planted = draw_facts(r, NAMES[False], n, n_hops, ("digits", "digits", "words"), stage.digits, stage.words, short)
    draft = Draft(tokenizer, planted, chat)
    taken = draft.n_tokens + sum(draft.count(" " + "".join(p.parts())) for p in planted)
    room = stage.n_tokens - taken - N_QUESTION
    share = stage.n_tokens * r.uniform(*stage.filler)
    if stage.filler[1]:  # more where two questions for each fact would not fill the prompt
        share = max(share, stage.n_tokens - taken - 2 * len(planted) * (N_QUESTION if chat else N_QUESTION // 2))
    sentences = filler(r, int(min(share, room)))
    draft.state(sentences, r.integers(0, len(sentences) + 1, len(planted)))
    while draft.n_tokens < stage.n_tokens:
        for number in r.permutation(len(planted)):
            draft.ask(number)
    return draft.sample(stage.n_tokens)


@dataclasses.dataclass(frozen=True)
class Task:
    """What a held-out prompt asks: n facts of a kind, one of which is asked for, by another name if it takes two hops."""

    kind: str
    n_facts: int
    n_hops: int = 0


TASKS = {
    "digits": Task("digits", 1),
    "digits of 4": Task("digits", 4),
    "words": Task("words", 1),
    "words of 4": Task("words", 4),
    "digits, two hops": Task("digits", 3, 1),
}


def heldout_prompt(
    tokenizer: Tokenizer, r: np.random.Generator, task: Task, n_tokens: int, depth: float, filler: Filler
) -> Sample:
    """A chat prompt of at most n_tokens with its answer, of held-out names; what is asked for stands at `depth` of the text.

    Raises PicoError when real text of that length is missing.
    """
    planted = draw_facts(r, NAMES[True], task.n_facts, task.n_hops, (task.kind,), (N_DIGITS,) * 2, (N_NOUNS,) * 2)
    draft = Draft(tokenizer, planted, chat=True)
    asked = len(planted) - 1
    room = n_tokens - draft.n_tokens - sum(draft.count(" " + "".join(p.parts())) for p in planted)
    probe = Draft(tokenizer, planted, chat=True)
    probe.ask(asked)
    sentences = filler(r, room - (probe.n_tokens - draft.n_tokens) - N_SLACK)
    if not sentences:
        raise PicoError(f"expected sentences of real text to fill {n_tokens} tokens, found none that fit")
    places = r.integers(0, len(sentences) + 1, len(planted))
    places[asked] = round(depth * len(sentences))
    draft.state(sentences, places)
    draft.ask(asked)
    return draft.sample(draft.count(draft.text))
