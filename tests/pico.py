"""Pico models: random weights, a few layers, one GGUF per architecture, written in a moment.

A test that compares bits needs every graph the library can build, not a model that answers well. `build` writes a model
with a real byte-level BPE tokenizer and a chat template, so that the same file serves the bindings, the tools and the
server. Weights are scaled so that every layer changes the stream by about its own size and attention is not flat:
an error in any layer reaches the logits.
"""
from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import gguf
import numpy as np

from ridgefill.pico.recipes import CHAT_TEMPLATE, SPECIAL

ARCHS = ("llama", "qwen2", "qwen3", "qwen3moe", "mistral3")

# merges in the order a trained BPE would apply them; words of two and three merges, so that pieces differ in length
_PAIRS = "t h;th e;Ġ the;i n;in g;a n;an d;Ġ and;o u;e r;r e;o n;Ġ a;Ġ s;Ġ w;o r;e n;a t;i s;Ġ is;Ġ c;Ġ f;Ġ o;Ġo f;i t".split(";")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a pico model. Widths in floats, `head` is the size of one attention head."""

    head: int = 64
    n_layer: int = 8
    n_embd: int = 0  # 0: n_head * head
    n_head: int = 4
    n_head_kv: int = 2
    n_ff: int = 0  # 0: 2 * n_embd
    n_expert: int = 8
    n_expert_used: int = 2
    n_ctx_train: int = 8192

    @property
    def width(self) -> int:
        return self.n_embd or self.n_head * self.head

    @property
    def ff(self) -> int:
        return self.n_ff or 2 * self.width


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """What a pico model's tokenizer has besides the bytes, SPECIAL and the merges of all pico models."""

    merges: tuple[str, ...] = ()
    special: tuple[str, ...] = ()  # further control tokens
    add_bos: bool = False

    def vocabulary(self) -> tuple[list[str], list[int], list[str]]:
        """Token texts, token types and merges; padded to a multiple of 32 so that the output matrix can be quantised."""
        merges = [*_PAIRS, *self.merges]
        normal = [*byte_alphabet(), *(p.replace(" ", "") for p in merges)]
        texts = [*SPECIAL, *normal, *self.special]
        n_pad = -len(texts) % 32
        texts += [f"<pad{i}>" for i in range(n_pad)]
        control, unused = gguf.TokenType.CONTROL, gguf.TokenType.UNUSED
        types = [control] * len(SPECIAL) + [gguf.TokenType.NORMAL] * len(normal)
        types += [control] * len(self.special) + [unused] * n_pad
        return texts, [int(t) for t in types], merges


def byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, in byte order (GPT-2's convention)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {}, 0
    for b in range(256):
        table[b] = chr(b) if b in plain else chr(256 + extra)
        extra += b not in plain
    return [table[b] for b in range(256)]


def _write_hparams(w: gguf.GGUFWriter, arch: str, s: Shape, temperature: bool) -> None:
    w.add_name(f"pico {arch}")
    w.add_context_length(s.n_ctx_train)
    w.add_embedding_length(s.width)
    w.add_block_count(s.n_layer)
    w.add_feed_forward_length(s.ff)
    w.add_head_count(s.n_head)
    w.add_head_count_kv(s.n_head_kv)
    w.add_key_length(s.head)
    w.add_value_length(s.head)
    w.add_rope_dimension_count(s.head)
    w.add_rope_freq_base(10000.0)
    w.add_layer_norm_rms_eps(1e-5)
    if arch == "qwen3moe":
        w.add_expert_count(s.n_expert)
        w.add_expert_used_count(s.n_expert_used)
        w.add_expert_feed_forward_length(s.ff // 2)
    if arch == "mistral3" and temperature:
        # a short original context, so that the factor on Q changes several times within a test's prompt
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(8.0)
        w.add_rope_scaling_orig_ctx_len(64)
        w.add_attn_temperature_scale(0.1)


def _write_tokenizer(w: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    texts, types, merges = tokenizer.vocabulary()
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("smollm")
    w.add_token_list(texts)
    w.add_token_types(types)
    w.add_token_merges(merges)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_pad_token_id(0)
    w.add_add_bos_token(tokenizer.add_bos)
    w.add_chat_template(CHAT_TEMPLATE)


def _write_layer(add: Callable, noise: Callable, arch: str, s: Shape, il: int) -> None:
    """Tensors of layer il. `noise(rows, cols, gain)` has entries of deviation gain / sqrt(cols)."""
    d, q, kv, p = s.width, s.n_head * s.head, s.n_head_kv * s.head, f"blk.{il}."
    add(p + "attn_norm.weight", noise(1, d, 0.1)[0] + 1)
    add(p + "attn_q.weight", noise(q, d, 1.4))
    add(p + "attn_k.weight", noise(kv, d, 1.4))
    add(p + "attn_v.weight", noise(kv, d, 1.0))
    if arch == "qwen2":
        for name, n in (("q", q), ("k", kv), ("v", kv)):
            add(p + f"attn_{name}.bias", noise(1, n, 3.0)[0])
    if arch in ("qwen3", "qwen3moe"):
        add(p + "attn_q_norm.weight", noise(1, s.head, 0.1)[0] + 1.4)
        add(p + "attn_k_norm.weight", noise(1, s.head, 0.1)[0] + 1.4)
    add(p + "attn_output.weight", noise(d, q, 1.5))
    add(p + "ffn_norm.weight", noise(1, d, 0.1)[0] + 1)
    if arch == "qwen3moe":
        e, f = s.n_expert, s.ff // 2
        add(p + "ffn_gate_inp.weight", noise(e, d, 2.0))
        add(p + "ffn_gate_exps.weight", noise(e * f, d, 1.0).reshape(e, f, d))
        add(p + "ffn_up_exps.weight", noise(e * f, d, 1.0).reshape(e, f, d))
        add(p + "ffn_down_exps.weight", noise(e * d, f, 1.5).reshape(e, d, f))
    else:
        add(p + "ffn_gate.weight", noise(s.ff, d, 1.0))
        add(p + "ffn_up.weight", noise(s.ff, d, 1.0))
        add(p + "ffn_down.weight", noise(d, s.ff, 1.5))


def build(path: str | os.PathLike, arch: str, *, ftype: str = "f32", seed: int = 0, temperature: bool = False,
          tokenizer: Tokenizer = Tokenizer(), change: Callable[[str, np.ndarray], None] = lambda *_: None, **shape) -> str:
    """Write a random model and return its path.

    path        the file to write
    arch        one of ARCHS
    ftype       type of the matrices: "f32", "f16" or "q8_0"; norms, biases and MoE routers stay f32, as in every GGUF
    seed        of the weights
    temperature mistral3 only: position-dependent attention scale (and YaRN, which carries its constant)
    change      called with the name and the values of each tensor, which it may change in place
    shape       fields of Shape: head=64|32, n_layer, n_embd, n_head, n_head_kv, ...

    Raises ValueError for an architecture, a type or a shape that the graph cannot hold.
    """
    if arch not in ARCHS:
        raise ValueError(f"pico architecture: expected one of {', '.join(ARCHS)}, found {arch!r}")
    s = Shape(**shape)
    if arch == "qwen2" and s.width != s.n_head * s.head:
        raise ValueError(f"qwen2 needs n_embd = n_head * head = {s.n_head * s.head}, found {s.width}")
    types = {"f32": gguf.GGMLQuantizationType.F32, "f16": gguf.GGMLQuantizationType.F16,
             "q8_0": gguf.GGMLQuantizationType.Q8_0}
    files = {"f32": gguf.LlamaFileType.ALL_F32, "f16": gguf.LlamaFileType.MOSTLY_F16,
             "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}
    if ftype not in types:
        raise ValueError(f"pico type: expected one of {', '.join(types)}, found {ftype!r}")

    rng = np.random.default_rng([seed, ARCHS.index(arch)])  # llama and mistral3 have the same tensors

    def noise(rows: int, cols: int, gain: float) -> np.ndarray:
        return rng.standard_normal((rows, cols), dtype=np.float32) * np.float32(gain / np.sqrt(cols))

    w = gguf.GGUFWriter(str(path), arch)

    def add(name: str, value: np.ndarray) -> None:
        value = np.ascontiguousarray(value, dtype=np.float32)
        change(name, value)
        kept = value.ndim == 1 or name.endswith("ffn_gate_inp.weight")
        kind = gguf.GGMLQuantizationType.F32 if kept else types[ftype]
        w.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)

    _write_hparams(w, arch, s, temperature)
    w.add_file_type(int(files[ftype]))
    _write_tokenizer(w, tokenizer)
    n_vocab = len(tokenizer.vocabulary()[0])
    add("token_embd.weight", noise(n_vocab, s.width, np.sqrt(s.width)))
    for il in range(s.n_layer):
        _write_layer(add, noise, arch, s, il)
    add("output_norm.weight", noise(1, s.width, 0.1)[0] + 1)
    add("output.weight", noise(n_vocab, s.width, 3.0))

    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return str(path)
