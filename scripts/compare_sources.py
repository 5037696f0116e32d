#!/usr/bin/env python3
"""Calibrate from a GGUF and from a Hugging Face checkpoint of the same weights, and compare held-out R^2 layer by layer.

    scripts/compare_sources.py                      SmolLM2 as shipped (Q4_1) on part of out/text, splits 15 and 19
    scripts/compare_sources.py --model MODEL.gguf --text folder/ --split 8 --dtype f32

The checkpoint is made here, of the GGUF's weights dequantised to float32. Both sources then fit
maps for the GGUF on the same tokens, the GGUF run by the library as it is served, the checkpoint by transformers in each
dtype. Needs `pip install torch transformers`.

Exit status: 0 when every R^2 of a checkpoint is within --tolerance of the GGUF's, 1 when one is not.
"""
from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import typer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "python"))

from ridgefill import __version__
from ridgefill.calibrate import Config, calibrate
from ridgefill.hf import MODEL_TYPES
from ridgefill.machine import machine
from ridgefill.model_file import ModelFile, file_sha256
from ridgefill.progress import progress

MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _config(file: ModelFile, arch: str):
    """Of transformers, for a GGUF without scaled rotation."""
    import transformers

    def get(key: str, default=None):
        return file.get(f"{arch}.{key}", default)

    n_head, width = get("attention.head_count"), get("embedding_length")
    rope = {"rope_type": "default", "rope_theta": get("rope.freq_base", 1e4)}
    if arch == "mistral3":  # no factor on queries far from the start
        rope |= {"llama_4_scaling_beta": 0.0, "original_max_position_embeddings": get("context_length")}
    return transformers.AutoConfig.for_model(
        MODEL_TYPES[arch][0],
        hidden_size=width,
        num_hidden_layers=get("block_count"),
        vocab_size=len(file.get("tokenizer.ggml.tokens")),
        num_attention_heads=n_head,
        num_key_value_heads=get("attention.head_count_kv", n_head),
        head_dim=get("attention.key_length", width // n_head),
        intermediate_size=get("feed_forward_length"),
        moe_intermediate_size=get("expert_feed_forward_length"),
        num_experts=get("expert_count"),
        num_experts_per_tok=get("expert_used_count"),
        norm_topk_prob=True,
        rms_norm_eps=get("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=get("context_length"),
        rope_parameters=rope,
        tie_word_embeddings="output.weight" not in file.tensors,
    )


def _halves(weight: np.ndarray, n_head: int) -> np.ndarray:
    """Rows of Q or K with the two numbers of a rotated pair half a head apart, as transformers wants them, from side by side."""
    return weight.reshape(n_head, -1, 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_checkpoint(model: Path, folder: Path) -> None:
    """Save the dequantised weights of a GGUF, float32, as a folder that transformers loads."""
    import torch
    import transformers

    file = ModelFile(str(model))
    arch = file.get("general.architecture")
    config = _config(file, arch)
    names = gguf.get_tensor_name_map({v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers)

    def value(name: str) -> np.ndarray:
        if "experts.gate_up_proj" in name:
            return np.concatenate([value(name.replace("gate_up", which)) for which in ("gate", "up")], axis=1)
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        weight = file.required(there if there.endswith((".weight", ".bias")) else f"{there}.weight")
        side_by_side = arch in ("llama", "mistral3") and there.endswith(("attn_q.weight", "attn_k.weight"))
        heads = config.num_attention_heads if "attn_q" in there else config.num_key_value_heads
        return _halves(weight, heads) if side_by_side else weight

    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            parameter.copy_(torch.from_numpy(value(name).copy()))
    made.save_pretrained(folder)


def compare(model: Path, dtypes: list[str], work: Path, **settings) -> list[dict]:
    """One entry for each split, kind and part of the target: its layers, and their held-out R^2 and the seconds by source.

    `settings` are fields of calibrate.Config; files are written to `work`.
    """
    write_checkpoint(model, work / "checkpoint")
    common = {"text": [], "map_type": "f32", "score": False, **settings}
    entries: dict[tuple, dict] = {}
    for source in ["gguf", *dtypes]:
        own = {"model": str(model)} if source == "gguf" else {"model": str(work / "checkpoint"), "served": str(model), "dtype": source}
        began = time.monotonic()
        with progress(quiet=False) as report:
            results = calibrate(Config(out=str(work / f"{source}.gguf"), **own, **common), report)
        seconds = time.monotonic() - began
        for r in results:
            for part, r2 in r.r2.items():
                e = entries.setdefault((r.kind, r.split, part), {
                    "kind": r.kind, "split": r.split, "part": part, "layers": r.layers, "n_tokens": r.n_tokens,
                    "n_heldout_tokens": r.n_heldout_tokens, "r2": {}, "seconds": {},
                })  # fmt: skip
                e["r2"][source], e["seconds"][source] = r2, round(seconds, 1)
    return list(entries.values())


def largest_difference(entries: list[dict]) -> float:
    """Between the R^2 of a layer from a checkpoint and from the GGUF."""
    return max(abs(a - b) for e in entries for r2 in e["r2"].values() for a, b in zip(r2, e["r2"]["gguf"], strict=True))


def main(
    model: Annotated[Path, typer.Option(help="GGUF of both sources")] = MODEL,
    text: Annotated[list[Path] | None, typer.Option(help="[default: out/text]")] = None,
    split: Annotated[list[int] | None, typer.Option(help="[default: 15 and 19]")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="[default: input and kv_prev]")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="of the checkpoint [default: f32 and bf16]")] = None,
    n_tokens: Annotated[int, typer.Option(help="to fit on")] = 60_000,
    heldout_documents: Annotated[int, typer.Option()] = 6,
    threads: Annotated[int, typer.Option()] = 2,
    tolerance: Annotated[float, typer.Option(help="of R^2")] = 0.005,
    out: Annotated[Path, typer.Option()] = ROOT / "results" / "calibrate-sources.json",
) -> None:
    import torch
    import transformers

    settings = {
        "splits": split or [15, 19], "kinds": kind or ["input", "kv_prev"], "n_tokens": n_tokens,
        "heldout_documents": heldout_documents, "threads": threads, "overlap": "drop",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as work:
        entries = compare(model, dtype or ["f32", "bf16"], Path(work), text=[str(t) for t in text or [ROOT / "out" / "text"]], **settings)
    largest = largest_difference(entries)
    record = {
        "tool": f"ridgefill {__version__}", "torch": torch.__version__, "transformers": transformers.__version__, "machine": machine(),
        "model": {"file": model.name, "sha256": file_sha256(model)}, "settings": settings,
        "largest_difference": largest, "tolerance": tolerance, "results": entries,
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    for e in entries:
        means = ", ".join(f"{source} {sum(r2) / len(r2):.4f}" for source, r2 in e["r2"].items())
        print(f"{e['kind']} {e['part']}, split {e['split']}: mean held-out R^2 {means}")
    print(f"largest difference of a layer {largest:.5f}, tolerance {tolerance}; {out}")
    sys.exit(largest > tolerance)


if __name__ == "__main__":
    typer.run(main)
