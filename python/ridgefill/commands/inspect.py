"""`ridgefill inspect`: what a file of maps is, what it was fitted on, and how well."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .common import errors_for_people, say, score_table, stdout


def inspect(
    file: Annotated[str, typer.Argument(help="sidecar to look at")],
    json_output: Annotated[bool, typer.Option("--json", help="print everything as JSON")] = False,
) -> None:
    """Check a sidecar with the library's reader and show what it is, what it was fitted on, how well, and how to use it."""
    with errors_for_people():
        from .. import card, sidecar

        found = sidecar.inspect(file)
    if json_output:
        print(json.dumps({**found, "server_command": card.server_command(found)}, indent=1))
        return
    keys = found["keys"]
    say(f"{found['path']}: {keys['general.name']}")
    facts = card.facts(found)
    for label, text in facts.items():
        say(f"  {label:<12}  {text}")
    for option in keys.get("ridge.calibration.options", []):
        say(f"  {'option':<12}  {option}")
    for source in keys["ridge.calibration.sources"]:
        say(f"  {'text':<12}  {source}")
    stdout.print(score_table(sidecar.scores(keys)))
    if measured := sidecar.measured_scores(keys):
        stdout.print(score_table(measured))
    say(card.server_command(found))
