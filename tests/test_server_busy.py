"""Several at once: neighbours of a prompt that fills, clients that go away, a server that is stopped."""
from __future__ import annotations

import re
import threading
import time

import pytest

from server_util import N, Server, cold, llama_server, prompt_tokens, ridge_of
from server_util import maps, model, plain, prompt  # noqa: F401  (fixtures)


def users_and_newcomer(model, maps, mode: str | None, unified: bool):
    """Two users' events (slot index to list of (token, probabilities)), and how many of each were there before the
    newcomer's first token (None without one) and when it was sent."""
    with Server(model, *(["--kv-unified"] if unified else []), "-ub", 32, maps=maps, np=3, ctx=2048) as s:
        users = [prompt_tokens(s, 100, start) for start in (0, 400)]
        newcomer = prompt_tokens(s, 1200, start=100)
        events: dict[int, list] = {0: [], 1: []}
        started, marks = threading.Event(), None

        def read():
            # one request: both users enter the same batch from their first row on
            with s.stream(users, n_predict=200, n_probs=3) as stream:
                for e in stream:
                    if e.get("tokens"):
                        events[e["index"]].append((e["tokens"], e.get("completion_probabilities")))
                    if min(map(len, events.values())) >= 10:
                        started.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert started.wait(60)
        if mode is not None:
            sent = [len(events[i]) for i in events]
            with s.stream(newcomer, mode, n_predict=1) as stream:
                answer = [(e, [len(events[i]) for i in events]) for e in stream]
            first = next(counts for e, counts in answer if e.get("tokens") or e.get("stop"))
            r = [e for e, _ in answer if "timings" in e][-1]["timings"]["ridge"]
            marks = sent, first, r
        reader.join(120)
        assert not reader.is_alive()
        return events, marks


@pytest.mark.parametrize("unified", [False, True], ids=["split", "unified"])
@pytest.mark.field_report(12, "server-context.cpp", "if (!slot.is_processing() || ridge.is_active(slot.id)) {", "if (!slot.is_processing()) {")
def test_users_do_not_notice_a_prompt_that_fills(model, maps, unified):
    alone, _ = users_and_newcomer(model, maps, None, unified)
    # an event may hold more than one token: bytes that are no character yet wait for the next
    assert all(len(v) > 100 for v in alone.values())
    events, (sent, first, ridge) = users_and_newcomer(model, maps, "fill", unified)
    assert ridge["filled"] > 0 and ridge["reason"] is None
    for i in (0, 1):
        # the last token before the newcomer's first may come from its end-of-prompt batch already
        same = first[i] - 1
        assert same - sent[i] >= 20, "the newcomer's prompt was done before its neighbours could have been disturbed"
        assert events[i][:same] == alone[i][:same]


def test_two_prompts_fill_at_once(model, maps, prompt):
    """Their steps alternate, and each gets what it gets alone."""
    with Server(model, "-ub", 32, maps=maps, np=2) as s:
        other = prompt_tokens(s, N, start=700)
        alone = [s.completion(p, "fill", id_slot=i, cache_prompt=False)["tokens"] for i, p in enumerate((prompt, other))]
        answers = s.completion([prompt, other], "fill", cache_prompt=False)
        answers.sort(key=lambda a: a["index"])
        assert all(ridge_of(a)["filled"] > 0 for a in answers)
        assert [a["tokens"][:1] for a in answers] == [t[:1] for t in alone]


def test_metrics_answer_while_a_prompt_fills(model, maps):
    with Server(model, "-ub", 32, maps=maps) as s:
        p = prompt_tokens(s, 1800)
        with s.stream(p, "fill", return_progress=True) as events:
            next(events)
            during = s.metrics()
            busy = s.slots()[0]["is_processing"]
            progress = [e["prompt_progress"]["processed"] for e in events if "prompt_progress" in e]
        assert busy and during["llamacpp:requests_processing"] == 1
        assert progress == sorted(progress) and len(set(progress)) > 10 and progress[-1] == len(p)


ONE_CACHE = ["--kv-unified", "--no-cache-idle-slots", "-c", 1024]


def test_an_idle_slot_gives_up_its_rows_for_a_fill(model, maps, prompt):
    """As the ordinary path has it; before the sweeps, so that none of their work is lost."""
    with Server(model, *ONE_CACHE, maps=maps, np=2) as s:
        other = prompt_tokens(s, N, start=700)
        s.completion(other, "fill", id_slot=0)
        r = ridge_of(s.completion(prompt, "fill", id_slot=1, n_predict=8))
        assert r["reason"] is None and r["filled"] > 0
        assert ridge_of(s.completion(other, "fill", id_slot=0, n_predict=1))["cached"] == 0


def test_field_report_15_of_prompts_too_many_only_the_loser_gets_an_error(model, maps, prompt):
    """One cache with room for one prompt: the second is refused in words, and the first goes on as if it were alone."""
    with Server(model, *ONE_CACHE, maps=maps, np=2) as s:
        other = prompt_tokens(s, N, start=700)
        alone = s.completion(prompt, "fill", id_slot=0, n_predict=200)["content"]
        for _ in range(2):
            with s.stream(prompt, "fill", id_slot=0, n_predict=200, cache_prompt=False) as events:
                text = next(events)["content"]
                status, message = s.error("/completion", {"prompt": other, "id_slot": 1, "n_predict": 4, "ridge": {"mode": "fill"}})
                assert status == 500 and "expected 600 free cells" in message and "does not fit into the KV cache" in message
                text += "".join(e["content"] for e in events)
            assert text == alone
        assert s.metrics()['llamacpp:ridge_prompts_total{outcome="skipped",reason="no_space"}'] == 2
        assert ridge_of(s.completion(other, "fill", id_slot=1, n_predict=4))["filled"] > 0  # now the first slot is idle


@pytest.mark.field_report(15, "server-context.cpp", "if (!try_clear_idle_slots() && !ridge.give_way()) {", "if (!try_clear_idle_slots()) {")
@pytest.mark.field_report(15, "server-ridge.cpp", "if (status == LLAMA_RIDGE_DONE && !has_room_at_end(id_slot, j)) {", "if (false) {")
def test_field_report_15_users_outlive_a_prompt_whose_room_they_take(model, maps):
    """Three answers grow while a prompt fills. Prompts around the size that just fits, until users have found no cell for
    their next row, and until the prompt was done but for its last row, which no longer fits beside theirs."""
    flags = [*ONE_CACHE, "-ub", 32, "--cache-ram", 0, "--ridge-rows", "random", "--ridge-budget", "0.5"]
    with Server(model, *flags, maps=maps, np=4) as s:
        last_rows, seen = "took the cells of its last rows", set()
        wanted = {last_rows, "took the last cells"}
        newcomer = prompt_tokens(s, 24 * 32 + 1, start=200)  # of which the last row is left to the end
        size = 45  # rows of each user's prompt: first to the edge, then beyond it
        for _ in range(40):
            users = [prompt_tokens(s, size, start) for start in (0, 60, 120)]
            with s.stream(users, "off", n_predict=60, cache_prompt=False) as events:
                next(events)
                try:
                    assert ridge_of(s.completion(newcomer, "fill", n_predict=1, cache_prompt=False))["filled"] > 0
                    size += 1
                except llama_server.ServerError as e:
                    assert "does not fit into the KV cache beside the other slots" in str(e)
                    seen |= {w for w in wanted if w in str(e)}
                    size += 1 if last_rows in seen else -1
                ends = [e for e in events if e.get("stop")]
            assert [e["tokens_predicted"] for e in ends] == [60] * 3
            if seen == wanted:
                return
        pytest.fail(f"expected a prompt for each of {wanted}, found {seen}")


#
# clients that go away
#

# half of the rows exact: about two steps of sweep 1 to one of sweep 2
CANCEL_FLAGS = ["-ub", 32, "--ridge-rows", "random", "--ridge-budget", "0.5"]

# first and last step after which the cancellation may land, from the number of steps in sweep 1 and in all
WHERE = {
    "sweep-1": lambda n_lower, n_steps: (1, n_lower - 1),
    "between": lambda n_lower, n_steps: (n_lower, n_lower),
    "sweep-2": lambda n_lower, n_steps: (n_lower + 1, n_steps - 1),
}


@pytest.fixture(scope="module")
def long_prompt(plain):
    return prompt_tokens(plain, 1000)


@pytest.fixture(scope="module")
def cold_answers(model, maps, long_prompt):
    return {mode: cold(model, maps, long_prompt, mode, *CANCEL_FLAGS) for mode in ("fill", "off")}


def go_away(server, prompt, n_events: int) -> None:
    with server.stream(prompt, "fill", return_progress=True, cache_prompt=False) as events:
        for i, _ in enumerate(events):
            if i + 1 >= n_events:
                return


def cancel_in(server, prompt, where: str) -> None:
    """Go away so that the prefill is cancelled in the wanted place. The server notices some steps late: aim again."""
    n_events, seen = 10, []
    for _ in range(30):
        go_away(server, prompt, n_events)
        server.wait_idle()
        found = re.findall(r"cancelled after step (\d+) of (\d+) \(sweep 1: (\d+)\)", server.log_text())
        if len(found) == len(seen):
            n_events = max(1, n_events - 5)  # it was through before the server noticed
            continue
        step, n_steps, n_lower = map(int, found[-1])
        seen = found
        first, last = WHERE[where](n_lower, n_steps)
        if first <= step <= last:
            return
        n_events = max(1, n_events + (first + last) // 2 - step)
    pytest.fail(f"no cancellation landed in {where}: {seen}")


@pytest.mark.parametrize("where", WHERE)
def test_after_a_cancellation_the_next_answer_is_a_fresh_servers(model, maps, long_prompt, cold_answers, where):
    with Server(model, *CANCEL_FLAGS, maps=maps) as s:
        for mode in ("fill", "off"):
            cancel_in(s, long_prompt, where)
            answer = s.completion(long_prompt, mode)
            assert answer["timings"]["cache_n"] == 0
            assert answer["tokens"] == cold_answers[mode]
        assert s.metrics()['llamacpp:ridge_prompts_total{outcome="skipped",reason="cancelled"}'] >= 2


def test_cancelled_prompt_keeps_the_rows_before_it(model, maps, long_prompt):
    """A turn that is broken off leaves the conversation as it was."""
    with Server(model, *CANCEL_FLAGS, maps=maps) as s:
        first = s.completion(long_prompt[:400], "fill")
        with s.stream(long_prompt, "fill", return_progress=True) as events:
            for _ in range(5):
                next(events)
        s.wait_idle()
        assert "cancelled after step" in s.log_text()
        again = s.completion(long_prompt[:400], "fill")
        assert again["timings"]["prompt_n"] <= 1 and ridge_of(again)["cached_filled"] == ridge_of(first)["filled"]


@pytest.mark.field_report(16, "llama-ridge-prefill.cpp", "pf.ctx->get_memory()->seq_rm(pf.seq_id, pf.pos0 + i, pf.pos0 + i + n);")
def test_cancelled_rows_leave_their_cells(model, maps, long_prompt):
    """One cache for both slots, with room for one prompt only: the other slot needs what was given back."""
    flags = ["--kv-unified", "--no-cache-idle-slots", "-c", 1024, "-ub", 32]
    with Server(model, *flags, maps=maps, np=2) as s:
        with s.stream(long_prompt[:900], "fill", return_progress=True, id_slot=0) as events:
            for _ in range(15):
                next(events)
        s.wait_idle()
        assert "cancelled after step" in s.log_text()
        answer = s.completion(long_prompt[:900], "fill", id_slot=1, n_predict=4)
        assert ridge_of(answer)["filled"] > 0 and ridge_of(answer)["reason"] is None


def test_server_stops_cleanly_while_a_prompt_fills(model, maps):
    with Server(model, "-ub", 32, maps=maps) as s:
        p = prompt_tokens(s, 1800)
        with s.stream(p, "fill", return_progress=True) as events:
            for _ in range(5):
                next(events)
            s.process.terminate()
        assert s.process.wait(20) == 0


def test_fills_go_on_after_the_server_slept(model, maps, prompt):
    with Server(model, "--sleep-idle-seconds", 1, maps=maps) as s:
        first = s.completion(prompt, "fill")
        until = time.monotonic() + 20
        while "entering sleeping state" not in s.log_text():
            assert time.monotonic() < until
            time.sleep(0.1)
        again = s.completion(prompt, "fill")
        assert again["tokens"] == first["tokens"] and ridge_of(again)["filled"] == ridge_of(first)["filled"]
