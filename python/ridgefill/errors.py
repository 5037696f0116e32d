"""Errors with a message for people. Anything else that is raised is a fault of ours.

Each class carries the exit code of the commands; `docs/CALIBRATE.md` lists them.
"""


class RidgefillError(Exception):
    """Base class: the message says what was expected and what was found."""

    exit_code = 1


class RidgeError(RidgefillError):
    """The native library refused or failed.

    `status` is the `llama_ridge_status` it returned (None when there is no such number: a missing library, a file that
    could not be opened); the message is that of `llama_ridge_last_error()` where the library left one.
    """

    exit_code = 3

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class TextError(RidgefillError):
    """The calibration text cannot be used: a missing path, nothing readable, too few documents."""

    exit_code = 4


class StatisticsError(RidgefillError):
    """The activations cannot be fitted: not finite, too few rows, an empty layer. Names the layer."""

    exit_code = 5


class OutputExists(RidgefillError):
    """A file to be written exists already and may not be replaced."""

    exit_code = 6


class SidecarError(RidgefillError):
    """A file is not a sidecar of ridge maps, or a damaged one."""

    exit_code = 7
