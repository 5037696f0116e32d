"""The first layers of a GGUF model as a model of their own: what stock takes for the lower layers alone."""
from __future__ import annotations

import os
from pathlib import Path

import gguf


def truncate(source: Path, target: Path, n_layer: int) -> Path:
    """Write `source` with its first n_layer layers to `target` (once) and return it. Tensors keep their types and bytes."""
    if target.exists():
        return target
    reader = gguf.GGUFReader(source)
    arch = reader.fields["general.architecture"].contents()
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(part, arch)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        kind = field.types[0]
        value = n_layer if name == f"{arch}.block_count" else field.contents()
        writer.add_key_value(name, value, kind, field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None)
    for tensor in reader.tensors:
        block = tensor.name.split(".")
        if block[0] != "blk" or int(block[1]) < n_layer:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)
    return target
