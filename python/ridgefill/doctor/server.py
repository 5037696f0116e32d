"""The doctor looks at a running server: /props, /metrics and /slots. It sends no prompt."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections import Counter
from dataclasses import dataclass, field

from . import catalogue
from .report import Check, Outcome, Report, from_message, judge_prompts

TIMEOUT = 30  # seconds: a server answers between two batches
_PROMPTS = re.compile(r'^llamacpp:ridge_prompts_total\{outcome="(\w+)",reason="(\w*)"\} (\d+)', re.MULTILINE)
_ROWS = re.compile(r'^llamacpp:ridge_rows_total\{kind="(\w+)"\} (\d+)', re.MULTILINE)


class _Answered(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, message: str):
        super().__init__(f"status {status}, {message}")
        self.status = status


_NO_ANSWER = (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, _Answered)  # or not a llama-server's


def _get(url: str, path: str, api_key: str) -> str:
    """Raises one of _NO_ANSWER."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url.rstrip("/") + path, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as r:
            return r.read().decode("utf-8", "replace")
    except urllib.error.HTTPError as e:
        body = e.read().decode("utf-8", "replace")
        try:
            message = json.loads(body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = e.reason
        raise _Answered(e.code, message) from None


def _get_if_on(url: str, path: str, api_key: str) -> str | None:
    """None where the server was started without this endpoint."""
    try:
        return _get(url, path, api_key)
    except _Answered as e:
        if e.status == 501:
            return None
        raise


@dataclass(frozen=True)
class _Seen:
    """What a server says of itself."""

    ridge: dict | None  # of /props, None without maps
    room: int  # rows of the longest prompt that a slot can take
    has_metrics: bool
    prompts: Counter[Outcome] = field(default_factory=Counter)
    rows: dict[str, int] = field(default_factory=dict)


def _look(url: str, api_key: str) -> _Seen:
    props = json.loads(_get(url, "/props", api_key))
    room = props["default_generation_settings"]["n_ctx"]
    if (slots := _get_if_on(url, "/slots", api_key)) is not None:
        room = max(slot["n_ctx"] for slot in json.loads(slots))
    metrics = _get_if_on(url, "/metrics", api_key)
    prompts = Counter({Outcome(outcome, reason): int(n) for outcome, reason, n in _PROMPTS.findall(metrics or "")})
    rows = {kind: int(n) for kind, n in _ROWS.findall(metrics or "")}
    return _Seen(props.get("ridge"), room, metrics is not None, prompts, rows)


def _unseen(e: Exception, url: str) -> Report:
    """Why nothing could be seen."""
    match e:
        case _Answered(status=401 | 403):
            do = "Pass it as --api-key, or in LLAMA_API_KEY."
            return Report.of("cannot tell", f"The server at {url} asks for an API key.", do=[do])
        case _Answered(status=503):
            do = "Ask again when it has loaded its model; its log says how far it is."
            return Report.of("cannot tell", f"The server at {url} is not ready: {e}.", do=[do])
        case TimeoutError():
            do = "Ask again when it is less busy; if it never answers, look at its log."
            return Report.of("cannot tell", f"The server at {url} did not answer within {TIMEOUT} s.", do=[do])
        case OSError():
            do = "Check address and port. If the server stopped at its start, its log says why: `ridgefill doctor LOG`."
            return Report.of("cannot tell", f"No server answers at {url}: {getattr(e, 'reason', e)}.", do=[do])
    return Report.of("cannot tell", f"What answers at {url} is no llama-server ({e}).", do=["Check address and port, without /v1."])


def diagnose(url: str, api_key: str = "") -> Report:
    """What a llama-server at this address says of itself."""
    try:
        seen = _look(url, api_key)
    except _NO_ANSWER as e:
        return _unseen(e, url)
    if seen.ridge is None:
        return _without_maps(seen)
    if not seen.ridge["loaded"]:
        return from_message(seen.ridge["message"], [Check("a llama-server of RidgeFill answers", True)])
    return _with_maps(seen)


def _without_maps(seen: _Seen) -> Report:
    checks = [Check("a llama-server answers", True), Check("it has no maps", False)]
    if asked := sum(n for o, n in seen.prompts.items() if o.reason == "no_maps"):
        checks.append(Check(f"{asked} prompts asked to be filled", False))
    what = "RidgeFill's server, started without maps" if seen.prompts else "a stock llama-server, or RidgeFill's without maps"
    do = 'Start it with --ridge-maps FILE. If `llama-server --help` has no section "ridge params", it is a stock one.'
    return Report.of("problem", f"The server fills no prompts: it is {what}.", checks, [do])


def _with_maps(seen: _Seen) -> Report:
    ridge, rows = seen.ridge, seen.rows
    least = max(ridge["min_prompt"], ridge["tail"] + ridge["sink"] + 1)
    fits = least <= seen.room
    maps = f"{ridge['maps']}, kind {ridge['kind']}, split {ridge['split']}, sha256 {ridge['hash'][:12]}"
    checks = [
        Check(f"the maps are loaded: {maps}", True),
        Check(f"mode of requests that name none: {ridge['mode']}", ridge["mode"] not in ("off", "plumb")),
        Check(f"prompts with {least:,} new rows are filled, a slot holds {seen.room:,}", fits),
    ]
    if rows:
        checks.append(Check(f"rows of prompts: {rows['filled']:,} filled, {rows['exact']:,} exact", rows["filled"] > 0))
    if reason := ridge["reason"]:
        known = catalogue.reasons().get(reason, {"means": reason, "do": ""})
        return Report.of("problem", f"The maps are loaded, but no prompt is filled: {known['means']}.", checks, [known["do"]])
    if not fits:
        do = "Give slots more room (-c, or fewer of them with -np), or lower --ridge-min-prompt, or --ridge-tail."
        return Report.of("problem", "No prompt can be filled: the shortest that would be is longer than a slot.", checks, [do])
    if not seen.has_metrics:
        checks.append(Check("/metrics is switched off: what became of prompts cannot be seen", False))
        do = "Start the server with --metrics, or give its log to the doctor."
        return Report.of("cannot tell", "The maps are loaded; whether prompts are filled cannot be seen.", checks, [do])
    found = judge_prompts(seen.prompts)
    return Report.of(found.verdict, found.diagnosis, (*checks, *found.checks), found.do)
