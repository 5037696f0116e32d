"""The tokenizer of the family: byte-level BPE in the form of Qwen2's, which splits numbers into digits; llama.cpp knows it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from ..evaluation.facts import FIRST, LAST, NOUNS, OPENING, Fact
from .recipes import N_VOCAB, SPECIAL, PicoError

PRE = "qwen2"  # tokenizer.ggml.pre
# how that one cuts text before merging: words with the blank before them, single digits, runs of marks, line ends, blanks
_CUTS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# names and nouns of the facts become tokens of their own: a model this small can then match a name over two or three rows
_TIMES = 600


def train(texts: Iterable[str]) -> Tokenizer:
    """A tokenizer of N_VOCAB tokens, SPECIAL first, from `texts` and the words that facts are made of.

    Raises PicoError where the texts hold too few different words for so many.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(_CUTS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=N_VOCAB, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_with_words(texts), trainer)
    if tokenizer.get_vocab_size() != N_VOCAB:
        raise PicoError(f"expected text enough for a vocabulary of {N_VOCAB} tokens, found {tokenizer.get_vocab_size()}")
    return tokenizer


def _with_words(texts: Iterable[str]) -> Iterator[str]:
    """The texts, and often what facts, questions and chats are written with."""
    yield from texts
    facts = [Fact(kind, "", "") for kind in ("digits", "words")]
    forms = [f"{OPENING} user assistant", *(f"{f.sentence} {f.question}" for f in facts)]
    words = f"{' '.join(['', *FIRST, *LAST, *NOUNS])} " + " ".join(f'"{noun}"' for noun in NOUNS)
    yield "\n".join([words, *forms] * _TIMES)


def load(path: str | os.PathLike) -> Tokenizer:
    return Tokenizer.from_file(os.fspath(path))
