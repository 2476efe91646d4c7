"""Attention of one new token a sequence over its paged keys and values."""
