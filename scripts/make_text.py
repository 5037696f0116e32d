"""Cut documents of real text out of unpacked Debian packages; scripts/fetch_text.sh runs it.

    make_text.py PACKAGES OUT        PACKAGES/<package>/ holds an unpacked package, PACKAGES/versions.txt their versions

Documents are cut from the middle: pages begin with tables of contents, modules with licences.

Writes OUT/<source>/*.txt and OUT/sources.json. A document is cut from one original (a novel, a page, a module), and an
original lies in one partition only. (Two originals may still share a passage; `ridgefill-calibrate` looks for those.) The order of
the originals is that of the sha256 of their names: fixed, and blind to their content. More calibration text is taken from
the end of that order, which leaves the evaluation documents what they are.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import make_records
from ridgefill.text import html_to_text

N_CHARS = 16000  # of a document: 3,500 to 6,000 tokens of SmolLM2
N_CHARS_MIN = 14000  # shorter originals are left out


@dataclass(frozen=True)
class Source:
    name: str
    package: str
    licence: str  # as the copyright file of the package states it
    counts: tuple[int, int, int, int]  # documents for calibration, heldout, evaluation, and more for calibration


SOURCES = [
    Source("austen", "r-cran-janeaustenr", "public domain (Jane Austen, 1811-1818); collection MIT", (12, 2, 12, 12)),
    Source("python-doc", "python3.11-doc", "PSF-2.0", (8, 2, 8, 12)),
    Source("stdlib", "libpython3.11-stdlib", "PSF-2.0", (8, 2, 8, 32)),
    Source("handbook", "debian-handbook", "GPL-2.0-or-later or CC-BY-SA-3.0", (5, 1, 5, 8)),
    Source("reference", "debian-reference-en", "GPL-2.0-or-later", (3, 1, 3, 2)),
    Source("jargon", "jargon-text", "public domain", (4, 1, 4, 3)),
    Source("records", "", "MIT (made by scripts/make_records.py)", (12, 2, 0, 0)),
]
NOVELS = {  # whole novels per partition: neighbouring chapters share names and scenes
    "calibration": ("emma", "mansfieldpark", "sensesensibility"),
    "heldout": ("northangerabbey",),
    "evaluation": ("persuasion", "prideprejudice"),
}


def cut(text: str, start: int = 0) -> str:
    """About N_CHARS of `text` from `start`, whole paragraphs."""
    start = max(start, 0)
    piece = text[start : start + N_CHARS]
    if start:
        piece = piece[piece.find("\n\n") + 2 :]
    end = piece.rfind("\n\n") if start + N_CHARS < len(text) else len(piece)
    return piece[: end if end > N_CHARS // 2 else len(piece)].strip() + "\n"


def r_strings(data: bytes) -> list[str]:
    """The character vector in one serialised R object (XDR format 3), as its elements."""
    assert data[:2] == b"X\n", "expected a serialised R object in XDR format"
    (n_encoding,) = struct.unpack_from(">i", data, 14)
    at = 18 + n_encoding
    kind, n = struct.unpack_from(">ii", data, at)
    assert kind & 0xFF == 16, f"expected a character vector (16), found R type {kind & 0xFF}"
    at, out = at + 8, []
    for _ in range(n):
        _, length = struct.unpack_from(">ii", data, at)
        out.append(data[at + 8 : at + 8 + max(length, 0)].decode())
        at += 8 + max(length, 0)
    return out


def austen_novels(package: Path) -> dict[str, str]:
    """Text by name. The data file is a row of blocks, each a length and a zlib stream."""
    data = next(package.rglob("Rdata.rdb")).read_bytes()
    names = sorted(n for novels in NOVELS.values() for n in novels)  # the order of the blocks
    novels, at = {}, 0
    for name in names:
        inflate = zlib.decompressobj()
        block = inflate.decompress(data[at + 4 :])
        at = len(data) - len(inflate.unused_data)
        novels[name] = "\n".join(r_strings(block))
    return novels


def austen(source: Source, package: Path) -> Iterator[tuple[str, str, str]]:
    texts = austen_novels(package)
    n_fit, n_heldout, n_evaluation, n_more = source.counts
    for (partition, novels), n in zip(NOVELS.items(), (n_fit + n_more, n_heldout, n_evaluation)):
        for i in range(n):
            novel = novels[i % len(novels)]
            part, parts = i // len(novels), -(-n // len(novels))
            # evenly spread over the novel, from a twentieth in: title pages and tables of contents are no prose
            start = int(len(texts[novel]) * (0.05 + 0.9 * part / parts))
            yield partition, f"{novel}-{part}", cut(texts[novel], start)


PAGES = {
    "python-doc": "usr/share/doc/python3.11/html",
    "handbook": "usr/share/doc/debian-handbook/html/en-US",
    "reference": "usr/share/debian-reference",
}
NOT_TEXT = r"index|contents|whatsnew|changelog|licen[cs]e|/test|lib2to3|pydoc_data|/encodings/"


def originals(source: Source, package: Path) -> dict[str, Callable[[], str]]:
    """Readers by name of a package's pages, modules or, for the jargon file, stretches of the alphabet."""
    if source.name == "jargon":
        text = gzip.decompress(next(package.rglob("jargon.txt.gz")).read_bytes()).decode("utf-8", "replace")
        step = len(text) // 16
        return {f"part-{i:02d}": lambda i=i: text[i * step : (i + 1) * step] for i in range(2, 15)}
    code = source.name == "stdlib"
    folder = package / ("usr/lib/python3.11" if code else PAGES[source.name])
    files = [p for p in folder.rglob("*.py" if code else "*.html") if p.is_file()]
    read = (lambda p: p.read_text("utf-8")) if code else (lambda p: html_to_text(p.read_text("utf-8", "replace")))
    names = {str(p.relative_to(folder)): p for p in files}
    return {n: lambda p=p: read(p) for n, p in names.items() if not re.search(NOT_TEXT, f"/{n}")}


def by_original(source: Source, package: Path) -> Iterator[tuple[str, str, str]]:
    readers = originals(source, package)
    partitions = [p for p, n in zip((*NOVELS, "calibration"), source.counts) for _ in range(n)]
    for name in sorted(readers, key=lambda n: hashlib.sha256(f"{source.name}/{n}".encode()).digest()):
        if not partitions:
            return
        if len(text := readers[name]()) >= N_CHARS_MIN:
            yield partitions.pop(0), re.sub(r"\W+", "-", name.rsplit(".", 1)[0]), cut(text, (len(text) - N_CHARS) // 2)
    if partitions:
        raise SystemExit(f"make_text: {source.package}: {len(partitions)} originals of {N_CHARS_MIN} characters are missing")


def records(source: Source, package: Path) -> Iterator[tuple[str, str, str]]:
    for partition, n in zip(NOVELS, source.counts):
        for i in range(n):
            name = f"{partition}-{i:02d}"
            yield partition, name, make_records.document(zlib.crc32(name.encode()), N_CHARS)


CUTTERS = {"austen": austen, "records": records}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    versions = dict(line.split() for line in (args.packages / "versions.txt").read_text().splitlines())
    entries = []
    for source in SOURCES:
        shutil.rmtree(args.out / source.name, ignore_errors=True)
        (args.out / source.name).mkdir(parents=True)
        origin = f" (Debian package {source.package} {versions[source.package]})" if source.package else ""
        for partition, name, text in CUTTERS.get(source.name, by_original)(source, args.packages / source.package):
            file = f"{source.name}/{name}.txt"
            (args.out / file).write_text(text)
            entries.append({
                "file": file,
                "partition": partition,
                "source": source.name + origin,
                "licence": source.licence,
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
            })  # fmt: skip
    (args.out / "sources.json").write_text(json.dumps(entries, indent=1) + "\n")
    count = {p: sum(e["partition"] == p for e in entries) for p in NOVELS}
    print(f"{args.out}: {len(entries)} documents ({', '.join(f'{n} {p}' for p, n in count.items())})")


if __name__ == "__main__":
    main()
