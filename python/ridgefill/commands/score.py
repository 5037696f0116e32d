"""`ridgefill score`: judge the maps in a file on text, and record it there."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from ..progress import progress
from .common import AsJson, Threads, errors_for_people, say, score_table, stdout


def score(
    file: Annotated[str, typer.Argument(help="sidecar to judge")],
    model: Annotated[str, typer.Argument(help="GGUF model file that it is for, or a copy at higher precision")],
    text: Annotated[list[str], typer.Option(help="file or folder of text: what the maps were fitted on, of which the held-out documents are used; may be given several times")],
    unseen: Annotated[bool, typer.Option("--unseen", help="the maps were not fitted on any of this text: use all of it")] = False,
    n_tokens: Annotated[int, typer.Option(min=0, help="tokens to use, 0: all")] = 16384,
    threads: Threads = 2,
    json_output: AsJson = False,
) -> None:
    """Judge maps as they are written, layer by layer, on text they were not fitted on; scores and a self-test go into the file."""
    with errors_for_people():
        from threadpoolctl import threadpool_limits

        from .. import score as s
        from .. import sidecar
        from ..lib import Model
        from ..text import read_documents

        keys = sidecar.inspect(file)["keys"]
        sidecar.check_writable(file, force=True)
        documents = read_documents(text)
        documents = documents if unseen else s.unseen(documents, keys)
        with Model(model) as m, threadpool_limits(threads), progress(json_output) as report:
            pieces = s.document_pieces(m, documents, keys["ridge.sink_rows"], n_tokens)
            found, used, selftest = s.judge(m, file, pieces, documents, threads, report=report)
        keys = sidecar.inspect(file)["keys"]
    if json_output:
        record = {"path": file, "layers": found.layers, "n_tokens": found.n_tokens, "n_documents": len(used)}
        print(json.dumps({**record, "scores": found.values, "means": found.means, "selftest": selftest}, indent=1))
        return
    say(f"{file}: {found.n_tokens:,} rows of {len(used)} documents")
    stdout.print(score_table(sidecar.measured_scores(keys)))
