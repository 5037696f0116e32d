"""The sidecar reader of ggml-ridge: good files load with the right values, everything else is refused in one clear line."""
from __future__ import annotations

import ctypes
import hashlib
import math
import re
import resource
import shutil
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

import sidecar_files as sf
from ridgefill import sidecar
from ridge_native import ROOT, Refused, Sidecar, library, refusal, ridge
from sidecar_files import MODEL, N_EMBD, N_LAYER, SPLIT

ANCHORS = {"output_norm.weight": sf.sha256(b"1"), "blk.0.attn_norm.weight": sf.sha256(b"2")}


def write(path: Path, **changes) -> Path:
    return sf.write_example(path, **{"map_type": "f16", "anchors": ANCHORS, **changes})


@pytest.fixture(scope="module", params=list(sf.TYPES))
def good(request, tmp_path_factory) -> Path:
    """A good sidecar of each map type."""
    return write(tmp_path_factory.mktemp("good") / f"{request.param}.gguf", map_type=request.param)


@pytest.fixture(scope="module")
def good_f16(tmp_path_factory) -> bytes:
    return write(tmp_path_factory.mktemp("good") / "f16.gguf").read_bytes()


def refusal_of(data: bytes, tmp_path: Path, expect: dict | None = MODEL) -> str:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    return refusal(path, expect)


#
# good files
#


def test_good_sidecar_of_every_map_type_loads_with_right_values(good):
    maps = sf.random_maps(N_LAYER, N_EMBD, SPLIT)
    kind = sf.TYPES[good.stem]
    with Sidecar(good, MODEL) as s:
        got = {k: s.get(k) for k in ("kind", "split", "n_layer", "n_embd", "n_tail", "n_sink", "file_type")}
        assert got == dict(kind="input", split=SPLIT, n_layer=N_LAYER, n_embd=N_EMBD, n_tail=128, n_sink=4, file_type=0)
        assert s.get("hash") == hashlib.sha256(good.read_bytes()).hexdigest()
        assert s.anchors() == ANCHORS
        assert s.str("ridge.model.hparams") == MODEL["hparams"]
        assert s.str("general.name") == "test maps"
        assert s.str("ridge.split") is None and s.str("no.such.key") is None
        for il, (a, b) in maps.items():
            assert s.tensor("weight", il) == (kind, (N_EMBD, N_EMBD), gguf.quants.quantize(a, kind).tobytes())
            assert s.tensor("bias", il) == (sf.TYPES["f32"], (N_EMBD, 1), b.tobytes())
        for il in (-1, 0, SPLIT, N_LAYER, 2**31 - 1):
            assert s.tensor("weight", il) is None and s.tensor("bias", il) is None


def test_rows_of_a_weight_are_rows_of_the_map_so_that_mul_mat_gives_a_x(tmp_path):
    a = np.arange(32 * 32, dtype=np.float32).reshape(32, 32)
    path = write(tmp_path / "x.gguf", map_type="f32", n_embd=32, maps={il: (a, a[0]) for il in range(3, 6)})
    with Sidecar(path) as s:
        _, (ne0, _), data = s.tensor("weight", 3)
        assert np.frombuffer(data[: 4 * ne0], np.float32).tolist() == a[0].tolist()


def test_good_sidecar_loads_without_a_model_to_check_against(good):
    Sidecar(good).__exit__()


def test_shallowest_and_deepest_split_load(tmp_path):
    for split in (1, N_LAYER - 2):
        with Sidecar(write(tmp_path / f"{split}.gguf", split=split), MODEL) as s:
            assert s.get("split") == split
            assert s.tensor("weight", split) is None and s.tensor("weight", split + 1) is not None


def test_width_that_needs_padding_between_tensors_loads(tmp_path):
    path = write(tmp_path / "x.gguf", map_type="f16", n_embd=33)
    with Sidecar(path) as s:
        maps = sf.random_maps(N_LAYER, 33, SPLIT)
        for il, (a, b) in maps.items():
            assert s.tensor("weight", il)[2] == a.astype(np.float16).tobytes()
            assert s.tensor("bias", il)[2] == b.tobytes()


def test_unknown_model_file_type_is_minus_one(tmp_path):
    with Sidecar(write(tmp_path / "x.gguf", file_type=2**32 - 1)) as s:
        assert s.get("file_type") == -1


def test_text_in_any_language_is_kept(tmp_path):
    with Sidecar(write(tmp_path / "x.gguf", name="Кот über 猫 🐈")) as s:
        assert s.str("general.name") == "Кот über 猫 🐈"


def test_keys_that_the_format_does_not_know_are_ignored(good_f16, tmp_path):
    raw = sf.read_raw(good_f16)
    raw.kvs += [sf.RawKv("general.license", sf.STR, ["MIT"]), sf.RawKv("other.flags", sf.BOOL, [1, 0], is_array=True)]
    (tmp_path / "x.gguf").write_bytes(raw.to_bytes())
    Sidecar(tmp_path / "x.gguf", MODEL).__exit__()


def test_loaded_maps_do_not_change_when_the_file_is_overwritten_in_place(good, tmp_path):
    path = shutil.copy(good, tmp_path / "x.gguf")
    with Sidecar(path, MODEL) as s:
        before, size = s.tensor("weight", N_LAYER - 1), path.stat().st_size
        with open(path, "r+b") as f:
            f.write(bytes(size))
        assert s.tensor("weight", N_LAYER - 1) == before


def test_sidecar_replaced_under_the_same_name_has_another_hash(tmp_path):
    hashes = set()
    for seed in (0, 1):
        with Sidecar(write(tmp_path / "x.gguf", seed=seed)) as s:
            hashes.add(s.get("hash"))
    assert len(hashes) == 2


@pytest.mark.parametrize("data", [b"", b"abc", bytes(range(256)) * 1000])
def test_sha256_equals_pythons(data):
    hex_digits = ctypes.create_string_buffer(65)
    ridge("sha256")(data, len(data), hex_digits)
    assert hex_digits.value.decode() == hashlib.sha256(data).hexdigest()


#
# files of another kind
#


def _gguf_of(path: Path, arch: str, **strings: str) -> Path:
    w = gguf.GGUFWriter(path, arch)
    for key, value in strings.items():
        w.add_string(key.replace("_", "."), value)
    w.add_tensor("x.weight", np.zeros((4, 32), np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


OURS = "expected an adapter with adapter.type = 'ridge_maps'"


@pytest.mark.parametrize(
    "make, expected",
    [
        (lambda p: p.write_bytes(b""), "the file is empty, expected a GGUF"),
        (lambda p: p.write_text("# Notes\n\nnot a sidecar\n"), "it is a text file, expected a GGUF (its first bytes are '# No')"),
        (lambda p: p.write_text("un café\n"), "it is a text file, expected a GGUF (its first bytes are 'un c')"),
        (lambda p: p.write_bytes(b"PK\x03\x04" + bytes(60)), r"it is not a GGUF, expected a GGUF (its first bytes are 'PK\x03\x04')"),
        (lambda p: sf.write_lora(p, arch="llama", n_embd=N_EMBD), f"it is a LoRA adapter, {OURS}"),
        (lambda p: _gguf_of(p, "llama", general_type="model"), f"it is a model of architecture 'llama', {OURS}"),
        (lambda p: _gguf_of(p, "qwen3"), f"it is a model of architecture 'qwen3', {OURS}"),
        (lambda p: _gguf_of(p, "controlvector"), f"it is a control vector, {OURS}"),
        (lambda p: _gguf_of(p, "llama", general_type="imatrix"), f"it is a GGUF with general.type = 'imatrix', {OURS}"),
        (
            lambda p: _gguf_of(p, "llama", general_type="adapter", adapter_type="kv mapper"),
            f"it is an adapter with adapter.type = 'kv mapper', {OURS}",
        ),
        (lambda p: gguf.GGUFWriter(p, "x").open_output_file(), "the file is empty, expected a GGUF"),
        (lambda p: p.mkdir(), "it is a directory, expected a file"),
        (lambda p: None, "there is no such file"),
    ],
    ids="empty text accents zip lora model old-model control-vector imatrix other-adapter unwritten directory missing".split(),
)
def test_file_of_another_kind_is_named_as_what_it_is(make, expected, tmp_path):
    make(tmp_path / "x.gguf")
    assert refusal(tmp_path / "x.gguf") == expected


def test_device_is_refused_without_reading_it():
    assert refusal("/dev/zero") == "it is not a regular file"


def test_big_endian_gguf_is_named_as_one(tmp_path):
    w = gguf.GGUFWriter(tmp_path / "x.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    w.add_type("adapter")
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    assert refusal(tmp_path / "x.gguf") == "it is a big-endian GGUF, expected a little-endian one"


def test_huge_model_by_mistake_is_named_without_being_read(tmp_path):
    path = _gguf_of(tmp_path / "x.gguf", "llama", general_type="model")
    with open(path, "r+b") as f:
        f.truncate(40 << 30)  # a hole: takes no space
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert refusal(path) == f"it is a model of architecture 'llama', {OURS}"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


#
# another model
#


@pytest.mark.parametrize(
    "change, expected",
    [
        (dict(architecture="qwen3"), "it was made for the architecture 'llama', the model has 'qwen3'"),
        (dict(block_count=30), "it was made for a model of 6 layers, the model has 30"),
        (dict(embedding_length=576), "it was made for the embedding length 64, the model has 576"),
        (
            dict(hparams=MODEL["hparams"].replace("head_count_kv=2", "head_count_kv=4")),
            "the hyper-parameters differ: it was made for 'head_count_kv=2', the model has 'head_count_kv=4'",
        ),
        (
            dict(hparams=MODEL["hparams"] + ";expert_count=8"),
            "the hyper-parameters differ: it was made for 'nothing more', the model has 'expert_count=8'",
        ),
        (
            dict(hparams=MODEL["hparams"].rpartition(";")[0]),
            "the hyper-parameters differ: it was made for 'vocab_size=300', the model has 'nothing more'",
        ),
        (
            dict(tokenizer_sha256="0" * 64),
            f"the tokenizers differ: the sidecar was made with one of sha256 {MODEL['tokenizer_sha256'][:12]}..., the model has one of 000000000000...",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
@pytest.mark.field_report(21, "ridge-sidecar.cpp", "if (sc.n_embd != expect.embedding_length) {", "if (false) {")
def test_sidecar_of_another_model_is_refused_with_both_values(change, expected, good):
    assert refusal(good, {**MODEL, **change}) == expected


def test_damaged_variants_for_the_server_are_each_refused_for_their_own_reason(good, tmp_path):
    reasons = {
        "truncated": "it is truncated",
        "bit_flipped": "tensor 'blk.3.ridge.weight' is damaged: its sha256 is",
        "wrong_architecture": "it was made for the architecture 'qwen3', the model has 'llama'",
        "wrong_width": "it was made for the embedding length 96, the model has 64",
        "wrong_layer_count": "it was made for a model of 7 layers, the model has 6",
        "other_tokenizer": "the tokenizers differ",
        "nan_map": "tensor 'blk.5.ridge.weight' holds a",
        "duplicate_tensor": "tensor 'blk.3.ridge.weight' stands twice in the file",
        "unknown_version": "it has the format version 2, expected 1",
        "lora_file": "it is a LoRA adapter",
        "empty_file": "the file is empty",
    }
    variants = sf.damaged_variants(good, tmp_path)
    assert set(variants) == set(reasons)
    for name, path in variants.items():
        assert reasons[name] in refusal(path, MODEL), name


@pytest.mark.parametrize("name", ["wrong_architecture", "wrong_width", "wrong_layer_count", "other_tokenizer"])
def test_damaged_variants_that_fit_another_model_are_well_formed(name, good, tmp_path):
    Sidecar(sf.damaged_variants(good, tmp_path)[name], None).__exit__()


#
# keys
#


KEYS = sf.documented_keys("input")


def keys_of(data: bytes) -> dict[str, tuple[int, bool]]:
    return {kv.key: (kv.kind, kv.is_array) for kv in sf.read_raw(data).kvs}


def test_the_builder_writes_the_documented_keys_and_no_other(good_f16, good_kv, good_lr):
    assert keys_of(good_f16) == KEYS
    for kind, data in {**good_kv, "input_lr": good_lr}.items():
        assert keys_of(data) == sf.documented_keys(kind)
    assert set(sf.documented_keys("input_lr")) - set(KEYS) == {"ridge.rank"}
    assert set(sf.documented_keys("kv")) - set(KEYS) == {f"ridge.{k}" for k in KV_KEYS}
    assert set(KEYS) - set(sf.documented_keys("kv")) == {"ridge.lambda", "ridge.r2"}


@pytest.mark.parametrize("kind", sf.KINDS)
def test_the_calibrators_writer_writes_the_documented_keys_and_the_reader_takes_them(kind, tmp_path):
    fingerprint = {"architecture": "llama", "name": "m", "file_type": 2, "anchors": ANCHORS}
    maps = sf.random_maps(N_LAYER, N_EMBD, SPLIT, kind=kind, kv_lengths=KV_LENGTHS)
    parts = sidecar.PARTS[kind]
    *matrices, bias = sf.parts(kind)
    made = sidecar.Sidecar(
        fingerprint=MODEL | fingerprint,
        split=SPLIT,
        sink_rows=4,
        tail=256,
        map_type="q8_0",
        lambdas={part: [0.1] * len(maps) for part in parts},
        r2={part: [0.5] * len(maps) for part in parts},
        weights=[{part: sidecar.encode(a, "q8_0")[0] for part, a in zip(matrices, m)} for m in maps.values()],
        biases=[b for *_, b in maps.values()],
        calibration=sidecar.Calibration(["a text; MIT"], 1000, 10, 100, 2, seed=3),
        kind=kind,
        kv_lengths=[KV_LENGTHS] * len(maps) if "kv" in kind else [],
    )
    path = tmp_path / "x.gguf"
    sidecar.write(path, made)
    assert keys_of(path.read_bytes()) == {**sf.documented_keys(kind), sf.METADATA_SHA256: (sf.STR, False)}
    with Sidecar(path, MODEL) as s:
        assert (s.get("split"), s.get("n_tail"), s.get("file_type"), s.anchors()) == (SPLIT, 256, 2, ANCHORS)
        for part, a in zip(matrices, maps[5]):
            assert s.tensor(part, 5)[2] == gguf.quants.quantize(a, sf.TYPES["q8_0"]).tobytes()
        assert s.tensor(bias, 5)[2] == maps[5][-1].tobytes()


def is_named(message: str, key: str) -> bool:
    """Whether a message is about this key; a file that is no sidecar by its type is named as what it is."""
    return f"'{key}'" in message or (key in ("general.type", "adapter.type") and "it is a" in message and OURS in message)


@pytest.mark.parametrize("key", KEYS)
def test_missing_key_is_refused_by_name(key, good_f16, tmp_path):
    message = refusal_of(sf.operated(good_f16, lambda raw: raw.drop(key), seal=False), tmp_path)
    assert is_named(message, key)
    assert "is missing" in message or key in ("general.type", "adapter.type")


@pytest.mark.parametrize("key", KEYS)
def test_key_of_another_type_is_refused_by_name_and_both_types(key, good_f16, tmp_path):
    kind, is_array = KEYS[key]
    names = {sf.STR: "str", sf.U32: "u32", sf.U64: "u64", sf.F32: "f32"}
    array = "array of " if is_array else ""

    for other in (sf.U32, sf.U64, sf.STR, sf.F32, sf.U8, sf.BOOL):
        def retype(raw, other=other):
            kv = raw.kv(key)
            kv.kind, kv.values = other, ["1" if other == sf.STR else 1] * len(kv.values)

        if other != kind:
            message = refusal_of(sf.operated(good_f16, retype, seal=False), tmp_path)
            assert is_named(message, key)
            assert message.endswith(f"expected {array}{names[kind]}") or key in ("general.type", "adapter.type")

    def wrap(raw):
        raw.kv(key).is_array = not is_array
        raw.kv(key).values = raw.kv(key).values[:1]

    assert is_named(refusal_of(sf.operated(good_f16, wrap, seal=False), tmp_path), key)


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("ridge.format_version", 0, "it has the format version 0, expected 1 (key 'ridge.format_version')"),
        ("ridge.format_version", 2**32 - 1, "it has the format version 4294967295, expected 1 (key 'ridge.format_version')"),
        ("ridge.kind", "KV", "the kind of its maps is 'KV', expected 'input', 'input_lr', 'kv' or 'kv_prev' (key 'ridge.kind')"),
        ("ridge.map_type", "q5_0", "the map type is 'q5_0', expected 'f32', 'f16', 'q8_0', 'q4_1' or 'q4_0' (key 'ridge.map_type')"),
        ("ridge.map_type", "F16", "the map type is 'F16', expected 'f32', 'f16', 'q8_0', 'q4_1' or 'q4_0' (key 'ridge.map_type')"),
        ("ridge.split", 0, "key 'ridge.split' is 0, expected 1 to 4"),
        ("ridge.split", 5, "key 'ridge.split' is 5, expected 1 to 4"),
        ("ridge.split", 2**32 - 1, "key 'ridge.split' is 4294967295, expected 1 to 4"),
        ("ridge.block_count", 2, "key 'ridge.block_count' is 2, expected 3 to 2147483647"),
        ("ridge.block_count", 2**31, "key 'ridge.block_count' is 2147483648, expected 3 to 2147483647"),
        ("ridge.embedding_length", 0, "key 'ridge.embedding_length' is 0, expected 1 to 2147483647"),
        ("ridge.tail", 0, "key 'ridge.tail' is 0, expected 1 to 2147483647"),
        ("ridge.sink_rows", 2**31, "key 'ridge.sink_rows' is 2147483648, expected 0 to 2147483647"),
        ("ridge.lambda", [0.1] * 2, "key 'ridge.lambda' holds 2 numbers, expected 3: one per layer 3 to 5"),
        ("ridge.lambda", [0.1] * 4, "key 'ridge.lambda' holds 4 numbers, expected 3: one per layer 3 to 5"),
        ("ridge.lambda", [0.1, math.nan, 0.1], "key 'ridge.lambda' is nan for layer 4, expected a finite number from 0 to inf"),
        ("ridge.lambda", [0.1, 0.1, -0.5], "key 'ridge.lambda' is -0.5 for layer 5, expected a finite number from 0 to inf"),
        ("ridge.lambda", [math.inf, 0.1, 0.1], "key 'ridge.lambda' is inf for layer 3, expected a finite number from 0 to inf"),
        ("ridge.r2", [], "key 'ridge.r2' holds 0 numbers, expected 3: one per layer 3 to 5"),
        ("ridge.r2", [0.5, 0.5, 1.5], "key 'ridge.r2' is 1.5 for layer 5, expected a finite number from -inf to 1"),
        ("ridge.r2", [-math.inf, 0.5, 0.5], "key 'ridge.r2' is -inf for layer 3, expected a finite number from -inf to 1"),
        ("ridge.model.tokenizer_sha256", "abc", "key 'ridge.model.tokenizer_sha256' holds 'abc', expected a sha256 of 64 lower-case hex digits"),
        ("ridge.model.anchors_sha256", ["0" * 64], "key 'ridge.model.anchors_sha256' holds 1 hashes, expected 2: one per name in 'ridge.model.anchors'"),
        ("ridge.model.anchors", ["a", "a"], "key 'ridge.model.anchors' lists 'a' twice"),
        ("general.name", b"caf\xe9", r"key 'general.name' holds text that is not UTF-8: 'caf\xe9'"),
        ("general.name", b"a\x00b", r"key 'general.name' holds text that is not UTF-8: 'a\x00b'"),
        ("general.name", b"\xed\xa0\x80", r"key 'general.name' holds text that is not UTF-8: '\xed\xa0\x80'"),
        ("general.name", b"\xc0\x80", r"key 'general.name' holds text that is not UTF-8: '\xc0\x80'"),
        ("general.name", b"\xf4\x90\x80\x80", r"key 'general.name' holds text that is not UTF-8: '\xf4\x90\x80\x80'"),
        ("general.name", b"\xe7\x8c", r"key 'general.name' holds text that is not UTF-8: '\xe7\x8c'"),
        ("ridge.kind", "x" * 10**6, "the kind of its maps is '" + "x" * 64 + "...', expected 'input', 'input_lr', 'kv' or 'kv_prev' (key 'ridge.kind')"),
        ("general.architecture", "a\nb", r"it was made for the architecture 'a\x0ab', the model has 'llama'"),
    ],
)
def test_key_out_of_range_is_refused_with_found_and_expected(key, value, expected, good_f16, tmp_path):
    assert refusal_of(sf.operated(good_f16, lambda raw: raw.set(key, value), seal=False), tmp_path) == expected


def test_absurd_layer_count_with_one_map_is_refused_without_an_absurd_allocation(good_f16, tmp_path):
    def grow(raw):
        raw.set("ridge.block_count", 2**31 - 1)
        raw.set("ridge.split", 2**31 - 3)
        raw.set("ridge.lambda", [0.1])
        raw.set("ridge.r2", [0.1])

    expected = "tensor 'blk.2147483646.ridge.weight' is missing: expected maps for layers 2147483646 to 2147483646"
    assert refusal_of(sf.operated(good_f16, grow), tmp_path, None) == expected


@pytest.mark.parametrize("map_type", ["q8_0", "q4_1", "q4_0"])
def test_maps_of_a_width_or_rank_that_is_no_multiple_of_the_block_are_refused(map_type, good_f16, good_lr, tmp_path):
    def change(key, value):
        def surgery(raw):
            raw.set("ridge.map_type", map_type)
            raw.set(key, value)

        return surgery

    data = sf.operated(good_f16, change("ridge.embedding_length", 33))
    assert refusal_of(data, tmp_path, None) == f"the embedding length 33 is no multiple of 32, the block of map type '{map_type}'"
    data = sf.operated(good_lr, change("ridge.rank", 33))
    assert refusal_of(data, tmp_path) == f"the rank 33 is no multiple of 32, the block of map type '{map_type}'"


#
# maps that predict K and V
#

KV_KEYS = ("k_length", "v_length", "lambda_k", "lambda_v", "r2_k", "r2_v")
KV_LENGTHS = (32, 96)


@pytest.fixture(scope="module")
def good_kv(tmp_path_factory) -> dict[str, bytes]:
    """A good sidecar of each kind that predicts K and V."""
    folder = tmp_path_factory.mktemp("good")
    return {k: write(folder / f"{k}.gguf", kind=k, kv_lengths=KV_LENGTHS).read_bytes() for k in ("kv", "kv_prev")}


@pytest.mark.parametrize("map_type", list(sf.TYPES))
@pytest.mark.parametrize("kind", ["kv", "kv_prev"])
def test_good_sidecar_of_a_kv_kind_loads_with_right_values(kind, map_type, tmp_path):
    path = write(tmp_path / "x.gguf", kind=kind, kv_lengths=KV_LENGTHS, map_type=map_type)
    maps, code = sf.random_maps(N_LAYER, N_EMBD, SPLIT, kind=kind, kv_lengths=KV_LENGTHS), sf.TYPES[map_type]
    with Sidecar(path, MODEL) as s:
        assert (s.get("kind"), s.get("split"), s.get("n_layer"), s.get("n_embd")) == (kind, SPLIT, N_LAYER, N_EMBD)
        for il, (a, b) in maps.items():
            assert s.tensor("weight", il) == (code, a.shape[::-1], gguf.quants.quantize(a, code).tobytes())
            assert s.tensor("bias", il) == (sf.TYPES["f32"], (128, 1), b.tobytes())
            assert (s.length("k", il), s.length("v", il)) == KV_LENGTHS
        for il in (-1, SPLIT, N_LAYER):
            assert s.tensor("weight", il) is None and s.length("k", il) == s.length("v", il) == 0


def test_kind_input_has_no_lengths(good):
    with Sidecar(good) as s:
        assert s.length("k", 3) == s.length("v", 3) == 0


def test_layers_may_have_keys_and_values_of_different_widths(good_kv, tmp_path):
    def widen(raw):
        """Layer 4 has 32 rows of K more."""
        raw.set("ridge.k_length", [32, 64, 32])
        for part, more in (("weight", bytes(32 * N_EMBD * 2)), ("bias", bytes(4 * 32))):
            t = raw.tensor(f"blk.4.ridge.{part}")
            t.data, t.shape = t.data + more, [*t.shape[:-1], t.shape[-1] + 32]

    (tmp_path / "x.gguf").write_bytes(sf.operated(good_kv["kv"], widen))
    with Sidecar(tmp_path / "x.gguf", MODEL) as s:
        assert [s.length("k", il) for il in (3, 4, 5)] == [32, 64, 32]
        assert s.tensor("weight", 4)[1] == (N_EMBD, 160)


@pytest.mark.parametrize("key", KV_KEYS)
@pytest.mark.parametrize("kind", ["kv", "kv_prev"])
def test_missing_key_of_a_kv_kind_is_refused_by_name(kind, key, good_kv, tmp_path):
    message = refusal_of(sf.operated(good_kv[kind], lambda raw: raw.drop(f"ridge.{key}"), seal=False), tmp_path)
    assert message.startswith(f"key 'ridge.{key}' is missing")


@pytest.mark.parametrize("key", KV_KEYS)
def test_key_of_a_kv_kind_of_another_type_is_refused(key, good_kv, tmp_path):
    def retype(raw):
        kv = raw.kv(f"ridge.{key}")
        kv.kind, kv.values = sf.I32, [1] * len(kv.values)

    expected = "u32" if key.endswith("length") else "f32"
    message = refusal_of(sf.operated(good_kv["kv"], retype, seal=False), tmp_path)
    assert is_named(message, f"ridge.{key}") and message.endswith(f"expected array of {expected}")


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("ridge.k_length", [32] * 2, "key 'ridge.k_length' holds 2 numbers, expected 3: one per layer 3 to 5"),
        ("ridge.v_length", [96] * 4, "key 'ridge.v_length' holds 4 numbers, expected 3: one per layer 3 to 5"),
        ("ridge.v_length", [96, 0, 96], "key 'ridge.v_length' is 0 for layer 4, expected 1 to 2147483647"),
        ("ridge.k_length", [32, 32, 2**31], "key 'ridge.k_length' is 2147483648 for layer 5, expected 1 to 2147483647"),
        ("ridge.k_length", [31, 32, 32], "tensor 'blk.3.ridge.weight' has the shape [64, 128], expected [64, 127]"),
        ("ridge.v_length", [96, 2**31 - 1, 96], f"tensor 'blk.4.ridge.weight' has the shape [64, 128], expected [64, {2**31 + 31}]"),
        ("ridge.lambda_v", [0.1] * 2, "key 'ridge.lambda_v' holds 2 numbers, expected 3: one per layer 3 to 5"),
        ("ridge.lambda_k", [0.1, -1.0, 0.1], "key 'ridge.lambda_k' is -1 for layer 4, expected a finite number from 0 to inf"),
        ("ridge.r2_k", [], "key 'ridge.r2_k' holds 0 numbers, expected 3: one per layer 3 to 5"),
        ("ridge.r2_v", [0.5, 1.5, 0.5], "key 'ridge.r2_v' is 1.5 for layer 4, expected a finite number from -inf to 1"),
        ("ridge.kind", "kv_prev", "tensor 'blk.3.ridge.weight' has the shape [64, 128], expected [128, 128]"),
        ("ridge.kind", "input", "key 'ridge.lambda' is missing"),
        ("ridge.kind", "input_lr", "key 'ridge.rank' is missing"),
    ],
)
def test_key_of_kind_kv_out_of_range_is_refused_with_found_and_expected(key, value, expected, good_kv, tmp_path):
    assert refusal_of(sf.operated(good_kv["kv"], lambda raw: raw.set(key, value), seal=False), tmp_path).startswith(expected)


def test_bias_of_another_width_is_refused(good_kv, tmp_path):
    def cut(raw):
        t = raw.tensor("blk.5.ridge.bias")
        t.shape, t.data = [64], t.data[: 4 * 64]

    message = refusal_of(sf.operated(good_kv["kv"], cut), tmp_path)
    assert message == "tensor 'blk.5.ridge.bias' has the shape [64], expected [128]"


#
# maps of low rank
#

RANK = 32


@pytest.fixture(scope="module")
def good_lr(tmp_path_factory) -> bytes:
    return write(tmp_path_factory.mktemp("good") / "lr.gguf", kind="input_lr", rank=RANK).read_bytes()


@pytest.mark.parametrize("map_type, rank", [*((t, RANK) for t in sf.TYPES), ("f32", 1), ("f16", N_EMBD), ("q4_0", N_EMBD)])
def test_good_sidecar_of_low_rank_loads_with_right_values(map_type, rank, tmp_path):
    path = write(tmp_path / "x.gguf", kind="input_lr", rank=rank, map_type=map_type)
    maps, code = sf.random_maps(N_LAYER, N_EMBD, SPLIT, kind="input_lr", rank=rank), sf.TYPES[map_type]
    with Sidecar(path, MODEL) as s:
        assert (s.get("kind"), s.get("rank"), s.get("n_embd")) == ("input_lr", rank, N_EMBD)
        for il, (down, up, b) in maps.items():
            assert s.tensor("down", il) == (code, (N_EMBD, rank), gguf.quants.quantize(down, code).tobytes())
            assert s.tensor("up", il) == (code, (rank, N_EMBD), gguf.quants.quantize(up, code).tobytes())
            assert s.tensor("bias", il) == (sf.TYPES["f32"], (N_EMBD, 1), b.tobytes())
            assert s.tensor("weight", il) is None and s.length("k", il) == 0
        for il in (-1, SPLIT, N_LAYER):
            assert s.tensor("down", il) is None and s.tensor("up", il) is None


def test_only_kind_input_lr_has_a_rank_and_factors(good, good_kv, tmp_path):
    (tmp_path / "kv.gguf").write_bytes(good_kv["kv"])
    for path in (good, tmp_path / "kv.gguf"):
        with Sidecar(path) as s:
            assert s.get("rank") == 0 and s.tensor("down", 3) is None and s.tensor("up", 3) is None


def rename(old: str, new: str):
    return lambda raw: setattr(raw.tensor(old), "name", new)


def resize(name: str, shape: list[int]):
    """Another shape, with as many zeros as it takes."""
    def surgery(raw):
        t = raw.tensor(name)
        t.shape, t.data = shape, bytes(2 * math.prod(shape))

    return surgery


@pytest.mark.parametrize(
    "surgery, expected",
    [
        (lambda raw: raw.drop("ridge.rank"), "key 'ridge.rank' is missing"),
        (lambda raw: raw.set("ridge.rank", RANK, sf.U64), "key 'ridge.rank' has the type u64, expected u32"),
        (lambda raw: raw.set("ridge.rank", 0), "key 'ridge.rank' is 0, expected 1 to 64"),
        (lambda raw: raw.set("ridge.rank", 65), "key 'ridge.rank' is 65, expected 1 to 64"),
        (lambda raw: raw.set("ridge.rank", 16), "tensor 'blk.3.ridge.down' has the shape [64, 32], expected [64, 16]"),
        (resize("blk.3.ridge.down", [64, 31]), "tensor 'blk.3.ridge.down' has the shape [64, 31], expected [64, 32]"),
        (resize("blk.3.ridge.down", [32, 64]), "tensor 'blk.3.ridge.down' has the shape [32, 64], expected [64, 32]"),
        (resize("blk.4.ridge.up", [64, 32]), "tensor 'blk.4.ridge.up' has the shape [64, 32], expected [32, 64]"),
        (resize("blk.4.ridge.up", [33, 64]), "tensor 'blk.4.ridge.up' has the shape [33, 64], expected [32, 64]"),
        (resize("blk.4.ridge.up", [32]), "tensor 'blk.4.ridge.up' has the shape [32], expected [32, 64]"),
        (lambda raw: raw.tensors.remove(raw.tensor("blk.5.ridge.up")), "tensor 'blk.5.ridge.up' is missing: expected maps for layers 3 to 5"),
        (lambda raw: raw.tensors.remove(raw.tensor("blk.4.ridge.down")), "tensor 'blk.4.ridge.down' is missing: expected maps for layers 3 to 5"),
        (lambda raw: raw.tensors.remove(raw.tensor("blk.4.ridge.bias")), "tensor 'blk.4.ridge.bias' is missing: expected maps for layers 3 to 5"),
        (rename("blk.3.ridge.up", "blk.3.ridge.weight"), "tensor 'blk.3.ridge.up' is missing: expected maps for layers 3 to 5"),
        (
            lambda raw: raw.tensors.append(sf.RawTensor("blk.3.ridge.weight", [64, 64], 1, bytes(2 * 64 * 64))),
            "tensor 'blk.3.ridge.weight' does not belong in a sidecar with maps for layers 3 to 5",
        ),
        (lambda raw: setattr(raw.tensor("blk.3.ridge.up"), "kind", 0), "tensor 'blk.3.ridge.up' has the type f32, expected f16"),
        (
            lambda raw: put(raw, "blk.4.ridge.up", 2 * (RANK + 3), struct.pack("<e", math.inf)),
            "tensor 'blk.4.ridge.up' holds a value that is not finite at row 1, column 3",
        ),
        (
            lambda raw: put(raw, "blk.4.ridge.down", 2 * (N_EMBD + 3), struct.pack("<e", math.nan)),
            "tensor 'blk.4.ridge.down' holds a value that is not finite at row 1, column 3",
        ),
        (lambda raw: raw.set("ridge.kind", "input"), "tensor 'blk.3.ridge.weight' is missing: expected maps for layers 3 to 5"),
    ],
)  # fmt: skip
def test_low_rank_maps_that_do_not_fit_together_are_refused(surgery, expected, good_lr, tmp_path):
    assert refusal_of(sf.operated(good_lr, surgery), tmp_path) == expected


def test_full_maps_that_claim_a_rank_are_refused(good_f16, tmp_path):
    def claim(raw):
        raw.set("ridge.kind", "input_lr")
        raw.kvs.append(sf.RawKv("ridge.rank", sf.U32, [32]))

    assert refusal_of(sf.operated(good_f16, claim), tmp_path) == "tensor 'blk.3.ridge.down' is missing: expected maps for layers 3 to 5"


#
# tensors
#


@pytest.mark.parametrize(
    "surgery, expected",
    [
        (lambda raw: raw.tensors.pop(), "tensor 'blk.5.ridge.bias' is missing: expected maps for layers 3 to 5"),
        (
            lambda raw: setattr(raw.tensors[0], "name", "blk.03.ridge.weight"),
            "tensor 'blk.3.ridge.weight' is missing: expected maps for layers 3 to 5",
        ),
        (
            lambda raw: raw.tensors.append(sf.RawTensor("blk.2.ridge.bias", [N_EMBD], 0, bytes(4 * N_EMBD))),
            "tensor 'blk.2.ridge.bias' does not belong in a sidecar with maps for layers 3 to 5",
        ),
        (
            lambda raw: raw.tensors.append(sf.RawTensor("evil\n" + "x" * 100, [1], 0, bytes(4))),
            "tensor 'evil\\x0a" + "x" * 59 + "...' does not belong in a sidecar with maps for layers 3 to 5",
        ),
        (lambda raw: setattr(raw.tensors[0], "kind", 0), "tensor 'blk.3.ridge.weight' has the type f32, expected f16"),
        (lambda raw: setattr(raw.tensors[0], "kind", 8), "tensor 'blk.3.ridge.weight' has the type q8_0, expected f16"),
        (lambda raw: setattr(raw.tensors[1], "kind", 1), "tensor 'blk.3.ridge.bias' has the type f16, expected f32"),
        (lambda raw: setattr(raw.tensors[0], "kind", 4), "tensor 'blk.3.ridge.weight' has the type unknown (4), expected f16"),
        (lambda raw: setattr(raw.tensors[0], "kind", 9999), "tensor 'blk.3.ridge.weight' has the type unknown (9999), expected f16"),
        (lambda raw: setattr(raw.tensors[0], "kind", 2**32 - 1), "tensor 'blk.3.ridge.weight' has the type unknown (-1), expected f16"),
        (lambda raw: setattr(raw.tensors[0], "shape", [64, 63]), "tensor 'blk.3.ridge.weight' has the shape [64, 63], expected [64, 64]"),
        (lambda raw: setattr(raw.tensors[0], "shape", [4096]), "tensor 'blk.3.ridge.weight' has the shape [4096], expected [64, 64]"),
        (lambda raw: setattr(raw.tensors[1], "shape", [64, 1]), "tensor 'blk.3.ridge.bias' has the shape [64, 1], expected [64]"),
        (lambda raw: setattr(raw.tensors[1], "shape", []), "tensor 'blk.3.ridge.bias' has the shape [], expected [64]"),
        (
            lambda raw: setattr(raw.tensors[0], "shape", [2**63, 2**63]),
            f"tensor 'blk.3.ridge.weight' has the shape [{2**63}, {2**63}], expected [64, 64]",
        ),
        (
            lambda raw: setattr(raw.tensors[0], "shape", [1] * 5),
            "tensor 'blk.3.ridge.weight' has 5 dimensions, expected at most 4: the file is damaged",
        ),
        (
            lambda raw: setattr(raw.tensors[1], "offset", 8193),
            "tensor 'blk.3.ridge.bias' is misaligned: its offset is 8193, expected a multiple of 32",
        ),
        (
            lambda raw: setattr(raw.tensors[1], "offset", 8192 - 32),
            "tensor 'blk.3.ridge.bias' has the offset 8160, expected 8192: it overlaps others",
        ),
        (
            lambda raw: setattr(raw.tensors[1], "offset", 0),
            "tensor 'blk.3.ridge.bias' has the offset 0, expected 8192: it overlaps others",
        ),
        (
            lambda raw: setattr(raw.tensors[1], "offset", 8192 + 32),
            "tensor 'blk.3.ridge.bias' has the offset 8224, expected 8192: it leaves a gap or lies outside the file",
        ),
        (
            lambda raw: setattr(raw.tensors[0], "offset", 2**64 - 32),
            f"tensor 'blk.3.ridge.weight' has the offset {2**64 - 32}, expected 0: it leaves a gap or lies outside the file",
        ),
    ],
)
@pytest.mark.field_report(22, "ridge-sidecar.cpp", "if (it->second->type != part.type) {", "if (false) {")
def test_set_type_shape_and_place_of_tensors_are_checked(surgery, expected, good_f16, tmp_path):
    assert refusal_of(sf.operated(good_f16, surgery), tmp_path) == expected


@pytest.mark.parametrize(
    "names, expected",
    [
        (lambda n: n[:-1], "tensor 'blk.5.ridge.bias' is not listed in key 'ridge.tensors'"),
        (lambda n: [*n, "blk.9.ridge.bias"], "key 'ridge.tensors' lists 'blk.9.ridge.bias', which is not in the file"),
        (lambda n: [*n, n[0]], "key 'ridge.tensors' lists 'blk.3.ridge.weight' twice"),
    ],
    ids=["unlisted", "listed-but-absent", "listed-twice"],
)
def test_list_of_tensors_must_name_each_once(names, expected, good_f16, tmp_path):
    def relist(raw):
        listed = names([v.decode() for v in raw.kv("ridge.tensors").values])
        raw.set("ridge.tensors", listed)
        raw.set("ridge.tensors_sha256", [sf.sha256(listed[i].encode()) for i in range(len(listed))])

    assert refusal_of(sf.operated(good_f16, relist, seal=False), tmp_path) == expected


def test_tensors_in_another_order_load_alike(good_f16, tmp_path):
    raw = sf.read_raw(good_f16)
    raw.tensors.reverse()
    (tmp_path / "x.gguf").write_bytes(raw.seal().to_bytes())
    with Sidecar(tmp_path / "x.gguf", MODEL) as s:
        assert s.tensor("weight", 3)[2] == raw.tensor("blk.3.ridge.weight").data


def test_two_layers_with_swapped_maps_are_refused(good_f16, tmp_path):
    def swap(raw):
        a, b = raw.tensor("blk.3.ridge.weight"), raw.tensor("blk.4.ridge.weight")
        a.data, b.data = b.data, a.data

    assert "tensor 'blk.3.ridge.weight' is damaged: its sha256 is" in refusal_of(sf.operated(good_f16, swap, seal=False), tmp_path)


#
# values that are not finite
#


def put(raw: sf.RawGguf, name: str, at: int, value: bytes) -> None:
    t = raw.tensor(name)
    at %= len(t.data)
    t.data = t.data[:at] + value + t.data[at + len(value) :]


NOT_FINITE = [math.nan, -math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("row, column", [(0, 0), (31, 17), (N_EMBD - 1, N_EMBD - 1)])
def test_weight_that_is_not_finite_is_refused_with_its_place(good, value, row, column, tmp_path):
    block, size = sf.BLOCKS[good.stem]
    what, fmt = "value" if block == 1 else "block", "<f" if good.stem == "f32" else "<e"
    at = (row * N_EMBD + column) // block * size
    for offset in (0, 2) if good.stem == "q4_1" else (0,):  # a block of q4_1 begins with its scale and its least value
        data = sf.operated(good.read_bytes(), lambda raw: put(raw, "blk.4.ridge.weight", at + offset, struct.pack(fmt, value)))
        expected = f"tensor 'blk.4.ridge.weight' holds a {what} that is not finite at row {row}, column {column // block * block}"
        assert refusal_of(data, tmp_path) == expected


@pytest.mark.parametrize("value", NOT_FINITE)
def test_bias_that_is_not_finite_is_refused_with_its_place(value, good_f16, tmp_path):
    data = sf.operated(good_f16, lambda raw: put(raw, "blk.5.ridge.bias", -4, struct.pack("<f", value)))
    assert refusal_of(data, tmp_path) == "tensor 'blk.5.ridge.bias' holds a value that is not finite at row 0, column 63"


def test_every_f16_bit_pattern_is_judged_as_ggml_and_numpy_judge_it(tmp_path):
    """All 65,536 patterns in maps of 32 x 32: those of finite numbers load, each other one alone is refused."""
    validate = library("ggml-base").ggml_validate_row_data
    validate.argtypes, validate.restype = [ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t], ctypes.c_bool
    patterns = np.arange(2**16, dtype=np.uint16)
    finite = np.isfinite(patterns.view(np.float16))
    path = write(tmp_path / "x.gguf", n_layer=4, split=2, n_embd=32, maps={3: (np.zeros((32, 32)), np.zeros(32))})
    good = path.read_bytes()
    for first in range(0, 2**16, 1024):
        block = np.where(finite, patterns, 0)[first : first + 1024]
        path.write_bytes(sf.operated(good, lambda raw: put(raw, "blk.3.ridge.weight", 0, block.tobytes())))
        assert validate(sf.TYPES["f16"], block.tobytes(), block.nbytes)
        Sidecar(path).__exit__()
    for pattern in patterns[~finite][::31]:
        path.write_bytes(sf.operated(good, lambda raw: put(raw, "blk.3.ridge.weight", 500, pattern.tobytes())))
        assert refusal(path, None).endswith("not finite at row 7, column 26")
        assert not validate(sf.TYPES["f16"], pattern.tobytes(), 2)


#
# the C interface
#


def test_message_is_cut_to_the_callers_buffer(tmp_path):
    with pytest.raises(Refused) as e:
        Sidecar(tmp_path / "none", err_size=32)
    assert str(e.value) == f"sidecar '{tmp_path}/none': there is no such file"[:31]


def test_no_buffer_and_no_path_are_no_crash():
    assert ridge("sidecar_load")(b"/nonexistent", None, None, 0) is None
    assert ridge("sidecar_load")(None, None, None, 0) is None
    ridge("sidecar_free")(None)


@pytest.mark.parametrize("key", ["architecture", "tokenizer_sha256", "hparams"])
def test_model_that_is_only_half_described_matches_nothing(key, good):
    assert refusal(good, {**MODEL, key: None}).startswith("the model to check it against has no architecture")


def test_anchor_index_out_of_range_gives_null(good):
    with Sidecar(good) as s:
        assert ridge("sidecar_anchor")(s.handle, -1, None) is None
        assert ridge("sidecar_anchor")(s.handle, len(ANCHORS), None) is None
        assert ridge("sidecar_anchor")(s.handle, 0, None) is not None


def test_path_with_a_line_break_still_gives_one_line(tmp_path):
    with pytest.raises(Refused) as e:
        Sidecar(tmp_path / "a\nb")
    assert "a?b': there is no such file" in str(e.value)
