"""Models, contexts and ridge prefills of the native library, as Python objects with NumPy arrays.

    with Model("model.gguf") as model, Context(model, n_ctx=4096) as ctx, Maps(model, "maps.gguf") as maps:
        tokens = model.tokenize(text)
        logits, prefill = ctx.fill_and_decode(tokens, mode="fill", maps=maps)
        answer = greedy(ctx, logits[-1], 32)

Objects own what they hold and free it in close(), on leaving `with`, or when collected. One context is used by one
thread at a time, as in the C API.
"""

from __future__ import annotations

import ctypes as ct
import json
import os
from collections.abc import Iterable, Sequence
from contextlib import contextmanager

import numpy as np

from . import native
from .errors import RidgeError
from .native import is_patched, load  # noqa: F401  (the public names of this module)

KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}  # enum ggml_type
_FLASH_ATTN = {None: -1, False: 0, True: 1}  # enum llama_flash_attn_type; None is "auto"


@contextmanager
def captured_log():
    """Collect what the library logs meanwhile instead of printing it: (level, text) pairs, levels of `native.LOG_LEVELS`."""
    lines: list[tuple[int, str]] = []
    native._log_sinks.append(lines)
    try:
        yield lines
    finally:
        native._log_sinks.remove(lines)


class _Owner:
    """Holds one native pointer and frees it once."""

    _ptr = None

    def close(self) -> None:
        ptr, self._ptr = self._ptr, None
        if ptr:
            self._free(ptr)

    def _free(self, ptr) -> None:
        raise NotImplementedError

    @property
    def ptr(self):
        if not self._ptr:
            raise RidgeError(f"this {type(self).__name__} is closed")
        return self._ptr

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __del__(self):
        self.close()


def _i32(values: Iterable[int]) -> np.ndarray:
    return np.ascontiguousarray(np.fromiter(values, np.int32) if not isinstance(values, np.ndarray) else values, np.int32)


def _p32(a: np.ndarray):
    return a.ctypes.data_as(ct.POINTER(ct.c_int32))


class Model(_Owner):
    """A GGUF model file.

    `n_gpu_layers` layers go to accelerators (0: none, -1: all). `use_extra_bufts=False` keeps weights as they lie in the file
    instead of repacking them for the CPU.

    Raises RidgeError when the file is missing or cannot be loaded.
    """

    def __init__(self, path: str | os.PathLike, n_gpu_layers: int = 0, use_extra_bufts: bool = True):
        low = load()
        self.path = os.fspath(path)
        if not os.path.isfile(self.path):
            raise RidgeError(f"no such model file: {self.path}")
        params = low.llama_model_default_params()
        params.n_gpu_layers = n_gpu_layers
        params.use_extra_bufts = use_extra_bufts
        with captured_log() as log:
            self._ptr = low.llama_model_load_from_file(os.fsencode(self.path), params)
        if not self._ptr:
            reasons = [text.strip() for level, text in log if level == native.LOG_LEVELS["error"]]
            raise RidgeError(f"{self.path} could not be loaded as a model: {reasons[0] if reasons else 'no reason given'}")
        native.print_log(log)
        self._vocab = low.llama_model_get_vocab(self._ptr)
        self.n_layer: int = low.llama_model_n_layer(self._ptr)
        self.n_embd: int = low.llama_model_n_embd(self._ptr)
        self.n_head: int = low.llama_model_n_head(self._ptr)
        self.n_head_kv: int = low.llama_model_n_head_kv(self._ptr)
        self.n_vocab: int = low.llama_vocab_n_tokens(self._vocab)
        self.n_ctx_train: int = low.llama_model_n_ctx_train(self._ptr)
        self.bos: int = low.llama_vocab_bos(self._vocab)
        self.eos: int = low.llama_vocab_eos(self._vocab)
        self.architecture = self.meta("general.architecture") or ""
        self.head_size = int(self.meta(f"{self.architecture}.attention.key_length") or self.n_embd // max(self.n_head, 1))

    def _free(self, ptr) -> None:
        native._llama.llama_model_free(ptr)

    def meta(self, key: str) -> str | None:
        """Scalar metadata value of the GGUF as text; None when the file lacks the key."""
        size = 256
        while True:
            buf = ct.create_string_buffer(size)
            n = native._llama.llama_model_meta_val_str(self.ptr, key.encode(), buf, size)
            if n < 0:
                return None
            if n < size:
                return buf.value.decode("utf-8", "replace")
            size = n + 1

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`; `add_special` puts BOS/EOS where the model wants them."""
        data = text.encode()
        n = len(data) + 8
        while True:
            out = np.empty(n, np.int32)
            got = native._llama.llama_tokenize(self._vocab, data, len(data), _p32(out), n, add_special, parse_special)
            if got >= 0:
                return out[:got].tolist()
            if n >= -got:
                raise RidgeError(f"the tokenizer of {self.path} failed on a text of {len(data)} bytes")
            n = -got

    def piece(self, token: int, special: bool = True) -> bytes:
        """Bytes of one token; control tokens are b"" unless `special`."""
        size = 64
        while True:
            buf = ct.create_string_buffer(size)
            n = native._llama.llama_token_to_piece(self._vocab, token, buf, size, 0, special)
            if n >= 0:
                return buf.raw[:n]
            size = -n

    def detokenize(self, tokens: Iterable[int], special: bool = False) -> str:
        return b"".join(self.piece(t, special) for t in tokens).decode("utf-8", "replace")

    def is_eog(self, token: int) -> bool:
        """Whether a token ends generation."""
        return bool(native._llama.llama_vocab_is_eog(self._vocab, token))

    def chat(self, messages: Sequence[dict], add_assistant: bool = True) -> str:
        """Messages ({"role", "content"}) in the model's own chat template, ready to tokenize with parse_special=True.

        Raises RidgeError when the model has no template that the library knows.
        """
        low = native._llama
        template = low.llama_model_chat_template(self.ptr, None)
        if not template:
            raise RidgeError(f"{self.path} has no chat template")
        chat = (low.llama_chat_message * len(messages))(
            *[low.llama_chat_message(m["role"].encode(), m["content"].encode()) for m in messages]
        )
        size = 1024 + 2 * sum(len(m["content"].encode()) for m in messages)
        while True:
            buf = ct.create_string_buffer(size)
            n = low.llama_chat_apply_template(template, chat, len(messages), add_assistant, buf, size)
            if n < 0:
                raise RidgeError(f"the chat template of {self.path} is not one that the library knows")
            if n <= size:
                return buf.raw[:n].decode()
            size = n

    def fingerprint(self, split: int) -> dict:
        """What a sidecar for split layer `split` records of this model (docs/SIDECAR.md, without the `ridge.model.`)."""
        f = native.ridge("llama_ridge_model_fingerprint")
        n = f(self.ptr, split, None, 0)
        if n < 0:
            raise native.last_error("the model has no fingerprint", n)
        buf = ct.create_string_buffer(n + 1)
        f(self.ptr, split, buf, n + 1)
        return json.loads(buf.value)

    def unsupported(self) -> str | None:
        """Why this model cannot be filled, None when it can."""
        reason = native.ridge("llama_ridge_unsupported_model")(self.ptr)
        return reason.decode() if reason else None


class Maps(_Owner):
    """A sidecar checked against `model` and placed on the devices of its layers.

    Raises RidgeError with the reader's message when it is refused.
    """

    def __init__(self, model: Model, path: str | os.PathLike):
        self.model, self.path = model, os.fspath(path)
        self._ptr = native.ridge("llama_ridge_maps_load")(model.ptr, os.fsencode(self.path))
        if not self._ptr:
            raise native.last_error(f"{self.path} was refused", -6)
        self.split: int = native.ridge("llama_ridge_maps_split")(self._ptr)
        self.n_tail: int = native.ridge("llama_ridge_maps_n_tail")(self._ptr)
        self.n_sink: int = native.ridge("llama_ridge_maps_n_sink")(self._ptr)
        self.kind: str = native.ridge("llama_ridge_maps_kind")(self._ptr).decode()
        self.hash: str = native.ridge("llama_ridge_maps_hash")(self._ptr).decode()
        self.size: int = native.ridge("llama_ridge_maps_size")(self._ptr)

    def _free(self, ptr) -> None:
        native.ridge("llama_ridge_maps_free")(ptr)


class Prefill(_Owner):
    """One prompt on its way into the cache of `ctx`; made by Context.prefill."""

    def __init__(self, ctx: Context, maps: Maps | None, params: native.RidgeParams, seq: int, pos0: int, tokens, exact_rows):
        self.ctx, self.maps, self.tokens = ctx, maps, _i32(tokens)
        rows = _i32(exact_rows)
        out = ct.c_void_p()
        status = native.ridge("llama_ridge_prefill_begin")(
            ctx.ptr, maps.ptr if maps else None, params, seq, pos0,
            _p32(self.tokens), len(self.tokens), _p32(rows), len(rows), ct.byref(out),
        )  # fmt: skip
        if status < 0:
            raise native.last_error("the prefill was refused", status)
        self._ptr = out.value

    def _free(self, ptr) -> None:
        # freeing an unfinished prefill touches its context, which may be gone when the collector runs
        if self.ctx._ptr:
            native.ridge("llama_ridge_prefill_free")(ptr)

    def step(self) -> bool:
        """Run one step; True when nothing is left to do. Raises RidgeError, after which the rows are gone from the cache."""
        status = native.ridge("llama_ridge_prefill_step")(self.ptr)
        if status < 0:
            raise native.last_error("the prefill failed", status)
        return status == 1

    def run(self) -> Prefill:
        """Run every step that is left."""
        while not self.step():
            pass
        return self

    def cancel(self) -> None:
        """Stop and remove the rows of this prefill from the cache."""
        native.ridge("llama_ridge_prefill_cancel")(self.ptr)

    @property
    def n_done(self) -> int:
        """Rows that the steps put into the cache; tokens[n_done:] are left to Context.decode."""
        return native.ridge("llama_ridge_prefill_n_done")(self.ptr)

    @property
    def stats(self) -> dict[str, int]:
        """Counts and times (microseconds) of struct llama_ridge_prefill_stats."""
        s = native.ridge("llama_ridge_prefill_get_stats")(self.ptr)
        return {name: getattr(s, name) for name, _ in s._fields_}

    @property
    def filled(self) -> np.ndarray:
        """Indices into the prompt of the filled rows, ascending, int32 [n_filled]."""
        f = native.ridge("llama_ridge_prefill_filled")
        n = f(self.ptr, None, 0)
        rows = np.empty(n, np.int32)
        f(self.ptr, _p32(rows), n)
        return rows


class Context(_Owner):
    """An inference context with its KV cache.

    `n_ctx` counts cells over all sequences, as in the C API. `type_k`/`type_v` are names of KV_TYPES; `flash_attn` may be None
    for the library's own choice.

    Raises RidgeError when the library refuses the parameters.
    """

    def __init__(
        self,
        model: Model,
        n_ctx: int,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_seq_max: int = 1,
        kv_unified: bool = False,
        flash_attn: bool | None = True,
        type_k: str = "f16",
        type_v: str = "f16",
        n_threads: int = 2,
    ):
        low = load()
        p = low.llama_context_default_params()
        p.n_ctx, p.n_batch, p.n_ubatch, p.n_seq_max, p.kv_unified = n_ctx, n_batch, n_ubatch, n_seq_max, kv_unified
        p.n_threads = p.n_threads_batch = n_threads
        p.flash_attn_type = _FLASH_ATTN[flash_attn]
        for field, name in (("type_k", type_k), ("type_v", type_v)):
            if name not in KV_TYPES:
                raise RidgeError(f"{field}: expected one of {', '.join(KV_TYPES)}, found {name!r}")
            setattr(p, field, KV_TYPES[name])
        self.model = model
        with captured_log() as log:
            self._ptr = low.llama_init_from_model(model.ptr, p)
        if not self._ptr:
            reasons = [text.strip() for level, text in log if level >= native.LOG_LEVELS["error"]]
            raise RidgeError(f"no context for {model.path}: {reasons[0] if reasons else 'no reason given'}")
        native.print_log(log)
        self._mem = low.llama_get_memory(self._ptr)
        self.n_ctx: int = low.llama_n_ctx(self._ptr)
        self.n_batch: int = low.llama_n_batch(self._ptr)
        self.n_ubatch: int = low.llama_n_ubatch(self._ptr)
        self._layers: tuple[int, ...] = ()
        self._inputs: dict[int, list[np.ndarray]] = {}

    def _free(self, ptr) -> None:
        if self.model._ptr:  # a context outlives its model only by mistake, and freeing it would read the model
            native._llama.llama_free(ptr)

    #
    # decoding
    #

    def _decode_batch(self, tokens: np.ndarray, pos0: int, seq: int, wanted: np.ndarray) -> np.ndarray:
        """One llama_decode(); logits of the rows where `wanted`, a copy [n_wanted, n_vocab]."""
        low, n = native._llama, len(tokens)
        pos = np.arange(pos0, pos0 + n, dtype=np.int32)
        n_seq_id = np.ones(n, np.int32)
        flags = wanted.astype(np.int8)
        one_seq = ct.pointer(ct.c_int32(seq))
        seq_id = (ct.POINTER(ct.c_int32) * n)(*([one_seq] * n))
        batch = low.llama_batch(
            n, _p32(tokens), None, _p32(pos), _p32(n_seq_id), seq_id, flags.ctypes.data_as(ct.POINTER(ct.c_int8))
        )
        status = low.llama_decode(self.ptr, batch)
        if status != 0:
            why = {1: "no free cells in the cache", 2: "aborted", -1: "the batch is not valid"}.get(status, "compute failed")
            raise RidgeError(f"llama_decode of {n} rows at position {pos0} of sequence {seq} returned {status}: {why}", status)
        for il in self._layers:
            rows = native.ext("llama_get_embeddings_layer_inp")(self.ptr, il)
            self._inputs[il].append(np.ctypeslib.as_array(rows, (n, self.model.n_embd)).copy())
        n_out = int(flags.sum())
        if n_out == 0:
            return np.empty((0, self.model.n_vocab), np.float32)
        return np.ctypeslib.as_array(low.llama_get_logits(self.ptr), (n_out, self.model.n_vocab)).copy()

    def decode(
        self, tokens: Sequence[int], pos0: int = 0, seq: int = 0, logits: str | Iterable[int] = "last"
    ) -> np.ndarray:
        """Run `tokens` at positions pos0.. of sequence `seq` through upstream's decode, in batches of n_batch rows.

        `logits` is "last", "all", "none", or indices into `tokens`. Returns float32 [rows asked for, n_vocab] in the order
        of the tokens.

        Raises RidgeError when the cache is full or the backend fails; batches before that stay in the cache.
        """
        ids = _i32(tokens)
        if len(ids) == 0:
            raise RidgeError("decode: expected at least one token, found none")
        wanted = np.zeros(len(ids), bool)
        if not isinstance(logits, str):
            wanted[list(logits)] = True
        elif logits in ("all", "last"):
            wanted[0 if logits == "all" else -1 :] = True
        elif logits != "none":
            raise RidgeError(f"logits: expected 'last', 'all', 'none' or indices, found {logits!r}")
        self._inputs = {il: [] for il in self._layers}
        out = []
        for i in range(0, len(ids), self.n_batch):
            j = i + self.n_batch
            out.append(self._decode_batch(ids[i:j], pos0 + i, seq, wanted[i:j]))
        return out[0] if len(out) == 1 else np.concatenate(out)

    #
    # layer inputs
    #

    def capture(self, layers: Iterable[int]) -> None:
        """Keep the inputs of these layers (0..n_layer-1) at every later decode; () stops it.

        Raises RidgeError for a layer out of range or a model whose graph does not name its layer inputs.
        """
        layers = tuple(sorted(set(layers)))
        bad = [il for il in layers if not 0 <= il < self.model.n_layer]
        if bad:
            raise RidgeError(f"capture: expected layers 0..{self.model.n_layer - 1}, found {bad}")
        if layers and is_patched() and (reason := self.model.unsupported()):
            raise RidgeError(f"capture: {reason}")
        enable = native.ext("llama_set_embeddings_layer_inp")
        for il in set(self._layers) - set(layers):
            enable(self.ptr, il, False)
        for il in set(layers) - set(self._layers):
            enable(self.ptr, il, True)
        self._layers, self._inputs = layers, {}

    def layer_inputs(self, il: int) -> np.ndarray:
        """Inputs of layer `il` (the residual stream before it) for the tokens of the last decode, float32 [n_tokens, n_embd]."""
        if not self._inputs.get(il):
            raise RidgeError(f"the input of layer {il} was not captured: call capture([{il}]) before decode")
        parts = self._inputs[il]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    #
    # ridge prefill
    #

    def prefill(
        self,
        tokens: Sequence[int],
        seq: int = 0,
        pos0: int = 0,
        mode: str = "fill",
        maps: Maps | None = None,
        split: int = -1,
        n_tail: int = 512,
        n_sink: int = -1,
        exact_rows: Iterable[int] = (),
        n_step: int = 0,
    ) -> Prefill:
        """Begin a prefill (llama_ridge_prefill_begin); nothing runs before its step() or run().

        `exact_rows` are indices into `tokens` that run every layer besides sink and tail rows; order and repeats do not matter.

        Raises RidgeError when the mode is unknown or the library refuses.
        """
        code = native.ridge("llama_ridge_mode_from_name")(mode.encode())
        if code < 0:
            raise RidgeError(f"mode: expected off, plumb, identity, nofill or fill, found {mode!r}", -1)
        params = native.RidgeParams(code, split, n_tail, n_sink, n_step)
        return Prefill(self, maps, params, seq, pos0, tokens, sorted(set(int(r) for r in exact_rows)))

    def fill_and_decode(
        self, tokens: Sequence[int], seq: int = 0, pos0: int = 0, logits: str | Iterable[int] = "last", **prefill
    ) -> tuple[np.ndarray, Prefill]:
        """Prefill, then decode the rest of the prompt: (logits of the rest as in decode(), the finished prefill).

        Index lists in `logits` count from the first row that is left to decode().
        """
        p = self.prefill(tokens, seq=seq, pos0=pos0, **prefill).run()
        rest = p.tokens[p.n_done :]
        return self.decode(rest, pos0=pos0 + p.n_done, seq=seq, logits=logits), p

    #
    # cache
    #

    def get_kv(self, seq: int, il: int, what: str, p0: int, p1: int) -> np.ndarray:
        """K ("k") or V ("v") of layer `il`, positions [p0, p1), de-rotated: float32 [rows, n_head_kv, head size]."""
        f = native.ridge("llama_ridge_get_kv")
        args = (self.ptr, seq, il, what.encode(), p0, p1)
        n = f(*args, None, 0)
        if n < 0:
            raise native.last_error("the cache rows could not be read", n)
        out = np.empty(n, np.float32)
        got = f(*args, out.ctypes.data_as(ct.POINTER(ct.c_float)), n)
        if got != n:
            raise native.last_error(f"expected {n} floats of the cache, found {got}", got)
        return out.reshape(p1 - p0, self.model.n_head_kv, -1) if n else out.reshape(0, self.model.n_head_kv, self.model.head_size)

    def copy_kv(self, src: int, dst: int, il: int, what: str, p0: int, p1: int) -> None:
        """Copy K ("k") or V ("v") of layer `il`, positions [p0, p1), from sequence `src` to `dst`, which holds these positions in cells of its own."""
        status = native.ridge("llama_ridge_copy_kv")(self.ptr, src, dst, il, what.encode(), p0, p1)
        if status < 0:
            raise native.last_error("the cache rows could not be copied", status)

    def state(self, seq: int) -> bytes:
        """The cells of a sequence, as upstream saves them."""
        low = native._llama
        size = low.llama_state_seq_get_size(self.ptr, seq)
        out = (ct.c_uint8 * size)()
        got = low.llama_state_seq_get_data(self.ptr, out, size, seq)
        if got != size or not size:
            raise RidgeError(f"the state of sequence {seq}: expected {size} bytes, found {got}")
        return bytes(out)

    def set_state(self, seq: int, state: bytes) -> None:
        """Put cells that state() gave, of any sequence, in place of those of `seq`. Raises RidgeError when that fails."""
        data = (ct.c_uint8 * len(state)).from_buffer_copy(state)
        if not native._llama.llama_state_seq_set_data(self.ptr, data, len(state), seq):
            raise RidgeError(f"a state of {len(state)} bytes could not be put into sequence {seq}")

    def seq_rm(self, seq: int, p0: int = -1, p1: int = -1) -> bool:
        """Remove positions [p0, p1) of a sequence; -1 leaves that end open."""
        return bool(native._llama.llama_memory_seq_rm(self._mem, seq, p0, p1))

    def seq_cp(self, src: int, dst: int) -> None:
        """Make sequence `dst` a copy of `src`."""
        native._llama.llama_memory_seq_rm(self._mem, dst, -1, -1)
        native._llama.llama_memory_seq_cp(self._mem, src, dst, -1, -1)

    def seq_pos_max(self, seq: int = 0) -> int:
        """Last position of a sequence, -1 when it is empty."""
        return native._llama.llama_memory_seq_pos_max(self._mem, seq)

    def clear(self) -> None:
        """Empty the cache."""
        native._llama.llama_memory_clear(self._mem, True)


def greedy(
    ctx: Context, first_logits: np.ndarray, n: int, seq: int = 0, pos: int | None = None, stop_at_eog: bool = True
) -> list[int]:
    """At most `n` tokens, each the likeliest, after logits [n_vocab] of the prompt's last row.

    `pos` is the position of the first new token, by default the one after the sequence's last. An end-of-generation token
    stops it and is not returned. The last token returned is not decoded.
    """
    pos = ctx.seq_pos_max(seq) + 1 if pos is None else pos
    out: list[int] = []
    logits = np.asarray(first_logits).reshape(-1)
    while len(out) < n:
        token = int(logits.argmax())
        if stop_at_eog and ctx.model.is_eog(token):
            break
        out.append(token)
        if len(out) < n:
            logits = ctx.decode([token], pos0=pos + len(out) - 1, seq=seq)[0]
    return out


def select_rows(
    kind: str, model: Model, tokens: Sequence[int], row0: int, row1: int, budget: float = 0.0, seed: int = 0
) -> list[int]:
    """Rows of tokens[row0:row1] to run exactly, by the library's selector `kind` (none, random, digits): sorted indices into `tokens`.

    `budget` below 1 is a share of the rows, from 1 on a number; 0 is no rows for random and no limit for digits.

    Raises RidgeError for an unknown kind, a budget that is negative or not finite, or rows outside `tokens`.
    """
    code = native.ggml_ridge("ggml_ridge_selector_from_name")(kind.encode())
    if code < 0:
        raise RidgeError(f"rows: expected none, random or digits, found {kind!r}")
    if not 0 <= row0 <= row1 <= len(tokens):
        raise RidgeError(f"rows: expected 0 <= row0 <= row1 <= {len(tokens)}, found row0 {row0}, row1 {row1}")
    n_max = native.ggml_ridge("ggml_ridge_budget_rows")(budget, row1 - row0)
    if n_max < 0:
        raise RidgeError(f"budget: expected a finite number that is not negative, found {budget}")
    rows = np.empty(max(row1 - row0, 1), np.int32)
    n = 0
    if kind == "random":
        n = native.ggml_ridge("ggml_ridge_select_random")(row0, row1, n_max, seed, _p32(rows))
    elif kind == "digits":
        pieces = [model.piece(int(t)) for t in tokens]
        lengths = _i32([len(p) for p in pieces])
        n = native.ggml_ridge("ggml_ridge_select_digits")(
            row0, row1, (ct.c_char_p * len(pieces))(*pieces), _p32(lengths), n_max, _p32(rows)
        )
    return rows[:n].tolist()
