"""The sums of one calibration: fitted and held-out moments of every split over the targets of one family of kinds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .kinds import Layout, Targets
from .statistics import Moments, about

PARTS = ("fit", "heldout")  # of the text, in the order in which they are run
MAX_ROWS = 2048  # of one block


class Sums:
    """Sums of one family, filled chunk by chunk with add().

    `layers` are those whose targets are summed, each for the splits below it; every split has one above. `moments` has a
    Moments by part of the text and split; it is empty before the first chunk, whose means are the origins.
    """

    def __init__(self, layout: Layout, splits: list[int], layers: Sequence[int]):
        self.layout, self.splits, self.layers = layout, splits, layers
        self.moments: dict[str, dict[int, Moments]] = {}

    def start(self, origin_x: dict[int, np.ndarray], origin_y: dict[int, np.ndarray]) -> None:
        """Begin with nothing, about origins by split [d_in] and by layer [d_out]."""
        for part in PARTS:
            self.moments[part] = {
                s: Moments(s, origin_x[s], {il: o for il, o in origin_y.items() if il > s}) for s in self.splits
            }

    def add(self, targets: Targets, part: str, inputs: dict[int, np.ndarray], chosen: slice) -> None:
        """Add the `chosen` rows of a chunk to "fit" or "heldout": inputs [n, d] of the splits and layers, from position 0.

        Sink rows must not be among the chosen. Row 0 and its neighbours carry massive activations, a hundred times the
        others': in the fit they would drown every other row, and at run time sink rows are exact anyway.

        Raises StatisticsError naming the layer of a value that is not finite.
        """
        x = {s: targets.features(inputs[s])[chosen] for s in self.splits}
        if not self.moments:
            with np.errstate(invalid="ignore"):  # about() refuses what is not finite by its place
                origin_y = {il: targets.targets(il, inputs[il][chosen]).mean(0, dtype=np.float64) for il in self.layers}
                self.start({s: x[s].mean(0, dtype=np.float64) for s in self.splits}, origin_y)
        moments = self.moments[part]
        for at in range(0, len(x[self.splits[0]]), MAX_ROWS):
            rows = slice(at, at + MAX_ROWS)
            xs = {s: about(x[s][rows], m.origin_x, s) for s, m in moments.items()}
            for m in moments.values():
                m.add_features(xs[m.split])
            for il in self.layers:
                above = [m for m in moments.values() if il > m.split]
                y = about(targets.targets(il, inputs[il][chosen][rows]), above[0].origin_y[il], il)
                for m in above:
                    m.add_targets(il, xs[m.split], y)

    def each(self) -> Iterator[tuple[str, int, Moments]]:
        """Part, split and moments, in a fixed order."""
        for part, by_split in self.moments.items():
            for split, moments in by_split.items():
                yield part, split, moments
