"""Real text and batches: what a step of training sees depends on the seed, the step and the stage alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer

from ..evaluation.facts import sentences
from ..text import Document
from .recipes import STEP_TOKENS, PicoError, Recipe, Stage
from .tasks import Sample, training_prompt

N_SENTENCE_MIN = 10  # tokens; shorter ones are rare


class Corpus:
    """Documents as tokens, and as sentences with their lengths in tokens.

    Raises PicoError without a document whose sentences have n_min tokens; others are left out.
    """

    def __init__(self, tokenizer: Tokenizer, docs: Sequence[Document], n_min: int):
        self.tokens, self.sentences, self.lengths = [], [], []
        for d in docs:
            split = sentences(d.text)
            lengths = [len(e.ids) for e in tokenizer.encode_batch([f" {x}" for x in split])]
            if sum(lengths) >= n_min:
                self.tokens.append(np.array(tokenizer.encode(d.text).ids))
                self.sentences.append(split)
                self.lengths.append(lengths)
        if not self.tokens:
            raise PicoError(f"text: expected documents with sentences of {n_min:,} tokens, found none among {len(docs)}")

    def window(self, r: np.random.Generator, n: int) -> np.ndarray:
        """n tokens of a document as it stands."""
        ids = self.tokens[int(r.integers(len(self.tokens)))]
        start = int(r.integers(len(ids) - n + 1))
        return ids[start : start + n]

    def filler(self, r: np.random.Generator, n: int) -> list[str]:
        """Sentences of a document in their order, n tokens or fewer; those that do not fit are left out."""
        doc = int(r.integers(len(self.sentences)))
        start, count = int(r.integers(len(self.sentences[doc]))), len(self.sentences[doc])
        found = []
        for i in range(start, start + count):
            if n < N_SENTENCE_MIN:
                break
            if self.lengths[doc][i % count] <= n:
                n -= self.lengths[doc][i % count]
                found.append(self.sentences[doc][i % count])
        return found


@dataclasses.dataclass(frozen=True)
class Batch:
    """Samples of one length, stacked: [b, t], and for copies and hops the rows that are rewarded.

    rows    [b, n] row of a sequence, padded with 0
    wanted  [b, n, t] bool, the rows that it should attend to; none where padded
    """

    tokens: torch.Tensor
    answer: torch.Tensor
    text: torch.Tensor
    copies: tuple[torch.Tensor, torch.Tensor]
    hops: tuple[torch.Tensor, torch.Tensor]


def stack(samples: Sequence[Sample], device: str = "cpu") -> Batch:
    def field(name: str) -> torch.Tensor:
        return torch.from_numpy(np.stack([getattr(s, name) for s in samples])).to(device)

    def targets(name: str) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = [getattr(s, name) for s in samples]
        distinct = [np.unique(p[:, 0]) for p in pairs]
        rows = np.zeros((len(samples), max(1, *map(len, distinct))), np.int64)
        wanted = np.zeros((*rows.shape, len(samples[0].tokens)), bool)
        for b, (p, own) in enumerate(zip(pairs, distinct, strict=True)):
            rows[b, : len(own)] = own
            wanted[b, np.searchsorted(own, p[:, 0]), p[:, 1]] = True
        return torch.from_numpy(rows).to(device), torch.from_numpy(wanted).to(device)

    return Batch(field("tokens"), field("answer"), field("text"), targets("copies"), targets("hops"))


def batch(tokenizer: Tokenizer, corpus: Corpus, recipe: Recipe, stage: Stage, seed: int, step: int, device: str = "cpu") -> Batch:
    """What one step sees: STEP_TOKENS tokens, a share of the sequences real text alone."""
    r = np.random.default_rng([seed, step])
    samples = []
    for _ in range(STEP_TOKENS // stage.n_tokens):
        if r.random() < recipe.text_share:
            tokens = corpus.window(r, stage.n_tokens)
            none = np.empty((0, 2), int)
            samples.append(Sample(tokens, np.zeros(len(tokens), np.float32), np.ones(len(tokens), bool), none, none, []))
        else:
            samples.append(training_prompt(tokenizer, r, stage, corpus.filler))
    return stack(samples, device)
