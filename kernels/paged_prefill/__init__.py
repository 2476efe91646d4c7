"""Causal attention of a chunk of a prompt over its paged keys and values."""
