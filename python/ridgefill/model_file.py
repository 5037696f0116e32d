"""Tensors and keys of a model's GGUF, read with gguf-py."""

from __future__ import annotations

import hashlib
import os

import gguf
import numpy as np

from .errors import RidgefillError


class ModelFile:
    """Fields and tensors of a GGUF by name, of all parts if it was split."""

    def __init__(self, path: str):
        first = gguf.GGUFReader(path)
        self.fields = first.fields
        self.paths = [path]
        n_parts = self.get("split.count", 1)
        if n_parts > 1:
            # the parts of a split model are named NAME-00001-of-00003.gguf
            stem = path.removesuffix(f"-00001-of-{n_parts:05d}.gguf")
            self.paths += [f"{stem}-{i + 1:05d}-of-{n_parts:05d}.gguf" for i in range(1, n_parts)]
        readers = [first, *(gguf.GGUFReader(p) for p in self.paths[1:])]
        self.tensors = {t.name: t for r in readers for t in r.tensors}

    def get(self, key: str, default=None):
        return self.fields[key].contents() if key in self.fields else default

    def tensor(self, name: str, rows: slice = slice(None)) -> np.ndarray | None:
        """Dequantised, float32, rows first; None when the file has none of this name."""
        if (t := self.tensors.get(name)) is None:
            return None
        try:
            return gguf.quants.dequantize(t.data[rows], t.tensor_type).astype(np.float32, copy=False)
        except NotImplementedError:
            what = f"{name}: type {t.tensor_type.name} cannot be read here"
            raise RidgefillError(f"{what}; calibrate with an F16 or Q8_0 file") from None

    def required(self, name: str) -> np.ndarray:
        if (value := self.tensor(name)) is None:
            raise RidgefillError(f"expected tensor {name} in the model file, found none")
        return value


def file_sha256(path: str | os.PathLike) -> str:
    """sha256 over the bytes of a model file, of all parts one after the other."""
    digest = hashlib.sha256()
    for part in ModelFile(os.fspath(path)).paths:
        with open(part, "rb") as f:
            while block := f.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def check_copy(copy: str | os.PathLike, original: str | os.PathLike) -> None:
    """Check that the weights of `copy` are those of `original`, only stored at higher precision.

    Equal means to 1e-5 of each value and of the largest in its row: dequantising rounds differently from one program to
    the next, and the finest quantisation moves values by a thousand times more.

    Raises RidgefillError naming the first tensor that differs.
    """
    a, b = ModelFile(os.fspath(copy)), ModelFile(os.fspath(original))
    for name in sorted(a.tensors.keys() ^ b.tensors.keys()):
        raise RidgefillError(f"{copy} is no copy of {original}: tensor {name} is in one of them only")
    for name in sorted(a.tensors):
        x, y = a.tensor(name), b.tensor(name)
        if x.shape != y.shape:
            raise RidgefillError(f"{copy} is no copy of {original}: {name} has shape {x.shape}, expected {y.shape}")
        if not (np.abs(x - y) <= 1e-5 * (np.abs(y) + np.abs(y).max(axis=-1, keepdims=True))).all():
            raise RidgefillError(f"{copy} is no copy of {original}: the values of {name} differ")
