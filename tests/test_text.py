"""Documents: what is read, what is refused, how they are parted and cut."""
from __future__ import annotations

import gzip
import importlib
import json
import struct
import sys
from pathlib import Path

import pytest

from ridgefill.capture import select
from ridgefill.errors import TextError
from ridgefill.text import Document, html_to_text, read_documents

PAGE = """<html><head><title>no</title><style>p {}</style></head><body>
<nav><ul><li>menu</ul></nav><div role="navigation"><p>prev<div>next</div></div>
<h1>Rings<a class="headerlink" href="#x">¶</a></h1><p>The ring &amp; the <b>sword</b>.<p>Second<br>line
<script>var x = "<p>no</p>";</script><pre>  if x:
      y</pre></body></html>"""


def test_html_keeps_text_and_drops_navigation():
    text = html_to_text(PAGE)
    for kept in ("Rings\n", "The ring & the sword.", "Second\nline", "  if x:\n      y"):
        assert kept in text
    for dropped in ("no", "menu", "prev", "next", "¶", "p {}", "\n\n\n"):
        assert dropped not in text


def test_folders_are_read_in_order_by_type(tmp_path):
    (tmp_path / "b.txt").write_text("bee")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.md.gz").write_bytes(gzip.compress("ay".encode()))
    (tmp_path / "c.html").write_text("<p>sea</p>")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.bin").write_bytes(b"\0\1")
    assert [(d.name, d.text) for d in read_documents([tmp_path])] == [("b.txt", "bee"), ("c.html", "sea\n"), ("sub/a.md.gz", "ay")]
    assert [d.name for d in read_documents([tmp_path / "c.html", tmp_path / "b.txt"])] == ["c.html", "b.txt"]


def test_sources_say_which_files_and_where_from(tmp_path):
    (tmp_path / "a.txt").write_text("ay")
    (tmp_path / "stray.txt").write_text("not listed")
    entry = {"file": "a.txt", "source": "book", "licence": "CC0-1.0", "partition": "heldout"}
    (tmp_path / "sources.json").write_text(json.dumps([entry]))
    assert read_documents([tmp_path]) == [Document("a.txt", "ay", "book", "CC0-1.0", "heldout")]
    for bad in ([{**entry, "partition": "test"}], [{"file": "a.txt"}], {"a": 1}, [{**entry, "file": "gone.txt"}]):
        (tmp_path / "sources.json").write_text(json.dumps(bad))
        with pytest.raises(TextError):
            read_documents([tmp_path])


def test_files_that_are_no_text_are_refused_by_name(tmp_path):
    (tmp_path / "latin.txt").write_bytes("über".encode("latin-1"))
    with pytest.raises(TextError, match="latin.txt is not UTF-8"):
        read_documents([tmp_path / "latin.txt"])
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(TextError, match=r"x.gguf: expected one of .txt, .* found .gguf"):
        read_documents([tmp_path / "x.gguf"])
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"hello" * 100)[:-10])
    with pytest.raises(TextError, match="cut.txt.gz cannot be read"):
        read_documents([tmp_path / "cut.txt.gz"])


def documents(**counts: int) -> list[Document]:
    return [Document(f"{p}{i}", "x", "s", partition="" if p == "free" else p) for p, n in counts.items() for i in range(n)]


def test_partitions_are_kept():
    s = select(documents(calibration=5, heldout=3, evaluation=4), seed=1)
    assert sorted(d.name for d in s.fit) == [f"calibration{i}" for i in range(5)]
    assert sorted(d.name for d in s.heldout) == [f"heldout{i}" for i in range(3)]
    assert len(select(documents(calibration=5, heldout=3), seed=1, n_heldout=2).heldout) == 2


def test_documents_without_partition_are_parted_by_seed():
    s = select(documents(free=12), seed=1)
    assert (len(s.fit), len(s.heldout)) == (10, 2)
    assert set(s.fit).isdisjoint(s.heldout)
    assert s == select(documents(free=12), seed=1) != select(documents(free=12), seed=2)
    assert len(select(documents(free=12), seed=1, n_heldout=5).heldout) == 5
    for bad in (documents(free=1), documents(calibration=3), documents(evaluation=9), documents(heldout=2)):
        with pytest.raises(TextError, match="expected documents to fit and at least one to hold out"):
            select(bad, seed=0)


def script(name: str):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
    return importlib.import_module(name)


@pytest.fixture(scope="module")
def make_text():
    return script("make_text")


def test_r_character_vectors_are_read(make_text):
    """XDR format 3: head, encoding, then STRSXP (16) of CHARSXP (9) with lengths, -1 for a missing one."""
    def word(*values: int) -> bytes:
        return struct.pack(f">{len(values)}i", *values)

    strings = [b"It is a truth", b"", "naïve".encode()]
    body = b"".join(word(0x40009, len(s)) + s for s in strings) + word(9, -1)
    data = b"X\n" + word(3, 0x40201, 0x30500, 5) + b"UTF-8" + word(16, 4) + body
    assert make_text.r_strings(data) == ["It is a truth", "", "naïve", ""]
    with pytest.raises(AssertionError, match="expected a character vector"):
        make_text.r_strings(data.replace(word(16, 4), word(13, 4)))


def test_documents_are_whole_paragraphs_of_about_the_same_size(make_text):
    paragraphs = [f"Paragraph {i}. " + "word " * (20 + i % 7) for i in range(1000)]
    text = "\n\n".join(p.strip() for p in paragraphs)
    for start in (0, 12345, len(text) - make_text.N_CHARS):
        piece = make_text.cut(text, start)
        assert make_text.N_CHARS_MIN < len(piece) <= make_text.N_CHARS + 1
        lines = piece.strip().split("\n\n")
        assert all(line in text.split("\n\n") for line in lines)
    assert make_text.cut("short text", -5000) == "short text\n"


def test_an_original_lies_in_one_partition(make_text, tmp_path):
    """Pages of a package: as many documents as asked for, each from a page of its own, the same at every call."""
    source = make_text.Source("handbook", "debian-handbook", "GPL", (3, 1, 2))
    folder = tmp_path / make_text.PAGES["handbook"]
    folder.mkdir(parents=True)
    for i in range(9):
        (folder / f"page{i}.html").write_text("<p>" + f"page {i} says so. " * (2000 if i < 7 else 10) + "</p>")
    (folder / "index.html").write_text("<p>" + "index " * 5000)
    found = list(make_text.by_original(source, tmp_path))
    assert [p for p, _, _ in found] == ["calibration"] * 3 + ["heldout"] + ["evaluation"] * 2
    assert len({name for _, name, _ in found}) == 6
    assert all(name[4:] in "0123456" and f"page {name[4:]} says so" in text for _, name, text in found)
    assert found == list(make_text.by_original(source, tmp_path))
    with pytest.raises(SystemExit, match="debian-handbook: 3 originals of .* are missing"):
        list(make_text.by_original(make_text.Source("handbook", "debian-handbook", "GPL", (5, 2, 3)), tmp_path))


def test_prompts_of_the_quick_start_hold_no_text_that_maps_were_fitted_on(text_set):
    filler = script("filler")
    entries = json.loads((text_set / "sources.json").read_text())
    used = [" ".join((text_set / e["file"]).read_text().split()) for e in entries if e["partition"] != "evaluation"]
    assert len(used) > 100 and len(filler.passages()) > 1000
    assert [p for p in filler.passages() if any(p in text for text in used)] == []
