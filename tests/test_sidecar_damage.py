"""Damage to the bytes of a sidecar: cut, flipped and mutated files are refused, and none ends the process."""
from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import sidecar_files as sf
from ridge_native import ROOT, Refused, Sidecar, refusal
from sidecar_files import MODEL

# Without the hash of the metadata a flipped bit in the value of one of these keys can only be found where it leaves the
# allowed range. Records of how the maps were made, shown to people; nothing is computed from them:
RECORDS = {
    "general.name",
    "ridge.lambda",
    "ridge.r2",
    "ridge.lambda_k",
    "ridge.lambda_v",
    "ridge.r2_k",
    "ridge.r2_v",
    "ridge.calibration.sources",
    "ridge.calibration.n_tokens",
    "ridge.calibration.n_documents",
    "ridge.calibration.n_heldout_tokens",
    "ridge.calibration.n_heldout_documents",
    "ridge.calibration.seed",
    "ridge.calibration.tool",
}
# a difference from the model is a warning, never a refusal
WARNINGS = {"ridge.model.file_type", "ridge.model.name", "ridge.model.anchors", "ridge.model.anchors_sha256"}
# advice on which rows to run exactly, which the user can change; the reason for the hash of the metadata
ADVICE = {"ridge.sink_rows", "ridge.tail"}


@pytest.fixture(scope="module", params=list(sf.TYPES))
def good(request, tmp_path_factory) -> bytes:
    """A good sidecar of each map type; d = 36 (f32, f16) puts padding behind the biases."""
    d = 36 if request.param in ("f32", "f16") else 64
    return sf.write_example(tmp_path_factory.mktemp("good") / "x.gguf", map_type=request.param, n_embd=d).read_bytes()


@pytest.fixture(scope="module", params=[*sf.TYPES, *sf.KINDS[1:]])
def intact(request, tmp_path_factory) -> bytes:
    """A good one, of each kind too: the kv ones predict K and V of 12 and 24 numbers."""
    if request.param in sf.TYPES:
        what = dict(map_type=request.param, n_embd=36 if request.param in ("f32", "f16") else 64)
    else:
        what = dict(map_type="f16", n_embd=36, kind=request.param, kv_lengths=(12, 24), rank=12)
    return sf.write_example(tmp_path_factory.mktemp("good") / "x.gguf", **what).read_bytes()


@pytest.fixture(scope="module")
def sealed(tmp_path_factory) -> bytes:
    """A good sidecar with the hash of its metadata."""
    return sf.write_example(tmp_path_factory.mktemp("good") / "x.gguf", metadata_hash=True).read_bytes()


@pytest.fixture
def refuse(tmp_path):
    def message(data: bytes, expect: dict | None = None) -> str:
        (tmp_path / "x.gguf").write_bytes(data)
        return refusal(tmp_path / "x.gguf", expect)

    return message


#
# truncation
#


@pytest.mark.field_report(19, "ridge-sidecar.cpp", "bytes > file_size - begin) {", "bytes > file_size - begin + 1) {")
def test_truncation_at_every_tensor_boundary_and_a_byte_either_side_names_the_cut_tensor(intact, refuse):
    spans = list(sf.tensor_spans(intact))
    for i, (name, begin, end) in enumerate(spans):
        for cut in (begin, begin + 1, (begin + end) // 2, end - 1):
            assert refuse(intact[:cut]) == f"tensor '{name}' ends at byte {end}, but the file has {cut} bytes: it is truncated"
        for cut in {end, end + 1} - {len(intact), len(intact) + 1}:
            message = refuse(intact[:cut])
            if i + 1 < len(spans):
                assert message == (
                    f"tensor '{spans[i + 1][0]}' ends at byte {spans[i + 1][2]}, but the file has {cut} bytes: it is truncated"
                )
            else:
                assert message == (
                    f"the file has {cut} bytes, expected {len(intact)} with the padding of tensor '{name}': it is truncated"
                )


def test_truncation_at_every_field_of_the_header_and_a_byte_either_side_is_refused(intact, refuse):
    raw = sf.read_raw(intact)
    cuts = {at + k for _, at, size in raw.fields for k in (-1, 0, 1, size) if 0 < at + k}
    assert len(cuts) > 400
    for cut in sorted(cuts):
        message = refuse(intact[:cut])
        assert "truncated" in message or cut < 4, (cut, message)


def test_file_without_its_last_byte_or_with_one_more_is_refused(intact, refuse):
    refuse(intact[:-1])
    for more in (b"\0", bytes(32), b"x" * 10**6):
        assert "it goes on after its end" in refuse(intact + more)


#
# flipped bits
#


def flipped(data: bytes, bit: int) -> bytes:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


def seeded_bits(data: bytes, n: int, seed: int) -> list[int]:
    """n bits of the header and n of the data."""
    rng, header = random.Random(seed), len(sf.read_raw(data).header())
    return rng.sample(range(8 * header), n) + rng.sample(range(8 * header, 8 * len(data)), n)


def field_at(data: bytes, byte: int) -> str:
    return next((name for name, at, size in sf.read_raw(data).fields if at <= byte < at + size), "data")


def test_flipped_bit_is_refused_unless_it_lies_in_a_record_a_warning_or_advice(intact, tmp_path):
    path, n_refused, accepted = tmp_path / "x.gguf", 0, set()
    bits = seeded_bits(intact, 500, seed=1)
    raw = sf.read_raw(intact)
    expect = {**MODEL, "embedding_length": raw.kv("ridge.embedding_length").values[0]}
    for bit in bits:
        path.write_bytes(flipped(intact, bit))
        try:
            with Sidecar(path, expect):
                accepted.add(field_at(intact, bit // 8))
        except Refused:
            n_refused += 1
    assert accepted <= {f"{key} value" for key in RECORDS | WARNINGS | ADVICE}
    assert n_refused > len(bits) // 2 + 250  # all of the data, most of the header


def test_with_the_hash_of_the_metadata_every_flipped_bit_is_refused(sealed, refuse):
    at_name = sealed.index(b"ridge.metadata_sha256")
    own_name = range(8 * at_name, 8 * (at_name + len("ridge.metadata_sha256")))
    for bit in seeded_bits(sealed, 1000, seed=2):
        if bit not in own_name:  # harmless: the key becomes an unknown one, all else is as it was
            refuse(flipped(sealed, bit), MODEL)


def test_hash_of_the_metadata_covers_advice_and_records(sealed, refuse):
    for key, value in {"ridge.sink_rows": 5, "ridge.tail": 129, "ridge.calibration.seed": 1, "general.name": "x"}.items():
        message = refuse(sf.operated(sealed, lambda raw, k=key, v=value: raw.set(k, v), seal=False), MODEL)
        assert message.startswith("its metadata is damaged: sha256 ") and message.endswith("(key 'ridge.metadata_sha256')")


def test_padding_that_is_not_zero_is_refused_by_its_place(good, refuse):
    header = len(sf.read_raw(good).header())
    spans = list(sf.tensor_spans(good))
    gaps = [("the header", header, spans[0][1])]
    gaps += [(f"tensor '{name}'", end, end + -end % 32) for name, _, end in spans]
    n = 0
    for after, begin, end in gaps:
        for at in range(begin, end):
            data = bytearray(good)
            data[at] = 7
            assert refuse(bytes(data)) == f"byte {at} in the padding after {after} is 7, expected 0: the file is damaged"
            n += 1
    assert n > 0


#
# the container
#


def overwritten(good: bytes, name: str, value: int) -> bytes:
    """The field `name` (see RawGguf.fields) set to another number."""
    at, size = next((at, size) for n, at, size in sf.read_raw(good).fields if n == name)
    return good[:at] + value.to_bytes(size, "little") + good[at + size :]


HUGE = [2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 1]


@pytest.mark.parametrize("n", HUGE)
@pytest.mark.parametrize(
    "field, what",
    [
        ("n_tensors", "tensors"),
        ("n_kv", "keys"),
        ("kv 0 name length", "bytes of text"),
        ("general.type value length", "bytes of text"),
        ("ridge.lambda count", "elements"),
        ("ridge.tensors count", "elements"),
        ("ridge.tensors value length", "bytes of text"),
        ("tensor 0 name length", "bytes of text"),
    ],
)
def test_absurd_count_is_refused_before_anything_is_allocated(field, what, n, good, refuse):
    message = refuse(overwritten(good, field, n))
    assert f"announces {n} {what}, but only " in message and "truncated or damaged" in message


def test_more_tensors_announced_than_entries_fit_is_refused(good, refuse):
    message = refuse(overwritten(good, "n_tensors", len(good) // 10))
    assert message.startswith(f"the header announces {len(good) // 10} tensors, but only ")


def test_fewer_tensors_or_keys_announced_than_there_are_is_refused(good, refuse):
    refuse(overwritten(good, "n_tensors", 5))
    refuse(overwritten(good, "n_kv", 20))


@pytest.mark.parametrize("version", [0, 1, 2, 4, 2**32 - 1])
def test_gguf_of_another_version_is_refused(version, good, refuse):
    assert refuse(overwritten(good, "version", version)) == f"it is a GGUF of version {version}, expected 3"


@pytest.mark.parametrize("kind", [13, 99, 2**31, 2**32 - 1])
def test_unknown_type_of_a_value_is_refused(kind, good, refuse):
    expected = f"key 'ridge.split' has the unknown type {kind}: the file is damaged"
    assert refuse(overwritten(good, "ridge.split type", kind)) == expected
    expected = f"key 'ridge.lambda' has the unknown element type {kind}: the file is damaged"
    assert refuse(overwritten(good, "ridge.lambda element type", kind)) == expected


def test_array_of_arrays_is_refused(good, refuse):
    expected = "key 'ridge.lambda' has the unknown element type 9: the file is damaged"
    assert refuse(overwritten(good, "ridge.lambda element type", sf.ARR)) == expected


@pytest.mark.parametrize("alignment", [0, 1, 16, 33, 64, 2**31])
@pytest.mark.field_report(20, "ridge-sidecar.cpp", 'if (gguf.has("general.alignment") && gguf.get_u32("general.alignment") != GGUF_DEFAULT_ALIGNMENT) {', "if (false) {")
def test_alignment_other_than_32_is_refused(alignment, good, refuse):
    def align(raw):
        raw.kvs.append(sf.RawKv("general.alignment", sf.U32, [alignment]))

    assert refuse(sf.operated(good, align)) == f"its alignment is {alignment}, expected 32 (key 'general.alignment')"


def test_alignment_of_another_type_is_refused(good, refuse):
    def align(raw):
        raw.kvs.append(sf.RawKv("general.alignment", sf.U64, [32]))

    assert refuse(sf.operated(good, align)) == "key 'general.alignment' has the type u64, expected u32"


def test_alignment_of_32_written_out_loads(good, tmp_path):
    data = sf.operated(good, lambda raw: raw.kvs.append(sf.RawKv("general.alignment", sf.U32, [32])))
    (tmp_path / "x.gguf").write_bytes(data)
    Sidecar(tmp_path / "x.gguf").__exit__()


def test_duplicate_and_empty_key_names_are_refused(good, refuse):
    double = sf.operated(good, lambda raw: raw.kvs.append(raw.kv("ridge.tail")), seal=False)
    assert refuse(double) == "key 'ridge.tail' stands twice in the file"
    empty = sf.operated(good, lambda raw: raw.kvs.append(sf.RawKv("", sf.U8, [1])), seal=False)
    assert refuse(empty) == "key 30 of 30 has an empty name: the file is damaged"


@pytest.mark.field_report(20, "ridge-gguf.cpp", "if (!seen.emplace(info.name, i).second) {", "if (false) {")
def test_duplicate_tensor_is_refused_even_where_both_are_alike(good, refuse):
    data = sf.operated(good, lambda raw: raw.tensors.append(raw.tensors[1]), seal=False)
    assert refuse(data) == "tensor 'blk.3.ridge.bias' stands twice in the file"


def test_key_name_of_control_characters_is_shown_escaped(good, refuse):
    data = sf.operated(good, lambda raw: raw.kvs.insert(0, sf.RawKv("a\n\x1b[31m", 99, [])), seal=False)
    assert refuse(data) == r"key 'a\x0a\x1b[31m' has the unknown type 99: the file is damaged"


#
# mutants
#


@pytest.mark.parametrize("kind, map_type", [("input", "f16"), ("input", "q8_0"), ("kv_prev", "f16"), ("input_lr", "q4_1")])
@pytest.mark.field_report(20, "ridge-gguf.cpp", "if (n > file.size() - pos) {", "if (false) {")
def test_thousands_of_mutants_are_refused_or_mean_the_same_and_none_ends_the_process(kind, map_type, tmp_path):
    good = sf.write_example(tmp_path / "good.gguf", map_type=map_type, kind=kind, kv_lengths=(32, 32))
    n = 2000
    worker = Path(__file__).with_name("sidecar_fuzz.py")
    p = subprocess.run([sys.executable, worker, good, "0", str(n), tmp_path], capture_output=True, text=True, timeout=300)
    seed = (tmp_path / "seed").read_text() if (tmp_path / "seed").exists() else "none"
    assert p.returncode == 0, f"exit {p.returncode} at seed {seed}:\n{p.stderr}"
    out = json.loads(p.stdout)
    assert out["mutants"] == n and out["unchanged"] < n // 5
    assert out["bad_message"] == []
    assert out["other_meaning"] == []
    assert len(out["refused"]) > 100  # kinds of refusal reached
    assert len(out["same_meaning"]) < n // 10


def test_the_fuzz_notices_an_end_of_the_process(tmp_path):
    """The harness itself: a worker that aborts is seen as one."""
    code = "import os, sidecar_fuzz, ridge_native\nridge_native.Sidecar.get = lambda *_: os.abort()\n"
    code += "sidecar_fuzz.main(sys.argv[1], 0, 10, pathlib.Path(sys.argv[2]))"
    good = sf.write_example(tmp_path / "good.gguf")
    command = [sys.executable, "-c", f"import pathlib, sys\n{code}", good, tmp_path]
    assert subprocess.run(command, cwd=ROOT / "tests", capture_output=True).returncode < 0
