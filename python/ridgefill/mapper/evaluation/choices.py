"""Multiple choice by likelihood: the answer with the largest sum of log-probabilities behind the prompt is the one given."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from ...evaluation.errors import finite
from ...evaluation.facts import N_NOUNS, NOUNS
from ...evaluation.loss import log_softmax
from ...evaluation.tasks import TaskItem
from ...evaluation.texts import rng
from .engine import Arm, Engine

N_CHOICES = 4
N_TOKENS = 64  # room for an answer of of_fact() behind its prompt


@dataclasses.dataclass(frozen=True)
class Question:
    """One question. The answers are compared by what stands behind each in `requests`.

    requests  (tokens of the prompt, tokens of the answer) of each choice; prompts are the same but where a choice stands in them
    answers   the choices, as they are written
    gold      index of the right one
    depth     of the fact, None where there is none
    """

    task: str
    seed: int
    document: str
    requests: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    answers: tuple[str, ...]
    gold: int
    n_tail: int
    depth: float | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Of the longest prompt."""
        return max((prompt for prompt, _ in self.requests), key=len)


def of_fact(model, item: TaskItem, chat: bool) -> Question:
    """The question of an item of `single` or `passwords`, its value among N_CHOICES - 1 others of its kind, in an order drawn by
    its seed. None of the others stands in the prompt.
    """
    r, value = rng(item.seed, "choices", item.task), item.puzzle.references[0]
    prompt, others = model.detokenize(item.tokens), set()
    while len(others) < N_CHOICES - 1:
        drawn = _number(r, len(value)) if value.isdigit() else " ".join(r.choice(NOUNS, N_NOUNS, replace=False))
        if drawn not in prompt:
            others.add(drawn)
    answers = [sorted([*others, value])[i] for i in r.permutation(N_CHOICES)]
    requests = tuple((item.tokens, tuple(model.tokenize(("" if chat else " ") + a, add_special=False))) for a in answers)
    return Question(item.task, item.seed, ", ".join(item.documents), requests, tuple(answers), answers.index(value), item.n_tail, item.depth)


def _number(r: np.random.Generator, n_digits: int) -> str:
    return str(r.integers(10 ** (n_digits - 1), 10**n_digits))


def log_likelihoods(engine: Engine, arm: Arm, question: Question) -> tuple[np.ndarray, object]:
    """Summed log-probability of each answer, nats, float64; and what was filled, of the prompt begun last."""
    sums, begun, first, pos, done = [], None, None, 0, None
    for prompt, answer in question.requests:
        if prompt != begun:
            rest, pos0, done = engine.begin(arm, prompt, question.n_tail)
            first, pos, begun = log_softmax(engine.ctx.decode(rest, pos0=pos0))[0], pos0 + len(rest), prompt
        total = float(first[answer[0]])
        if len(answer) > 1:
            rows = log_softmax(engine.ctx.decode(answer[:-1], pos0=pos, logits="all"))
            total += float(rows[np.arange(len(rows)), answer[1:]].sum(dtype=np.float64))
            engine.ctx.seq_rm(0, pos)
        sums.append(total)
    return finite(sums, f"{arm.name}, {question.task} {question.seed}"), done


def ask(engine: Engine, arm: Arm, question: Question) -> dict:
    """The record of one question. `score` is the probability of the right answer among the choices."""
    sums, done = log_likelihoods(engine, arm, question)
    chosen = int(sums.argmax())
    return {
        "arm": arm.name,
        "kind": question.task,
        "seed": question.seed,
        "document": question.document,
        "depth": question.depth,
        "n_rows": len(question.tokens),
        "n_filled": len(done.filled),
        "n_chosen": 0,
        "cost": done.cost,
        "n_choices": len(sums),
        "value": question.answers[question.gold],
        "answer": question.answers[chosen],
        "score": float(np.exp(sums - np.logaddexp.reduce(sums))[question.gold]),
        "hit": chosen == question.gold,
    }


def other_prompt(prompts: Sequence[Sequence[int]], i: int) -> list[int]:
    """The prompts after the i-th, in a circle, one behind the other, until they are as long as it is."""
    out: list[int] = []
    for j in range(1, len(prompts)):
        if len(out) >= len(prompts[i]):
            break
        out += prompts[(i + j) % len(prompts)]
    return out
