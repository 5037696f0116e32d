"""What the commands show of a job while it runs."""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

stderr = Console(stderr=True)


class _RateColumn(TextColumn):
    """Tokens per second so far."""

    def __init__(self):
        super().__init__("")

    def render(self, task):
        rate = task.finished_speed or task.speed
        return f"{rate:,.0f}/s" if rate and task.description.endswith("capture") else ""


def _log_report():
    began: dict[str, tuple[float, int]] = {}  # by stage: when, with how much done before
    tenths: dict[str, int] = {}

    def report(stage: str, done: int, total: int) -> None:
        since, before = began.setdefault(stage, (time.monotonic(), done))
        tenth = 10 * done // total
        if done > before and tenth != tenths.get(stage, 10 * before // total):
            tenths[stage] = tenth
            seconds = time.monotonic() - since
            rate = (done - before) / seconds if seconds else 0.0
            left = f", {rate:,.0f}/s, about {(total - done) / rate:,.0f} s left" if rate else ""
            print(f"{stage}: {done:,} of {total:,} after {seconds:,.0f} s{left}", file=sys.stderr, flush=True)

    return report


@contextmanager
def progress(quiet: bool):
    """A Report that draws one bar per stage with rate and time left; in a log, a line at every tenth."""
    if not quiet and not stderr.is_terminal:
        yield _log_report()
        return
    elapsed = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), _RateColumn(), *elapsed)
    with Progress(*columns, console=stderr, disable=quiet) as bars:
        tasks: dict[str, int] = {}

        def report(stage: str, done: int, total: int) -> None:
            if stage not in tasks:  # what was done before does not count in the rate
                tasks[stage] = bars.add_task(stage, total=total, completed=done)
            else:
                bars.update(tasks[stage], completed=done)

        yield report


def duration(seconds: float) -> str:
    """A length of time in words, rounded as fits an estimate."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
