"""Finding and loading the native libraries, and the C functions of llama-ridge.h and ggml-ridge.h.

llama-cpp-python's low-level module binds upstream's functions against whatever libllama it is told to load; this module
tells it to load ours and adds what is ours. Functions of ours are bound when first used, so that an unpatched libllama
serves everything that needs upstream alone.
"""

from __future__ import annotations

import ctypes as ct
import importlib
import os
import sys
from functools import cache
from pathlib import Path

from .errors import RidgeError

LLAMA_CPP_VERSION = "0.3.36"  # its structures must be those of the pinned sources, see llama.cpp/UPSTREAM

_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
_PREFIX = "" if sys.platform == "win32" else "lib"

_llama = None  # llama_cpp.llama_cpp, once loaded
_dir: Path | None = None  # the folder it was loaded from


def library_dirs() -> list[tuple[str, Path]]:
    """Places where the libraries may lie, as (why, folder), best first."""
    package = Path(__file__).resolve().parent
    dirs = [("the installed package", package / "bin")]
    if (package.parents[1] / "llama.cpp" / "UPSTREAM").is_file():
        dirs.append(("the build folder of this checkout", package.parents[1] / "build" / "bin"))
    return dirs


def find_library_dir(lib_dir: str | os.PathLike | None = None) -> Path:
    """Folder that holds libllama: `lib_dir`, else $RIDGE_LIB_DIR, else the package's own, else the checkout's build.

    A folder that was asked for by name is never passed over in silence.

    Raises RidgeError, naming every place looked at.
    """
    if lib_dir is not None:
        places = [("the folder given", Path(lib_dir))]
    elif os.environ.get("RIDGE_LIB_DIR"):
        places = [("RIDGE_LIB_DIR", Path(os.environ["RIDGE_LIB_DIR"]))]
    else:
        places = library_dirs()
    name = f"{_PREFIX}llama{_SUFFIX}"
    for _, path in places:
        if (path / name).exists():
            return path.resolve()
    looked = "; ".join(f"{path} ({why})" for why, path in places)
    raise RidgeError(
        f"{name} was not found. Looked in: {looked}. Build it (cmake -B build && cmake --build build) or set "
        f"RIDGE_LIB_DIR to the folder that holds it."
    )


def load(lib_dir: str | os.PathLike | None = None):
    """Load libllama once per process and return llama-cpp-python's module of low-level bindings.

    Raises RidgeError when the library is missing, when llama-cpp-python is not the pinned version, or when another
    libllama is loaded already (a process holds one).
    """
    global _llama, _dir
    if _llama is not None and lib_dir is None:
        return _llama
    path = find_library_dir(lib_dir)
    if _llama is not None:
        if path != _dir:
            raise RidgeError(f"libllama is loaded from {_dir} already; a process cannot load a second one from {path}")
        return _llama
    os.environ["LLAMA_CPP_LIB_PATH"] = str(path)
    try:
        package = importlib.import_module("llama_cpp")
    except ModuleNotFoundError as e:
        raise RidgeError(
            f"the Python package llama_cpp is missing ({e}); install it without its own libllama: CMAKE_ARGS=-DLLAMA_BUILD=OFF "
            f"pip install --no-binary llama-cpp-python llama-cpp-python=={LLAMA_CPP_VERSION}"
        ) from e
    low = importlib.import_module("llama_cpp.llama_cpp")
    if package.__version__ != LLAMA_CPP_VERSION:
        raise RidgeError(f"expected llama-cpp-python {LLAMA_CPP_VERSION}, found {package.__version__}")
    loaded = Path(low._lib._name).resolve().parent
    if loaded != path:
        raise RidgeError(f"llama_cpp was imported before ridgefill and loaded {loaded}; expected {path}")
    _llama, _dir = low, path
    _redirect_log(low)
    low.llama_backend_init()
    return low


def loaded_dir() -> Path | None:
    """Folder of the loaded libllama, None before load()."""
    return _dir


#
# log
#

LOG_LEVELS = {"none": 0, "debug": 1, "info": 2, "warn": 3, "error": 4}
_log_sinks: list[list[tuple[int, str]]] = []  # lists that receive every line, see lib.captured_log
_log_last = 0  # level of the last line: level 5 continues it
_log_callback = None  # ctypes keeps no reference of its own


def _on_log(level: int, text: bytes, _user) -> None:
    global _log_last
    _log_last = _log_last if level == 5 else level
    line = (text or b"").decode("utf-8", "replace")
    for sink in _log_sinks:
        sink.append((_log_last, line))
    if not _log_sinks:
        print_log([(_log_last, line)])


def print_log(lines: list[tuple[int, str]]) -> None:
    """Print the lines that are important enough."""
    least = LOG_LEVELS.get(os.environ.get("RIDGE_LOG", "warn"), 3)
    sys.stderr.write("".join(text for level, text in lines if level >= least))


def _redirect_log(low) -> None:
    """Print warnings and errors only; RIDGE_LOG=info|debug prints more, RIDGE_LOG=error less."""
    global _log_callback
    _log_callback = low.llama_log_callback(_on_log)
    low.llama_log_set(_log_callback, None)


#
# llama-ridge.h
#


class RidgeParams(ct.Structure):  # struct llama_ridge_params
    _fields_ = [("mode", ct.c_int), ("split", ct.c_int32), ("n_tail", ct.c_int32), ("n_sink", ct.c_int32), ("n_step", ct.c_int32)]


class RidgePrefillStats(ct.Structure):  # struct llama_ridge_prefill_stats
    _fields_ = [
        ("n_rows", ct.c_int32),
        ("n_filled", ct.c_int32),
        ("n_exact", ct.c_int32),
        ("n_done", ct.c_int32),
        ("n_steps", ct.c_int32),
        ("i_step", ct.c_int32),
        ("n_steps_lower", ct.c_int32),
        ("t_lower_us", ct.c_int64),
        ("t_upper_us", ct.c_int64),
    ]


class RidgeTransferStats(ct.Structure):  # struct llama_ridge_transfer_stats
    _fields_ = [("n_rows", ct.c_int32), ("n_done", ct.c_int32), ("n_bytes", ct.c_int64), ("t_us", ct.c_int64)]


_i32p, _f32p, _voidp = ct.POINTER(ct.c_int32), ct.POINTER(ct.c_float), ct.c_void_p

_LLAMA_RIDGE = {
    # struct llama_ridge_params llama_ridge_default_params(void)
    "llama_ridge_default_params": ([], RidgeParams),
    # const char * llama_ridge_mode_name(enum llama_ridge_mode mode)
    "llama_ridge_mode_name": ([ct.c_int], ct.c_char_p),
    # int32_t llama_ridge_mode_from_name(const char * name)
    "llama_ridge_mode_from_name": ([ct.c_char_p], ct.c_int32),
    # const char * llama_ridge_last_error(void)
    "llama_ridge_last_error": ([], ct.c_char_p),
    # const char * llama_ridge_unsupported_model(const struct llama_model * model)
    "llama_ridge_unsupported_model": ([_voidp], ct.c_char_p),
    # const char * llama_ridge_unsupported(const struct llama_context * ctx)
    "llama_ridge_unsupported": ([_voidp], ct.c_char_p),
    # struct llama_ridge_maps * llama_ridge_maps_load(const struct llama_model * model, const char * path)
    "llama_ridge_maps_load": ([_voidp, ct.c_char_p], _voidp),
    # void llama_ridge_maps_free(struct llama_ridge_maps * maps)
    "llama_ridge_maps_free": ([_voidp], None),
    # int32_t llama_ridge_maps_split(const struct llama_ridge_maps * maps), and so on
    "llama_ridge_maps_split": ([_voidp], ct.c_int32),
    "llama_ridge_maps_n_tail": ([_voidp], ct.c_int32),
    "llama_ridge_maps_n_sink": ([_voidp], ct.c_int32),
    "llama_ridge_maps_kind": ([_voidp], ct.c_char_p),
    "llama_ridge_maps_hash": ([_voidp], ct.c_char_p),
    "llama_ridge_maps_size": ([_voidp], ct.c_size_t),
    # int32_t llama_ridge_model_fingerprint(const struct llama_model * model, int32_t split, char * buf, size_t size)
    "llama_ridge_model_fingerprint": ([_voidp, ct.c_int32, ct.c_char_p, ct.c_size_t], ct.c_int32),
    # int32_t llama_ridge_prefill_begin(struct llama_context * ctx, const struct llama_ridge_maps * maps,
    #     struct llama_ridge_params params, llama_seq_id seq_id, llama_pos pos0, const llama_token * tokens,
    #     int32_t n_tokens, const int32_t * exact_rows, int32_t n_exact_rows, struct llama_ridge_prefill ** prefill)
    "llama_ridge_prefill_begin": (
        [_voidp, _voidp, RidgeParams, ct.c_int32, ct.c_int32, _i32p, ct.c_int32, _i32p, ct.c_int32, ct.POINTER(_voidp)],
        ct.c_int32,
    ),
    # int32_t llama_ridge_prefill_step(struct llama_ridge_prefill * prefill)
    "llama_ridge_prefill_step": ([_voidp], ct.c_int32),
    # int32_t llama_ridge_prefill_n_done(const struct llama_ridge_prefill * prefill)
    "llama_ridge_prefill_n_done": ([_voidp], ct.c_int32),
    # int32_t llama_ridge_prefill_filled(const struct llama_ridge_prefill * prefill, int32_t * rows, int32_t n_max)
    "llama_ridge_prefill_filled": ([_voidp, _i32p, ct.c_int32], ct.c_int32),
    # struct llama_ridge_prefill_stats llama_ridge_prefill_get_stats(const struct llama_ridge_prefill * prefill)
    "llama_ridge_prefill_get_stats": ([_voidp], RidgePrefillStats),
    # void llama_ridge_prefill_cancel(struct llama_ridge_prefill * prefill)
    "llama_ridge_prefill_cancel": ([_voidp], None),
    # void llama_ridge_prefill_free(struct llama_ridge_prefill * prefill)
    "llama_ridge_prefill_free": ([_voidp], None),
    # struct llama_ridge_mapper * llama_ridge_mapper_load(const struct llama_model * source, const struct llama_model * target,
    #     const char * path)
    "llama_ridge_mapper_load": ([_voidp, _voidp, ct.c_char_p], _voidp),
    # void llama_ridge_mapper_free(struct llama_ridge_mapper * mapper)
    "llama_ridge_mapper_free": ([_voidp], None),
    # int32_t llama_ridge_mapper_n_sink(const struct llama_ridge_mapper * mapper), and so on
    "llama_ridge_mapper_n_sink": ([_voidp], ct.c_int32),
    "llama_ridge_mapper_n_tail": ([_voidp], ct.c_int32),
    "llama_ridge_mapper_hash": ([_voidp], ct.c_char_p),
    "llama_ridge_mapper_size": ([_voidp], ct.c_size_t),
    # int32_t llama_ridge_transfer_begin(struct llama_context * ctx_src, llama_seq_id seq_src, struct llama_context * ctx_dst,
    #     llama_seq_id seq_dst, const struct llama_ridge_mapper * mapper, llama_pos p0, llama_pos p1, int32_t n_step,
    #     struct llama_ridge_transfer ** transfer)
    "llama_ridge_transfer_begin": (
        [_voidp, ct.c_int32, _voidp, ct.c_int32, _voidp, ct.c_int32, ct.c_int32, ct.c_int32, ct.POINTER(_voidp)],
        ct.c_int32,
    ),
    # int32_t llama_ridge_transfer_step(struct llama_ridge_transfer * transfer)
    "llama_ridge_transfer_step": ([_voidp], ct.c_int32),
    # struct llama_ridge_transfer_stats llama_ridge_transfer_get_stats(const struct llama_ridge_transfer * transfer)
    "llama_ridge_transfer_get_stats": ([_voidp], RidgeTransferStats),
    # void llama_ridge_transfer_cancel(struct llama_ridge_transfer * transfer)
    "llama_ridge_transfer_cancel": ([_voidp], None),
    # void llama_ridge_transfer_free(struct llama_ridge_transfer * transfer)
    "llama_ridge_transfer_free": ([_voidp], None),
    # int64_t llama_ridge_get_kv(struct llama_context * ctx, llama_seq_id seq_id, int32_t il, char what,
    #     llama_pos p0, llama_pos p1, float * dst, int64_t n_max)
    "llama_ridge_get_kv": (
        [_voidp, ct.c_int32, ct.c_int32, ct.c_char, ct.c_int32, ct.c_int32, _f32p, ct.c_int64],
        ct.c_int64,
    ),
    # int32_t llama_ridge_copy_kv(struct llama_context * ctx, llama_seq_id seq_src, llama_seq_id seq_dst, int32_t il, char what,
    #     llama_pos p0, llama_pos p1)
    "llama_ridge_copy_kv": (
        [_voidp, ct.c_int32, ct.c_int32, ct.c_int32, ct.c_char, ct.c_int32, ct.c_int32],
        ct.c_int32,
    ),
}

# llama-ext.h is C++: its functions carry mangled names, given here for the Itanium ABI (gcc and clang)
_LLAMA_EXT = {
    # void llama_set_embeddings_layer_inp(struct llama_context * ctx, uint32_t lid, bool value)
    "llama_set_embeddings_layer_inp": (
        "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
        [_voidp, ct.c_uint32, ct.c_bool],
        None,
    ),
    # float * llama_get_embeddings_layer_inp(struct llama_context * ctx, uint32_t lid)
    "llama_get_embeddings_layer_inp": (
        "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
        [_voidp, ct.c_uint32],
        _f32p,
    ),
}


def _bind(lib: ct.CDLL, symbol: str, argtypes: list, restype, hint: str):
    try:
        f = getattr(lib, symbol)
    except AttributeError:
        raise RidgeError(f"{lib._name} has no function {symbol}: {hint}") from None
    f.argtypes, f.restype = argtypes, restype
    return f


@cache
def ridge(name: str):
    """The function `name` of llama-ridge.h. Raises RidgeError when the loaded libllama lacks it."""
    argtypes, restype = _LLAMA_RIDGE[name]
    return _bind(load()._lib, name, argtypes, restype, "it was built without the RidgeFill patch")


def is_patched() -> bool:
    """Whether the loaded libllama is ours."""
    return hasattr(load()._lib, "llama_ridge_last_error")


@cache
def ext(name: str):
    """The function `name` of upstream's llama-ext.h. Raises RidgeError when the loaded libllama lacks it."""
    symbol, argtypes, restype = _LLAMA_EXT[name]
    return _bind(load()._lib, symbol, argtypes, restype, f"expected the libllama of llama-cpp-python {LLAMA_CPP_VERSION}")


def last_error(fallback: str, status: int | None = None) -> RidgeError:
    """The error that the library left on this thread, as an exception to raise."""
    message = (ridge("llama_ridge_last_error")() or b"").decode("utf-8", "replace")
    return RidgeError(message or fallback, status)


#
# ggml-ridge.h
#


class RidgeExpect(ct.Structure):  # struct ggml_ridge_expect
    _fields_ = [
        ("architecture", ct.c_char_p),
        ("tokenizer_sha256", ct.c_char_p),
        ("hparams", ct.c_char_p),
        ("block_count", ct.c_int32),
        ("embedding_length", ct.c_int32),
    ]


_GGML_RIDGE = {
    # struct ggml_ridge_sidecar * ggml_ridge_sidecar_load(const char * path, const struct ggml_ridge_expect * expect,
    #     char * err, size_t err_size)
    "ggml_ridge_sidecar_load": ([ct.c_char_p, ct.POINTER(RidgeExpect), ct.c_char_p, ct.c_size_t], _voidp),
    # void ggml_ridge_sidecar_free(struct ggml_ridge_sidecar * sc)
    "ggml_ridge_sidecar_free": ([_voidp], None),
    # const char * ggml_ridge_sidecar_hash(const struct ggml_ridge_sidecar * sc), and so on
    "ggml_ridge_sidecar_hash": ([_voidp], ct.c_char_p),
    "ggml_ridge_sidecar_kind": ([_voidp], ct.c_char_p),
    "ggml_ridge_sidecar_split": ([_voidp], ct.c_int32),
    "ggml_ridge_sidecar_n_layer": ([_voidp], ct.c_int32),
    "ggml_ridge_sidecar_n_embd": ([_voidp], ct.c_int32),
    "ggml_ridge_sidecar_n_tail": ([_voidp], ct.c_int32),
    "ggml_ridge_sidecar_n_sink": ([_voidp], ct.c_int32),
    "ggml_ridge_sidecar_file_type": ([_voidp], ct.c_int32),
    # int32_t ggml_ridge_selector_from_name(const char * name)
    "ggml_ridge_selector_from_name": ([ct.c_char_p], ct.c_int32),
    # int32_t ggml_ridge_budget_rows(float budget, int32_t n_rows)
    "ggml_ridge_budget_rows": ([ct.c_float, ct.c_int32], ct.c_int32),
    # int32_t ggml_ridge_select_random(int32_t row0, int32_t row1, int32_t n, uint64_t seed, int32_t * rows)
    "ggml_ridge_select_random": ([ct.c_int32, ct.c_int32, ct.c_int32, ct.c_uint64, _i32p], ct.c_int32),
    # int32_t ggml_ridge_select_digits(int32_t row0, int32_t row1, const char * const * pieces, const int32_t * piece_len,
    #     int32_t n_max, int32_t * rows)
    "ggml_ridge_select_digits": (
        [ct.c_int32, ct.c_int32, ct.POINTER(ct.c_char_p), _i32p, ct.c_int32, _i32p],
        ct.c_int32,
    ),
}


@cache
def _ggml_ridge_lib() -> ct.CDLL:
    load()
    assert _dir is not None
    path = _dir / f"{_PREFIX}ggml-ridge{_SUFFIX}"
    if not path.exists():
        raise RidgeError(f"{path} was not found: that folder holds an unpatched build")
    return ct.CDLL(str(path))


@cache
def ggml_ridge(name: str):
    """The function `name` of ggml-ridge.h. Raises RidgeError when the library or the function is missing."""
    argtypes, restype = _GGML_RIDGE[name]
    return _bind(_ggml_ridge_lib(), name, argtypes, restype, "it is older than this package")
