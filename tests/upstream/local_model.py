"""The model that stands in for those of upstream's tests, and its maps: a pico model that writes plain text and never ends it.

Upstream's model has a tokenizer of 512 tokens; with the merges below the prompts of its tests are of about the same lengths.
"""
from __future__ import annotations

from pathlib import Path

import numpy as np

import pico
from ridgefill import lib
from server_util import random_maps

TOKENIZER = pico.Tokenizer(
    merges=tuple("e s;o l;u s;i p;m e;u r;q u;i c;a l;Ġ d;Ġ m;Ġ b;Ġ l;Ġ e;u t;t i;s t;e l;e d;a r;l y;o o;l l;h e".split(";")),
    special=("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    add_bos=True,
)
_TEXTS, _TYPES, _ = TOKENIZER.vocabulary()

# what it writes: words, figures and plain marks. No bytes of longer characters, no special tokens, and none of the brackets
# and back quotes with which a call of a tool or a block of code begins, unless a grammar leaves it no choice
_WRITTEN = np.array([t == 1 and all(c.isascii() and c.isalnum() or c in "ĠĊ.,;:!?'\"()-" for c in text)
                     for text, t in zip(_TEXTS, _TYPES, strict=True)])


def _plain_text(name: str, value: np.ndarray) -> None:
    """Entry 0 of the stream is one positive number, whatever the token and layer; the output holds it against the unwanted."""
    if name == "token_embd.weight":
        value[:, 0] = 3.0
    elif name.endswith(("attn_output.weight", "ffn_down.weight")):
        value[0] = 0.0
    elif name == "output.weight":
        value *= 0.3  # a flat distribution: ten tokens and more are possible at each step
        value[~_WRITTEN] = 0.0
        value[:, 0] = np.where(_WRITTEN, 0.0, -1000.0)


def write_model(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return Path(pico.build(folder / "pico.gguf", "llama", tokenizer=TOKENIZER, change=_plain_text))


def write_maps(model: Path, libraries: Path) -> Path:
    """Maps of noise beside the model. libraries: the folder of the patched libllama."""
    lib.load(libraries)
    return random_maps(model, model.parent)
