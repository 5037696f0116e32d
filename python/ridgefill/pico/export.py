"""A trained model as a folder for transformers and as a GGUF, the same f16 weights in both, and whether both say the same."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

from .. import lib
from .recipes import CHAT_TEMPLATE, N_CTX, SPECIAL, PicoError, Shape
from .tokenizer import PRE

MAX_BYTES = 6_000_000  # of each file
MAX_KL = 1e-4
ENDOFTEXT, IM_START, IM_END = range(len(SPECIAL))


def to_transformers(state: dict[str, torch.Tensor], s: Shape, tokenizer: Tokenizer, folder: Path) -> None:
    """Write config, weights (safetensors, f16) and tokenizer of model.Pico's state_dict."""
    kind = transformers.Qwen3Config if s.qk_norm else transformers.LlamaConfig
    config = kind(
        vocab_size=s.n_vocab, hidden_size=s.width, intermediate_size=s.ff, num_hidden_layers=s.n_layer,
        num_attention_heads=s.n_head, num_key_value_heads=s.n_head_kv, head_dim=s.head, rms_norm_eps=s.eps,
        max_position_embeddings=N_CTX, rope_parameters={"rope_type": "default", "rope_theta": s.theta},
        tie_word_embeddings=True, bos_token_id=IM_START, eos_token_id=IM_END, pad_token_id=ENDOFTEXT,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float16)
    missing, unexpected = model.load_state_dict({name: t.half() for name, t in state.items()}, strict=False)
    assert list(missing) in ([], ["lm_head.weight"]) and not unexpected, (missing, unexpected)
    model.tie_weights()
    model.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[IM_START], eos_token=SPECIAL[IM_END], pad_token=SPECIAL[ENDOFTEXT],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)  # fmt: skip


def to_gguf(state: dict[str, torch.Tensor], s: Shape, tokenizer: Tokenizer, path: Path, name: str) -> None:
    """Write the same weights for llama.cpp: matrices f16, norms f32 of the same f16 values."""
    arch = "qwen3" if s.qk_norm else "llama"
    w = gguf.GGUFWriter(path, arch)
    _write_keys(w, s, name)
    _write_tokenizer(w, tokenizer)
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], s.n_layer)
    for key, tensor in state.items():
        value = tensor.detach().cpu().half().numpy()
        if not s.qk_norm and ("q_proj" in key or "k_proj" in key):
            value = _side_by_side(value, s.head)
        w.add_tensor(names.get_name(key, try_suffixes=(".weight",)), value if value.ndim == 2 else value.astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _side_by_side(weight: np.ndarray, head: int) -> np.ndarray:
    """Rows of Q or K with the numbers of a rotated pair side by side, as llama.cpp's llama wants them, from half a head apart."""
    return weight.reshape(-1, 2, head // 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _write_keys(w: gguf.GGUFWriter, s: Shape, name: str) -> None:
    w.add_name(name)
    w.add_license("mit")
    w.add_context_length(N_CTX)
    w.add_embedding_length(s.width)
    w.add_block_count(s.n_layer)
    w.add_feed_forward_length(s.ff)
    w.add_head_count(s.n_head)
    w.add_head_count_kv(s.n_head_kv)
    w.add_key_length(s.head)
    w.add_value_length(s.head)
    w.add_rope_dimension_count(s.head)
    w.add_rope_freq_base(s.theta)
    w.add_layer_norm_rms_eps(s.eps)
    w.add_vocab_size(s.n_vocab)
    w.add_file_type(int(gguf.LlamaFileType.MOSTLY_F16))


def merges(tokenizer: Tokenizer) -> list[str]:
    """Of its BPE in their order, the two parts with a blank between them."""
    return [m if isinstance(m, str) else " ".join(m) for m in json.loads(tokenizer.to_str())["model"]["merges"]]


def _write_tokenizer(w: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    texts = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(PRE)
    w.add_token_list(texts)
    w.add_token_types([int(gguf.TokenType.CONTROL if t in SPECIAL else gguf.TokenType.NORMAL) for t in texts])
    w.add_token_merges(merges(tokenizer))
    w.add_bos_token_id(IM_START)
    w.add_eos_token_id(IM_END)
    w.add_pad_token_id(ENDOFTEXT)
    w.add_add_bos_token(False)
    w.add_chat_template(CHAT_TEMPLATE)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Of transformers in float32 and the library, same f16 weights: KL in nats over n rows, share with the same likeliest token."""

    mean_kl: float
    max_kl: float
    top1: float
    n: int


def agreement(folder: Path, path: str | os.PathLike, windows: Sequence[Sequence[int]]) -> Agreement:
    """Compare the two files on token windows. Raises PicoError when the mean KL is over MAX_KL or not finite."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    kl, same = [], []
    with lib.Model(path) as served, lib.Context(served, max(map(len, windows)), n_threads=1) as ctx:
        for window in windows:
            with torch.no_grad():
                expected = model(torch.tensor([list(window)])).logits[0].log_softmax(-1)
            ctx.clear()
            found = torch.from_numpy(ctx.decode(window, logits="all")).log_softmax(-1)
            kl.append((expected.exp() * (expected - found)).sum(-1))
            same.append(expected.argmax(-1) == found.argmax(-1))
    kl, same = torch.cat(kl).double(), torch.cat(same)
    result = Agreement(float(kl.mean()), float(kl.max()), float(same.double().mean()), len(kl))
    if not result.mean_kl <= MAX_KL:
        raise PicoError(f"{path}: expected a mean KL of at most {MAX_KL:g} nats to {folder}, found {result.mean_kl:g}")
    return result


def check_sizes(folder: Path) -> None:
    """Raises PicoError for a file of more than MAX_BYTES."""
    for p in sorted(folder.iterdir()):
        if p.stat().st_size > MAX_BYTES:
            raise PicoError(f"{p}: expected at most {MAX_BYTES:,} bytes, found {p.stat().st_size:,}")
