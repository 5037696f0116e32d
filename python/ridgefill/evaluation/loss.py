"""Loss of the tokens that follow a prefix, teacher forced, over the cache that an arm leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from .. import lib
from .arms import Arm, Engine, Filled
from .errors import EvaluationError, finite
from .texts import Window, rng

KEY_NATS = 2.0  # a key token is worse by this much when the context is cut to the tail
N_GRAM = 8  # a token inside so many tokens in a row that the prompt holds too can be copied: it is not new
EXACT, CUT = Arm("exact"), Arm("cut")
KL_EDGES = np.logspace(-8, 2, 41)  # of the histograms of KL, nats; what lies outside counts in the first and the last bin


@dataclasses.dataclass(frozen=True)
class Reading:
    """What an arm predicts.

    logits  [n_scored, n_vocab], float32, that predict the window's scored tokens
    greedy  [n_decode] tokens that continue the prompt, each the likeliest
    filled  what the prefill did
    """

    logits: np.ndarray
    greedy: list[int]
    filled: Filled


def read(engine: Engine, arm: Arm, window: Window, n_tail: int, seed: int = 0, n_decode: int = 0) -> Reading:
    """Put the prefix into the cache as the arm says and decode the scored tokens exactly over it; then, in their place, n_decode
    tokens greedily.
    """
    prompt, scored = window.tokens[: window.n_prefix], window.tokens[window.n_prefix :]
    rest, pos0, filled = engine.begin(arm, prompt, n_tail, seed)
    tokens = rest + list(scored[:-1])
    # the prompt's last row predicts the first scored token
    logits = engine.ctx.decode(tokens, pos0=pos0, logits=range(len(rest) - 1, len(tokens)))
    engine.ctx.seq_rm(0, pos0 + len(rest))
    return Reading(logits, lib.greedy(engine.ctx, logits[0], n_decode, stop_at_eog=False), filled)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities over the last axis, float32 with float64 sums."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)


def score_window(
    engine: Engine, arms: Sequence[Arm], window: Window, n_tail: int, seed: int = 0, n_decode: int = 0,
    exact: Arm = EXACT, cut: Arm = CUT,
) -> list[dict]:  # fmt: skip
    """One record per arm; record() lists the figures. `n_decode` tokens are decoded greedily after the prompt, 0: none.

    exact  with which the others are compared; it must be among the arms
    cut    the arm that misses what is in front of the tail; key-token figures need it and are None without it

    Raises EvaluationError when a value is not finite.
    """
    if exact not in arms:
        raise EvaluationError(f"expected the arm {exact.name} among the arms, found none: the others are compared with it")
    seed = int(rng(seed, "rows", window.document).integers(2**31))  # of random rows: others in each window
    first = read(engine, exact, window, n_tail, n_decode=n_decode)
    reference = log_softmax(first.logits)
    target = np.array(window.tokens[window.n_prefix :])
    nll, kl, records = {}, {}, []
    for arm in arms:
        r = first if arm == exact else read(engine, arm, window, n_tail, seed, n_decode)
        lp = log_softmax(r.logits)
        nll[arm] = -lp[np.arange(len(target)), target]
        kl[arm] = (np.exp(reference) * (reference - lp)).sum(axis=1, dtype=np.float64)
        records.append({
            "top1": float((lp.argmax(axis=1) == reference.argmax(axis=1)).mean()),
            "decode": agreement(r.greedy, first.greedy) if n_decode else None,
            "quoted": quoted(r.greedy, window.tokens[: window.n_prefix - n_tail]),
            "n_filled": len(r.filled.filled), "n_chosen": len(r.filled.chosen), "cost": r.filled.cost,
        })  # fmt: skip
    key = key_tokens(nll[exact], nll[cut]) if cut in nll else None
    new = np.flatnonzero(new_tokens(window))
    return [record(arm, window, nll[arm], kl[arm], new, key) | more for arm, more in zip(arms, records, strict=True)]


def agreement(found: Sequence[int], expected: Sequence[int]) -> float:
    """Share of `expected` in front of the first token that is another: what a greedy answer has in common with it."""
    differs = np.flatnonzero(np.asarray(found) != np.asarray(expected))
    return float(differs[0] / len(expected)) if len(differs) else 1.0


def runs(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    """Every n tokens in a row."""
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]


def quoted(found: Sequence[int], source: Sequence[int], n: int = N_GRAM) -> float | None:
    """Share of the n tokens in a row of `found` that stand in `source` too; None for fewer than n tokens."""
    held, mine = set(runs(source, n)), runs(found, n)
    return sum(run in held for run in mine) / len(mine) if mine else None


def key_tokens(exact: np.ndarray, cut: np.ndarray) -> np.ndarray:
    """Indices of the tokens that need what the tail does not hold. exact, cut: losses [n_scored], nats."""
    return np.flatnonzero(cut - exact >= KEY_NATS)


def new_tokens(window: Window, n: int = N_GRAM) -> np.ndarray:
    """bool [n_scored]: tokens that stand in no n tokens in a row which the prompt holds too."""
    tokens, n_prefix = window.tokens, window.n_prefix
    held = set(runs(tokens[:n_prefix], n))
    copied = np.zeros(len(tokens), bool)
    for i in range(max(0, n_prefix - n + 1), len(tokens) - n + 1):
        if tokens[i : i + n] in held:
            copied[i : i + n] = True
    return ~copied[n_prefix:]


def record(arm: Arm, window: Window, nll: np.ndarray, kl: np.ndarray, new: np.ndarray, key: np.ndarray | None) -> dict:
    """Figures of one arm on one window, losses in nats.

    nll, kl    [n_scored], loss and KL(exact || arm) of each scored token
    new, key   indices of new tokens and of key tokens
    """
    what = f"{arm.name} on {window.document}"
    finite(nll, what), finite(kl, what)
    return {
        "arm": arm.name,
        "document": window.document,
        "start": window.start,
        "tokens_sha256": window.sha256,
        "loss": float(nll.mean(dtype=np.float64)),
        "kl": float(kl.mean()),
        "kl_median": float(np.median(kl)),
        "kl_counts": np.histogram(np.clip(kl, KL_EDGES[0], KL_EDGES[-1]), KL_EDGES)[0].tolist(),
        "n_new": len(new),
        "new_loss_sum": float(nll[new].sum(dtype=np.float64)),
        "n_key": None if key is None else len(key),
        "key_loss_sum": None if key is None else float(nll[key].sum(dtype=np.float64)),
    }
