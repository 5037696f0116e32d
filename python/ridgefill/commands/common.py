"""What the commands share: streams, options, and errors that are for people."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from ..errors import RidgefillError

FILE_FAULT = 10
STOPPED = 130

stdout = Console()

Force = Annotated[bool, typer.Option("--force", help="replace existing files")]
AsJson = Annotated[bool, typer.Option("--json", help="print the result as JSON, and nothing else but errors")]
Threads = Annotated[int, typer.Option(min=1)]


def say(line: str) -> None:
    """Print a line of a result as it is: not wrapped, and nothing in it taken for markup."""
    stdout.print(line, soft_wrap=True, highlight=False, markup=False)


def mib(n: int) -> str:
    return f"{n / 2**20:,.1f} MiB"


@contextmanager
def errors_for_people(hint_when_stopped: str = ""):
    """Print our own errors, and those of the file system, as one line and leave with their exit code."""
    try:
        yield
    except RidgefillError as e:
        print(f"error: {e}", file=sys.stderr)
        raise typer.Exit(e.exit_code) from None
    except OSError as e:
        if e.filename is None and e.errno is None:
            raise  # not from the file system
        where = f" {e.filename}:" if e.filename else ""
        print(f"error:{where} {e.strerror}", file=sys.stderr)
        raise typer.Exit(FILE_FAULT) from None
    except KeyboardInterrupt:
        print("stopped" + hint_when_stopped, file=sys.stderr)
        raise typer.Exit(STOPPED) from None


def score_table(rows: list[dict]) -> Table:
    """Rows of sidecar.scores() or sidecar.measured_scores()."""
    measured = "attention" in rows[0]
    table = Table(*(_title(name, measured) for name in rows[0]))
    for row in rows:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    return table


def _title(name: str, measured: bool) -> str:
    name, _, part = name.partition("_")
    part = {"": "", "input": " input"}.get(part, f" {part.upper()}")
    return {"r2": "R²" if measured else "held-out R²", "norm": "|pred.|/|true|"}.get(name, name) + part


def _cell(name: str, value: float) -> str:
    return str(value) if name == "layer" else f"{value:.2g}" if name.startswith("lambda") else f"{value:.4f}"
