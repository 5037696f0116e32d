"""What the doctor says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from . import catalogue

EXIT_CODES = {"healthy": 0, "problem": 12, "cannot tell": 13}


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    text: str
    matched: bool


@dataclass(frozen=True)
class Report:
    """A diagnosis."""

    verdict: str  # one of EXIT_CODES
    diagnosis: str  # one line
    checks: tuple[Check, ...] = ()
    do: tuple[str, ...] = ()

    @classmethod
    def of(cls, verdict: str, diagnosis: str, checks: Iterable[Check] = (), do: Iterable[str] = ()) -> Report:
        """With advice that was given twice, or is none, left out."""
        return cls(verdict, diagnosis, tuple(checks), tuple(dict.fromkeys(d for d in do if d)))


def advice(chain: list[catalogue.Found]) -> list[str]:
    """What to do about a message and what it quotes: the advice about the cause is enough where there is one."""
    return next(([f.entry.do] for f in reversed(chain) if f.entry.do), [])


def from_message(message: str, checks: Iterable[Check] = ()) -> Report:
    """A problem that one message of the library tells."""
    chain = catalogue.explain(message)
    diagnosis = chain[-1].entry.means if chain else message
    return Report.of("problem", diagnosis, [*checks, Check(message, False)], advice(chain))


#
# prompts
#


@dataclass(frozen=True)
class Outcome:
    """How prompts ran: `outcome` filled, exact (none was asked for) or skipped; why, or in which mode if both sweeps ran."""

    outcome: str
    reason: str


def judge_prompts(prompts: Counter[Outcome]) -> Report:
    """What the prompts of a server that has maps say of it."""
    n = prompts.total()
    if n == 0:
        return Report.of("healthy", "The maps are loaded; no prompt has come yet.")
    reasons = catalogue.reasons()

    def about(o: Outcome) -> str:
        known = reasons.get(o.reason)
        return f"{o.reason} ({known['means']})" if known else o.reason

    n_filled = sum(k for o, k in prompts.items() if o.outcome == "filled")
    ranked = [(o, k) for o, k in prompts.most_common() if o.outcome != "filled"]
    checks = [Check(f"{n_filled} of {n} prompts were filled", n_filled > 0)]
    checks += [Check(f"{k} of {n} prompts ran exactly: {about(o)}", o.outcome == "exact") for o, k in ranked]
    ranked.sort(key=lambda x: x[0].outcome == "exact")  # those that were to be filled come first
    failed = [(o, k) for o, k in ranked if o.outcome == "skipped" and reasons.get(o.reason, {}).get("verdict") == "problem"]
    if n_filled and not failed:
        return Report.of("healthy", f"{n_filled} of {n} prompts were filled.", checks)
    o, k = (failed or ranked)[0]
    none = "" if n_filled else "No prompt was filled: "
    do = [reasons[o.reason]["do"] for o, _ in [(o, k), *ranked] if o.reason in reasons]
    return Report.of("problem", f"{none}{k} of {n} prompts ran exactly: {about(o)}.", checks, do)
