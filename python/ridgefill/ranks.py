"""Several processes of one calibration, started by torchrun: each sums its share of the text, the first one solves.

torch is imported only here and only then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import numpy as np

from .errors import RidgefillError
from .statistics import Moments
from .sums import Sums

# processes wait for each other once a pass, and shares of the text may take hours
PATIENCE = timedelta(days=30)


def of_torchrun() -> tuple[int, int]:
    """Rank of this process and number of processes, from RANK and WORLD_SIZE; 0 and 1 without them."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Ranks:
    """The processes that torchrun started, connected by gloo until close(); use it in `with`.

    Raises RidgefillError without torch, or when they cannot be connected.
    """

    def __init__(self):
        try:
            import torch.distributed as dist
        except ImportError:
            raise RidgefillError("processes of torchrun are connected by torch, which is missing: pip install torch") from None
        self._dist = dist
        try:
            dist.init_process_group("gloo", timeout=PATIENCE)
        except (RuntimeError, ValueError) as e:
            raise RidgefillError(f"the processes of torchrun could not be connected: {e}") from e

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._dist.destroy_process_group()

    def reduce(self, sums: list[Sums]) -> None:
        """Add the sums of every process to those of the first, in float64. Those of the others are spent.

        Each process kept them about the means of its own first chunk: they are moved to the first process's before.
        """
        import torch

        for s in sums:
            for part, split, m in s.each():
                moved = self._about_first(m)
                n = np.array([moved.n])
                for array in (n, *_arrays(moved)):
                    self._dist.reduce(torch.from_numpy(array), dst=0)
                moved.n = int(n[0])
                s.moments[part][split] = moved

    def _about_first(self, m: Moments) -> Moments:
        """The sums about the origins of the first process."""
        import torch

        origin_x, origin_y = m.origin_x.copy(), {il: o.copy() for il, o in m.origin_y.items()}
        for array in (origin_x, *origin_y.values()):
            self._dist.broadcast(torch.from_numpy(array), src=0)
        if self._dist.get_rank() == 0:
            return m
        moved = Moments(m.split, origin_x, origin_y)
        moved.merge(m)
        return moved


def _arrays(m: Moments) -> Iterator[np.ndarray]:
    yield from (m.sum_x, m.xx)
    for by_layer in (m.sum_y, m.xy, m.yy):
        yield from by_layer.values()
