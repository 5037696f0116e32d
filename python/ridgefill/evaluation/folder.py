"""The folder of a result: its name tells the settings, it is resumed while unfinished, and never written twice."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import __version__
from ..errors import OutputExists
from ..machine import machine
from ..native import load
from . import page, splices
from .journal import Journal

RESULT, REPORT = "result.json", "report.html"


def folder_name(about: dict) -> str:
    """MODEL-P2048T256-N1024T128-seed1-HASH: the sizes that people look for, and a hash of everything the figures depend on."""
    s, stem = about["settings"], Path(about["model"]["file"]).stem
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:10]
    sizes = [f"P{s['prefix']}T{s['tail']}x{s['documents']}"] if "loss" in about["sets"] else []
    sizes += [f"N{s['rows']}T{s['item_tail']}x{s['items']}"] if about["sets"] != ["loss"] else []
    return "-".join([stem, *sizes, f"seed{s['seed']}", digest])


class Folder:
    """`parent`/folder_name(about), made or gone on with.

    about    what the records depend on (study.Study.about)
    journal  records so far, n_done items of them

    Raises OutputExists when it holds a finished result.
    """

    def __init__(self, parent: Path, about: dict):
        self.path, self.about = parent / folder_name(about), about
        if (self.path / RESULT).exists():
            raise OutputExists(f"{self.path} holds the finished result of these settings; remove it to measure again")
        self.journal = Journal(self.path / "journal.jsonl", about)
        self.n_done = len(self.journal.done)

    def finish(self, found: dict, render: Callable[[dict], str] = page.render, alone: Sequence[str] = ("loss", splices.NAME)) -> dict:
        """Write report, tables and result of Study.run(), the result last; returns it.

        render  the HTML of a result
        alone   sets whose records get a table of their own
        """
        made_on = machine() | {"library": load().llama_print_system_info().decode().strip()}
        result = {"tool": f"ridgefill {__version__}", "machine": made_on} | self.about | found
        (self.path / REPORT).write_text(render(result))
        records_of = {what: found.get(what, {}).get("items") for what in alone}
        retrieval = [{"set": what, **r} for what in self.about["sets"] if what not in alone for r in found[what]["items"]]
        for name, records in (*((f"{what}.csv", records) for what, records in records_of.items()), ("retrieval.csv", retrieval)):
            if records:
                page.write_csv(self.path / name, records)
        part = self.path / f"{RESULT}.part"
        part.write_text(json.dumps(result, indent=1, allow_nan=False) + "\n")
        os.replace(part, self.path / RESULT)
        self.journal.path.unlink()  # its records are in the result now
        return result
