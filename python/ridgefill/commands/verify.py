"""`ridgefill verify`: whether a file of maps belongs to a model and does what it did when it was made."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from .common import AsJson, Threads, errors_for_people, say, stdout


def verify(
    file: Annotated[str, typer.Argument(help="sidecar to verify")],
    model: Annotated[str, typer.Argument(help="GGUF model file that it is to be used with")],
    threads: Threads = 2,
    json_output: AsJson = False,
) -> None:
    """Compare a sidecar with a model, field by field, and run its self-test there. Exit code 11 when it does not pass."""
    with errors_for_people():
        from .. import sidecar
        from .. import verify as v
        from ..lib import Model

        keys = sidecar.inspect(file)["keys"]
        with Model(model) as m:
            fields = v.fields(keys, m.fingerprint(keys["ridge.split"]))
            if not json_output:
                _print_fields(fields)
            refusal = v.refusal(m, file)
            test = None if refusal else v.selftest(m, file, keys, threads)
        if json_output:
            rows = [{**asdict(f), "matches": f.matches} for f in fields]
            selftest = test and {**asdict(test), "passed": test.passed}
            print(json.dumps({"ok": not refusal and (not test or test.passed), "fields": rows, "refusal": refusal, "selftest": selftest}, indent=1))
        elif not refusal:
            say(test.sentence() if test else "self-test: none in this file; ridgefill score adds one")
        if refusal:
            raise v.VerifyError(refusal)
        if test and not test.passed:
            raise v.VerifyError(test.failure())


def _print_fields(fields: list) -> None:
    from ..verify import short

    table = Table("", "expected", "found", "")
    for f in fields:
        verdict = "matches" if f.matches else "differs: refused" if f.refuses else "differs: warns"
        table.add_row(f.name, short(f.expected), "" if f.matches else short(f.found), verdict)
    stdout.print(table)
