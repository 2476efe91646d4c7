"""Rules about processes: how they ended, who ended them, what they could not have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from appliance.core.causes import Cause
from appliance.core.evidence import Source
from appliance.diagnosis.case import HEALTHY, OWN_FAULTS, UNIT, Case, is_known, ours, signal_of, signal_of_code
from appliance.diagnosis.causality import distance_s
from appliance.diagnosis.events import Event, Phase, caused
from appliance.diagnosis.pattern import Kind
from appliance.diagnosis.stops import of_engine, of_the_system

_DEATHS: dict[str, tuple[Cause, int, int]] = {
    "SIGSEGV": (Cause.SEGFAULT_NATIVE, 1, 80),
    "SIGILL": (Cause.SIGILL_CPU, 1, 75),
    "SIGBUS": (Cause.SHM_TOO_SMALL, 2, 8),
    "SIGKILL": (Cause.KILLED_UNKNOWN, 5, 50),
    "SIGTERM": (Cause.EXTERNAL_SIGTERM, 3, 40),
    "SIGINT": (Cause.EXTERNAL_SIGTERM, 3, 41),
    "SIGHUP": (Cause.EXTERNAL_SIGTERM, 3, 42),
    "SIGQUIT": (Cause.EXTERNAL_SIGTERM, 5, 60),
}
"""Signal → cause, tier, rank. SIGABRT is missing on purpose: it says that the program gave up, never why."""
_OF_ONE_CLIENT = re.compile(r"\b(?:Connection(?:Reset|Aborted)|BrokenPipe|IncompleteRead|Cancelled)Error\b|\bClientDisconnect")
"""Ends one connection's task (asyncio: "Task exception was never retrieved"), never a process."""
_PYTHON_ABORT = "Fatal Python error: Aborted"
_DUMP_CRASHED = "while the stacks were printed after an abort"


def death(event: Event, case: Case) -> Event | None:
    """A process ended by a signal: the signal names the kind of fault, a deeper event names the cause."""
    signal = signal_of(event.fields.get("signal")) or signal_of_code(event.fields.get("exit_code", ""))
    if signal is None or signal not in _DEATHS:
        return replace(event, kind=Kind.CONSEQUENCE, fatal=event.fatal and str(event.fields.get("exit_code")) != "0")
    if event.source is Source.SYSTEMD and not of_engine(event.text) and case.outlived(event):
        return replace(event, kind=Kind.SYMPTOM, fatal=False, note="the engine went on working after that")
    if event.source is Source.SYSTEMD and (another := _another_unit(event, case)) is not None:
        return replace(event, kind=Kind.SYMPTOM, fatal=False, note=f"of {another}, which is not the engine's")
    if _stopping(signal, event, case):
        return replace(event, kind=Kind.CONSEQUENCE, fatal=False, note="during a stop")
    if signal == "SIGSEGV" and _aborting(case):
        return replace(event, kind=Kind.CONSEQUENCE, note=_DUMP_CRASHED)
    if signal == "SIGKILL":
        starved = _host_memory_plan(event, case)
        if starved is not None:
            return starved
        if _by_its_parent(event, case):
            return replace(event, kind=Kind.CONSEQUENCE, note="the parent kills its own process tree after a child failed")
    if signal == "SIGTERM" and _after_a_failed_start(event, case):
        return replace(event, kind=Kind.CONSEQUENCE, note="the parent ends its workers after a start that failed")
    cause, tier, rank = _DEATHS[signal]
    rank -= event.pattern_id == "process.torchrun_report"  # it names the signal; the line above it has the number only
    exit_only = event.source is Source.EXIT
    return caused(event, cause, tier=max(tier, 5) if exit_only else tier, rank=rank + (30 if exit_only else 0), note=f"ended by {signal}")


def _another_unit(event: Event, case: Case) -> str | None:
    """The unit whose process this was, where that is none of the engine's: by its name, or by the program that crashed just before."""
    match = UNIT.search(event.text)
    if match is None or of_engine(match["unit"]):
        return None
    crashed = (other for other in case.named("segfault_line", "death") if other.order < event.order and other.fields.get("name"))
    foreign = any(not ours(other, case) and 0 <= (distance_s(event.evidence, other.evidence) or 0.0) <= FAULT_ENDS_S for other in crashed)
    return match["unit"] if of_the_system(match["unit"]) or foreign else None


_UNIT_SAYS = re.compile(r"(?P<unit>[\w@.:\\-]{1,120}\.(?:service|scope)):? ")


def of_another_unit(event: Event, case: Case) -> Event:
    """What systemd says of a unit that is no engine's, nor may be, is context."""
    match = _UNIT_SAYS.match(event.text) if event.source is Source.SYSTEMD else None
    if match is None or event.kind not in (Kind.CAUSE, Kind.CONSEQUENCE) or event.name == "foreign_oom":
        return event
    unit = match["unit"]
    others = case.engine_units if any(map(of_engine, case.engine_units)) else frozenset()
    outlived = not of_engine(unit) and case.outlived(event)
    if not outlived and not of_the_system(unit) and (of_engine(unit) or not others or unit in others):
        return event
    return replace(event, kind=Kind.SYMPTOM, cause=None, fatal=False, note=f"of {unit}, which is not the engine's")


def segfault(event: Event, case: Case) -> Event | None:
    """A segmentation fault after an abort is the abort's own: Python reads the frames of running threads to print them."""
    before = case.last_before(event, "echo")
    if before is not None and _PYTHON_ABORT in before.text:
        return replace(event, kind=Kind.CONSEQUENCE, cause=None, note=_DUMP_CRASHED)
    return event


def _aborting(case: Case) -> bool:
    return any(_PYTHON_ABORT in event.text for event in case.named("echo"))


def _stopping(signal: str, event: Event, case: Case) -> bool:
    """Ends that belong to a stop: any while we or systemd asked for one, a worker's SIGTERM in any shutdown, SIGKILL after a drain."""
    if asked_for(case, event):
        return signal in ("SIGTERM", "SIGINT", "SIGKILL", "SIGQUIT", "SIGABRT", "SIGSEGV") and event.phase is not Phase.LOADING
    if event.source is Source.EXIT:
        return signal == "SIGKILL" and case.has("drained")
    return signal in ("SIGTERM", "SIGINT") and (event.phase is Phase.STOPPING or case.has("shutdown", "sigterm"))


def asked_for(case: Case, event: Event | None = None) -> bool:
    """We, or an administrator through systemd, wanted the stop (in which this happened); a logout that takes the user's services along
    is no wish.
    """
    if case.stopped_by_us:
        return True
    return any(event is None or stop.covers(event) for stop in case.stops) and not _logged_out(case)


LOGOUT_LINES = 6
LOGOUT_S = 15.0


def _logged_out(case: Case) -> bool:
    """The units were stopped right after a user's manager was, and not because the machine goes down."""
    stop = case.first("stop_requested")
    left = None if stop is None else case.last_before(stop, "logout")
    if stop is None or left is None or case.has("shutdown_record"):
        return False
    later_s = distance_s(stop.evidence, left.evidence)
    return stop.order - left.order <= LOGOUT_LINES and (later_s is None or later_s <= LOGOUT_S)


def _by_its_parent(event: Event, case: Case) -> bool:
    """A parent ends its whole tree after a child failed; a child that is gone before that was ended by somebody else."""
    if event.source is Source.ENGINE_LOG:
        return case.last_before(event, "kill_tree", "sigquit", "exception", "broken_invariant") is not None
    if case.has("kill_tree", "sigquit"):
        return True
    failed = case.last_words("wrapper", "exception", "runtime_failed", "startup_failed", "broken_invariant")
    return any(not (one.name == "exception" and _OF_ONE_CLIENT.search(one.text)) for one in failed)


def _after_a_failed_start(event: Event, case: Case) -> bool:
    """A worker that an engine's parent asked to end, for an exception stands before it and no sign of life between."""
    if event.source is not Source.ENGINE_LOG or case.served:
        return False
    failed = case.last_before(event, "exception", "startup_failed", "wrapper", "runtime_failed", "usage_error")
    return failed is not None and _OF_ONE_CLIENT.search(failed.text) is None


def _host_memory_plan(event: Event, case: Case) -> Event | None:
    """ollama printed a plan that puts more into host memory than is free, and then its runner was killed."""
    plan = case.last_before(event, "host_memory_plan")
    free = list(case.named("host_memory_free"))
    if plan is None:
        return None
    required, partial = (float(plan.fields.get(name, 0.0)) for name in ("required_bytes", "partial_bytes"))
    free_bytes = max(
        (float(other.fields.get("free_bytes", 0.0)) + float(other.fields.get("swap_bytes", 0.0)) for other in free), default=0.0
    )
    if required - partial <= 0 or (free_bytes and required - partial < 0.85 * free_bytes):
        return None
    note = "the plan puts more into host memory than is free, then the runner was killed"
    return caused(replace(plan, fatal=True), Cause.HOST_OOM, tier=2, rank=3, sure=False, note=note)


FAULT_ENDS_S = 3.0
"""A fault ends its process at once; clocks and a loaded machine's log readers are that much apart at most."""


def segfault_line(event: Event, case: Case) -> Event | None:
    """The kernel's segfault (or trap) line, if the process may be ours."""
    if not ours(event, case):
        return replace(event, kind=Kind.SYMPTOM, note=f"of {event.fields.get('name')}, which is not the engine")
    if event.pattern_id == "systemd.coredump":
        foreign = not is_known(event, case) and not of_engine(event.text) and case.outlived(event)
        return replace(event, kind=Kind.SYMPTOM, note="the engine went on working after that") if foreign else _dumped(event, case)
    if (contradiction := _no_fault_of_ours(event, case)) is not None:
        told = contradiction != _ANY_PROGRAM
        return replace(event, kind=Kind.SYMPTOM, sure=told, note=f"of another {event.fields.get('name')}: {contradiction}")
    if "invalid opcode" in event.text:
        return caused(event, Cause.SIGILL_CPU, tier=1, rank=73)
    return caused(event, Cause.SEGFAULT_NATIVE, tier=1, rank=70)


def _dumped(event: Event, case: Case) -> Event:
    """A core dump of the engine: of which signal, its line or the unit's end tells. systemd's own watchdog dumps cores too, and so does
    whoever gives up (SIGABRT): the dump then follows from that.
    """
    if asked_for(case, event):
        return replace(event, kind=Kind.CONSEQUENCE, cause=None, fatal=False, note="during a stop")
    told = signal_of(event.fields.get("signal")) or case.exit.signal or next(_dumping_signals(case), None)
    if told in OWN_FAULTS and told in _DEATHS:
        cause, tier, rank = _DEATHS[str(told)]
        return caused(event, cause, tier=tier, rank=min(rank, event.rank), note=f"a core dump of {told}")
    if told is not None or any(other.fatal and other.source is Source.ENGINE_LOG for other in case.named("echo")):
        return replace(event, kind=Kind.CONSEQUENCE, cause=None, note=f"a core dump of {told or 'an abort'}")
    return caused(event, Cause.SEGFAULT_NATIVE, tier=1, rank=76, sure=False, note="that a core was dumped does not tell of which signal")


def _dumping_signals(case: Case) -> Iterator[str]:
    """Of the unit's end and of what systemd sent before it."""
    for event in case.named("death", "unit_result"):
        told = signal_of(event.fields.get("signal"))
        if event.source is not Source.EXIT and told is not None:
            yield told


def _no_fault_of_ours(event: Event, case: Case) -> str | None:
    """What speaks against the engine where the line's number is of a process or thread that nobody knows."""
    if event.evidence.data.get("of_engine") is True:
        return None
    if case.engine == "native" and case.exit.signal in ("SIGKILL", "SIGTERM"):
        return f"the engine is one process, and ended by {case.exit.signal}"
    if not is_known(event, case):
        known = next((other for other in case.named("segfault_line") if is_known(other, case)), None)
        if known is not None:
            return f"line {known.evidence.line} is about the engine's own process"
        if (alive := _alive_after(event, case)) is not None:
            return alive
    own = next((other for other in case.named("segfault_native") if other.source is Source.ENGINE_LOG), None)
    later_s = None if own is None else distance_s(own.evidence, event.evidence)
    if later_s is None or later_s <= FAULT_ENDS_S:
        return None
    return f"the engine went on for {later_s:.0f} s, until a fault of its own"


_ANY_PROGRAM = "the engine's log tells of no end, and many programs have that name"
_INTERPRETER = re.compile(r"python[\d.]*$")


def _alive_after(event: Event, case: Case) -> str | None:
    """The engine's log tells of no end, and goes on after this fault by the clock; or no clock tells, and any program has that name."""
    if not case.well_at_last:
        return None
    later_s = case.lived_on_s(event)
    if later_s is not None:
        return f"the engine went on answering for {later_s:.0f} s" if later_s > FAULT_ENDS_S else None
    if _INTERPRETER.match(str(event.fields.get("name") or "")) is None:
        return None
    return _ANY_PROGRAM


def heap_corruption(event: Event, _case: Case) -> Event:
    """glibc found the heap destroyed: native code wrote where it must not."""
    return caused(event, Cause.SEGFAULT_NATIVE, tier=1, rank=82, sure=False)


def bus_error(event: Event, case: Case) -> Event:
    """A page of a mapping on a full tmpfs; a line that gives the size of /dev/shm is the better one to quote."""
    size = case.last_before(event, "shm_size")
    return caused(replace(size, fatal=True) if size is not None else event, Cause.SHM_TOO_SMALL, tier=2, rank=8, sure=size is not None)


_PLACE = re.compile(r"(?<![\w/])/[\w.+-]+/|[Dd]isk|\bquota\b|[A-Z]:\\\\|\bwrite\b|\bcopy\b|\bcheckpoint\b")
_NO_PLACE = "the line names no place: shared memory that is full, and watches that are used up, are told in the same words"


def enospc(event: Event, case: Case) -> Event:
    """No space on /dev/shm (or out of NCCL) is shared memory; anywhere else it is a disk."""
    text = event.text.lower()
    if "inotify" in text:
        return replace(event, kind=Kind.SYMPTOM, note="of the kernel's inotify watches, not of a disk")
    nearby = case.near(event, "shm_too_small", before=40, after=40) or case.near(event, "shm_size", before=400, after=40)
    if "/dev/shm" in text or "nccl" in text or "posix_fallocate" in text or "shared memory" in text or nearby:
        return caused(event, Cause.SHM_TOO_SMALL, tier=2, rank=7)
    named = _PLACE.search(event.text) is not None
    return caused(event, Cause.DISK_FULL, tier=2, rank=40, sure=named, note="" if named else _NO_PLACE)


def sigterm(event: Event, case: Case) -> Event | None:
    """A stop signal is a crash only when nobody we know asked for it and the engine did not leave in order."""
    if asked_for(case, event):
        return caused(event, Cause.OK_SHUTDOWN, tier=7, rank=20, note="the stop was asked for")
    if event.pattern_id == "native.sigterm":  # only ever stopped by applianced, whose ledger would be among the evidence
        return caused(event, Cause.EXTERNAL_SIGTERM, tier=3, rank=10, note="no record of ours asks for this stop")
    if _logged_out(case):
        return caused(event, Cause.EXTERNAL_SIGTERM, tier=3, rank=10, note="systemd ends a user's services when the user has logged out")
    died_of_it = case.exit.signal in ("SIGTERM", "SIGINT", "SIGHUP")
    failed = case.exit.known and case.exit.code != 0 and not case.has("drained")
    unwound = event.pattern_id == "process.torchrun_signal"  # torchrun raises an exception on it, and leaves in no order
    dirty = case.has("wrapper", "runtime_failed", "startup_failed") or died_of_it or failed or unwound
    if dirty or (event.phase is Phase.LOADING and not case.served):
        return caused(event, Cause.EXTERNAL_SIGTERM, tier=3, rank=10, note="no record of ours asks for this stop")
    return caused(event, Cause.OK_SHUTDOWN, tier=7, rank=20, sure=False, note="it ended in order; no record says who asked")


def client_left(event: Event, case: Case) -> Event | None:
    """A client left; if the engine died after that and of nothing else, it died of that."""
    aborted = event.kind is Kind.BENIGN
    if aborted and any(other.fatal and other.source is event.source and other.order < event.order for other in case.events):
        return replace(event, kind=Kind.SYMPTOM, cause=None, note="requests are aborted because the engine is gone")
    if case.has("wrapper") and not case.served_after(event):
        return caused(event, Cause.CLIENT_DISCONNECT_CRASH, tier=4, rank=90, sure=False)
    if event.kind is Kind.SYMPTOM:
        return None
    return caused(event, Cause.OK_CLIENT_DISCONNECT, tier=7, rank=15)


FRAMES_LINES = 60
"""A traceback's last line stands within so many lines of its first."""


def request_dropped(event: Event, case: Case) -> Event | None:
    """A client left and its request was dropped; where the sentence is what ended a manager's task, the server died of it."""
    task = case.last_before(event, "wrapper")
    if task is None or event.order - task.order > FRAMES_LINES or case.served_after(event):
        return None
    other = case.last_before(event, "exception", *HEALTHY)
    if "TokenizerManager hit an exception" not in task.text or (other is not None and other.order > task.order):
        return None
    return caused(event, Cause.CLIENT_DISCONNECT_CRASH, tier=4, rank=89, note="the task that serves all clients ended of it")


def health_failed(event: Event, case: Case) -> Event | None:
    """A health check that got no token in time, of an engine that went on answering: something long ran."""
    if case.dead or not case.served_after(event):
        return None
    return caused(event, Cause.OK_BENIGN_WARNING, tier=7, rank=31, note="a health check ran out of time, and the engine answered again")


def let_go(event: Event, case: Case) -> Event | None:
    """An exception of whoever lets go of a request whose client had just left; where the server ended with it, it ended of that."""
    frame = case.last_before(event, "abort_frame")
    if frame is None or event.order - frame.order > FRAME_LINES or not case.dead or case.served_after(event):
        return None
    if not any(case.near(event, name, before=FRAMES_LINES, after=0) for name in ("ok_client_disconnect", "client_left")):
        return None
    note = "a client left just before, and letting go of its request failed"
    return caused(event, Cause.CLIENT_DISCONNECT_CRASH, tier=4, rank=88, sure=False, note=note)


FRAME_LINES = 6
"""An exception's own line stands so near below the frame that raised it."""
LEFT_WITHIN_LINES = 40


def broken_invariant(event: Event, case: Case) -> Event | None:
    """The scheduler's books do not balance right after a client left: what that client held was counted wrong."""
    if case.near(event, "ok_client_disconnect", before=LEFT_WITHIN_LINES, after=0):
        note = "a client left just before, and what its request held was counted wrong"
        return caused(event, Cause.CLIENT_DISCONNECT_CRASH, tier=4, rank=91, sure=False, note=note)
    return None


def address_taken(event: Event, case: Case) -> Event:
    """Somebody listens there; a warning about one of several addresses is none while the engine goes on."""
    warning = "socket.cpp" in event.text and "[W" in event.text
    if warning and (case.served or not case.dead):
        return caused(event, Cause.OK_BENIGN_WARNING, tier=7, rank=33)
    return caused(event, Cause.PORT_IN_USE)


def template_request(event: Event, case: Case) -> Event:
    """A template that fails on a request: that request's fault while the engine serves others, else the template's."""
    if case.served or any(other.cause is Cause.OK_CLIENT_ERROR for other in case.events):
        return caused(event, Cause.OK_CLIENT_ERROR, tier=7, rank=22)
    return caused(event, Cause.TEMPLATE_ERROR, sure=False)


def template_error(event: Event, case: Case) -> Event:
    """A template that does not compile keeps some engines from starting; others find out when a request comes, and go on."""
    if event.phase.serving and not case.dead and case.served_after(event):
        return caused(event, Cause.OK_CLIENT_ERROR, tier=7, rank=22, note="a request was refused for it, and the engine goes on")
    return event


def start_timeout(event: Event, _case: Case) -> Event:
    """Somebody waited for a start and gave up; only we ourselves know that it went on computing."""
    return event if event.source is Source.PROBE else replace(event, sure=False)


def start_failed(event: Event, _case: Case) -> Event:
    """systemd gave up; the failed attempts stand in the chain, and the root is deeper where a program said more."""
    return caused(event, Cause.SD_START_LIMIT, tier=5, rank=20)
