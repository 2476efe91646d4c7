"""No orphans: a child that ends when its parent does, also by kill -9."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None, use_errno=True).prctl


def ends_with_us(number: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """For `preexec_fn` of a Popen in a process with one thread: the kernel sends the child this signal when we are gone."""
    parent = os.getpid()

    def bind() -> None:
        _prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    return bind
