"""The messages in our C++ sources, as templates in which {} stands for what is put in at run time.

Not by the names of functions that print, which somebody may forget to list: every expression that holds a string literal with
words in it is taken for a message, and what is none is named here.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_TOKEN = re.compile(
    r'(?P<skip>//[^\n]*|/\*.*?\*/|^[ \t]*\#[ \t]*include[^\n]*|\s+|\\\n)'
    r'|(?P<string>"(?:[^"\\\n]|\\.)*")'
    r"|(?P<word>'(?:[^'\\\n]|\\.)+'|\w+)"
    r"|(?P<op><<|::|->|==|!=|.)",
    re.DOTALL | re.MULTILINE,
)
_PRINTF = re.compile(r"%(?:%|[-+ #0]*(?:\*|\d+)?(?:\.(?:\*|\d+))?(?:hh|h|ll|l|z|j|t)?[a-zA-Z])")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0"}
_SEPARATORS = {",", ";", "?", ":", "=", "return", "throw", "==", "!="}

# calls whose literals are no messages: what --help says of flags, and the title over them
_NOT_IN = {"common_arg", "print_section"}
# JSON, the text format of /metrics, the prefix that a log macro puts before its message, and the title that llama-bench prints
_NOT_LIKE = re.compile(r'": |^# (HELP|TYPE) |^llamacpp:|^slot \{\}: id \{\} \||^ridge parameters:$')

Group = list  # of (kind, text) and groups


def _tree(text: str) -> Group:
    """Tokens with what stands in brackets as groups. Brackets may be missing: a hunk of a patch is no whole file."""
    root: Group = []
    stack = [root]
    for m in _TOKEN.finditer(text):
        if m.lastgroup == "skip":
            continue
        if m[0] in "([{":
            stack[-1].append([])
            stack.append(stack[-1][-1])
        elif m[0] in ")]}":
            if len(stack) > 1:
                stack.pop()
        else:
            stack[-1].append((m.lastgroup, m[0]))
    return root


def _expressions(group: Group) -> Iterator[tuple[str, Group]]:
    """(separator before, items) of each part of a group."""
    before, items = "", []
    for item in group:
        if isinstance(item, tuple) and item[1] in _SEPARATORS:
            yield before, items
            before, items = item[1], []
        else:
            items.append(item)
    yield before, items


def _unquote(literal: str) -> str:
    return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[1]), literal[1:-1], flags=re.DOTALL)


def _operands(items: Group) -> Iterator[Group]:
    """Parts of an expression between the operators that put text together."""
    part: Group = []
    for item in items:
        if item in (("op", "+"), ("op", "<<")):
            yield part
            part = []
        else:
            part.append(item)
    yield part


def _literals(operand: Group) -> str | None:
    """Text of adjacent literals and the macros of printf between them; None when the operand holds no literal."""
    if not any(isinstance(i, tuple) and i[0] == "string" for i in operand):
        return None
    text = ""
    for item in operand:
        if isinstance(item, tuple) and item[0] == "string":
            text += _unquote(item[1])
        elif isinstance(item, tuple) and item[1].startswith("PRI"):
            text += item[1][3]  # after the % that ends the literal before
        else:
            text += "%s"
    return _PRINTF.sub(lambda m: "%" if m[0] == "%%" else "{}", text)


def _is_string_of(operand: Group) -> bool:
    """std::string(one expression)"""
    return operand[:3] == [("word", "std"), ("op", "::"), ("word", "string")] and [type(i) for i in operand[3:]] == [list]


def _template(items: Group) -> str | None:
    texts = []
    operands = list(_operands(items))
    if ("op", "<<") in items and _literals(operands[0]) is None:
        operands = operands[1:]  # the stream
    for operand in operands:
        if _is_string_of(operand) and len(list(_expressions(operand[3]))) == 1:
            texts.append(_template(operand[3]))
        else:
            texts.append(_literals(operand))
    return None if all(t is None for t in texts) else "".join("{}" if t is None else t for t in texts)


def _nested(items: Group) -> Iterator[Group]:
    for operand in _operands(items):
        if not (_is_string_of(operand) and _template(operand[3]) is not None and len(list(_expressions(operand[3]))) == 1):
            for before, item in zip([None, *operand], operand, strict=False):
                if isinstance(item, list) and not (isinstance(before, tuple) and before[1] in _NOT_IN):
                    yield item


def _walk(group: Group) -> Iterator[str]:
    parts = list(_expressions(group))
    for i, (before, items) in enumerate(parts):
        for inner in _nested(items):
            yield from _walk(inner)
        template = _template(items)
        if template is None or before in ("==", "!="):
            continue
        if parts[i + 1 : i + 2] == [(",", [("word", "__func__")])]:
            template = template.removeprefix("{}: ")
        yield template.strip()


def in_text(text: str) -> set[str]:
    """Messages in C++ source text."""
    words = (t for t in _walk(_tree(text)) if " " in t and re.search("[A-Za-z]{2}", t.replace("{}", "")))
    return {t for t in words if not _NOT_LIKE.search(t)}


def sources() -> list[Path]:
    """Our C++ files and the patches."""
    folders = [ROOT / "llama.cpp", ROOT / "ggml-ridge" / "src"]
    return sorted(p for f in folders for p in f.rglob("*") if p.suffix in (".cpp", ".h", ".patch"))


def in_file(path: Path) -> set[str]:
    text = path.read_text()
    if path.suffix == ".patch":
        lines = (line[1:] if line.startswith("+") else ";" for line in text.splitlines() if not line.startswith("+++"))
        text = "\n".join(lines)
    return in_text(text)


def everywhere() -> dict[str, list[str]]:
    """Each message with the files that hold it."""
    found: dict[str, list[str]] = {}
    for path in sources():
        for template in in_file(path):
            found.setdefault(template, []).append(path.name)
    return found
