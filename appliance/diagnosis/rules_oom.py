"""Whose memory ran out. The OOM killer's lines name a process by the kernel's number for it, the first 15 letters of its name and its
control group; only a process of the engine makes them a cause. What struck somebody else is context, however well the times fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from appliance.core.causes import Cause
from appliance.core.evidence import Source
from appliance.diagnosis.case import OWN_FAULTS, Case, engine_like, signal_of, signal_of_code
from appliance.diagnosis.causality import distance_s
from appliance.diagnosis.events import Event, caused
from appliance.diagnosis.pattern import Kind
from appliance.diagnosis.stops import of_engine, of_the_system

_CONTAINERS = ("docker", "libpod", "containerd", "kubepods", "crio")
_ECHOES = frozenset(
    {Cause.HOST_OOM, Cause.KILLED_UNKNOWN, Cause.EXTERNAL_SIGTERM, Cause.SHM_TOO_SMALL, Cause.DISK_FULL, Cause.CLIENT_DISCONNECT_CRASH,
     Cause.NCCL_INIT_FAILURE, Cause.NCCL_TIMEOUT, Cause.NCCL_P2P_HANG}
)  # fmt: skip
"""What an engine says when one of its processes was killed, or may have said for reasons of its own: no other account of its end."""


def host_oom_kill(event: Event, case: Case) -> Event | None:
    """The kernel killed a process: the engine's, or somebody else's."""
    if _is_told(event, case):
        return caused(event, Cause.HOST_OOM, note="it names a process of the engine")
    reason = _not_ours(event, case)
    if reason is not None:
        name = str(event.fields.get("name") or "a process").strip("'\" <>()")
        return replace(event, name="foreign_oom", kind=Kind.SYMPTOM, note=f"the kernel killed {name}, {reason}")
    nearer = next((other for other in _last_kills(case) if _is_nearer(other, event, case)), None)
    if nearer is not None:
        note = f"the kernel killed this one too, but line {nearer.evidence.line} is the kill that the engine died of"
        return replace(event, name="foreign_oom", kind=Kind.SYMPTOM, note=note)
    return caused(event, Cause.HOST_OOM, sure=_killed(case) or not any(case.lines_of(Source.ENGINE_LOG)))


MOST_KILLS = 50
ONE_BURST_S = 60.0
"""The kernel kills several processes within so long of one shortage."""


def _last_kills(case: Case) -> Iterator[Event]:
    kills = list(case.named("host_oom_kill"))
    return iter(kills[-MOST_KILLS:])


def _is_nearer(other: Event, event: Event, case: Case) -> bool:
    """Whether another kill is the engine's rather than this one: it names its process, or struck at the time of its end."""
    if other.fields.get("pid") == event.fields.get("pid"):
        return False
    if _is_told(other, case):
        return True
    if _not_ours(other, case) is not None:
        return False
    mine_s, its_s = _from_the_end(event, case), _from_the_end(other, case)
    if mine_s is None or its_s is None:
        return False
    return its_s + ONE_BURST_S < mine_s


def _from_the_end(kill: Event, case: Case) -> float | None:
    """Seconds between a kill and the engine's end, where clocks can be compared."""
    end = case.end
    if end is None or bool(end.data.get("zone_unknown")) is not bool(kill.evidence.data.get("zone_unknown")):
        return None
    apart_s = distance_s(kill.evidence, end)
    return None if apart_s is None else abs(apart_s)


def _is_told(event: Event, case: Case) -> bool:
    """By its number, or by the control group of the engine's unit: nothing is left to guess."""
    told = event.evidence.data.get("of_engine")
    if isinstance(told, bool):
        return told
    pid = str(event.fields.get("pid") or "")
    return (pid.isdecimal() and int(pid) in case.engine_pids) or not case.engine_units.isdisjoint(_memcg(event, case).split("/"))


def _not_ours(event: Event, case: Case) -> str | None:
    """Why this process is not the engine's; None where it may well be."""
    if event.evidence.data.get("of_engine") is False and not _from_a_container(event, case):
        return "which never was a process of the engine"
    if not engine_like(event.fields.get("name")):
        return "which is not the engine"
    group = _memcg(event, case)
    if case.engine_units and group.rstrip("/").endswith(".service"):
        return f"which belongs to {group.rpartition('/')[2]}, not to the engine's unit"
    if case.exit.signal in OWN_FAULTS:
        return f"but the engine was ended by {case.exit.signal}"
    account = next(_own_accounts(event, case), None)
    if account is not None:
        return f"but the engine ended of something else, and says so in line {account.evidence.line}"
    if case.outlived(event):
        return "and the engine went on working after that"
    return None


def _own_accounts(kill: Event, case: Case) -> Iterator[Event]:
    """What the engine itself says of a fault deep enough to end it, where that was not the killing seen from inside."""
    if not case.dead and not case.exit.known:
        return
    for event in case.events:
        if (
            event.source not in (Source.ENGINE_LOG, Source.STACK)
            or event.kind is not Kind.CAUSE
            or event.tier > 2
            or event.cause in _ECHOES
        ):
            continue
        signal = signal_of(event.fields.get("signal")) or signal_of_code(event.fields.get("exit_code", ""))
        if event.name == "death" and signal not in OWN_FAULTS:
            continue
        if event.name in ("enospc", "bus_error", "nccl_error", "nccl_watchdog", "address_taken") or event.source is kill.source:
            continue
        if case.served_after(event):  # it was survived: one request's trouble, a retry
            continue
        yield event


def _killed(case: Case) -> bool:
    """SIGKILL is on record, of the engine or of a child of it."""
    if case.exit.signal == "SIGKILL":
        return True
    signals = (signal_of(event.fields.get("signal")) or signal_of_code(event.fields.get("exit_code", "")) for event in case.named("death"))
    return any(signal == "SIGKILL" for signal in signals)


def _memcg(event: Event, case: Case) -> str:
    """The control group of the process: on the line itself, or on the kernel's other line about the same number."""
    own = str(event.fields.get("memcg") or "")
    if own:
        return own
    pid = event.fields.get("pid")
    others = (str(other.fields.get("memcg") or "") for other in case.named("host_oom_kill") if other.fields.get("pid") == pid)
    return next(filter(None, others), "")


def _from_a_container(event: Event, case: Case) -> bool:
    """A client of a container runtime leaves with 137 when what it had started in another control group was killed."""
    left_with_137 = case.exit.evidence is not None and case.exit.evidence.data.get("code") == 137
    return left_with_137 and any(word in _memcg(event, case) for word in _CONTAINERS)


def oom_result(event: Event, case: Case) -> Event | None:
    """systemd's OOM sentence counts for the engine's unit; a slice only repeats what happened to a unit below it."""
    unit = str(event.fields.get("unit") or event.fields.get("group") or "")
    if unit.endswith(".slice"):
        return caused(event, Cause.OK_BENIGN_WARNING, tier=7, rank=30, note="a slice repeats what happened to another unit below it")
    if unit and not of_engine(unit) and case.outlived(event):
        note = f"the OOM killer struck in {unit}, and the engine went on working after that"
        return replace(event, name="foreign_oom", kind=Kind.SYMPTOM, note=note)
    another = bool(unit and case.engine_units) and case.engine_units.isdisjoint(unit.split("/"))
    if another or of_the_system(unit) or (unit and not of_engine(unit) and _ended_otherwise(case)):
        return replace(
            event, name="foreign_oom", kind=Kind.SYMPTOM, note=f"the OOM killer struck in {unit}, which is not the engine's unit"
        )
    sure = not unit or of_engine(unit) or not any(case.lines_of(Source.ENGINE_LOG))
    return caused(event, Cause.HOST_OOM, tier=0, rank=72, sure=sure)


def _ended_otherwise(case: Case) -> bool:
    """Nothing says that the engine was killed, or something says what else it died of."""
    if any(_another_cause(other) for other in case.events) or case.exit.signal in OWN_FAULTS:
        return True
    return any(case.lines_of(Source.ENGINE_LOG)) and not _killed(case)


def _another_cause(event: Event) -> bool:
    """Something that may be a crash's root, and is more than the word of a process that was killed."""
    named_only = event.name in ("oom_result", "host_oom_kill", "death") or (event.name == "segfault_native" and event.tier >= 5)
    return event.kind is Kind.CAUSE and not named_only and not (event.cause is not None and event.cause.is_ok)
