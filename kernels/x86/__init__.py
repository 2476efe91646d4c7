"""A whole pass of the decoder on an x86-64 CPU with 8-bit weights: C, compiled where the package is built (build.py)."""
