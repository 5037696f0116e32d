"""Subcommands of `ridgefill`, one module each; `cli` puts them together. Heavy imports stand inside the functions."""
