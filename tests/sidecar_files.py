"""Sidecars of ridge maps for tests: good ones, written with gguf-py, and damaged ones, made by surgery on the bytes.

A damaged sidecar is otherwise well-formed (its hashes are made anew), so that a reader can refuse it for one reason only.
"""
from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import gguf
import numpy as np

ALIGNMENT = 32
TYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "f16": gguf.GGMLQuantizationType.F16,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
}
BLOCKS = {name: gguf.GGML_QUANT_SIZES[kind] for name, kind in TYPES.items()}  # values and bytes of a block
KINDS = ("input", "input_lr", "kv", "kv_prev")
METADATA_SHA256 = "ridge.metadata_sha256"

U8, I8, U16, I16, U32, I32, F32, BOOL, STR, ARR, U64, I64, F64 = range(13)
_SCALARS = {U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q", I64: "<q", F64: "<d"}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


#
# a GGUF as raw parts
#


def encode(kind: int, value) -> bytes:
    """Bytes of one value of GGUF type `kind`."""
    if kind == STR:
        data = value.encode() if isinstance(value, str) else value
        return struct.pack("<Q", len(data)) + data
    return struct.pack(_SCALARS[kind], value)


@dataclass
class RawKv:
    key: str
    kind: int  # of the elements, if it is an array
    values: list
    is_array: bool = False

    def to_bytes(self) -> bytes:
        head = encode(STR, self.key) + struct.pack("<I", ARR if self.is_array else self.kind)
        if self.is_array:
            head += struct.pack("<IQ", self.kind, len(self.values))
        return head + b"".join(encode(self.kind, v) for v in self.values)


@dataclass
class RawTensor:
    name: str
    shape: list[int]  # ggml order
    kind: int
    data: bytes
    offset: int | None = None  # None: where it belongs


@dataclass
class RawGguf:
    """What a GGUF holds, in file order, with nothing checked: duplicates and nonsense can be written."""

    kvs: list[RawKv]
    tensors: list[RawTensor]
    version: int = 3
    fields: list[tuple[str, int, int]] = field(default_factory=list)  # name, offset and size of each field, if read

    def kv(self, key: str) -> RawKv:
        return next(kv for kv in self.kvs if kv.key == key)

    def tensor(self, name: str) -> RawTensor:
        return next(t for t in self.tensors if t.name == name)

    def set(self, key: str, value, kind: int | None = None) -> None:
        """Replace a value (or the values of an array), and its type if `kind` is given."""
        kv = self.kv(key)
        kv.values = list(value) if kv.is_array else [value]
        kv.kind = kv.kind if kind is None else kind

    def drop(self, key: str) -> None:
        self.kvs.remove(self.kv(key))

    def header(self) -> bytes:
        out = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.kvs))
        out += b"".join(kv.to_bytes() for kv in self.kvs)
        offset = 0
        for t in self.tensors:
            at = offset if t.offset is None else t.offset
            out += encode(STR, t.name) + struct.pack("<I", len(t.shape)) + struct.pack(f"<{len(t.shape)}Q", *t.shape)
            out += struct.pack("<IQ", t.kind, at)
            offset += len(_padded(t.data))
        return out

    def to_bytes(self) -> bytes:
        return _padded(self.header()) + b"".join(_padded(t.data) for t in self.tensors)

    def seal(self) -> RawGguf:
        """Make the tensor hashes anew, and the hash of the metadata if there is one."""
        self.set("ridge.tensors", [t.name for t in self.tensors])
        self.set("ridge.tensors_sha256", [sha256(t.data) for t in self.tensors])
        return self.seal_metadata()

    def seal_metadata(self) -> RawGguf:
        if any(kv.key == METADATA_SHA256 for kv in self.kvs):
            self.set(METADATA_SHA256, "0" * 64)
            self.set(METADATA_SHA256, sha256(self.header()))
        return self


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


class _Cursor:
    def __init__(self, data: bytes):
        self.data, self.pos, self.fields = data, 0, []

    def take(self, fmt: str, name: str):
        size = struct.calcsize(fmt)
        (v,) = struct.unpack_from(fmt, self.data, self.pos)
        self.fields.append((name, self.pos, size))
        self.pos += size
        return v

    def value(self, kind: int, name: str):
        if kind != STR:
            return self.take(_SCALARS[kind], name)
        n = self.take("<Q", f"{name} length")
        return self.take(f"{n}s", name)


def read_raw(data: bytes) -> RawGguf:
    """The parts of a good GGUF, and where each field of its header lies. Raises struct.error on a truncated one."""
    c = _Cursor(data)
    assert c.take("4s", "magic") == b"GGUF"
    version, n_tensors, n_kv = c.take("<I", "version"), c.take("<Q", "n_tensors"), c.take("<Q", "n_kv")
    kvs = []
    for i in range(n_kv):
        key = c.value(STR, f"kv {i} name").decode()
        kind = c.take("<I", f"{key} type")
        is_array = kind == ARR
        if is_array:
            kind = c.take("<I", f"{key} element type")
        n = c.take("<Q", f"{key} count") if is_array else 1
        kvs.append(RawKv(key, kind, [c.value(kind, f"{key} value") for _ in range(n)], is_array))
    infos = []
    for i in range(n_tensors):
        name = c.value(STR, f"tensor {i} name").decode()
        shape = [c.take("<Q", f"{name} dim") for _ in range(c.take("<I", f"{name} n_dims"))]
        infos.append((name, shape, c.take("<I", f"{name} type"), c.take("<Q", f"{name} offset")))
    begin = c.pos + -c.pos % ALIGNMENT
    tensors = []
    for name, shape, kind, offset in infos:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        n = int(np.prod(shape)) // block * size
        tensors.append(RawTensor(name, shape, kind, data[begin + offset : begin + offset + n]))
    return RawGguf(kvs, tensors, version, c.fields)


def tensor_spans(data: bytes) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and byte after the last of each tensor of a good GGUF."""
    raw = read_raw(data)
    at = len(_padded(raw.header()))
    for t in raw.tensors:
        yield t.name, at, at + len(t.data)
        at += len(_padded(t.data))


#
# good sidecars
#


def documented_keys(kind: str) -> dict[str, tuple[int, bool]]:
    """Key to (GGUF type, is array) of files of a kind, from the tables in docs/SIDECAR.md without those it calls optional."""
    text = (Path(__file__).resolve().parents[1] / "docs" / "SIDECAR.md").read_text()
    kinds = {"string": STR, "u32": U32, "u64": U64, "f32": F32}
    keys = {}
    rows = re.findall(r"^\| `((?:general|adapter|ridge)\.[a-z0-9_.]+)` \| (array )?(\w+)[^|]*\| *(.*?) *\|$", text, re.M)
    for key, array, of, content in rows:
        only = re.match(r"of kinds? ([a-z_`, ]+):", content)
        if not content.startswith("optional") and (only is None or f"`{kind}`" in only[1]):
            keys[key] = kinds[of], bool(array)
    return keys


def parts(kind: str) -> tuple[str, ...]:
    """Last parts of the names of a layer's tensors."""
    return ("down", "up", "bias") if kind == "input_lr" else ("weight", "bias")


def random_maps(
    n_layer: int, n_embd: int, split: int, seed: int = 0, kind: str = "input", kv_lengths: tuple[int, int] = (0, 0), rank: int = 32
) -> dict[int, tuple[np.ndarray, ...]]:
    """Per mapped layer A [d_out, d_in] and b [d_out], f32; of kind input_lr down [rank, d], up [d, rank] and b.

    Kinds input and input_lr: near the identity, as real maps are. The kv kinds: entries that give K and V of about unit
    variance.
    """
    rng = np.random.default_rng(seed)
    if kind == "input_lr":
        return {
            il: (
                (rng.standard_normal((rank, n_embd)) / np.sqrt(n_embd)).astype(np.float32),
                (0.3 * rng.standard_normal((n_embd, rank)) / np.sqrt(rank)).astype(np.float32),
                (0.01 * rng.standard_normal(n_embd)).astype(np.float32),
            )
            for il in range(split + 1, n_layer)
        }
    if kind != "input":
        d_in, d_out = n_embd * (2 if kind == "kv_prev" else 1), sum(kv_lengths)
        return {
            il: (
                (rng.standard_normal((d_out, d_in)) / np.sqrt(d_in)).astype(np.float32),
                (0.1 * rng.standard_normal(d_out)).astype(np.float32),
            )
            for il in range(split + 1, n_layer)
        }
    noise = 0.1 / np.sqrt(n_embd)
    return {
        il: (
            (np.eye(n_embd) + noise * rng.standard_normal((n_embd, n_embd))).astype(np.float32),
            (0.01 * rng.standard_normal(n_embd)).astype(np.float32),
        )
        for il in range(split + 1, n_layer)
    }


def write_sidecar(
    path: Path | str,
    *,
    arch: str,
    n_layer: int,
    n_embd: int,
    split: int,
    map_type: str,
    tokenizer_sha256: str,
    hparams: str,
    kind: str = "input",
    kv_lengths: tuple[int, int] = (0, 0),
    rank: int = 32,
    n_tail: int = 128,
    n_sink: int = 4,
    file_type: int = 0,
    name: str = "test maps",
    model_name: str = "test model",
    anchors: Mapping[str, str] | None = None,
    maps: Mapping[int, tuple[np.ndarray, ...]] | None = None,
    seed: int = 0,
    metadata_hash: bool = False,
) -> Path:
    """Write a good sidecar of format version 1 (docs/SIDECAR.md) and return its path.

    maps: per layer split+1..n_layer-1 as random_maps() has them, which makes the default. kv_lengths: of kinds kv and
    kv_prev, widths of K and V. rank: of kind input_lr.
    anchors: name to sha256 of the model's anchor tensors (default: one that fits no model). metadata_hash: add the optional hash of the header.
    """
    maps = random_maps(n_layer, n_embd, split, seed, kind, kv_lengths, rank) if maps is None else maps
    anchors = anchors or {"output_norm.weight": sha256(b"test model")}
    tensors = {}
    for il, arrays in sorted(maps.items()):
        for part, array in zip(parts(kind), arrays, strict=True):
            code = TYPES["f32" if part == "bias" else map_type]
            tensors[f"blk.{il}.ridge.{part}"] = (gguf.quants.quantize(array.astype(np.float32), code), code)

    w = gguf.GGUFWriter(path, arch)
    w.add_type("adapter")
    w.add_string("adapter.type", "ridge_maps")
    w.add_name(name)
    w.add_uint32("ridge.format_version", 1)
    w.add_string("ridge.kind", kind)
    w.add_uint32("ridge.split", split)
    w.add_uint32("ridge.block_count", n_layer)
    w.add_uint32("ridge.embedding_length", n_embd)
    w.add_uint32("ridge.sink_rows", n_sink)
    w.add_uint32("ridge.tail", n_tail)
    w.add_string("ridge.map_type", map_type)
    if kind == "input_lr":
        w.add_uint32("ridge.rank", rank)
    predicts_kv = kind in ("kv", "kv_prev")
    if predicts_kv:
        for part, n in zip("kv", kv_lengths, strict=True):
            w.add_key_value(f"ridge.{part}_length", [n] * len(maps), gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32)
    ends = ["_k", "_v"] if predicts_kv else [""]
    for end in ends:
        w.add_array(f"ridge.lambda{end}", [0.03] * len(maps))
    for end in ends:
        w.add_array(f"ridge.r2{end}", [0.9 - 0.01 * i for i in range(len(maps))])
    w.add_string("ridge.model.tokenizer_sha256", tokenizer_sha256)
    w.add_string("ridge.model.hparams", hparams)
    w.add_uint32("ridge.model.file_type", file_type)
    w.add_string("ridge.model.name", model_name)
    w.add_array("ridge.model.anchors", list(anchors))
    w.add_array("ridge.model.anchors_sha256", list(anchors.values()))
    w.add_array("ridge.tensors", list(tensors))
    w.add_array("ridge.tensors_sha256", [sha256(t.tobytes()) for t, _ in tensors.values()])
    w.add_array("ridge.calibration.sources", ["none: random maps of a test"])
    w.add_uint64("ridge.calibration.n_tokens", 1000)
    w.add_uint32("ridge.calibration.n_documents", 10)
    w.add_uint64("ridge.calibration.n_heldout_tokens", 100)
    w.add_uint32("ridge.calibration.n_heldout_documents", 2)
    w.add_uint64("ridge.calibration.seed", seed)
    w.add_string("ridge.calibration.tool", "tests/sidecar_files.py")
    if metadata_hash:
        w.add_string(METADATA_SHA256, "0" * 64)
    for key, (data, code) in tensors.items():
        w.add_tensor(key, data, raw_dtype=code)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    if metadata_hash:
        Path(path).write_bytes(read_raw(Path(path).read_bytes()).seal_metadata().to_bytes())
    return Path(path)


# the model that the examples are made for, as struct ggml_ridge_expect has it
N_LAYER, N_EMBD, SPLIT = 6, 64, 2
MODEL = {
    "architecture": "llama",
    "tokenizer_sha256": sha256(b"a tokenizer"),
    "hparams": "head_count=4;head_count_kv=2;key_length=16;feed_forward=8,8,8;vocab_size=300",
    "block_count": N_LAYER,
    "embedding_length": N_EMBD,
}


def write_example(path: Path | str, **changes) -> Path:
    """write_sidecar() for the example model."""
    made_for = dict(arch=MODEL["architecture"], n_layer=N_LAYER, n_embd=N_EMBD, split=SPLIT, map_type="f16")
    made_for |= {k: MODEL[k] for k in ("tokenizer_sha256", "hparams")}
    return write_sidecar(path, **{**made_for, **changes})


#
# damaged sidecars
#


def operated(good: bytes, surgery: Callable[[RawGguf], object], seal: bool = True) -> bytes:
    """A good sidecar after surgery on its parts, with right hashes unless seal is False."""
    raw = read_raw(good)
    surgery(raw)
    return (raw.seal() if seal else raw).to_bytes()


def write_lora(path: Path | str, *, arch: str, n_embd: int, rank: int = 4, scale: float = 0.0) -> Path:
    """A LoRA adapter for layer 0's query projection (square), random values of this scale."""
    r = np.random.default_rng(0)
    w = gguf.GGUFWriter(path, arch)
    w.add_type("adapter")
    w.add_string("adapter.type", "lora")
    w.add_float32("adapter.lora.alpha", float(rank))
    w.add_tensor("blk.0.attn_q.weight.lora_a", r.normal(0, scale, (rank, n_embd)).astype(np.float32))
    w.add_tensor("blk.0.attn_q.weight.lora_b", r.normal(0, scale, (n_embd, rank)).astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return Path(path)


def write_control_vector(path: Path | str, *, arch: str, n_embd: int) -> Path:
    """A control vector for layer 5, all zero."""
    w = gguf.GGUFWriter(path, "controlvector")
    w.add_string("controlvector.model_hint", arch)
    w.add_tensor("direction.5", np.zeros(n_embd, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return Path(path)


def wrong_architecture(raw: RawGguf) -> None:
    raw.set("general.architecture", "qwen3" if raw.kv("general.architecture").values[0] == b"llama" else "llama")


def wrong_width(raw: RawGguf) -> None:
    """32 columns and rows more, all zero."""
    d = raw.kv("ridge.embedding_length").values[0]
    raw.set("ridge.embedding_length", d + 32)
    for t in raw.tensors:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(t.kind)]
        row = d // block * size
        more = bytes(32 // block * size)
        t.data = b"".join(t.data[i : i + row] + more for i in range(0, len(t.data), row))
        if len(t.shape) == 2:
            t.data += 32 * bytes(row + len(more))
        t.shape = [d + 32] * len(t.shape)
    raw.seal()


def wrong_layer_count(raw: RawGguf) -> None:
    """One layer more, with the maps of the last."""
    n_layer = raw.kv("ridge.block_count").values[0]
    raw.set("ridge.block_count", n_layer + 1)
    for kv in raw.kvs:
        if kv.is_array and re.fullmatch(r"ridge\.(lambda|r2|k_length|v_length)(_[kv])?", kv.key):
            kv.values.append(kv.values[-1])
    last = f"blk.{n_layer - 1}."
    for t in [t for t in raw.tensors if t.name.startswith(last)]:
        raw.tensors.append(RawTensor(t.name.replace(last, f"blk.{n_layer}."), t.shape, t.kind, t.data))
    raw.seal()


def other_tokenizer(raw: RawGguf) -> None:
    raw.set("ridge.model.tokenizer_sha256", sha256(raw.kv("ridge.model.tokenizer_sha256").values[0]))


def nan_map(raw: RawGguf) -> None:
    """The first value of the last weight (the scale of its first block, if quantised) is NaN."""
    t = [t for t in raw.tensors if len(t.shape) == 2][-1]
    nan = struct.pack("<f", np.nan) if t.kind == TYPES["f32"] else struct.pack("<e", np.nan)
    t.data = nan + t.data[len(nan) :]
    raw.seal()


def duplicate_tensor(raw: RawGguf) -> None:
    raw.tensors.append(raw.tensors[0])


def unknown_version(raw: RawGguf) -> None:
    raw.set("ridge.format_version", 2)


_SURGERY: list[Callable[[RawGguf], None]] = [
    wrong_architecture,
    wrong_width,
    wrong_layer_count,
    other_tokenizer,
    nan_map,
    duplicate_tensor,
    unknown_version,
]


def damaged_variants(good_path: Path | str, out_dir: Path | str) -> dict[str, Path]:
    """Name to path of one sidecar per kind of damage, all made from a good one and written into out_dir."""
    good, out = Path(good_path).read_bytes(), Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    paths = {f.__name__: out / f"{f.__name__}.gguf" for f in _SURGERY}
    for f in _SURGERY:
        raw = read_raw(good)
        f(raw)
        paths[f.__name__].write_bytes(raw.seal_metadata().to_bytes())

    for name in ("truncated", "bit_flipped", "empty_file", "lora_file"):
        paths[name] = out / f"{name}.gguf"
    spans = list(tensor_spans(good))
    paths["truncated"].write_bytes(good[: sum(spans[-2][1:]) // 2])
    flipped = bytearray(good)
    flipped[sum(spans[0][1:]) // 2] ^= 0x10
    paths["bit_flipped"].write_bytes(flipped)
    paths["empty_file"].write_bytes(b"")
    raw = read_raw(good)
    write_lora(
        paths["lora_file"],
        arch=raw.kv("general.architecture").values[0].decode(),
        n_embd=raw.kv("ridge.embedding_length").values[0],
    )
    return paths
