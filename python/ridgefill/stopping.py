"""Stopping a long job between two steps, where its state can be saved."""

from __future__ import annotations

import signal
import sys
import threading

from .errors import RidgefillError


class Stopped(RidgefillError):
    """The user stopped the job; the message says what was kept."""

    exit_code = 130


class StopRequest:
    """In `with`: the first Ctrl-C (SIGINT) or SIGTERM only sets `asked`; the next one acts as it did before.

    `answer` is what the user is told then.

    Python takes signals in its main thread; in any other this changes nothing.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, answer: str = "stopping after this chunk, to save the sums"):
        self.asked, self.answer = False, answer
        self._before: dict[int, object] = {}

    def _ask(self, *_) -> None:
        self.asked = True
        self._restore()
        print(f"{self.answer}; once more stops at once", file=sys.stderr, flush=True)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in self.SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        self._restore()
