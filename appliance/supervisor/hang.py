"""When silence is a hang: a pure judgement over the answers to our probes.

Not a fixed time-out: a saturated engine and a long honest prefill answer slowly and are healthy (house rule from peers whose
naive probes restarted healthy nodes). What counts:
* requests are running and `progress` (decode steps and prefill chunks) stands still for longer than this engine's own
  recent steps explain: between the floor and the ceiling;
* no probe is answered at all: after the floor where the process uses no CPU either (stopped, dead-locked, deaf), after the
  ceiling where it computes (it may hold its loop for an honest while).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

STEP_FACTOR = 8.0
"""A step this much longer than the slowest recent one is not explained by it."""
STEP_MEMORY = 0.9
"""The slowest recent step fades by this factor with each later one, so that one old outlier does not excuse silence for ever."""
MARGIN_S = 0.05
CPU_BUSY_SHARE = 0.05
"""Below this share of one CPU a process is not computing."""


class Silence(Enum):
    """Which rule spoke. The value is the `kind` of the evidence."""

    PROGRESS = "progress"
    HEALTH = "hang"
    CANARY = "canary"


@dataclass(frozen=True, slots=True)
class HangLimits:
    """supervisor.hang_floor_s and hang_ceiling_s."""

    floor_s: float
    ceiling_s: float


@dataclass(frozen=True, slots=True)
class Hang:
    """The verdict, with the numbers that it stands on."""

    silence: Silence
    silent_s: float
    allowed_s: float
    running: int
    detail: str

    def __str__(self) -> str:
        if self.silence is Silence.PROGRESS:
            return (
                f"no progress for {self.silent_s:.1f} s with {self.running} requests running "
                f"(its recent steps explain {self.allowed_s:.1f} s)"
            )
        if self.silence is Silence.CANARY:
            return f"no token for {self.silent_s:.1f} s: {self.detail}"
        return f"no answer to its probe for {self.silent_s:.1f} s (allowed {self.allowed_s:.1f} s): {self.detail}"


@dataclass(frozen=True, slots=True)
class Watch:
    """What is remembered between probes. Immutable: each observation makes the next one.

    Attributes:
        answered_s: when a probe was answered last.
        moved_s: when progress was seen to move, or nothing ran, last.
        looked_s, cpu_s: when we looked last, answered or not, and the CPU time that the process had used by then.
        step_s: the slowest recent step, fading.
    """

    answered_s: float
    moved_s: float
    looked_s: float
    cpu_s: float
    progress: int | None = None
    running: int = 0
    step_s: float = 0.0


def begin(now_s: float, cpu_s: float) -> Watch:
    """A life that just became ready."""
    return Watch(answered_s=now_s, moved_s=now_s, looked_s=now_s, cpu_s=cpu_s)


def answered(watch: Watch, now_s: float, cpu_s: float, progress: int | None, running: int) -> Watch:
    """A probe was answered. `progress` is None where the engine does not count."""
    moved = progress is None or progress != watch.progress or running == 0
    step_s = watch.step_s
    if moved and progress is not None and watch.progress is not None and watch.running > 0 and progress > watch.progress:
        step_s = max((now_s - watch.moved_s) / (progress - watch.progress), watch.step_s * STEP_MEMORY)
    return Watch(now_s, now_s if moved else watch.moved_s, now_s, cpu_s, progress, running, step_s)


def missed(watch: Watch, now_s: float, cpu_s: float) -> Watch:
    """A probe was not answered, and was judged."""
    return replace(watch, looked_s=now_s, cpu_s=cpu_s)


def judge_progress(watch: Watch, now_s: float, limits: HangLimits) -> Hang | None:
    """After an answer: requests run and nothing comes out."""
    if watch.running == 0 or watch.progress is None:
        return None
    allowed_s = min(limits.ceiling_s, max(limits.floor_s, STEP_FACTOR * watch.step_s))
    silent_s = now_s - watch.moved_s
    return Hang(Silence.PROGRESS, silent_s, allowed_s, watch.running, "") if silent_s > allowed_s else None


def patience_s(watch: Watch, now_s: float, limits: HangLimits, timeout_s: float) -> float:
    """How long to wait for the next answer: no longer than until its absence would be judged, so that the verdict is not late."""
    until_floor_s = watch.answered_s + limits.floor_s - now_s
    return min(timeout_s, until_floor_s + MARGIN_S) if until_floor_s > 0 else timeout_s


def is_busy(watch: Watch, now_s: float, cpu_s: float) -> bool:
    """Whether it has computed since we looked last."""
    return cpu_s - watch.cpu_s > CPU_BUSY_SHARE * (now_s - watch.looked_s)


def judge_silence(watch: Watch, now_s: float, cpu_s: float, limits: HangLimits, detail: str) -> Hang | None:
    """After a probe that was not answered. Busy is what it did since we looked last, not what it did before it fell silent."""
    silent_s = now_s - watch.answered_s
    busy = is_busy(watch, now_s, cpu_s)
    allowed_s = limits.ceiling_s if busy else limits.floor_s
    words = f"{detail}; it {'computes' if busy else 'uses no CPU'}"
    return Hang(Silence.HEALTH, silent_s, allowed_s, watch.running, words) if silent_s > allowed_s else None
