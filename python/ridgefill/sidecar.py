"""The sidecar of ridge maps: the one place in Python that knows its keys (docs/SIDECAR.md)."""

from __future__ import annotations

import ctypes as ct
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

from . import __version__, native
from .errors import OutputExists, SidecarError

FORMAT_VERSION = 1
MAP_TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
# per kind, the parts of a map that have a lambda and a score of their own
PARTS = {"input": ("input",), "input_lr": ("input",), "kv": ("k", "v"), "kv_prev": ("k", "v")}
TOOL = f"ridgefill {__version__}"
METADATA_HASH = "ridge.metadata_sha256"

_U32, _U64, _F32, _STR = (getattr(gguf.GGUFValueType, t) for t in ("UINT32", "UINT64", "FLOAT32", "STRING"))
# What is measured of a file after it was written, and put into it with amend(): scores per mapped layer (score.py) ...
SCORES = ("r2_input", "r2_k", "r2_v", "norm_k", "norm_v", "attention")
SCORE_KEYS = {
    **{f"ridge.score.{name}": (_F32, True) for name in SCORES},
    "ridge.score.n_tokens": (_U64, False),
    "ridge.score.n_documents": (_U32, False),
    "ridge.score.sources": (_STR, True),
}
# ... and what a filled prompt gave (verify.py). Type of the value or of its elements, whether it is an array
SELFTEST_KEYS = {
    "ridge.selftest.tokens": (_U32, True),
    "ridge.selftest.tail": (_U32, False),
    "ridge.selftest.file_type": (_U32, False),
    "ridge.selftest.top_tokens": (_U32, True),
    "ridge.selftest.top_logits": (_F32, True),
}
_MEASURED = {**SCORE_KEYS, **SELFTEST_KEYS}


@dataclass(frozen=True)
class Calibration:
    """The record of what the maps were fitted on."""

    sources: list[str]  # "name; licence"
    n_tokens: int  # rows fitted
    n_documents: int
    n_heldout_tokens: int
    n_heldout_documents: int
    seed: int
    tool: str = TOOL
    options: list[str] = field(default_factory=list)  # "name=value" of each that is not at its default
    heldout: list[str] = field(default_factory=list)  # text.Document.sha256 of each document held out
    scored: list[str] = field(default_factory=list)  # of each document kept for scores alone


@dataclass(frozen=True)
class Sidecar:
    """Content of a sidecar before it is written. Lists run over the mapped layers S+1..L-1."""

    fingerprint: dict  # of the model, lib.Model.fingerprint(split)
    split: int
    sink_rows: int
    tail: int
    map_type: str
    lambdas: dict[str, list[float]]  # by part: "input" of kind input, "k" and "v" of the kv kinds
    r2: dict[str, list[float]]
    # by name, "weight" or, of kind input_lr, "down" and "up", as encode() returns them: float32, float16 or bytes of blocks
    weights: list[dict[str, np.ndarray]]
    biases: list[np.ndarray]  # float32 [d_out]
    calibration: Calibration
    name: str = ""
    kind: str = "input"
    kv_lengths: list[tuple[int, int]] = field(default_factory=list)  # the kv kinds: widths of K and V
    prev_share: float = 1.0  # kv_prev: weight of the regression with the row before in K


def score_key(name: str, part: str) -> str:
    """Key, without the `ridge.`, of "lambda" or "r2" of a part of a map."""
    return name if part == "input" else f"{name}_{part}"


def check_block(map_type: str, what: str, n: int) -> None:
    """Raises SidecarError when rows of `n` numbers, the `what` of a map, are no whole number of blocks of a map type."""
    block = gguf.GGML_QUANT_SIZES[MAP_TYPES[map_type]][0]
    if n % block:
        raise SidecarError(f"map type {map_type} needs a {what} that is a multiple of {block}, found {n}; use f16")


def encode(weight: np.ndarray, map_type: str) -> tuple[np.ndarray, np.ndarray]:
    """A weight as it is stored, and the float64 matrix that a reader gets back.

    Raises SidecarError when the type cannot hold it: a width that is no multiple of a block, a value out of range.
    """
    kind = MAP_TYPES[map_type]
    check_block(map_type, "width", weight.shape[1])
    with np.errstate(over="ignore"):
        stored = gguf.quants.quantize(np.ascontiguousarray(weight, np.float32), kind)
    back = gguf.quants.dequantize(stored, kind).astype(np.float64)
    if not np.isfinite(back).all():
        raise SidecarError(f"map type {map_type} cannot hold a weight of magnitude {np.abs(weight).max():.3g}; use f32")
    return stored, back


def low_rank(up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """The weight [d, d] of a map of kind input_lr with these factors [d, rank] and [rank, d]."""
    return np.eye(len(up)) + up @ down


def _add_metadata(w: gguf.GGUFWriter, s: Sidecar, tensors: dict[str, np.ndarray]) -> None:
    fp, c = s.fingerprint, s.calibration
    w.add_type("adapter")
    w.add_string("adapter.type", "ridge_maps")
    kind = "" if s.kind == "input" else f", kind {s.kind}"
    w.add_string("general.name", s.name or f"Ridge maps for {fp['name']}, split {s.split}{kind}")
    w.add_uint32("ridge.format_version", FORMAT_VERSION)
    w.add_string("ridge.kind", s.kind)
    w.add_uint32("ridge.split", s.split)
    w.add_uint32("ridge.block_count", fp["block_count"])
    w.add_uint32("ridge.embedding_length", fp["embedding_length"])
    w.add_uint32("ridge.sink_rows", s.sink_rows)
    w.add_uint32("ridge.tail", s.tail)
    w.add_string("ridge.map_type", s.map_type)
    if s.kind == "input_lr":
        w.add_uint32("ridge.rank", len(s.weights[0]["down"]))
    if s.kv_lengths:
        for part, lengths in zip("kv", zip(*s.kv_lengths, strict=True), strict=True):
            # add_array() would write i32
            w.add_key_value(f"ridge.{part}_length", list(lengths), gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32)
    if s.kind == "kv_prev" and s.prev_share < 1:
        w.add_float32("ridge.prev_share", s.prev_share)
    for name, values in (("lambda", s.lambdas), ("r2", s.r2)):
        for part in PARTS[s.kind]:
            w.add_array(f"ridge.{score_key(name, part)}", [float(x) for x in values[part]])
    add_model(w, "ridge.model", fp)
    add_hashes(w, tensors)
    add_calibration(w, c)


def add_model(w: gguf.GGUFWriter, prefix: str, fp: dict) -> None:
    """The fingerprint of a model (lib.Model.fingerprint()), but for architecture and sizes."""
    w.add_string(f"{prefix}.tokenizer_sha256", fp["tokenizer_sha256"])
    w.add_string(f"{prefix}.hparams", fp["hparams"])
    w.add_uint32(f"{prefix}.file_type", fp["file_type"] % 2**32)  # -1: the model does not say
    w.add_string(f"{prefix}.name", fp["name"])
    w.add_array(f"{prefix}.anchors", list(fp["anchors"]))
    w.add_array(f"{prefix}.anchors_sha256", list(fp["anchors"].values()))


def add_hashes(w: gguf.GGUFWriter, tensors: Mapping[str, np.ndarray]) -> None:
    """Names and hashes of the tensors, data as stored."""
    w.add_array("ridge.tensors", list(tensors))
    w.add_array("ridge.tensors_sha256", [hashlib.sha256(t.tobytes()).hexdigest() for t in tensors.values()])


def add_calibration(w: gguf.GGUFWriter, c: Calibration) -> None:
    w.add_array("ridge.calibration.sources", c.sources)
    w.add_uint64("ridge.calibration.n_tokens", c.n_tokens)
    w.add_uint32("ridge.calibration.n_documents", c.n_documents)
    w.add_uint64("ridge.calibration.n_heldout_tokens", c.n_heldout_tokens)
    w.add_uint32("ridge.calibration.n_heldout_documents", c.n_heldout_documents)
    w.add_uint64("ridge.calibration.seed", c.seed)
    w.add_string("ridge.calibration.tool", c.tool)
    if c.options:
        w.add_array("ridge.calibration.options", c.options)
    if c.heldout:
        w.add_array("ridge.calibration.heldout_sha256", c.heldout)


def _write_gguf(path: Path, s: Sidecar) -> None:
    tensors: dict[str, np.ndarray] = {}
    for il, weights, bias in zip(range(s.split + 1, s.fingerprint["block_count"]), s.weights, s.biases, strict=True):
        tensors |= {f"blk.{il}.ridge.{name}": data for name, data in weights.items()}
        tensors[f"blk.{il}.ridge.bias"] = np.ascontiguousarray(bias, np.float32)
    typed = {name: (data, None if name.endswith("bias") else MAP_TYPES[s.map_type]) for name, data in tensors.items()}
    write_parts(path, s.fingerprint["architecture"], lambda w: _add_metadata(w, s, tensors), typed)


def write_parts(
    path: Path,
    architecture: str,
    add_metadata: Callable[[gguf.GGUFWriter], None],
    tensors: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType | None]],
) -> None:
    """A GGUF of metadata, its hash as the last key, and tensors: data as stored and its type (None: that of the array)."""
    w = gguf.GGUFWriter(path, architecture)
    add_metadata(w)
    w.add_string(METADATA_HASH, "0" * 64)
    for name, (data, kind) in tensors.items():
        w.add_tensor(name, data, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    # the tensor infos follow: name with its length, number of dimensions, dimensions, type, offset
    header_end = w.fout[0].tell() + sum(8 + len(name) + 4 + 8 * data.ndim + 4 + 8 for name, (data, _) in tensors.items())
    w.write_tensors_to_file()
    w.close()
    _seal(path, header_end)


def _seal(path: Path, header_end: int) -> None:
    """Put the hash of all bytes before the tensor data, taken with zeros in its own place, into that place."""
    with open(path, "r+b") as f:
        header = f.read(header_end)
        key = header.index(METADATA_HASH.encode())
        at = key + len(METADATA_HASH) + 4 + 8  # type and length stand before the value
        assert header[at : at + 64] == b"0" * 64
        f.seek(at)
        f.write(hashlib.sha256(header).hexdigest().encode())


class UnwritableError(SidecarError):
    """A sidecar cannot be written where it should."""

    exit_code = 10


def check_writable(path: str | os.PathLike, force: bool) -> None:
    """Raises OutputExists when `path` exists and `force` is not set, UnwritableError when its folder is missing or read-only."""
    path = Path(path)
    if path.exists() and not force:
        raise OutputExists(f"{path} exists already; name another file or replace it with --force")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UnwritableError(f"no such folder: {folder}")
    if not os.access(folder, os.W_OK):
        raise UnwritableError(f"{folder}: no files can be written there")


@contextmanager
def in_place_of(path: Path) -> Iterator[Path]:
    """A file in the same folder to write to, for the caller to put in the place of `path`; removed if it is still there."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
    os.close(handle)
    tmp = Path(name)
    try:
        umask = os.umask(0)
        os.umask(umask)
        tmp.chmod(0o666 & ~umask)
        yield tmp
    finally:
        tmp.unlink(missing_ok=True)


def put(
    path: str | os.PathLike, fill: Callable[[Path], None], force: bool, same: Callable[[Path, Path], bool] | None = None
) -> None:
    """Let `fill` write under another name in the same folder, then rename it: readers see all of it or nothing.

    A file that exists already is left alone if it is the `same` as the new one.

    Raises OutputExists when the file exists and `force` is not set.
    """
    check_writable(path, force or same is not None)
    path = Path(path)
    with in_place_of(path) as tmp:
        fill(tmp)
        if same and path.is_file() and same(tmp, path):
            return
        check_writable(path, force)  # writing takes time: another process may have made the file meanwhile
        tmp.replace(path)


def write(path: str | os.PathLike, s: Sidecar, force: bool = False, same_is_fine: bool = False) -> None:
    """Write a sidecar; with `same_is_fine` one that exists already is left alone if it differs in what amend() adds at most.

    Raises OutputExists when the file exists and `force` is not set.
    """
    put(path, lambda tmp: _write_gguf(tmp, s), force, _same_maps if same_is_fine else None)


def _same_maps(mine: Path, other: Path) -> bool:
    """Whether two files have the same keys, the hashes of their tensors among them, but for what amend() adds."""
    try:
        _check_with_library(other)
    except SidecarError:
        return False

    def content(path: Path) -> dict:
        fields = gguf.GGUFReader(path).fields.items()
        return {k: f.contents() for k, f in fields if k not in _MEASURED and k != METADATA_HASH and not k.startswith("GGUF.")}

    return content(mine) == content(other)


def amend(path: str | os.PathLike, measured: Mapping[str, object]) -> None:
    """Put keys of SCORE_KEYS or SELFTEST_KEYS, all of a group at a time, into a file in place of those of the same group.

    Its other keys and its maps stay what they are, byte for byte. Raises SidecarError for a file that is none.
    """
    path = Path(path)
    _check_with_library(path)
    reader = gguf.GGUFReader(path)
    gone = {METADATA_HASH, "general.architecture"}  # written by themselves
    for group in (SCORE_KEYS, SELFTEST_KEYS):
        gone |= group.keys() if group.keys() & measured.keys() else set()

    def add_metadata(w: gguf.GGUFWriter) -> None:
        for name, f in reader.fields.items():
            if name not in gone and not name.startswith("GGUF."):
                w.add_key_value(name, f.contents(), f.types[0], f.types[-1] if len(f.types) > 1 else None)
        for name, (kind, is_array) in _MEASURED.items():
            if name in measured:
                w.add_key_value(name, measured[name], gguf.GGUFValueType.ARRAY if is_array else kind, kind if is_array else None)

    check_writable(path, force=True)
    with in_place_of(path) as tmp:
        tensors = {t.name: (t.data, t.tensor_type) for t in reader.tensors}
        write_parts(tmp, reader.fields["general.architecture"].contents(), add_metadata, tensors)
        tmp.replace(path)


def _check_with_library(path: Path) -> str:
    """Run the library's strict reader; returns the sha256 of the file. Raises SidecarError with the reader's message."""
    err = ct.create_string_buffer(1024)
    sc = native.ggml_ridge("ggml_ridge_sidecar_load")(os.fsencode(path), None, err, len(err))
    if not sc:
        raise SidecarError(err.value.decode("utf-8", "replace"))
    try:
        return native.ggml_ridge("ggml_ridge_sidecar_hash")(sc).decode()
    finally:
        native.ggml_ridge("ggml_ridge_sidecar_free")(sc)


def inspect(path: str | os.PathLike) -> dict:
    """What a sidecar says of itself: its keys without the tensor lists, `tensors` {name: [type, shape]}, `size`, `sha256`.

    The library's strict reader checks the file first: gguf-py's does not check bounds and is not used on a file that failed.

    Raises SidecarError with that reader's message, RidgeError when the library is missing.
    """
    path = Path(path)
    if not path.is_file():
        raise SidecarError(f"no such file: {path}")
    sha256 = _check_with_library(path)
    reader = gguf.GGUFReader(path)
    keys = {name: f.contents() for name, f in reader.fields.items() if not name.startswith(("GGUF.", "ridge.tensors"))}
    tensors = {t.name: [t.tensor_type.name.lower(), [int(n) for n in t.shape]] for t in reader.tensors}
    return {"path": str(path), "size": path.stat().st_size, "sha256": sha256, "keys": keys, "tensors": tensors}


def scores(keys: dict) -> list[dict]:
    """Per mapped layer of a file with these keys (`inspect`): layer, lambda and r2, or lambda_k, r2_k, lambda_v, r2_v."""
    names = [score_key(name, part) for part in PARTS[keys["ridge.kind"]] for name in ("lambda", "r2")]
    layers = range(keys["ridge.split"] + 1, keys["ridge.block_count"])
    return [{"layer": il, **{name: keys[f"ridge.{name}"][i] for name in names}} for i, il in enumerate(layers)]


def measured_scores(keys: dict) -> list[dict]:
    """Per mapped layer of a file with these keys: layer and its scores of SCORES. Empty when it was not scored."""
    names = [name for name in SCORES if f"ridge.score.{name}" in keys]
    layers = range(keys["ridge.split"] + 1, keys["ridge.block_count"]) if names else ()
    return [{"layer": il, **{name: keys[f"ridge.score.{name}"][i] for name in names}} for i, il in enumerate(layers)]


def maps(path: str | os.PathLike, dtype: type = np.float64) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Weight [d_out, d_in] and bias [d_out] by layer, of a file that inspect() accepts.

    The weight of kind input_lr is the whole map, the identity included.
    """
    inspect(path)
    layers: dict[int, dict[str, np.ndarray]] = {}
    for t in gguf.GGUFReader(path).tensors:
        _, il, _, part = t.name.split(".")
        layers.setdefault(int(il), {})[part] = gguf.quants.dequantize(t.data, t.tensor_type).astype(dtype)
    whole = {il: m["weight"] if "weight" in m else low_rank(m["up"], m["down"]).astype(dtype) for il, m in sorted(layers.items())}
    return {il: (weight, layers[il]["bias"]) for il, weight in whole.items()}
