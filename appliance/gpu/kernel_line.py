"""One message of the kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One message. `replayed`: it was in the log before we began to listen. `uptime_s`: on the kernel's own clock, which nobody sets."""

    text: str
    time_s: float | None
    sequence: int
    replayed: bool
    uptime_s: float | None = None
