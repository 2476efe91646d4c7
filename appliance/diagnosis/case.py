"""A case: the folded events of one engine life and the questions that rules ask of them."""

from __future__ import annotations

import bisect
import functools
import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.causality import CLOCK_SLACK_S, ZONE_UNKNOWN_S, distance_s
from appliance.diagnosis.events import Event
from appliance.diagnosis.stops import Stop, of_engine, of_the_system, stops_of
from appliance.diagnosis.timeline import ENGINE_SOURCES

SIGNALS = {
    1: "SIGHUP", 2: "SIGINT", 3: "SIGQUIT", 4: "SIGILL", 5: "SIGTRAP", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL",
    11: "SIGSEGV", 13: "SIGPIPE", 14: "SIGALRM", 15: "SIGTERM", 24: "SIGXCPU", 25: "SIGXFSZ", 31: "SIGSYS",
}  # fmt: skip
HEALTHY = ("ready", "traffic", "decode", "prefill")
"""Signs of life."""
OWN_FAULTS = ("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
"""Signals that a process is not sent but earns."""
_GO_WORDS = {
    "KILLED": "SIGKILL", "TERMINATED": "SIGTERM", "INTERRUPT": "SIGINT", "HANGUP": "SIGHUP", "ABORTED": "SIGABRT",
    "SEGMENTATION FAULT": "SIGSEGV", "BUS ERROR": "SIGBUS", "ILLEGAL INSTRUCTION": "SIGILL", "QUIT": "SIGQUIT",
}  # fmt: skip
_NUMBERS = {name: number for number, name in SIGNALS.items()}
_ENGINE_NAME = re.compile(
    r"^(?:python|pt_main|pt_|vllm|VLLM|sglang|ray|llama|ollama|text-generation|text_generation|tgi|uvicorn|gunicorn|"
    r"torch|nccl|cuda|koboldcpp|tabby|exllama|aphrodite|lmdeploy|tritonserver|trtllm|mpirun|EngineCore|APIServer|multiprocess|cache_mgr|"
    r"ik_llama|server$|main$|app$|conda|uv$|ktransformers|applianced|appliance|engine)",
    re.IGNORECASE,
)
_CARD = re.compile(r"\b(?:nvidia|nouveau|amdgpu|xe|NVRM)\b.{0,40}?\b([0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})\b")
UNIT = re.compile(r"(?P<unit>[\w@.:\\-]{1,120}\.service): (?:[Mm]ain process exited|Failed with result)")
_LOG_PID = re.compile(r"pid(?<!\wpid)[=: ]+(\d{2,8})|PID(?<!\wPID) (\d{2,8})|\[(\d{3,8})\]")


def signal_of(value: object) -> str | None:
    """The signal's name for 9, -9, 137, "9", "KILL", "SIGKILL"; None where it is no signal."""
    if isinstance(value, bool) or value is None:
        return None
    text = str(value).strip().upper()
    if text.removeprefix("-").isdecimal():
        number = abs(int(text))
        return SIGNALS.get(number - 128 if number > 128 else number)
    if text in _GO_WORDS:
        return _GO_WORDS[text]
    name = text if text.startswith("SIG") else f"SIG{text}"
    return name if name in _NUMBERS else None


def signal_of_code(value: object) -> str | None:
    """The signal behind an exit code: negative (Python's way) or above 128 (the shell's); 1 is no signal."""
    text = str(value).strip()
    if not text.removeprefix("-").isdecimal() or 0 <= int(text) <= 128:
        return None
    return signal_of(text)


@dataclass(frozen=True, slots=True)
class Exit:
    """How the process ended: a signal, or a code; both None where nobody says."""

    signal: str | None = None
    code: int | None = None
    evidence: Evidence | None = None

    @property
    def known(self) -> bool:
        return self.signal is not None or self.code is not None


def exit_of(evidence: Evidence) -> Exit:
    """`data` of EXIT evidence, with 137, -9 and "SIGKILL" meaning the same."""
    signal = signal_of(evidence.data.get("signal"))
    code = evidence.data.get("code")
    if not isinstance(code, int) or isinstance(code, bool):
        return Exit(signal, None, evidence)
    if signal is None and (code < 0 or code > 128):
        signal = signal_of(code)
    return Exit(signal, code if signal is None else None, evidence)


@dataclass(frozen=True)
class Case:
    """All that rules may look at."""

    events: Sequence[Event]
    evidence: Sequence[Evidence]
    exit: Exit
    stopped_by_us: bool
    engine: str | None
    aside: tuple[Event, ...] = ()
    """Events of boots that were not the engine's (`boots.py`), and what it outlived (`outlived.py`); rules do not see them."""

    @functools.cached_property
    def _index(self) -> dict[str, list[Event]]:
        """The events by name, each list in order."""
        index: dict[str, list[Event]] = {}
        for event in sorted(self.events, key=lambda event: event.order):
            index.setdefault(event.name, []).append(event)
        return index

    @functools.cached_property
    def engine_pids(self) -> frozenset[int]:
        """Process ids that the engine's own lines mention."""
        return pids_in(self.evidence)

    @functools.cached_property
    def cards(self) -> frozenset[str]:
        """Places on the bus, without the function, where the kernel's log names a driver of cards."""
        found = (_CARD.search(item.text) for item in self.lines_of(Source.KERNEL_LOG))
        return frozenset(match[1].lower() for match in found if match is not None)

    @functools.cached_property
    def engine_units(self) -> frozenset[str]:
        """systemd's units that may be the engine's: those whose main process ended, and of these the ones with an engine's name."""
        ended = (UNIT.search(event.text) for event in self.named("unit_down") if event.source is Source.SYSTEMD)
        units = frozenset(match["unit"] for match in ended if match is not None and not of_the_system(match["unit"]))
        return frozenset(filter(of_engine, units)) or units

    @functools.cached_property
    def stops(self) -> tuple[Stop, ...]:
        """Stops that somebody asked systemd for, of the engine as far as can be told."""
        heard = self.has("sigterm") or self.exit.signal in ("SIGTERM", "SIGINT") or not any(self.lines_of(Source.ENGINE_LOG))
        return tuple(stop for stop in stops_of(self.events) if stop.certain or (heard and self.exit.signal not in OWN_FAULTS))

    def named(self, *names: str) -> Iterator[Event]:
        """The events of these names, in order."""
        lists = [found for name in names if (found := self._index.get(name))]
        return iter(lists[0]) if len(lists) == 1 else heapq.merge(*lists, key=lambda event: event.order)

    def first(self, *names: str) -> Event | None:
        """The first event of these names."""
        return next(self.named(*names), None)

    def has(self, *names: str) -> bool:
        """Whether any event of these names happened."""
        return any(name in self._index for name in names)

    def last_before(self, event: Event, *names: str) -> Event | None:
        """The latest event of these names that stands before this one in its source."""
        earlier = list(self.named(*names))
        end = bisect.bisect_left(earlier, event.order, key=lambda other: other.order)
        return next((other for other in reversed(earlier[:end]) if other.source is event.source), None)

    def first_after(self, event: Event, *names: str) -> Event | None:
        """The first event of these names that stands after this one in its source."""
        return next((other for other in self.named(*names) if other.order > event.order and other.source is event.source), None)

    def near(self, event: Event, name: str, *, before: int, after: int) -> bool:
        """Whether an event of this name stands within so many lines of this one, in the same source."""
        found = self._index.get(name, [])
        start = bisect.bisect_left(found, event.order - before, key=lambda other: other.order)
        end = bisect.bisect_right(found, event.order + after, key=lambda other: other.order)
        return any(other.source is event.source for other in found[start:end])

    def served_after(self, event: Event) -> bool:
        """The engine went on answering after this event."""
        return any(other.name in ("decode", "prefill", "traffic") and other.order > event.order for other in self.events)

    def dead_after(self, event: Event) -> bool:
        """Something below this event, and not the event itself in other words, says that the engine is gone."""
        return any(other.fatal and other.order > event.order and other.cause is not event.cause for other in self.events)

    def ends_in(self, *names: str) -> bool:
        """Whether an event of these names stands in the engine's log after its last sign of life."""
        return bool(self.last_words(*names))

    def last_words(self, *names: str) -> list[Event]:
        """The events of these names in the engine's log after its last sign of life."""
        last = max((event.order for event in self.named(*HEALTHY)), default=-1)
        return [event for event in self.named(*names) if event.order > last and event.source in ENGINE_SOURCES]

    @functools.cached_property
    def dead(self) -> bool:
        """Something says that the engine is gone in a way nobody wants."""
        return any(event.fatal for event in self.events)

    @functools.cached_property
    def well_at_last(self) -> bool:
        """A sign of life is the engine's last word, and no source tells that it ended: whose the trouble is has to be asked."""
        ended = self.exit.signal is not None or self.exit.code not in (None, 0) or self.stopped_by_us
        healthy = [event for event in self.named(*HEALTHY) if event.source in ENGINE_SOURCES]
        if ended or not healthy or any(map(self._is_unit_down, self.named("unit_down"))):
            return False
        own = [event for event in self.events if event.source in ENGINE_SOURCES]
        return not any(event.fatal or (event.order > healthy[-1].order and _speaks_of_an_end(event)) for event in own)

    def _is_unit_down(self, event: Event) -> bool:
        """The unit is an engine's by its name, and no clock shows that the engine was up again after that."""
        return of_engine(event.text) and (self.lived_on_s(event) or 0.0) <= CLOCK_SLACK_S

    def lived_on_s(self, event: Event) -> float | None:
        """Seconds from what another source tells to the engine's last sign of life; None where no clock can tell."""
        alive = (other for other in reversed(self.events) if other.name in HEALTHY and other.source in ENGINE_SOURCES)
        last = next((other.evidence for other in alive if other.evidence.time_s is not None), None)
        later_s = None if last is None else distance_s(last, event.evidence)
        if last is None or later_s is None:
            return None
        same_zone = bool(last.data.get("zone_unknown")) is bool(event.evidence.data.get("zone_unknown"))
        return later_s if same_zone or abs(later_s) > ZONE_UNKNOWN_S else None

    def outlived(self, event: Event) -> bool:
        """The engine worked on after what another source tells, and nothing tells that it ended."""
        return self.well_at_last and (self.lived_on_s(event) or 0.0) > CLOCK_SLACK_S

    @functools.cached_property
    def end(self) -> Evidence | None:
        """When the engine ended, as nearly as is known: its first fatal line, its exit, else its last line."""
        engine = [event for event in self.events if event.source in ENGINE_SOURCES and event.evidence.time_s is not None]
        fatal = next((event.evidence for event in engine if event.fatal), None)
        exited = self.exit.evidence if self.exit.evidence is not None and self.exit.evidence.time_s is not None else None
        return fatal or exited or (engine[-1].evidence if engine else None)

    @functools.cached_property
    def served(self) -> bool:
        """The engine was up at some time of this life."""
        return any(event.phase.serving for event in self.events if event.source in ENGINE_SOURCES)

    def lines_of(self, source: Source) -> Iterator[Evidence]:
        """The raw evidence of one source."""
        return (item for item in self.evidence if item.source is source)


_LAST_WORDS = ("exception", "wrapper", "runtime_failed", "startup_failed", "kill_tree", "sigquit", "sigterm", "shutdown", "death")


def _speaks_of_an_end(event: Event) -> bool:
    return event.is_suspect or event.name in _LAST_WORDS


def is_known(event: Event, case: Case) -> bool:
    """The line names a process that is known to be the engine's."""
    pid = str(event.fields.get("pid") or "")
    return event.evidence.data.get("of_engine") is True or (pid.isdecimal() and int(pid) in case.engine_pids)


def engine_like(name: object) -> bool:
    """Whether a process name (cut to 15 characters by the kernel) may be one of an engine's; unknown names may."""
    text = str(name or "").strip("'\" <>()")
    return text in ("", "unknown") or _ENGINE_NAME.match(text) is not None


def pids_in(evidence: Sequence[Evidence]) -> frozenset[int]:
    """Process ids that the engine's own lines mention (only the first and last few hundred lines are read)."""
    lines = [item.text for item in evidence if item.source is Source.ENGINE_LOG]
    sample = lines if len(lines) <= 800 else lines[:400] + lines[-400:]
    return frozenset(int(next(filter(None, match.groups()))) for text in sample for match in _LOG_PID.finditer(text[:400]))


def ours(event: Event, case: Case) -> bool:
    """Whether the process that a kernel line names may be the engine's; whoever started it may have told (`of_engine`)."""
    told = event.evidence.data.get("of_engine")
    if isinstance(told, bool):
        return told
    pid = str(event.fields.get("pid") or "")
    return engine_like(event.fields.get("name")) or (pid.isdecimal() and int(pid) in case.engine_pids)
