"""What a test of images needs: a random multimodal projector for a pico model, a model with M-RoPE, and an image."""
from __future__ import annotations

import base64
from pathlib import Path

import gguf
import numpy as np

import pico
import sidecar_files

_SIDE, _PATCH, _WIDTH, _FF = 28, 14, 32, 64


def image() -> str:
    """A picture in base64 (PNM, which needs no library)."""
    pixels = np.random.default_rng(1).integers(0, 256, (_SIDE, _SIDE, 3), np.uint8)
    return base64.b64encode(b"P6 %d %d 255\n" % (_SIDE, _SIDE) + pixels.tobytes()).decode()


def write_projector(path: Path, n_embd: int) -> Path:
    """A LLaVA projector of one layer with random weights, for a model of width n_embd."""
    w, rng = gguf.GGUFWriter(path, "clip"), np.random.default_rng(2)
    w.add_bool("clip.has_vision_encoder", True)
    w.add_string("clip.projector_type", "mlp")
    numbers = {"image_size": _SIDE, "patch_size": _PATCH, "embedding_length": _WIDTH, "feed_forward_length": _FF, "block_count": 2,
               "projection_dim": n_embd, "attention.head_count": 1}
    for name, n in numbers.items():
        w.add_uint32(f"clip.vision.{name}", n)
    w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    w.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    w.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])

    def add(name: str, *shape: int) -> None:
        w.add_tensor(name, (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32))

    add("v.patch_embd.weight", _WIDTH, 3, _PATCH, _PATCH)
    add("v.position_embd.weight", (_SIDE // _PATCH) ** 2, _WIDTH)
    for il in range(2):  # the last one is not run
        for name, n_out, n_in in (*((f"attn_{x}", _WIDTH, _WIDTH) for x in ("q", "k", "v", "out")), ("ffn_up", _FF, _WIDTH), ("ffn_down", _WIDTH, _FF)):
            add(f"v.blk.{il}.{name}.weight", n_out, n_in)
            add(f"v.blk.{il}.{name}.bias", n_out)
        for name in ("ln1.weight", "ln1.bias", "ln2.weight", "ln2.bias"):
            add(f"v.blk.{il}.{name}", _WIDTH)
    for i, n_in in ((0, _WIDTH), (2, n_embd)):
        add(f"mm.{i}.weight", n_embd, n_in)
        add(f"mm.{i}.bias", n_embd)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def write_mrope_model(path: Path) -> Path:
    """A qwen2 model as qwen2vl, whose positions have four dimensions."""
    raw = sidecar_files.read_raw(Path(pico.build(path, "qwen2", ftype="f16")).read_bytes())
    for kv in raw.kvs:
        kv.key = kv.key.replace("qwen2.", "qwen2vl.")
    raw.set("general.architecture", "qwen2vl")
    raw.kvs.append(sidecar_files.RawKv("qwen2vl.rope.dimension_sections", sidecar_files.I32, [8, 12, 12, 0], is_array=True))
    path.write_bytes(raw.to_bytes())
    return path
