"""Memory that a moment needed, given back: applianced is to be as small after a thousand incidents as after one.

A verdict and its report are megabytes for some milliseconds. glibc keeps what was freed between blocks that live on; it lets go
of those pages when it is asked (malloc_trim(3): since 2.8 in the middle of the heap and in all arenas).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def _trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None  # another C library, which has its own ways


_malloc_trim = _trim()


def give_back() -> None:
    """What is free, to the machine. Some milliseconds."""
    if _malloc_trim is not None:
        _malloc_trim(0)
