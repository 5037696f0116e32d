"""The models of the family: shapes, curriculum, and what they have in common."""

from __future__ import annotations

import dataclasses

from ..errors import RidgefillError

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
N_CTX = 2048  # context length that the files state; training and recall end at 1,024
N_VOCAB = 1024
STEP_TOKENS = 2048


class PicoError(RidgefillError):
    """A model of the family cannot be made: a recipe, a folder or a package is not what it should be."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a model: widths in floats, `head` is the size of one attention head. With qk_norm it is Qwen3, else Llama."""

    qk_norm: bool
    n_layer: int
    width: int
    ff: int
    n_head: int
    n_head_kv: int
    head: int
    n_vocab: int = N_VOCAB
    theta: float = 1e4
    eps: float = 1e-6


@dataclasses.dataclass(frozen=True)
class Stage:
    """One length of the curriculum. Pairs are least and most, drawn evenly; shares are of prompts.

    n_tokens  of a sequence
    digits    of a number
    words     of a password
    facts     in a prompt
    filler    share of the tokens that is real text
    chat      share asked as questions in a chat; the others state the facts again
    hops      share where some facts name another fact instead of a value
    reach     heads on layer 0's output predict so many tokens before
    """

    n_tokens: int
    digits: tuple[int, int]
    words: tuple[int, int]
    facts: tuple[int, int]
    filler: tuple[float, float]
    chat: float
    hops: float
    reach: int = 0


STAGES = (
    Stage(64, (1, 3), (1, 1), (2, 3), (0, 0), 0, 0, reach=3),
    Stage(128, (2, 5), (1, 2), (3, 4), (0, 0.3), 0.3, 0, reach=3),
    Stage(256, (3, 7), (1, 3), (3, 7), (0, 0.6), 0.5, 0.2),
    Stage(512, (5, 7), (2, 3), (3, 8), (0.2, 0.9), 0.6, 0.3),
    Stage(1024, (7, 7), (3, 3), (3, 9), (0.3, 0.95), 0.7, 0.3),
)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    shape     the network
    match     layer whose first head is rewarded for attending to the earlier copy of what is to be said
    hop       layer whose first head is rewarded for attending to the name that stands in place of a value
    n_steps   at most, of STEP_TOKENS tokens each
    n_finish  the last ones, over which the learning rates fall to 0
    """

    shape: Shape
    match: int
    hop: int
    n_steps: int = 6000
    n_finish: int = 600
    lr_matrix: float = 0.02  # Muon
    lr_other: float = 3e-3  # AdamW, of embeddings and norms
    text_share: float = 0.15  # of sequences that are real text alone
    text_weight: float = 0.3  # of the loss on real text, beside the answers
    reward: float = 0.3
    advance: float = 0.95  # accuracy on digits at which sequences become longer
    n_window: int = 50  # steps over which it is taken


# s and l share tokenizer, KV heads and head size, so that caches of one can be mapped to the other. Quantised caches of heads of
# 64 are rotated, those of 32 are not.
RECIPES = {
    "pico-qwen3-s": Recipe(Shape(True, 8, 96, 256, 4, 2, 32), match=6, hop=3),
    "pico-qwen3-l": Recipe(Shape(True, 10, 128, 320, 4, 2, 32), match=7, hop=4),
    "pico-llama": Recipe(Shape(False, 8, 128, 320, 4, 2, 64), match=6, hop=3, n_steps=8000),
}


def recipe(name: str) -> Recipe:
    """Raises PicoError for a name that is none."""
    if name not in RECIPES:
        raise PicoError(f"model: expected one of {', '.join(RECIPES)}, found {name!r}")
    return RECIPES[name]
