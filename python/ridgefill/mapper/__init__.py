"""Mappers: keys and values of one model's cache predicted from those of another that reads the same tokens (docs/MAPPER.md)."""
