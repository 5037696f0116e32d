"""Load many mutants of a good sidecar in this process and report what became of each.

    python sidecar_fuzz.py GOOD FIRST_SEED N_MUTANTS FOLDER

GOOD should have no hash of the metadata, which would refuse most mutants before the other checks see them.
Run by test_sidecar.py in a process of its own, so that an abort shows. FOLDER/mutant.gguf is the mutant being loaded and
FOLDER/seed its seed. Memory is limited to 256 MiB over what the process has at the start. Prints one JSON object.
"""
from __future__ import annotations

import hashlib
import json
import random
import resource
import sys
from pathlib import Path

import ridge_native
import sidecar_files as sf

NUMBERS = [0, 1, 2, 3, 4, 7, 8, 31, 32, 33, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1]


def flip_bits(rng: random.Random, data: bytearray, fields: list) -> None:
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(_header_size(fields))] ^= 1 << rng.randrange(8)


def set_number(rng: random.Random, data: bytearray, fields: list) -> None:
    """Overwrite one number of the header (a count, length, type, dimension, offset or value)."""
    _, at, size = rng.choice([f for f in fields if f[2] in (4, 8)])
    data[at : at + size] = (rng.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")


def noise(rng: random.Random, data: bytearray, fields: list) -> None:
    at, n = rng.randrange(_header_size(fields)), rng.randint(1, 16)
    data[at : at + n] = rng.randbytes(n)


def delete(rng: random.Random, data: bytearray, fields: list) -> None:
    at = rng.randrange(_header_size(fields))
    del data[at : at + rng.randint(1, 64)]


def insert(rng: random.Random, data: bytearray, fields: list) -> None:
    at = rng.randrange(_header_size(fields))
    data[at:at] = rng.randbytes(rng.randint(1, 64))


def repeat(rng: random.Random, data: bytearray, fields: list) -> None:
    at, n = rng.randrange(_header_size(fields)), rng.randint(1, 64)
    data[at:at] = data[at : at + n]


def swap_fields(rng: random.Random, data: bytearray, fields: list) -> None:
    (_, a, n), (_, b, m) = rng.sample(fields, 2)
    if n == m:
        data[a : a + n], data[b : b + m] = data[b : b + m], data[a : a + n]


def cut(rng: random.Random, data: bytearray, fields: list) -> None:
    del data[rng.randrange(len(data)) :]


def rebuild(rng: random.Random, data: bytearray, fields: list) -> None:
    """Change a key or a tensor and write the file anew, with right hashes, so that only the deeper checks can notice."""
    raw = sf.read_raw(bytes(data))
    kv, t = rng.choice(raw.kvs), rng.choice(raw.tensors)
    n = rng.choice(NUMBERS)
    what = rng.randrange(9)
    if what == 0:
        kv.key = rng.choice(raw.kvs).key
    elif what == 1 and kv.kind in (sf.U32, sf.U64):
        kv.values = [n % 2**32]
    elif what == 2:
        kv.is_array = not kv.is_array
    elif what == 3:
        raw.kvs.remove(kv)
    elif what == 4:
        rng.shuffle(raw.kvs)
    elif what == 5:
        t.shape = [rng.choice(NUMBERS) for _ in range(rng.randint(0, 6))]
    elif what == 6:
        t.kind = rng.choice([*range(42), 2**31, 2**32 - 1])
    elif what == 7:
        t.offset = n
    else:
        t.data += bytes(rng.randint(1, 64))
    if what > 4:
        raw.seal()
    data[:] = raw.to_bytes()


def _header_size(fields: list) -> int:
    _, at, size = fields[-1]
    return at + size


MUTATIONS = [flip_bits, set_number, set_number, noise, delete, insert, repeat, swap_fields, cut, rebuild, rebuild, rebuild]


def mutant(good: bytes, fields: list, seed: int) -> bytes:
    rng = random.Random(seed)
    data = bytearray(good)
    rng.choice(MUTATIONS)(rng, data, fields)
    return bytes(data)


def meaning(sidecar: ridge_native.Sidecar) -> str:
    """Hash of all that decides what a fill computes."""
    parts = [sidecar.get(k) for k in ("kind", "split", "n_layer", "n_embd", "rank")]
    parts += [sidecar.length(which, il) for which in "kv" for il in range(parts[2] if parts[2] < 100 else 0)]
    for il in range(sidecar.get("split") + 1, sidecar.get("n_layer")):
        parts += [sidecar.tensor(part, il) for part in ("weight", "down", "up", "bias")]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def main(good_path: str, first: int, n: int, folder: Path) -> None:
    good = Path(good_path).read_bytes()
    raw = sf.read_raw(good)
    expect = {
        "architecture": raw.kv("general.architecture").values[0],
        "tokenizer_sha256": raw.kv("ridge.model.tokenizer_sha256").values[0],
        "hparams": raw.kv("ridge.model.hparams").values[0],
        "block_count": raw.kv("ridge.block_count").values[0],
        "embedding_length": raw.kv("ridge.embedding_length").values[0],
    }
    with ridge_native.Sidecar(good_path, expect) as s:
        right = meaning(s)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**28, used + 2**28))

    out = {"mutants": 0, "unchanged": 0, "refused": {}, "same_meaning": [], "other_meaning": [], "bad_message": []}
    for seed in range(first, first + n):
        data = mutant(good, raw.fields, seed)
        out["mutants"] += 1
        if data == good:
            out["unchanged"] += 1
            continue
        (folder / "seed").write_text(str(seed))
        (folder / "mutant.gguf").write_bytes(data)
        try:
            with ridge_native.Sidecar(folder / "mutant.gguf", expect) as s:
                out["same_meaning" if meaning(s) == right else "other_meaning"].append(seed)
        except ridge_native.Refused as e:
            message = str(e)
            text = message.partition("': ")[2]
            if not text or not message.isprintable() or "memory" in message:
                out["bad_message"].append([seed, message])
            # the message without what varies, to see how many checks were reached
            kind = "".join("#" if c.isdigit() else c for c in text)
            out["refused"][kind] = out["refused"].get(kind, 0) + 1
    print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
