"""From records of items to summaries, criteria and tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from rich.table import Column, Table

from . import stats
from .arms import Arm
from .errors import EvaluationError, finite

EXACT = "exact"  # name of the arm that the others are compared with


def by_arm(records: Sequence[dict], item: str) -> dict[str, list[dict]]:
    """Records by arm, every arm with the same items in the same order.

    item  the field that names the item

    Raises EvaluationError when an arm lacks an item or has one twice: arms are compared in pairs.
    """
    arms: dict[str, dict] = {}
    for r in records:
        if r[item] in arms.setdefault(r["arm"], {}):
            raise EvaluationError(f"{r['arm']}: expected one record of {item} {r[item]}, found two")
        arms[r["arm"]][r[item]] = r
    order = list(next(iter(arms.values()), {}))
    for name, found in arms.items():
        if missing := set(order) ^ set(found):
            raise EvaluationError(
                f"{name}: expected the same items in every arm, found a difference in {sorted(map(str, missing))[:3]}"
            )
    return {name: [found[i] for i in order] for name, found in arms.items()}


#
# loss
#


def summarise_loss(records: Sequence[dict], exact: str = EXACT) -> dict:
    """Per arm: mean loss; and of the others, loss over exact (of all, of new and of key tokens), p of the first, top-1 agreement,
    mean KL, median KL of a document, what greedy decoding has in common with exact's; and of all, how much of the greedy text is
    quoted from in front of the tail. Each with its interval over documents.

    exact  name of the arm that the others are compared with

    Figures that were not measured are None. Raises EvaluationError when exact was not measured.
    """
    arms = by_arm(records, "document")
    if exact not in arms:
        raise EvaluationError(f"loss: expected the arm {exact}, found {', '.join(arms) or 'none'}")
    out = {}
    for name, rows in arms.items():
        loss = [r["loss"] for r in rows]
        out[name] = {"loss": stats.mean(loss, f"loss of {name}").as_dict(), "cost": _mean_cost(rows), "quoted": _measured(rows, "quoted")}
        if name == exact:
            continue
        exact_loss = [r["loss"] for r in arms[exact]]
        out[name] |= {
            "over_exact": stats.mean_difference(loss, exact_loss, f"loss of {name} over {exact}").as_dict(),
            "p": stats.paired_p(loss, exact_loss, f"loss of {name} over {exact}"),
            "new_over_exact": over_exact(rows, arms[exact], "new"),
            "key_over_exact": over_exact(rows, arms[exact], "key"),
        }
        out[name] |= {figure: _measured(rows, figure) for figure in ("top1", "kl", "kl_median", "decode")}
    return out


def _measured(rows: Sequence[dict], figure: str) -> dict | None:
    """Mean of a figure of an arm, None where it was not measured."""
    values = [r[figure] for r in rows]
    return None if values[0] is None else stats.mean(values, f"{figure} of {rows[0]['arm']}").as_dict()


def _mean_cost(rows: Sequence[dict]) -> float:
    return float(finite([r["cost"] for r in rows], "cost").mean())


def over_exact(rows: Sequence[dict], exact: Sequence[dict], tokens: str) -> dict | None:
    """Mean loss over exact on all tokens of a sort (new or key) together; documents weigh by how many they have. None where the
    sort was not measured, or fewer than two documents have such tokens: that gives no interval.
    """
    if any(r[f"n_{tokens}"] is None for r in rows):
        return None
    n = finite([r[f"n_{tokens}"] for r in rows], f"{tokens} tokens")
    some = n > 0
    if some.sum() < 2:
        return None
    more = finite([r[f"{tokens}_loss_sum"] - e[f"{tokens}_loss_sum"] for r, e in zip(rows, exact, strict=True)], f"loss of {tokens} tokens")
    found = stats.ratio(more[some], n[some], f"loss of {tokens} tokens over exact")
    return found.as_dict() | {"n_tokens": int(n.sum())}


def loss_ratio(records: Sequence[dict], worse: str, better: str) -> dict:
    """How many times further above exact one arm is than another, paired by document."""
    arms = by_arm(records, "document")
    a, b = ([r["loss"] - e["loss"] for r, e in zip(arms[name], arms["exact"], strict=True)] for name in (worse, better))
    return stats.ratio(a, b, f"loss of {worse} against {better}").as_dict()


def compare_loss(records: Sequence[dict], a: str, b: str) -> dict:
    """Loss of arm `a` over that of arm `b`, on all tokens and on key tokens, paired by document."""
    arms = by_arm(records, "document")
    more = stats.mean_difference(*([r["loss"] for r in arms[name]] for name in (a, b)), f"loss of {a} over {b}")
    p = stats.paired_p(*([r["loss"] for r in arms[name]] for name in (a, b)))
    return {"a": a, "b": b, "loss": more.as_dict(), "p": p, "key": over_exact(arms[a], arms[b], "key")}


#
# facts
#


def summarise_facts(records: Sequence[dict], exact: str = EXACT) -> dict:
    """Per arm: hits with a Wilson interval, mean score, hits by depth; share of what exact gets; hits less those of exact, and
    McNemar's test of them; rows and cost.

    Raises EvaluationError when exact was not measured.
    """
    arms = by_arm(records, "seed")
    if exact not in arms:
        raise EvaluationError(f"facts: expected the arm {exact}, found {', '.join(arms) or 'none'}")
    hits = {name: np.array([r["hit"] for r in rows], bool) for name, rows in arms.items()}
    n_exact = int(hits[exact].sum())
    out = {}
    for name, rows in arms.items():
        k, n = int(hits[name].sum()), len(rows)
        mcnemar = dataclasses.asdict(stats.mcnemar(hits[exact], hits[name], name))
        out[name] = {
            "hits": k,
            "n": n,
            "share": stats.share(k, n, f"hits of {name}").as_dict(),
            "score": stats.mean([r["score"] for r in rows], f"score of {name}").as_dict(),
            "depths": by_depth(rows),
            "of_exact": k / n_exact if n_exact else None,
            "over_exact": stats.share_difference(hits[name], hits[exact], name).as_dict(),
            "p": mcnemar["p"],
            "mcnemar_exact": mcnemar,
            "rows": float(np.mean([r["n_rows"] for r in rows])),
            "filled_rows": float(np.mean([r["n_filled"] for r in rows])),
            "chosen_rows_median": float(np.median([r["n_chosen"] for r in rows])),
            "chosen_rows_max": max(r["n_chosen"] for r in rows),
            "cost": _mean_cost(rows),
        }
    return out


def by_depth(rows: Sequence[dict]) -> list[dict]:
    """Hits of one arm at each depth, with Wilson intervals; empty where the items have none."""
    depths = sorted({r["depth"] for r in rows if r["depth"] is not None})
    groups = [(d, [r["hit"] for r in rows if r["depth"] == d]) for d in depths]
    return [{"depth": d, "hits": sum(g)} | stats.share(sum(g), len(g), f"hits at depth {d}").as_dict() for d, g in groups]


def compare_facts(records: Sequence[dict], a: str, b: str) -> dict:
    """Hits of arm `a` less those of arm `b` on the same items, and McNemar's test of them."""
    arms = by_arm(records, "seed")
    x, y = (np.array([r["hit"] for r in arms[name]], bool) for name in (a, b))
    more = stats.share_difference(x, y, f"{a} against {b}").as_dict()
    return {"a": a, "b": b, "share": more} | dataclasses.asdict(stats.mcnemar(x, y, f"{a} against {b}"))


#
# conclusions
#


def adjust(family: Sequence[dict]) -> None:
    """Put Holm's adjusted `p_holm` beside the `p` of every comparison of a family."""
    if family:
        for comparison, p in zip(family, stats.holm([c["p"] for c in family]), strict=True):
            comparison["p_holm"] = p


def conclude(summary: dict, margin: float) -> list[dict]:
    """Put a `verdict` on each arm but exact: is it equal to exact within the margin? Returns the arms that make up the family:
    the noise floor is no claim and belongs to none.
    """
    for name, s in summary.items():
        if name != "exact":
            s["verdict"] = stats.verdict(stats.Estimate(**s["over_exact"]), margin)
    return [s for name, s in summary.items() if name not in ("exact", "noise")]


#
# criteria
#


@dataclasses.dataclass(frozen=True)
class Criterion:
    """A bound on one figure. sense is "<=" or ">="."""

    name: str
    value: float
    sense: str
    bound: float

    @property
    def holds(self) -> bool:
        value = float(finite(self.value, self.name))
        return value <= self.bound if self.sense == "<=" else value >= self.bound

    def as_dict(self) -> dict:
        return dataclasses.asdict(self) | {"holds": self.holds}


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What is expected of a measurement.

    n_documents, n_facts  least number of items
    loss                  most loss of the maps at the deep split over exact, nats
    times                 least ratio of identity's excess loss to that
    recall                least share of facts that exact recalls
    kept                  least share of exact's that the maps at the deep split recall, and with digit rows the shallow ones
    lost                  most share of exact's that the shallow maps recall without exact rows
    """

    n_documents: int = 20
    n_facts: int = 40
    loss: float = 0.03
    times: float = 3.0
    recall: float = 0.90
    kept: float = 0.95
    lost: float = 0.05


KINDS_EQUAL, KEY_GAIN = 0.01, 1.0  # nats


def kind_pairs(arms: Sequence[Arm]) -> list[tuple[Arm, Arm]]:
    """Arms that differ in the kind of maps alone: kv beside input, and kv_prev beside kv."""
    beside = {"kv": "input", "kv_prev": "kv"}
    pairs = [(a, dataclasses.replace(a, kind=beside[a.kind])) for a in arms if a.mode == "fill" and a.kind in beside]
    return [(a, b) for a, b in pairs if b in arms]


def control_pairs(arms: Sequence[Arm]) -> list[tuple[Arm, Arm]]:
    """Each fill beside what it must be better than: the kind of maps before it, identity, a nofill of equal cost, POP; and rows
    chosen by attention beside as many random ones, both beside as many rows of a longer tail.
    """
    pairs = kind_pairs(arms)
    for a in arms:
        if a.mode == "fill" and a.rows == "none":
            pairs += [(a, Arm("identity", a.split)), (a, Arm("nofill", a.split, "equal", a.kind)), (a, Arm("pop"))]
        controls = {"attention": ("random", "tail"), "random": ("tail",) if a.budget else ()}
        if a.mode == "fill":
            pairs += [(a, dataclasses.replace(a, rows=rows)) for rows in controls.get(a.rows, ())]
    return [(a, b) for a, b in pairs if b in arms]


def kinds_criteria(pairs: Sequence[dict], shallow: int) -> list[Criterion]:
    """Of pairs of compare_loss: kv maps lose as much as input maps, kv_prev maps less than kv maps, and at the split `shallow`
    less by KEY_GAIN on key tokens."""
    out = []
    for p in pairs:
        name, a, b = f"loss of {p['a']} over {p['b']}", Arm.parse(p["a"]), Arm.parse(p["b"])
        if (a, b) not in kind_pairs((a, b)):
            continue
        if b.kind == "input":
            out.append(Criterion(f"{name}, either way", abs(p["loss"]["value"]), "<=", KINDS_EQUAL))
            continue
        out.append(Criterion(f"{name}, upper end", p["loss"]["high"], "<=", 0.0))
        if b.split == shallow and p["key"]:
            out.append(Criterion(f"{name}, key tokens", p["key"]["value"], "<=", -KEY_GAIN))
    return out


def loss_criteria(records: Sequence[dict], deep: int, bounds: Bounds = Bounds()) -> list[Criterion]:
    """Maps at split `deep` cost little over exact, and identity several times as much."""
    fill, identity = Arm("fill", deep).name, Arm("identity", deep).name
    summary = summarise_loss(records)
    return [
        Criterion("documents", summary[fill]["loss"]["n"], ">=", bounds.n_documents),
        Criterion(f"loss of {fill} over exact, nats", summary[fill]["over_exact"]["value"], "<=", bounds.loss),
        Criterion(
            f"excess loss of {identity} over that of {fill}", loss_ratio(records, identity, fill)["value"], ">=", bounds.times
        ),
    ]


def facts_criteria(records: Sequence[dict], deep: int, shallow: int, bounds: Bounds = Bounds()) -> list[Criterion]:
    """Numbers planted in filled rows: kept at split `deep`, lost at `shallow`, back there with digit rows exact."""
    s = summarise_facts(records)
    if not s["exact"]["hits"]:
        raise EvaluationError("facts: expected exact to answer some items, found none: nothing can be said of the other arms")
    kept, lost, back = (Arm("fill", deep).name, Arm("fill", shallow).name, Arm("fill", shallow, "digits").name)
    return [
        Criterion("facts", s["exact"]["n"], ">=", bounds.n_facts),
        Criterion("recall of exact", s["exact"]["share"]["value"], ">=", bounds.recall),
        Criterion(f"recall of {kept}, share of exact", s[kept]["of_exact"], ">=", bounds.kept),
        Criterion(f"recall of {lost}, share of exact", s[lost]["of_exact"], "<=", bounds.lost),
        Criterion(f"recall of {back}, share of exact", s[back]["of_exact"], ">=", bounds.kept),
    ]


#
# tables
#


def span(e: dict, digits: int = 3, sign: str = "+") -> str:
    return f"{e['value']:{sign}.{digits}f} [{e['low']:{sign}.{digits}f}, {e['high']:{sign}.{digits}f}]"


def loss_table(summary: dict, title: str) -> Table:
    table = Table(Column("arm", no_wrap=True), "loss", "over exact, nats", "key tokens, over exact", "top-1", "KL", title=title)
    for name, s in summary.items():
        if name == "exact":
            table.add_row(name, f"{s['loss']['value']:.3f}")
            continue
        key = s["key_over_exact"]
        table.add_row(
            name,
            f"{s['loss']['value']:.3f}",
            span(s["over_exact"]),
            span(key, 2) if key else "-",
            f"{s['top1']['value']:.3f}",
            f"{s['kl']['value']:.3f}",
        )
    return table


def pairs_table(pairs: Sequence[dict], title: str) -> Table:
    table = Table(Column("arm", no_wrap=True), Column("over", no_wrap=True), "loss, nats", "key tokens", title=title)
    for p in pairs:
        table.add_row(p["a"], p["b"], span(p["loss"], 4), span(p["key"], 2) if p["key"] else "-")
    return table


def facts_table(summary: dict, title: str) -> Table:
    table = Table(
        Column("arm", no_wrap=True),
        "recalled",
        "share [95 %]",
        "of exact",
        "p against exact",
        "filled rows",
        "chosen rows, median",
        title=title,
    )
    for name, s in summary.items():
        table.add_row(
            name,
            f"{s['hits']} / {s['n']}",
            span(s["share"], 2, ""),
            "-" if s["of_exact"] is None else f"{s['of_exact']:.2f}",
            f"{s['mcnemar_exact']['p']:.2g}",
            f"{s['filled_rows']:.0f}",
            f"{s['chosen_rows_median']:.0f}",
        )
    return table


def criteria_table(criteria: Sequence[Criterion]) -> Table:
    table = Table("criterion", "found", "expected", "", title="Criteria")
    for c in criteria:
        table.add_row(c.name, f"{c.value:.3g}", f"{c.sense} {c.bound:g}", "[green]holds" if c.holds else "[red]FAILS")
    return table
