#!/usr/bin/env python3
"""A server that is left running: through many prompts that are broken off, or under mixed load for a while.

    scripts/soak_server.py cancels          200 clients go away at random moments; results/soak-cancels.json
    scripts/soak_server.py mixed            30 minutes of chats, long prompts, clients that go away, slot files; results/soak-mixed.json

`cancels` asks every slot for exact and filled answers on a fresh server, and again after the last client went away: tokens and
probabilities must be the same, and the server's memory must not have grown by more than 2 %. `mixed` fails on any answer
that is neither right in form nor a refusal that docs/SERVER.md names, on a server that does not stop cleanly, and on a report
of a sanitizer; it is meant for a build with AddressSanitizer (docs/TESTING.md). Exit status 0: nothing of that was found.
"""
from __future__ import annotations

import os
import random
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from filler import passages
from llama_server import BINARY, LlamaServer, ServerError
from ridgefill.machine import write_record

ROOT = Path(__file__).resolve().parents[1]
MODEL = ROOT / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MAPS = ROOT / "models" / "smollm2-135m-instruct.s20.q8_0.ridge.gguf"
N_SLOTS, CTX, TAIL, ANSWER = 3, 2048, 256, 8
LENGTHS = (2 * TAIL, CTX - 200)  # of prompts, tokens
MAX_GROWTH = 0.02
MODES = ("fill", "fill", "fill", "off", "plumb", "identity", "nofill")
REPORTS = ("AddressSanitizer", "LeakSanitizer", "runtime error:", "GGML_ASSERT", "Segmentation fault")

console = Console(width=max(120, Console().width))
app = typer.Typer(add_completion=False, help=__doc__)

Model = Annotated[Path, typer.Option(help="GGUF")]
Maps = Annotated[Path, typer.Option(help="its sidecar")]
Seed = Annotated[int, typer.Option(help="of prompts, modes and moments")]


class Soak:
    """A server with slots of their own caches, and prompts of real text."""

    def __init__(self, model: Path, maps: Path, *flags: str | Path):
        self.server = LlamaServer(
            "-m", model, "--ridge-maps", maps, "--ridge-tail", TAIL, "-np", N_SLOTS, "-c", N_SLOTS * CTX, "--no-kv-unified",
            "-b", 512, "-ub", 128, "-t", os.cpu_count() or 1, "--metrics", *flags, start_s=600,
        )  # fmt: skip
        self.server.loaded_maps()
        self.tokens = self.server.tokenize("\n\n".join(passages()[:400]))

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_) -> None:
        self.server.close()

    def prompt(self, rng: random.Random) -> list[int]:
        n = rng.randrange(*LENGTHS)
        start = rng.randrange(len(self.tokens) - n)
        return self.tokens[start : start + n]

    def wait_idle(self) -> None:
        until = time.monotonic() + 300
        while any(s["is_processing"] for s in self.server.get("/slots")):
            if time.monotonic() > until:
                raise ServerError(f"a slot is still busy after 5 minutes:\n{self.server.log_tail()}")
            time.sleep(0.05)

    def log(self) -> str:
        return Path(self.server.log.name).read_text(errors="replace")

    def rss(self) -> int:
        """Bytes of memory that the server holds."""
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return 1024 * int(re.search(r"VmRSS:\s+(\d+)", status)[1])

    def go_away(self, body: dict, seconds: float) -> None:
        with self.server.stream_events(body):
            time.sleep(seconds)

    def prompts_add_up(self) -> bool:
        """Whether /metrics gives every prompt that was seen one outcome."""
        with self.server._request("GET", "/metrics") as r:
            text = r.read().decode()
        seen = int(re.search(r"^llamacpp:ridge_prompts_seen_total (\d+)", text, re.M)[1])
        return seen == sum(map(int, re.findall(r"^llamacpp:ridge_prompts_total\{[^}]*\} (\d+)", text, re.M)))


def request(prompt: list[int], mode: str, **fields) -> dict:
    return {"prompt": prompt, "n_predict": ANSWER, "temperature": 0, "ignore_eos": True, "ridge": {"mode": mode}, **fields}


def save(out: Path, record: dict, good: bool) -> None:
    write_record(out, {**record, "good": good})
    console.print(f"written to {os.path.relpath(out)}")
    console.print("good" if good else "NOT good")
    raise typer.Exit(0 if good else 1)


#
# cancels
#


def probe(soak: Soak) -> list:
    """What every slot says, exactly and filled: tokens and probabilities."""
    prompt = soak.tokens[: 3 * TAIL]
    answers = []
    for slot in range(N_SLOTS):
        for mode in ("off", "fill"):
            body = request(prompt, mode, id_slot=slot, cache_prompt=False, n_probs=2, return_tokens=True)
            a = soak.server.post("/completion", body)
            answers.append([slot, mode, a["timings"]["ridge"]["filled"], a["tokens"], a["completion_probabilities"]])
    return answers


def places(log: str) -> dict[str, int]:
    """Where prefills were cancelled."""
    found = Counter()
    for step, _, lower in re.findall(r"cancelled after step (\d+) of (\d+) \(sweep 1: (\d+)\)", log):
        found["sweep 1" if int(step) < int(lower) else "between" if step == lower else "sweep 2"] += 1
    return dict(found)


@app.command()
def cancels(
    n: Annotated[int, typer.Option(help="clients that go away")] = 200,
    model: Model = MODEL,
    maps: Maps = MAPS,
    seed: Seed = 1,
    out: Annotated[Path, typer.Option(help="JSON file")] = ROOT / "results" / "soak-cancels.json",
) -> None:
    """Clients go away at random moments; afterwards each slot answers as a fresh server's, and memory is what it was."""
    rng = random.Random(seed)
    with Soak(model, maps, "--cache-ram", "0") as fresh:
        expected = probe(fresh)
    with Soak(model, maps, "--cache-ram", "0") as soak, Progress(console=console, transient=True) as progress:
        began = time.monotonic()
        soak.server.post("/completion", request(soak.prompt(rng), "fill"))
        whole = time.monotonic() - began
        first = 0
        for i in progress.track(range(n), description="clients that go away"):
            body = request(soak.prompt(rng), rng.choice(("fill", "fill", "fill", "off")), id_slot=rng.randrange(N_SLOTS), n_predict=64)
            soak.go_away(body, rng.uniform(0, 1.2 * whole))
            if i == n // 10:  # every buffer has its size by now
                soak.wait_idle()
                first = soak.rss()
        soak.wait_idle()
        last, found, adds_up, where = soak.rss(), probe(soak), soak.prompts_add_up(), places(soak.log())
    growth, same = last / first - 1, found == expected
    console.print(f"{n} clients went away, prefills were cancelled in {where}; every slot answers as a fresh server: {same}; "
                  f"memory {first / 2**20:,.0f} MiB, then {last / 2**20:,.0f} MiB ({100 * growth:+.2f} %); prompts add up: {adds_up}")
    record = {"settings": {"n": n, "seed": seed, "model": model.name, "maps": maps.name}, "cancelled_in": where,
              "same_answers": same, "rss_first": first, "rss_last": last, "prompts_add_up": adds_up}
    save(out, record, same and growth <= MAX_GROWTH and adds_up)


#
# mixed load
#


class Load:
    """Workers, each a thread that does its job over and over until time is up or one of them met a fault."""

    def __init__(self, soak: Soak, seconds: float, seed: int):
        self.soak, self.until, self.seed = soak, time.monotonic() + seconds, seed
        self.counts, self.faults, self._lock = Counter(), [], threading.Lock()

    def run(self, jobs: dict[str, Callable]) -> None:
        threads = [threading.Thread(target=self._worker, args=(name, job, i)) for i, (name, job) in enumerate(jobs.items())]
        for t in threads:
            t.start()
        for t in threads:
            t.join()

    def _worker(self, name: str, job: Callable, i: int) -> None:
        rng = random.Random(self.seed + 1000 * i)
        while time.monotonic() < self.until and not self.faults:
            try:
                outcome = job(self, rng)
            except Exception as e:  # noqa: BLE001  (whatever it is, it is a finding)
                outcome = "fault"
                with self._lock:
                    self.faults.append(f"{name}: {type(e).__name__}: {e}")
            with self._lock:
                self.counts[f"{name}: {outcome}"] += 1


def chat(load: Load, rng: random.Random) -> str:
    """A conversation of five turns, each longer than the tail allows to be left unfilled."""
    server, messages = load.soak.server, []
    for turn in range(5):
        start = rng.randrange(len(load.soak.tokens) - 300)
        text = server.post("/detokenize", {"tokens": load.soak.tokens[start : start + rng.randrange(50, 300)]})["content"]
        messages.append({"role": "user", "content": text})
        answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 16, "temperature": 0})
        if answer["timings"]["ridge"]["exact"] < 1:
            raise ServerError(f"turn {turn}: expected exact rows, found {answer['timings']['ridge']}")
        messages.append(answer["choices"][0]["message"])
    return "done"


def long_prompt(load: Load, rng: random.Random) -> str:
    """A prompt in some mode; rows must add up."""
    prompt, mode = load.soak.prompt(rng), rng.choice(MODES)
    r = load.soak.server.complete(prompt, n_predict=ANSWER, ridge={"mode": mode}, cache_prompt=rng.random() < 0.5).ridge
    if r["filled"] + r["exact"] + r["cached"] != len(prompt) or (mode in ("off", "plumb") and (r["filled"] or r["cached_filled"])):
        raise ServerError(f"mode {mode}, {len(prompt)} rows: found {r}")
    return mode


def leave(load: Load, rng: random.Random) -> str:
    load.soak.go_away(request(load.soak.prompt(rng), rng.choice(MODES), n_predict=64), rng.uniform(0, 6))
    return "left"


def slot_file(load: Load, rng: random.Random) -> str:
    """Save a slot, or restore or erase one. Rows of mode nofill are not saved, and a file is not restored where it is missing or has no room."""
    what, slot = rng.choice(("save", "restore", "erase")), rng.randrange(N_SLOTS)
    time.sleep(rng.uniform(0, 3))
    try:
        load.soak.server.post(f"/slots/{slot}?action={what}", {"filename": f"{rng.randrange(2)}.bin"})
    except ServerError as e:
        if what == "save" and "status 501" in str(e) and "mode nofill" in str(e):
            return "save refused: nofill"
        if what == "restore" and "status 400" in str(e) and ("could not be opened" in str(e) or "have room" in str(e)):
            return "restore refused: no file or no room"
        raise
    return what


@app.command()
def mixed(
    minutes: Annotated[float, typer.Option(help="of load")] = 30,
    model: Model = MODEL,
    maps: Maps = MAPS,
    seed: Seed = 1,
    out: Annotated[Path, typer.Option(help="JSON file")] = ROOT / "results" / "soak-mixed.json",
) -> None:
    """Chats, long prompts in every mode, clients that go away, slots that are saved, restored and erased, all at once."""
    jobs = {"chat 1": chat, "chat 2": chat, "long 1": long_prompt, "long 2": long_prompt, "leave": leave, "slots": slot_file}
    with tempfile.TemporaryDirectory() as folder, Soak(model, maps, "--cache-ram", "256", "--slot-save-path", folder) as soak:
        load = Load(soak, 60 * minutes, seed)
        load.run(jobs)
        adds_up = False
        if not load.faults:
            soak.wait_idle()
            adds_up = soak.prompts_add_up()
        soak.server.process.send_signal(signal.SIGTERM)
        status, log = soak.server.process.wait(300), soak.log()
    reports = [line for line in log.splitlines() if any(r in line for r in REPORTS)]
    for line in [f"{k}: {v}" for k, v in sorted(load.counts.items())] + load.faults + reports[:20]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(f"the server ended with status {status}; prompts add up: {adds_up}; cancelled prefills: {places(log)}")
    record = {"settings": {"minutes": minutes, "seed": seed, "model": model.name, "maps": maps.name, "binary": BINARY.parents[1].name},
              "counts": dict(load.counts), "faults": load.faults, "reports": reports, "exit_status": status, "prompts_add_up": adds_up,
              "cancelled_in": places(log)}
    save(out, record, not load.faults and not reports and status == 0 and adds_up)


if __name__ == "__main__":
    try:
        app()
    except ServerError as e:
        raise SystemExit(f"soak_server: {e}") from None
