"""Sums on disk: what a calibration that was stopped goes on from, what shards are merged from, what is solved again.

One zip file as numpy writes (`np.load` reads it), with a `header.json`: what the sums depend on, how much of the text is in
them, and what a sidecar made from them records. A file is replaced as a whole, so that there is always one that can be
read, and its checksums are compared on reading.
"""

from __future__ import annotations

import fcntl
import json
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np

from .errors import OutputExists, RidgefillError
from .kinds import Layout
from .statistics import Moments
from .sums import PARTS, Sums

VERSION = 1
HEADER = "header.json"


class SumsError(RidgefillError):
    """A file of sums cannot be used: of another model, text or settings, unfinished, damaged, held by another run, or not
    to be written.
    """

    exit_code = 8


@dataclass
class Header:
    """What a file of sums says of itself."""

    settings: dict[str, object]  # everything that the sums depend on, by a name for people
    sink: int  # rows left out at the start of each chunk
    fingerprints: dict[int, dict]  # of the models that what is solved is for
    record: dict  # fields of sidecar.Calibration that hold for all shards together
    layouts: list  # of each set of sums: `family`, its name in the file, and what else is said below
    n_shards: int
    shards: list[int]  # that are in the sums, of 1..n_shards
    done: dict[str, int]  # by part: chunks in the sums
    total: dict[str, int]  # by part: chunks of these shards

    format: ClassVar[str]
    made_with: ClassVar[str]  # the command, for people

    @staticmethod
    def layout(fields: dict) -> object:
        """A layout from its fields in JSON."""
        raise NotImplementedError

    def widths(self, layout) -> dict[int, tuple[int, dict[int, int]]]:
        """Of the moments of one layout, by their `split`: number of features, and by layer that of targets."""
        raise NotImplementedError

    def empty_sums(self) -> list:
        """One object for each layout, with `layout`, `moments` by part and split (empty), and each()."""
        raise NotImplementedError

    @property
    def finished(self) -> bool:
        """Whether all text of these shards is in the sums."""
        return self.done == self.total

    @property
    def missing(self) -> list[int]:
        """Shards that are not in the sums."""
        return sorted(set(range(1, self.n_shards + 1)) - set(self.shards))

    def shard_names(self) -> str:
        return f"{','.join(map(str, self.shards))}/{self.n_shards}"

    def check_complete(self) -> None:
        """Raises SumsError when text is missing."""
        if not self.finished:
            done, total = sum(self.done.values()), sum(self.total.values())
            raise SumsError(f"the sums are unfinished: {done} of {total} chunks; run their command again")
        if self.missing:
            missing = ", ".join(map(str, self.missing))
            raise SumsError(f"the sums lack shards {missing} of {self.n_shards}; merge them first")


@dataclass
class MapsHeader(Header):
    """Of sums for ridge maps. `fingerprints` are by split."""

    n_layer: int
    splits: list[int]
    layers: list[int] = field(default_factory=list)  # whose targets are in the sums; empty: of all above the splits

    format: ClassVar[str] = "ridgefill sums"
    made_with: ClassVar[str] = "ridgefill-calibrate"

    @staticmethod
    def layout(fields: dict) -> Layout:
        lengths = {int(il): (n_k, n_v) for il, (n_k, n_v) in fields["kv_lengths"].items()}
        return Layout(fields["family"], fields["n_embd"], lengths)

    def widths(self, layout: Layout) -> dict[int, tuple[int, dict[int, int]]]:
        return {s: (layout.d_in(), {il: layout.d_out(il) for il in self.mapped(s)}) for s in self.splits}

    def empty_sums(self) -> list[Sums]:
        return [Sums(layout, self.splits, self.mapped(min(self.splits))) for layout in self.layouts]

    @property
    def kinds(self) -> list[str]:
        """Kinds that can be solved for."""
        return [kind for layout in self.layouts for kind in layout.kinds]

    def mapped(self, split: int) -> list[int]:
        """Layers whose targets are in the sums of `split`."""
        return [il for il in self.layers or range(self.n_layer) if il > split]

    def layer_names(self) -> str:
        """Of sums of some layers only: which."""
        return f"{self.layers[0]}-{self.layers[-1]}"


def differences(expected: dict[str, object], found: dict[str, object]) -> str:
    """Which settings differ, "" if none does."""
    names = [n for n in {**expected, **found} if expected.get(n) != found.get(n)]
    if len(names) > 1 and "tokens" in names:
        names.remove("tokens")  # they follow from the others
    return "; ".join(f"{n}: expected {expected.get(n)}, found {found.get(n)}" for n in names)


#
# reading and writing
#


def _arrays(sums) -> Iterator[tuple[str, np.ndarray]]:
    for part, split, m in sums.each():
        yield from _moments_arrays(f"{sums.layout.family}/{part}/{split}", m)


def _moments_arrays(prefix: str, m: Moments) -> Iterator[tuple[str, np.ndarray]]:
    yield f"{prefix}/n", np.array(m.n)
    for name in ("origin_x", "sum_x", "xx"):
        yield f"{prefix}/{name}", getattr(m, name)
    for name in ("origin_y", "sum_y", "xy", "yy"):
        for il, array in getattr(m, name).items():
            yield f"{prefix}/{name}.{il}", array


def _header_json(header: Header) -> str:
    return json.dumps({"format": header.format, "version": VERSION, **asdict(header)}, indent=1)


def _header_from_json(data: bytes) -> Header:
    from .mapper.sums import PairHeader  # which is built on this module

    kinds = {kind.format: kind for kind in (MapsHeader, PairHeader)}
    fields = json.loads(data)
    kind, version = kinds.get(fields.pop("format")), fields.pop("version")
    if kind is None or version != VERSION:
        raise ValueError(f"it is not of the format {' or '.join(map(repr, kinds))}, version {VERSION}")
    fields["fingerprints"] = {int(s): fp for s, fp in fields["fingerprints"].items()}
    fields["layouts"] = [kind.layout(x) for x in fields["layouts"]]
    return kind(**fields)


def _write(path: Path, header: Header, arrays: Iterator[tuple[str, np.ndarray]]) -> None:
    """Write beside the file, then rename. Whoever calls this holds the lock, so the name beside it is free."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as f:
            with zipfile.ZipFile(f, "w") as z:
                z.writestr(zipfile.ZipInfo(HEADER), _header_json(header))
                for name, array in arrays:
                    with z.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
            f.flush()
            os.fsync(f.fileno())
        os.replace(partial, path)
    except OSError as e:
        raise SumsError(f"sums could not be written to {path}: {e.strerror or e}") from e
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _damage_named(path: Path):
    try:
        yield
    except FileNotFoundError:
        raise SumsError(f"no such file of sums: {path}") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error, NotImplementedError) as e:
        raise SumsError(f"{path} is not a file of sums, or a damaged one: {e}") from e


class Reader:
    """A file of sums that is open for reading; use it in `with`.

    Raises SumsError when it is none, damaged (there or on reading on), or has no header of `kind`.
    """

    def __init__(self, path: str | os.PathLike, kind: type[Header] = Header):
        self.path = Path(path)
        with _damage_named(self.path):
            self._zip = zipfile.ZipFile(self.path)
            self.header = _header_from_json(self._zip.read(HEADER))
        if not isinstance(self.header, kind):
            self._zip.close()
            raise SumsError(f"{path}: expected sums of `{kind.made_with}`, found those of `{self.header.made_with}`")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._zip.close()

    def _array(self, name: str, shape: tuple[int, ...]) -> np.ndarray:
        with self._zip.open(f"{name}.npy") as member:
            array = np.lib.format.read_array(member, allow_pickle=False)
        if array.shape != shape or (shape and array.dtype != np.float64):
            raise ValueError(f"{name}: expected float64 {shape}, found {array.dtype} {array.shape}")
        return array

    def moments(self, layout, part: str, split: int) -> Moments:
        """The moments of one part of the text and one split."""
        prefix, (d_in, d_out) = f"{layout.family}/{part}/{split}", self.header.widths(layout)[split]
        with _damage_named(self.path):
            m = Moments(split, self._array(f"{prefix}/origin_x", (d_in,)), {})
            m.layers = list(d_out)
            m.n = int(self._array(f"{prefix}/n", ()))
            m.sum_x, m.xx = self._array(f"{prefix}/sum_x", (d_in,)), self._array(f"{prefix}/xx", (d_in, d_in))
            for name in ("origin_y", "sum_y", "yy"):
                setattr(m, name, {il: self._array(f"{prefix}/{name}.{il}", (n,)) for il, n in d_out.items()})
            m.xy = {il: self._array(f"{prefix}/xy.{il}", (d_in, n)) for il, n in d_out.items()}
        return m

    def sums(self) -> list:
        """All of it, by layout."""
        out = self.header.empty_sums()
        for s in out:
            splits = self.header.widths(s.layout)
            s.moments = {part: {split: self.moments(s.layout, part, split) for split in splits} for part in PARTS}
        return out


#
# one writer at a time
#


class Store:
    """The right to write one file of sums, until close(): two runs that write the same file would undo each other's work.

    Raises SumsError when another process holds it, or when its folder is missing or cannot be written.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self._lock_path = self.path.with_name(f".{self.path.name}.lock")
        if not self.path.absolute().parent.is_dir():
            raise SumsError(f"no such folder: {self.path.absolute().parent}")
        self._lock = self._take()

    def _take(self) -> int:
        while True:
            try:
                lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as e:
                raise SumsError(f"sums cannot be written to {self.path}: {e.strerror}") from e
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                raise SumsError(f"{self.path} is being written by another run; each run needs a file of its own") from None
            # whoever held it before us removed the file, perhaps after we had opened it: then we locked nothing
            if self._lock_path.exists() and os.path.samestat(os.fstat(lock), os.stat(self._lock_path)):
                return lock
            os.close(lock)

    def close(self) -> None:
        if self._lock is not None:
            self._lock_path.unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def write(self, header: Header, sums: Sequence) -> None:
        """Replace the file. Raises SumsError when it cannot be written; the one that was there stays."""
        _write(self.path, header, (pair for s in sums for pair in _arrays(s)))


#
# merging
#


def _check_shards(readers: list[Reader]) -> None:
    first = readers[0]
    for r in readers:
        if not r.header.finished:
            done, total = sum(r.header.done.values()), sum(r.header.total.values())
            raise SumsError(f"{r.path} is unfinished: {done} of {total} chunks; run its command again")
        if r.header.n_shards != first.header.n_shards:
            expected, found = first.header.n_shards, r.header.n_shards
            raise SumsError(f"{r.path}: expected a shard of {expected} as in {first.path}, found one of {found}")
        if found := differences(first.header.settings, r.header.settings):
            raise SumsError(f"{r.path} does not belong to {first.path}: {found}")
        if r.header.fingerprints != first.header.fingerprints:
            raise SumsError(f"{r.path} does not belong to {first.path}: they are for different model files")
    owners: dict[int, Path] = {}
    for r in readers:
        for shard in r.header.shards:
            if shard in owners:
                raise SumsError(f"shard {shard} of {r.header.n_shards} is in both {owners[shard]} and {r.path}")
            owners[shard] = r.path


def _total(headers: list[Header], which: Callable[[Header], dict[str, int]]) -> dict[str, int]:
    return {part: sum(which(h)[part] for h in headers) for part in PARTS}


def _merged_arrays(readers: list[Reader]) -> Iterator[tuple[str, np.ndarray]]:
    """One split after the other, so that merging takes the memory of two sets of moments."""
    for layout in readers[0].header.layouts:
        for part in PARTS:
            for split in readers[0].header.widths(layout):
                m = readers[0].moments(layout, part, split)
                for r in readers[1:]:
                    m.merge(r.moments(layout, part, split))
                yield from _moments_arrays(f"{layout.family}/{part}/{split}", m)


def merge(paths: Sequence[str | os.PathLike], out: str | os.PathLike, force: bool = False) -> Header:
    """Add the sums of shards of one calibration, in any order, and write them to `out`. Not all shards need to be there.

    Raises SumsError for files that do not belong together, unfinished ones and a shard that comes twice; OutputExists when
    `out` exists and `force` is not set.
    """
    if len(paths) < 2:
        raise SumsError(f"merge: expected at least two files of sums, found {len(paths)}")
    out = Path(out)
    if out.exists() and not force:
        raise OutputExists(f"{out} exists already; name another file or replace it with --force")
    with ExitStack() as stack:
        readers = sorted((stack.enter_context(Reader(p)) for p in paths), key=lambda r: r.header.shards[0])
        _check_shards(readers)
        headers = [r.header for r in readers]
        merged = replace(
            headers[0],
            shards=sorted(s for h in headers for s in h.shards),
            done=_total(headers, lambda h: h.done),
            total=_total(headers, lambda h: h.total),
        )
        with Store(out) as store:
            _write(store.path, merged, _merged_arrays(readers))
    return merged
