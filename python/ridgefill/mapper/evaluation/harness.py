"""Records of benchmark tasks, by lm-evaluation-harness' names and fields, read from files that are here already.

A file has one JSON object a line, as the data set's own records are. Choices are compared by their summed log-probability, which the
harness calls acc; `gsm8k` is answered freely and its last number compared. The first `shots` records are put in front as examples.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ...evaluation.errors import EvaluationError
from ...evaluation.facts import respond
from .choices import Question
from .engine import Arm, Engine

N_GENERATED = 256  # tokens of a free answer, at most


@dataclasses.dataclass(frozen=True)
class Doc:
    """One record in the form in which it is asked.

    contexts  text in front of each choice: one for all of them, or one each
    choices   what is scored behind it, with the space before it; of a free answer the whole of it
    """

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    gold: int

    @property
    def solved(self) -> str:
        """As an example: context and right answer."""
        return self.contexts[self.gold % len(self.contexts)] + self.choices[self.gold]


def _spaced(choices: Sequence[str]) -> tuple[str, ...]:
    return tuple(" " + c for c in choices)


def _arc(r: dict) -> Doc:
    return Doc((f"Question: {r['question']}\nAnswer:",), _spaced(r["choices"]["text"]), r["choices"]["label"].index(r["answerKey"]))


def _hellaswag(r: dict) -> Doc:
    def clean(text: str) -> str:
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")

    context = clean(f"{r['activity_label']}: {r['ctx_a']} {r['ctx_b'].capitalize()}")
    return Doc((context,), _spaced([clean(e) for e in r["endings"]]), int(r["label"]))


def _winogrande(r: dict) -> Doc:
    before, after = r["sentence"].split("_")
    return Doc((before + r["option1"], before + r["option2"]), (" " + after.strip(),) * 2, int(r["answer"]) - 1)


def _mmlu(r: dict) -> Doc:
    letters = "ABCD"
    options = "\n".join(f"{letter}. {choice}" for letter, choice in zip(letters, r["choices"], strict=True))
    return Doc((f"{r['question'].strip()}\n{options}\nAnswer:",), _spaced(letters), int(r["answer"]))


def _piqa(r: dict) -> Doc:
    return Doc((f"Question: {r['goal']}\nAnswer:",), _spaced([r["sol1"], r["sol2"]]), int(r["label"]))


def _boolq(r: dict) -> Doc:
    return Doc((f"{r['passage']}\nQuestion: {r['question']}?\nAnswer:",), (" no", " yes"), int(r["label"]))


def _gsm8k(r: dict) -> Doc:
    return Doc((f"Question: {r['question']}\nAnswer:",), (" " + r["answer"],), 0)


@dataclasses.dataclass(frozen=True)
class Task:
    """How a record is asked, and how many examples stand in front by default."""

    doc: Callable[[dict], Doc]
    shots: int = 0
    free: bool = False


TASKS = {
    "arc_challenge": Task(_arc),
    "arc_easy": Task(_arc),
    "hellaswag": Task(_hellaswag),
    "winogrande": Task(_winogrande),
    "mmlu": Task(_mmlu, 5),
    "piqa": Task(_piqa),
    "boolq": Task(_boolq),
    "gsm8k": Task(_gsm8k, 8, free=True),
}


def read_docs(task: str, path: str | Path) -> list[Doc]:
    """Records of a file. Raises EvaluationError naming the line that is not a record of this task."""
    if task not in TASKS:
        raise EvaluationError(f"task: expected one of {', '.join(TASKS)}, found {task!r}")
    docs = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            doc = TASKS[task].doc(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise EvaluationError(f"{path}, line {number}: expected a record of {task}, found something else: {type(e).__name__}: {e}") from None
        if not 0 <= doc.gold < len(doc.choices):
            raise EvaluationError(f"{path}, line {number}: expected the right answer among {len(doc.choices)}, found number {doc.gold}")
        docs.append(doc)
    return docs


@dataclasses.dataclass(frozen=True)
class Problem:
    """A question that is answered freely. `value` is the number behind "####" in the record's answer."""

    task: str
    seed: int
    document: str
    tokens: tuple[int, ...]
    value: str
    n_tail: int

    def answered(self, answer: str) -> bool:
        """Whether the last number of an answer, up to the next question, is the right one."""
        return _last_number(answer.split("Question:")[0]) == self.value

    def decided(self, answer: str) -> bool:
        """Whether further tokens cannot change that: the next question has begun."""
        return "Question:" in answer


def _last_number(text: str) -> str:
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", text)
    return numbers[-1].replace(",", "") if numbers else ""


def load(model, task: str, path: str | Path, n: int, n_tail: int, n_sink: int, shots: int | None = None) -> list[Question | Problem]:
    """The first n questions of a file behind `shots` examples (by default the task's own number), which are its first records.

    Raises EvaluationError for too few records, and for a prompt with no row between sinks and tail.
    """
    docs = read_docs(task, path)
    shots = TASKS[task].shots if shots is None else shots
    if len(docs) < shots + n:
        raise EvaluationError(f"{path}: expected {shots} examples and {n} questions, found {len(docs)} records")
    examples = "".join(doc.solved + "\n\n" for doc in docs[:shots])
    items = [_item(model, task, Path(path).name, i, doc, examples, n_tail) for i, doc in enumerate(docs[shots : shots + n], shots)]
    for item in items:
        shortest = min(map(len, [item.tokens] if TASKS[task].free else [prompt for prompt, _ in item.requests]))
        if shortest <= n_sink + n_tail:
            raise EvaluationError(
                f"{path}, record {item.seed}: expected more than {n_sink + n_tail} rows (sinks and tail), found {shortest}; a shorter tail or more examples"
            )
    return items


def _item(model, task: str, name: str, i: int, doc: Doc, examples: str, n_tail: int) -> Question | Problem:
    if TASKS[task].free:
        return Problem(task, i, name, tuple(model.tokenize(examples + doc.contexts[0])), _last_number(doc.choices[0].split("####")[-1]), n_tail)
    contexts = doc.contexts * len(doc.choices) if len(doc.contexts) == 1 else doc.contexts
    requests = tuple(_request(model, examples + context, choice) for context, choice in zip(contexts, doc.choices, strict=True))
    answers = doc.choices if len(doc.contexts) == 1 else doc.contexts
    return Question(task, i, name, requests, answers, doc.gold, n_tail)


def _request(model, context: str, choice: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens of both, cut where the context alone ends; the two are tokenized together."""
    n, whole = len(model.tokenize(context)), model.tokenize(context + choice)
    if n >= len(whole):
        raise EvaluationError(f"{choice!r}: expected tokens of its own behind the context, found none")
    return tuple(whole[:n]), tuple(whole[n:])


def ask(engine: Engine, arm: Arm, problem: Problem) -> dict:
    """The record of one free answer."""
    answer, done = respond(engine, arm, problem, problem, N_GENERATED)
    hit = problem.answered(answer)
    return {
        "arm": arm.name, "kind": problem.task, "seed": problem.seed, "document": problem.document, "depth": None,
        "n_rows": len(problem.tokens), "n_filled": len(done.filled), "n_chosen": 0, "cost": done.cost, "value": problem.value,
        "answer": answer, "score": float(hit), "hit": hit,
    }  # fmt: skip
