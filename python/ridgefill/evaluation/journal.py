"""Records on disk while a long evaluation runs, so that one that was stopped goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import EvaluationError


class Journal:
    """A file of one JSON object a line: first the settings, then each finished item.

    path      is made anew when it is missing or was written under other settings
    settings  everything that the records depend on
    """

    def __init__(self, path: str | os.PathLike, settings: dict):
        self.path = Path(path)
        self.done: dict[str, list[dict]] = {}
        header = json.dumps({"settings": settings}, sort_keys=True)
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        if lines and lines[0] == header:
            for line in lines[1:]:
                self._load(line)
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(header + "\n")

    def _load(self, line: str) -> None:
        try:
            entry = json.loads(line)
        except ValueError:
            return  # the line that was being written when the run was stopped: its item runs again
        self.done[entry["item"]] = entry["records"]

    def add(self, item: str, records: Sequence[dict]) -> None:
        """Keep the records of one item. Raises EvaluationError if it was done before, ValueError for NaN."""
        if item in self.done:
            raise EvaluationError(f"item {item}: expected once, found it done already")
        line = json.dumps({"item": item, "records": list(records)}, allow_nan=False)
        with self.path.open("a") as f:
            # a torn last line of a stopped run must not swallow this one
            f.write(("" if self._ends_with_newline() else "\n") + line + "\n")
        self.done[item] = list(records)

    def of(self, item: str, run: Callable[[], Sequence[dict]]) -> list[dict]:
        """Records of one item: those that were kept, else those of `run()`, which are kept now."""
        if item not in self.done:
            self.add(item, run())
        return self.done[item]

    def _ends_with_newline(self) -> bool:
        with self.path.open("rb") as f:
            f.seek(-1, os.SEEK_END)
            return f.read() == b"\n"
