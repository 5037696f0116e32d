#!/usr/bin/env python3
"""Upstream's own tests against our build.

    .venv/bin/python scripts/upstream_tests.py server   its server tests, twice: without maps, and with every prompt filled
    .venv/bin/python scripts/upstream_tests.py ctest    its tests of the library that concern what we patch

Both write results/upstream-tests.json. The tests come from the sources that the build unpacked; tests/upstream/ holds our
changes to them, each with its reason, and the list of tests that are not run. Nothing is downloaded.
"""
from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from llama_server import ROOT, free_port
from ridgefill.machine import machine

OURS = ROOT / "tests" / "upstream"
RESULTS = ROOT / "results" / "upstream-tests.json"

sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests"), str(OURS)]

# what each pass tells the server through its environment, besides the maps
PASSES = {"off": {}, "maps": {"LLAMA_ARG_RIDGE_MIN_PROMPT": "0", "LLAMA_ARG_RIDGE_TAIL": "8"}}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
AT_LEAST = 80  # tests that must have run in each pass

CTESTS = ("test-arg-parser", "test-batch-alloc", "test-generate-models", "test-llama-archs", "test-recurrent-state-rollback",
          "test-save-load-state", "test-state-restore-fragmented", "test-thread-safety")

console = Console()
app = typer.Typer(help=__doc__, add_completion=False, pretty_exceptions_enable=False)


def fail(message: str) -> typer.Exit:
    console.print(f"upstream_tests.py: {message}", style="red", soft_wrap=True)
    return typer.Exit(2)


def need(path: Path, make: str) -> Path:
    if not path.exists():
        raise fail(f"expected {path}, found none: {make}")
    return path


def run(command: list, **keywords) -> int:
    return subprocess.run([str(c) for c in command], **keywords).returncode


def store(section: str, value: dict) -> None:
    """Replace one section of the results; the others stay as they were measured."""
    record = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    record[section] = {"date": datetime.date.today().isoformat(), "machine": machine()} | value
    RESULTS.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


def patches(*folders: Path) -> dict[Path, str]:
    """Patch files, and the reason that stands above each diff."""
    return {p: p.read_text().partition("--- a/")[0].strip() for f in folders for p in sorted(f.glob("*.patch"))}


def named(applied: dict[Path, str]) -> dict[str, str]:
    return {str(p.relative_to(ROOT)): reason for p, reason in applied.items()}


def summary(tests: dict[str, dict]) -> dict[str, int]:
    return {o: sum(t["outcome"] == o for t in tests.values()) for o in ("passed", "failed", "not run")}


#
# the server's tests
#


def changes(name: str) -> dict[Path, str]:
    """What a pass changes in the server's tests: the changes of both, then its own."""
    return patches(OURS / "patches", OURS / "patches" / name)


def unpack(build: Path, suite: Path, applied: dict[Path, str]) -> Path:
    """A patched copy of upstream's server tests, in the surroundings that they look for. Returns the folder to run in."""
    upstream = need(build / "upstream" / "tools" / "server" / "tests", "run scripts/setup.sh").parents[2]
    tests = suite / "tools" / "server" / "tests"
    shutil.copytree(upstream / "tools" / "server" / "tests", tests)
    (suite / "models").symlink_to(upstream / "models")
    (tests / "tmp").mkdir()
    for patch in applied:
        if run(["patch", "-p1", "--fuzz=0", "--batch", "--quiet", "-i", patch], cwd=suite):
            raise fail(f"{patch.relative_to(ROOT)} does not apply to upstream's tests of this build")
    return tests


def environment(name: str, build: Path, tests: Path, maps: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("LLAMA_", "HF_"))}
    return kept | PASSES[name] | ({"LLAMA_ARG_RIDGE_MAPS": str(maps)} if name == "maps" else {}) | {
        "LLAMA_SERVER_BIN_PATH": str(build / "bin" / "llama-server"),
        "LLAMA_CACHE": str(tests / "tmp"),
        # more threads than cores would wait for each other
        "LLAMA_ARG_THREADS": str(CORES),
        "PORT": str(free_port()),
        "NO_PROXY": "127.0.0.1,localhost,::1",
        "PYTHONPATH": f"{tests}{os.pathsep}{OURS}",
    }


def one_pass(name: str, build: Path, folder: Path, arguments: list[str]) -> dict:
    """Run one pass in a folder of its own and return its record."""
    import local_model

    applied, record = changes(name), folder / "record.json"
    tests = unpack(build, folder / "suite", applied)
    model = local_model.write_model(folder / "local")
    maps = local_model.write_maps(model, build / "bin")
    console.rule(f"upstream's server tests, pass {name}")
    status = run([sys.executable, "-m", "pytest", "-p", "ridge_suite", "-p", "no:cacheprovider", "--rootdir=.",
                  "--config-file=pytest.ini", "-q", "--tb=short", "--show-capture=no", f"--ridge-model={model}",
                  f"--ridge-pass={name}", f"--ridge-record={record}", *arguments],
                 cwd=tests, env=environment(name, build, tests, maps))
    if status not in (0, 1):  # 1: tests failed
        raise fail(f"pytest could not run the suite (status {status})")
    found = json.loads(record.read_text())
    return {
        "environment": PASSES[name],
        "changes": named(applied),
        "summary": summary(found),
        "filled_prompts": sum(t.get("filled", {}).get("prompts", 0) for t in found.values()),
        "tests": found,
    }


def faults(name: str, record: dict, whole: bool) -> list[str]:
    """What is wrong with a pass; empty if nothing is."""
    counts, out = record["summary"], []
    if counts["failed"]:
        out.append(f"pass {name}: {counts['failed']} tests failed")
    if whole and counts["passed"] < AT_LEAST:
        out.append(f"pass {name}: expected at least {AT_LEAST} tests passed, found {counts['passed']}")
    if whole and (name == "maps") != (record["filled_prompts"] > 0):
        out.append(f"pass {name}: {record['filled_prompts']} prompts were filled")
    return out


@app.command()
def server(
    arguments: Annotated[list[str] | None, typer.Argument(help="for pytest, after --; nothing is written then")] = None,
    only: Annotated[str, typer.Option(help="one pass: " + " or ".join(PASSES))] = "",
    build: Annotated[Path, typer.Option(help="build folder of our llama-server")] = ROOT / "build",
) -> None:
    """Run upstream's server tests, without maps and with maps, a tail of 8 rows and no minimum of rows."""
    if only and only not in PASSES:
        raise fail(f"--only: expected {' or '.join(PASSES)}, found {only!r}")
    need(build / "bin" / "llama-server", "run scripts/setup.sh")
    records = {}
    for name in [only] if only else PASSES:
        with tempfile.TemporaryDirectory(prefix="upstream-tests-") as folder:
            records[name] = one_pass(name, build.resolve(), Path(folder), arguments or [])
    table = Table("pass", "passed", "failed", "not run", "prompts filled")
    for name, r in records.items():
        table.add_row(name, *(str(n) for n in r["summary"].values()), str(r["filled_prompts"]))
    console.print(table)
    wrong = [f for name, r in records.items() for f in faults(name, r, whole=not arguments)]
    if not arguments:
        for name, r in records.items():
            store(f"server, {name}", r)
    for f in wrong:
        console.print(f, style="red")
    raise typer.Exit(bool(wrong))


#
# the library's tests
#


def build_ctests(build: Path) -> None:
    import local_model

    options = ["-G", "Ninja", "-DRIDGE_UPSTREAM_TESTS=ON", f"-DPython3_EXECUTABLE={sys.executable}"]
    if run(["cmake", "-S", ROOT, "-B", build, *options]):
        raise fail(f"cmake could not configure {build}")
    if run(["cmake", "--build", build, "--target", "upstream-tests", "--parallel", CORES]):
        raise fail(f"the tests do not build in {build}")
    # upstream's tests want a model at this place, which a test of its own downloads
    wanted = build / "tinyllamas" / "stories15M-q4_0.gguf"
    wanted.parent.mkdir(exist_ok=True)
    wanted.unlink(missing_ok=True)
    wanted.symlink_to(local_model.write_model(build / "local"))


def read_junit(path: Path) -> dict[str, dict]:
    """Outcome and seconds of each test in ctest's report."""
    names = {"run": "passed", "fail": "failed"}
    return {case.get("name"): {"outcome": names.get(case.get("status"), "not run"),
                               "seconds": round(float(case.get("time")), 2)}
            for case in ET.parse(path).getroot().iter("testcase")}


@app.command()
def ctest(build: Annotated[Path, typer.Option(help="build folder of these tests")] = ROOT / "build-tests") -> None:
    """Build and run upstream's tests of batches, architectures, states, rollback, arguments, threads and fragmented caches."""
    build = build.resolve()
    # scripts/setup.sh puts cmake and ninja there if the system has none
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    build_ctests(build)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        run(["ctest", "--test-dir", build, "-R", f"^({'|'.join(CTESTS)})$", "--fixture-exclude-any", "^test-download-model$",
             "--output-on-failure", "--output-junit", report])
        found = read_junit(report)
    store("ctest", {"changes": named(patches(OURS / "ctest")), "summary": summary(found), "tests": found})
    missing = [t for t in CTESTS if found.get(t, {}).get("outcome") != "passed"]
    for t in missing:
        console.print(f"{t}: {found.get(t, {}).get('outcome', 'not found')}", style="red")
    raise typer.Exit(bool(missing))


if __name__ == "__main__":
    app()
