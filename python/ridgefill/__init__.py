"""RidgeFill (arXiv 2611.09709) inside llama.cpp: calibration, sidecars, and bindings to the patched libllama.

Modules, in the order in which data passes them: `text` (documents), `lib` and `capture` (activations),
`statistics` and `solve` (maps), `sidecar` (the file), `cli` (the commands).
"""

__version__ = "0.1.0"
