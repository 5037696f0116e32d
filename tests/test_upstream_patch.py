"""Building against a checkout of the user's: a patch that applies, and one that does not."""
from __future__ import annotations

import filecmp
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOOK = "res->t_layer_inp[il] = inpL;"  # the line that the patch replaces in a model file


@pytest.fixture(scope="module")
def pristine(stock_lib) -> Path:
    """Unpatched upstream sources: those of the unpatched build."""
    return stock_lib.parent / "upstream"


def configure(build: Path, sources: Path) -> subprocess.CompletedProcess:
    return subprocess.run(["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", f"-DRIDGE_LLAMA_CPP_DIR={sources}",
                           f"-DPython3_EXECUTABLE={sys.executable}"], capture_output=True, text=True)


def trees_equal(a: Path, b: Path) -> bool:
    def same(c: filecmp.dircmp) -> bool:
        return not (c.left_only or c.right_only or c.diff_files or c.funny_files) and all(map(same, c.subdirs.values()))

    return same(filecmp.dircmp(a, b, ignore=[".git"]))


def test_users_checkout_becomes_the_same_sources(pristine, patched_lib, tmp_path):
    checkout, build = tmp_path / "llama.cpp", tmp_path / "build"
    shutil.copytree(pristine, checkout)
    p = configure(build, checkout)
    assert p.returncode == 0, p.stdout + p.stderr
    assert HOOK not in (build / "upstream/src/models/llama.cpp").read_text()
    assert trees_equal(build / "upstream", patched_lib.parent / "upstream")
    assert trees_equal(checkout, pristine), "the user's checkout was changed"


def test_patch_that_does_not_apply_names_file_and_hunk(pristine, tmp_path):
    checkout, build = tmp_path / "llama.cpp", tmp_path / "build"
    shutil.copytree(pristine, checkout)
    model = checkout / "src/models/qwen3.cpp"
    text = model.read_text()
    assert HOOK in text
    model.write_text(text.replace(HOOK, "res->t_layer_inp[il] = something_else;"))
    p = configure(build, checkout)
    out = p.stdout + p.stderr
    assert p.returncode != 0
    assert re.search(r"llama\.cpp/patches/\S+\.patch does not apply", out), out
    assert "src/models/qwen3.cpp" in out and re.search(r"Hunk #\d+ FAILED", out), out
    assert not (build / "upstream").exists(), "sources were left that are not patched"


def test_folder_without_sources_is_named(tmp_path):
    p = configure(tmp_path / "build", tmp_path)
    assert p.returncode != 0
    assert f"RIDGE_LLAMA_CPP_DIR={tmp_path}" in p.stderr and "src/llama-graph.cpp" in p.stderr, p.stderr
