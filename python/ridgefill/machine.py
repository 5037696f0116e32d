"""What a result records of the machine and the code that made it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str:
    if not (CHECKOUT / "llama.cpp" / "UPSTREAM").is_file():
        return "unknown"  # installed: a repository around it would not be ours
    p = subprocess.run(["git", "-C", CHECKOUT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return p.stdout.strip() or "unknown"


def machine() -> dict:
    """CPU, cores, system, Python, and the commit of the checkout that this package lies in."""
    return {"cpu": _cpu(), "cores": os.cpu_count(), "system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(), "commit": _commit()}  # fmt: skip


def write_record(path: Path, record: dict) -> None:
    """Write a result as JSON, behind what machine() says; makes the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **record}, indent=1) + "\n")
