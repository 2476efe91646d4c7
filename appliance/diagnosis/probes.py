"""Evidence that is no text: exits, our own stops and probes, cgroup counters, what the gateway saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from appliance.core.causes import Cause
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.case import exit_of
from appliance.diagnosis.catalogue import Catalogue
from appliance.diagnosis.events import Event
from appliance.diagnosis.pattern import Kind
from appliance.diagnosis.rules_own import ASKED, answer_of, spawn_failed, start_was_late


def answers_in(evidence: Sequence[Evidence], catalogue: Catalogue) -> list[Event]:
    """What the engine answered to our own prompts: its words count as those of its log do."""
    asked = [(order, item) for order, item in enumerate(evidence) if item.source is Source.PROBE and item.data.get("kind") in ASKED]
    return [
        answer_of(item, order, pattern, fields)
        for order, item in asked
        for pattern, fields in catalogue.matches(item.text, Source.ENGINE_LOG)
        if pattern.kind is not Kind.MILESTONE
    ]


def facts_of(evidence: Sequence[Evidence]) -> list[Event]:
    """The events of everything that needs no pattern."""
    makers = {
        Source.EXIT: _exit,
        Source.STOP_LEDGER: _stop,
        Source.PROBE: _probe,
        Source.CGROUP: _cgroup,
        Source.GATEWAY: _gateway,
        Source.NVML: _nvml,
        Source.CORE_DUMP: _core_dump,
    }
    found = [maker(item, order) for order, item in enumerate(evidence) if (maker := makers.get(item.source)) is not None]
    return [event for event in found if event is not None]


def _exit(item: Evidence, order: int) -> Event | None:
    end = exit_of(item)
    if not end.known:
        return None
    said = item.text or (f"the process was ended by {end.signal}" if end.signal else f"the process exited with code {end.code}")
    quoted = replace(item, text=said)
    if end.signal is not None:
        return Event("death", Kind.CONSEQUENCE, None, 5, 50, quoted, order, {"signal": end.signal}, "exit", fatal=True)
    return Event("exit", Kind.CONSEQUENCE, None, 5, 50, quoted, order, {"code": float(end.code or 0)}, "exit", fatal=end.code != 0)


def _stop(item: Evidence, order: int) -> Event:
    said = item.text or f"{item.data.get('asked_by', 'the supervisor')} asked for a stop: {item.data.get('reason', 'no reason recorded')}"
    return Event("stop_requested", Kind.BENIGN, Cause.OK_SHUTDOWN, 7, 20, replace(item, text=said), order, pattern_id="stop_ledger")


def _probe(item: Evidence, order: int) -> Event | None:
    """Our supervisor saw running > 0 and no progress: the hang is the cause, and the kill that follows is ours."""
    kind, silent_s = str(item.data.get("kind", "")), item.data.get("silent_s")
    if kind in _OWN:
        return _OWN[kind](item, order)
    if kind not in ("progress", "hang", "canary") or not isinstance(silent_s, (int, float)) or isinstance(silent_s, bool):
        return Event("echo", Kind.SYMPTOM, None, 6, 50, item, order, pattern_id=f"probe.{kind or 'unnamed'}")
    said = item.text or f"requests were running and the engine made no progress for {silent_s:.0f} s"
    fields = {"timeout_s": float(silent_s), "silent_s": float(silent_s)}
    return Event(
        "engine_watchdog", Kind.CAUSE, Cause.ENGINE_WATCHDOG, 4, 0, replace(item, text=said), order, fields, "probe.progress", fatal=True
    )


def _unclosed_run(item: Evidence, order: int) -> Event:
    """applianced is stopped by systemd before the machine is: a boot since then without a stop before it was no shutdown."""
    if item.data.get("rebooted") is True:
        return Event("boot", Kind.SYMPTOM, None, 1, 99, item, order, pattern_id="probe.unclosed_run", fatal=True, sure=False)
    return Event("supervisor_died", Kind.CAUSE, Cause.SUPERVISOR_DIED, 5, 45, item, order, pattern_id="probe.unclosed_run", fatal=True)


_OWN: dict[str, Callable[[Evidence, int], Event | None]] = {
    "launch": lambda _item, _order: None,  # what was configured: rules ask for it
    "late": start_was_late,
    "spawn": spawn_failed,
    "unclosed_run": _unclosed_run,
}


def _cgroup(item: Evidence, order: int) -> Event | None:
    count = item.data.get("oom_kill", 0)
    if not isinstance(count, int) or count <= 0:
        return None
    said = item.text or f"the engine's control group counts oom_kill {count}"
    return Event("host_oom", Kind.CAUSE, Cause.HOST_OOM, 0, 74, replace(item, text=said), order, {"count": float(count)}, "cgroup.oom_kill")


def _gateway(item: Evidence, order: int) -> Event | None:
    kind = str(item.data.get("kind", ""))
    if kind == "client_disconnect":
        quoted = replace(item, text=item.text or "a client closed its connection")
        return Event("client_left", Kind.BENIGN, Cause.OK_CLIENT_DISCONNECT, 7, 15, quoted, order, pattern_id="gateway.client_disconnect")
    return Event(
        "echo",
        Kind.SYMPTOM,
        None,
        6,
        50,
        replace(item, text=item.text or f"gateway: {kind or 'event'}"),
        order,
        pattern_id=f"gateway.{kind}",
    )


def _nvml(item: Evidence, order: int) -> Event | None:
    """What NVML said itself (a card is lost) is a cause; what the flight recorder saw is shown in the chain and never is."""
    if not item.text:
        return None
    if item.data.get("kind") == "lost":
        fields = {"bdf": str(item.data.get("card", ""))}
        return Event("gpu_off_bus", Kind.CAUSE, Cause.GPU_OFF_BUS, 0, 41, item, order, fields, "nvml.lost", fatal=True)
    return Event("echo", Kind.SYMPTOM, None, 6, 55, item, order, pattern_id=f"nvml.{item.data.get('kind', 'sample')}")


def _core_dump(item: Evidence, order: int) -> Event | None:
    """A dump names the signal its process died of; the rules give that a cause."""
    signal = item.data.get("signal")
    if not isinstance(signal, str):
        return None
    return Event("death", Kind.CONSEQUENCE, None, 1, 77, item, order, {"signal": signal}, "core_dump", fatal=True)
