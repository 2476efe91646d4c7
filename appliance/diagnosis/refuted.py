"""What the evidence suggests and does not carry, each with the reason."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.core.causes import Cause
from appliance.core.diagnosis import Citation, Refuted
from appliance.core.evidence import Source
from appliance.diagnosis.case import Case
from appliance.diagnosis.causality import Verdict, explains
from appliance.diagnosis.events import Event

MOST = 8

_OOM = frozenset({Cause.CUDA_OOM_PREFILL, Cause.CUDA_OOM_RUNTIME, Cause.CUDA_OOM_STARTUP})


def refuted(root: Event | None, verdict: Verdict, case: Case) -> tuple[Refuted, ...]:
    """At most eight, one a cause, the most tempting first."""
    found: dict[Cause, Refuted] = {}
    for item in _all(root, verdict, case):
        if root is None or item.cause is not root.cause:
            found.setdefault(item.cause, item)
    return tuple(found.values())[:MOST]


def _all(root: Event | None, verdict: Verdict, case: Case) -> Iterator[Refuted]:
    if root is not None:
        yield from _self_kill(root, case)
        yield from _explained(root, verdict)
        yield from _by_cause(root, case)
    for event, reason in verdict.outside:
        if event.cause is not None:
            yield Refuted(event.cause, reason, _cite(event))
    for event in case.aside:
        if event.cause is not None and event.is_suspect:
            yield Refuted(event.cause, event.note, _cite(event))
    yield from _foreign(case)
    yield from _polite_end(root, case)


def _cite(event: Event) -> Citation:
    return Citation(event.source, event.evidence.line, event.text, event.evidence.time_s)


def _self_kill(root: Event, case: Case) -> Iterator[Refuted]:
    """SIGKILL is not proof of the OOM killer."""
    tree = case.first("kill_tree") or case.first("sigquit")
    killed = case.exit.signal == "SIGKILL" or any(event.fields.get("signal") == "SIGKILL" for event in case.named("death"))
    if (killed or case.has("kill_tree")) and root.cause is not Cause.HOST_OOM and root.is_suspect:
        why = (
            "the parent kills its own process tree after a child failed"
            if tree
            else "no record of the kernel's OOM killer names the engine"
        )
        yield Refuted(Cause.HOST_OOM, f"SIGKILL alone is no proof: {why}", None if tree is None else _cite(tree))


def _explained(root: Event, verdict: Verdict) -> Iterator[Refuted]:
    for event in (*verdict.explained, *verdict.rivals):
        if event.cause is None or event.cause is root.cause:
            continue
        why = explains(root, event)
        if why is not None and event.tier == 4:
            limit = event.fields.get("timeout_s")
            shown = f" of {limit:.0f} s" if isinstance(limit, float) else ""
            why = f"a time-out{shown} says how long somebody waited, not why; {root.cause.label if root.cause else ''} stands before it"
        yield Refuted(event.cause, why or "it stands beside the root and is less specific", _cite(event))


def _by_cause(root: Event, case: Case) -> Iterator[Refuted]:
    failed = case.first("http_500")
    if failed is not None and root.tier < 4 and not any(event.tier == 4 for event in case.events):
        yield Refuted(Cause.ENGINE_RPC_TIMEOUT, "clients saw a 500 because the engine was gone; no time-out is on record", _cite(failed))
    if root.cause is Cause.KV_POOL_EXHAUSTED:
        yield Refuted(Cause.CUDA_OOM_PREFILL, "the words 'out of memory' are about token slots of the KV pool; no CUDA allocation failed")
    if root.cause in _OOM and not case.has("xid"):
        yield Refuted(Cause.CUDA_ILLEGAL_ACCESS, "an allocation was refused; no fault of a kernel or card is on record")
    if root.cause is Cause.CUDA_ILLEGAL_ACCESS and not case.has("nccl_watchdog") and "watchdog" in root.text.lower():
        yield Refuted(Cause.NCCL_TIMEOUT, "NCCL's watchdog only passed on the CUDA error; no collective timed out")
    if root.cause is Cause.HOST_POWER_RESET:
        yield Refuted(Cause.GPU_OFF_BUS, "it would have left an Xid 79")
        yield Refuted(Cause.HOST_OOM, "it would have left oom-kill lines")
    if root.cause is Cause.HOST_OOM and root.source is Source.EXIT:
        yield Refuted(Cause.CUDA_OOM_RUNTIME, "host memory was refused, not memory of the card")


def _foreign(case: Case) -> Iterator[Refuted]:
    for event in case.named("foreign_oom"):
        yield Refuted(Cause.HOST_OOM, f"{event.note}", _cite(event))


def _polite_end(root: Event | None, case: Case) -> Iterator[Refuted]:
    polite = case.first("shutdown")
    if polite is not None and (root is None or (root.cause is not None and not root.cause.is_ok)):
        yield Refuted(Cause.OK_SHUTDOWN, "it ends politely, but nobody asked it to stop and a fault stands before", _cite(polite))
