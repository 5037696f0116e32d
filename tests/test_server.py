"""RidgeFill over HTTP: what is filled, what is reused, what is reported, and what no neighbour notices.

The maps are random, at a split below the layers that carry meaning: a filled prompt says something else than an exact one,
so that a single filled cell in an exact answer would show.
"""
from __future__ import annotations

import math
import random
import re

import pytest

from server_util import BATCH, N, SPLIT, TAIL, UBATCH, Server, cold, prompt_tokens, random_maps, ridge_of
from server_util import maps, model, plain, prompt  # noqa: F401  (fixtures)


@pytest.fixture(scope="module")
def server(model, maps):
    with Server(model, maps=maps) as s:
        yield s


@pytest.fixture(scope="module")
def exact_tokens(plain, prompt):
    """What the model says to `prompt`, cold and without maps."""
    return plain.completion(prompt, cache_prompt=False)["tokens"]


def assert_filled(answer, n_rows, n_cached=0):
    r = ridge_of(answer)
    assert r["reason"] is None and r["filled"] > 0 and r["cached"] == n_cached, r
    assert r["filled"] + r["exact"] + r["cached"] == n_rows, r
    assert r["lower_ms"] > 0 and r["upper_ms"] > 0, r
    assert answer["timings"]["prompt_n"] == n_rows - n_cached and answer["timings"]["cache_n"] == n_cached


#
# off is stock, plumb is exact
#


def test_without_maps_and_field_nothing_is_added(plain, prompt):
    t = plain.completion(prompt)["timings"]
    assert set(t) == {
        "cache_n", "prompt_n", "prompt_ms", "prompt_per_token_ms", "prompt_per_second",
        "predicted_n", "predicted_ms", "predicted_per_token_ms", "predicted_per_second",
    }
    assert "ridge" not in plain.get("/props")
    assert not any("ridge" in name for name in plain.metrics())
    assert plain.ridge_lines() == []


def test_a_request_for_fills_without_maps_runs_exactly(plain, prompt, exact_tokens):
    for _ in range(2):
        answer = plain.completion(prompt, "fill", cache_prompt=False)
        assert answer["tokens"] == exact_tokens
        r = ridge_of(answer)
        assert (r["reason"], r["mode"], r["filled"], r["exact"], r["split"]) == ("no_maps", "fill", 0, N, None)


@pytest.mark.parametrize("n", [BATCH - 1, BATCH, BATCH + 1, 2 * BATCH - 1, 2 * BATCH, 2 * BATCH + 1, N])
@pytest.mark.field_report(14, "llama-ridge-prefill.cpp", "pf->n_done = cuts[cuts.size() - 2];", "pf->n_done = n_tokens - 1;")
def test_plumb_equals_off(server, n):
    prompt = prompt_tokens(server, n, start=50)
    for _ in range(2):
        off, plumb = (server.completion(prompt, mode, cache_prompt=False, n_probs=5) for mode in ("off", "plumb"))
        assert off["content"] == plumb["content"]
        assert off["completion_probabilities"] == plumb["completion_probabilities"]
        assert ridge_of(off)["reason"] == "off" and ridge_of(plumb)["reason"] is None
        assert ridge_of(plumb)["upper_ms"] > 0 and ridge_of(plumb)["filled"] == 0 and ridge_of(plumb)["exact"] == n


def test_a_short_prompt_runs_as_without_maps(server, plain):
    for n in (TAIL, 2 * TAIL - 1):
        prompt = prompt_tokens(server, n, start=300)
        for cache in (False, True):
            with_maps, without = (s.completion(prompt, cache_prompt=cache, n_probs=3) for s in (server, plain))
            assert with_maps["completion_probabilities"] == without["completion_probabilities"]
            assert ridge_of(with_maps)["reason"] == "short"
    # one row more is filled
    assert_filled(server.completion(prompt_tokens(server, 2 * TAIL, start=300), cache_prompt=False), 2 * TAIL)


#
# which cells are reused
#


@pytest.mark.field_report(1, "server-ridge-cells.cpp", "return provenance == want.made_by ? n : std::min(n, first_filled());", "return n;")
def test_exact_after_filled_processes_everything_again(model, maps, server, prompt, exact_tokens):
    filled = server.completion(prompt, "fill", cache_prompt=False)
    assert_filled(filled, N)
    assert filled["tokens"] != exact_tokens
    exact = server.completion(prompt, "off")
    assert exact["timings"]["cache_n"] == 0 and exact["timings"]["prompt_n"] == N
    assert exact["tokens"] == exact_tokens == cold(model, maps, prompt, "off")
    # now the cells are pure
    again = server.completion(prompt, "off")
    assert again["timings"]["prompt_n"] == 1 and ridge_of(again)["cached_filled"] == 0


@pytest.mark.field_report(10, "server-ridge.cpp", "n_past = std::min(n_past, prompt.ridge.first_filled(i_tail));", "n_past = 0;")
def test_filled_twice_is_reused(server, prompt):
    first = server.completion(prompt, "fill", cache_prompt=False)
    second = server.completion(prompt, "fill")
    assert second["timings"]["prompt_n"] <= 1
    r = ridge_of(second)
    assert (r["reason"], r["cached"], r["cached_filled"]) == ("short", N - 1, ridge_of(first)["filled"])


def test_conversation_keeps_its_fills(server, prompt):
    """A short turn reuses the filled prefix, a long one is filled behind it, an exact one uses nothing of either."""
    first = server.completion(prompt, cache_prompt=False)
    assert_filled(first, N)
    turn = prompt + first["tokens"] + prompt_tokens(server, 20, start=900)
    short = server.completion(turn)
    r = ridge_of(short)
    assert r["reason"] == "short" and r["cached_filled"] == ridge_of(first)["filled"]
    assert N <= r["cached"] < len(turn) and r["exact"] == len(turn) - r["cached"]

    turn = turn + short["tokens"] + prompt_tokens(server, 300, start=950)
    long = server.completion(turn)
    r = ridge_of(long)
    assert r["reason"] is None and r["filled"] > 0 and r["cached_filled"] == ridge_of(first)["filled"]
    assert server.completion(turn, "off")["timings"]["cache_n"] == 0


@pytest.mark.parametrize("kind", ["input_lr", "kv", "kv_prev"])
def test_maps_of_other_kinds(model, tmp_path, prompt, exact_tokens, kind):
    """Fills, a turn filled behind a cached prefix, and exact answers that use nothing of either."""
    with Server(model, maps=random_maps(model, tmp_path, kind=kind)) as s:
        assert s.get("/props")["ridge"]["kind"] == kind
        first = s.completion(prompt, cache_prompt=False)
        assert_filled(first, N)
        assert first["tokens"] != exact_tokens
        turn = prompt + first["tokens"] + prompt_tokens(s, 300, start=950)
        r = ridge_of(s.completion(turn))
        new = len(turn) - r["cached"]
        # of kind kv_prev the first new row is exact: the state of the row before it is gone
        assert r["cached"] >= N and r["filled"] == new - TAIL - (kind == "kv_prev") and r["exact"] == new - r["filled"]
        assert s.completion(prompt, "plumb")["tokens"] == exact_tokens
        assert s.completion(prompt, "off")["tokens"] == exact_tokens


def test_filled_rows_in_the_tail_are_not_reused(server, prompt):
    """A prompt that ends where another was filled must have its own exact tail."""
    server.completion(prompt, "fill", cache_prompt=False)
    part = prompt[: N - 2 * TAIL]
    r = ridge_of(server.completion(part, "fill"))
    assert r["cached"] <= len(part) - TAIL and r["exact"] >= TAIL and r["cached_filled"] > 0


@pytest.mark.parametrize("hazard", ["refill", "allow"])
def test_hazard_rows_are_counted(model, maps, prompt, hazard):
    """Rows of a prompt's exact tail that an earlier prompt filled: by default they run again, exactly."""
    part = prompt[: N - 2 * TAIL]
    with Server(model, "--ridge-hazard", hazard, maps=maps) as s:
        assert s.get("/props")["ridge"]["hazard"] == hazard
        assert ridge_of(s.completion(prompt, "fill"))["hazard"] == 0
        r = ridge_of(s.completion(part, "fill"))
        assert r["reason"] == "short" and r["hazard"] == TAIL - 1  # the last row always runs
        assert r["cached"] == (len(part) - TAIL if hazard == "refill" else len(part) - 1)
        assert s.metrics()['llamacpp:ridge_rows_total{kind="hazard"}'] == TAIL - 1
        # an exact prompt drops them with all other filled rows: nothing to choose
        assert ridge_of(s.completion(part, "off"))["hazard"] == 0


def test_an_edit_among_filled_rows_is_refilled(model, maps, prompt):
    """A turn that edits an earlier message, so near the end that filled rows lie in its tail: as on a fresh server."""
    # its tail begins where both prompts are cut, so that the rows before it have the same bits
    edited = prompt[: 3 * UBATCH + TAIL // 4] + prompt[: TAIL - TAIL // 4]
    with Server(model, maps=maps) as s:
        s.completion(prompt, "fill")
        answer = s.completion(edited, "fill")
        r = ridge_of(answer)
        assert r["hazard"] == TAIL // 4 and r["cached_filled"] > 0 and r["cached"] == len(edited) - TAIL
    assert answer["tokens"] == cold(model, maps, edited, "fill")


def test_step_rows_bound_a_step(model, maps, prompt):
    """A report comes after every step: half the rows in a step, about twice the reports."""
    reports = {}
    for rows in (UBATCH, UBATCH // 2):
        with Server(model, "--ridge-step-rows", rows, maps=maps) as s:
            assert s.get("/props")["ridge"]["step_rows"] == rows
            with s.stream(prompt, "fill", return_progress=True) as events:
                reports[rows] = sum("prompt_progress" in e for e in events)
    assert reports[UBATCH // 2] >= 1.5 * reports[UBATCH]


def test_each_mode_has_its_own_cells(model, maps, prompt):
    texts = {}
    with Server(model, "--cache-ram", 0, maps=maps) as s:  # else the second fill would find the first one there
        for mode in ("fill", "identity", "nofill", "fill"):
            answer = s.completion(prompt, mode)
            assert_filled(answer, N)
            assert texts.setdefault(mode, answer["tokens"]) == answer["tokens"]
            assert s.completion(prompt, mode)["timings"]["prompt_n"] <= 1
    assert len({tuple(t) for t in texts.values()}) == 3


def test_plumb_reuses_pure_cells_only(server, prompt, exact_tokens):
    server.completion(prompt, "fill", cache_prompt=False)
    answer = server.completion(prompt, "plumb")
    assert answer["timings"]["cache_n"] == 0 and answer["tokens"] == exact_tokens


@pytest.mark.field_report(1, "server-task.cpp", "/*.ridge       =*/ prompt.ridge,")
def test_other_slot_and_host_cache_never_give_filled_cells_to_exact(model, maps, prompt, exact_tokens):
    with Server(model, maps=maps, np=2) as s:
        other = prompt_tokens(s, N, start=700)
        filled = s.completion(prompt, "fill", id_slot=0)
        s.completion(other, "fill", id_slot=0)  # the first prompt goes to the host's cache
        exact = s.completion(prompt, "off", id_slot=0)
        assert exact["timings"]["cache_n"] == 0 and exact["tokens"] == exact_tokens

        # a filled request gets it back, and what was pure stays pure
        s.completion(other, "fill", id_slot=1)
        back = s.completion(prompt, "fill", id_slot=1)
        assert back["timings"]["prompt_n"] <= 1 or ridge_of(back)["filled"] == ridge_of(filled)["filled"]
        s.completion(other, "off", id_slot=1)
        assert s.completion(prompt, "off", id_slot=1)["tokens"] == exact_tokens


def test_host_cache_keeps_fills_but_not_nofill(model, maps, prompt):
    with Server(model, maps=maps) as s:
        other = prompt_tokens(s, N, start=700)
        for mode, kept in (("fill", True), ("nofill", False)):
            first = s.completion(prompt, mode)
            assert_filled(first, N)
            s.completion(other, "off")
            again = s.completion(prompt, mode)
            assert (again["timings"]["prompt_n"] <= 1) == kept, ridge_of(again)
            if kept:
                assert ridge_of(again)["cached_filled"] == ridge_of(first)["filled"]
            s.completion(other, "off")


@pytest.mark.parametrize("pure_first", [True, False])
def test_pure_prompt_in_the_host_cache_survives_a_filled_twin(model, maps, prompt, pure_first):
    """A longer filled prompt that holds the same tokens neither replaces a pure copy nor stands in for it."""
    with Server(model, maps=maps, np=2) as s:
        others = [prompt_tokens(s, N, start) for start in (700, 1300)]
        pure = s.completion(prompt, "off", id_slot=0)
        twin = prompt + pure["tokens"] + others[0][:200]
        assert_filled(s.completion(twin, "fill", id_slot=1, cache_prompt=False), len(twin))
        # another prompt on its slot sends each to the host's cache
        for slot in (0, 1) if pure_first else (1, 0):
            s.completion(others[slot], "off", id_slot=slot, n_predict=1)
        assert s.completion(prompt, "off", id_slot=0)["timings"]["cache_n"] == N - 1


def test_an_exact_prompt_leaves_a_filled_twin_in_the_host_cache(model, maps, prompt):
    """It takes the copy that it can use most of, be it the shorter one; the filled one is there for the next to be filled."""
    with Server(model, maps=maps) as s:
        away = lambda i: s.completion(prompt_tokens(s, N, start=(700, 1300)[i % 2]), "off", n_predict=1)  # noqa: E731
        filled = ridge_of(s.completion(prompt, "fill"))["filled"]
        away(0)
        assert s.completion(prompt[:400], "off")["timings"]["cache_n"] == 0
        away(1)
        assert s.completion(prompt, "off")["timings"]["cache_n"] == 400
        away(0)
        assert ridge_of(s.completion(prompt, "fill"))["cached_filled"] == filled


def test_an_exact_prompt_goes_to_the_slot_that_it_can_use_most_of(model, maps, prompt):
    with Server(model, "--cache-ram", 0, maps=maps, np=2) as s:
        s.completion(prompt[:400], "off", id_slot=0)
        filled = ridge_of(s.completion(prompt, "fill", id_slot=1))["filled"]
        assert s.completion(prompt, "off")["timings"]["cache_n"] == 400
        assert ridge_of(s.completion(prompt, "fill", id_slot=1))["cached_filled"] == filled


def test_context_shift_makes_cells_unknown(model, maps):
    with Server(model, "--context-shift", "--cache-ram", 0, maps=maps, ctx=512) as s:
        prompt = prompt_tokens(s, 400)
        shifted = {}
        for mode in ("off", "fill"):
            answer = s.completion(prompt, mode, cache_prompt=False, n_predict=160, n_discard=150)
            assert answer["truncated"]
            # rows 150.. moved to the front (behind a token that is always kept, where the model adds one)
            shifted[mode] = max(s.completion(p, "off", n_predict=1)["timings"]["cache_n"] for p in (prompt[150:], prompt[:1] + prompt[151:]))
        assert shifted["off"] > 100 and shifted["fill"] == 0


def test_chunk_reuse_never_moves_filled_cells(model, maps, prompt):
    with Server(model, "--cache-ram", 0, maps=maps) as s:
        cached = {}
        for mode in ("off", "fill"):
            s.completion(prompt, mode, cache_prompt=False)
            cached[mode] = s.completion(prompt[100:], "off", n_cache_reuse=16)["timings"]["cache_n"]
        assert cached["off"] > 100 and cached["fill"] == 0


def test_an_exact_slot_file_takes_the_place_of_fills(model, maps, prompt, tmp_path):
    with Server(model, "--slot-save-path", tmp_path, maps=maps) as s:
        s.completion(prompt, "off")
        s.post("/slots/0?action=save", {"filename": "a.bin"})
        s.completion(prompt, "fill", cache_prompt=False)
        s.post("/slots/0?action=restore", {"filename": "a.bin"})
        assert s.completion(prompt, "off")["timings"]["cache_n"] == N - 1


def test_several_completions_of_one_filled_prompt(model, maps, prompt):
    """The copy says what the original says: rows, fills and the marks of nofill went along."""
    with Server(model, "--cache-ram", 0, maps=maps, np=2) as s:
        for mode in ("fill", "nofill"):
            alone = s.completion(prompt, mode, cache_prompt=False)["tokens"]
            answers = s.completion(prompt, mode, n_cmpl=2, cache_prompt=False)
            assert [a["tokens"] for a in answers] == [alone, alone]
            assert all(ridge_of(a)["reason"] is None for a in answers)
            for slot in (0, 1):
                assert s.completion(prompt, "off", id_slot=slot, n_predict=1)["timings"]["cache_n"] == 0


# letters only: a byte that is no character yet would come without its probability
FIRST = {"n_predict": 1, "n_probs": 1, "grammar": "root ::= [a-z]+"}


def first_token(answer) -> tuple[int, float]:
    """Token and log-probability of the first token: what the whole prompt's cells say."""
    p = answer["completion_probabilities"][0]
    return p["id"], p["logprob"]


@pytest.mark.parametrize("seed", range(3))
def test_no_history_leaks_fills_into_exact_answers(model, maps, plain, seed):
    """Requests of every mode on growing, shrinking and branching prompts, on any slot: exact answers stay exact.

    Not bitwise: a reused prefix cuts the prompt elsewhere. The bound lies between that and what a filled prefix does.
    """
    bound = 0.05
    rng = random.Random(seed)
    texts = [prompt_tokens(plain, 600, start) for start in (0, 600)]
    n_reused, filled_error = 0, []
    with Server(model, "--cache-ram", 4, maps=maps, np=2) as s:
        for _ in range(25):
            a, b = rng.sample(texts, 2)
            n = rng.randrange(130, 600)
            p = a[:n] if rng.random() < 0.7 else a[:200] + b[200:n]
            mode = rng.choice(["off", "off", "off", "plumb", "fill", "identity", "nofill"])
            answer = s.completion(p, mode, id_slot=rng.choice([-1, 0, 1]), **FIRST)
            token, logprob = first_token(answer)
            wanted_token, wanted = first_token(plain.completion(p, cache_prompt=False, **FIRST))
            if mode in ("off", "plumb"):
                assert ridge_of(answer)["cached_filled"] == 0
                assert token == wanted_token and abs(logprob - wanted) < bound, ridge_of(answer)
                n_reused += answer["timings"]["cache_n"] > 0
            elif ridge_of(answer)["filled"]:
                filled_error.append(abs(logprob - wanted) if token == wanted_token else math.inf)
    assert n_reused > 0 and max(filled_error) > 2 * bound


#
# what is reported
#


@pytest.mark.field_report(28, "server-ridge-stats.cpp", "n_rows_filled += stats.n_filled;")
def test_timings_log_metrics_and_props_agree(model, maps, prompt):
    with Server(model, maps=maps) as s:
        answers = [
            s.completion(prompt, cache_prompt=False),
            s.completion(prompt[:TAIL], cache_prompt=False),
            s.completion(prompt, "off", cache_prompt=False),
            s.completion(prompt, "plumb", cache_prompt=False),
            s.completion(prompt, ridge={"min_prompt": N + 1}, cache_prompt=False),
            s.completion(prompt, ridge={"tail": 2 * TAIL}, cache_prompt=False),
        ]
        ridges = [ridge_of(a) for a in answers]
        assert [r["reason"] for r in ridges] == [None, "short", "off", None, "short", None]
        assert [r["mode"] for r in ridges] == ["fill", "fill", "off", "plumb", "fill", "fill"]
        assert [r["tail"] for r in ridges] == [TAIL] * 5 + [2 * TAIL]
        assert ridges[0]["filled"] > ridges[5]["filled"] > 0
        assert all(r["split"] == SPLIT for r in ridges)

        m = s.metrics()
        count = lambda outcome, reason: m[f'llamacpp:ridge_prompts_total{{outcome="{outcome}",reason="{reason}"}}']
        assert count("filled", "fill") == 2 and count("skipped", "short") == 2
        assert count("exact", "off") == 1 and count("exact", "plumb") == 1
        assert m['llamacpp:ridge_rows_total{kind="filled"}'] == sum(r["filled"] for r in ridges)
        assert m['llamacpp:ridge_rows_total{kind="exact"}'] == sum(r["exact"] for r in ridges)
        assert m["llamacpp:ridge_prompts_seen_total"] == len(answers)
        for sweep in ("lower", "upper"):
            seconds = sum(r[f"{sweep}_ms"] for r in ridges) / 1000
            assert m[f'llamacpp:ridge_seconds_total{{sweep="{sweep}"}}'] == pytest.approx(seconds, rel=1e-3)
        assert s.slots()[0]["ridge"] == ridges[-1]
        assert m["llamacpp:prompt_tokens_total"] == sum(a["timings"]["prompt_n"] for a in answers)

        lines = [line for line in s.ridge_lines() if "mode = " in line]
        assert len(lines) == len(answers)
        for line, r in zip(lines, ridges, strict=True):
            found = {k: int(v) for k, v in re.findall(r"(filled|exact|cached|split|tail) = (-?\d+)", line)}
            assert found == {k: r[k] for k in found} and f"reason = {r['reason'] or '-'}" in line

        p = s.get("/props")["ridge"]
        assert p["loaded"] and p["maps"] == str(maps) and re.fullmatch("[0-9a-f]{64}", p["hash"])
        assert (p["split"], p["kind"], p["mode"], p["tail"], p["min_prompt"]) == (SPLIT, "input", "fill", TAIL, 2 * TAIL)


PATHS = ["/completion", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]


def body_of(path: str, text: str, n_predict: int) -> dict:
    """A request for `text`, in the form of its endpoint."""
    if path == "/v1/responses":
        return {"input": text, "max_output_tokens": n_predict}
    content = {"messages": [{"role": "user", "content": text}]} if path in ("/v1/chat/completions", "/v1/messages") else {"prompt": text}
    return content | {"max_tokens": n_predict}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.field_report(28, "server-common.cpp", "ridge.add_to(base);")
def test_every_endpoint_fills_and_reports(server, prompt, path):
    text = server.post("/detokenize", {"tokens": prompt})["content"]
    body = lambda mode: body_of(path, f"{path} {mode}: {text}", 4) | {"temperature": 0}  # noqa: E731  (another prompt each time)
    for mode in ("fill", "off", "identity"):
        r = server.post(path, body(mode) | {"ridge": {"mode": mode}})["timings"]["ridge"]
        assert r["mode"] == mode and (r["filled"] > 0) == (mode != "off")
    with server.stream(path=path, mode="fill", **body("stream")) as events:
        r = [e["timings"]["ridge"] for e in events if "timings" in e][-1]
    assert r["filled"] > 0 and r["mode"] == "fill"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "ridge, names",
    [
        ({"mdoe": "fill"}, ["mdoe"]),
        ({"mode": "ful"}, ["ridge.mode", "ful", "identity"]),
        ({"mode": 3}, ["ridge.mode", "3"]),
        ({"tail": 0}, ["ridge.tail", "1 or more", "found 0"]),
        ({"min_prompt": -1}, ["ridge.min_prompt", "0 or more", "found -1"]),
        ({"tail": 1.5}, ["ridge.tail", "1.5"]),
        ({"tail": 2**40}, ["ridge.tail", str(2**40)]),
        ({"min_prompt": "10"}, ["ridge.min_prompt", "10"]),
        ("fill", ["ridge", "object", "fill"]),
    ],
)
@pytest.mark.field_report(24, "server-ridge-request.cpp", "throw std::invalid_argument(\"Field 'ridge': unknown key '\" + key + \"', expected mode, tail or min_prompt\");")
def test_bad_field_is_a_400_that_names_it(server, path, ridge, names):
    status, message = server.error(path, body_of(path, "Hi", 1) | {"ridge": ridge})
    assert status == 400 and all(name in message for name in names), message


def test_null_field_is_no_field(plain):
    body = {"prompt": "Hi", "n_predict": 1, "ridge": None}
    assert "ridge" not in plain.post("/completion", body)["timings"]


@pytest.mark.parametrize(
    "flags, check",
    [
        (["--ridge-mode", "off"], lambda r, full: r["reason"] == "off"),
        (["--ridge-mode", "identity"], lambda r, full: r["mode"] == "identity" and r["filled"] == full),
        (["--ridge-tail", "100"], lambda r, full: r["filled"] == full + TAIL - 100),
        (["--ridge-rows", "digits"], lambda r, full: full / 2 < r["filled"] < full),
        (["--ridge-rows", "digits", "--ridge-budget", "2"], lambda r, full: r["filled"] == full - 2),
        (["--ridge-rows", "random", "--ridge-budget", "0.25"], lambda r, full: abs(r["filled"] - 0.75 * full) < 4),
        (["--ridge-min-prompt", str(N + 1)], lambda r, full: r["reason"] == "short"),
        (["--ridge-min-prompt", str(N)], lambda r, full: r["filled"] == full),
    ],
    ids=lambda v: " ".join(v).replace("--ridge-", "") if isinstance(v, list) else "",
)
@pytest.mark.field_report(32, "common-ridge-args.cpp", "params.ridge.budget = budget;")
def test_each_flag_changes_what_is_filled(model, maps, server, prompt, flags, check):
    full = ridge_of(server.completion(prompt, "fill", cache_prompt=False))["filled"]
    with Server(model, *flags, maps=maps) as s:
        r = ridge_of(s.completion(prompt))
    assert check(r, full), (r, full)


def test_no_minimum_means_none(model, maps, server):
    """A prompt shorter than the usual minimum is filled, by the flag and by the request, down to the last row before the tail."""
    p = prompt_tokens(server, TAIL + 5, start=1500)
    assert ridge_of(server.completion(p))["reason"] == "short"
    asked = ridge_of(server.completion(p, ridge={"min_prompt": 0}, cache_prompt=False))
    with Server(model, "--ridge-min-prompt", 0, maps=maps) as s:
        assert s.get("/props")["ridge"]["min_prompt"] == 0
        flagged = ridge_of(s.completion(p))
    assert asked["filled"] == flagged["filled"] == 1 and asked["reason"] is flagged["reason"] is None


@pytest.mark.parametrize("kind", ["input", "kv_prev"])
def test_a_prompt_without_a_row_to_fill_is_short(model, tmp_path, kind):
    """Sink rows are exact like the tail, and of kind kv_prev the first row behind those of an earlier prompt."""
    with Server(model, "--ridge-min-prompt", 0, maps=random_maps(model, tmp_path, kind=kind)) as s:
        n_sink = s.get("/props")["ridge"]["sink"]
        first = prompt_tokens(s, TAIL + n_sink + 1, start=1500)
        r = [ridge_of(s.completion(p, cache_prompt=False, n_predict=1)) for p in (first[:-1], first)]
        assert [(x["filled"], x["reason"]) for x in r] == [(0, "short"), (1, None)] and r[0]["exact"] == TAIL + n_sink
        more = first + prompt_tokens(s, TAIL + 1, start=1700)
        r = ridge_of(s.completion(more, n_predict=1))
        assert r["cached"] == len(first)
        assert (r["filled"], r["reason"]) == ((0, "short") if kind == "kv_prev" else (1, None))
        assert s.completion(first[:-1], "plumb", cache_prompt=False)["timings"]["ridge"]["reason"] is None


def test_seed_chooses_the_random_rows(model, maps, prompt):
    flags = ["--ridge-rows", "random", "--ridge-budget", "0.5", "--ridge-seed"]
    a, b, again = (cold(model, maps, prompt, None, *flags, seed) for seed in (1, 2, 1))
    assert a == again != b


def test_real_model(patched_lib, smollm2, tmp_path):
    """The same on a model that people use, with the maps that we ship."""
    shipped = sorted(smollm2.parent.glob("smollm2-135m-instruct.s20.*.ridge.gguf"))
    with Server(smollm2, maps=shipped[0] if shipped else random_maps(smollm2, tmp_path, split=20)) as s:
        p = prompt_tokens(s, 300)
        fields = {"n_predict": 8, "n_probs": 3}
        off, plumb = (s.completion(p, mode, cache_prompt=False, **fields) for mode in ("off", "plumb"))
        assert off["completion_probabilities"] == plumb["completion_probabilities"]
        filled = s.completion(p, "fill", cache_prompt=False, **fields)
        assert_filled(filled, 300)
        assert filled["completion_probabilities"] != off["completion_probabilities"]
        assert s.completion(p, "fill", **fields)["timings"]["prompt_n"] <= 1
        again = s.completion(p, "off", **fields)
        assert again["timings"]["cache_n"] == 0
        assert again["completion_probabilities"] == off["completion_probabilities"]
