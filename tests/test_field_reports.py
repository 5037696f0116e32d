"""Faults that users of servers like this one report. Each row has tests here that fail when its mechanism is taken out.

A test says which row it is of, and which lines it would notice the loss of:

    @pytest.mark.field_report(row, file, old, new)

With `old` replaced by `new` (by nothing, if it is left out) in that file, the test fails. A file is named by its name alone;
where upstream has it, `old` stands in our patch. A mark of the row alone is of a test whose mechanism is upstream's. Tests
named test_field_report_12_... are of row 12 too. `pytest -k field_report_12_` runs them all.
"""
from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import ROOT

ROWS = {
    1: "a prefix cached under one adapter serves requests without it",
    2: "a file of maps replaced under its name goes with cache of the old one",
    3: "slot files do not say under which adapter they were made",
    4: "state files that are cut or damaged",
    5: "a restore that fails leaves half of itself",
    6: "empty slots and missing files at saving and restoring",
    9: "a chat of many messages is cut at each of them",
    10: "the same prompt sent twice runs twice",
    11: "images and M-RoPE positions",
    12: "one long prompt stalls every stream",
    13: "the prompt of a client that went away goes on",
    14: "graphs keep the geometry of an earlier chunk",
    15: "prompts that do not fit together all die",
    16: "cells are purged while a prompt runs",
    17: "many layers with maps and adapters exceed the graph",
    19: "a truncated file of maps loads",
    20: "malformed files end the process",
    21: "another width is found late",
    22: "unknown types and versions fall through",
    23: "a file at the wrong flag",
    24: "a misspelt keyword is swallowed",
    25: "types of the cache, with and without flash attention",
    26: "quantised values without flash attention",
    27: "a cache goes to a model that turns its keys in another way",
    28: "a feature is switched on and never active",
    29: "LoRA and control vectors under maps fitted without them",
    30: "embeddings and reranking",
    31: "states saved and loaded by the bindings",
    32: "a flag that is read and not used",
    33: "calibration on broken statistics",
    34: "another batch size gives other logits",
    36: "tokenised data of another tokenizer is used again",
    37: "the second request, on a cache hit, dies",
    38: "tensors placed by -ot, --no-kv-offload, without mmap",
}


@dataclasses.dataclass(frozen=True)
class Mark:
    """One decorator, and the test that carries it."""

    test: str
    row: int
    file: str = ""
    old: str = ""
    new: str = ""


def marks() -> Iterator[Mark]:
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        for f in ast.walk(ast.parse(path.read_text())):
            if isinstance(f, ast.FunctionDef) and (named := re.match(r"test_field_report_(\d+)_", f.name)):
                yield Mark(f"{path.name}::{f.name}", int(named[1]))
            for d in getattr(f, "decorator_list", ()):
                if isinstance(d, ast.Call) and ast.unparse(d.func) == "pytest.mark.field_report":
                    yield Mark(f"{path.name}::{f.name}", *map(ast.literal_eval, d.args))


def source(file: str) -> str:
    """Text of a file of ours, or of the lines that our patches add to one of upstream's."""
    found = [p for folder in ("llama.cpp", "ggml-ridge", "python/ridgefill", "tests") for p in (ROOT / folder).rglob(file)]
    if found:
        assert len(found) == 1, found
        return found[0].read_text()
    hunks = [part for p in (ROOT / "llama.cpp" / "patches").glob("*.patch") for part in p.read_text().split("diff --git ")]
    ours = [h for h in hunks if h.partition("\n")[0].endswith("/" + file)]
    assert len(ours) == 1, f"{file}: expected one file of that name, found {len(ours)} patches of it"
    return "\n".join(line[1:] for line in ours[0].splitlines() if line.startswith("+"))


def test_every_row_has_a_test():
    found = {m.row for m in marks()}
    assert set(ROWS) == found, set(ROWS) ^ found


@pytest.mark.parametrize("mark", [m for m in marks() if m.file], ids=lambda m: f"{m.row}-{m.test}")
def test_a_mechanism_is_where_its_mark_says(mark):
    n = source(mark.file).count(mark.old)
    assert n == 1, f"{mark.file}: expected once, found {n} times: {mark.old!r}; name the line that does its work now"
    assert mark.new != mark.old


def test_rows_without_a_mechanism_of_ours_are_few():
    """A row counts as shown only by tests that notice the loss of something."""
    assert {m.row for m in marks()} - {m.row for m in marks() if m.file} <= {26, 33, 36}
