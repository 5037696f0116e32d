"""Every message that our C++ prints, what it means and what to do: messages.json, read.

A message is a template in which {} stands for what is put in at run time. Groups of messages share a verdict, that of a
server whose log has the message ("healthy", "warning" or "problem"), and what to do. A group with `within` is of words that
complete that message. `parts` are words that complete others and say nothing alone; `reasons` are those of
`timings.ridge.reason`, with the verdict on a server that fills other prompts.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

_LEVEL = re.compile(r"^([\d.]+ )?[DIWE] ")  # time and level of a line of a log
_START = re.compile(r"[:|] +")  # what programs put before a message ends so


@dataclass(frozen=True)
class Entry:
    """One message."""

    message: str  # template
    group: str
    verdict: str
    means: str
    do: str
    within: str | None  # the message that it completes, None if it stands alone

    @property
    def weight(self) -> int:
        """How much of the message is fixed."""
        return len(self.message.replace("{}", ""))


@dataclass(frozen=True)
class Found:
    """A message in a text."""

    entry: Entry
    text: str
    values: tuple[str, ...]  # what stands for each {}


@cache
def _content() -> dict:
    return json.loads(resources.files(__package__).joinpath("messages.json").read_text("utf-8"))


@cache
def entries() -> tuple[Entry, ...]:
    """All messages, those that say most first."""
    found = [
        Entry(message, g["name"], g["verdict"], means, g["do"], g.get("within"))
        for g in _content()["groups"]
        for message, means in g["messages"].items()
    ]
    return tuple(sorted(found, key=lambda e: -e.weight))


def parts() -> list[str]:
    """Words that complete messages and have no meaning of their own."""
    return _content()["parts"]


def reasons() -> dict[str, dict[str, str]]:
    """By reason why a prompt ran exactly: verdict, means, do."""
    return _content()["reasons"]


@cache
def _compiled() -> list[tuple[Entry, str, re.Pattern]]:
    """Entry, a fixed piece that is quickly looked for, pattern."""
    rows = []
    for e in entries():
        pieces = e.message.split("{}")
        # what stands first must not take in what programs put before a message
        first = "" if pieces[0] or len(pieces) == 1 else "((?:(?![:|] ).)*)"
        rest = "(.*)".join(map(re.escape, pieces[1:] if first else pieces))
        rows.append((e, max(pieces, key=len), re.compile(first + rest, re.DOTALL)))
    return rows


def _whole(text: str, within: str | None) -> Found | None:
    """The message that `text` is."""
    for e, piece, pattern in _compiled():
        if e.within == within and piece in text and (m := pattern.fullmatch(text)):
            return Found(e, text, m.groups())
    return None


def explain(text: str) -> list[Found]:
    """The message at the end of a line, and what it quotes: the outermost first, the cause last. [] if it has none."""
    text = _LEVEL.sub("", text.strip())
    for start in (0, *(m.end() for m in _START.finditer(text))):
        if found := _whole(text[start:], None):
            break
    else:
        return []
    for value in found.values:
        if part := _whole(value, found.entry.message):
            return [found, part]
        if quoted := explain(value):
            return [found, *quoted]
    return [found]
