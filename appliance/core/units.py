"""Bytes inside, GiB only when printing (house style rule 7)."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_FACTORS = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": 1024 * GIB, "tib": 1024 * GIB, "tb": 1000**4,
}  # fmt: skip
_DIGITS_MAX = 30
"""More is a typing error, and far enough is infinite as a float."""
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")
_DURATION = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|min|m|h|d)?\s*")
_SECONDS = {None: 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str) -> int:
    """Bytes of "24GiB", "17.67 GiB", "512M" or "1000".

    Raises:
        ValueError: the text is no size, or its unit is none of B, K, M, G, T (with "iB" for 1024s, "B" for 1000s).
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _FACTORS or len(match[1]) > _DIGITS_MAX:
        raise ValueError(f"{text!r} is no size: write a number and a unit, such as 24GiB or 512MiB")
    factor = _FACTORS[match[2].lower()]
    return int(match[1]) * factor if match[1].isdigit() else round(float(match[1]) * factor)


def parse_duration_s(text: str) -> float:
    """Seconds of "30s", "10min", "24h", "250ms" or "1.5".

    Raises:
        ValueError: the text is no duration.
    """
    match = _DURATION.fullmatch(text)
    if match is None or len(match[1]) > _DIGITS_MAX:
        raise ValueError(f"{text!r} is no duration: write a number and a unit, such as 30s, 10min or 24h")
    return float(match[1]) * _SECONDS[match[2]]


def format_bytes(count_bytes: int) -> str:
    """ "23.56 GiB", "48.00 MiB", "812 B": two digits, the largest unit that leaves a number of at least one."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(count_bytes) >= size:
            return f"{count_bytes / size:.2f} {unit}"
    return f"{count_bytes} B"


def format_duration(duration_s: float) -> str:
    """ "0.29 s", "42 s", "3 min 20 s", "2 h 5 min", "3 d 4 h": two units at most."""
    if duration_s < 10:
        return f"{duration_s:.2f} s"
    whole_s = round(duration_s)
    if whole_s < 60:
        return f"{whole_s} s"
    for (big, big_s), (small, small_s) in (
        (("d", 86400), ("h", 3600)),
        (("h", 3600), ("min", 60)),
        (("min", 60), ("s", 1)),
    ):
        if whole_s >= big_s:
            return f"{whole_s // big_s} {big} {whole_s % big_s // small_s} {small}"
    raise AssertionError(f"unreachable for {duration_s} s")
