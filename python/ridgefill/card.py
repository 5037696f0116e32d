"""What there is to say of a file of maps: for `ridgefill inspect`, the model card beside the file, and its plots."""

from __future__ import annotations

import io
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import gguf

from . import sidecar
from .errors import OutputExists, RidgefillError

PREDICTED = {
    "input": "the inputs of the layers above from the hidden state at the split",
    "input_lr": "the inputs of the layers above from the hidden state at the split, by a matrix of low rank added to the identity",
    "kv": "keys and values of the layers above from the hidden state at the split",
    "kv_prev": "keys and values of the layers above from the hidden state at the split and that of the row before",
}


class PlotsMissing(RidgefillError):
    """matplotlib is not installed."""


def _file_type(number: int) -> str:
    try:
        return gguf.LlamaFileType(number).name.removeprefix("MOSTLY_").removeprefix("ALL_")
    except ValueError:
        return "unknown"


def facts(found: dict) -> dict[str, str]:
    """What a file (sidecar.inspect()) is, is for, and was fitted on: text by label."""
    k = found["keys"]
    split, n_layer = k["ridge.split"], k["ridge.block_count"]
    rank = f" of rank {k['ridge.rank']}" if "ridge.rank" in k else ""
    return {
        "maps": f"kind {k['ridge.kind']}{rank}, split {split} of {n_layer} layers ({split + 1} to {n_layer - 1} are mapped)",
        "file": f"{found['size'] / 2**20:,.1f} MiB, maps of type {k['ridge.map_type']}, sha256 {found['sha256']}",
        "model": f"{k['ridge.model.name']}, {k['general.architecture']}, width {k['ridge.embedding_length']}, "
        f"{_file_type(k['ridge.model.file_type'])}",
        "always exact": f"the first {k['ridge.sink_rows']} rows and, recommended, the last {k['ridge.tail']}",
        "fitted on": f"{k['ridge.calibration.n_tokens']:,} rows of {k['ridge.calibration.n_documents']} documents, seed "
        f"{k['ridge.calibration.seed']}",
        "held out": f"{k['ridge.calibration.n_heldout_tokens']:,} rows of {k['ridge.calibration.n_heldout_documents']} documents",
        "scored on": f"{k['ridge.score.n_tokens']:,} rows of {k['ridge.score.n_documents']} documents"
        if "ridge.score.n_tokens" in k
        else "nothing yet: ridgefill score",
        "self-test": f"{len(k['ridge.selftest.tokens'])} tokens: ridgefill verify" if "ridge.selftest.tokens" in k else "none",
        "made by": k["ridge.calibration.tool"],
    }


def server_command(found: dict) -> str:
    """Recommended flags of llama-server."""
    maps = shlex.quote(found["path"])
    return f"llama-server -m MODEL.gguf --ridge-maps {maps} --ridge-tail {found['keys']['ridge.tail']}"


def calibrate_command(found: dict) -> str:
    """A command that makes such a file, with the text and model of the one that made this one."""
    k = found["keys"]
    options = dict(o.partition("=")[::2] for o in k.get("ridge.calibration.options", []))
    given = {
        "split": k["ridge.split"],
        "kind": k["ridge.kind"],
        "rank": k.get("ridge.rank"),
        "map-type": k["ridge.map_type"],
        "sink": k["ridge.sink_rows"],
        "tail": k["ridge.tail"],
        "seed": k["ridge.calibration.seed"],
        "prev-share": f"{k['ridge.prev_share']:g}" if "ridge.prev_share" in k else None,
        "ctx": options.get("ctx"),
        "n-tokens": options.get("n_tokens"),
        "heldout-documents": options.get("heldout_documents"),
        "row-stride": options.get("row_stride"),
        "chat-share": options.get("chat_share"),
        "overlap": options.get("overlap", "drop" if "dropped" in options else None),
    }
    flags = " ".join(f"--{name} {value}" for name, value in given.items() if value is not None)
    return f"ridgefill-calibrate MODEL.gguf --text TEXT --out {shlex.quote(Path(found['path']).name)} {flags}"


#
# the card
#

_COLUMNS = {
    "r2_input": "R² of the input",
    "r2_k": "R² of K",
    "r2_v": "R² of V",
    "norm_k": "norm of K",
    "norm_v": "norm of V",
    "attention": "attention output",
}


def _table(rows: list[dict], titles: Mapping[str, str]) -> list[str]:
    def cell(name: str, value: float) -> str:
        return str(value) if name == "layer" else f"{value:.2g}" if name.startswith("lambda") else f"{value:.3f}"

    names = list(rows[0])
    lines = ["| " + " | ".join(titles.get(n, n) for n in names) + " |", "|" + "---|" * len(names)]
    return lines + ["| " + " | ".join(cell(n, row[n]) for n in names) + " |" for row in rows]


def _scores(found: dict, picture: str) -> list[str]:
    keys = found["keys"]
    rows = sidecar.measured_scores(keys)
    if not rows:
        titles = {f"{n}{p}": f"{t}{p.replace('_', ' ').upper()}" for n, t in (("lambda", "λ"), ("r2", "held-out R²")) for p in ("", "_k", "_v")}
        return [*_table(sidecar.scores(keys), titles), "", "R² of the layer inputs, or of K and V before norms, on held-out text."]
    return [
        *([f"![scores by layer]({picture})", ""] if picture else []),
        *_table(rows, _COLUMNS),
        "",
        f"Of the maps as they stand in the file, on {keys['ridge.score.n_tokens']:,} rows of {keys['ridge.score.n_documents']} "
        "documents that they were not fitted on. R² of 1 is a perfect prediction, 0 that of the mean row; K is taken after head "
        "norms and before rotation. Norms are those of predicted over true rows, by head. The last column is the cosine of what "
        "attention adds to the residual stream, read from predicted and from true keys and values by the model's own queries.",
        "",
        "Text they were scored on:",
        "",
        *(f"- {source}" for source in keys["ridge.score.sources"]),
    ]


def render(found: dict, picture: str = "") -> str:
    """The card in Markdown, of a file that sidecar.inspect() looked at; `picture` is a path relative to the card."""
    keys = found["keys"]
    options = keys.get("ridge.calibration.options", [])
    lines = [
        f"# {keys['general.name']}",
        "",
        "Ridge maps for Ridgefill, which puts RidgeFill (arXiv 2611.09709) into llama.cpp: of a long prompt most rows run the "
        f"layers below {keys['ridge.split']} only. The maps predict {PREDICTED[keys['ridge.kind']]}.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {label} | {text} |" for label, text in facts(found).items()),
        "",
        "## Use",
        "",
        f"    {server_command({**found, 'path': Path(found['path']).name})}",
        f"    ridgefill verify {shlex.quote(Path(found['path']).name)} MODEL.gguf",
        "",
        "## Scores",
        "",
        *_scores(found, picture),
        "",
        "## Text",
        "",
        "Fitted and held out, with licences:",
        "",
        *(f"- {source}" for source in keys["ridge.calibration.sources"]),
        "",
        *(["Not at its default: " + ", ".join(options) + ".", ""] if options else []),
        "A command like the one that made this file:",
        "",
        f"    {calibrate_command(found)}",
        "",
        "## Limits",
        "",
        "- Filled rows are an approximation. Facts in them can be lost or blurred, more so at great length; these scores do not",
        "  say how many. Measure what matters to you.",
        "- For this model only. Another architecture, shape or tokenizer is refused; a fine-tune or another quantisation runs with",
        "  a warning.",
        "- Text unlike the one above is predicted less well.",
    ]
    return "\n".join(lines) + "\n"


#
# plots
#


def plot(found: dict, out: str | os.PathLike | BinaryIO) -> None:
    """Every score by layer, as a picture. Raises PlotsMissing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise PlotsMissing("plots are drawn with matplotlib, which is missing: pip install 'ridgefill[plots]'") from None
    keys = found["keys"]
    rows = sidecar.measured_scores(keys) or sidecar.scores(keys)
    panels = {"R²": "r2", "norm, predicted over true": "norm", "cosine of attention output": "attention"}
    panels = {title: [n for n in rows[0] if n.partition("_")[0] == name] for title, name in panels.items()}
    panels = {title: names for title, names in panels.items() if names}
    figure = Figure(figsize=(4 * len(panels), 3.2), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for name in names:
            label = name.partition("_")[2]
            axes.plot([r["layer"] for r in rows], [r[name] for r in rows], marker=".", label=label if label == "input" else label.upper())
        axes.set(title=title, xlabel="layer")
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend()
    figure.suptitle(keys["general.name"], fontsize="small")
    figure.savefig(out, format="png", dpi=120)


def _outputs(path: str | os.PathLike, plots: str) -> tuple[Path, Path | None]:
    card = Path(path).with_suffix(".md")
    return card, (Path(plots) if plots else card.parent) / card.with_suffix(".png").name


def check_writable(path: str | os.PathLike, force: bool, plots: str = "") -> None:
    """Raises OutputExists when the card of `path`, or its picture, exists and `force` is not set."""
    for out in _outputs(path, plots):
        if out.exists() and not force:
            raise OutputExists(f"{out} exists already; replace it with --force")


def write(path: str | os.PathLike, force: bool = False, plots: str = "", same_is_fine: bool = False) -> tuple[Path, Path | None]:
    """Write NAME.md, and NAME.png if matplotlib is there, beside the file NAME.gguf; the picture into the folder `plots` if
    that is given. Returns the paths, None for a picture that could not be drawn.

    With `same_is_fine` a card and a picture may exist already that hold the very bytes to be written.

    Raises OutputExists when one exists and may not be replaced, and then writes neither; PlotsMissing when a folder for plots
    was given in vain.
    """
    found = sidecar.inspect(path)
    card, picture = _outputs(path, plots)
    drawn = io.BytesIO()
    try:
        plot(found, drawn)
    except PlotsMissing:
        if plots:
            raise
        picture = None
    relative = os.path.relpath(picture, card.parent).replace(os.sep, "/") if picture else ""
    new = {card: render(found, relative).encode()} | ({picture: drawn.getvalue()} if picture else {})
    same = same_is_fine and all(not out.exists() or out.read_bytes() == data for out, data in new.items())
    check_writable(path, force or same, plots)
    for out, data in new.items():
        out.write_bytes(data)
    return card, picture
