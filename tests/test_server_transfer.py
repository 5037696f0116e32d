"""A server whose long prompts another model runs: hand-over in one process, over HTTP.

The source is another random model, the mapper random too: what is tested is that the rows arrive, who may use them, and what
the server says of them. Where the source is the model itself and the mapper the identity, nothing may change.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgefill import lib
from server_util import BATCH, N, TAIL, UBATCH, Server, model, plain, prompt, prompt_tokens, random_maps, ridge_of, start_failure  # noqa: F401
from test_transfer import identity_mapper, random_weights, side_of, write_mapper

SINK = 4


@pytest.fixture(scope="module")
def source(patched_lib, pico_model):
    return Path(pico_model("qwen3", ftype="f16", n_layer=5, head=32, n_head=4, n_head_kv=1))


@pytest.fixture(scope="module")
def mapper(source, model, tmp_path_factory):  # noqa: F811
    a, b = side_of(source), side_of(model)
    layers = [[il % a.n_layer, 4] if il % a.n_layer != 4 else [4] for il in range(b.n_layer)]
    return write_mapper(tmp_path_factory.mktemp("mapper") / "m.gguf", a, b, layers, random_weights(a, b, layers, True), True)


@pytest.fixture(scope="module")
def exact(plain, prompt):  # noqa: F811
    return plain.completion(prompt)["tokens"]


def flags(source: Path, mapper: Path, *more) -> list:
    return ["--kv-source", source, "--kv-mapper", mapper, "--ridge-tail", TAIL, "-fa", "on", *more]


def by_library(source: Path, target: Path, mapper: Path, tokens: list[int], n: int = 24) -> list[int]:
    """What the server must answer: the same steps, in this process."""
    kw = dict(n_ctx=2048, n_batch=BATCH, n_ubatch=UBATCH, n_threads=1)
    with lib.Model(source) as a, lib.Model(target) as b, lib.Mapper(a, b, mapper) as m, lib.Context(a, **kw) as ca, lib.Context(b, **kw) as cb:
        middle = len(tokens) - TAIL
        ca.decode(tokens[:middle], logits="none")
        cb.decode(tokens[:SINK], logits="none")
        lib.Transfer(ca, cb, m, SINK, middle).run()
        logits = cb.decode(tokens[middle:], pos0=middle)
        return lib.greedy(cb, logits[-1], n, stop_at_eog=False)


def test_the_answer_is_that_of_the_library_and_the_counts_say_what_came_from_where(source, mapper, model, prompt, exact):  # noqa: F811
    with Server(model, *flags(source, mapper)) as s:
        answer = s.completion(prompt)
        found = ridge_of(answer)
        counts = {k: found[k] for k in ("mode", "filled", "exact", "cached", "reason", "split", "tail")}
        assert counts == {"mode": "transfer", "filled": N - TAIL - SINK, "exact": TAIL + SINK, "cached": 0, "reason": None, "split": None, "tail": TAIL}
        assert found["lower_ms"] > 0 and found["upper_ms"] > 0
        assert answer["tokens"] == by_library(source, model, mapper, prompt) != exact
        m = s.metrics()
        assert m['llamacpp:ridge_prompts_total{outcome="filled",reason="transfer"}'] == 1
        assert m['llamacpp:ridge_rows_total{kind="filled"}'] == N - TAIL - SINK
        props = s.get("/props")["ridge"]
        assert props["mode"] == "transfer" and props["transfer"]["loaded"] and props["transfer"]["reason"] is None
        with lib.Model(source) as a, lib.Model(model) as b, lib.Mapper(a, b, mapper) as m:
            assert props["transfer"]["hash"] == m.hash and props["transfer"]["tail"] == TAIL and props["transfer"]["sink"] == SINK


def test_maps_and_a_mapper_serve_side_by_side(source, mapper, model, prompt, tmp_path):  # noqa: F811
    with Server(model, *flags(source, mapper, "--ridge-mode", "transfer"), maps=random_maps(model, tmp_path)) as s:
        assert ridge_of(s.completion(prompt))["mode"] == "transfer"
        filled = ridge_of(s.completion(prompt, "fill"))
        assert (filled["mode"], filled["reason"], filled["cached_filled"]) == ("fill", None, 0) and filled["filled"] > 0


def test_a_model_that_is_its_own_source_answers_as_without_one(model, prompt, exact, tmp_path):  # noqa: F811
    with Server(model, *flags(model, identity_mapper(tmp_path / "m.gguf", model), "-ctk", "f32", "-ctv", "f32")) as s:
        answer = s.completion(prompt, "transfer")
        assert ridge_of(answer)["filled"] == N - TAIL - SINK
        assert answer["tokens"] == s.completion(prompt, "off")["tokens"]


def test_an_exact_request_never_uses_rows_of_another_model(source, mapper, model, prompt, exact):  # noqa: F811
    with Server(model, *flags(source, mapper)) as s:
        s.completion(prompt)
        answer = s.completion(prompt, "off")
        assert ridge_of(answer)["cached_filled"] == 0 and answer["timings"]["prompt_n"] == N
        assert answer["tokens"] == exact


def test_a_conversation_goes_on_over_its_rows_and_the_source_runs_only_what_is_new(source, mapper, model, prompt):  # noqa: F811
    with Server(model, *flags(source, mapper)) as s:
        first = s.completion(prompt)
        longer = prompt + first["tokens"] + prompt_tokens(s, 400, start=N)
        second = s.completion(longer)
        found = ridge_of(second)
        assert found["reason"] is None and found["cached_filled"] == N - TAIL - SINK
        assert found["filled"] == len(longer) - TAIL - found["cached"]
        assert s.completion(longer)["tokens"] == s.completion(longer)["tokens"]


def test_the_second_request_on_each_of_two_slots_is_answered_as_the_first(source, mapper, model, prompt):  # noqa: F811
    with Server(model, *flags(source, mapper), np=2) as s:
        expected = by_library(source, model, mapper, prompt)
        for _ in range(2):
            for slot in (0, 1):
                assert s.completion(prompt, id_slot=slot)["tokens"] == expected
        assert s.completion(prompt, id_slot=1, cache_prompt=False)["tokens"] == expected


def test_prompts_that_do_not_fit_into_the_sources_cache_together_are_answered_all_the_same(source, mapper, model, prompt):  # noqa: F811
    """One cache of 1,536 cells for three slots, in turn: what the source keeps for slots that are idle makes way."""
    with Server(model, *flags(source, mapper, "--kv-unified", "-c", 1536), np=3) as s:
        prompts = [prompt_tokens(s, N, start=200 * i) for i in range(3)]
        for i in (0, 1, 2, 0):
            answer = s.completion(prompts[i], id_slot=i, cache_prompt=False)
            assert ridge_of(answer)["filled"] == N - TAIL - SINK, ridge_of(answer)
            assert answer["tokens"] == by_library(source, model, mapper, prompts[i])


@pytest.mark.parametrize("chunks", [0, 2])
def test_a_client_that_goes_away_leaves_a_slot_that_answers(chunks, source, mapper, model, prompt):  # noqa: F811
    with Server(model, *flags(source, mapper, "--ridge-step-rows", 16)) as s:
        with s.stream(prompt, return_progress=True) as events:
            for _ in range(chunks):
                next(events)
        s.wait_idle()
        assert s.completion(prompt)["tokens"] == by_library(source, model, mapper, prompt)
        assert s.metrics()['llamacpp:ridge_prompts_total{outcome="skipped",reason="cancelled"}'] == 1


def test_short_prompts_run_exactly(source, mapper, model, prompt):  # noqa: F811
    with Server(model, *flags(source, mapper)) as s:
        assert ridge_of(s.completion(prompt[: 2 * TAIL - 1]))["reason"] == "short"
        assert ridge_of(s.completion(prompt, "fill"))["reason"] == "no_maps"


def test_a_mapper_that_is_refused_leaves_a_server_that_answers_exactly(source, mapper, model, prompt, exact, tmp_path):  # noqa: F811
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(mapper.read_bytes()[:-1])
    with Server(model, *flags(source, bad)) as s:
        answer = s.completion(prompt)
        assert answer["tokens"] == exact and ridge_of(answer)["reason"] == "mapper_refused"
        transfer = s.get("/props")["ridge"]["transfer"]
        assert not transfer["loaded"] and "truncated" in transfer["message"] and str(bad) in s.log_text()
    with Server(model, *flags(tmp_path / "none.gguf", mapper)) as s:
        assert s.completion(prompt)["tokens"] == exact
        assert "could not be loaded" in s.get("/props")["ridge"]["transfer"]["message"]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--kv-mapper", "m"], "--kv-mapper and --kv-source need each other, found only --kv-mapper"),
        (["--kv-source", "m"], "--kv-mapper and --kv-source need each other, found only --kv-source"),
        (["--ridge-mode", "transfer"], "--ridge-mode transfer needs --kv-mapper FILE, found none"),
        (["--kv-mapper", ""], "expected a file name"),
    ],
)
def test_flags_that_cannot_work_are_refused(arguments, words, model):  # noqa: F811
    assert words in start_failure(model, *arguments)


def test_a_slot_file_says_that_its_rows_are_another_models(source, mapper, model, prompt, tmp_path):  # noqa: F811
    files = ["--slot-save-path", tmp_path]
    with Server(model, *flags(source, mapper, *files)) as s:
        answer = s.completion(prompt)
        s.post("/slots/0?action=save", {"filename": "a"})
    with Server(model, *flags(source, mapper, *files)) as s:
        s.post("/slots/0?action=restore", {"filename": "a"})
        again = s.completion(prompt)
        assert ridge_of(again)["cached_filled"] == N - TAIL - SINK and again["tokens"] == answer["tokens"]
        exact = s.completion(prompt, "off")
        assert exact["timings"]["prompt_n"] == N
    with Server(model, *files) as s:
        status, message = s.error("/slots/0?action=restore", {"filename": "a"})
        assert status == 400 and "its rows were filled" in message
