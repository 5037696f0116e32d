"""Loss of the tokens that follow a prefix, teacher forced, over the cache that an arm leaves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .arms import Arm, Engine
from .errors import EvaluationError, finite
from .texts import Window

KEY_NATS = 2.0  # a key token is worse by this much when the context is cut to the tail


def next_logits(engine: Engine, arm: Arm, window: Window, n_tail: int, seed: int = 0) -> np.ndarray:
    """Logits [n_scored, n_vocab], float32, that predict the window's scored tokens.

    The prefix goes into the cache as the arm says; the scored tokens are decoded exactly over it.
    """
    prompt, scored = window.tokens[: window.n_prefix], window.tokens[window.n_prefix :]
    rest, pos0, _ = engine.begin(arm, prompt, n_tail, seed)
    tokens = rest + list(scored[:-1])
    # the prompt's last row predicts the first scored token
    return engine.ctx.decode(tokens, pos0=pos0, logits=range(len(rest) - 1, len(tokens)))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities over the last axis, float32 with float64 sums."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)


def score_window(engine: Engine, arms: Sequence[Arm], window: Window, n_tail: int, seed: int = 0) -> list[dict]:
    """One record per arm: mean loss (nats), agreement of the likeliest token with exact, mean KL(exact || arm), and the loss
    over the key tokens of the window (those that are worse by KEY_NATS when the context is cut to the tail).

    arms must hold exact; key-token figures need cut and are None without it.

    Raises EvaluationError when a value is not finite.
    """
    exact = Arm("exact")
    if exact not in arms:
        raise EvaluationError("expected the arm exact among the arms, found none: the others are compared with it")
    target = np.array(window.tokens[window.n_prefix :])
    index = np.arange(len(target))
    reference = log_softmax(next_logits(engine, exact, window, n_tail))
    nll, top1, kl = {exact: -reference[index, target]}, {exact: 1.0}, {exact: 0.0}
    for arm in arms:
        if arm == exact:
            continue
        lp = log_softmax(next_logits(engine, arm, window, n_tail, seed))
        nll[arm] = -lp[index, target]
        top1[arm] = float((lp.argmax(axis=1) == reference.argmax(axis=1)).mean())
        kl[arm] = float((np.exp(reference) * (reference - lp)).sum(axis=1, dtype=np.float64).mean())
    key = key_tokens(nll[exact], nll[Arm("cut")]) if Arm("cut") in nll else None
    return [record(arm, window, nll[arm], top1[arm], kl[arm], key) for arm in arms]


def key_tokens(exact: np.ndarray, cut: np.ndarray) -> np.ndarray:
    """Indices of the tokens that need what the tail does not hold. exact, cut: losses [n_scored], nats."""
    return np.flatnonzero(cut - exact >= KEY_NATS)


def record(arm: Arm, window: Window, nll: np.ndarray, top1: float, kl: float, key: np.ndarray | None) -> dict:
    what = f"{arm.name} on {window.document}"
    return {
        "arm": arm.name,
        "document": window.document,
        "start": window.start,
        "tokens_sha256": window.sha256,
        "loss": float(finite(nll, what).mean()),
        "top1": float(finite(top1, what)),
        "kl": float(finite(kl, what)),
        "n_key": None if key is None else len(key),
        "key_loss_sum": None if key is None else float(nll[key].sum(dtype=np.float64)),
    }
