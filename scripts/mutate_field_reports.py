#!/usr/bin/env python3
"""Take out the mechanism of each field report in turn, and see its tests fail.

    scripts/mutate_field_reports.py TREE                  TREE: another checkout, built there by scripts/setup.sh
    scripts/mutate_field_reports.py TREE --rows 12,13     some rows alone
    scripts/mutate_field_reports.py TREE --python         those alone that need no build

What is taken out stands in the marks of the tests (tests/test_field_reports.py). A file of TREE is changed, TREE is built,
the test runs there, and the file is put back. Exit status: 0 when every test failed, 1 when a mutant went unnoticed.
"""
from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "python")]

from rich.console import Console
from test_field_reports import Mark, marks

TIMEOUT = 300  # seconds of a test

console = Console()


def path_of(tree: Path, file: str) -> Path:
    """The file in TREE; one of upstream's lies patched in its build."""
    ours = [p for folder in ("llama.cpp", "ggml-ridge", "python/ridgefill", "tests") for p in (tree / folder).rglob(file)]
    found = ours or list((tree / "build" / "upstream" / "tools" / "server").glob(file))
    if len(found) != 1:
        raise SystemExit(f"{file}: expected one such file in {tree}, found {len(found)}; build it with scripts/setup.sh")
    return found[0]


@contextmanager
def mutant(tree: Path, mark: Mark):
    """TREE without the mark's mechanism, built."""
    path = path_of(tree, mark.file)
    text = path.read_text()
    if text.count(mark.old) != 1:
        raise SystemExit(f"{path}: expected once, found {text.count(mark.old)} times: {mark.old!r}")
    try:
        path.write_text(text.replace(mark.old, mark.new))
        if path.suffix != ".py":
            subprocess.run(["cmake", "--build", tree / "build", "--target", "binaries"], check=True, stdout=subprocess.DEVNULL)
        yield
    finally:
        path.write_text(text)


def notices(tree: Path, mark: Mark) -> bool:
    """A test that does not end without its mechanism has noticed it too."""
    command = [tree / ".venv" / "bin" / "python", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{mark.test}"]
    with mutant(tree, mark), subprocess.Popen(
        command, cwd=tree, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as p:
        try:
            out, _ = p.communicate(timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            os.killpg(p.pid, signal.SIGKILL)
            return True
    if p.returncode not in (0, 1):
        raise SystemExit(f"{mark.test}: pytest ended with status {p.returncode}:\n{out[-4000:]}")
    return p.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], allow_abbrev=False)
    parser.add_argument("tree", type=Path, help="a checkout that may be changed and built")
    parser.add_argument("--rows", help="row numbers, e.g. 12,13")
    parser.add_argument("--python", action="store_true", help="mechanisms in Python alone")
    args = parser.parse_args()
    tree = args.tree.resolve()
    if tree == ROOT:
        parser.error("TREE: expected another checkout than this one")
    os.environ["PATH"] = f"{tree / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"  # cmake, where setup.sh put it there
    rows = {int(r) for r in args.rows.split(",")} if args.rows else None
    chosen = [m for m in marks() if m.file and (rows is None or m.row in rows) and (not args.python or m.file.endswith(".py"))]
    missed = 0
    for m in sorted(chosen, key=lambda m: (m.row, m.test)):
        seen = notices(tree, m)
        missed += not seen
        console.print(f"row {m.row:2} {m.file}: {'noticed by' if seen else '[red]NOT noticed by[/]'} {m.test}", highlight=False, soft_wrap=True)
    console.print(f"{len(chosen) - missed} of {len(chosen)} mutants noticed")
    if not args.python:
        subprocess.run(["cmake", "--build", tree / "build", "--target", "binaries"], check=True, stdout=subprocess.DEVNULL)
    return 1 if missed or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
