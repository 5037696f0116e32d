"""The sidecar of a mapper: the one place in Python that knows its keys (docs/MAPPER.md)."""

from __future__ import annotations

import filecmp
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from .. import gguf_bounds
from ..errors import SidecarError
from ..sidecar import MAP_TYPES, METADATA_HASH, Calibration, add_calibration, add_hashes, add_model, put, write_parts
from ..verify import N_TOP
from .models import PARTS, Side

FORMAT_VERSION = 1
ADAPTER = "kv_mapper"
ROLES = ("source", "target")
VERDICTS = ("use", "text", "mlp", "no")

_V = gguf.GGUFValueType
_U32, _U64, _F32, _STR, _BOOL = _V.UINT32, _V.UINT64, _V.FLOAT32, _V.STRING, _V.BOOL
# of attention.Rope; `adjacent` and `factors` are stored as `pairs` and, if there are any, `factors`
_ROPE = {
    "n_rot": ("dimension_count", _U32),
    "base": ("freq_base", _F32),
    "scaling": ("scaling_type", _STR),
    "factor": ("scaling_factor", _F32),
    "gain": ("attn_factor", _F32),
    "beta_fast": ("beta_fast", _F32),
    "beta_slow": ("beta_slow", _F32),
    "log_mul": ("log_multiplier", _F32),
    "n_ctx_orig": ("original_context", _U32),
}
_PAIRS = {True: "adjacent", False: "halves"}


@dataclass(frozen=True)
class Maps:
    """Maps of the keys, or of the values, of every target layer, and what they were chosen by. Scores are of held-out rows."""

    sources: list[list[int]]  # source layers by target layer, ascending
    lambdas: list[float]  # scale-free penalty by target layer
    r2_head: list[list[float]]  # by target layer and head, of the maps as written
    r2_single: np.ndarray  # of each source layer alone, averaged over heads, [target layers, source layers]
    tried: list[int]  # numbers of source layers
    r2_by_number: np.ndarray  # averaged over heads, [target layers, numbers tried]
    weights: list[np.ndarray]  # as sidecar.encode() returns them: float32, float16 or bytes of blocks
    biases: list[np.ndarray]  # float32 [d_out]

    @property
    def r2(self) -> list[float]:
        """By target layer, averaged over heads."""
        return [float(np.mean(heads)) for heads in self.r2_head]


@dataclass(frozen=True)
class Scores:
    """What score.py measures: lists run over target layers, arrays over their heads of K and V."""

    r2: dict[str, list[np.ndarray]]  # by part
    concentration: dict[str, list[np.ndarray]]
    cosine: list[np.ndarray]
    cosine_mean: list[np.ndarray]
    n_tokens: int  # rows judged
    n_documents: int
    sources: list[str]  # "name; licence"


@dataclass(frozen=True)
class Verdict:
    """What a mapper may be used for (verdict.py)."""

    word: str  # of VERDICTS
    reasons: list[str]


@dataclass(frozen=True)
class SelfTest:
    """A prompt, and what the target said behind its last rows when all but the first and last rows had been mapped."""

    tokens: list[int]
    tail: int  # last rows that the target ran
    file_types: list[int]  # of source and target
    top_tokens: np.ndarray  # likeliest tokens, likeliest first, [rows, N_TOP]
    top_logits: np.ndarray


@dataclass(frozen=True)
class Mapper:
    """Content of a sidecar. What is None was not measured."""

    source: Side
    target: Side
    previous: bool  # whether the row before is a feature too
    sink_rows: int  # first rows that were not fitted, and that the target should run
    tail: int  # last rows of a prompt that the target should run
    map_type: str  # of the weights, of sidecar.MAP_TYPES
    select: str  # how source layers were chosen, of solve.SELECTIONS
    calibration: Calibration
    maps: dict[str, Maps]  # by part, "k" and "v"
    r2_rotated: np.ndarray | None = None  # as Maps.r2_single, of keys as caches hold them
    scores: Scores | None = None
    verdict: Verdict | None = None
    selftest: SelfTest | None = None

    @property
    def sides(self) -> tuple[Side, Side]:
        """Source and target."""
        return self.source, self.target

    def weight(self, part: str, il: int) -> np.ndarray:
        """W [d_out, d_in] of target layer `il`, float64."""
        return gguf.quants.dequantize(self.maps[part].weights[il], MAP_TYPES[self.map_type]).astype(np.float64)

    def d_in(self, part: str, il: int) -> int:
        """Features of target layer `il`."""
        widths = self.source.widths(part)
        return (1 + self.previous) * sum(widths[s] for s in self.maps[part].sources[il])


#
# writing
#


def _add_side(w: gguf.GGUFWriter, role: str, side: Side) -> None:
    prefix = f"ridge.{role}"
    w.add_string(f"{prefix}.architecture", side.fingerprint["architecture"])
    _add_array(w, f"{prefix}.head_count_kv", side.heads, _U32)
    w.add_uint32(f"{prefix}.key_length", side.head_size["k"])
    w.add_uint32(f"{prefix}.value_length", side.head_size["v"])
    add_model(w, prefix, side.fingerprint)
    for field, (name, kind) in _ROPE.items():
        w.add_key_value(f"{prefix}.rope.{name}", side.rope[field], kind)
    w.add_string(f"{prefix}.rope.pairs", _PAIRS[side.rope["adjacent"]])
    if side.rope["factors"] is not None:
        _add_array(w, f"{prefix}.rope.factors", side.rope["factors"], _F32)


def _add_array(w: gguf.GGUFWriter, key: str, values, kind: gguf.GGUFValueType) -> None:
    w.add_key_value(key, [x.item() if isinstance(x, np.generic) else x for x in values], _V.ARRAY, kind)


def _add_metadata(w: gguf.GGUFWriter, m: Mapper, tensors: Mapping[str, np.ndarray]) -> None:
    w.add_type("adapter")
    w.add_string("adapter.type", ADAPTER)
    w.add_string("general.name", f"Mapper from {m.source.fingerprint['name']} to {m.target.fingerprint['name']}")
    w.add_uint32("ridge.format_version", FORMAT_VERSION)
    w.add_string("ridge.map_type", m.map_type)
    w.add_bool("ridge.previous_row", m.previous)
    w.add_uint32("ridge.sink_rows", m.sink_rows)
    w.add_uint32("ridge.tail", m.tail)
    w.add_string("ridge.select", m.select)
    for role, side in zip(ROLES, m.sides, strict=True):
        _add_side(w, role, side)
    for part, maps in m.maps.items():
        for name, values, kind in (
            ("n_sources", map(len, maps.sources), _U32),
            ("sources", (s for layers in maps.sources for s in layers), _U32),
            ("lambda", maps.lambdas, _F32),
            ("r2_head", (r2 for heads in maps.r2_head for r2 in heads), _F32),
            ("r2_single", maps.r2_single.ravel(), _F32),
            ("tried", maps.tried, _U32),
            ("r2_by_number", maps.r2_by_number.ravel(), _F32),
        ):
            _add_array(w, f"ridge.{part}.{name}", values, kind)
    if m.r2_rotated is not None:
        _add_array(w, "ridge.k_rotated.r2_single", m.r2_rotated.ravel(), _F32)
    _add_measured(w, m)
    add_hashes(w, tensors)
    add_calibration(w, m.calibration)
    if m.calibration.scored:
        _add_array(w, "ridge.calibration.score_sha256", m.calibration.scored, _STR)


def _add_measured(w: gguf.GGUFWriter, m: Mapper) -> None:
    if s := m.scores:
        for name, heads in (
            *((f"{part}.{name}", by_part[part]) for name, by_part in (("r2_head", s.r2), ("concentration", s.concentration)) for part in PARTS),
            ("cosine", s.cosine),
            ("cosine_mean", s.cosine_mean),
        ):
            _add_array(w, f"ridge.score.{name}", np.concatenate(heads), _F32)
        w.add_uint64("ridge.score.n_tokens", s.n_tokens)
        w.add_uint32("ridge.score.n_documents", s.n_documents)
        _add_array(w, "ridge.score.sources", s.sources, _STR)
    if m.verdict:
        w.add_string("ridge.verdict", m.verdict.word)
        _add_array(w, "ridge.verdict_reasons", m.verdict.reasons, _STR)
    if t := m.selftest:
        w.add_uint32("ridge.selftest.tail", t.tail)
        for name, values, kind in (
            ("tokens", t.tokens, _U32), ("file_types", t.file_types, _U32),
            ("top_tokens", t.top_tokens.ravel(), _U32), ("top_logits", t.top_logits.ravel(), _F32),
        ):  # fmt: skip
            _add_array(w, f"ridge.selftest.{name}", values, kind)


def write(path: str | os.PathLike, m: Mapper, force: bool = False, same_is_fine: bool = False) -> None:
    """Write a sidecar; with `same_is_fine` a file of the very bytes to be written is left alone.

    Raises OutputExists when the file exists and `force` is not set.
    """
    typed = {}
    for il in range(m.target.n_layer):
        for part, maps in m.maps.items():
            typed[f"blk.{il}.mapper.{part}.weight"] = (maps.weights[il], MAP_TYPES[m.map_type])
            typed[f"blk.{il}.mapper.{part}.bias"] = (np.ascontiguousarray(maps.biases[il], np.float32), None)
    tensors = {name: data for name, (data, _) in typed.items()}

    def fill(tmp: Path) -> None:
        write_parts(tmp, m.target.fingerprint["architecture"], lambda w: _add_metadata(w, m, tensors), typed)

    put(path, fill, force, (lambda a, b: filecmp.cmp(a, b, shallow=False)) if same_is_fine else None)


#
# reading
#


class _Keys:
    """The keys of a GGUF, each with the type it must have."""

    def __init__(self, fields: Mapping[str, gguf.ReaderField]):
        self._fields = fields

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def get(self, key: str, kind: gguf.GGUFValueType, length: int | None = None, default=None):
        """A value, or the list of an array of `length` (-1: any). Raises SidecarError naming what was expected and found."""
        if key not in self._fields:
            if default is not None:
                return default
            raise SidecarError(f"expected key {key!r}, found none")
        types = [kind] if length is None else [_V.ARRAY, kind]
        if (found := self._fields[key].types) != types and found != types[:1] * (length is not None):
            raise SidecarError(f"key {key!r}: expected {' of '.join(t.name for t in types)}, found {' of '.join(t.name for t in found)}")
        value = self._fields[key].contents()
        if length is not None and length >= 0 and len(value) != length:
            raise SidecarError(f"key {key!r}: expected {length} elements, found {len(value)}")
        if kind == _F32 and not np.isfinite(value).all():
            raise SidecarError(f"key {key!r}: expected finite numbers, found {value}")
        return value

    def one_of(self, key: str, choices) -> str:
        if (value := self.get(key, _STR)) not in choices:
            raise SidecarError(f"key {key!r}: expected one of {', '.join(choices)}, found {value!r}")
        return value


def _check_kind(keys: _Keys) -> None:
    kind, adapter = keys.get("general.type", _STR, default="none"), keys.get("adapter.type", _STR, default="none")
    if (kind, adapter) != ("adapter", ADAPTER):
        what = f"an adapter with adapter.type = {adapter!r}" if kind == "adapter" else f"a GGUF with general.type = {kind!r}"
        raise SidecarError(f"it is {what}, expected an adapter with adapter.type = {ADAPTER!r}")
    if (version := keys.get("ridge.format_version", _U32)) != FORMAT_VERSION:
        raise SidecarError(f"it has the format version {version}, expected {FORMAT_VERSION}")


def _check_metadata_hash(data: memoryview, extent: gguf_bounds.Extent, expected: str) -> None:
    header = bytearray(data[: extent.header_end])
    at = extent.values[METADATA_HASH] + 4 + 8  # type and length stand before the value
    header[at : at + len(expected)] = b"0" * len(expected)
    if (found := hashlib.sha256(header).hexdigest()) != expected:
        raise SidecarError(f"its metadata is damaged: sha256 {found[:12]}..., expected {expected[:12]}...")


def _side(keys: _Keys, role: str) -> Side:
    prefix = f"ridge.{role}"
    anchors = keys.get(f"{prefix}.anchors", _STR, -1)
    heads = keys.get(f"{prefix}.head_count_kv", _U32, -1)
    rope = {field: keys.get(f"{prefix}.rope.{name}", kind) for field, (name, kind) in _ROPE.items()}
    rope["adjacent"] = keys.one_of(f"{prefix}.rope.pairs", _PAIRS.values()) == _PAIRS[True]
    rope["factors"] = keys.get(f"{prefix}.rope.factors", _F32, rope["n_rot"] // 2, default=[]) or None
    side = Side(
        fingerprint={
            "architecture": keys.get(f"{prefix}.architecture", _STR),
            "block_count": len(heads),
            **{name: keys.get(f"{prefix}.{name}", _STR) for name in ("tokenizer_sha256", "hparams", "name")},
            "file_type": keys.get(f"{prefix}.file_type", _U32),
            "anchors": dict(zip(anchors, keys.get(f"{prefix}.anchors_sha256", _STR, len(anchors)), strict=True)),
        },
        heads=heads,
        head_size={"k": keys.get(f"{prefix}.key_length", _U32), "v": keys.get(f"{prefix}.value_length", _U32)},
        rope=rope,
    )
    n_rot = rope["n_rot"]
    if not heads or not all(heads) or not all(side.head_size.values()):
        raise SidecarError(f"{role}: expected layers with heads that are not empty, found {heads} heads of {side.head_size}")
    if n_rot % 2 or n_rot > side.head_size["k"]:
        raise SidecarError(f"{role}: expected an even number of rotated numbers up to {side.head_size['k']}, found {n_rot}")
    return side


def _maps(keys: _Keys, part: str, source: Side, target: Side) -> Maps:
    prefix, n = f"ridge.{part}", target.n_layer
    counts = keys.get(f"{prefix}.n_sources", _U32, n)
    sources = _parted(keys.get(f"{prefix}.sources", _U32, sum(counts)), counts)
    for il, layers in enumerate(sources):
        if not layers or layers != sorted(set(layers)) or layers[-1] >= source.n_layer:
            raise SidecarError(f"key '{prefix}.sources': expected ascending layers below {source.n_layer} for layer {il}, found {layers}")
    tried = keys.get(f"{prefix}.tried", _U32, -1)
    return Maps(
        sources=sources,
        lambdas=keys.get(f"{prefix}.lambda", _F32, n),
        r2_head=_parted(keys.get(f"{prefix}.r2_head", _F32, sum(target.heads)), target.heads),
        r2_single=np.reshape(keys.get(f"{prefix}.r2_single", _F32, n * source.n_layer), (n, -1)),
        tried=tried,
        r2_by_number=np.reshape(keys.get(f"{prefix}.r2_by_number", _F32, n * len(tried)), (n, -1)),
        weights=[],
        biases=[],
    )


def _measured(keys: _Keys, source: Side, target: Side) -> dict[str, object]:
    """Fields of Mapper that a file may lack."""
    n_heads, found = sum(target.heads), {}

    def by_head(name: str) -> list[np.ndarray]:
        return [np.array(heads) for heads in _parted(keys.get(f"ridge.score.{name}", _F32, n_heads), target.heads)]

    if "ridge.k_rotated.r2_single" in keys:
        single = keys.get("ridge.k_rotated.r2_single", _F32, target.n_layer * source.n_layer)
        found["r2_rotated"] = np.reshape(single, (target.n_layer, -1))
    if "ridge.score.n_tokens" in keys:
        found["scores"] = Scores(
            r2={part: by_head(f"{part}.r2_head") for part in PARTS},
            concentration={part: by_head(f"{part}.concentration") for part in PARTS},
            cosine=by_head("cosine"),
            cosine_mean=by_head("cosine_mean"),
            n_tokens=keys.get("ridge.score.n_tokens", _U64),
            n_documents=keys.get("ridge.score.n_documents", _U32),
            sources=keys.get("ridge.score.sources", _STR, -1),
        )
    if "ridge.verdict" in keys:
        found["verdict"] = Verdict(keys.one_of("ridge.verdict", VERDICTS), keys.get("ridge.verdict_reasons", _STR, -1))
    if "ridge.selftest.tokens" in keys:
        found["selftest"] = _selftest(keys)
    return found


def _selftest(keys: _Keys) -> SelfTest:
    prefix = "ridge.selftest."
    tokens, tail = keys.get(f"{prefix}tokens", _U32, -1), keys.get(f"{prefix}tail", _U32)
    top = keys.get(f"{prefix}top_tokens", _U32, -1)
    if not 0 < tail < len(tokens) - keys.get("ridge.sink_rows", _U32):
        raise SidecarError(f"key '{prefix}tail': expected less than the rows behind the sink rows of {len(tokens)} tokens, found {tail}")
    if not top or len(top) % N_TOP or len(top) // N_TOP > tail:
        raise SidecarError(f"key '{prefix}top_tokens': expected {N_TOP} for each of at most {tail} rows, found {len(top)}")
    logits = keys.get(f"{prefix}top_logits", _F32, len(top))
    return SelfTest(tokens, tail, keys.get(f"{prefix}file_types", _U32, 2), *(np.reshape(x, (-1, N_TOP)) for x in (top, logits)))


def _parted(values: list, lengths: list[int]) -> list[list]:
    ends = np.cumsum([0, *lengths])
    return [values[a:b] for a, b in zip(ends, ends[1:], strict=False)]


def _read_tensors(reader: gguf.GGUFReader, keys: _Keys, m: Mapper) -> None:
    """Put the tensors into `m`."""
    tensors = {t.name: t for t in reader.tensors}
    expected = [f"blk.{il}.mapper.{part}.{name}" for il in range(m.target.n_layer) for part in PARTS for name in ("weight", "bias")]
    if wrong := sorted(set(expected) ^ set(tensors)):
        raise SidecarError(f"tensor {wrong[0]}: {'expected it, found none' if wrong[0] in expected else 'expected no such tensor'}")
    hashes = dict(
        zip(keys.get("ridge.tensors", _STR, len(tensors)), keys.get("ridge.tensors_sha256", _STR, len(tensors)), strict=True)
    )
    for name in expected:
        _, il, _, part, what = name.split(".")
        t, d_out = tensors[name], m.target.widths(part)[int(il)]
        bias = what == "bias"
        shape, kind = ([d_out], gguf.GGMLQuantizationType.F32) if bias else ([m.d_in(part, int(il)), d_out], MAP_TYPES[m.map_type])
        found = [int(n) for n in t.shape]
        if (found, t.tensor_type) != (shape, kind):
            raise SidecarError(f"tensor {name}: expected {kind.name} {shape}, found {t.tensor_type.name} {found}")
        if (sha256 := hashlib.sha256(t.data.tobytes()).hexdigest()) != hashes.get(name):
            raise SidecarError(f"tensor {name} is damaged: sha256 {sha256[:12]}..., expected {hashes.get(name, 'none')[:12]}...")
        if not np.isfinite(gguf.quants.dequantize(t.data, t.tensor_type)).all():
            raise SidecarError(f"tensor {name}: expected finite numbers, found others")
        (m.maps[part].biases if bias else m.maps[part].weights).append(t.data)


def read(path: str | os.PathLike) -> Mapper:
    """A mapper whose bounds, keys, shapes, hashes and values were checked. Tensors stay on disk until they are used.

    Raises SidecarError naming what was expected and found.
    """
    path = Path(path)
    if not path.is_file():
        raise SidecarError(f"no such file: {path}")
    try:
        with open(path, "rb") as f:
            data = memoryview(np.memmap(f, np.uint8, "r") if path.stat().st_size else b"")
        extent = gguf_bounds.check(data)
        reader = gguf.GGUFReader(path)
        keys = _Keys(reader.fields)
        _check_kind(keys)
        _check_metadata_hash(data, extent, keys.get(METADATA_HASH, _STR))
        return _read(reader, keys)
    except SidecarError as e:
        raise SidecarError(f"{path}: {e}") from None


def _read(reader: gguf.GGUFReader, keys: _Keys) -> Mapper:
    source, target = (_side(keys, role) for role in ROLES)
    calibration = "ridge.calibration."
    mapper = Mapper(
        source=source,
        target=target,
        previous=keys.get("ridge.previous_row", _BOOL),
        sink_rows=keys.get("ridge.sink_rows", _U32),
        tail=keys.get("ridge.tail", _U32),
        map_type=keys.one_of("ridge.map_type", MAP_TYPES),
        select=keys.get("ridge.select", _STR),
        calibration=Calibration(
            sources=keys.get(calibration + "sources", _STR, -1),
            n_tokens=keys.get(calibration + "n_tokens", _U64),
            n_documents=keys.get(calibration + "n_documents", _U32),
            n_heldout_tokens=keys.get(calibration + "n_heldout_tokens", _U64),
            n_heldout_documents=keys.get(calibration + "n_heldout_documents", _U32),
            seed=keys.get(calibration + "seed", _U64),
            tool=keys.get(calibration + "tool", _STR),
            options=keys.get(calibration + "options", _STR, -1, default=[]),
            heldout=keys.get(calibration + "heldout_sha256", _STR, -1, default=[]),
            scored=keys.get(calibration + "score_sha256", _STR, -1, default=[]),
        ),
        maps={part: _maps(keys, part, source, target) for part in PARTS},
        **_measured(keys, source, target),
    )
    _read_tensors(reader, keys, mapper)
    return mapper
