"""What applianced found out itself about an engine that it started: that it cannot be started so, took too long, or computes nonsense.

Only here is it known what was configured (`launch` among the probe's evidence), so only here can a key be named. The same lines in
somebody else's log stay what they are.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import replace

from appliance.core.causes import Cause
from appliance.core.evidence import Evidence, Source
from appliance.core.units import format_bytes, format_duration
from appliance.diagnosis.case import Case
from appliance.diagnosis.events import Event, Phase, caused, event_of
from appliance.diagnosis.pattern import Kind, Pattern, Value

NOT_A_PROGRAM = frozenset({errno.ENOENT, errno.EACCES, errno.ENOEXEC, errno.ENOTDIR, errno.EISDIR, errno.EPERM, errno.ELOOP})
NO_MEMORY = frozenset({errno.ENOMEM})
NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})
ASKED = ("start", "canary")
"""Kinds of probe whose text holds the engine's own answer to a prompt."""
_NATIVE_KEYS = {
    "--model": "model.path", "--name": "model.name", "--threads": "engine.threads", "--context-length": "engine.context_length_tokens",
    "--prefill-chunk": "engine.prefill_chunk_tokens", "--max-running": "engine.max_running", "--block-tokens": "engine.block_tokens",
    "--kv-pool-bytes": "engine.kv_pool_bytes", "--prefill-fraction": "engine.prefill_fraction",
    "--max-body-bytes": "gateway.max_body_bytes",
}  # fmt: skip
_MOST_OF_MEMORY = 0.5


def launched(case: Case) -> Mapping[str, object] | None:
    """What was configured for this engine; None where somebody else started it."""
    return next((item.data for item in case.lines_of(Source.PROBE) if item.data.get("kind") == "launch"), None)


def spawn_failed(item: Evidence, order: int) -> Event:
    """The kernel did not execute it."""
    number = _count(item.data, "errno")
    event = Event("engine_config", Kind.SYMPTOM, None, 2, 20, item, order, pattern_id="probe.spawn", fatal=True)
    if number in NO_MEMORY:
        return replace(event, name="host_oom", kind=Kind.CAUSE, cause=Cause.HOST_OOM)
    if number in NO_DESCRIPTOR:
        return replace(event, name="fd_exhausted", kind=Kind.CAUSE, cause=Cause.FD_EXHAUSTED)
    if number not in NOT_A_PROGRAM:
        return event
    key, program = str(item.data.get("key", "engine.command")), str(item.data.get("program", ""))
    fields = _words(f"{key} names {program!r}, which cannot be run ({item.data.get('why', 'it is not there')})", f"Correct {key}", key)
    return replace(event, kind=Kind.CAUSE, cause=Cause.ENGINE_CONFIG, fields=fields)


def start_was_late(item: Evidence, order: int) -> Event:
    """The start deadline passed. Whatever the engine itself says about why goes deeper."""
    deadline_s = item.data.get("deadline_s")
    fields: dict[str, Value] = {"deadline_s": float(deadline_s)} if isinstance(deadline_s, (int, float)) else {}
    return Event("start_timeout", Kind.CAUSE, Cause.START_TIMEOUT, 4, 95, item, order, fields, "probe.late")


def answer_of(item: Evidence, order: int, pattern: Pattern, fields: Mapping[str, Value]) -> Event:
    """What the engine answered to a prompt of ours, read as if it stood in its log."""
    return replace(event_of(pattern, item, order, fields), phase=Phase.READY)


def bad_numbers(event: Event, _case: Case) -> Event | None:
    """NaN in one client's answer is that answer's trouble; in the answer to the plainest prompt it is the model's."""
    if event.source is not Source.PROBE:
        return None
    return caused(replace(event, fatal=True), Cause.BAD_NUMBERS, tier=2, rank=22)


def usage_error(event: Event, case: Case) -> Event | None:
    """The engine's command line parser refuses an argument: ours is the only one that knows where it was written."""
    launch = launched(case)
    if launch is None or case.served or not _ended_with_a_code(case):
        return None
    said = event.text.split()
    flag = next((word for word in _strings(launch, "extra_args") if word.partition("=")[0] in said or word in event.text), None)
    if flag is not None:
        return _config(
            event, f"it does not take {flag}, which engine.extra_args adds", f"Take {flag} out of engine.extra_args", "engine.extra_args"
        )
    native = next((key for flag, key in _NATIVE_KEYS.items() if f"argument {flag}:" in event.text), None)
    if native is not None and launch.get("backend") == "native":
        return _config(event, f"the value of {native} is refused", f"Change {native}", native)
    key = "engine.extra_args" if launch.get("backend") == "native" else "engine.command"
    return _config(event, f"it refuses its command line ({key})", f"Correct {key}", key)


def no_module(event: Event, case: Case) -> Event | None:
    """Its interpreter lacks the engine, or what the engine is made of."""
    launch = launched(case)
    if launch is None or case.served or not _ended_with_a_code(case):
        return None
    key = "engine.python" if launch.get("backend") == "native" else "engine.command"
    module, program = event.fields.get("module"), launch.get("program")
    cure = f"Point {key} at an environment that has {module} (`appliancectl setup` makes one for the built-in engine)"
    return _config(event, f"{program} ({key}) has no module {module}", cure, key)


def ended_without_a_word(event: Event, case: Case) -> Event | None:
    """The built-in engine prints a line before anything else: a program that leaves without one is another."""
    launch = launched(case)
    silent = launch is not None and launch.get("backend") == "native" and not any(case.lines_of(Source.ENGINE_LOG))
    if not silent or launch is None or not _ended_with_a_code(case, zero=True):
        return None
    fault = f"{launch.get('program')} left with code {case.exit.code} and said nothing, as the built-in engine never does"
    return _config(replace(event, sure=False), fault, "Correct engine.python: it has to be a Python that has the engine", "engine.python")


def host_memory(event: Event, case: Case) -> Event | None:
    """A KV pool that the machine cannot have is a setting; one that takes most of it is named beside the cause."""
    launch = launched(case)
    pool, memory = (0, 0) if launch is None else (_count(launch, "kv_pool_bytes"), _count(launch, "memory_bytes"))
    if not pool or not memory or event.cause is not Cause.HOST_OOM or case.served:
        return None
    size = f"engine.kv_pool_bytes = {format_bytes(pool)}"
    if pool > memory:
        fault = f"{size} is more than the {format_bytes(memory)} of memory that this machine has"
        return _config(
            event, fault, f"Lower engine.kv_pool_bytes below {format_bytes(memory)}, with room for the weights", "engine.kv_pool_bytes"
        )
    return replace(event, fields={**event.fields, "pool": size}) if pool > _MOST_OF_MEMORY * memory else None


def _config(event: Event, fault: str, cure: str, key: str) -> Event:
    return replace(caused(event, Cause.ENGINE_CONFIG, tier=2, rank=21), fields={**event.fields, **_words(fault, cure, key)}, fatal=True)


def _words(fault: str, cure: str, key: str) -> dict[str, Value]:
    return {"fault": fault, "cure": f"{cure}, in appliance.toml or a file of conf.d.", "key": key}


def _ended_with_a_code(case: Case, *, zero: bool = False) -> bool:
    return case.exit.code is not None and (zero or case.exit.code != 0)


def _strings(launch: Mapping[str, object], name: str) -> tuple[str, ...]:
    value = launch.get(name)
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else ()


def _count(data: Mapping[str, object], name: str) -> int:
    value = data.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def deadline_words(deadline_s: float) -> str:
    """For the evidence of a late start."""
    return f"the engine was still starting {format_duration(deadline_s)} after it was begun (supervisor.start_deadline_s)"
