"""Text that two documents share: maps that were fitted on a passage score better on it than they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

N = 50  # tokens in a row that count as shared text

_MIX = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)  # splitmix64
_BASE = 0x5851F42D4C957F2D  # odd, so that it has an inverse modulo 2^64


@dataclass(frozen=True)
class Overlap:
    """A passage that document `document` of one list shares with document `other` of another."""

    document: int
    other: int
    start: int  # of the passage in `document`, in tokens
    length: int  # N, or that of two short documents that are equal


def _mixed(tokens: np.ndarray) -> np.ndarray:
    """A pseudo-random 64-bit number for each token id."""
    x = (tokens.astype(np.uint64) + np.uint64(1)) * _MIX[0]
    x = (x ^ (x >> np.uint64(30))) * _MIX[1]
    x = (x ^ (x >> np.uint64(27))) * _MIX[2]
    return x ^ (x >> np.uint64(31))


def _powers(base: int, n: int) -> np.ndarray:
    return np.cumprod(np.concatenate([[np.uint64(1)], np.full(n - 1, base, np.uint64)]), dtype=np.uint64)


def gram_hashes(tokens: Sequence[int]) -> np.ndarray:
    """A 64-bit hash of every run of N tokens, [len - N + 1]; of a shorter document, one of all of it.

    sum_j mixed(t_(i+j)) base^j modulo 2^64, from differences of one running sum.
    """
    if not len(tokens):
        return np.empty(0, np.uint64)
    n = min(N, len(tokens))
    values = _mixed(np.asarray(tokens))
    sums = np.concatenate([[np.uint64(0)], np.cumsum(values * _powers(_BASE, len(values)), dtype=np.uint64)])
    inverse = _powers(pow(_BASE, -1, 2**64), len(values) - n + 1)
    return (sums[n:] - sums[:-n]) * inverse


def overlaps(documents: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> list[Overlap]:
    """For each pair of a document and an other that share N tokens in a row, the first passage. Documents are token lists.

    A document of fewer than N tokens shares text with its equals only.
    """
    grams = [gram_hashes(t) for t in others]
    keys = np.unique(np.concatenate([*grams, np.empty(0, np.uint64)]))
    out = []
    for i, tokens in enumerate(documents if len(keys) else []):
        hashes = gram_hashes(tokens)
        if not (keys[np.minimum(np.searchsorted(keys, hashes), len(keys) - 1)] == hashes).any():
            continue
        for other, theirs in enumerate(grams):
            shared = np.isin(hashes, theirs)
            if shared.any():
                out.append(Overlap(i, other, int(np.argmax(shared)), min(N, len(tokens))))
    return out
