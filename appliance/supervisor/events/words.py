"""Words that events and effects share."""

from __future__ import annotations

import enum


class Timer(enum.Enum):
    """What may run out. Setting a timer again replaces it."""

    START = "start"
    """The engine has not proved itself by its start deadline; the longest prompt has as long again."""
    SETTLE = "settle"
    """A fatal line was read; the lines that follow it (a traceback) had this long to arrive."""
    DRAIN = "drain"
    """Running answers had their time."""
    STOP = "stop"
    """The engine ignored SIGTERM, ours or somebody else's."""
    BACKOFF = "backoff"
    STABLE = "stable"
    """It served long enough to forget earlier failures."""
    CLIMB = "climb"
    """It served long enough on a safer rung to try the one above."""


class KillHow(enum.Enum):
    """How an engine is ended."""

    TERM = "term"
    """Politely, the leader only: it may finish and report. A Timer.STOP runs."""
    ABORT = "abort"
    """It hangs: SIGABRT for its stacks, then the whole group as NOW."""
    NOW = "now"
    """The whole group, SIGKILL, verified empty."""
