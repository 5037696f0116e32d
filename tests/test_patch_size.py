"""Upstream stays upstream: few changed lines, in hunks that move with their surroundings."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

PATCHES = sorted((Path(__file__).resolve().parents[1] / "llama.cpp" / "patches").glob("*.patch"))
LIMIT = 120


def hunks(text: str) -> list[tuple[str, list[str]]]:
    """(file, lines) of every hunk, by the line counts in its header: a removed line may itself start with dashes."""
    out, file, lines = [], "", iter(text.splitlines())
    for line in lines:
        if line.startswith("+++ b/"):
            file = line[6:].split("\t")[0]
        elif m := re.match(r"@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@", line):
            old, new = (int(n) if n is not None else 1 for n in m.groups())
            body = []
            while old or new:
                body.append(next(lines))
                old -= body[-1][:1] in ("", " ", "-")
                new -= body[-1][:1] in ("", " ", "+")
            out.append((file, body))
    return out


def changed(body: list[str]) -> int:
    return sum(line[:1] in ("+", "-") for line in body)


def context(body: list[str]) -> tuple[int, int]:
    """Unchanged lines before the first and after the last changed one."""
    marks = [i for i, line in enumerate(body) if line[:1] in ("+", "-")]
    return marks[0], len(body) - 1 - marks[-1]


def test_counts():
    body = "--- a/f\n+++ b/f\n@@ -1,4 +1,3 @@\n x\n--- y\n-z\n+w\n q\n@@ -9 +8,2 @@\n k\n+++ v\n"
    found = hunks(body)
    assert [(f, changed(b), context(b)) for f, b in found] == [("f", 3, (1, 1)), ("f", 1, (1, 0))]


def test_changed_lines(capsys):
    files: dict[str, int] = {}
    for patch in PATCHES:
        for file, body in hunks(patch.read_text()):
            files[file] = files.get(file, 0) + changed(body)
    total = sum(files.values())
    with capsys.disabled():
        print(f"\nchanged upstream lines (added and removed): {total}")
        for file, n in sorted(files.items()):
            print(f"  {n:4d}  {file}")
    assert 0 < total < LIMIT


@pytest.mark.parametrize("patch", PATCHES, ids=lambda p: p.name)
def test_one_line_of_context(patch):
    wide = [(file, body) for file, body in hunks(patch.read_text()) if max(context(body)) > 1]
    assert not wide, wide


def test_every_hunk_is_explained():
    """llama.cpp/README.md names every file that a patch touches."""
    readme = (PATCHES[0].parents[1] / "README.md").read_text()
    touched = {file for patch in PATCHES for file, _ in hunks(patch.read_text())}
    assert not [file for file in sorted(touched) if f"`{file}`" not in readme]
