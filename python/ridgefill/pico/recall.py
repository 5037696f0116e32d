"""Exact recall on held-out prompts: names that no prompt of training held, among text it never saw, by the library on the GGUF."""

from __future__ import annotations

import os
from collections.abc import Callable

from tokenizers import Tokenizer

from .. import lib
from ..evaluation import stats
from ..evaluation.texts import rng
from .data import Corpus
from .tasks import TASKS, heldout_prompt

N_DEPTHS = 8


def evaluate(
    path: str | os.PathLike, tokenizer: Tokenizer, corpus: Corpus, n: int, lengths: tuple[int, ...], seed: int = 0,
    report: Callable[[str, int, int], None] = lambda *_: None,
) -> list[dict]:
    """A record of each prompt: n for each task and length, at N_DEPTHS depths in turn.

    A hit is an answer that greedy decoding gets right to its end: every token of the value, then the end of the turn.
    """
    records = []
    with lib.Model(path) as model, lib.Context(model, max(lengths), n_threads=1) as ctx:
        for n_tokens in lengths:
            for name, task in TASKS.items():
                for i in range(n):
                    depth = (i % N_DEPTHS + 0.5) / N_DEPTHS
                    s = heldout_prompt(tokenizer, rng(seed, "recall", name, n_tokens, i), task, n_tokens, depth, corpus.filler)
                    ((first, end),) = s.answers
                    ctx.clear()
                    # teacher forced: each row sees the right tokens before it, as in a greedy answer that is right so far
                    found = ctx.decode(s.tokens[:-1], logits=range(first - 1, end)).argmax(-1)
                    right = found == s.tokens[first : end + 1]
                    records.append({
                        "task": name, "n_tokens": n_tokens, "item": i, "depth": depth, "n_rows": len(s.tokens),
                        "answer": tokenizer.decode(s.tokens[first:end].tolist()),
                        "found": tokenizer.decode(found[:-1].tolist()),
                        "hit": bool(right.all()), "first": bool(right[0]),
                    })  # fmt: skip
                    report("recall", len(records), n * len(TASKS) * len(lengths))
    return records


def summary(records: list[dict]) -> list[dict]:
    """Recall with its Wilson interval, by length and task."""
    groups: dict[tuple[int, str], list[dict]] = {}
    for r in records:
        groups.setdefault((r["n_tokens"], r["task"]), []).append(r)
    return [
        {"n_tokens": n_tokens, "task": task, "first": sum(r["first"] for r in group) / len(group)}
        | stats.share(sum(r["hit"] for r in group), len(group), f"recall of {task}").as_dict()
        for (n_tokens, task), group in groups.items()
    ]
