"""A llama-server of this checkout on a free loopback port, and the few requests that our scripts make of it.

Standard library only: the quick start runs it before anything else is known to work.
"""
from __future__ import annotations

import dataclasses
import http.client
import json
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BINARY = Path(os.environ.get("RIDGE_BUILD", ROOT / "build")) / "bin" / "llama-server"


class ServerError(RuntimeError):
    """The server did not start or answered with an error; the message is for people."""


@dataclasses.dataclass
class Answer:
    """One streamed completion. Times in milliseconds; `timings` is what the server reports at the end."""

    text: str
    first_token_ms: float
    timings: dict

    @property
    def ridge(self) -> dict:
        return self.timings.get("ridge") or {}


def check_arm(arm: str, answer: Answer, n_prompt: int) -> None:
    """Nothing was reused, and the server did what was asked ("off" or "fill"). Raises ServerError otherwise."""
    if answer.timings["prompt_n"] != n_prompt:
        raise ServerError(f"{arm}: expected {n_prompt} prompt tokens processed, found {answer.timings['prompt_n']}")
    filled = answer.ridge.get("filled", 0)
    if (arm == "fill") != (filled > 0):
        raise ServerError(f"{arm}: {filled} filled rows, reason: {answer.ridge.get('reason')!r}")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _events(r: http.client.HTTPResponse) -> Iterator[dict]:
    for line in r:
        if line.startswith(b"error:"):
            raise ServerError(line.decode(errors="replace").strip())
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                raise ServerError(f"completion: {event['error']}")
            yield event


class LlamaServer:
    """Start llama-server with `arguments`, stop it on leaving `with`. Its log is kept in a file and quoted on failure.

    under  the command that runs it, such as a profiler's
    """

    def __init__(self, *arguments: str | os.PathLike, start_s: float = 120, under: tuple[str, ...] = ()):
        if not BINARY.exists():
            raise ServerError(f"expected {BINARY}, found none: run scripts/setup.sh")
        self.port = free_port()
        self.log = tempfile.NamedTemporaryFile(prefix="llama-server-", suffix=".log")
        command = [*under, str(BINARY), "--host", "127.0.0.1", "--port", str(self.port), *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT)
        try:
            self._wait(time.monotonic() + start_s)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> LlamaServer:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()

    def log_tail(self, lines: int = 15) -> str:
        text = Path(self.log.name).read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def _wait(self, until: float) -> None:
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise ServerError(f"llama-server stopped with status {self.process.returncode}:\n{self.log_tail()}")
            try:
                self.get("/health")
                return
            except (OSError, ServerError):
                time.sleep(0.1)
        raise ServerError(f"llama-server was not ready in time:\n{self.log_tail()}")

    def _request(self, method: str, path: str, body: dict | None = None) -> http.client.HTTPResponse:
        c = http.client.HTTPConnection("127.0.0.1", self.port, timeout=900)
        # closed with the response, not when the connection happens to be collected
        headers = {"Content-Type": "application/json", "Connection": "close"}
        c.request(method, path, json.dumps(body) if body is not None else None, headers)
        r = c.getresponse()
        if r.status != 200:
            raise ServerError(f"{method} {path}: status {r.status}: {r.read().decode(errors='replace')[:500]}")
        return r

    def get(self, path: str) -> dict:
        with self._request("GET", path) as r:
            return json.load(r)

    def post(self, path: str, body: dict) -> dict:
        with self._request("POST", path, body) as r:
            return json.load(r)

    def loaded_maps(self) -> dict:
        """What /props says of them. Raises ServerError where there are none."""
        ridge = self.get("/props").get("ridge") or {}
        if not ridge.get("loaded"):
            raise ServerError(f"the server runs without maps:\n{self.log_tail()}")
        return ridge

    @contextmanager
    def stream_events(self, body: dict, path: str = "/completion") -> Iterator[Iterator[dict]]:
        """Events of a streamed request as they come. Leaving the block early closes the connection, as a client that goes away.

        Raises ServerError for an error in the stream.
        """
        with self._request("POST", path, {**body, "stream": True}) as r:
            yield _events(r)

    def tokenize(self, text: str) -> list[int]:
        return self.post("/tokenize", {"content": text, "add_special": False, "parse_special": True})["tokens"]

    def apply_template(self, question: str) -> str:
        return self.post("/apply-template", {"messages": [{"role": "user", "content": question}]})["prompt"]

    def complete(self, prompt: str | list[int], *, n_predict: int = 24, ridge: dict | None = None, **fields) -> Answer:
        """Greedy streamed completion; nothing of an earlier prompt is reused unless `cache_prompt` says so."""
        body = {"prompt": prompt, "n_predict": n_predict, "temperature": 0, "cache_prompt": False, **fields}
        if ridge is not None:
            body["ridge"] = ridge
        start, first, text, timings = time.monotonic(), None, "", {}
        with self.stream_events(body) as events:
            for event in events:
                if first is None:
                    first = (time.monotonic() - start) * 1000
                text += event.get("content", "")
                timings = event.get("timings", timings)
        if first is None or not timings:
            raise ServerError(f"completion: the stream ended without tokens or timings:\n{self.log_tail()}")
        return Answer(text, first, timings)
