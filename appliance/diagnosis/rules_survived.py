"""What an engine got over: starts that failed before one that succeeded, and faults that whoever met them passes over and says so."""

from __future__ import annotations

import re
from dataclasses import replace

from appliance.core.causes import Cause
from appliance.core.evidence import Source
from appliance.diagnosis.case import Case
from appliance.diagnosis.events import Event, caused
from appliance.diagnosis.pattern import Kind
from appliance.diagnosis.timeline import ENGINE_SOURCES

_MILD = re.compile(r"\bWARN(?:ING)?\b|\blevel=\"?warn|\[W\d{3,4} |^W\d{4} |Warning: ")
"""A program's own word, in a line's head, for what it does not fail of."""
_HEAD = 160
_PASSING = frozenset(
    {
        Cause.CUDA_OOM_PREFILL, Cause.CUDA_OOM_RUNTIME, Cause.CUDA_OOM_STARTUP, Cause.KV_POOL_EXHAUSTED, Cause.CUBLAS_ERROR, Cause.HOST_OOM,
        Cause.NCCL_TIMEOUT, Cause.NCCL_INIT_FAILURE, Cause.NCCL_P2P_HANG, Cause.ENGINE_RPC_TIMEOUT, Cause.ENGINE_WATCHDOG,
        Cause.CUDA_LAUNCH_FAILURE, Cause.CUDA_ILLEGAL_ACCESS, Cause.CLIENT_DISCONNECT_CRASH,
    }
)  # fmt: skip
"""Moments. A full disk is as full afterwards, whatever goes on."""
_SAID = re.compile(
    r"may not be an issue|\b[Rr]etry(?:ing)?\b|\b[Rr]etried\b|\b[Ff]all(?:ing|s)?[ -]?back\b|(?:can|may) be (?:safely )?ignored|"
    r"[Ss]afe to ignore|\b[Ii]gnoring\b|\b[Nn]on-?fatal\b|\bnot fatal\b|\b[Rr]ecover(?:ed|ing)\b|\b[Ss]kipp(?:ed|ing)\b|\b[Hh]armless\b|"
    r"[Cc]ontinuing"
)


def passed_over(event: Event, case: Case) -> Event:
    """A fault that the line itself plays down, of an engine that went on answering and of whose end nothing is said after it."""
    if event.source is not Source.ENGINE_LOG or event.cause not in _PASSING or not event.is_suspect or not _plays_down(event):
        return event
    ended = case.exit.signal is not None or case.exit.code not in (None, 0)
    later = (other for other in case.events if other.order > event.order and other.source in ENGINE_SOURCES)
    if ended or not case.served_after(event) or any(other.fatal and not _plays_down(other) for other in later):
        return event
    return caused(
        replace(event, fatal=False), Cause.OK_BENIGN_WARNING, tier=7, rank=34, note="whoever met it passed over it, and the engine went on"
    )


def _plays_down(event: Event) -> bool:
    return _MILD.search(event.text[:_HEAD]) is not None or _SAID.search(event.text) is not None


START_CAUSES = frozenset(
    {
        Cause.CUDA_OOM_STARTUP, Cause.KV_POOL_TOO_SMALL, Cause.VRAM_HELD_BY_OTHER, Cause.HF_DOWNLOAD, Cause.MODEL_MISSING,
        Cause.MODEL_CORRUPT, Cause.UNSUPPORTED_ARCH, Cause.PORT_IN_USE, Cause.TEMPLATE_ERROR,
    }
)  # fmt: skip
"""What can only keep an engine from starting."""
_ASKED_FOR = frozenset({Cause.MODEL_MISSING, Cause.HF_DOWNLOAD, Cause.TEMPLATE_ERROR})
"""And what a request may ask for, of an engine that is up: an adapter, another model."""


def survived(event: Event, case: Case) -> Event:
    """A failure to start, said before a start that succeeded: a retry, a fall-back, a file that was not needed; or another run's end."""
    of_a_start = event.cause in START_CAUSES
    if event.source is not Source.ENGINE_LOG or not (event.fatal or of_a_start):
        return event
    started = case.first_after(event, "ready")
    asked_for = event.cause in _ASKED_FOR and event.phase.serving and started is None
    if asked_for and case.served_after(event) and not case.dead_after(event):
        note = "a request was refused for it, and the engine goes on"
        return caused(replace(event, fatal=False), Cause.OK_CLIENT_ERROR, tier=7, rank=27, note=note)
    if started is None:
        return event
    ends = [other for other in case.events if other.fatal and other.order < started.order]
    if of_a_start and not any(other.kind is Kind.CONSEQUENCE or other.order > event.order for other in ends):
        return caused(replace(event, fatal=False), Cause.OK_BENIGN_WARNING, tier=7, rank=35, note="the engine started all the same")
    if any(other.phase.serving for other in (event, *ends)):
        return event
    if of_a_start:
        return replace(event, kind=Kind.SYMPTOM, cause=None, fatal=False, note="an earlier start failed of it; a later one succeeded")
    return event if event.is_suspect else replace(event, fatal=False)
