"""Evidence: one timestamped fact from one source. Diagnosis is a pure function of these."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Source(enum.Enum):
    """Who said it. The value is the word used in `--json`, incidents and reports."""

    EXIT = "exit"
    """How a process ended: `data` has `code` (int) or `signal` (name such as "SIGKILL")."""
    STOP_LEDGER = "stop_ledger"
    """A stop that we asked for: `data` has `signal`, `reason`, `asked_by`."""
    ENGINE_LOG = "engine_log"
    KERNEL_LOG = "kernel_log"
    SYSTEMD = "systemd"
    NVML = "nvml"
    NVIDIA_SMI = "nvidia_smi"
    CGROUP = "cgroup"
    """memory.events: `data` has the counters that moved, such as `oom_kill`."""
    CORE_DUMP = "core_dump"
    STACK = "stack"
    """py-spy, faulthandler or gdb frames."""
    PROBE = "probe"
    """Our own questions to the engine: `data` has `kind` ("health", "progress", "canary") and `silent_s`."""
    GATEWAY = "gateway"
    """What clients saw: `data` has `kind` such as "client_disconnect" or "upstream_reset"."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One fact.

    Attributes:
        source: who said it.
        text: the line itself, without wrappers (container prefixes, colours), as a person would quote it.
        time_s: seconds since the epoch, or None where the source has no clock we can convert.
        line: 1-based line number in its source, 0 where there are no lines.
        boot_id: the boot it belongs to, where known: times are compared inside one boot only.
        data: fields that need no parsing.
    """

    source: Source
    text: str
    time_s: float | None = None
    line: int = 0
    boot_id: str | None = None
    data: Mapping[str, object] = field(default_factory=dict)
