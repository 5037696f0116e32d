"""Where the rows of a context's cache come from; the Python side of llama.cpp/server/server-ridge-cells.h.

    pure     computed exactly over pure rows: before the first filled row
    filled   its upper layers were predicted
    tainted  computed exactly, but after a filled row

An exact request may reuse pure rows only. A filled one may reuse what was filled under the same provenance.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

NONE = sys.maxsize  # position of a filled row that does not exist


def _no_rows() -> np.ndarray:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Cells:
    """Filled rows of one sequence. Values never change; the methods give new ones.

    filled    positions of the filled rows, ascending, int64 [n_filled]
    made_by   provenance of all of them: content hash and kind of the maps, mode, split; "" when there is none
    portable  whether a copy outside of the context is still what it was: mode nofill marks cells inside of it
    """

    filled: np.ndarray = field(default_factory=_no_rows)
    made_by: str = ""
    portable: bool = True

    def __bool__(self) -> bool:
        return len(self.filled) > 0

    def first_filled(self, position: int = 0) -> int:
        """Position of the first filled row that is not before `position`, NONE if there is none."""
        i = int(np.searchsorted(self.filled, position))
        return int(self.filled[i]) if i < len(self.filled) else NONE

    def count(self, end: int) -> int:
        """Number of filled rows before position `end`."""
        return int(np.searchsorted(self.filled, end))

    def keep_first(self, n: int) -> Cells:
        """What is left when only rows 0..n-1 are."""
        kept = self.filled[: self.count(n)]
        return Cells(kept, self.made_by, self.portable) if len(kept) else Cells()

    def add(self, made_by: str, portable: bool, positions: Iterable[int]) -> Cells:
        """With further filled rows, all behind those that are here and of the same provenance."""
        new = np.fromiter(positions, np.int64)
        if not len(new):
            return self
        assert not self or (self.made_by == made_by and self.filled[-1] < new[0])
        return Cells(np.concatenate([self.filled, new]), made_by, portable)
