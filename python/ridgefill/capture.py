"""From documents to activations: token chunks, and the inputs of chosen layers for each of their rows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .errors import TextError
from .lib import Context, Model
from .text import Document

T = TypeVar("T")


@dataclass(frozen=True)
class Chunk:
    """Tokens that are run from position 0 in an empty context."""

    tokens: list[int]
    document: int  # index into the list of documents it was cut from


@dataclass(frozen=True)
class Selection:
    """Documents to fit on, to hold out and to keep for scores alone, in the order in which they are run."""

    fit: list[Document]
    heldout: list[Document]
    score: list[Document]


def select(documents: list[Document], seed: int, n_heldout: int | None = None, scored: bool = False) -> Selection:
    """Shuffle by `seed` and part by document. Evaluation documents are never used.

    Documents that have a partition keep to it: at most `n_heldout` of the "heldout" ones are used, by default all. Where
    those are too few, documents without a partition are held out first (by default a sixth of them, at least one, if no
    document is marked "heldout") and fitted after that. With `scored` every second one that is held out is kept for scores.

    Raises TextError when a part is empty that should not be.
    """
    usable = [d for d in documents if d.partition != "evaluation"]
    random.Random(seed).shuffle(usable)
    heldout = [d for d in usable if d.partition == "heldout"]
    free = [d for d in usable if not d.partition]
    if n_heldout is None:
        n_heldout = len(heldout) or max(1, round(len(free) / 6))
    heldout = heldout[:n_heldout]
    heldout += free[: n_heldout - len(heldout)]
    taken = set(map(id, heldout))
    fit = [d for d in usable if d.partition != "heldout" and id(d) not in taken]
    if not fit or not heldout:
        raise TextError(
            f"expected documents to fit and at least one to hold out, found {len(fit)} and {len(heldout)} "
            f"of {len(usable)} (a file is a document; {len(documents) - len(usable)} are for evaluation only)"
        )
    if not scored:
        return Selection(fit, heldout, [])
    if len(heldout) < 2:
        raise TextError(
            "expected at least two documents to hold out, one to choose by and one to score what was chosen, found one; "
            "--heldout-documents takes more"
        )
    return Selection(fit, heldout[::2], heldout[1::2])


class Tokens:
    """Token lists of documents, each made once."""

    def __init__(self, model: Model):
        self._model = model
        self._plain: dict[Document, list[int]] = {}
        self._chat: dict[Document, list[int]] = {}

    def plain(self, document: Document) -> list[int]:
        if document not in self._plain:
            self._plain[document] = self._model.tokenize(document.text)
        return self._plain[document]

    def chat(self, document: Document) -> list[int]:
        """The document as a conversation in the model's chat template.

        Raises RidgeError when the model has no template that the library knows.
        """
        if document not in self._chat:
            text = self._model.chat(as_conversation(document.text), add_assistant=False)
            self._chat[document] = self._model.tokenize(text, parse_special=True)
        return self._chat[document]


MESSAGE_CHARACTERS = 600  # a message ends with the first paragraph that makes it this long


def as_conversation(text: str) -> list[dict]:
    """Messages by turns of user and assistant, of whole paragraphs, that together hold the text."""
    messages, paragraphs = [], []
    for paragraph in [*text.split("\n\n"), None]:
        if paragraph is not None:
            paragraphs.append(paragraph)
        content = "\n\n".join(paragraphs)
        if content.strip() and (paragraph is None or len(content) >= MESSAGE_CHARACTERS):
            messages.append({"role": ("user", "assistant")[len(messages) % 2], "content": content})
            paragraphs = []
    return messages


def in_share(i: int, share: float) -> bool:
    """Whether document i of a list belongs to a share of it that is spread evenly over the list."""
    return int((i + 1) * share + 1e-9) > int(i * share + 1e-9)


def chunks(
    documents: Iterable[Document],
    tokens_of: Callable[[int, Document], list[int]],
    n_ctx: int,
    n_sink: int,
    n_tokens: int = 0,
) -> list[Chunk]:
    """Cut documents into chunks of at most `n_ctx` tokens, `n_tokens` in all (0: no limit).

    `tokens_of` is called with the place of a document in the list and the document. Pieces that hold nothing but sink rows
    are left out.
    """
    out: list[Chunk] = []
    left = n_tokens or float("inf")
    for i, document in enumerate(documents):
        tokens = tokens_of(i, document)
        tokens = tokens[: int(min(left, len(tokens)))]
        for at in range(0, len(tokens), n_ctx):
            piece = tokens[at : at + n_ctx]
            if len(piece) > n_sink:
                out.append(Chunk(piece, i))
                left -= len(piece)
        if left <= n_sink:
            break
    return out


def in_turns(items: Iterable[T], group: Callable[[T], object]) -> list[T]:
    """The first item of every group, then the second of every one, and so on; within a turn in the order of `items`."""
    turns, seen = [], {}
    for item in items:
        seen[group(item)] = turn = seen.get(group(item), -1) + 1
        turns.append((turn, item))
    return [item for _, item in sorted(turns, key=lambda t: t[0])]


def activations(ctx: Context, chunk_list: Iterable[Chunk], layers: list[int]) -> Iterator[dict[int, np.ndarray]]:
    """Inputs of `layers` for each chunk, float32 [n_tokens, n_embd]; row 0 is position 0."""
    ctx.capture(layers)
    try:
        for chunk in chunk_list:
            ctx.clear()
            ctx.decode(chunk.tokens, logits="none")
            yield {il: ctx.layer_inputs(il) for il in layers}
    finally:
        ctx.capture(())
