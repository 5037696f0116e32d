"""What the server tests share: a llama-server with its log, streams that can be broken off, prompts and maps.

The model is a pico one, whose greedy text changes with the slightest change of the cache, unless RIDGE_TEST_MODEL names
another file. One thread: a second one gains nothing on it, and waits for the first when the machine is busy.
"""
from __future__ import annotations

import dataclasses
import http.client
import inspect
import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

import sidecar_files
from ridgefill import lib

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
import llama_server  # noqa: E402

# small, so that a prompt of a few hundred rows has batches and steps enough
BATCH, UBATCH, TAIL, SPLIT = 256, 128, 64, 3
N = 600  # rows of the usual prompt

GREEDY = {"temperature": 0, "n_predict": 24, "ignore_eos": True, "return_tokens": True}


class Server(llama_server.LlamaServer):
    """llama-server on the model of the tests, with fixed threads and batches: text is compared for equality."""

    def __init__(self, model: Path, *arguments, maps: Path | None = None, np: int = 1, ctx: int = 2048):
        fixed = ["-m", model, "-np", np, "-c", ctx * np, "-b", BATCH, "-ub", UBATCH, "-t", 1, "-tb", 1, "--no-warmup"]
        if np > 1:
            fixed.append("--no-kv-unified")
        if maps is not None:
            fixed += ["--ridge-maps", maps, "--ridge-tail", TAIL]
        self.answered: dict[str, dict] = {}
        super().__init__(*fixed, "--metrics", *arguments)

    def __exit__(self, kind, *_) -> None:
        """Whatever a test asked is asked once more, of whatever the test left in the cache: it must be answered again."""
        try:
            if kind is None and self.process.poll() is None:
                for body in list(self.answered.values())[-8:]:
                    self.post("/completion", body | {"n_predict": 1})
        finally:
            super().__exit__(kind, *_)

    def log_text(self) -> str:
        return Path(self.log.name).read_text(errors="replace")

    def ridge_lines(self) -> list[str]:
        """Lines of the log about prompts and maps."""
        return [line for line in self.log_text().splitlines() if "ridge: " in line]

    def completion(self, prompt: list[int] | str, mode: str | None = None, **fields) -> dict:
        """A whole greedy completion; `mode` and other keys of `ridge` go into its field."""
        ridge = fields.pop("ridge", {})
        if mode is not None:
            ridge = {"mode": mode, **ridge}
        body = {"prompt": prompt, **GREEDY, **fields} | ({"ridge": ridge} if ridge else {})
        answer = self.post("/completion", body)
        self.answered[json.dumps(body)] = body
        return answer

    def error(self, path: str, body: dict) -> tuple[int, str]:
        """Status and message of a request that must fail."""
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        c.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        r = c.getresponse()
        text = r.read().decode()
        assert r.status != 200, text
        return r.status, json.loads(text)["error"]["message"]

    @contextmanager
    def stream(self, prompt=None, mode: str | None = None, path: str = "/completion", **fields) -> Iterator[Iterator[dict]]:
        """Events of a streamed request. Leaving the block early closes the connection, as a client that goes away."""
        body = {"prompt": prompt, **GREEDY, **fields}
        if mode is not None:
            body["ridge"] = {"mode": mode}
        with self.stream_events(body, path) as events:
            yield events

    def slots(self) -> list[dict]:
        return self.get("/slots")

    def wait_idle(self, seconds: float = 20) -> None:
        until = time.monotonic() + seconds
        while any(s["is_processing"] for s in self.slots()):
            assert time.monotonic() < until, "a slot is still busy:\n" + self.log_tail()
            time.sleep(0.02)

    def metrics(self) -> dict[str, float]:
        """Prometheus samples: name with labels, to value."""
        with self._request("GET", "/metrics") as r:
            lines = r.read().decode().splitlines()
        return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if not x.startswith("#"))}


def ridge_of(answer: dict) -> dict:
    return answer["timings"]["ridge"]


def start_failure(model: Path | None, *arguments) -> str:
    """What llama-server says when these arguments make it refuse to start. It must say so before a minute is over."""
    command = [str(llama_server.BINARY), "--port", str(llama_server.free_port()), "--no-warmup"]
    command += ["-m", str(model)] if model else []
    p = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert p.returncode == 1, (p.returncode, p.stdout[-2000:], p.stderr[-2000:])
    return p.stdout + p.stderr


@cache
def _text() -> str:
    # real prose and code of a fixed length that every machine has
    return inspect.getsource(textwrap) + inspect.getsource(json.decoder) + inspect.getsource(dataclasses)


def prompt_tokens(server: Server, n: int, start: int = 0) -> list[int]:
    """n tokens of real text, from token `start` of it."""
    tokens = server.tokenize(_text()[: 8 * (start + n) + 100])
    assert len(tokens) >= start + n
    return tokens[start : start + n]


def random_maps(model_path: Path, folder: Path, split: int = SPLIT, seed: int = 0, kind: str = "input", **changes) -> Path:
    """A good sidecar for a model, with maps near the identity or, for K and V, of noise: either changes what the model says."""
    with lib.Model(model_path) as model:
        p, width = model.fingerprint(split), model.n_head_kv * model.head_size
    return sidecar_files.write_sidecar(
        folder / f"random-s{split}-{seed}-{kind}.ridge.gguf", kind=kind, kv_lengths=(width, width), arch=p["architecture"], n_layer=p["block_count"],
        n_embd=p["embedding_length"], split=split, map_type="q8_0", tokenizer_sha256=p["tokenizer_sha256"],
        hparams=p["hparams"], file_type=p["file_type"], model_name=p["name"], anchors=p["anchors"], seed=seed, **changes)


def cold(model: Path, maps: Path, prompt: list[int], mode: str | None, *arguments, **fields) -> list[int]:
    """Tokens of the first answer of a fresh server."""
    with Server(model, *arguments, maps=maps) as s:
        return s.completion(prompt, mode, **fields)["tokens"]


#
# fixtures, imported by the test files
#


@pytest.fixture(scope="module")
def model(patched_lib, pico_model):
    lib.load(patched_lib)
    return Path(os.environ.get("RIDGE_TEST_MODEL") or pico_model("llama", ftype="f16"))


@pytest.fixture(scope="module")
def maps(model, tmp_path_factory):
    """A good sidecar of random maps."""
    return random_maps(model, tmp_path_factory.mktemp("maps"))


@pytest.fixture(scope="module")
def plain(model):
    """The same binary without maps."""
    with Server(model) as s:
        yield s


@pytest.fixture(scope="module")
def prompt(plain):
    return prompt_tokens(plain, N)
