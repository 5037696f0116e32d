"""The engine against the oracle: K and V of every layer and the last row's distribution, f32 model and f32 cache.

The two share no code: the oracle (ridgefill.reference) is NumPy in float64 and reads model and maps with gguf-py.
Flash attention is off where the bound is tight, because upstream rounds an f32 cache to f16 for it.
"""

from __future__ import annotations


import gguf
import numpy as np
import pytest
import sidecar_files
from ridgefill import lib
from ridgefill import reference as ref
from threadpoolctl import threadpool_limits

KV_ERROR = 1e-3  # relative, Frobenius, per layer
LAST_KL = 1e-4  # nats
MODELS = {
    "llama": {},
    "llama-head32": {"head": 32},
    "qwen2": {},
    "qwen3": {},
    "qwen3moe": {},
    "mistral3": {},
    "mistral3-yarn": {"temperature": True},
    "qwen3-head32": {"head": 32},
}
N_ROWS, N_TAIL, N_SINK, SPLIT, N_UBATCH = 300, 64, 4, 2, 128
N_ROWS_SMOLLM2 = 200  # the oracle takes some seconds for them
EXACT_ROWS = (4, 40, 41, 77, 127, 128, 200, 235)


@pytest.fixture(scope="module", autouse=True)
def engine(patched_lib):
    lib.load(patched_lib)
    with threadpool_limits(1):  # the oracle's matrices are small: BLAS threads that wait for a core cost more than they do
        yield


@pytest.fixture(scope="module")
def pico_case(pico_model, tmp_path_factory):
    """get(name, kind) -> (engine's model, oracle's model, path of random maps, tokens); each made once."""
    folder, cases, paths = tmp_path_factory.mktemp("maps"), {}, {}

    def get(name: str, kind: str = ref.INPUT):
        if name not in cases:
            path = pico_model(name.split("-")[0], n_layer=6, **MODELS[name])
            cases[name] = lib.Model(path), ref.Weights(path), np.random.default_rng(11).integers(3, 259, N_ROWS).tolist()
        model, weights, tokens = cases[name]
        if (name, kind) not in paths:
            paths[name, kind] = write_maps(model, folder / f"{name}.{kind}.gguf", SPLIT, seed=3, kind=kind)
        return model, weights, paths[name, kind], tokens

    yield get
    for model, *_ in cases.values():
        model.close()


def write_maps(model: lib.Model, path, split: int, seed: int, kind: str = ref.INPUT, map_type: str = "f32"):
    made_for, width = model.fingerprint(split), model.n_head_kv * model.head_size
    return sidecar_files.write_sidecar(
        path,
        arch=model.architecture,
        n_layer=model.n_layer,
        n_embd=model.n_embd,
        split=split,
        map_type=map_type,
        kind=kind,
        kv_lengths=(width, width),
        tokenizer_sha256=made_for["tokenizer_sha256"],
        hparams=made_for["hparams"],
        seed=seed,
    )


def run_engine(model: lib.Model, tokens, fill: ref.Fill, maps=None, flash_attn=False, n_ubatch=N_UBATCH):
    """(K per layer, V per layer, logits of the last row, rows that the engine says it filled)."""
    with lib.Context(
        model, len(tokens) + 32, n_ubatch=n_ubatch, flash_attn=flash_attn, type_k="f32", type_v="f32", n_threads=1
    ) as ctx:
        if fill.mode == ref.EXACT:
            logits, filled = ctx.decode(tokens)[0], np.empty(0, int)
        else:
            logits, prefill = ctx.fill_and_decode(
                tokens,
                mode=fill.mode,
                split=fill.split,
                n_tail=fill.n_tail,
                n_sink=fill.n_sink,
                exact_rows=fill.exact_rows,
                maps=maps,
            )
            logits, filled = logits[0], prefill.filled
        k, v = ([ctx.get_kv(0, il, what, 0, len(tokens)) for il in range(model.n_layer)] for what in "kv")
    return k, v, logits, filled


def kv_error(found: list[np.ndarray], expected: list[np.ndarray]) -> list[float]:
    """Relative error per layer over the rows that the layer holds."""
    errors = []
    for a, b in zip(found, expected, strict=True):
        held = ~np.isnan(b).any(axis=(1, 2))
        errors.append(float(np.linalg.norm(a[held] - b[held]) / np.linalg.norm(b[held])))
    return errors


def last_kl(found: np.ndarray, expected: np.ndarray) -> float:
    """KL(expected || found) of two rows of logits, nats."""
    p, q = (x.astype(np.float64) - x.max() for x in (expected, found))
    p, q = (x - np.log(np.exp(x).sum()) for x in (p, q))
    return float((np.exp(p) * (p - q)).sum())


def assert_equal(engine_run, oracle: ref.Result, fill: ref.Fill, bound=KV_ERROR, bound_kl=LAST_KL):
    k, v, logits, filled = engine_run
    assert filled.tolist() == np.flatnonzero(fill.filled(len(oracle.x[0]))).tolist()
    for what, errors in (("K", kv_error(k, oracle.k)), ("V", kv_error(v, oracle.v))):
        worst = int(np.argmax(errors))
        assert errors[worst] <= bound, f"{what} of layer {worst}: relative error {errors[worst]:.2e}"
    assert last_kl(logits, oracle.logits[-1]) <= bound_kl


ARMS = [
    ref.Fill(),
    ref.Fill(ref.IDENTITY, SPLIT, N_TAIL, N_SINK),
    ref.Fill(ref.FILL, SPLIT, N_TAIL, N_SINK),
    ref.Fill(ref.FILL, SPLIT, N_TAIL, N_SINK, EXACT_ROWS),
    ref.Fill(ref.NOFILL, SPLIT, N_TAIL, N_SINK),
    ref.Fill(ref.NOFILL, SPLIT, N_TAIL, N_SINK, EXACT_ROWS),
]


def arm_name(fill: ref.Fill) -> str:
    return fill.mode + ("+rows" if fill.exact_rows else "")


def with_kinds(arms: list[ref.Fill]) -> list:
    """Parameters (arm, kind): kinds make a difference to mode fill alone."""
    pairs = [(arm, kind) for arm in arms for kind in (ref.KINDS if arm.mode == ref.FILL else ref.KINDS[:1])]
    return [pytest.param(arm, kind, id=arm_name(arm) + (f"-{kind}" if arm.mode == ref.FILL else "")) for arm, kind in pairs]


def with_maps(fill: ref.Fill, path) -> ref.Fill:
    return ref.Fill(
        fill.mode, fill.split, fill.n_tail, fill.n_sink, fill.exact_rows, ref.load_maps(path) if fill.mode == ref.FILL else None
    )


def run_both(model, weights, path, tokens, fill: ref.Fill, **engine_options):
    if fill.mode != ref.FILL:
        return run_engine(model, tokens, fill, **engine_options), ref.forward(weights, tokens, fill)
    with lib.Maps(model, path) as maps:
        return run_engine(model, tokens, fill, maps, **engine_options), ref.forward(weights, tokens, fill)


@pytest.mark.parametrize("fill, kind", with_kinds(ARMS))
@pytest.mark.parametrize("name", MODELS)
def test_cache_and_logits_equal_the_oracle(pico_case, name, fill, kind):
    """Prompts of three ubatches: for kv_prev the row before lies in another one twice."""
    model, weights, path, tokens = pico_case(name, kind)
    fill = with_maps(fill, path)
    assert_equal(*run_both(model, weights, path, tokens, fill), fill)


@pytest.mark.parametrize("fill, kind", with_kinds(ARMS[1:]))
@pytest.mark.parametrize("name", ["llama", "qwen3-head32"])
def test_flash_attention_equals_the_oracle_to_half_precision(pico_case, name, fill, kind):
    """Upstream casts an f32 cache to f16 for flash attention: eleven bits instead of twenty-four."""
    model, weights, path, tokens = pico_case(name, kind)
    fill = with_maps(fill, path)
    assert_equal(*run_both(model, weights, path, tokens, fill, flash_attn=True), fill, bound=5e-3, bound_kl=1e-3)


@pytest.mark.parametrize("kind", ref.KINDS)
@pytest.mark.parametrize("map_type", [t for t in sidecar_files.TYPES if t != "f32"])
def test_maps_of_other_types_equal_the_oracle_to_the_rounding_of_what_they_read(pico_case, tmp_path, map_type, kind):
    """The oracle reads the rounded maps as they are; the engine also rounds the features, to f16 or to eight bits."""
    model, weights, _, tokens = pico_case("llama")
    path = write_maps(model, tmp_path / "maps.gguf", SPLIT, seed=6, kind=kind, map_type=map_type)
    fill = ref.Fill(ref.FILL, SPLIT, N_TAIL, N_SINK, EXACT_ROWS, ref.load_maps(path))
    bound = 1e-3 if map_type == "f16" else 1e-2
    assert_equal(*run_both(model, weights, path, tokens, fill), fill, bound=bound, bound_kl=5e-4)


@pytest.mark.parametrize("kind", ref.KINDS)
@pytest.mark.parametrize("n_tail, n_ubatch, split", [(1, 64, 1), (290, 64, 2), (64, 512, 4), (130, 100, 3)])
def test_other_tails_ubatches_and_splits(pico_case, tmp_path, n_tail, n_ubatch, split, kind):
    model, weights, _, tokens = pico_case("qwen3")
    path = write_maps(model, tmp_path / "maps.gguf", split, seed=5, kind=kind)
    fill = ref.Fill(ref.FILL, split, n_tail, N_SINK, EXACT_ROWS, ref.load_maps(path))
    assert_equal(*run_both(model, weights, path, tokens, fill, n_ubatch=n_ubatch), fill)


@pytest.mark.parametrize("kind", ref.KINDS)
@pytest.mark.parametrize(
    "n_sink, n_ubatch, exact_rows",
    [
        (0, 64, ()),  # row 0 is filled: nothing lies before it
        (4, 64, range(64, 192)),  # two ubatches of exact rows alone, then filled ones
        (64, 64, ()),  # the sink is the first ubatch
        (4, 64, range(63, 240, 64)),  # the last row of each ubatch is exact, the first of the next is not
        (4, 1, range(4, 30, 3)),  # every row is an ubatch
    ],
)
def test_the_row_before_is_found_wherever_it_ran(pico_case, n_sink, n_ubatch, exact_rows, kind):
    model, weights, path, tokens = pico_case("llama", kind)
    n_rows = 60 if n_ubatch == 1 else N_ROWS
    fill = ref.Fill(ref.FILL, SPLIT, N_TAIL if n_ubatch > 1 else 10, n_sink, tuple(exact_rows), ref.load_maps(path))
    assert_equal(*run_both(model, weights, path, tokens[:n_rows], fill, n_ubatch=n_ubatch), fill)


@pytest.mark.parametrize("kind", ref.KINDS)
@pytest.mark.parametrize("n_cached, n_ubatch", [(150, 64), (128, 128), (3, 64)])
def test_a_prompt_behind_a_cached_prefix_equals_the_oracle(pico_case, n_cached, n_ubatch, kind):
    """Filled rows of two prefills. The state of the row before the second was not kept: with kv_prev its first row is exact."""
    model, weights, path, tokens = pico_case("qwen2", kind)
    with (
        lib.Maps(model, path) as maps,
        lib.Context(model, N_ROWS + 32, n_ubatch=n_ubatch, flash_attn=False, type_k="f32", type_v="f32", n_threads=1) as ctx,
    ):
        settings = dict(mode="fill", maps=maps, n_tail=20, n_sink=N_SINK, exact_rows=(30, 31))
        _, first = ctx.fill_and_decode(tokens[:n_cached], **{**settings, "exact_rows": ()})
        logits, second = ctx.fill_and_decode(tokens[n_cached:], pos0=n_cached, **settings)
        k, v = ([ctx.get_kv(0, il, what, 0, N_ROWS) for il in range(model.n_layer)] for what in "kv")
    exact = {*range(max(0, n_cached - 20), n_cached), n_cached + 30, n_cached + 31}
    if kind == ref.KV_PREV:
        exact.add(n_cached)
    fill = ref.Fill(ref.FILL, SPLIT, 20, N_SINK, tuple(sorted(exact)), ref.load_maps(path))
    filled = [*first.filled, *(second.filled + n_cached)]
    assert_equal((k, v, logits[0], np.array(filled)), ref.forward(weights, tokens, fill), fill)


@pytest.mark.parametrize("kind", ref.KINDS)
@pytest.mark.parametrize("change", ["no maps", "other maps", "split", "sink", "tail", "rows"])
def test_the_comparison_sees_a_difference(pico_case, tmp_path, change, kind):
    """An oracle that is told something else disagrees by far more than the bound."""
    model, weights, path, tokens = pico_case("llama", kind)
    told = ref.Fill(ref.FILL, SPLIT, N_TAIL, N_SINK, EXACT_ROWS, ref.load_maps(path))

    def other_maps() -> ref.Maps:
        return ref.load_maps(write_maps(model, tmp_path / "other.gguf", SPLIT, seed=4, kind=kind))

    moved = ref.Maps(kind, {**told.maps.layers, SPLIT: told.maps.layers[SPLIT + 1]})
    other = {
        "no maps": lambda: ref.Fill(ref.IDENTITY, SPLIT, N_TAIL, N_SINK, EXACT_ROWS),
        "other maps": lambda: ref.Fill(ref.FILL, SPLIT, N_TAIL, N_SINK, EXACT_ROWS, other_maps()),
        "split": lambda: ref.Fill(ref.FILL, SPLIT - 1, N_TAIL, N_SINK, EXACT_ROWS, moved),
        "sink": lambda: ref.Fill(ref.FILL, SPLIT, N_TAIL, 0, EXACT_ROWS, told.maps),
        "tail": lambda: ref.Fill(ref.FILL, SPLIT, N_TAIL - 1, N_SINK, EXACT_ROWS, told.maps),
        "rows": lambda: ref.Fill(ref.FILL, SPLIT, N_TAIL, N_SINK, EXACT_ROWS[:-1], told.maps),
    }[change]()
    assert_disagrees(model, weights, path, tokens, told, other)


def assert_disagrees(model, weights, path, tokens, told: ref.Fill, other: ref.Fill) -> None:
    (k, v, _, _), oracle = run_both(model, weights, path, tokens, told)
    assert max(kv_error(k, oracle.k) + kv_error(v, oracle.v)) <= KV_ERROR
    wrong = ref.forward(weights, tokens, other)
    assert max(kv_error(k, wrong.k) + kv_error(v, wrong.v)) > 10 * KV_ERROR


@pytest.mark.parametrize("ignored", ["row before", "own row", "order of K and V"])
def test_the_comparison_sees_what_a_map_reads_and_writes(pico_case, ignored):
    """Maps of kind kv_prev that ignore the row before, or the row itself, or take V for K, disagree as well."""
    model, weights, path, tokens = pico_case("llama", ref.KV_PREV)
    told = ref.Fill(ref.FILL, SPLIT, N_TAIL, N_SINK, EXACT_ROWS, ref.load_maps(path))
    d = model.n_embd

    def changed(a: np.ndarray, b: np.ndarray):
        if ignored == "order of K and V":
            return np.roll(a, len(a) // 2, axis=0), np.roll(b, len(b) // 2)
        own, before = np.split(a, [d], axis=1)
        return np.hstack([own, 0 * before] if ignored == "row before" else [0 * own, before]), b

    maps = ref.Maps(ref.KV_PREV, {il: changed(a, b) for il, (a, b) in told.maps.layers.items()})
    assert_disagrees(model, weights, path, tokens, told, ref.Fill(ref.FILL, SPLIT, N_TAIL, N_SINK, EXACT_ROWS, maps))


@pytest.mark.parametrize("ignored", ["own row", "half the rank"])
def test_the_comparison_sees_what_a_low_rank_map_adds_up(pico_case, ignored):
    model, weights, path, tokens = pico_case("llama", ref.INPUT_LR)
    told = ref.Fill(ref.FILL, SPLIT, N_TAIL, N_SINK, EXACT_ROWS, ref.load_maps(path))

    def changed(u: np.ndarray, v: np.ndarray, b: np.ndarray):
        half = len(v) // 2
        return (ref.INPUT, (u @ v, b)) if ignored == "own row" else (ref.INPUT_LR, (u[:, :half], v[:half], b))

    layers = {il: changed(*arrays) for il, arrays in told.maps.layers.items()}
    maps = ref.Maps(layers[SPLIT + 1][0], {il: arrays for il, (_, arrays) in layers.items()})
    assert_disagrees(model, weights, path, tokens, told, ref.Fill(ref.FILL, SPLIT, N_TAIL, N_SINK, EXACT_ROWS, maps))


def test_a_low_rank_map_is_the_full_map_of_the_same_matrix(pico_case):
    """In the oracle alone."""
    _, weights, path, tokens = pico_case("llama", ref.INPUT_LR)
    low_rank = ref.load_maps(path)
    full = ref.Maps(ref.INPUT, {il: (np.eye(len(u)) + u @ v, b) for il, (u, v, b) in low_rank.layers.items()})
    a, b = (ref.forward(weights, tokens[:60], ref.Fill(ref.FILL, SPLIT, 10, maps=maps)) for maps in (low_rank, full))
    assert max(kv_error(a.k, b.k) + kv_error(a.v, b.v)) < 1e-12


def test_a_layers_own_projections_as_kv_map_are_mode_identity(pico_model):
    """In the oracle alone: both give the K and V that the layer computes of x_S."""
    weights = ref.Weights(pico_model("qwen3", n_layer=6))
    tokens = np.random.default_rng(1).integers(3, 259, 60).tolist()
    identity = ref.forward(weights, tokens, ref.Fill(ref.IDENTITY, SPLIT, 10))
    layers = {}
    for il in range(SPLIT + 1, 6):
        w = np.concatenate([weights.layer(il, f"attn_{which}.weight") for which in "kv"])
        layers[il] = w * weights.layer(il, "attn_norm.weight"), np.zeros(len(w))
    kv = ref.forward(weights, tokens, ref.Fill(ref.FILL, SPLIT, 10, maps=ref.Maps(ref.KV, layers)))
    assert max(kv_error(kv.k, identity.k) + kv_error(kv.v, identity.v)) < 1e-12
    assert np.abs(kv.logits - identity.logits).max() < 1e-9


@pytest.fixture(scope="module")
def smollm2_case(smollm2, smollm2_f32, tmp_path_factory):
    """SmolLM2: the engine runs it dequantised to f32, the oracle reads the shipped file."""
    folder = tmp_path_factory.mktemp("smollm2-maps")
    with lib.Model(smollm2_f32) as model:
        maps = {kind: write_maps(model, folder / f"{kind}.gguf", 19, seed=7, kind=kind) for kind in ref.KINDS}
        text = " ".join(f"Line {i}: the harbour master wrote {i * 37 % 101} names in the book." for i in range(40))
        yield model, ref.Weights(smollm2), maps, model.tokenize(text)[:N_ROWS_SMOLLM2]


SMOLLM2_ARMS = [
    ref.Fill(),
    ref.Fill(ref.IDENTITY, 15, N_TAIL),
    ref.Fill(ref.FILL, 19, N_TAIL),
    ref.Fill(ref.FILL, 19, N_TAIL, 4, EXACT_ROWS[:-2]),
    ref.Fill(ref.NOFILL, 19, N_TAIL),
]


@pytest.mark.parametrize("fill, kind", with_kinds(SMOLLM2_ARMS))
def test_smollm2_equals_the_oracle(smollm2_case, fill, kind):
    model, weights, paths, tokens = smollm2_case
    assert len(tokens) == N_ROWS_SMOLLM2
    fill = with_maps(fill, paths[kind])
    assert_equal(*run_both(model, weights, paths[kind], tokens, fill), fill)


def test_the_oracle_refuses_what_it_cannot_run(tmp_path, pico_model):
    path = tmp_path / "gemma.gguf"
    w = gguf.GGUFWriter(path, "gemma")
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    with pytest.raises(ref.ReferenceError, match="expected one of llama, .*found gemma"):
        ref.Weights(path)
    with pytest.raises(ref.ReferenceError, match="blk.9.attn_q.weight"):
        ref.Weights(pico_model("llama", n_layer=2)).layer(9, "attn_q.weight")
    with pytest.raises(ref.ReferenceError, match="found ridge"):
        ref.Fill("ridge")
    with pytest.raises(ref.ReferenceError, match="found none"):
        ref.load_maps(pico_model("llama", n_layer=2))
