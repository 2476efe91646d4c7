"""What an engine says while it is stopped: workers die, collectives break off, clients are let go. Of a stop that was asked for, none of
that is a fault of its own; what the card or the kernel says of the same seconds still is.
"""

from __future__ import annotations

from dataclasses import replace

from appliance.core.causes import Cause
from appliance.core.evidence import Source
from appliance.diagnosis.case import Case
from appliance.diagnosis.causality import distance_s
from appliance.diagnosis.events import Event, Phase
from appliance.diagnosis.pattern import Kind
from appliance.diagnosis.rules_process import asked_for
from appliance.diagnosis.timeline import ENGINE_SOURCES

_SIGNS = ("sigterm", "shutdown")
SIGN_LINES = 6
"""The parent's word of the signal may come so many lines after the first child's death of it."""
_TEARDOWN = frozenset(
    {
        Cause.SEGFAULT_NATIVE, Cause.EXTERNAL_SIGTERM, Cause.KILLED_UNKNOWN, Cause.CLIENT_DISCONNECT_CRASH, Cause.NCCL_TIMEOUT,
        Cause.NCCL_INIT_FAILURE, Cause.NCCL_P2P_HANG, Cause.ENGINE_RPC_TIMEOUT, Cause.ENGINE_WATCHDOG,
    }
)  # fmt: skip
"""What the engine itself may report of its own end."""


def stop_requested(event: Event, case: Case) -> Event:
    """systemd's word of a stop counts where somebody asked for it."""
    if event.source is not Source.SYSTEMD or case.stops:
        return event
    return replace(event, kind=Kind.BENIGN, cause=None, note="systemd says so too when it starts a failed service anew")


def within_stop(event: Event, case: Case) -> Event:
    """The event, or what it is in a stop that was asked for: a consequence that nobody has to be told of."""
    if event.name == "exit" and _unwound(case) and asked_for(case, event):
        return replace(event, fatal=False, note="torchrun leaves with 1 whenever it is told to stop")
    if event.source not in ENGINE_SOURCES or not (event.fatal or event.is_suspect) or not asked_for(case, event):
        return event
    if not _in_window(event, case):
        return event
    if event.is_suspect and event.cause in _TEARDOWN:
        return replace(event, kind=Kind.CONSEQUENCE, cause=None, fatal=False, note="during a stop")
    return event if event.is_suspect else replace(event, fatal=False)


def _unwound(case: Case) -> bool:
    """The code is the one of the exception that torchrun makes of a signal."""
    return case.exit.code == 1 and any(event.pattern_id == "process.torchrun_signal" for event in case.named("sigterm"))


def _in_window(event: Event, case: Case) -> bool:
    """After the signal: by our ledger's clock, by systemd's or by the engine's own words; without any, whoever asked is believed."""
    asked_s = next((later for line in case.lines_of(Source.STOP_LEDGER) if (later := distance_s(event.evidence, line)) is not None), None)
    if asked_s is not None:
        return asked_s >= -1.0
    if event.phase is Phase.STOPPING or case.last_before(event, *_SIGNS) is not None:
        return True
    told = case.first_after(event, "sigterm")
    return (told is not None and told.order - event.order <= SIGN_LINES) or not case.stopped_by_us or not case.has(*_SIGNS)
