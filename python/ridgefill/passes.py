"""Passes over the text: which layers' targets each of them sums, and the file that keeps its sums."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from .sums_file import Header, Reader, Store, SumsError, differences


@dataclass
class Pass:
    """One run over the text.

    `layers` are those whose targets are summed, `header` says for which of the splits below them and how much of the text is
    in the sums.
    """

    layers: list[int]
    header: Header
    store: Store | None  # of the file that keeps the sums

    @property
    def captured(self) -> list[int]:
        """Layers whose inputs are needed."""
        return sorted({*self.header.splits, *self.layers})

    def look_at_file(self, n_bytes: int) -> None:
        """Take over what the file of sums has done; if there is none, check that one of `n_bytes` has room.

        Raises SumsError when it is of something else or has no room.
        """
        if not self.store:
            return
        path = self.store.path
        if not path.exists():
            free = shutil.disk_usage(path.absolute().parent).free
            if free < n_bytes:
                raise SumsError(f"{path}: sums take {n_bytes:,} bytes, {free:,} are free there")
            return
        with Reader(path) as reader:
            found = reader.header
        mine, theirs = ({**h.settings, "shards": "all" if not h.missing else h.shard_names()} for h in (self.header, found))
        if differing := differences(mine, theirs):
            way_out = "name another file, or remove this one to begin anew"
            raise SumsError(f"{path} holds sums of something else: {differing}; {way_out}")
        self.header.done, self.header.n_shards, self.header.shards = found.done, found.n_shards, found.shards

    def begin(self) -> list:
        """Sums to add to: those on disk, or new ones."""
        if any(self.header.done.values()):
            with Reader(self.store.path) as reader:
                return reader.sums()
        return self.header.empty_sums()


def layer_groups(layers: range, n: int) -> list[list[int]]:
    """Layers of each pass, at most `n` (0: all), ascending."""
    return [list(layers[at : at + (n or len(layers))]) for at in range(0, len(layers), n or len(layers))]


def sums_path(sums: str, marks: list[str]) -> Path:
    """The file for a part of the sums: NAME.npz becomes NAME.MARK.npz."""
    path = Path(sums)
    return path.with_name(".".join([path.stem, *marks]) + path.suffix) if marks else path


class Saver:
    """Saves the sums from time to time: at most every `every` seconds, and never for more than a twentieth of the time."""

    def __init__(self, store: Store, header: Header, sums: list, every: float):
        self._store, self._header, self._sums, self._every = store, header, sums, every
        self._next = time.monotonic() + every

    def due(self) -> bool:
        return time.monotonic() >= self._next

    def save(self) -> None:
        began = time.monotonic()
        self._store.write(self._header, self._sums)
        took = time.monotonic() - began
        self._next = began + took + max(self._every, 20 * took if self._every else 0)
