"""Real text that is on every machine with Python: prose from the docstrings of the standard library."""
from __future__ import annotations

import ast
import sysconfig
import warnings
from pathlib import Path

# modules that scripts/make_text.py takes for calibration (fitted or held out), and two whose documentation, taken too, quotes them
FITTED = set("""
    _osx_support aifc asyncio/events asyncio/locks asyncio/streams asyncio/unix_events asyncore bdb cgi cmd
    concurrent/futures/process ctypes/__init__ difflib ftplib gettext html/parser http/cookies imaplib json/__init__ mailbox
    multiprocessing/shared_memory multiprocessing/util nntplib ntpath pickletools profile shutil smtpd socketserver sunau
    tarfile telnetlib tomllib/_parser trace unittest/loader uuid webbrowser wsgiref/handlers xml/dom/expatbuilder
    xml/sax/expatreader xml/sax/handler xmlrpc/client
    email/policy locale
""".split())
FOLDERS = (".", "asyncio", "collections", "concurrent/futures", "email", "html", "http", "importlib", "json", "logging",
           "multiprocessing", "unittest", "urllib", "wsgiref", "xml/dom", "xml/sax")


def _docstrings(path: Path) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the modules' own string escapes
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, OSError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]


def _is_prose(paragraph: str) -> bool:
    letters = sum(c.isalpha() or c == " " for c in paragraph)
    return 150 <= len(paragraph) <= 900 and paragraph.isascii() and letters > 0.9 * len(paragraph) and paragraph[0].isupper()


def passages() -> list[str]:
    """Paragraphs of 150 to 900 characters, each once, sorted."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), set()
    for folder in FOLDERS:
        for path in (root / folder).glob("*.py"):
            if path.relative_to(root).with_suffix("").as_posix() in FITTED:
                continue
            for text in _docstrings(path):
                found.update(p for p in (" ".join(q.split()) for q in text.split("\n\n")) if _is_prose(p))
    return sorted(found)
