"""scripts/upstream_tests.py: its lists fit the suite at hand, and it tells a server that works from one that does not."""
from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "upstream")]

import ridge_suite  # noqa: E402
import upstream_tests  # noqa: E402

NOT_RUN = json.loads(ridge_suite.NOT_RUN.read_text())


@pytest.fixture(params=upstream_tests.PASSES)
def pass_name(request):
    return request.param


def test_every_change_applies_and_has_a_reason(patched_lib, tmp_path, pass_name):
    changes = upstream_tests.changes(pass_name)
    assert changes and all(len(reason.split()) > 4 for reason in changes.values()), changes
    suite = upstream_tests.unpack(patched_lib.parent, tmp_path / "suite", changes)
    assert not list(suite.rglob("*.rej"))
    assert "STORIES" in (suite / "utils.py").read_text()


def test_tests_not_run_exist_and_have_one_reason(patched_lib, pass_name):
    suite = patched_lib.parent / "upstream" / "tools" / "server" / "tests"
    listed = [t for e in NOT_RUN if pass_name in e.get("passes", upstream_tests.PASSES) for t in e["tests"]]
    assert len(listed) == len(set(listed)) == len(ridge_suite.reasons(NOT_RUN, pass_name))
    assert all(len(e["reason"].split()) > 3 for e in NOT_RUN)
    for test in listed:
        file, _, function = test.partition("[")[0].partition("::")
        assert re.search(rf"^def {function or 'test_.*'}\(", (suite / file).read_text(), re.MULTILINE), test


def test_faults_of_a_pass():
    good = {"summary": {"passed": upstream_tests.AT_LEAST, "failed": 0, "not run": 7}, "filled_prompts": 0}
    few = good | {"summary": good["summary"] | {"passed": upstream_tests.AT_LEAST - 1}}
    failed = good | {"summary": good["summary"] | {"failed": 1}}
    assert upstream_tests.faults("off", good, whole=True) == []
    assert upstream_tests.faults("maps", good | {"filled_prompts": 1}, whole=True) == []
    assert "filled" in upstream_tests.faults("maps", good, whole=True)[0]
    assert "filled" in upstream_tests.faults("off", good | {"filled_prompts": 1}, whole=True)[0]
    assert "at least" in upstream_tests.faults("off", few, whole=True)[0]
    assert upstream_tests.faults("off", few, whole=False) == []
    assert "1 tests failed" in upstream_tests.faults("off", failed, whole=False)[0]


JUNIT = """<testsuite><testcase name="a" time="1.5" status="run"/><testcase name="b" time="0" status="fail"/>
<testcase name="c" time="0" status="notrun"/><testcase name="d" time="0" status="disabled"/></testsuite>"""


def test_report_of_ctest(tmp_path):
    (tmp_path / "report.xml").write_text(JUNIT)
    found = {name: t["outcome"] for name, t in upstream_tests.read_junit(tmp_path / "report.xml").items()}
    assert found == {"a": "passed", "b": "failed", "c": "not run", "d": "not run"}


def run(build: Path, *tests: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, ROOT / "scripts" / "upstream_tests.py", "server", "--build", build, "--", *tests],
                          capture_output=True, text=True, env={"COLUMNS": "200", "PATH": "/usr/bin:/bin"})


def test_a_few_of_them_in_both_passes(patched_lib):
    infill = "unit/test_infill.py::test_infill_without_input_extra"
    p = run(patched_lib.parent, "unit/test_tokenize.py", infill, "unit/test_lora.py")
    assert p.returncode == 0, p.stdout + p.stderr
    rows = [line.split()[1::2] for line in p.stdout.splitlines() if line.startswith("│")]
    assert rows == [["off", "4", "0", "4", "0"], ["maps", "4", "0", "4", "1"]]


def test_a_server_that_does_not_start_fails(patched_lib, tmp_path):
    (tmp_path / "upstream").symlink_to(patched_lib.parent / "upstream")
    shutil.copytree(patched_lib, tmp_path / "bin", symlinks=True)
    broken = tmp_path / "bin" / "llama-server"
    broken.unlink()
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    p = run(tmp_path, "unit/test_ignore_eos.py")
    assert p.returncode == 1, p.stdout + p.stderr
    assert "pass off: 2 tests failed" in p.stdout and "pass maps: 2 tests failed" in p.stdout
