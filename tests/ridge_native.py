"""libggml-ridge.so by ctypes, as the tests of the sidecar and the selectors need it.

The library is looked for in RIDGE_LIB_DIR, else in RIDGE_BUILD/bin, else in build/bin of the repository.
"""
from __future__ import annotations

import ctypes as ct
import os
from functools import cache
from pathlib import Path

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parents[1]


class Refused(Exception):
    """The reader refused a sidecar; the text is its message."""


class Expect(ct.Structure):
    """struct ggml_ridge_expect"""

    _fields_ = [
        ("architecture", ct.c_char_p),
        ("tokenizer_sha256", ct.c_char_p),
        ("hparams", ct.c_char_p),
        ("block_count", ct.c_int32),
        ("embedding_length", ct.c_int32),
    ]


_P, _S, _I = ct.c_void_p, ct.c_char_p, ct.c_int32
_ROWS = np.ctypeslib.ndpointer(np.int32, flags="C_CONTIGUOUS")

_FUNCTIONS = {
    "sidecar_load": ([_S, ct.POINTER(Expect), _S, ct.c_size_t], _P),
    "sidecar_free": ([_P], None),
    "sidecar_hash": ([_P], _S),
    "sidecar_kind": ([_P], _S),
    "sidecar_split": ([_P], _I),
    "sidecar_n_layer": ([_P], _I),
    "sidecar_n_embd": ([_P], _I),
    "sidecar_n_tail": ([_P], _I),
    "sidecar_n_sink": ([_P], _I),
    "sidecar_file_type": ([_P], _I),
    "sidecar_rank": ([_P], _I),
    "sidecar_k_length": ([_P, _I], _I),
    "sidecar_v_length": ([_P, _I], _I),
    "sidecar_str": ([_P, _S], _S),
    "sidecar_anchor": ([_P, _I, ct.POINTER(_S)], _S),
    "sidecar_weight": ([_P, _I], _P),
    "sidecar_down": ([_P, _I], _P),
    "sidecar_up": ([_P, _I], _P),
    "sidecar_bias": ([_P, _I], _P),
    "sha256": ([_S, ct.c_size_t, _S], None),
    "selector_from_name": ([_S], _I),
    "selector_name": ([_I], _S),
    "budget_rows": ([ct.c_float, _I], _I),
    "select_random": ([_I, _I, _I, ct.c_uint64, _ROWS], _I),
    "select_digits": ([_I, _I, ct.POINTER(_S), _ROWS, _I, _ROWS], _I),
}


@cache
def library(name: str) -> ct.CDLL:
    build = os.environ.get("RIDGE_BUILD", ROOT / "build")
    folder = Path(os.environ.get("RIDGE_LIB_DIR", Path(build) / "bin"))
    for suffix in (".so", ".dylib"):
        if (folder / f"lib{name}{suffix}").exists():
            return ct.CDLL(str(folder / f"lib{name}{suffix}"))
    raise FileNotFoundError(f"expected lib{name} in {folder}: build it with scripts/setup.sh or set RIDGE_LIB_DIR")


@cache
def ridge(name: str):
    """The function ggml_ridge_<name>."""
    f = getattr(library("ggml-ridge"), f"ggml_ridge_{name}")
    f.argtypes, f.restype = _FUNCTIONS[name]
    return f


def tensor_values(tensor: int) -> tuple[gguf.GGMLQuantizationType, tuple[int, int], bytes]:
    """Type, shape in ggml order and bytes of a two-dimensional (or flat: [n, 1]) host tensor."""
    base = library("ggml-base")
    base.ggml_get_data.argtypes, base.ggml_get_data.restype = [_P], _P
    base.ggml_nbytes.argtypes, base.ggml_nbytes.restype = [_P], ct.c_size_t
    kind = gguf.GGMLQuantizationType(_I.from_address(tensor).value)  # struct ggml_tensor: type, buffer, ne[4], ...
    ne = (ct.c_int64 * 4).from_address(tensor + 16)
    assert ne[2] == ne[3] == 1
    return kind, (ne[0], ne[1]), ct.string_at(base.ggml_get_data(tensor), base.ggml_nbytes(tensor))


class Sidecar:
    """A loaded sidecar. Raises Refused."""

    def __init__(self, path: os.PathLike | str, expect: dict | None = None, err_size: int = 4096):
        err = ct.create_string_buffer(err_size)
        e = None
        if expect is not None:
            e = Expect(**{k: v.encode() if isinstance(v, str) else v for k, v in expect.items()})
        self.handle = ridge("sidecar_load")(os.fsencode(path), e, err, err_size)
        if not self.handle:
            raise Refused(err.value.decode("utf-8", "surrogateescape"))

    def __enter__(self) -> Sidecar:
        return self

    def __exit__(self, *_) -> None:
        ridge("sidecar_free")(self.handle)

    def get(self, name: str):
        """Result of ggml_ridge_sidecar_<name>, text decoded."""
        v = ridge(f"sidecar_{name}")(self.handle)
        return v.decode() if isinstance(v, bytes) else v

    def str(self, key: str) -> str | None:
        v = ridge("sidecar_str")(self.handle, key.encode())
        return None if v is None else v.decode()

    def length(self, which: str, il: int) -> int:
        """Width of the rows of "k" or "v" that the map of layer il predicts."""
        return ridge(f"sidecar_{which}_length")(self.handle, il)

    def anchors(self) -> dict[str, str]:
        out, name = {}, _S()
        while (v := ridge("sidecar_anchor")(self.handle, len(out), ct.byref(name))) is not None:
            out[name.value.decode()] = v.decode()
        return out

    def tensor(self, part: str, il: int):
        """tensor_values() of the weight, down, up or bias of layer il, None where there is none."""
        t = ridge(f"sidecar_{part}")(self.handle, il)
        return None if not t else tensor_values(t)


def refusal(path: os.PathLike | str, expect: dict | None = None) -> str:
    """The message of a refusal without its head "sidecar 'PATH': ".

    Fails if the file is accepted, if the message is not one line of printable text, or if memory ran out: a refusal must
    not come from an absurd allocation.
    """
    try:
        with Sidecar(path, expect):
            raise AssertionError(f"{path} was accepted")
    except Refused as e:
        message = str(e)
    head = f"sidecar '{path}': "
    assert message.startswith(head) and message.isprintable(), repr(message)
    assert "memory" not in message, message
    return message[len(head) :]
