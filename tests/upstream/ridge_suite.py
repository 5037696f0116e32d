"""pytest plugin for upstream's server tests: our model in their presets, listed tests not run, a record of every test.

scripts/upstream_tests.py loads it with `-p ridge_suite`; it runs inside a copy of upstream's suite, whose `utils` it imports.
"""
from __future__ import annotations

import collections
import json
import re
from pathlib import Path

import pytest

NOT_RUN = Path(__file__).with_name("not_run.json")

PRESETS = ("tinyllama2", "tinyllama_infill", "stories15m_moe")

# the server's line about each prompt
PROMPT = re.compile(r"ridge: mode = \w+, filled = (\d+), exact = \d+, .*reason = (\S+),")


def pytest_addoption(parser):
    group = parser.getgroup("ridge")
    group.addoption("--ridge-model", required=True, help="model of the presets " + ", ".join(PRESETS))
    group.addoption("--ridge-pass", required=True, help="name of this pass, as in not_run.json")
    group.addoption("--ridge-record", required=True, help="JSON file to write")


def _with_model(preset, model: str):
    def make():
        server = preset()
        server.model_hf_repo = server.model_hf_file = None
        server.model_file = model
        return server

    return staticmethod(make)


def pytest_configure(config):
    import utils

    model = config.getoption("--ridge-model")
    for name in PRESETS:
        setattr(utils.ServerPreset, name, _with_model(getattr(utils.ServerPreset, name), model))
    # it starts every preset once, so that its model is downloaded
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    # the draft model of the tests of speculative decoding, which are the only ones run that ask for a file
    utils.download_file = lambda *_: model
    config.pluginmanager.register(Record(config))


def reasons(entries: list[dict], name: str) -> dict[str, str]:
    """Test, or function or file of tests, to the reason why it is not run in the pass `name`."""
    return {test: e["reason"] for e in entries if name in e.get("passes", [name]) for test in e["tests"]}


class Record:
    """Skips what is listed and keeps what became of each test."""

    def __init__(self, config):
        self.name = config.getoption("--ridge-pass")
        self.path = Path(config.getoption("--ridge-record"))
        self.tests: dict[str, dict] = {}
        self.not_run = reasons(json.loads(NOT_RUN.read_text()), self.name)

    def pytest_collection_modifyitems(self, items):
        for item in items:
            function = item.nodeid.partition("[")[0]
            for listed in (item.nodeid, function, function.partition("::")[0]):
                if listed in self.not_run:
                    item.add_marker(pytest.mark.skip(reason=self.not_run[listed]))

    def pytest_runtest_logreport(self, report):
        test = self.tests.setdefault(report.nodeid, {"outcome": "passed", "seconds": 0.0})
        test["seconds"] = round(test["seconds"] + report.duration, 2)
        if report.failed:
            test.update(outcome="failed", message=str(report.longrepr)[-2000:])
        elif report.skipped and test["outcome"] == "passed":
            test.update(outcome="not run", reason=report.longrepr[2].removeprefix("Skipped: "))
        if report.when == "teardown":
            prompts = PROMPT.findall(report.capstdout)
            if filled := [int(n) for n, _ in prompts if int(n)]:
                test["filled"] = {"prompts": len(filled), "rows": sum(filled)}
            if exact := collections.Counter(reason for n, reason in prompts if not int(n)):
                test["exact"] = dict(exact)

    def pytest_sessionfinish(self):
        self.path.write_text(json.dumps(self.tests))
