"""Documents: reading calibration text from files, records, folders and data sets, with its source, licence and partition.

A folder may hold a `sources.json` (written by scripts/fetch_text.sh), a list of
    {"file": "austen/emma-0.txt", "source": "...", "licence": "...", "partition": "calibration"}
with files relative to the folder; then it says which files are documents, and no other file is read.
Partitions keep text apart: maps are fitted on "calibration", lambda is chosen on "heldout", and "evaluation" is never
calibrated on. Documents without one have the partition "".
"""

from __future__ import annotations

import gzip
import hashlib
import html.parser
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .errors import TextError

PARTITIONS = ("calibration", "heldout", "evaluation")
SUFFIXES = (".txt", ".md", ".rst", ".py", ".html", ".htm")  # a file is a document; each also with .gz
RECORD_SUFFIXES = (".jsonl", ".parquet")  # a record is a document: a line with a field "text", a row with a column "text"
TYPES = SUFFIXES + RECORD_SUFFIXES
UNKNOWN_LICENCE = "licence not stated"
DATASET = "hf:"  # begins the name of a data set: hf:NAME, hf:NAME:CONFIG or hf:NAME:CONFIG:SPLIT


@dataclass(frozen=True)
class Document:
    name: str  # path as given or relative to its folder
    text: str
    source: str  # where the text comes from, for the record in the sidecar
    licence: str = UNKNOWN_LICENCE
    partition: str = ""

    @property
    def sha256(self) -> str:
        """The first 16 digits, which tell the documents of a calibration apart."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


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


def _decoded(path: Path) -> str:
    """Content of a UTF-8 file, unpacked. Raises TextError when it cannot be read or is not UTF-8."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix.lower() == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, zlib.error) as e:
        raise TextError(f"{path} cannot be read: {e}") from e
    except UnicodeDecodeError as e:
        raise TextError(f"{path} is not UTF-8 text: {e}") from e


def _json_lines(path: Path) -> list[str]:
    """The field "text" of each line."""
    texts = []
    for number, line in enumerate(_decoded(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as e:
            raise TextError(f"{path}, line {number}: expected a JSON object, found something else: {e}") from None
        if not isinstance(value, dict) or not isinstance(value.get("text"), str):
            found = ", ".join(value) if isinstance(value, dict) else type(value).__name__
            raise TextError(f'{path}, line {number}: expected an object with a string "text", found {found or "an empty one"}')
        try:
            value["text"].encode()
        except UnicodeEncodeError as e:
            raise TextError(f"{path}, line {number}: expected text, found half of a surrogate pair: {e}") from None
        texts.append(value["text"])
    return texts


def _parquet(path: Path) -> list[str]:
    """The column "text". pyarrow is imported here: no other text needs it."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise TextError(f"{path}: parquet files are read with pyarrow, which is missing: pip install pyarrow") from None
    try:
        schema = pyarrow.parquet.read_schema(path)
        if "text" not in schema.names:
            raise TextError(f'{path}: expected a column "text", found {", ".join(schema.names) or "none"}')
        kind = schema.field("text").type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise TextError(f'{path}: expected strings in column "text", found {kind}')
        values = pyarrow.parquet.read_table(path, columns=["text"]).column("text").to_pylist()
    except (OSError, pyarrow.ArrowException) as e:
        raise TextError(f"{path} cannot be read: {e}") from e
    return [v or "" for v in values]


def read_texts(path: Path) -> list[str]:
    """Texts of one file of a type in SUFFIXES or RECORD_SUFFIXES: one, or one for each record.

    Raises TextError when it cannot be read or is not UTF-8.
    """
    suffix = _suffix(path)
    if suffix == ".jsonl":
        return _json_lines(path)
    if suffix == ".parquet":
        return _parquet(path)
    if suffix not in SUFFIXES:
        raise TextError(f"{path}: expected one of {', '.join(TYPES)} (or with .gz), found {path.suffix or 'no suffix'}")
    text = _decoded(path)
    return [html_to_text(text) if suffix in (".html", ".htm") else text]


def _documents(path: Path, name: str, *record: str) -> list[Document]:
    """Documents of one file; those of a file of records are numbered from 1."""
    texts = read_texts(path)
    if _suffix(path) not in RECORD_SUFFIXES:
        return [Document(name, text, *record) for text in texts]
    return [Document(f"{name}:{i}", text, *record) for i, text in enumerate(texts, 1)]


def _from_sources(folder: Path) -> list[Document]:
    index = folder / "sources.json"
    try:
        entries = json.loads(index.read_text())
        documents = []
        for e in entries:
            if e["partition"] not in PARTITIONS:
                raise TextError(f"{index}: partition of {e['file']}: expected one of {', '.join(PARTITIONS)}, found {e['partition']!r}")
            documents += _documents(folder / e["file"], e["file"], e["source"], e["licence"], e["partition"])
        return documents
    except (ValueError, KeyError, TypeError) as e:
        raise TextError(f"{index} is not a list of documents with file, source, licence and partition: {e!r}") from e


@dataclass(frozen=True)
class Limit:
    """How much of a data set is taken."""

    tokens: int  # at least so many, where it has them; 0: not known
    count: Callable[[str], int]  # tokens of a text


def _rows(name: str) -> tuple[Iterator[dict], str, str]:
    """Rows of a data set as they arrive, its source and its licence. The library is imported here: no other text needs it."""
    try:
        import datasets
    except ImportError:
        what = "data sets are read with the package datasets, which is missing"
        raise TextError(f"{name}: {what}: pip install datasets") from None
    path, config, split = (*name.removeprefix(DATASET).split(":"), "", "")[:3]
    source = DATASET + ":".join(x for x in (Path(path).name if os.path.exists(path) else path, config, split) if x)
    try:
        found = datasets.load_dataset(path, config or None, split=split or "train", streaming=True)
        return iter(found), source, found.info.license or UNKNOWN_LICENCE
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as e:
        raise TextError(f"{name} cannot be read: {e}") from e


def _from_dataset(name: str, limit: Limit | None) -> list[Document]:
    """A document for each row from the first on, until there are tokens enough."""
    if name.count(":") > 3 or not name.removeprefix(DATASET):
        raise TextError(f"data set: expected {DATASET}NAME, {DATASET}NAME:CONFIG or {DATASET}NAME:CONFIG:SPLIT, found {name}")
    if limit is None:
        raise TextError(f"{name}: expected files or folders here, which are read to their end, found a data set, which is not")
    if not limit.tokens:
        raise TextError(f"{name}: a data set is read until there is enough: say how much with --n-tokens")
    rows, source, licence = _rows(name)
    documents, n_tokens = [], 0
    try:
        for i, row in enumerate(rows, 1):
            if "text" not in row or not isinstance(row["text"], str | None):
                found = ", ".join(f"{column} ({type(value).__name__})" for column, value in row.items())
                raise TextError(f'{name}, row {i}: expected a string in column "text", found {found or "no columns"}')
            text = row["text"] or ""
            documents.append(Document(f"{source}:{i}", text, source, licence))
            n_tokens += limit.count(text)
            if n_tokens >= limit.tokens:
                break
    except (OSError, ValueError) as e:
        raise TextError(f"{name} cannot be read past row {len(documents)}: {e}") from e
    return documents


def read_documents(paths: Iterable[str | os.PathLike], limit: Limit | None = None) -> list[Document]:
    """Every document under `paths` (files and folders), in a fixed order, without empty ones; of a data set
    (hf:NAME[:CONFIG[:SPLIT]]) the first rows, up to `limit`.

    Raises TextError when a path is missing, a named file cannot be read, or nothing was found.
    """
    documents: list[Document] = []
    names = [os.fspath(p) for p in paths]
    for name, path in zip(names, map(Path, names), strict=True):
        if name.startswith(DATASET):
            documents += _from_dataset(name, limit)
        elif path.is_dir() and (path / "sources.json").is_file():
            documents += _from_sources(path)
        elif path.is_dir():
            for p in sorted(p for p in path.rglob("*") if p.is_file() and _suffix(p) in TYPES):
                documents += _documents(p, str(p.relative_to(path)), path.name)
        elif path.is_file():
            documents += _documents(path, path.name, path.name)
        else:
            raise TextError(f"no such file or folder: {path}")
    documents = [d for d in documents if d.text.strip()]
    if not documents:
        raise TextError(f"no text found in {', '.join(names) or 'no paths at all'} (file types: {', '.join(TYPES)})")
    return documents
