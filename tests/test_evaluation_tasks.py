"""Retrieval tasks: what they plant, where, and how answers are judged."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ridgefill.evaluation import EvaluationError, prompts, tasks
from ridgefill.text import Document
from test_evaluation import Bytes

N_SINK = 4


class Pieces:
    """A tokenizer of pieces of up to four letters with the blank before them, as BPE has them."""

    def __init__(self):
        self.ids: dict[bytes, int] = {}
        self.texts: list[bytes] = []

    def tokenize(self, text, add_special=True, parse_special=False):
        out = []
        for piece in re.findall(r"\s?\w{1,4}|\W", text):
            if piece.encode() not in self.ids:
                self.ids[piece.encode()] = len(self.texts)
                self.texts.append(piece.encode())
            out.append(self.ids[piece.encode()])
        return out

    def piece(self, token, special=True):
        return self.texts[token]

    def chat(self, messages):
        return "".join(f"<|user|>{m['content']}" for m in messages) + "<|assistant|>"


def natural(n_docs: int, n_sentences: int) -> list[Document]:
    """Documents of sentences that differ, from three thousand invented words."""
    r = np.random.default_rng(0)
    words = ["".join(r.choice(list("abcdefghijklmnoprstuvw"), r.integers(3, 9))) for _ in range(3000)]
    sentence = lambda: " ".join(r.choice(words, 9)).capitalize() + "."  # noqa: E731
    return [Document(f"doc-{i}", " ".join(sentence() for _ in range(n_sentences)), "novel") for i in range(n_docs)]


TOKENIZERS = {"bytes": (Bytes(), 2400, 300), "pieces": (Pieces(), 900, 120)}
DOCS = natural(6, 400)
TEXTS = {name: tasks.Text.of(model, DOCS) for name, (model, _, _) in TOKENIZERS.items()}


def items(name: str, task: str, n: int, seed: int, **kw) -> list[tasks.TaskItem]:
    model, n_rows, n_tail = TOKENIZERS[name]
    return tasks.make_items(model, TEXTS[name], task, n, seed, **({"n_rows": n_rows, "n_tail": n_tail, "n_sink": N_SINK} | kw))


def text_of(name: str, tokens) -> str:
    return b"".join(TOKENIZERS[name][0].piece(t) for t in tokens).decode()


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(TOKENIZERS)), st.sampled_from(list(tasks.TASKS)), st.integers(0, 10_000), st.integers(0, 300), st.booleans())
def test_answers_lie_in_filled_rows_only_and_lengths_hold(name, task, seed, more, chat):
    _, n_rows, n_tail = TOKENIZERS[name]
    n_rows += more
    for item in items(name, task, 2, seed, n_rows=n_rows, chat=chat):
        n = len(item.tokens)
        assert n_rows - prompts.SLACK <= n <= n_rows
        outside = text_of(name, item.tokens[:N_SINK]) + "\0" + text_of(name, item.tokens[n - n_tail :])
        filled = text_of(name, item.tokens[N_SINK : n - n_tail])
        for reference in item.puzzle.references:
            assert reference.lower() in filled.lower() and reference.lower() not in outside.lower()
        assert item.puzzle.question in outside and item.puzzle.question not in filled
        assert [text_of(name, item.tokens[a:b]).count(s) for (a, b), s in zip(item.rows, item.puzzle.statements, strict=True)] == [1] * len(item.rows)
        if item.depth is not None:  # within a sentence of where it was to stand
            longest = max(entry[2] for entry in TEXTS[name].sentences)
            assert abs(item.rows[0][0] - (N_SINK + item.depth * (n_rows - n_tail - N_SINK))) < 2 * longest


@pytest.mark.parametrize("task", tasks.TASKS)
def test_seeds_reproduce_and_items_do_not_depend_on_how_many_there_are(task):
    made = items("pieces", task, 8, seed=3)
    assert made == items("pieces", task, 8, seed=3)
    assert made[:3] == items("pieces", task, 3, seed=3)
    other = items("pieces", task, 8, seed=4)
    assert not {i.puzzle.references for i in made} & {i.puzzle.references for i in other}
    assert len({i.puzzle.references for i in made}) == len({i.seed for i in made}) == 8


@pytest.mark.parametrize("task", tasks.TASKS)
def test_no_two_items_share_a_sentence_of_the_text(task):
    sentences = [s for d in DOCS for s in prompts.sentences(d.text)]
    assert len(set(sentences)) == len(sentences)
    made = [text_of("pieces", i.tokens) for i in items("pieces", task, 8, seed=3)]
    holders = Counter(s for s in sentences for text in made if s in text)
    assert len(holders) > 50 * (task not in tasks.BLOCKS) and set(holders.values()) == {1}


@pytest.mark.parametrize("at", range(4))
def test_a_word_that_is_too_long_for_the_end_of_a_prompt_is_passed_over(at):
    """Words of 60 tokens, such as addresses, where the prompt fills up."""
    model, long = Pieces(), "x" * 240
    filler = [("d", f"{long} Some words stand here {i}." if i % 4 == at else f"A few words that are short {i}.", 8) for i in range(200)]
    dealt = prompts.deal([(d, s, len(model.tokenize(" " + s))) for d, s, _ in filler], 1200, 0, "x")[0]
    for n_rows in range(600, 640):
        tokens = prompts.compose(model, prompts.Form("Read.", "What?"), dealt, [(0.5, "Here it is.")], n_rows, 100, 4, n_rows)
        assert n_rows - prompts.SLACK <= len(tokens) <= n_rows


def test_a_chat_and_a_plain_prompt_differ_in_what_stands_around_them():
    chat, plain = (text_of("bytes", items("bytes", "single", 1, 1, chat=c)[0].tokens) for c in (True, False))
    assert chat.endswith("<assistant>") and "<assistant>" not in plain and plain.endswith("\nAnswer:")


#
# solvers: what a reader of the prompt finds
#


def solve(task: str, text: str) -> set[str]:
    """The answers, read off the whole prompt without looking at the item."""
    if task == "variables":
        value = re.search(r"hold the value (\d+)", text)[1]
        held = dict(re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)\.", text))
        found = {value}
        while more := {name for name, of in held.items() if of in found} - found:
            found |= more
        return found - {value}
    if task == "common":
        return {w for w, _ in Counter(re.findall(r"\d+\. ([a-z]+)", text)).most_common(tasks.N_COMMON)}
    if task == "frequent":
        words = re.search(r"Coded text: ([a-z. ]+)\. ", text)[1].split()
        return {w for w, _ in Counter(w for w in words if w != "......").most_common(tasks.N_FREQUENT)}
    facts = re.findall(r"The (?:secret number|password) of (\w+ \w+) is \"?([\w ]+)\"?\.", text)
    question = text[text.rindex("\n\n") :]
    return {value for name, value in facts if name in question}


@pytest.mark.parametrize("task", tasks.TASKS)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_reader_of_the_prompt_finds_exactly_the_references(name, task):
    for item in items(name, task, 4, seed=11):
        assert solve(task, text_of(name, item.tokens)) == set(item.puzzle.references)


@pytest.mark.parametrize(
    "task, n_statements, n_references, n_answer",
    [("single", 1, 1, 128), ("passwords", 1, 1, 128), ("multikey", 4, 1, 128), ("multivalue", 4, 4, 128), ("multiquery", 4, 4, 128),
     ("variables", 5, 5, 30), ("common", 1, 10, 120), ("frequent", 1, 3, 50)],
)  # fmt: skip
def test_tasks_have_their_published_sizes(task, n_statements, n_references, n_answer):
    puzzle = items("pieces", task, 1, seed=5)[0].puzzle
    assert (len(puzzle.statements), len(puzzle.references), puzzle.n_answer) == (n_statements, n_references, n_answer)


def test_counts_fill_the_rows_and_leave_no_doubt():
    common, frequent = (items("bytes", task, 1, 2, n_rows=9000)[0] for task in ("common", "frequent"))
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", common.puzzle.statements[0]))
    by_count = sorted(counts.values(), reverse=True)
    assert by_count[: tasks.N_COMMON] == [by_count[0]] * tasks.N_COMMON and 4 <= by_count[0] <= 30 and by_count[tasks.N_COMMON] <= by_count[0] / 4
    counts = Counter(w for w in frequent.puzzle.statements[0].split()[2:] if not w.startswith("..."))
    by_count = sorted(counts.values(), reverse=True)
    assert by_count[0] > by_count[1] > by_count[2] > by_count[3]
    # the law: the third most frequent coded word has rank 4, dots being the first
    assert by_count[0] / by_count[2] == pytest.approx((4 / 2) ** tasks.ZETA, rel=0.1)
    for item in (common, frequent):
        (first, end), room = item.rows[0], 9000 - 300
        assert end - first > 0.7 * room


#
# judging
#


@pytest.mark.parametrize(
    "answer, score",
    [("1234567, 7654321", 1), ("The number is 1234567.", 0.5), ("7654321 7654321", 0.5), ("123456 7654 321", 0), ("", 0), ("x1234567y7654321", 1)],
)
def test_the_score_is_the_share_of_references_in_the_answer(answer, score):
    puzzle = tasks.Puzzle((), "", ("1234567", "7654321"), 10)
    assert puzzle.score(answer) == score and puzzle.decided(answer) == (score == 1)


def test_the_score_is_blind_to_capitals():
    assert tasks.Puzzle((), "", ("QWERT", "apple"), 10).score("qwert and Apples") == 1


#
# refusals
#


def test_items_that_cannot_be_made_are_refused():
    refusals = [
        (lambda: items("pieces", "poems", 1, 1), "task: expected one of single, .*found 'poems'"),
        (lambda: items("pieces", "single", 9999, 1), r"single: expected text for 9999 prompts of 900 rows, none used twice, found it for \d+"),
        (lambda: items("pieces", "single", 1, 1, n_tail=5), "expected the question in the last 5 of"),
        (lambda: items("pieces", "common", 1, 1, n_rows=300), "common: expected .*room for 80 in its filled rows, found"),
        (lambda: items("pieces", "frequent", 1, 1, n_rows=180), "frequent: expected room for 50 words"),
    ]
    for make, message in refusals:
        with pytest.raises(EvaluationError, match=message):
            make()


def test_an_item_with_its_answer_elsewhere_is_refused():
    model = TOKENIZERS["bytes"][0]
    item = items("bytes", "single", 1, 1)[0]
    pieces = [model.piece(t) for t in item.tokens]
    tasks.check_item(item, pieces, 2400, N_SINK)
    value, (first, end) = item.puzzle.references[0], item.rows[0]
    leaked = [*pieces[:-400], *(bytes([c]) for c in value.encode()), *pieces[-400 + len(value) :]]
    for changed, with_pieces, message in (
        (item, leaked, "in the statements only"),
        (dataclasses.replace(item, rows=((2, 60),)), pieces, "every statement in rows 4 to"),
        (dataclasses.replace(item, rows=((first, len(pieces) - 10),)), pieces, "every statement in rows 4 to"),
        (dataclasses.replace(item, tokens=item.tokens[:-60]), pieces[:-60], "expected 2376 to 2400 rows"),
    ):
        with pytest.raises(EvaluationError, match=message):
            tasks.check_item(changed, with_pieces, 2400, N_SINK)
