"""`ridgefill card`: the model card of a file of maps, with its plots."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from .common import AsJson, Force, errors_for_people, say


def card(
    file: Annotated[str, typer.Argument(help="sidecar, NAME.gguf")],
    plots: Annotated[str, typer.Option(help="folder for the picture [default: beside the sidecar]")] = "",
    force: Force = False,
    json_output: AsJson = False,
) -> None:
    """Write a model card, NAME.md, beside a sidecar, with a picture of its scores, NAME.png (pip install 'ridgefill[plots]')."""
    with errors_for_people():
        written = write(file, force, plots)
    if json_output:
        print(json.dumps(written, indent=1))
    else:
        say(f"{written['card']}: model card" + (f"; scores by layer in {written['plots']}" if written["plots"] else ""))


def write(file: str, force: bool, plots: str = "", same_is_fine: bool = False) -> dict[str, str | None]:
    """Write the card of a file, and say so on stderr when there can be no picture. Returns the paths."""
    from .. import card as c

    md, png = c.write(file, force, plots, same_is_fine)
    if png is None:
        print(f"{md}: without plots, for which matplotlib is missing: pip install 'ridgefill[plots]'", file=sys.stderr)
    return {"card": str(md), "plots": None if png is None else str(png)}
