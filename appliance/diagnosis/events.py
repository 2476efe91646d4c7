"""Events: what the evidence says happened. A line becomes zero, one or several of them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from appliance.core.causes import Cause
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.pattern import Kind, Pattern, Value


class Phase(enum.IntEnum):
    """Where the engine stood when a line was printed."""

    UNKNOWN = 0
    LOADING = 1
    READY = 2
    PREFILL = 3
    DECODE = 4
    STOPPING = 5

    @property
    def serving(self) -> bool:
        """Clients are being answered."""
        return self in (Phase.READY, Phase.PREFILL, Phase.DECODE)


MILESTONES = {
    "starting": Phase.LOADING,
    "loading": Phase.LOADING,
    "nccl_init": Phase.LOADING,
    "p2p_setup": Phase.LOADING,
    "shutdown": Phase.STOPPING,
    "ready": Phase.READY,
    "traffic": Phase.READY,
    "prefill": Phase.PREFILL,
    "decode": Phase.DECODE,
    "frame_load": Phase.UNKNOWN,
    "frame_prefill": Phase.UNKNOWN,
    "frame_decode": Phase.UNKNOWN,
    "host_memory_plan": Phase.UNKNOWN,
    "settings": Phase.UNKNOWN,
    "shm_size": Phase.UNKNOWN,
    "shutdown_record": Phase.UNKNOWN,
    "unit_started": Phase.UNKNOWN,
    "unit_down": Phase.UNKNOWN,
    "unit_stopping": Phase.UNKNOWN,
    "unit_stopped": Phase.UNKNOWN,
    "gpu_process": Phase.UNKNOWN,
    "gpu_free": Phase.UNKNOWN,
    "gpu_size": Phase.UNKNOWN,
}
"""Milestone events and the phase they begin (UNKNOWN: none, they are read by rules)."""

RULED = frozenset(
    {
        "abort_frame",
        "address_taken", "boot", "broken_invariant", "bus_error", "client_left", "cuda_busy", "cuda_oom", "cuda_oom_load", "death",
        "drained", "driver_frame", "echo", "enospc", "exception", "exit", "foreign_oom", "ghes_corrected", "ghes_device",
        "ghes_gpu", "gpu_action", "handled", "hang_wait", "health_failed", "heap_corruption", "host_memory_free", "host_oom_kill",
        "http_500", "kill_tree",
        "logout", "nccl_error", "nccl_progress", "nccl_unreachable", "nccl_watchdog", "no_module", "nvml_unknown", "oom_result",
        "package_upgrade",
        "pcie_correctable", "pcie_uncorrectable", "runtime_failed", "segfault_line", "shutdown", "sigquit", "sigterm", "smi_err",
        "start_failed", "startup_failed", "stop_requested", "stuck_task", "template_request", "unit_failed", "unit_result", "unreachable",
        "usage_error", "wrapper", "xid",
    }
)  # fmt: skip
"""Events that carry no cause of their own: rules (`rules.py`) decide what they mean here."""

EVENTS = frozenset({cause.label for cause in Cause} | set(MILESTONES) | RULED)
"""The closed vocabulary of `event` in pattern files."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, as one piece of evidence says it.

    Attributes:
        order: position among all evidence given, which breaks ties and stands in for time.
        count: how many like it were folded into this one.
        sure: the verdict it carries needs no further evidence.
        fatal: the engine is gone or going, whatever the cause.
    """

    name: str
    kind: Kind
    cause: Cause | None
    tier: int
    rank: int
    evidence: Evidence
    order: int
    fields: Mapping[str, Value] = field(default_factory=dict)
    pattern_id: str = ""
    phase: Phase = Phase.UNKNOWN
    count: int = 1
    sure: bool = True
    fatal: bool = False
    note: str = ""

    @property
    def depth(self) -> tuple[int, int, int]:
        """Deeper causes sort first; order only breaks ties."""
        return (self.tier, self.rank, self.order)

    @property
    def text(self) -> str:
        return self.evidence.text

    @property
    def source(self) -> Source:
        return self.evidence.source

    @property
    def is_suspect(self) -> bool:
        """It may be the root of a crash."""
        return self.kind is Kind.CAUSE and self.cause is not None and not self.cause.is_ok


def event_of(pattern: Pattern, evidence: Evidence, order: int, fields: Mapping[str, Value], phase: Phase = Phase.UNKNOWN) -> Event:
    """The event that a pattern's match in a piece of evidence stands for."""
    return Event(
        name=pattern.event,
        kind=pattern.kind,
        cause=pattern.cause,
        tier=pattern.tier,
        rank=pattern.rank,
        evidence=evidence,
        order=order,
        fields=fields,
        pattern_id=pattern.pattern_id,
        phase=phase,
        fatal=pattern.fatal,
    )


def caused(event: Event, cause: Cause, *, tier: int | None = None, rank: int | None = None, sure: bool = True, note: str = "") -> Event:
    """The event as a suspect (or, for `ok_*`, as harmless)."""
    kind = Kind.BENIGN if cause.is_ok else Kind.CAUSE
    return replace(
        event,
        kind=kind,
        cause=cause,
        tier=event.tier if tier is None else tier,
        rank=event.rank if rank is None else rank,
        sure=event.sure and sure,
        note=note or event.note,
    )
