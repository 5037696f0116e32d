"""The oracle: a transformer forward pass with RidgeFill, in NumPy float64, from the tensors of a GGUF.

It is written from the papers' definitions and the models' published graphs and shares no code with what it checks:
neither libllama nor the rest of this package is imported here. It is slow and plain on purpose.
"""

from .fill import EXACT, FILL, IDENTITY, INPUT, INPUT_LR, KINDS, KV, KV_PREV, NOFILL, Fill, Maps, load_maps
from .forward import Result, forward
from .transfer import Mapper, Rope, load_mapper, rope_of, transfer
from .weights import ReferenceError, Weights

__all__ = [
    "EXACT", "FILL", "IDENTITY", "INPUT", "INPUT_LR", "KINDS", "KV", "KV_PREV", "NOFILL",
    "Fill", "Mapper", "Maps", "ReferenceError", "Result", "Rope", "Weights",
    "forward", "load_mapper", "load_maps", "rope_of", "transfer",
]  # fmt: skip
