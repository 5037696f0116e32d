#!/usr/bin/env python3
"""GGUF models made from another by layers: its first ones alone, or all of them and one that does nothing.

    scripts/model_layers.py MODEL OUT --first 15         what stock takes for the lower layers alone
    scripts/model_layers.py MODEL OUT --noop-after 5     layer 6 adds nothing, every later one moves up by one

A layer that adds nothing is a copy of the one before it with zeros for the output projections of attention and feed-forward.
"""
from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np

ZEROED = ("attn_output.weight", "ffn_down.weight", "ffn_down_exps.weight", "attn_output.bias", "ffn_down.bias")


def truncate(source: Path, target: Path, n_layer: int) -> Path:
    """Write `source` with its first n_layer layers to `target` (once) and return it. Tensors keep their types and bytes."""

    def place(il: int, name: str, data: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        if il < n_layer:
            yield il, data

    return target if target.exists() else _rewrite(source, target, lambda n: n_layer, place)


def with_noop(source: Path, target: Path, after: int) -> Path:
    """Write `source` with a layer that adds nothing behind layer `after` to `target` and return it."""

    def place(il: int, name: str, data: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        yield il + (il > after), data
        if il == after:
            yield after + 1, np.zeros_like(data) if name in ZEROED else data

    return _rewrite(source, target, lambda n: n + 1, place)


def _rewrite(source: Path, target: Path, count: Callable[[int], int], place: Callable) -> Path:
    """`source` with count(layers) layers; place(il, name, data) yields where each tensor of a layer goes, and as what."""
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(part, arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        value = count(field.contents()) if name == f"{arch}.block_count" else field.contents()
        writer.add_key_value(name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        prefix, _, rest = tensor.name.partition(".")
        if prefix != "blk":
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        il, _, name = rest.partition(".")
        for at, data in place(int(il), name, tensor.data):
            writer.add_tensor(f"blk.{at}.{name}", data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--first", type=int, metavar="N", help="keep the first N layers")
    what.add_argument("--noop-after", type=int, metavar="IL", help="insert a layer that adds nothing behind this one")
    a = parser.parse_args()
    if a.first is not None:
        truncate(a.model, a.out, a.first)
    else:
        with_noop(a.model, a.out, a.noop_after)


if __name__ == "__main__":
    main()
