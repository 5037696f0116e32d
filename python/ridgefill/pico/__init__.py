"""Pico models: small language models that recall, trained here in minutes on a CPU, to measure fills on.

    recipes    shapes, curriculum, what the family has in common
    tokenizer  one byte-level BPE for the family
    tasks      prompts with planted facts, as tokens with weights
    data       real text, and batches of both
    model      the network in torch
    train      the curriculum
    export     a folder for transformers, a GGUF, and whether both say the same
    recall     exact recall on held-out prompts, by the library on the GGUF
    card       the model card

Needs torch, transformers and tokenizers (`pip install -e '.[hf]'`); nothing else of this package imports it.
"""
