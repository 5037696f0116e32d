"""ridgefill doctor: servers, logs and files that are well or ill, and what it says of each."""
from __future__ import annotations

import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

import sidecar_files
from calibrate_pico import config, corpus  # noqa: F401  (fixture)
from ridgefill import calibrate as cal
from ridgefill import cli, native, verify
from server_util import Server, llama_server, random_maps, start_failure
from server_util import maps, model, plain, prompt  # noqa: F401  (fixtures)
from test_verify import resealed

CODES = {"healthy": 0, "problem": 12, "cannot tell": 13}
runner = CliRunner()


def doctor(*arguments, verdict: str, say: str = "") -> dict:
    """The report as JSON, having checked the exit code and that the text says the same, diagnosis first."""
    arguments = ["doctor", *map(str, arguments)]
    done = runner.invoke(cli.app, [*arguments, "--json"])
    assert done.exit_code == CODES[verdict], done.output
    found = json.loads(done.stdout)
    assert found["verdict"] == verdict and say in found["diagnosis"], found
    lines = runner.invoke(cli.app, arguments).stdout.splitlines()
    assert lines[0] == f"{verdict}: {found['diagnosis']}"
    order = [line.split()[0] for line in lines[1:]]
    assert order == sorted(order, key=["matches", "does", "do"].index)
    assert sum(w == "matches" for w in order) == sum(c["matched"] for c in found["checks"])
    assert order.count("do") == len(found["do"])
    if verdict != "healthy":
        assert found["do"]
    return found


def failed(found: dict) -> str:
    return "\n".join(c["text"] for c in found["checks"] if not c["matched"])


def url(server) -> str:
    return f"http://127.0.0.1:{server.port}"


def log_of(server, path: Path) -> Path:
    path.write_text(server.log_text())
    return path


#
# servers
#


def test_a_dead_port():
    found = doctor(f"http://127.0.0.1:{llama_server.free_port()}", verdict="cannot tell", say="No server answers")
    assert "refused" in found["diagnosis"]


def test_prompts_too_short_then_one_filled(model, maps, prompt, tmp_path):  # noqa: F811
    with Server(model, maps=maps) as s:
        doctor(url(s), verdict="healthy", say="no prompt has come yet")
        doctor(log_of(s, tmp_path / "new.log"), verdict="healthy", say="maps are loaded; no prompt has come yet")
        for _ in range(2):
            s.completion(prompt[:100], n_predict=1, cache_prompt=False)
        for target in (url(s), log_of(s, tmp_path / "short.log")):
            found = doctor(target, verdict="problem", say="No prompt was filled: 2 of 2 prompts ran exactly: short")
            assert "--ridge-min-prompt" in found["do"][0] and "0 of 2 prompts were filled" in failed(found)
        s.completion(prompt, n_predict=1)
        s.completion(prompt, "off", n_predict=1)
        filled = s.get("/slots") and s.metrics()['llamacpp:ridge_rows_total{kind="filled"}']
        for target in (url(s), log_of(s, tmp_path / "filled.log")):
            found = doctor(target, verdict="healthy", say="1 of 4 prompts were filled.")
            texts = [c["text"] for c in found["checks"] if c["matched"]]
            assert any(f"{filled:,.0f} filled" in t for t in texts) and any("1 of 4 prompts ran exactly: off" in t for t in texts)
            assert "2 of 4 prompts ran exactly: short" in failed(found)


def test_a_server_without_maps(plain, prompt):  # noqa: F811
    plain.completion(prompt[:20], "fill", n_predict=1)
    found = doctor(url(plain), verdict="problem", say="RidgeFill's server, started without maps")
    assert "prompts asked to be filled" in failed(found) and "--ridge-maps" in found["do"][0]


def test_refused_maps(model, prompt, tmp_path):  # noqa: F811
    lora = sidecar_files.write_lora(tmp_path / "lora.gguf", arch="llama", n_embd=256)
    with Server(model, "--log-jsonl", maps=lora) as s:
        s.completion(prompt, n_predict=1)
        for target in (url(s), log_of(s, tmp_path / "log")):
            found = doctor(target, verdict="problem", say="A LoRA adapter was passed as maps.")
            assert found["do"][0].startswith("Pass it as --lora") and "lora.gguf" in failed(found)
        first_log = s.log_text()
    # the same log, after a start that went well
    good = random_maps(model, tmp_path)
    with Server(model, maps=good) as s:
        s.completion(prompt, n_predict=1)
        (tmp_path / "both").write_text(first_log + s.log_text())
    found = doctor(tmp_path / "both", verdict="healthy", say="1 of 1 prompts were filled")
    assert "the last of 2 starts" in found["checks"][0]["text"]


@pytest.mark.parametrize(
    "arguments, say, do",
    [
        (["--spec-type", "ngram-simple"], "decodes speculatively", "speculation"),
        (["--ridge-min-prompt", 4096], "longer than a slot", "--ridge-min-prompt"),
        (["--ridge-mode", "off"], "No prompt was filled: 1 of 1 prompts ran exactly: off", "--ridge-mode fill"),
    ],
    ids=["speculative", "no room", "off"],
)
def test_maps_that_fill_nothing(arguments, say, do, model, maps, prompt):  # noqa: F811
    with Server(model, *arguments, maps=maps) as s:
        s.completion(prompt, n_predict=1)
        assert do in doctor(url(s), verdict="problem", say=say)["do"][0]


@contextmanager
def answering(answers: dict[str, tuple[int, str]]) -> Iterator[str]:
    """A server with these answers to GET by path, and 404 to others."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            status, body = answers.get(self.path, (404, '{"error": {"message": "File Not Found"}}'))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


STOCK = {
    "/props": (200, json.dumps({"default_generation_settings": {"n_ctx": 2048}, "total_slots": 1, "build_info": "b1-abc"})),
    "/slots": (200, '[{"id": 0, "n_ctx": 2048}]'),
    "/metrics": (200, "# TYPE llamacpp:prompt_tokens_total counter\nllamacpp:prompt_tokens_total 12\n"),
}
OFF = (501, '{"error": {"code": 501, "message": "This server does not support metrics endpoint."}}')
KEY = (401, '{"error": {"code": 401, "message": "Invalid API Key"}}')
LOADING = (503, '{"error": {"code": 503, "message": "Loading model"}}')


@pytest.mark.parametrize(
    "answers, verdict, say",
    [
        (STOCK, "problem", "a stock llama-server, or RidgeFill's without maps"),
        (STOCK | {"/slots": OFF, "/metrics": OFF}, "problem", "a stock llama-server, or RidgeFill's without maps"),
        ({"/props": KEY}, "cannot tell", "asks for an API key"),
        ({"/props": LOADING}, "cannot tell", "is not ready: status 503, Loading model"),
        ({"/props": (200, "<html>")}, "cannot tell", "is no llama-server"),
        ({"/props": (200, "[]")}, "cannot tell", "is no llama-server"),
        ({}, "cannot tell", "is no llama-server (status 404, File Not Found)"),
    ],
    ids=["stock", "stock, nothing on", "key", "loading", "web page", "other JSON", "no such page"],
)
def test_servers_of_other_kinds(answers, verdict, say):
    with answering(answers) as address:
        doctor(address, verdict=verdict, say=say)


def test_an_api_key_is_sent(model, maps):  # noqa: F811
    with Server(model, "--api-key", "s3cret", maps=maps) as s:
        doctor(url(s), verdict="cannot tell", say="API key")
        doctor(url(s), "--api-key", "s3cret", verdict="healthy")


def test_a_server_without_metrics_is_judged_by_its_maps_alone(model, maps, prompt):  # noqa: F811
    with Server(model, maps=maps) as s:
        s.completion(prompt, n_predict=1)
        props = json.dumps(s.get("/props"))
    with answering(STOCK | {"/props": (200, props), "/metrics": OFF}) as address:
        found = doctor(address, verdict="cannot tell", say="whether prompts are filled cannot be seen")
    assert "--metrics" in found["do"][0] and "/metrics is switched off" in failed(found)


def test_prompts_that_failed_are_a_problem_though_others_were_filled(model, maps):  # noqa: F811
    with Server(model, maps=maps) as s:
        props = json.dumps(s.get("/props"))
    counts = 'llamacpp:ridge_prompts_total{outcome="filled",reason="fill"} 7\nllamacpp:ridge_prompts_total{outcome="skipped",reason="no_space"} 2\n'
    with answering(STOCK | {"/props": (200, props), "/metrics": (200, counts)}) as address:
        found = doctor(address, verdict="problem", say="2 of 9 prompts ran exactly: no_space")
    assert "-c" in found["do"][0]


#
# logs
#


def test_a_server_that_did_not_start(model, maps, tmp_path):  # noqa: F811
    log = tmp_path / "log"
    log.write_text(start_failure(model, "--ridge-tail", "0"))
    found = doctor(log, verdict="problem", say="a value that it cannot have")
    assert "1 or more, found '0'" in failed(found)
    log.write_text(start_failure(model, "--ridge-mode", "fill"))
    doctor(log, verdict="problem", say="A mode was chosen, but no maps.")
    log.write_text(start_failure(model, "--lora", maps))
    assert "--ridge-maps" in doctor(log, verdict="problem", say="passed to another flag")["do"][0]


def test_an_answer_that_refused_a_request(plain, prompt, tmp_path):  # noqa: F811
    _, message = plain.error("/completion", {"prompt": prompt[:5], "ridge": {"moed": "off"}})
    log = tmp_path / "log"
    log.write_text("answer: " + json.dumps({"error": {"code": 400, "message": message}}))
    found = doctor(log, verdict="cannot tell", say="says nothing")
    assert "'moed'" in failed(found) and "`ridge` field" in found["do"][0]


def test_a_traceback_of_a_program(tmp_path):
    log = tmp_path / "log"
    log.write_text("Traceback (most recent call last):\n  File \"x.py\", line 3\nridgefill.errors.RidgeError: mode fill needs maps, found none\n")
    doctor(log, verdict="problem", say="A prefill in mode fill was begun without maps.")


@pytest.mark.parametrize("text", ["", "hello\nI like fridges: a lot\n", "\x00\xff\xfe" * 10])
def test_logs_that_say_nothing(text, tmp_path):
    log = tmp_path / "log"
    log.write_bytes(text.encode("latin-1"))
    doctor(log, verdict="cannot tell", say="says nothing")


def test_a_log_of_another_version(tmp_path):
    log = tmp_path / "log"
    log.write_text("0.1 I slot report: id  0 | task 0 | ridge: the moon is full\n" * 2)
    assert "2 lines of RidgeFill, the first of them line 1, are of another version" in failed(doctor(log, verdict="cannot tell"))


def test_a_path_that_does_not_exist(tmp_path, model):  # noqa: F811
    doctor(tmp_path / "none", verdict="cannot tell", say="There is no file")
    doctor(tmp_path / "none.gguf", model, verdict="cannot tell", say="There is no file")


#
# files
#


@pytest.fixture(scope="module")
def small(pico_model) -> str:
    """A smaller model than that of the servers."""
    return str(pico_model("llama", n_layer=5, head=32, n_head=2, n_head_kv=1))


@pytest.fixture(scope="module")
def fitted(small, corpus, tmp_path_factory) -> Path:  # noqa: F811
    (made,) = cal.calibrate(config(small, corpus, tmp_path_factory.mktemp("fitted") / "m.gguf", kinds=["kv"], score=True))
    return Path(made.path)


def test_maps_and_their_model(fitted, small):
    found = doctor(fitted, small, verdict="healthy", say="what they did when they were made")
    assert not failed(found)
    assert {"architecture: llama", "layers: 5", "width: 64"} <= {c["text"] for c in found["checks"]}


def test_maps_without_a_selftest(model, maps):  # noqa: F811
    found = doctor(maps, model, verdict="healthy", say="The maps are those of this model.")
    assert failed(found) == "the file holds no self-test"


def test_maps_alone(fitted):
    found = doctor(fitted, verdict="cannot tell", say="cannot be told without it")
    assert "architecture llama" in found["do"][0]


def test_another_quantisation(fitted, small, model, maps, tmp_path):  # noqa: F811
    for name, source in (("small", small), ("large", model)):
        quantize = [native.loaded_dir() / "llama-quantize", source, tmp_path / name, "Q8_0"]
        subprocess.run(quantize, check=True, capture_output=True)
    found = doctor(fitted, tmp_path / "small", verdict="healthy", say="what they did when they were made")
    assert failed(found).startswith("file type: expected 0, found 7") and "ridgefill verify" in found["do"][0]
    found = doctor(maps, tmp_path / "large", verdict="cannot tell", say="not quite the one")
    assert "ridgefill verify" in found["do"][0] and "ridgefill score" in found["do"][1]


def test_another_model(fitted, model, pico_model):  # noqa: F811
    found = doctor(fitted, model, verdict="problem", say="another number of layers")
    assert "layers: expected 5, found 8" in failed(found) and "made for this model" in found["do"][0]
    other = pico_model("qwen3", n_layer=5, head=32, n_head=2, n_head_kv=1)
    doctor(fitted, other, verdict="problem", say="another architecture")


def test_maps_that_do_something_else(fitted, small, tmp_path):
    other = resealed(fitted, tmp_path / "m.gguf", "bias", lambda b: b + 0.5)
    found = doctor(other, small, verdict="problem", say="do not do with this model")
    assert f"at most {verify.TOLERANCE:g}" in failed(found)


def test_the_two_files_swapped(fitted, small):
    found = doctor(small, fitted, verdict="problem", say="A model was passed as maps.")
    assert "the maps first" in found["do"][0]


def test_a_model_that_is_none(fitted, tmp_path):
    (tmp_path / "x.gguf").write_text("no model")
    doctor(fitted, tmp_path / "x.gguf", verdict="cannot tell", say="the model could not be loaded")


# the cause that is named for each kind of damage, by its group in the catalogue
DAMAGE = {
    "truncated": "cut short",
    "bit_flipped": "not those that were written",
    "wrong_architecture": "another architecture",
    "wrong_width": "another width",
    "wrong_layer_count": "another number of layers",
    "other_tokenizer": "another tokenizer",
    "nan_map": "infinities or NaN",
    "duplicate_tensor": "twice",
    "unknown_version": "another version of ridgefill",
    "lora_file": "LoRA",
    "empty_file": "is empty",
}


def test_damaged_and_foreign_files(maps, model, tmp_path):  # noqa: F811
    damaged = sidecar_files.damaged_variants(maps, tmp_path)
    assert damaged.keys() == DAMAGE.keys()
    for kind, path in damaged.items():
        doctor(path, model, verdict="problem", say=DAMAGE[kind])
    page = Path(shutil.copy(__file__, tmp_path / "page.gguf"))
    doctor(page, verdict="problem", say="no GGUF at all")
