"""The sidecar of a mapper: what is written is read back, and what was damaged or is something else is refused by name."""
from __future__ import annotations

import hashlib
import struct
from dataclasses import asdict, replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from mapper_pico import config, corpus, library, source, target  # noqa: F401
from ridgefill import gguf_bounds
from ridgefill.errors import SidecarError
from ridgefill.mapper import fit, sidecar
from test_attention import scaled
from test_projections import rewritten


@pytest.fixture(scope="module")
def made(source, target, corpus, tmp_path_factory) -> fit.Result:  # noqa: F811
    """From a model whose rotation has a factor for each frequency."""
    folder = tmp_path_factory.mktemp("made")
    other = rewritten(Path(source), folder / "a.gguf", scaled, rope__freq_base=5e5)
    return fit.fit(config(other, target, corpus, folder / "m.gguf", map_type="q8_0", rotated=True))[0]


@pytest.fixture(scope="module")
def data(made) -> bytes:
    return Path(made.path).read_bytes()


def refusal(data: bytes, tmp_path) -> str:
    (tmp_path / "d.gguf").write_bytes(data)
    with pytest.raises(SidecarError) as e:
        sidecar.read(tmp_path / "d.gguf")
    assert str(e.value).startswith(f"{tmp_path / 'd.gguf'}: ")
    return str(e.value).removeprefix(f"{tmp_path / 'd.gguf'}: ")


def test_what_is_written_is_read_back(made):
    found, expected = sidecar.read(made.path), made.mapper
    for role in ("source", "target"):
        a, b = (asdict(getattr(m, role)) for m in (found, expected))
        for name in ("tokenizer_sha256", "hparams", "name", "architecture", "block_count", "file_type", "anchors"):
            assert a["fingerprint"][name] == b["fingerprint"][name]
        assert (a["heads"], a["head_size"], a["rope"]) == (b["heads"], b["head_size"], b["rope"])
    assert found.source.rope["factors"] == [float(x) for x in np.linspace(1, 8, 16, dtype=np.float32)]
    assert (found.source.rope["base"], found.target.rope["base"]) == (5e5, 1e4)
    assert (found.source.rope["adjacent"], found.target.rope["adjacent"]) == (True, False)
    assert found.calibration == expected.calibration
    for name in ("previous", "sink_rows", "tail", "map_type", "select"):
        assert getattr(found, name) == getattr(expected, name)
    for part in "kv":
        a, b = found.maps[part], expected.maps[part]
        assert (a.sources, a.tried) == (b.sources, b.tried)
        assert np.allclose(a.lambdas, b.lambdas) and np.allclose(a.r2_single, b.r2_single) and np.allclose(a.r2_by_number, b.r2_by_number)
        assert all(np.allclose(x, y) for x, y in zip(a.r2_head, b.r2_head, strict=True))
        for il in range(3):
            assert (a.weights[il] == b.weights[il]).all() and (a.biases[il] == b.biases[il]).all()
            assert found.weight(part, il).shape == (128, 32 * len(a.sources[il]))


def test_the_keys_are_those_of_the_document(made, tmp_path):
    """And the other way round, but for what a file need not have."""
    sidecar.write(tmp_path / "x.gguf", replace(made.mapper, selftest=SELFTEST))
    text = (Path(__file__).parents[1] / "docs" / "MAPPER.md").read_text()
    documented = set()
    for line in text[text.index("## The sidecar") :].splitlines():
        if line.startswith("| `"):
            for name in line.split("|")[1].replace("`", "").split(","):
                name = name.strip()
                for role in ("source", "target") if "SIDE" in name else ("",):
                    documented |= {name.replace("SIDE", role).replace("PART", part) for part in "kv"}
    found = {k for k in gguf.GGUFReader(tmp_path / "x.gguf").fields if not k.startswith("GGUF.")}
    assert found - documented == set()
    assert documented - found == {"ridge.target.rope.factors"}


SELFTEST = sidecar.SelfTest(list(range(20)), 8, [0, 2**32 - 1], np.arange(40).reshape(8, 5), np.linspace(9, -9, 40).reshape(8, 5))


def test_what_is_measured_later_is_read_back(made, tmp_path):
    """Scores and verdict of the run, and a self-test."""
    sidecar.write(tmp_path / "x.gguf", replace(made.mapper, selftest=SELFTEST))
    found, expected = sidecar.read(tmp_path / "x.gguf"), made.mapper
    assert (found.verdict, found.calibration.scored) == (expected.verdict, expected.calibration.scored)
    assert np.allclose(found.r2_rotated, expected.r2_rotated)
    for name in ("cosine", "cosine_mean"):
        assert np.allclose(getattr(found.scores, name), getattr(expected.scores, name))
    for part in "kv":
        assert np.allclose(found.scores.r2[part], expected.scores.r2[part])
        assert np.allclose(found.scores.concentration[part], expected.scores.concentration[part])
    assert (found.scores.n_tokens, found.scores.sources) == (expected.scores.n_tokens, expected.scores.sources)
    t = found.selftest
    assert (t.tokens, t.tail, t.file_types) == (SELFTEST.tokens, SELFTEST.tail, SELFTEST.file_types)
    assert (t.top_tokens == SELFTEST.top_tokens).all() and np.allclose(t.top_logits, SELFTEST.top_logits)


@pytest.mark.parametrize(
    "change, named",
    [
        (dict(tail=16), "key 'ridge.selftest.tail': expected less than the rows behind the sink rows of 20 tokens, found 16"),
        (dict(tail=7), "key 'ridge.selftest.top_tokens': expected 5 for each of at most 7 rows, found 40"),
        (dict(top_tokens=np.arange(39)), "key 'ridge.selftest.top_tokens': expected 5 for each of at most 8 rows, found 39"),
        (dict(top_logits=np.arange(39)), "key 'ridge.selftest.top_logits': expected 40 elements, found 39"),
        (dict(file_types=[1]), "key 'ridge.selftest.file_types': expected 2 elements, found 1"),
    ],
)
def test_a_self_test_that_makes_no_sense_is_refused(made, tmp_path, change, named):
    sidecar.write(tmp_path / "x.gguf", replace(made.mapper, selftest=replace(SELFTEST, **change)))
    with pytest.raises(SidecarError) as e:
        sidecar.read(tmp_path / "x.gguf")
    assert named in str(e.value)


def test_the_rounding_of_the_file_is_in_its_scores(source, target, corpus, tmp_path):  # noqa: F811
    """Maps of four bits score lower than they would unrounded, and the file says so."""
    exact, rounded = (
        fit.fit(config(source, target, corpus, tmp_path / f"{t}.gguf", map_type=t, ks=(2,), lambdas=(0.01,)))[0].mapper for t in ("f32", "q4_0")
    )
    for part in "kv":
        lost = np.subtract(exact.maps[part].r2, rounded.maps[part].r2)
        assert (lost > 1e-4).all() and (lost < 0.1).all()


def test_every_truncation_is_refused(data, tmp_path):
    end = gguf_bounds.check(data).header_end
    for n in [0, 3, 4, 7, 20, *range(24, end, 501), end - 1, end, end + 1, len(data) // 2, len(data) - 1]:
        assert refusal(data[:n], tmp_path)


def test_a_changed_byte_anywhere_is_refused(data, tmp_path):
    end = gguf_bounds.check(data).header_end
    start = -(-end // 32) * 32
    for at in [*range(0, end, 97), *range(start, len(data), len(data) // 40)]:
        damaged = bytearray(data)
        damaged[at] ^= 0x41
        name = refusal(bytes(damaged), tmp_path)
        assert at < end or "is damaged: sha256" in name or "finite" in name


def test_counts_beyond_the_file_are_refused_at_once(data, tmp_path):
    huge = struct.pack("<Q", 1 << 60)
    for at in (8, 16):  # tensors, keys: what comes after the last one is taken for one more, and makes no sense
        assert refusal(data[:at] + huge + data[at + 8 :], tmp_path)
    at = data.index(b"ridge.k.sources") + len(b"ridge.k.sources") + 4 + 4
    assert "key 'ridge.k.sources' needs" in refusal(data[:at] + huge + data[at + 8 :], tmp_path)
    at = data.index(b"ridge.tensors") + len(b"ridge.tensors") + 4 + 4
    assert "key 'ridge.tensors' has 1,152,921,504,606,846,976 strings" in refusal(data[:at] + huge + data[at + 8 :], tmp_path)


def resealed(data: bytes, change) -> bytes:
    """With bytes of the header changed, and its hash made anew."""
    extent = gguf_bounds.check(data)
    header = bytearray(data[: extent.header_end])
    change(header, extent.values)
    at = extent.values["ridge.metadata_sha256"] + 12
    header[at : at + 64] = b"0" * 64
    header[at : at + 64] = hashlib.sha256(header).hexdigest().encode()
    return bytes(header) + data[extent.header_end :]


@pytest.mark.parametrize(
    "key, offset, value, named",
    [
        ("ridge.format_version", 4, struct.pack("<I", 2), "it has the format version 2, expected 1"),
        ("ridge.k.sources", 16, struct.pack("<I", 99), "key 'ridge.k.sources': expected ascending layers below 4 for layer 0"),
        ("ridge.v.n_sources", 16, struct.pack("<I", 9), "key 'ridge.v.sources': expected"),
        ("ridge.k.lambda", 16, struct.pack("<f", float("nan")), "key 'ridge.k.lambda': expected finite numbers"),
        ("ridge.target.rope.dimension_count", 4, struct.pack("<I", 66), "target: expected an even number of rotated numbers up to 64, found 66"),
        ("ridge.source.rope.dimension_count", 4, struct.pack("<I", 30), "key 'ridge.source.rope.factors': expected 15 elements, found 16"),
        ("ridge.target.head_count_kv", 16, struct.pack("<I", 3), "key 'ridge.k.r2_head': expected 7 elements, found 6"),
        ("ridge.target.key_length", 4, struct.pack("<I", 96), "tensor blk.0.mapper.k.weight: expected Q8_0 ["),
        ("ridge.sink_rows", 0, struct.pack("<I", 5), "key 'ridge.sink_rows': expected UINT32, found INT32"),
        ("ridge.map_type", 12, b"q9_0", "key 'ridge.map_type': expected one of f32, f16, q8_0, q4_1, q4_0, found 'q9_0'"),
        ("adapter.type", 12, b"kv_napper", "it is an adapter with adapter.type = 'kv_napper', expected an adapter with adapter.type = 'kv_mapper'"),
    ],
)
def test_content_that_makes_no_sense_is_refused_by_name(data, tmp_path, key, offset, value, named):
    def change(header, values):
        header[values[key] + offset : values[key] + offset + len(value)] = value

    assert named in refusal(resealed(data, change), tmp_path)


def test_a_value_that_is_not_finite_is_refused(made, tmp_path):
    maps = made.mapper.maps["v"]
    bias = maps.biases[1].copy()
    bias[3] = np.inf
    broken = replace(made.mapper, maps={**made.mapper.maps, "v": replace(maps, biases=[maps.biases[0], bias, *maps.biases[2:]])})
    sidecar.write(tmp_path / "x.gguf", broken)
    with pytest.raises(SidecarError, match="tensor blk.1.mapper.v.bias: expected finite numbers"):
        sidecar.read(tmp_path / "x.gguf")


def test_tensors_that_overlap_or_come_twice_are_refused(data, tmp_path):
    """Entries of the same name, then of the same place."""
    first, second = b"blk.0.mapper.k.bias", b"blk.0.mapper.v.bias"
    entries = data.rindex(first)  # the last mention is the tensor's entry
    twice = data[: data.rindex(second)] + first + data[data.rindex(second) + len(first) :]
    assert refusal(twice, tmp_path) == "tensor 'blk.0.mapper.k.bias' comes twice"
    offset_at = entries + len(first) + 4 + 8 + 4
    at_zero = data[:offset_at] + struct.pack("<Q", 0) + data[offset_at + 8 :]
    assert "the data of tensors 'blk.0.mapper.k." in refusal(at_zero, tmp_path) and "overlap" in refusal(at_zero, tmp_path)
    misaligned = data[:offset_at] + struct.pack("<Q", 8) + data[offset_at + 8 :]
    assert refusal(misaligned, tmp_path) == "tensor 'blk.0.mapper.k.bias' is misaligned: its data is at offset 8"


def test_other_files_are_named(source, tmp_path):  # noqa: F811
    assert refusal(b"", tmp_path) == "it is empty"
    assert refusal(b"PK\x03\x04" + bytes(100), tmp_path) == "it is not a GGUF file"
    assert "it is a GGUF with general.type = " in refusal(Path(source).read_bytes(), tmp_path)
    with pytest.raises(SidecarError, match="no such file"):
        sidecar.read(tmp_path / "none.gguf")
