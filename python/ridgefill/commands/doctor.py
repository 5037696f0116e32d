"""`ridgefill doctor`: what is wrong with a server, a log, or a file of maps."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer

from .common import AsJson, Threads, errors_for_people, say


def doctor(
    target: Annotated[str, typer.Argument(help="address of a running server, http://HOST:PORT; or a log file; or a sidecar")],
    model: Annotated[str, typer.Argument(help="with a sidecar: the GGUF model file that it is to be used with")] = "",
    api_key: Annotated[str, typer.Option(envvar="LLAMA_API_KEY", help="of the server")] = "",
    threads: Threads = 2,
    json_output: AsJson = False,
) -> None:
    """Say in one line whether RidgeFill works there, then what matched, what did not, and what to do.

    Exit code 0: it works; 12: a problem was found; 13: it cannot be told.
    """
    with errors_for_people():
        from ..doctor.report import EXIT_CODES

        report = _diagnose(target, model, api_key, threads)
    if json_output:
        print(json.dumps(asdict(report), indent=1))
    else:
        _print(report)
    raise typer.Exit(EXIT_CODES[report.verdict])


def _diagnose(target: str, model: str, api_key: str, threads: int):
    if target.startswith(("http://", "https://")):
        from ..doctor import server

        return server.diagnose(target, api_key)
    if not os.path.exists(target):
        from ..doctor.report import Report

        do = "Check the path; the address of a server begins with http://."
        return Report.of("cannot tell", f"There is no file {target}.", do=[do])
    if model or _is_gguf(target):
        from ..doctor import files

        return files.diagnose(target, model, threads)
    from ..doctor import log

    return log.diagnose(target)


def _is_gguf(path: str) -> bool:
    with open(path, "rb") as f:
        return f.read(4) == b"GGUF" or path.endswith(".gguf")


def _print(report) -> None:
    say(f"{report.verdict}: {report.diagnosis}")
    for matched, title in ((True, "matches"), (False, "does not")):
        for check in report.checks:
            if check.matched == matched:
                say(f"  {title:<10}{check.text}")
    for text in report.do:
        say(f"  {'do':<10}{text}")
