"""What the calibrator says while it runs: the time that is left, from what this run measured itself."""
from __future__ import annotations

import pytest

from calibrate_pico import CTX, config, corpus, library, model  # noqa: F401
from ridgefill import calibrate as cal
from ridgefill import progress


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves."""

    class Clock:
        now = 1000.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(cal.time, "monotonic", clock.monotonic)
    return clock


def test_the_time_is_estimated_once_from_the_first_chunk_of_the_run(model, corpus, tmp_path, clock, monkeypatch):
    c = config(model, corpus, tmp_path / "m.gguf", sums=str(tmp_path / "s.npz"), save_every=0)
    original = cal.Context.decode

    def slow(self, *args, **kw):
        clock.now += 2
        return original(self, *args, **kw)

    monkeypatch.setattr(cal.Context, "decode", slow)

    def stop(stage, done, total):
        if done >= 5 * CTX:
            raise RuntimeError("a fault")

    seen = []
    with cal.Calibration(c) as run, pytest.raises(RuntimeError):
        total = sum(getattr(run.plan(), name) for name in ("n_tokens", "n_heldout_tokens"))
        run.run(stop, seen.append)
    assert [(e.tokens_per_second, e.n_tokens_left, e.seconds) for e in seen] == [(CTX / 2, total - CTX, (total - CTX) * 2 / CTX)]
    done = []
    with cal.Calibration(c) as run:
        before = run.plan().n_tokens_done
        run.run(lambda stage, n, of: done.append((stage, n, of)), seen.append)
    assert 0 < before < total
    assert done[0] == ("capture", before, total) and done[-1][0] == "solve"
    assert len(seen) == 2 and seen[1].n_tokens_left == total - done[1][1]
    assert seen[1].tokens_per_second == (done[1][1] - before) / 2


def test_lines_of_a_log_count_from_where_the_run_began(clock, monkeypatch, capsys):
    monkeypatch.setattr(progress.time, "monotonic", clock.monotonic)
    report = progress._log_report()
    report("capture", 500, 1000)
    for done in range(510, 1001, 10):
        clock.now += 1
        report("capture", done, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "capture: 600 of 1,000 after 10 s, 10/s, about 40 s left"
    assert lines[-1] == "capture: 1,000 of 1,000 after 50 s, 10/s, about 0 s left"
    assert len(lines) == 5


@pytest.mark.parametrize("seconds, words", [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (5000, "83 min"), (9000, "2.5 h")])
def test_durations_read_like_estimates(seconds, words):
    assert progress.duration(seconds) == words
