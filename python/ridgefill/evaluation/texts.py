"""Text sets: documents of one partition, and windows of tokens cut out of them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence

import numpy as np

from ..capture import in_turns
from ..text import PARTITIONS, Document, read_documents
from .errors import EvaluationError


def documents(folder: str | os.PathLike, partition: str = "evaluation", sources: Sequence[str] = ()) -> list[Document]:
    """Documents of one partition of a text set (scripts/fetch_text.sh), in the order of its index.

    sources  if given, only documents whose source begins with one of these words

    Raises EvaluationError for an unknown partition or when nothing is left, TextError when the set cannot be read.
    """
    if partition not in PARTITIONS:
        raise EvaluationError(f"partition: expected one of {', '.join(PARTITIONS)}, found {partition!r}")
    out = [d for d in read_documents([folder]) if d.partition == partition]
    if sources:
        out = [d for d in out if d.source.split()[0] in sources]
    if not out:
        raise EvaluationError(
            f"{folder}: expected documents of partition {partition}{' from ' if sources else ''}"
            f"{', '.join(sources)}, found none; run scripts/fetch_text.sh"
        )
    return out


def spread(docs: Sequence[Document], n: int) -> list[Document]:
    """n documents, the sources in turn, so that a small number still holds every kind of text.

    Raises EvaluationError when there are fewer.
    """
    if n > len(docs):
        raise EvaluationError(f"expected at least {n} documents, found {len(docs)}")
    return in_turns(docs, lambda d: d.source)[:n]


@dataclasses.dataclass(frozen=True)
class Window:
    """Tokens of one document from its token `start` on: n_prefix to condition on, the rest to be scored."""

    document: str
    source: str
    start: int
    tokens: tuple[int, ...]
    n_prefix: int

    @property
    def sha256(self) -> str:
        """Hash of the token ids: two runs that agree in it scored the same text."""
        return hashlib.sha256(np.array(self.tokens, "<i4").tobytes()).hexdigest()


def windows(model, docs: Sequence[Document], n_prefix: int, n_scored: int, seed: int) -> list[Window]:
    """One window per document, at a place drawn by `seed` and the document's name.

    model     has tokenize(text)
    n_prefix  P, rows that the scored tokens are conditioned on
    n_scored  tokens whose loss is taken

    Raises EvaluationError for a document with fewer than n_prefix + n_scored tokens.
    """
    out = []
    for d in docs:
        tokens = model.tokenize(d.text)
        room = len(tokens) - (n_prefix + n_scored)
        if room < 0:
            raise EvaluationError(f"{d.name}: expected at least {n_prefix + n_scored} tokens, found {len(tokens)}")
        start = int(rng(seed, d.name).integers(room + 1))
        out.append(Window(d.name, d.source, start, tuple(tokens[start : start + n_prefix + n_scored]), n_prefix))
    return out


def rng(seed: int, *names) -> np.random.Generator:
    """A generator of its own for each (seed, names): adding an item changes no other."""
    digest = hashlib.sha256(json.dumps([seed, *names]).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))
