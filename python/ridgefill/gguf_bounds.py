"""Whether a file is a GGUF whose parts all lie inside of it. gguf-py's reader does not check that, and is safe on one that passed.

Written for version 3, little-endian (the format's description in ggml's docs/gguf.md). Quantities of a damaged file are believed
only as far as its bytes reach.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import gguf

from .errors import SidecarError

ALIGNMENT = gguf.GGUF_DEFAULT_ALIGNMENT
_T = gguf.GGUFValueType
_SIZES = {_T.UINT8: 1, _T.INT8: 1, _T.UINT16: 2, _T.INT16: 2, _T.UINT32: 4, _T.INT32: 4, _T.FLOAT32: 4, _T.BOOL: 1,
          _T.UINT64: 8, _T.INT64: 8, _T.FLOAT64: 8}  # fmt: skip


@dataclass(frozen=True)
class Extent:
    """Where the parts of a GGUF lie."""

    header_end: int  # bytes before this are keys and tensor entries
    values: dict[str, int]  # by key, place of its value


class _Walk:
    """A place in the bytes of a file that moves forward and never leaves them."""

    def __init__(self, data: memoryview):
        self.data, self.at = data, 0

    def skip(self, n: int, what: str) -> int:
        """Pass n bytes; where they began."""
        left = len(self.data) - self.at
        if n > left:
            raise SidecarError(f"it is truncated or damaged: {what} needs {n:,} bytes, {left:,} are left at byte {self.at:,}")
        self.at += n
        return self.at - n

    def number(self, code: str, what: str) -> int:
        return struct.unpack_from("<" + code, self.data, self.skip(struct.calcsize(code), what))[0]

    def text(self, what: str) -> str:
        n = self.number("Q", f"the length of {what}")
        at = self.skip(n, what)
        try:
            return bytes(self.data[at : at + n]).decode()
        except UnicodeDecodeError:
            raise SidecarError(f"{what} is not UTF-8") from None

    def kind(self, what: str) -> gguf.GGUFValueType:
        number = self.number("I", f"the type of {what}")
        try:
            return _T(number)
        except ValueError:
            raise SidecarError(f"{what} has the unknown type {number}") from None

    def value(self, what: str) -> None:
        kind = self.kind(what)
        if kind != _T.ARRAY:
            return self._values(kind, 1, what)
        kind = self.kind(what)
        if kind == _T.ARRAY:
            raise SidecarError(f"{what} is an array of arrays")
        return self._values(kind, self.number("Q", f"the length of {what}"), what)

    def _values(self, kind: gguf.GGUFValueType, n: int, what: str) -> None:
        if kind != _T.STRING:
            self.skip(n * _SIZES[kind], what)
        elif 8 * n > len(self.data) - self.at:
            raise SidecarError(f"it is truncated or damaged: {what} has {n:,} strings, {len(self.data) - self.at:,} bytes are left")
        else:
            for _ in range(n):
                self.text(what)


def check(data: bytes | memoryview) -> Extent:
    """Raises SidecarError naming what is wrong: no GGUF, another version, keys or tensors that come twice, are of an unknown type,
    overlap or lie outside of the file.
    """
    walk = _Walk(memoryview(data))
    if bytes(data[:4]) != b"GGUF":
        raise SidecarError("it is empty" if not len(data) else "it is not a GGUF file")
    walk.skip(4, "the magic")
    if (version := walk.number("I", "the version")) != 3:
        raise SidecarError(f"expected GGUF version 3, little-endian, found {version}")
    n_tensors, n_keys = walk.number("Q", "the number of tensors"), walk.number("Q", "the number of keys")
    values: dict[str, int] = {}
    for _ in range(n_keys):
        key = walk.text("a key")
        if key in values:
            raise SidecarError(f"key {key!r} comes twice")
        values[key] = walk.at
        walk.value(f"key {key!r}")
    if "general.alignment" in values:
        raise SidecarError(f"expected the default alignment of {ALIGNMENT}, found key 'general.alignment'")
    extents = {}
    for _ in range(n_tensors):
        name = walk.text("the name of a tensor")
        if name in extents:
            raise SidecarError(f"tensor {name!r} comes twice")
        extents[name] = _tensor(walk, name)
    _check_data(extents, start=math.ceil(walk.at / ALIGNMENT) * ALIGNMENT, end=len(data))
    return Extent(walk.at, values)


def _tensor(walk: _Walk, name: str) -> tuple[int, int]:
    """Offset and bytes of a tensor's data."""
    what = f"tensor {name!r}"
    n_dims = walk.number("I", what)
    if not 1 <= n_dims <= 4:
        raise SidecarError(f"{what} has {n_dims} dimensions")
    shape = [walk.number("Q", what) for _ in range(n_dims)]
    number, offset = walk.number("I", what), walk.number("Q", what)
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        raise SidecarError(f"{what} has the unknown type {number}") from None
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if not all(shape) or shape[0] % block:
        raise SidecarError(f"{what} has the shape {shape}, which type {kind.name} cannot have")
    if offset % ALIGNMENT:
        raise SidecarError(f"{what} is misaligned: its data is at offset {offset:,}")
    return offset, math.prod(shape) // block * size


def _check_data(extents: dict[str, tuple[int, int]], start: int, end: int) -> None:
    last, last_name = 0, ""
    for name, (offset, size) in sorted(extents.items(), key=lambda item: item[1]):
        if offset < last:
            raise SidecarError(f"the data of tensors {last_name!r} and {name!r} overlap")
        last, last_name = offset + size, name
    if start + last > end:
        raise SidecarError(f"it is truncated: the data of tensor {last_name!r} ends at byte {start + last:,} of {end:,}")
