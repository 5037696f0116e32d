"""A conversation in which the two models answer in turn: what is left of each after many hand-overs.

A window of text is cut into turns. The source runs the first one, the target the second, and so on; before each turn the rows of
the turn before it are mapped into the cache of the model that comes next, so a cache holds the rows of every second turn only
through a mapper, and these were computed over a cache of the same kind. Each turn is compared with what its model says of the same
tokens over a cache of its own rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ... import lib
from ...evaluation import stats
from ...evaluation.errors import finite
from ...evaluation.loss import log_softmax
from ...evaluation.report import by_arm
from ...evaluation.texts import Window
from .engine import Engine

NAME = "turns"
ROLES = ("source", "target")  # in the order of their turns


def role_of(turn: int) -> str:
    """Who runs a turn, counted from 0."""
    return ROLES[turn % 2]


def converse(engine: Engine, back: lib.Mapper, window: Window, n_turn: int) -> list[dict]:
    """One record per turn of n_turn tokens: loss of its model over the shared cache and over its own, KL(own || shared) and top-1
    agreement, each on the tokens of the turn but the first, which no row of the turn predicts.

    back  the mapper from target to source

    Raises EvaluationError when a value is not finite.
    """
    contexts = {"source": engine.source_ctx, "target": engine.target_ctx}
    mappers = {"target": engine.mapper, "source": back}
    engine.forget()
    own = {role: _alone(ctx, window.tokens, n_turn) for role, ctx in contexts.items()}
    for ctx in contexts.values():
        ctx.clear()
    engine.target_ctx.decode(window.tokens[: engine.n_sink], logits="none")
    records = []
    for turn in range(len(window.tokens) // n_turn):
        role, begin = role_of(turn), turn * n_turn
        ctx, giver = contexts[role], contexts[role_of(turn + 1)]
        if turn:
            lib.Transfer(giver, ctx, mappers[role], ctx.seq_pos_max() + 1, begin).run().close()
        tokens = window.tokens[begin : begin + n_turn]
        shared = log_softmax(ctx.decode(tokens, pos0=begin, logits=range(n_turn - 1)))
        records.append(_record(turn, window, shared, own[role][turn], np.array(tokens[1:])))
    return records


def _alone(ctx: lib.Context, tokens: Sequence[int], n_turn: int) -> list[np.ndarray]:
    """Log-probabilities [n_turn - 1, n_vocab] of every turn, of a model that runs all of them."""
    ctx.clear()
    turns = range(0, len(tokens) - n_turn + 1, n_turn)
    return [log_softmax(ctx.decode(tokens[i : i + n_turn], pos0=i, logits=range(n_turn - 1))) for i in turns]


def _record(turn: int, window: Window, shared: np.ndarray, own: np.ndarray, target: np.ndarray) -> dict:
    what = f"turn {turn + 1} of {window.document}"
    loss, alone = (finite(-lp[np.arange(len(target)), target], what).mean() for lp in (shared, own))
    kl = finite((np.exp(own) * (own - shared)).sum(axis=1, dtype=np.float64), what)
    return {
        "arm": f"turn {turn + 1}",
        "model": role_of(turn),
        "document": window.document,
        "start": window.start,
        "tokens_sha256": window.sha256,
        "loss": float(loss),
        "alone": float(alone),
        "kl": float(kl.mean()),
        "top1": float((shared.argmax(axis=1) == own.argmax(axis=1)).mean()),
    }


def summarise(records: Sequence[dict]) -> dict:
    """By turn: model, loss over that of the model alone, mean KL and top-1 agreement, with intervals over documents."""
    out = {}
    for name, rows in by_arm(records, "document").items():
        out[name] = {
            "model": rows[0]["model"],
            "over_alone": stats.mean_difference(*([r[key] for r in rows] for key in ("loss", "alone")), f"loss of {name}").as_dict(),
            **{key: stats.mean([r[key] for r in rows], f"{key} of {name}").as_dict() for key in ("alone", "kl", "top1")},
        }
    return out


def drift(records: Sequence[dict]) -> list[dict]:
    """For each model, what its loss over itself alone is more in its last turn than in its first with rows of the other."""
    turns, out = by_arm(records, "document"), []
    for role in ROLES:
        mine = [name for name, rows in turns.items() if rows[0]["model"] == role and name != "turn 1"]
        if len(mine) < 2:
            continue
        first, last = ([r["loss"] - r["alone"] for r in turns[name]] for name in (mine[0], mine[-1]))
        more = stats.mean_difference(last, first, f"drift of the {role}")
        out.append({"model": role, "from": mine[0], "to": mine[-1], "loss": more.as_dict(), "p": stats.paired_p(last, first)})
    return out
