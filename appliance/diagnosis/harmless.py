"""When nothing crashed: which `ok_*` verdict the evidence carries, if any."""

from __future__ import annotations

from dataclasses import replace

from appliance.core.causes import Cause
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.case import HEALTHY, Case
from appliance.diagnosis.events import Event
from appliance.diagnosis.pattern import Kind

_PRECEDENCE = (
    Cause.OK_SHUTDOWN,
    Cause.OK_DEGRADED,
    Cause.OK_CLIENT_DISCONNECT,
    Cause.OK_CLIENT_ERROR,
    Cause.OK_BENIGN_WARNING,
    Cause.OK_NORMAL,
)


def harmless(case: Case) -> Event | None:
    """The event that an `ok_*` verdict stands on, or None when the evidence shows a death without a cause, or nothing."""
    if case.stopped_by_us:
        return _stop(case)
    if case.dead:
        return None
    for cause in _PRECEDENCE:
        found = [event for event in case.events if event.kind is Kind.BENIGN and event.cause is cause]
        if found:
            return _in_own_words(min(found, key=lambda event: (event.rank, event.order)), case)
    stop = case.first("shutdown")
    if stop is not None:
        return replace(stop, kind=Kind.BENIGN, cause=Cause.OK_SHUTDOWN, sure=case.exit.code == 0, note="it ended in order")
    healthy = case.first(*HEALTHY)
    if healthy is not None and not _ends_badly(case):
        return replace(healthy, kind=Kind.BENIGN, cause=Cause.OK_NORMAL, note="it starts, serves, and nothing went wrong")
    return None


_NOISE_RANK = 25
"""What is printed by a stop, and does not say that it is one."""


def _in_own_words(event: Event, case: Case) -> Event:
    """The line that says that the engine stops, where the event is only the noise of it."""
    stop = case.first("shutdown") if event.cause is Cause.OK_SHUTDOWN and event.rank >= _NOISE_RANK else None
    return event if stop is None else replace(event, evidence=stop.evidence, order=stop.order)


def _ends_badly(case: Case) -> bool:
    """An exception, a child's end, or a client that finds nobody there stands after the last sign of life: nobody can say that
    this engine is well."""
    return case.ends_in("exception", "usage_error", "wrapper", "unreachable")


def _stop(case: Case) -> Event:
    """A stop that we asked for: quote the engine's own line about it, else the ledger, else nothing."""
    line = case.first("sigterm", "shutdown", "stop_requested", "exit")
    event = line or Event("stop_requested", Kind.BENIGN, None, 7, 20, Evidence(Source.STOP_LEDGER, "stop asked for by us"), 0)
    return replace(event, kind=Kind.BENIGN, cause=Cause.OK_SHUTDOWN, sure=True, note="the stop was asked for")
