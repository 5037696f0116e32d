"""The doctor looks at the log of a server, of another tool, or of a program that uses the library."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from . import catalogue
from .report import Check, Outcome, Report, advice, judge_prompts

_OURS = re.compile(r"ridge|sidecar '", re.IGNORECASE)
_OURS_ALONE = re.compile(r"\bllama_ridge_\w+: |[:|] +ridge: ")  # how lines begin that nobody else writes
_START = "load_model: loading model"  # llama-server begins, or begins again after a sleep
_COLOUR = re.compile(r"\x1b\[[0-9;]*[mK]")
_IN_JSON = re.compile(r'"(?:msg|message)"\s*:\s*("(?:[^"\\]|\\.)*")')  # --log-jsonl, and answers with an error
_FACT = re.compile(r"(\w+) = ([^,\s]+)")


@dataclass
class _Run:
    """One run of the server: what of the log came after its last start."""

    first: int = 0  # line of the start, 0 if it is not in the log
    prompts: Counter[Outcome] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    maps: str = ""  # split and tail, once a prompt told them
    messages: dict[str, list[tuple[int, list[catalogue.Found]]]] = field(default_factory=dict)  # by verdict
    unknown: list[int] = field(default_factory=list)  # lines

    def add(self, n: int, text: str) -> None:
        chain = catalogue.explain(text)
        if chain:
            entry = chain[-1].entry
            if entry.group == "prompt":
                self._add_prompt(chain[-1].text)
            if chain[0].entry.group == "rows":
                _, filled, seen, _ = chain[0].values
                self.rows.update(filled=int(filled), exact=int(seen) - int(filled))
            self.messages.setdefault(entry.verdict, []).append((n, chain))
        elif _OURS_ALONE.search(text):
            self.unknown.append(n)

    def _add_prompt(self, text: str) -> None:
        facts = dict(_FACT.findall(text))
        if "filled" not in facts:
            self.prompts[Outcome("skipped", "cancelled")] += 1
            return
        reason = "" if facts["reason"] == "-" else facts["reason"]
        # as the server counts them in /metrics
        outcome = "filled" if int(facts["filled"]) > 0 else "exact" if reason in ("", "off") else "skipped"
        self.prompts[Outcome(outcome, reason or facts["mode"])] += 1
        self.rows.update(filled=int(facts["filled"]), exact=int(facts["exact"]))
        if facts["split"] != "-1":
            self.maps = f"split {facts['split']}, tail {facts['tail']}"


def _texts(line: str) -> Iterator[str]:
    line = _COLOUR.sub("", line)
    quoted = _IN_JSON.findall(line)
    yield from (json.loads(q, strict=False) for q in quoted) if quoted else [line]


def _last_run(path: str | os.PathLike) -> tuple[_Run, int]:
    """The last run in a log, and how many there are."""
    run, starts = _Run(), 0
    with open(path, encoding="utf-8", errors="replace") as f:
        for n, line in enumerate(f, 1):
            if _START in line:
                run, starts = _Run(n), starts + 1
            if _OURS.search(line):
                for text in _texts(line):
                    run.add(n, text)
    return run, starts


def _lines(messages: list[tuple[int, list[catalogue.Found]]], matched: bool) -> list[Check]:
    """The first line of each kind of message, and how many there are."""
    kinds: dict[str, list[tuple[int, list[catalogue.Found]]]] = {}
    for n, chain in messages:
        kinds.setdefault(chain[-1].entry.message, []).append((n, chain))
    checks = []
    for same in kinds.values():
        n, chain = same[0]
        more = f" ({len(same)} such lines)" if len(same) > 1 else ""
        checks.append(Check(f"line {n}{more}: {chain[0].text}", matched))
    return checks


def diagnose(path: str | os.PathLike) -> Report:
    """What a log says of the last run in it. Raises OSError when it cannot be read."""
    run, starts = _last_run(path)
    problems, warnings, fine = (run.messages.get(v, []) for v in ("problem", "warning", "healthy"))
    checks = [Check(f"the last of {starts} starts in this log is at line {run.first}", True)] if starts > 1 else []
    checks += _lines([m for m in fine if m[1][-1].entry.group != "prompt"], True)
    if run.maps:
        checks.append(Check(f"the maps are loaded: {run.maps}", True))
    if run.rows:
        text = f"rows of prompts: {run.rows['filled']:,} filled, {run.rows['exact']:,} exact"
        checks.append(Check(text, run.rows["filled"] > 0))
    faults = _lines(warnings + problems, False)
    if run.unknown:
        text = f"{len(run.unknown)} lines of RidgeFill, the first of them line {run.unknown[0]}, are of another version than this doctor"
        faults.append(Check(text, False))
    do = [d for _, chain in (*reversed(problems), *warnings) for d in advice(chain)]
    if problems:
        return Report.of("problem", problems[-1][1][-1].entry.means, checks + faults, do)
    if run.prompts:
        found = judge_prompts(run.prompts)
        return Report.of(found.verdict, found.diagnosis, (*checks, *found.checks, *faults), (*found.do, *do))
    if run.rows:  # of a tool, whose last line is of all its prompts
        n = run.rows["filled"]
        do += [d for _, chain in fine if not n and chain[-1].entry.group == "rows" for d in advice(chain)]
        return Report.of("healthy" if n else "problem", f"{n:,} of {run.rows.total():,} rows were filled.", checks + faults, do)
    if fine or any(chain[-1].entry.group.startswith("other_") for _, chain in warnings):  # maps that differ are loaded
        return Report.of("healthy", judge_prompts(run.prompts).diagnosis, checks + faults, do)
    nothing = (
        "A server logs what it refuses, and a line for each prompt once it has maps: was it started with --ridge-maps? "
        "Is this its whole log?"
    )
    return Report.of("cannot tell", "This log says nothing of RidgeFill's maps or prompts.", checks + faults, [*do, nothing])
