"""How sure a verdict may be. HIGH: the root line tells, and nothing in the evidence speaks for another account. Each doubt takes a
grade; two leave LOW. From inside, a wrong verdict looks as a right one does, but for the traces that the true cause has left: words
of trouble that nobody could read, a root that others are known to show themselves as, a file that was not given.

Which doubts there are, and their grades, come from verdicts on the worked cases with something taken from them (tests/bench/
confidence.py): what stands beside one wrong verdict for four right ones leaves MEDIUM, what stands beside more leaves LOW.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from appliance.core.causes import Cause
from appliance.core.diagnosis import Confidence
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.alarms import breaks_off, unread
from appliance.diagnosis.case import HEALTHY, Case, is_known
from appliance.diagnosis.catalogue import Catalogue
from appliance.diagnosis.causality import Verdict, distance_s
from appliance.diagnosis.events import Event
from appliance.diagnosis.pattern import Kind
from appliance.diagnosis.same_words import same_words
from appliance.diagnosis.stops import of_engine
from appliance.diagnosis.timeline import ENGINE_SOURCES

_BY_ABSENCE = frozenset({Cause.KILLED_UNKNOWN, Cause.HOST_POWER_RESET})
"""Causes that rest on what is not on record, which may only be missing from what was given."""
_SHOWN_AS = frozenset(
    {
        Cause.CUDA_LAUNCH_FAILURE, Cause.CUDA_ILLEGAL_ACCESS, Cause.DRIVER_NOT_READY, Cause.ENGINE_RPC_TIMEOUT, Cause.ENGINE_WATCHDOG,
        Cause.NCCL_TIMEOUT,
    }
)  # fmt: skip
"""What an engine says of a card or link that failed below it; only the kernel then tells of that."""
_NEVER_ALONE = frozenset({Cause.NCCL_INIT_FAILURE, Cause.START_TIMEOUT, Cause.CUDA_ILLEGAL_ACCESS})
"""Of these an unsure line tells that something failed below, or that somebody gave up waiting, and no more."""
_OF_ONE_REQUEST = frozenset({Cause.CUDA_OOM_PREFILL, Cause.CUDA_OOM_RUNTIME, Cause.KV_POOL_EXHAUSTED})
"""What may cost one request, and leave the engine as it was."""
NEAR_LINES = 30


@dataclass(frozen=True, slots=True)
class Doubt:
    """Something that speaks against being sure."""

    why: str
    grades: int = 1


def confidence_of(doubts: Sequence[Doubt]) -> Confidence:
    """HIGH less the grades of all doubts."""
    grades = sum(doubt.grades for doubt in doubts)
    return Confidence.HIGH if grades == 0 else Confidence.MEDIUM if grades == 1 else Confidence.LOW


def doubts_of(root: Event, verdict: Verdict, case: Case, catalogue: Catalogue) -> tuple[Doubt, ...]:
    """Why the verdict that stands on this root may be wrong."""
    if root.is_suspect:
        return (
            *_of_the_root(root, case),
            *_of_others(root, verdict),
            *_of_what_is_aside(root, case),
            *_of_what_is_unread(root, case, catalogue),
        )
    return (*_of_what_is_aside(root, case), *_of_good_health(root, case, catalogue))


def _of_the_root(root: Event, case: Case) -> Iterator[Doubt]:
    """What the line is worth."""
    if not root.sure:
        yield Doubt(root.note or "its root line can be read in another way", 2 if root.cause in _NEVER_ALONE else 1)
    elif root.tier == 4:
        yield Doubt("how long somebody waited does not tell for what")
    elif root.cause in _SHOWN_AS and root.source in (Source.ENGINE_LOG, Source.NVIDIA_SMI) and not _given(case, Source.KERNEL_LOG):
        yield Doubt("a card or link that fails shows itself in these words too, and no kernel log was given")
    if root.cause is Cause.DRIVER_NOT_READY and root.phase.serving:
        yield Doubt("it had served before: a card that is lost, reset or asleep shows itself so", 2)
    if root.sure and (other := same_words(root, case)) is not None:
        yield Doubt(other)
    if root.tier == 6:
        yield Doubt("its root line is a weak sign")
    elif root.cause in _BY_ABSENCE:
        yield Doubt("it rests on what is not on record, and that may only be missing from what was given")
        if not _given(case, Source.KERNEL_LOG, Source.SYSTEMD):
            yield Doubt("neither the kernel's log nor systemd's was given, where more would stand")
    elif root.source is Source.EXIT or root.tier == 5:
        yield Doubt("how a process ended does not tell why")
    yield from _of_another_host(root, case)
    yield from _of_long_ago(root, case)
    over = root.source is Source.KERNEL_LOG and any(boot.order > root.order for boot in case.named("boot"))
    if over and not _given(case, Source.ENGINE_LOG):
        yield Doubt("it stands in a boot that is over, and no engine's log tells that one ran then")
    if root.source is Source.EXIT and not _given(case, Source.ENGINE_LOG):
        yield Doubt("nothing of the engine's own log was given")
    yield from _of_no_end(root, case)
    later_s = _worked_for(root, case)
    if later_s > OUTLIVED_S and not case.dead_after(root):
        yield Doubt(f"the engine went on working for {later_s:.0f} s after it, and no line tells that it ended", 2)
    elif later_s > OUTLIVED_S and root.cause in _OF_ONE_REQUEST:
        yield Doubt("the engine went on working after it, and ended later of what no line tells", 2)


_OF_A_PROCESS = frozenset(
    {Cause.SEGFAULT_NATIVE, Cause.SIGILL_CPU, Cause.HOST_OOM, Cause.KILLED_UNKNOWN, Cause.EXTERNAL_SIGTERM, Cause.SD_WATCHDOG}
)
"""What strikes one process, which is then gone; a card may be lost beneath an engine that hangs."""


def _of_no_end(root: Event, case: Case) -> Iterator[Doubt]:
    """What others tell of an engine of which nothing else tells that it ended: nothing of its own was given, or that shows it well."""
    if root.source in ENGINE_SOURCES or root.source in (Source.EXIT, Source.PROBE) or root.name == "boot":  # with its host it just ends
        return
    named = is_known(root, case) or of_engine(str(root.fields.get("name") or root.text))
    nameless = root.cause in _OF_A_PROCESS and not named
    if nameless and not case.exit.known and not _given(case, Source.ENGINE_LOG):
        yield Doubt("its line names no engine, and nothing of an engine's own was given that would tell of an end")
    if not case.well_at_last:
        return
    later_s = case.lived_on_s(root)
    if later_s is not None and later_s > OUTLIVED_S:
        yield Doubt(f"the engine went on working for {later_s:.0f} s after it, and no line tells that it ended", 2)
    elif later_s is None and not is_known(root, case):
        sign = "the engine's log ends with a sign of life, no clock tells which was first, and nothing tells that it ended"
        yield Doubt(sign, 2 if nameless or (root.name == "xid" and root.cause in _SHOWN_AS and not named) else 1)


def _of_another_host(root: Event, case: Case) -> Iterator[Doubt]:
    """What the kernel or systemd of one machine says of an engine on another."""
    host = _host(root.evidence)
    if root.source is Source.ENGINE_LOG or not host:
        return
    engines = set(map(_host, case.lines_of(Source.ENGINE_LOG))) - {""}
    if engines and host not in engines:
        yield Doubt("it is of another machine than the engine's log", 2)  # names of hosts do not leave the box


def _host(item: Evidence) -> str:
    """Without its domain."""
    return str(item.data.get("host", "")).partition(".")[0].lower()


LONG_AGO_S = 6 * 3600.0
"""Logs are taken when an engine has failed: what stands so long before their end may be of another day's failure."""


def _of_long_ago(root: Event, case: Case) -> Iterator[Doubt]:
    """What the kernel or systemd said well before its log ends, where the engine's log has no clock to tell when that one failed."""
    if root.source not in (Source.KERNEL_LOG, Source.SYSTEMD) or root.evidence.time_s is None or not _given(case, Source.ENGINE_LOG):
        return
    if any(item.time_s is not None for item in case.lines_of(Source.ENGINE_LOG)):
        return
    later_s = max((distance_s(item, root.evidence) or 0.0 for item in case.lines_of(root.source)), default=0.0)
    if later_s > LONG_AGO_S:
        hours = later_s / 3600
        yield Doubt(
            f"it stands {hours:.0f} hours before the end of its log, and the engine's log has no clock to tell when that one failed"
        )


OUTLIVED_S = 60.0
"""What an engine dies of, it does not outlive by so long."""


def _worked_for(root: Event, case: Case) -> float:
    """Seconds from the root to the last answer below it in the same log; 0 where there is none. A root without a clock has at most that
    of the first line below it.
    """
    answers = (event for event in case.named("decode", "prefill", "traffic") if "GET /" not in event.text)  # a health check is none
    worked = [event for event in answers if event.source is root.source and event.order > root.order]
    if not worked:
        return 0.0
    timed = (event.evidence for event in worked if event.evidence.time_s is not None)
    since = root.evidence if root.evidence.time_s is not None else next(timed, root.evidence)
    return distance_s(worked[-1].evidence, since) or 0.0


def _of_others(root: Event, verdict: Verdict) -> Iterator[Doubt]:
    """Other suspects."""
    rival = next((event for event in verdict.rivals if event.sure or not root.sure), None)
    if rival is not None:
        yield Doubt(f"{_name(rival)} stands beside it, no less deep")
    deeper = next((event for event, _reason in verdict.outside if event.tier < root.tier), None)
    if deeper is not None:
        yield Doubt(f"{_name(deeper)} is deeper and stands outside the window of time, if the clocks are right")


def _of_what_is_aside(root: Event, case: Case) -> Iterator[Doubt]:
    """A deeper fault that is only taken not to be the engine's."""
    perhaps = next((event for event in case.aside if not event.sure and event.is_suspect and event.tier < root.tier), None)
    if perhaps is not None:
        yield Doubt(f"of {_name(perhaps)}: {perhaps.note}", 2 if root.cause in _SHOWN_AS else 1)


def _of_what_is_unread(root: Event, case: Case, catalogue: Catalogue) -> Iterator[Doubt]:
    """What else may be said in words that no pattern knows."""
    loud = unread(case.evidence, catalogue)
    below = next((item for _order, item in loud if item.source is Source.KERNEL_LOG and root.source is not item.source), None)
    near = next((item for order, item in loud if item.source is root.source and 0 < root.order - order <= NEAR_LINES), None)
    beside = next((item for _order, item in loud if item.source is Source.ENGINE_LOG and root.source is not item.source), None)
    if below is not None and root.tier > 0:
        yield Doubt(f"line {below.line} of the kernel's log sounds like trouble, and no pattern knows it", 2)
    elif near is not None:
        told_to_go = root.cause is Cause.EXTERNAL_SIGTERM and root.name == "death"  # as a parent tells its workers when a start fails
        yield Doubt(f"line {near.line} before it sounds like trouble, and no pattern knows it", 2 if told_to_go else 1)
    elif beside is not None and root.tier >= 3:
        yield Doubt(f"line {beside.line} of the engine's log sounds like trouble, and no pattern knows it")
    if root.tier >= 3 and root.source is not Source.KERNEL_LOG and breaks_off(case.evidence):
        yield Doubt("the engine's log breaks off inside a traceback")


def _of_good_health(root: Event, case: Case, catalogue: Catalogue) -> Iterator[Doubt]:
    """Of a verdict that nothing is wrong."""
    if root.note and not root.sure:
        yield Doubt(root.note)
    if case.stopped_by_us:
        return
    others = _given(case, Source.KERNEL_LOG, Source.SYSTEMD, Source.NVIDIA_SMI)
    perhaps = next((event for event in case.named("segfault_line") if event.kind is Kind.SYMPTOM and not event.sure), None)
    if perhaps is not None:
        yield Doubt(f"of line {perhaps.evidence.line} of the kernel's log: {perhaps.note}")
    if root.cause is Cause.OK_NORMAL and case.exit.code != 0:
        yield Doubt("how it ended is not on record, and a fault may stand behind what was given", 1 if others else 2)
    elif not case.has(*HEALTHY):
        yield Doubt("nothing shows the engine at work")
        if root.cause is not Cause.OK_DEGRADED and not _given(case, Source.ENGINE_LOG):
            yield Doubt("nothing of the engine's own log was given")
    elif root.cause is Cause.OK_BENIGN_WARNING and root.sure and case.exit.code != 0:
        yield Doubt("how it ended is not on record: harmless by itself, it may stand before what was not given")
    last = max((event.order for event in case.named(*HEALTHY)), default=-1)
    if any(order > last or abs(order - root.order) <= NEAR_LINES for order, item in unread(case.evidence, catalogue)):
        yield Doubt("words near it, or the last ones, sound like trouble, and no pattern knows them")


def _given(case: Case, *sources: Source) -> bool:
    return any(item.source in sources for item in case.evidence)


def _name(event: Event) -> str:
    return event.cause.label if event.cause is not None else event.name
