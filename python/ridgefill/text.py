"""Documents: reading calibration text from files and folders, with its source, licence and partition.

A folder may hold a `sources.json` (written by scripts/fetch_text.sh), a list of
    {"file": "austen/emma-0.txt", "source": "...", "licence": "...", "partition": "calibration"}
with files relative to the folder; then it says which files are documents, and no other file is read.
Partitions keep text apart: maps are fitted on "calibration", lambda is chosen on "heldout", and "evaluation" is never
calibrated on. Documents without one have the partition "".
"""

from __future__ import annotations

import gzip
import html.parser
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .errors import TextError

PARTITIONS = ("calibration", "heldout", "evaluation")
SUFFIXES = (".txt", ".md", ".rst", ".py", ".html", ".htm")  # each also with .gz
UNKNOWN_LICENCE = "licence not stated"


@dataclass(frozen=True)
class Document:
    name: str  # path as given or relative to its folder
    text: str
    source: str  # where the text comes from, for the record in the sidecar
    licence: str = UNKNOWN_LICENCE
    partition: str = ""


class _Stripper(html.parser.HTMLParser):
    """Text of a page, without navigation, scripts and styles; block elements end a line."""

    SKIP = {"script", "style", "head", "nav", "footer", "svg"}
    BLOCK = {"p", "div", "li", "dt", "dd", "tr", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "section", "table", "ul", "ol", "dl"}
    VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.out: list[str] = []
        self.open: list[tuple[str, bool]] = []  # (tag, skipped) of every open element

    def _skipping(self) -> bool:
        return bool(self.open) and self.open[-1][1]

    def handle_starttag(self, tag, attrs):
        if tag == "br":
            self.handle_data("\n")
        if tag in self.VOID:
            return
        a = dict(attrs)
        navigation = a.get("role") == "navigation" or "headerlink" in (a.get("class") or "")
        self.open.append((tag, self._skipping() or tag in self.SKIP or navigation))
        if tag in self.BLOCK:
            self.handle_data("\n")

    def handle_endtag(self, tag):
        # pages leave <p> and <li> open: closing an element closes what is open inside it
        for i in range(len(self.open) - 1, -1, -1):
            if self.open[i][0] == tag:
                del self.open[i:]
                break
        if tag in self.BLOCK:
            self.handle_data("\n")

    def handle_data(self, data):
        if not self._skipping():
            self.out.append(data)


def html_to_text(page: str) -> str:
    """Readable text of an HTML page: at most one empty line in a row, no trailing blanks."""
    parser = _Stripper()
    parser.feed(page)
    parser.close()
    lines: list[str] = []
    for line in "".join(parser.out).splitlines():
        line = line.rstrip()
        if line.strip() or (lines and lines[-1]):
            lines.append(line if line.strip() else "")
    return "\n".join(lines).strip() + "\n"


def _suffix(path: Path) -> str:
    name = path.name.lower()
    name = name[:-3] if name.endswith(".gz") else name
    return os.path.splitext(name)[1]


def read_text(path: Path) -> str:
    """Text of one file of a type in SUFFIXES.

    Raises TextError when it cannot be read or is not UTF-8.
    """
    if _suffix(path) not in SUFFIXES:
        raise TextError(f"{path}: expected one of {', '.join(SUFFIXES)} (or with .gz), found {path.suffix or 'no suffix'}")
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix.lower() == ".gz" else data).decode("utf-8")
    except (OSError, EOFError) as e:
        raise TextError(f"{path} cannot be read: {e}") from e
    except UnicodeDecodeError as e:
        raise TextError(f"{path} is not UTF-8 text: {e}") from e
    return html_to_text(text) if _suffix(path) in (".html", ".htm") else text


def _from_sources(folder: Path) -> list[Document]:
    index = folder / "sources.json"
    try:
        entries = json.loads(index.read_text())
        documents = []
        for e in entries:
            if e["partition"] not in PARTITIONS:
                raise TextError(f"{index}: partition of {e['file']}: expected one of {', '.join(PARTITIONS)}, found {e['partition']!r}")
            documents.append(Document(e["file"], read_text(folder / e["file"]), e["source"], e["licence"], e["partition"]))
        return documents
    except (ValueError, KeyError, TypeError) as e:
        raise TextError(f"{index} is not a list of documents with file, source, licence and partition: {e!r}") from e


def read_documents(paths: Iterable[str | os.PathLike]) -> list[Document]:
    """Every document under `paths` (files and folders), in a fixed order, without empty ones.

    Raises TextError when a path is missing, a named file cannot be read, or nothing was found.
    """
    documents: list[Document] = []
    names = [os.fspath(p) for p in paths]
    for path in map(Path, names):
        if path.is_dir() and (path / "sources.json").is_file():
            documents += _from_sources(path)
        elif path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.is_file() and _suffix(p) in SUFFIXES)
            documents += [Document(str(p.relative_to(path)), read_text(p), path.name) for p in files]
        elif path.is_file():
            documents.append(Document(path.name, read_text(path), path.name))
        else:
            raise TextError(f"no such file or folder: {path}")
    documents = [d for d in documents if d.text.strip()]
    if not documents:
        raise TextError(f"no text found in {', '.join(names) or 'no paths at all'} (file types: {', '.join(SUFFIXES)})")
    return documents
