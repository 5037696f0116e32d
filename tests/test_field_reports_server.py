"""Field reports about requests: neighbours, clients that go away, long chats, images, counters, flags. Each request is sent twice."""
from __future__ import annotations

import concurrent.futures
import re
import subprocess

import pytest

import pico
import pico_vision
import server_util
import sidecar_files
import test_server
from server_util import BATCH, N, TAIL, Server, cold, prompt_tokens, random_maps, ridge_of
from server_util import maps, model, plain, prompt  # noqa: F401  (fixtures)
from test_server import FIRST, first_token

import bench_serve  # scripts/ is in the path since server_util
from bench_short import _cpu_seconds as cpu_seconds
from llama_server import BINARY, ServerError

#
# what others notice
#


@pytest.mark.field_report(
    12, "server-ridge.cpp", "status = j.work->step();", "while ((status = j.work->step()) == LLAMA_RIDGE_OK) {}"
)
def test_field_report_12_a_neighbours_longest_gap_is_shorter_with_a_fill(model, maps):
    """An exact prompt takes a batch at a time, a fill a ubatch: here a quarter, so that the noise of a machine does not matter.

    Of the whole fill, a neighbour waits for a step at a time.
    """
    text = server_util._text()
    settings = bench_serve.Settings(tokens=1500, batch=BATCH, ubatch=BATCH // 4, threads=1)
    with Server(model, "-ub", settings.ubatch, "--cache-ram", 0, maps=maps, np=3, ctx=settings.slot_ctx) as s:
        bench = bench_serve.Bench(s, 2, settings, [text[i : i + 400] for i in range(0, 12000, 400)])
        for i in range(2):
            trials = {t["arm"]: t for t in bench.pair(i)}
            longest = {arm: max(max(g) for g in t["gaps_ms"]) for arm, t in trials.items()}
            assert longest["fill"] < longest["off"], longest
            assert longest["fill"] < 0.75 * trials["fill"]["ttft_ms"], (longest, trials["fill"]["ttft_ms"])


@pytest.mark.field_report(13, "server-context.cpp", "ridge.stop(slot.id);")
def test_field_report_13_a_slot_is_free_a_step_after_its_client_left(model, maps):
    """Steps long enough that noticing the client's absence takes no further one, or one."""
    with Server(model, maps=maps, ctx=4096) as s:
        p = prompt_tokens(s, 3800)
        for left_after in (3, 9):
            with s.stream(p, "fill", return_progress=True, cache_prompt=False) as events:
                seen = set()
                for e in events:
                    seen.add(e["prompt_progress"]["processed"])
                    if len(seen) > left_after:
                        break
            s.wait_idle()
            step, n_steps = map(int, re.findall(r"cancelled after step (\d+) of (\d+)", s.log_text())[-1])
            assert left_after <= step <= left_after + 4 < n_steps


def all_at_once(server, prompts, mode: str) -> list[dict | str]:
    """Answers of as many clients, or the message of the error."""

    def ask(i: int):
        try:
            return server.completion(prompts[i], mode, id_slot=i, cache_prompt=False)
        except ServerError as e:
            return str(e)

    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(ask, range(len(prompts))))


@pytest.mark.field_report(
    15, "server-ridge.cpp", "end_slot(id_slot, j, j.work ? j.work->error() : llama_ridge_last_error());\n        return;", "run_exactly(id_slot, j, status);\n        return;"
)
def test_field_report_15_of_four_prompts_too_many_only_the_loser_gets_an_error(model, maps):
    """One cache for all, with room for three of them."""
    with Server(model, "--kv-unified", "--no-cache-idle-slots", "--cache-ram", 0, "-c", 2048, "-ub", 32, maps=maps, np=4) as s:
        prompts = [prompt_tokens(s, N, start) for start in (0, 300, 600, 900)]
        for _ in range(2):
            answers = all_at_once(s, prompts, "fill")
            errors = [a for a in answers if isinstance(a, str)]
            assert len(errors) == 1, answers
            assert all(ridge_of(a)["filled"] > 0 for a in answers if isinstance(a, dict))


def test_field_report_16_a_cache_that_fills_up_under_a_prompt_leaves_no_half_filled_row(model, maps):
    """A neighbour takes the last cells while the prompt is in its first sweep: whatever both get, later answers are a fresh server's."""
    with Server(model, "--kv-unified", "--no-cache-idle-slots", "--cache-ram", 0, "-c", 1024, "-ub", 32, maps=maps, np=2) as s:
        user, newcomer = prompt_tokens(s, 60), prompt_tokens(s, 930, start=60)
        with Server(model, "-ub", 32, maps=maps) as fresh:
            wanted = {mode: first_token(fresh.completion(newcomer, mode, cache_prompt=False, **FIRST)) for mode in ("off", "fill")}
        assert abs(wanted["off"][1] - wanted["fill"][1]) > 0.1 or wanted["off"][0] != wanted["fill"][0]
        with s.stream(user, "off", id_slot=0, n_predict=400, cache_prompt=False) as events:
            next(events)
            try:
                answer = s.completion(newcomer, "fill", id_slot=1, cache_prompt=False)
                assert ridge_of(answer)["reason"] in (None, "no_space")
            except ServerError as e:
                assert "does not fit" in str(e) or "Context size" in str(e)
        s.wait_idle()
        s.completion([5], "off", id_slot=0, n_predict=1, cache_prompt=False)  # makes room
        for mode in ("fill", "off"):
            for _ in range(2):
                token, logprob = first_token(s.completion(newcomer, mode, id_slot=1, **FIRST))
                # other cells, other sums: the bound of test_no_history_leaks_fills_into_exact_answers
                assert token == wanted[mode][0] and abs(logprob - wanted[mode][1]) < 0.05


#
# long chats
#


def chat(n_messages: int, words: int) -> list[dict]:
    """Turns of user and assistant with so many words each; a message is a user's if it is the first or the last."""
    text = (test_server.__doc__ + " ").split()
    text = (text * (n_messages * words // len(text) + 1))[: n_messages * words]
    parts = [" ".join(text[i * words : (i + 1) * words]) for i in range(n_messages)]
    return [{"role": ("user", "assistant")[i % 2 if i < n_messages - 1 else 0], "content": part} for i, part in enumerate(parts)]


@pytest.mark.field_report(
    9, "llama-ridge-prefill.cpp", "const auto cuts = stock_cuts(pf.tokens.size(), n_batch, n_step);", "const auto cuts = stock_cuts(pf.tokens.size(), 100, n_step);"
)
def test_field_report_9_a_chat_of_64_messages_takes_the_steps_of_one_message(pico_model, tmp_path):
    """At 32,000 tokens, by the plan of each prompt, which is in the log when its client leaves; at 5,000 by CPU time.

    The mutant cuts where messages of about 100 tokens would.
    """
    small = pico_model("llama", ftype="f16", n_layer=3, head=32, n_head=1, n_head_kv=1, n_ctx_train=65536)
    with Server(small, "-c", 40960, "-b", 2048, "-ub", 512, maps=random_maps(small, tmp_path, split=1)) as s:
        steps = {}
        for n in (64, 1):
            body = {"messages": chat(n, 64 * 120 // n), "max_tokens": 1, "return_progress": True, "cache_prompt": False}
            for _ in range(2):
                with s.stream(path="/v1/chat/completions", mode="fill", **body) as events:
                    total = next(e["prompt_progress"]["total"] for e in events if e.get("prompt_progress", {}).get("processed"))
                s.wait_idle()
                steps[n] = total, *map(int, re.findall(r"cancelled after step \d+ of (\d+) \(sweep 1: (\d+)\)", s.log_text())[-1])
        (rows, n_steps, n_lower), (rows_1, n_steps_1, _) = steps[64], steps[1]
        assert rows > 30000 and n_lower == -(-(rows - TAIL) // 512) and abs(n_steps / rows / (n_steps_1 / rows_1) - 1) < 0.1

        rows, seconds = {}, {64: [], 1: []}
        for _ in range(12):  # the least of so many: other work on the machine only adds
            for n, words in ((64, 18), (1, 1279)):
                body = {"messages": chat(n, words), "max_tokens": 1, "cache_prompt": False, "ridge": {"mode": "fill"}}
                start = cpu_seconds(s.process.pid)
                rows[n] = s.post("/v1/chat/completions", body)["timings"]["ridge"]["filled"]
                seconds[n].append(cpu_seconds(s.process.pid) - start)
        assert abs(rows[64] / rows[1] - 1) < 0.02
        assert rows[64] / min(seconds[64]) >= 0.9 * rows[1] / min(seconds[1])


#
# what runs exactly
#


@pytest.mark.field_report(11, "server-ridge.cpp", 'return "multimodal";')
def test_field_report_11_prompts_with_an_image_run_exactly(model, maps, prompt, tmp_path):
    projector = pico_vision.write_projector(tmp_path / "mmproj.gguf", 256)
    with Server(model, "--mmproj", projector, maps=maps) as s:
        text = s.post("/detokenize", {"tokens": prompt})["content"]
        marker = s.get("/props")["media_marker"]
        with_image = {"prompt_string": f"{text}{marker} and", "multimodal_data": [pico_vision.image()]}
        for _ in range(2):
            answer = s.completion(with_image, "fill")
            assert ridge_of(answer)["reason"] == "multimodal" and ridge_of(answer)["filled"] == 0
            assert any("reason = multimodal" in line for line in s.ridge_lines())
            # without one the same server fills
            assert ridge_of(s.completion(prompt, "fill", cache_prompt=False))["filled"] > 0


@pytest.mark.field_report(11, "llama-ridge.cpp", "static thread_local std::string reason;", "return nullptr;\n    static std::string reason;")
def test_field_report_11_prompts_of_a_model_with_mrope_run_exactly(patched_lib, maps, tmp_path):
    """Positions in more than one dimension: one line says why, and answers are those of a server without maps."""
    mrope = pico_vision.write_mrope_model(tmp_path / "qwen2vl.gguf")
    with Server(mrope, maps=maps) as s, Server(mrope) as without:
        p = prompt_tokens(s, N)
        wanted = without.completion(p)["tokens"]
        for _ in range(2):
            answer = s.completion(p, "fill", cache_prompt=False)
            assert answer["tokens"] == wanted and ridge_of(answer)["reason"] == "unsupported"
        lines = [line for line in s.log_text().splitlines() if "every prompt runs exactly" in line]
        assert len(lines) == 1 and "qwen2vl" in lines[0]


#
# what is counted
#

FIM = pico.Tokenizer(special=("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"))
ENDPOINTS = {
    "/completion": lambda text: {"prompt": text, "n_predict": 2},
    "/v1/completions": lambda text: {"prompt": text, "max_tokens": 2},
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 2},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 2},
    "/infill": lambda text: {"input_prefix": text, "input_suffix": "return x", "n_predict": 2},
}


@pytest.fixture(scope="module")
def infill_server(patched_lib, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fim")
    path = pico.build(folder / "fim.gguf", "llama", ftype="f16", tokenizer=FIM)
    with Server(path, maps=random_maps(path, folder)) as s:
        yield s


def counters(server) -> dict[str, float]:
    """Prompts that the server saw, and by outcome."""
    metrics = server.metrics()
    found = {"filled": 0.0, "exact": 0.0, "skipped": 0.0, "seen": metrics.get("llamacpp:ridge_prompts_seen_total", 0.0)}
    for name, value in metrics.items():
        if name.startswith("llamacpp:ridge_prompts_total"):
            found[re.search(r'outcome="(\w+)"', name)[1]] += value
    return found


@pytest.mark.field_report(28, "server-ridge.cpp", "        metrics->ridge.count(stats);\n")
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_field_report_28_every_endpoint_is_filled_and_counted(infill_server, path, stream):
    """By the flags alone: long prompts are filled, short ones skipped, and both counted, on every endpoint."""
    s = infill_server
    words = s.post("/detokenize", {"tokens": prompt_tokens(s, N)})["content"]
    for round, (text, outcome) in enumerate([(words, "filled"), (words[:50], "skipped")] * 2):
        before = counters(s)
        body = ENDPOINTS[path](f"{path} {stream} {round}: {text}")
        if stream:
            with s.stream_events(body, path) as events:
                assert list(events)
        else:
            s.post(path, body)
        s.wait_idle()
        after = counters(s)
        assert {k: after[k] - before[k] for k in after} == {"filled": 0, "exact": 0, "skipped": 0, "seen": 1} | {outcome: 1}


#
# flags, and requests that come again
#


@pytest.mark.field_report(32, "common-ridge-args.cpp", '{"--ridge-step-rows"}', '{"--ridge-untested"}')
def test_field_report_32_every_flag_has_a_test_that_moves_a_counter(patched_lib):
    """Of those that --help shows; a new flag needs a case there."""
    elsewhere = {
        "--ridge-maps": test_server.test_timings_log_metrics_and_props_agree,
        "--ridge-seed": test_server.test_seed_chooses_the_random_rows,
        "--ridge-hazard": test_server.test_hazard_rows_are_counted,
        "--ridge-step-rows": test_server.test_step_rows_bound_a_step,
    }
    shown = set(re.findall(r"^(--ridge-[a-z-]+)", subprocess.run([BINARY, "--help"], capture_output=True, text=True).stdout, re.M))
    (cases,) = [m.args[1] for m in test_server.test_each_flag_changes_what_is_filled.pytestmark if m.name == "parametrize"]
    tested = {x for flags, _ in cases for x in flags if x.startswith("--ridge-")}
    assert shown == tested | set(elsewhere)


@pytest.mark.field_report(37, "server-ridge.cpp", "    jobs.erase(it); // takes the rows out of the cache\n    metrics->ridge.count_cancelled();", "    metrics->ridge.count_cancelled();")
@pytest.mark.parametrize("mode", ["fill", "identity", "nofill", "plumb", "off"])
def test_field_report_37_a_request_that_comes_again_is_answered(model, maps, prompt, mode):
    """On a cache hit, after a client left in the middle, after another mode; greedy text does not change."""
    flags = ["-ub", 32]
    wanted = cold(model, maps, prompt, mode, *flags)
    other = "off" if mode != "off" else "fill"
    with Server(model, *flags, maps=maps) as s:
        for _ in range(2):
            first, second, third = (s.completion(prompt, mode, cache_prompt=cache) for cache in (False, True, True))
            assert first["tokens"] == wanted and second["tokens"] == third["tokens"]
            assert second["timings"]["prompt_n"] <= 1 and third["timings"]["prompt_n"] <= 1
            longer = prompt + prompt_tokens(s, 600, start=700)
            with s.stream(longer, mode, return_progress=True, cache_prompt=False) as events:
                next(events)
                next(events)
            s.wait_idle()
            s.completion(longer, other)


@pytest.mark.field_report(29, "server-ridge.cpp", 'SRV_WRN("ridge: every prompt runs exactly (%s): the maps were fitted without it\\n", no_fill_reason.c_str());')
def test_field_report_29_a_control_vector_is_warned_of_once(model, maps, prompt, tmp_path):
    path = sidecar_files.write_control_vector(tmp_path / "control.gguf", arch="llama", n_embd=256)
    with Server(model, "--control-vector", path, maps=maps) as s:
        for _ in range(2):
            answer = s.completion(prompt, cache_prompt=False)
            assert ridge_of(answer)["reason"] == "control_vector" and ridge_of(answer)["filled"] == 0
        assert s.log_text().count("every prompt runs exactly (control_vector)") == 1
