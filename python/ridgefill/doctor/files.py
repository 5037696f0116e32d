"""The doctor looks at a file of maps, alone or beside the model that it is to serve."""

from __future__ import annotations

import os

from .. import sidecar, verify
from ..errors import RidgeError, SidecarError
from ..lib import Model, captured_log
from . import catalogue
from .report import Check, Report, advice, from_message

_ADD_SELFTEST = "`ridgefill score SIDECAR MODEL --text ...`, with the model that the maps were made for, adds a self-test to the file."


def diagnose(file: str | os.PathLike, model: str | os.PathLike | None = None, n_threads: int = 2) -> Report:
    """What a file of maps is, and whether it serves a model. Without a model nothing is said of the latter."""
    try:
        found = sidecar.inspect(file)
    except SidecarError as e:
        return from_message(str(e))
    except RidgeError as e:  # the library is missing
        return Report.of("cannot tell", "The files could not be looked at.", [Check(str(e), False)])
    keys = found["keys"]
    checks = [Check(f"{file} is intact: {keys['general.name']}, sha256 {found['sha256'][:12]}", True)]
    if not model:
        made_for = f"{keys['ridge.model.name']!r}, architecture {keys['general.architecture']}"
        do = f"Name the model too: `ridgefill doctor SIDECAR MODEL`. The maps were made for {made_for}."
        why = "The maps are intact; whether they serve your model cannot be told without it."
        return Report.of("cannot tell", why, checks, [do])
    try:
        m = Model(model)
    except RidgeError as e:
        why, do = "The maps are intact, but the model could not be loaded.", "Check that the second file is a GGUF model."
        return Report.of("cannot tell", why, [*checks, Check(str(e), False)], [do])
    with m:
        return _beside(m, file, keys, checks, n_threads)


def _beside(model: Model, file: str | os.PathLike, keys: dict, checks: list[Check], n_threads: int) -> Report:
    if reason := model.unsupported():
        return from_message(reason, checks)
    for f in verify.fields(keys, model.fingerprint(keys["ridge.split"])):
        found = verify.short(f.found)
        text = f"{f.name}: {found}" if f.matches else f"{f.name}: expected {verify.short(f.expected)}, found {found}"
        checks.append(Check(text, f.matches))
    with captured_log() as log:
        refusal = verify.refusal(model, file)
    if refusal:
        return from_message(refusal, checks)
    warnings = [chain for _, line in log if (chain := catalogue.explain(line)) and chain[-1].entry.verdict == "warning"]
    do = [text for chain in warnings for text in advice(chain)]

    test = verify.selftest(model, file, keys, n_threads)
    if test is None:
        checks.append(Check("the file holds no self-test", False))
        if warnings:
            why = "The model is not quite the one that the maps were made for; how well they serve it cannot be told."
            return Report.of("cannot tell", why, checks, [*do, _ADD_SELFTEST])
        return Report.of("healthy", "The maps are those of this model.", checks)
    checks.append(Check(test.sentence() if test.passed else test.failure(), test.passed))
    if not test.passed:
        why = "The maps are accepted, but do not do with this model what they did when they were made."
        anew = "Make maps of this very model file, with this version of the library: ridgefill-calibrate, or `ridgefill tune`."
        return Report.of("problem", why, checks, [*do, anew])
    return Report.of("healthy", "The maps do with this model what they did when they were made.", checks, do)
