"""Where the evidence about the present engine life is laid out, from all sources, until a verdict is asked for."""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from appliance.core.causes import Cause
from appliance.core.diagnosis import Citation, Confidence, Diagnosis
from appliance.core.evidence import Evidence, Source
from appliance.core.requests import InflightRequest
from appliance.diagnosis.rules_own import deadline_words
from appliance.diagnosis.xid import meaning_of
from appliance.gpu.kernel_line import KernelLine
from appliance.supervisor.hang import Hang
from appliance.supervisor.kinship import Kinship
from appliance.supervisor.loading import Stall
from appliance.supervisor.log_ring import LogLine
from appliance.supervisor.process import ExitStatus

KERNEL_LINES = 2000
KERNEL_BEFORE_S = 600.0
"""Kernel lines from before the start of a life count where they tell of something that lasts: a card that was lost then explains why
this life could not start. An OOM kill or an application's Xid does not: it was the end of another life."""
GATEWAY_WINDOW_S = 30.0
GATEWAY_MAX = 50
FAST_HEAD, FAST_TAIL = 200, 800
FAST_CHARS = 500
SILENT_KERNEL = "(applianced has listened to the kernel's log: nothing in it is about this life of the engine)"
WINDOW_LINES = 150
"""Engine lines kept in an incident beside those that the verdict cites."""


class EvidenceDesk:
    """Collects; decides nothing."""

    def __init__(self, boot_id: str | None) -> None:
        self._boot_id = boot_id
        # Each with the moment on the clock that nobody sets: the wall clock may jump between two of them.
        self._kernel: deque[tuple[float, Evidence]] = deque(maxlen=KERNEL_LINES)
        self._gateway: deque[tuple[float, Evidence]] = deque(maxlen=GATEWAY_MAX)
        self._facts: list[Evidence] = []
        self._began_s = time.monotonic()
        self._kin: Kinship | None = None
        self._launch: tuple[Evidence, ...] = ()
        self.lost_before: frozenset[str] = frozenset()
        """Cards that this life never touched, because they were lost before it began."""
        self.inflight: tuple[InflightRequest, ...] = ()
        """What the gateway said last."""
        self.xids: Counter[int] = Counter()
        """Of the kernel's log, as far back as it was read."""

    def begin_life(self, lost: frozenset[str] = frozenset()) -> None:
        """A new engine: what was found out about the old one is not about it. Kernel and gateway go on."""
        self._facts.clear()
        self._began_s = time.monotonic()
        self._kin = None
        self._launch = ()
        self.lost_before = lost

    def know(self, kin: Kinship) -> None:
        """Whose processes this life's are: a kernel line about another one is not about it."""
        self._kin = kin

    def add_kernel(self, line: KernelLine, card: str | None = None) -> None:
        """As read; `card`: the address of the one that it is about."""
        data: dict[str, object] = {"sequence": line.sequence, "replayed": line.replayed} | ({"card": card} if card else {})
        xid = _XID.search(line.text)
        if xid is not None:
            self.xids[int(xid[1])] += 1
        now_s = time.monotonic()
        moment_s = min(line.uptime_s, now_s) if line.replayed and line.uptime_s is not None else now_s
        item = Evidence(Source.KERNEL_LOG, line.text, line.time_s, 0, self._boot_id, data)
        self._kernel.append((moment_s, item))
        if self._kin is not None and not line.replayed and "oom-kill:" in line.text:
            self._kin.look()  # while the dead are still to be seen

    def add_report(self, kind: str, requests: tuple[InflightRequest, ...]) -> None:
        """From the gateway: always what is in flight; and what clients saw, where that is news."""
        self.inflight = requests
        if kind != "traffic":
            text = {"client_disconnect": "a client closed its connection", "upstream_lost": "the engine's connection broke"}[kind]
            data = {"kind": kind, "requests": len(requests)}
            self._gateway.append((time.monotonic(), Evidence(Source.GATEWAY, text, time.time(), boot_id=self._boot_id, data=data)))

    def add_hang(self, hang: Hang, process_state: str) -> None:
        """Our own probes' finding."""
        stopped = "; the process was stopped by a signal (state T)" if process_state == "T" else ""
        data: dict[str, object] = {"kind": hang.silence.value, "silent_s": hang.silent_s, "running": hang.running}
        data["process_state"] = process_state
        self._fact(Source.PROBE, f"{hang}{stopped}", data)

    def add_stall(self, stall: Stall) -> None:
        """A load that does nothing any more."""
        stopped = "; it was stopped by a signal (state T)" if stall.is_stopped else ""
        data: dict[str, object] = {"kind": "hang", "silent_s": stall.silent_s, "process_state": stall.states}
        self._fact(Source.PROBE, f"{stall}{stopped}", data)

    def add_nvml_loss(self, address: str) -> None:
        """NVML's own word that a card is lost."""
        self._fact(Source.NVML, f"NVML says that the card at {address} is lost (GPU_IS_LOST)", {"kind": "lost", "card": address})

    def add_launch(self, launch: Mapping[str, object]) -> None:
        """What was configured for this life, so that a verdict can name the key; no values of arguments: they may be secrets."""
        text = f"applianced starts the {launch['backend']} engine: {launch['program']}"
        self._launch = (Evidence(Source.PROBE, text, time.time(), boot_id=self._boot_id, data={"kind": "launch", **launch}),)

    def add_spawn_failure(self, program: str, key: str, error: OSError) -> None:
        """The kernel did not execute it."""
        why = error.strerror or str(error)
        data: dict[str, object] = {"kind": "spawn", "program": program, "key": key, "why": why}
        self._fact(Source.PROBE, f"{program} cannot be started: {why}", data | ({"errno": error.errno} if error.errno else {}))

    def add_late_start(self, deadline_s: float) -> None:
        """supervisor.start_deadline_s has passed."""
        self._fact(Source.PROBE, deadline_words(deadline_s), {"kind": "late", "deadline_s": deadline_s})

    def add_stacks(self, lines: Sequence[str]) -> None:
        """What py-spy said of a hung engine."""
        for line in lines:
            self._fact(Source.STACK, line, {"kind": "py-spy"})

    def add_ending(self, text: str) -> None:
        """Its own /health said that it stops."""
        self._fact(Source.PROBE, text, {"kind": "ending"})

    def add_failed_start(self, text: str) -> None:
        """It did not prove itself."""
        self._fact(Source.PROBE, text, {"kind": "start"})

    def add_stop(self, signal_name: str, reason: str, asked_by: str) -> None:
        """A stop that was asked for. Our cleaning up after a failure does not belong here."""
        self._fact(
            Source.STOP_LEDGER,
            f"{asked_by} asked for {signal_name}: {reason}",
            {"signal": signal_name, "reason": reason, "asked_by": asked_by},
        )

    def add_exit(self, status: ExitStatus, ours: frozenset[str]) -> None:
        """How the leader ended. A death by our own signal says nothing about the cause, and is not laid out as if it did."""
        if status.signal in ours:
            self._fact(Source.EXIT, f"ended by applianced with {status.signal}", {"sent_by": "applianced"})
        elif status.signal is not None:
            self._fact(Source.EXIT, str(status), {"signal": status.signal})
        else:
            self._fact(Source.EXIT, str(status), {"code": status.code})

    def add_oom_kills(self, count: int) -> None:
        """memory.events of the life's cgroup."""
        if count > 0:
            self._fact(Source.CGROUP, f"the engine's cgroup counts {count} oom_kill", {"oom_kill": count})

    @property
    def kernel(self) -> list[Evidence]:
        """Its lines, whatever they are about."""
        return [item for _moment_s, item in self._kernel]

    def collect(self, lines: Sequence[LogLine]) -> list[Evidence]:
        """Everything, in the order of time within each source."""
        log = [Evidence(Source.ENGINE_LOG, line.text, line.time_s, line.number, self._boot_id) for line in lines]
        kernel = [self._attributed(item) for moment_s, item in self._kernel if self._concerns(moment_s, item)] or self._silence()
        since_s = max(time.monotonic() - GATEWAY_WINDOW_S, self._began_s)
        gateway = [item for moment_s, item in self._gateway if moment_s >= since_s]
        return [*log, *kernel, *gateway, *self._facts, *self._launch]

    def _silence(self) -> list[Evidence]:
        """A kernel's log that was listened to and says nothing is evidence: it is not the same as one that nobody had."""
        if not self._kernel:
            return []
        return [Evidence(Source.KERNEL_LOG, SILENT_KERNEL, time.time(), boot_id=self._boot_id, data={"silent": True})]

    def _attributed(self, item: Evidence) -> Evidence:
        """With the word whether it names a process of this life, where that can be told."""
        kin = self._kin.of_engine(item.text) if self._kin is not None and _names_a_process(item.text) else None
        return item if kin is None else replace(item, data={**item.data, "of_engine": kin})

    def _concerns(self, moment_s: float, item: Evidence) -> bool:
        """Whether a kernel line may be about this life: not about a card that it never had, and said in its time or still true."""
        card = item.data.get("card")
        if card in self.lost_before:
            return False
        if moment_s >= self._began_s:
            return True
        unclear = card is None and bool(self.lost_before) and "NVRM" in item.text
        return not unclear and moment_s >= self._began_s - KERNEL_BEFORE_S and _lasts(item.text)

    def _fact(self, source: Source, text: str, data: dict[str, object]) -> None:
        self._facts.append(Evidence(source, text, time.time(), boot_id=self._boot_id, data=data))


# INFO: task python3:3310 blocked for more than 241 seconds.
_STUCK = "blocked for more than"
_XID = re.compile(r"NVRM: Xid \([^)]*\): (\d+)")


def _names_a_process(text: str) -> bool:
    return any(
        words in text for words in ("oom-kill:", "ill process ", "illed process ", "reaped process", "segfault at", "Xid", "traps: ")
    )


def _lasts(text: str) -> bool:
    """Whether what a kernel line tells of outlives the engine that it happened to."""
    xid = _XID.search(text)
    if xid is not None:
        return meaning_of(int(xid[1])).lasting
    return "NVRM" in text or _STUCK in text


def brief(evidence: Sequence[Evidence]) -> list[Evidence]:
    """What the fast verdict reads: the first and the last engine lines, none of them endless, and everything else.

    A log that repeats one long complaint thousands of times may not delay the restart by seconds.
    """
    engine = [item for item in evidence if item.source is Source.ENGINE_LOG]
    others = [item for item in evidence if item.source is not Source.ENGINE_LOG]
    chosen = engine if len(engine) <= FAST_HEAD + FAST_TAIL else [*engine[:FAST_HEAD], *engine[-FAST_TAIL:]]
    return [item if len(item.text) <= FAST_CHARS else replace(item, text=item.text[:FAST_CHARS]) for item in [*chosen, *others]]


def window(evidence: Sequence[Evidence], diagnosis: Diagnosis) -> tuple[Evidence, ...]:
    """What an incident keeps: the last engine lines, the cited ones wherever they are, and every fact of another source."""
    cited = {(link.citation.source, link.citation.line) for link in diagnosis.chain if link.citation.line}
    if diagnosis.root is not None:
        cited.add((diagnosis.root.source, diagnosis.root.line))
    last = max((item.line for item in evidence if item.source is Source.ENGINE_LOG), default=0)
    return tuple(
        item
        for item in evidence
        if item.source is not Source.ENGINE_LOG or item.line > last - WINDOW_LINES or (item.source, item.line) in cited
    )


def unasked(diagnosis: Diagnosis, evidence: Sequence[Evidence]) -> Diagnosis:
    """The verdict on a death that our stop ledger knows nothing of: nothing about it is in order.

    A log alone cannot tell a stop that was asked for from one that was not; the ledger can.
    """
    if not diagnosis.cause.is_ok:
        return diagnosis
    ending = next((item for item in evidence if item.source is Source.PROBE and item.data.get("kind") == "ending"), None)
    if diagnosis.cause is Cause.OK_SHUTDOWN or ending is not None:
        root = Citation(ending.source, ending.line, ending.text, ending.time_s) if ending is not None else diagnosis.root
        sentence = "The engine was told to stop and left in order, and neither we nor a person on our control socket had asked for it."
        cure = "Find out who sends signals to the engine (an operator, an orchestrator, another service manager)."
        return replace(
            diagnosis, cause=Cause.EXTERNAL_SIGTERM, confidence=Confidence.MEDIUM, sentence=sentence, root=root, remedies=(cure,)
        )
    sentence = "The engine ended although nobody had asked it to, and no line of the evidence carries a cause."
    return replace(diagnosis, cause=Cause.UNKNOWN, confidence=Confidence.LOW, sentence=sentence, remedies=())
