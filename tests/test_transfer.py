"""A mapper applied by the library: its rows against float64, the target's own cache given back to it, and what goes wrong.

The mappers here are random or the identity: what is tested is the application, not the fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import gguf
import numpy as np
import pytest

from ridgefill import lib, sidecar
from ridgefill.errors import RidgeError
from ridgefill.mapper import sidecar as mapper_file
from ridgefill.mapper.models import PARTS, KeysValues, Side
from test_attention import any_model  # noqa: F401
from test_projections import rewritten, variant  # noqa: F401

N = 90  # rows of the source
CALIBRATION = sidecar.Calibration(
    sources=["random numbers"], n_tokens=0, n_documents=0, n_heldout_tokens=0, n_heldout_documents=0, seed=0, tool="tests", options=[], heldout=[]
)


@pytest.fixture(scope="module", autouse=True)
def library(patched_lib):
    lib.load(patched_lib)


def side_of(path: Path) -> Side:
    with lib.Model(path) as model:
        return KeysValues(model).side


def encoded(w: np.ndarray, map_type: str) -> np.ndarray:
    return gguf.quants.quantize(w.astype(np.float32), sidecar.MAP_TYPES[map_type])


def write_mapper(
    path: Path, source: Side, target: Side, layers: Sequence[Sequence[int]], weights: dict, previous=False, map_type="f32"
) -> Path:
    """A sidecar whose target layer l reads source layers layers[l] by weights[part][l] = (W, b)."""
    n = target.n_layer
    maps = {
        part: mapper_file.Maps(
            sources=[list(s) for s in layers], lambdas=[0.1] * n, r2_head=[[0.0] * h for h in target.heads],
            r2_single=np.zeros((n, source.n_layer)), tried=[1], r2_by_number=np.zeros((n, 1)),
            weights=[encoded(w, map_type) for w, _ in weights[part]], biases=[b for _, b in weights[part]],
        )
        for part in PARTS
    }  # fmt: skip
    m = mapper_file.Mapper(source, target, previous, 4, 16, map_type, "r2", CALIBRATION, maps)
    mapper_file.write(path, m, force=True)
    return path


def random_weights(source: Side, target: Side, layers, previous: bool, seed: int = 0) -> dict:
    rng, times = np.random.default_rng(seed), 1 + previous
    widths = {part: [times * sum(source.widths(part)[s] for s in chosen) for chosen in layers] for part in PARTS}
    return {
        part: [
            (rng.standard_normal((d_out, d_in)) / np.sqrt(d_in), rng.standard_normal(d_out))
            for d_in, d_out in zip(widths[part], target.widths(part), strict=True)
        ]
        for part in PARTS
    }


def turned(path: Path, x: np.ndarray, sign: int) -> np.ndarray:
    """x [n, heads, head] turned forward or, with sign -1, back, by positions 0.., in float64."""
    side = side_of(path).rope
    from ridgefill.attention import Rope

    r = Rope(**side).rotation() if side["factors"] is None else Rope(**{**side, "factors": np.array(side["factors"])}).rotation()
    n_rot = 2 * len(r.frequency)
    angle = sign * np.arange(len(x))[:, None] * r.frequency
    cos, sin = ((r.gain**sign * f(angle))[:, None, :] for f in (np.cos, np.sin))
    a, b = (slice(0, n_rot, 2), slice(1, n_rot, 2)) if r.adjacent else (slice(0, n_rot // 2), slice(n_rot // 2, n_rot))
    out = x.astype(np.float64).copy()
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., a] * sin + x[..., b] * cos
    return out


def predicted(source_path: Path, target_path: Path, mapper: mapper_file.Mapper, cache: dict) -> dict:
    """By part and target layer [N, heads, head], float64, from the source's cache {part: [rows of each layer]}."""
    rows = {"k": [turned(source_path, k, -1) for k in cache["k"]], "v": [v.astype(np.float64) for v in cache["v"]]}
    out = {part: [] for part in PARTS}
    for part in PARTS:
        for il, heads in enumerate(mapper.target.heads):
            x = np.hstack([rows[part][s].reshape(N, -1) for s in mapper.maps[part].sources[il]])
            if mapper.previous:
                x = np.hstack([x, np.vstack([np.zeros_like(x[:1]), x[:-1]])])
            y = (x @ mapper.weight(part, il).T + mapper.maps[part].biases[il]).reshape(N, heads, -1)
            out[part].append(turned(target_path, y, 1) if part == "k" else y)
    return out


def tokens_of(seed: int = 1, n: int = N) -> list[int]:
    return np.random.default_rng(seed).integers(3, 259, n).tolist()


class Pair:
    """Two models with a context each, and the source's cache of `tokens`."""

    def __init__(self, source: Path, target: Path, n_ctx: int = 256, type_k="f32", type_v="f32", **kw):
        self.stack = ExitStack()
        enter = self.stack.enter_context
        self.source_model, self.target_model = (enter(lib.Model(p)) for p in (source, target))
        kw = dict(n_threads=1, type_k=type_k, type_v=type_v, **kw)
        self.source, self.target = (enter(lib.Context(m, n_ctx, **kw)) for m in (self.source_model, self.target_model))
        self.tokens = tokens_of()
        self.source.decode(self.tokens)

    def mapper(self, path: Path) -> lib.Mapper:
        return self.stack.enter_context(lib.Mapper(self.source_model, self.target_model, path))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stack.close()


def rows_of(ctx: lib.Context, p0: int, p1: int) -> dict:
    return {part: [ctx.get_kv(0, il, part, p0, p1) for il in range(ctx.model.n_layer)] for part in PARTS}


WIDE = dict(n_layer=4, head=64, n_head=2, n_head_kv=1)
CASES = {
    "the same heads": ("llama", "qwen2"),
    "other rotations": ("yarn multiplier", "linear scaling"),
    "gain in the target": ("qwen3", "yarn and temperature"),
    "factors, and part of a head": ("frequency factors", "part of a head"),
    "part of a head in the source": ("part of a head", "nanbeige"),
    "other depth, heads and head size": ("wide", "qwen3"),
    "the way back": ("qwen3moe", "wide"),
}


@pytest.fixture(scope="module")
def models(any_model, pico_model):  # noqa: F811
    return lambda name: Path(pico_model("llama", **WIDE) if name == "wide" else any_model(name))


@pytest.mark.parametrize("previous", [False, True], ids=["", "previous row"])
@pytest.mark.parametrize("n_sources", [1, 2, "all"])
@pytest.mark.parametrize("case", CASES)
def test_rows_are_those_of_float64(case, n_sources, previous, models, tmp_path):
    source_path, target_path = map(models, CASES[case])
    source, target = side_of(source_path), side_of(target_path)
    n = source.n_layer if n_sources == "all" else n_sources
    rng = np.random.default_rng(2)
    layers = [sorted(rng.choice(source.n_layer, n, replace=False).tolist()) for _ in target.heads]
    file = write_mapper(tmp_path / "m.gguf", source, target, layers, random_weights(source, target, layers, previous), previous)
    with Pair(source_path, target_path) as pair:
        mapper = pair.mapper(file)
        lib.Transfer(pair.source, pair.target, mapper, 0, N, n_step=32).run()
        found, expected = rows_of(pair.target, 0, N), predicted(source_path, target_path, mapper_file.read(file), rows_of(pair.source, 0, N))
    for part in PARTS:
        for il, (a, b) in enumerate(zip(found[part], expected[part], strict=True)):
            assert np.abs(a - b).max() < 1e-3 * np.abs(b).max(), (part, il)
