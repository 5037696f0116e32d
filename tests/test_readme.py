"""The README's figures are those of the result files, and its commands name files that exist."""
from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import readme_tables  # noqa: E402


def test_tables_are_those_of_the_results():
    text = readme_tables.README.read_text()
    assert readme_tables.render(text, ROOT) == text, "run scripts/readme_tables.py"


SHORT = """{"settings": {"model": "m.gguf"}, "results": {"pairs": 20, "prompts_per_pair": 5, "n_tokens": 400,
"slowdown": 0.001, "low_95": -0.002, "high_95": 0.004}}"""


def test_a_changed_figure_is_seen(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "bench-short.json").write_text(SHORT)
    text = "<!-- results/bench-short.json -->\nanything\n<!-- end -->"
    once = readme_tables.render(text, tmp_path)
    assert "+0.10 % CPU time" in once and "[-0.20, +0.40] %" in once
    assert readme_tables.render(once, tmp_path) == once
    assert readme_tables.render(once.replace("+0.10", "+0.05"), tmp_path) == once


def test_todo_becomes_a_table_when_measured(tmp_path):
    text = "TODO: results/bench-short.json\n"
    assert readme_tables.render(text, tmp_path) == text
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "bench-short.json").write_text(SHORT)
    assert readme_tables.render(text, tmp_path).startswith("<!-- results/bench-short.json -->\nm.gguf, 20 pairs of 5 prompts of 400 tokens")


def test_missing_result_is_named(tmp_path):
    with pytest.raises(SystemExit, match="results/none.json"):
        readme_tables.render("<!-- results/none.json -->\n<!-- end -->", tmp_path)


DOCUMENTS = ["README.md", "llama.cpp/README.md", "models/README.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document):
    text = (ROOT / document).read_text()
    links = [(ROOT / document).parent / t for t in re.findall(r"\]\(([^)#:]+)\)", text)]
    names = [ROOT / t for t in re.findall(r"(?<![\w/])(?:scripts|tests|docs|models)/[\w./-]*\w\.(?:py|sh|md|json|cpp)\b", text)]
    assert not [str(p) for p in links + names if not p.exists()]
