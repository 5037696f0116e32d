"""RidgeFill (arXiv 2611.09709) inside llama.cpp: calibration, sidecars, and bindings to the patched libllama.

Modules, in the order in which data passes them: `text` (documents), `lib` with `capture`, or `hf` (activations),
`statistics` and `solve` (maps), `sidecar` (the file), `cli` (the commands). For applications there is `Llama`
(docs/BINDINGS.md): `from ridgefill import Llama` loads the library, `import ridgefill` alone does not.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .llama import Llama as Llama

__version__ = "0.1.0"

__all__ = ["Llama", "__version__"]


def __getattr__(name: str):
    if name != "Llama":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .llama import Llama

    return Llama
