"""What all tests share: the two libraries, models, and a loader for scripts.

Nothing here reaches the network but pip, which fetches the real model by name and hash (scripts/fetch_model.py).
"""
from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import hypothesis
import pytest

import pico

ROOT = Path(__file__).resolve().parents[1]

hypothesis.settings.register_profile("any machine", deadline=None)  # a busy one is slow now and then
hypothesis.settings.load_profile("any machine")


def pytest_collection_modifyitems(items) -> None:
    """`pytest -k field_report_12_` runs the tests of row 12 of the field reports (test_field_reports.py)."""
    for item in items:
        item.extra_keyword_matches.update(f"field_report_{mark.args[0]}_" for mark in item.iter_markers("field_report"))


def _library(folder: Path, make: str) -> Path:
    if not (folder / "libllama.so").exists() and not (folder / "libllama.dylib").exists():
        pytest.fail(f"expected libllama in {folder}, found none: build it with {make}", pytrace=False)
    return folder


@pytest.fixture(scope="session")
def patched_lib() -> Path:
    """Folder of the patched libllama and of our tools."""
    return _library(Path(os.environ.get("RIDGE_BUILD", ROOT / "build")) / "bin", "scripts/setup.sh")


@pytest.fixture(scope="session")
def stock_lib() -> Path:
    """Folder of the unpatched libllama."""
    return _library(Path(os.environ.get("RIDGE_BUILD_STOCK", ROOT / "build-stock")) / "bin", "scripts/setup.sh --stock")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as shipped (Q4_1), fetched once."""
    p = subprocess.run([sys.executable, ROOT / "scripts" / "fetch_model.py"], capture_output=True, text=True)
    assert p.returncode == 0, p.stderr
    return Path(p.stdout.strip())


@pytest.fixture(scope="session")
def smollm2_f32(patched_lib, smollm2, tmp_path_factory) -> Path:
    """The same weights dequantised: several times faster on CPUs that have no fast path for Q4_1."""
    f32 = tmp_path_factory.mktemp("smollm2") / "smollm2-f32.gguf"
    command = [patched_lib / "llama-quantize", "--allow-requantize", smollm2, f32, "F32"]
    p = subprocess.run(command, capture_output=True, text=True, check=False)
    assert p.returncode == 0, p.stderr
    return f32


@pytest.fixture(scope="session")
def text_set() -> Path:
    """Real text, made once."""
    p = subprocess.run([ROOT / "scripts" / "fetch_text.sh"], capture_output=True, text=True, check=False)
    assert p.returncode == 0, p.stderr
    return ROOT / "out" / "text"


@pytest.fixture(scope="session")
def pico_model(tmp_path_factory):
    """pico_model(arch, **keywords of pico.build) -> path, each distinct model written once per run."""
    folder, built = tmp_path_factory.mktemp("pico"), {}

    def get(arch: str, **kw) -> Path:
        key = json.dumps([arch, kw], sort_keys=True)
        if key not in built:
            name = f"{arch}-{hashlib.sha256(key.encode()).hexdigest()[:10]}.gguf"
            built[key] = Path(pico.build(folder / name, arch, **kw))
        return built[key]

    return get
