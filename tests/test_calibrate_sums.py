"""Sums on disk: stopped runs go on to the same bytes, sums of something else are refused, and solving again reads no text."""
from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import pico
from calibrate_pico import SHAPE, SINK, arguments, config, corpus, hashes, inputs_by_hand, keys_of, library, model, words  # noqa: F401
from ridgefill import calibrate as cal
from ridgefill import cli, lib, passes, sums_file
from ridgefill.errors import OutputExists, StatisticsError
from ridgefill.stopping import Stopped
from ridgefill.sums_file import Reader, Store, SumsError

ROOT = Path(__file__).resolve().parents[1]
ALL = dict(splits=[1, 2], kinds=["kv_prev", "input", "kv"])
N_CHUNKS = 18

runner = CliRunner()


@pytest.fixture(scope="module")
def ordinary(model, corpus, tmp_path_factory) -> dict[str, str]:
    """Sidecars of one run without sums, of all splits and kinds: sha256 by name."""
    folder = tmp_path_factory.mktemp("ordinary")
    cal.calibrate(config(model, corpus, folder / "m.gguf", **ALL))
    return hashes(folder)


@pytest.fixture(scope="module")
def complete(model, corpus, tmp_path_factory) -> Path:
    """A finished file of sums of all splits and kinds; tests copy it."""
    folder = tmp_path_factory.mktemp("complete")
    cal.calibrate(config(model, corpus, folder / "m.gguf", sums=str(folder / "s.npz"), **ALL))
    return folder / "s.npz"


#
# stopped and gone on with
#


def test_a_run_through_sums_writes_the_same_bytes_as_an_ordinary_one(model, corpus, ordinary, tmp_path):
    seen = []
    c = config(model, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"), save_every=0, **ALL)
    cal.calibrate(c, lambda stage, done, total: seen.append(Reader(c.sums).header.done if Path(c.sums).exists() else None))
    assert hashes(tmp_path) == ordinary
    assert None in seen and {"fit": 2, "heldout": 0} in seen and seen[-1]["heldout"] == 6  # saved chunk by chunk
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*ordinary, "s.npz"])  # neither lock nor partial file is left


def stopping_at(at: int):
    """A report that stops the run when `at` chunks are done, as a fault in the next chunk does."""
    calls = iter(range(10**6))

    def report(stage: str, done: int, total: int) -> None:
        if stage == "capture" and next(calls) == at:  # the first call tells what was done before
            raise RuntimeError("a fault")

    return report


@pytest.mark.parametrize("stops", [[1], [12], [13, 1], [5, 5, 5], [17], [18]])
def test_resume_after_faults_gives_the_same_file(model, corpus, ordinary, tmp_path, stops):
    """In the fitted part, at its end, in the held-out part, several times, before and after the last chunk."""
    c = config(model, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"), save_every=0, **ALL)
    for at in stops:
        with pytest.raises(RuntimeError, match="a fault"):
            cal.calibrate(c, stopping_at(at))
    assert hashes(tmp_path) == {}
    with cal.Calibration(c) as run:
        # the chunk in which the fault was is not in the file: it was reported before it was saved
        assert sum(run.header.done.values()) == sum(stops) - len(stops)
        run.run()
    assert hashes(tmp_path) == ordinary


# a run that kills itself, by SIGKILL, at the n-th call of a function
KILLED = """
    import os, signal, sys
    from ridgefill import cli, lib, sidecar, sums_file

    place, nth, sig = sys.argv[1], int(sys.argv[2]), getattr(signal, sys.argv[3])
    owner, name = {
        "decode": (lib.Context, "decode"),
        "write": (sums_file.np.lib.format, "write_array"),
        "replace": (sums_file.os, "replace"),
        "sidecar": (sidecar, "write"),
        "seal": (sidecar, "_seal"),
    }[place]
    original, calls = getattr(owner, name), iter(range(1, 10**9))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background begins with it ignored

    def dying(*args, **kw):
        n = next(calls)
        if n == nth:
            os.kill(os.getpid(), sig)
        out = original(*args, **kw)
        if n == -nth:
            os.kill(os.getpid(), sig)
        return out

    setattr(owner, name, dying)
    sys.argv = ["ridgefill-calibrate", *sys.argv[4:]]
    cli.calibrate_main()
"""


def run_killed(place: str, nth: int, sig: str, args: list[str], patched_lib) -> subprocess.CompletedProcess:
    import ridgefill

    # the package under test, wherever this process found it
    env = {**os.environ, "RIDGE_LIB_DIR": str(patched_lib), "PYTHONPATH": str(Path(ridgefill.__file__).parents[1])}
    command = [sys.executable, "-c", textwrap.dedent(KILLED), place, str(nth), sig, *args]
    return subprocess.run(command, capture_output=True, text=True, env=env)


def all_arguments(model, corpus, folder: Path) -> list[str]:
    more = ["--split", 1, "--kind", "kv_prev", "--kind", "input", "--kind", "kv"]
    sums = ["--sums", folder / "s.npz", "--save-every", 0]
    return arguments(model, corpus, *more, *sums, "--out", folder / "m.gguf")


@pytest.mark.parametrize(
    "place, nth",
    [
        ("decode", 1),
        ("decode", 4),
        ("decode", 13),  # the first held-out chunk
        ("write", 3),  # while the first sums are written
        ("write", 60),
        ("replace", 2),  # before the second sums take the place of the first
        ("replace", -2),  # and right after
        ("replace", 18),  # before the last ones do
        ("sidecar", 3),  # between two sidecars
        ("seal", 2),  # while the second is written
    ],
)
def test_field_report_33_resume_after_a_kill_gives_the_same_file(model, corpus, ordinary, patched_lib, tmp_path, place, nth):
    args = all_arguments(model, corpus, tmp_path)
    killed = run_killed(place, nth, "SIGKILL", args, patched_lib)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert hashes(tmp_path, "m*.gguf") != ordinary
    again = runner.invoke(cli.calibrate_app, args)
    assert again.exit_code == 0, again.output
    assert hashes(tmp_path, "m*.gguf") == ordinary


@pytest.mark.parametrize("sig", ["SIGINT", "SIGTERM"])
def test_ctrl_c_saves_what_was_done_and_says_how_to_go_on(model, corpus, ordinary, patched_lib, tmp_path, sig):
    args = all_arguments(model, corpus, tmp_path)
    args[args.index("--save-every") + 1] = "3600"
    stopped = run_killed("decode", 5, sig, args, patched_lib)
    assert stopped.returncode == 130, stopped.stderr
    assert "stopping after this chunk" in stopped.stderr
    assert f"the same command goes on from {tmp_path / 's.npz'}" in stopped.stderr
    assert Reader(tmp_path / "s.npz").header.done == {"fit": 5, "heldout": 0}
    again = runner.invoke(cli.calibrate_app, args)
    assert again.exit_code == 0 and "tokens whose sums were kept" in again.stderr
    assert hashes(tmp_path, "m*.gguf") == ordinary


def test_ctrl_c_without_sums_stops_at_once(model, corpus, patched_lib, tmp_path):
    args = arguments(model, corpus, "--out", tmp_path / "m.gguf")
    stopped = run_killed("decode", 5, "SIGINT", args, patched_lib)
    assert (stopped.returncode, stopped.stderr.splitlines()[-1]) == (130, "stopped; --sums FILE keeps what was done")
    assert list(tmp_path.iterdir()) == []


def test_the_signals_act_as_before_when_a_run_is_over(model, corpus, tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    during = []
    c = config(model, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"))
    cal.calibrate(c, lambda stage, done, total: during.append((stage, signal.getsignal(signal.SIGINT))))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert before[0] not in [h for stage, h in during[1:] if stage == "capture"]


def test_a_run_in_another_thread_leaves_the_signals_alone(model, corpus, tmp_path):
    c, failed = config(model, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz")), []

    def work():
        try:
            cal.calibrate(c)
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed and (tmp_path / "m.gguf").exists()


def test_a_stopped_run_is_an_error_of_its_own(model, corpus, tmp_path):
    c = config(model, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"))
    with pytest.raises(Stopped, match=r"stopped after 128 of 2,1\d\d tokens"):
        cal.calibrate(c, lambda stage, done, total: os.kill(os.getpid(), signal.SIGINT) if done == 128 else None)


def test_sums_are_saved_by_time(model, corpus, tmp_path, monkeypatch):
    """Not before the interval is over, and for no more than a twentieth of the time."""
    now = [0.0]
    monkeypatch.setattr(cal.time, "monotonic", lambda: now[0])

    class Slow:
        saved = []

        def write(self, header, sums):
            self.saved.append(now[0])
            now[0] += 10

    saver = passes.Saver(Slow(), None, [], every=60)
    for _ in range(600):
        now[0] += 1
        if saver.due():
            saver.save()
    assert Slow.saved == [60, 270, 480]  # 60, then 20 times the 10 seconds that saving takes


#
# sums of something else
#


def refusal(error=SumsError, **kw) -> str:
    with pytest.raises(error) as e:
        cal.Calibration(config(**kw)).__exit__()
    return str(e.value)


@pytest.fixture
def there(model, corpus, complete, tmp_path) -> dict:
    """Arguments of config() for a run whose sums are there already."""
    shutil.copy(complete, tmp_path / "s.npz")
    return dict(model=model, corpus=corpus, out=tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"), **ALL)


@pytest.mark.parametrize(
    "name, value, named",
    [
        ("splits", [2], "splits: expected [2], found [1, 2]"),
        ("kinds", ["input"], "sums for kinds: expected ['input'], found ['input', 'kv_prev']"),
        ("ctx", 64, "ctx: expected 64, found 128"),
        ("sink", 5, "sink: expected 5, found 4"),
        ("row_stride", 2, "row stride: expected 2, found 1"),
        ("seed", 1, "seed: expected 1, found 0"),
        ("n_tokens", 900, "n_tokens: expected 900, found 0"),
        ("chat_share", 0.5, "chat share: expected 0.5, found 0.0"),
        ("heldout_documents", 1, "text held out: expected 1 documents with sha256"),
        ("shard", "1/2", "shards: expected 1/2, found all"),
    ],
)
def test_sums_with_other_settings_are_refused_naming_them(there, name, value, named):
    there = {**there, name: value}
    message = refusal(**({**there, "out": ""} if name == "shard" else there))
    assert message.startswith(f"{there['sums']} holds sums of something else: ") and named in message
    assert message.endswith("; name another file, or remove this one to begin anew")
    assert "tokens: expected" not in message.replace("n_tokens: expected", "")  # what follows from the others is not named


def test_sums_of_other_text_are_refused(there, corpus, tmp_path):
    shutil.copytree(corpus, tmp_path / "text")
    (tmp_path / "text" / "1.txt").write_text(words(131, 1))
    message = refusal(**{**there, "corpus": tmp_path / "text"})
    assert "text to fit: expected 4 documents with sha256" in message and "text held out" not in message


def test_sums_of_another_model_are_refused(there, pico_model):
    other = pico_model("llama", seed=1, **SHAPE)
    message = refusal(**{**there, "model": str(other)})
    assert "model file: expected" in message and "tokenizer" not in message
    deeper = pico_model("llama", **{**SHAPE, "n_layer": 6})
    assert "layers: expected 6, found 5; model file: expected" in refusal(**{**there, "model": str(deeper)})


def test_field_report_36_sums_of_another_tokenizer_are_refused(there, tmp_path, monkeypatch):
    """Two tokens change their places: same weights, same text, other token ids."""
    texts, types, merges = pico.Tokenizer().vocabulary()
    a, b = texts.index("t"), texts.index("h")
    texts[a], texts[b] = texts[b], texts[a]
    monkeypatch.setattr(pico.Tokenizer, "vocabulary", lambda _: (texts, types, merges))
    other = pico.build(tmp_path / "other.gguf", "llama", **SHAPE)
    with lib.Model(other) as m, lib.Model(there["model"]) as n:
        expected, found = (x.fingerprint(2)["tokenizer_sha256"] for x in (m, n))
    assert f"tokenizer: expected {expected}, found {found}" in refusal(**{**there, "model": other})


def test_what_changes_sums_by_rounding_only_is_not_refused(there):
    cal.Calibration(config(**{**there, "threads": 2, "map_type": "q8_0", "tail": 256})).__exit__()


@pytest.mark.parametrize("cut", [0, 10, 0.5, -30])
def test_damaged_sums_are_refused(there, cut):
    path = Path(there["sums"])
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * cut) if isinstance(cut, float) else cut])
    assert "s.npz is not a file of sums, or a damaged one: " in refusal(**there)


def test_a_flipped_bit_is_refused(there):
    path = Path(there["sums"])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    with pytest.raises(SumsError, match="damaged one: Bad CRC-32"):
        cal.calibrate(config(**there))
    assert not list(Path(there["out"]).parent.glob("*.gguf"))


def test_files_that_are_no_sums_are_refused(there, tmp_path):
    np.savez(tmp_path / "s.npz", xx=np.zeros(3))
    assert "There is no item named 'header.json'" in refusal(**there)
    with zipfile.ZipFile(tmp_path / "s.npz", "w") as z:
        z.writestr("header.json", json.dumps({"format": "ridgefill sums", "version": 99}))
    assert "not of the format 'ridgefill sums' or 'ridgefill mapper sums', version 1" in refusal(**there)
    with pytest.raises(SumsError, match="no such file of sums: /no/sums"):
        Reader("/no/sums")


def test_two_runs_cannot_write_the_same_sums(there):
    with Store(there["sums"]):
        assert "s.npz is being written by another run; each run needs a file of its own" in refusal(**there)
    cal.Calibration(config(**there)).__exit__()


def test_sums_that_cannot_be_written_are_an_error_and_the_old_ones_stay(model, corpus, tmp_path, monkeypatch):
    c = config(model, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"), save_every=0)

    def full(fd):
        raise OSError(28, "No space left on device")

    def report(stage, done, total):
        if Path(c.sums).exists():
            monkeypatch.setattr(sums_file.os, "fsync", full)

    with pytest.raises(SumsError, match="sums could not be written to .*s.npz: No space left on device"):
        cal.calibrate(c, report)
    assert Reader(c.sums).header.done == {"fit": 1, "heldout": 0}
    assert [p.name for p in tmp_path.iterdir()] == ["s.npz"]
    monkeypatch.setattr(sums_file.os, "fsync", os.fsync)
    assert "no such folder: /no/folder" in refusal(model=model, corpus=corpus, out=tmp_path / "m.gguf", sums="/no/folder/s.npz")


def test_sums_that_the_disk_cannot_hold_are_refused_before_the_work(model, corpus, tmp_path, monkeypatch):
    with cal.Calibration(config(model, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"), **ALL)) as run:
        need = run.plan().sums_bytes
        run.run()
    assert need < (tmp_path / "s.npz").stat().st_size < 1.3 * need + 2**17
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**30, 2**30, need - 1))
    message = refusal(model=model, corpus=corpus, out=tmp_path / "n.gguf", sums=str(tmp_path / "t.npz"), **ALL)
    assert message.endswith(f"t.npz: sums take {need:,} bytes, {need - 1:,} are free there")


#
# existing sidecars
#


def test_a_finished_run_repeated_changes_nothing(there, ordinary, tmp_path):
    for _ in range(2):
        cal.calibrate(config(**there))
        assert hashes(tmp_path) == ordinary
    changed = sorted(ordinary)[-1]
    (tmp_path / changed).write_bytes(b"mine")
    with pytest.raises(OutputExists, match=f"{changed} exists already"):
        cal.calibrate(config(**there))
    assert (tmp_path / changed).read_bytes() == b"mine"


def test_an_existing_sidecar_is_refused_before_the_work_when_there_are_no_sums(model, corpus, tmp_path):
    (tmp_path / "m.gguf").write_text("mine")
    message = refusal(OutputExists, model=model, corpus=corpus, out=tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"))
    assert "m.gguf exists already" in message and not (tmp_path / "s.npz").exists()


#
# solving again
#


def test_solve_makes_the_sidecars_of_the_run_without_text_and_model(complete, ordinary, tmp_path):
    args = ["solve", str(complete), "--out", str(tmp_path / "m.gguf"), "--map-type", "f32", "--threads", "1"]
    solved = runner.invoke(cli.app, args)
    assert solved.exit_code == 0, solved.output
    assert hashes(tmp_path) == ordinary
    assert runner.invoke(cli.app, args).exit_code == 6
    assert runner.invoke(cli.app, [*args, "--force"]).exit_code == 0


def test_solve_takes_some_splits_and_kinds_and_other_penalties(model, corpus, complete, tmp_path):
    args = ["solve", str(complete), "--out", str(tmp_path / "again.gguf"), "--split", "2", "--kind", "kv", "--map-type", "f16"]
    solved = runner.invoke(cli.app, [*args, "--lambda", "0.5", "--lambda", "0.25", "--threads", "1", "--tail", "64", "--json"])
    assert solved.exit_code == 0, solved.output
    (result,) = json.loads(solved.stdout)
    assert (result["kind"], result["split"]) == ("kv", 2) and set(result["lambda_k"]) <= {0.5, 0.25}
    # the same from the text
    more = dict(kinds=["kv", "kv_prev"], map_type="f16", tail=64, lambdas=(0.5, 0.25))
    cal.calibrate(config(model, corpus, tmp_path / "run.gguf", **more))
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "run.kv.gguf").read_bytes()
    assert keys_of(tmp_path / "again.gguf")["ridge.tail"] == 64


def test_solve_mixes_maps_with_and_without_the_row_before(model, corpus, complete, tmp_path):
    args = ["solve", str(complete), "--out", str(tmp_path / "a.gguf"), "--split", "2", "--kind", "kv_prev", "--map-type", "f32"]
    solved = runner.invoke(cli.app, [*args, "--prev-share", "0.25", "--threads", "1"])
    assert solved.exit_code == 0, solved.output
    more = dict(kinds=["kv_prev", "input"], splits=[1, 2], prev_share=0.25)
    cal.calibrate(config(model, corpus, tmp_path / "b.gguf", **more))
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.s2.kv_prev.gguf").read_bytes()


def test_new_penalties_with_the_same_command_read_nothing_again(there, tmp_path, monkeypatch):
    monkeypatch.setattr(cal, "Context", lambda *a, **kw: pytest.fail("the text was run again"))
    results = cal.calibrate(config(**{**there, "lambdas": (0.03,)}))
    assert {x for r in results for by_layer in r.lambdas.values() for x in by_layer} == {0.03}


def test_solve_refuses_what_the_sums_lack(model, corpus, complete, tmp_path):
    def error(*args, file=complete) -> tuple[int, str]:
        done = runner.invoke(cli.app, ["solve", str(file), "--out", str(tmp_path / "m.gguf"), "--map-type", "f32", *args])
        return done.exit_code, done.stderr

    assert error("--split", "3") == (8, "error: splits: expected some of 1, 2, found 3\n")
    kv = config(model, corpus, tmp_path / "kv.gguf", kinds=["kv"], sums=str(tmp_path / "kv.npz"))
    cal.calibrate(kv)
    assert error("--kind", "kv_prev", file=kv.sums) == (8, "error: kinds: expected some of kv, found kv_prev\n")
    assert error("--map-type", "q9")[0] == 1
    assert error("--lambda", "-1") == (1, "error: lambdas: expected finite numbers that are not negative, found [-1.0]\n")
    part = config(model, corpus, tmp_path / "p.gguf", sums=str(tmp_path / "part.npz"), save_every=0)
    with pytest.raises(RuntimeError):
        cal.calibrate(part, stopping_at(4))
    assert error(file=part.sums) == (8, "error: the sums are unfinished: 3 of 18 chunks; run their command again\n")
    small = config(model, corpus, tmp_path / "q.gguf", n_tokens=100, sums=str(tmp_path / "small.npz"))
    with pytest.raises(StatisticsError):
        cal.calibrate(small)
    code, message = error(file=small.sums)
    assert code == 5 and "layer 2: expected at least 128 rows to fit" in message


def test_numpy_reads_the_sums(model, corpus, tmp_path):
    """Against rows that are captured here."""
    c = config(model, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"))
    with cal.Calibration(c) as run:
        run.run()
        documents = run.prepared.selection.heldout
    x = np.concatenate([inputs[2][SINK:] for inputs in inputs_by_hand(model, documents, [2])])
    with np.load(c.sums) as z:
        assert z["input/heldout/2/n"] == len(x)
        about = x - z["input/heldout/2/origin_x"]
        assert np.allclose(z["input/heldout/2/xx"], about.T @ about, rtol=1e-9, atol=1e-9 * np.abs(about.T @ about).max())
        assert np.allclose(z["input/heldout/2/sum_x"], about.sum(0), atol=1e-6)
