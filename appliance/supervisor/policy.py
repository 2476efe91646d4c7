"""What to do about a diagnosis: one pure function and one table, a row a cause. docs/failures.md prints this table.

Which setting comes next is not decided here: the planner works out, for the cause and from the rung that failed, which ones help, the
cheapest first (`offers`), and the first of them that is left is taken. Where nothing could be worked out there are the fixed steps of the
ladder, of which a cause takes the next one that may help (`Better`).

The rules over all rows:
* A setting that failed is not offered again further down, whatever it failed of, and causes that ask for opposite moves are met in another
  dimension: nothing goes in a circle, it ends on a rung that serves, or PARKED.
* The same rung is not tried a third time for the same cause, except where no rung can be to blame (OUTSIDE, WAIT), and on the
  last rung after a life that served for FAIR_TRIAL_S and failed by chance: an endpoint that is up between crashes is not parked.
* Starts have a budget of their own, whatever the causes were; one that only has to wait has a longer one (WAITED_STARTS).
* A runtime that has never served and fails its start is left for the one that served last, unless the machine or the model is to blame.
* A rung whose proof run was refused is left at once, whatever it is called: nothing broke, and nothing is gained by waiting.
* The first restart is immediate, the next ones wait: first, twice, four times ... up to the longest wait, with jitter.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace

from appliance.core.action import Action, ActionKind
from appliance.core.causes import Cause
from appliance.core.diagnosis import Diagnosis
from appliance.core.plan import Rung
from appliance.core.units import format_duration
from appliance.planner.features import CURRENT_RUNTIME
from appliance.supervisor.history import Failure, History, Phase
from appliance.supervisor.settings import MachineSettings

JITTER_SHARE = 0.25
"""A wait grows by up to this share: boxes that lost the same thing at once do not come back at once."""


FAIR_TRIAL_S = 300.0
"""Five minutes of service: people have more from a restart than from an endpoint that waits for a person."""
WAITED_STARTS = 11
"""Failed starts in a row before a cause that may pass by itself parks too: with the default back-off about four minutes of waiting, what
the gateway has its clients wait (resume.max_wait_s)."""
_ARTICLES = ("The", "A", "An", "No")
"""First words of a verdict that lose their capital inside a sentence; CUDA and Xid keep theirs."""


class Response(enum.Enum):
    """How a cause is met."""

    SAFER = "safer"
    """The setting asks for too much: a safer rung at once."""
    SAME_THEN_SAFER = "same_then_safer"
    """It may have been chance: the same rung once more, then a safer one."""
    OUTSIDE = "outside"
    """Nothing in our settings did it: the same rung, as often as needed."""
    WAIT = "wait"
    """Something else must change and may do so by itself: the same rung after a wait."""
    WAIT_FOR_GPU = "wait_for_gpu"
    """As WAIT, by watching the driver come up."""
    LOST_CARD = "lost_card"
    """The remaining cards if a rung fits them, else a person."""
    PARK = "park"
    """Trying again cannot help: a person is needed."""


_PASSING = (Response.WAIT, Response.WAIT_FOR_GPU)


@dataclass(frozen=True, slots=True)
class Better:
    """Which of the fixed steps may help against a cause.

    Attributes:
        words: what such a rung has that the present one has not, for docs/failures.md.
        than: whether the second rung has it, compared with the first.
        needed: a rung without it is no help at all; else any safer one will do where none has it.
    """

    words: str
    than: Callable[[Rung, Rung], bool]
    needed: bool = False


def _less_prefill(now: Rung, then: Rung) -> bool:
    return (
        then.prefill_chunk_tokens < now.prefill_chunk_tokens or then.mem_fraction < now.mem_fraction or then.max_running < now.max_running
    )


def _less_context(now: Rung, then: Rung) -> bool:
    return then.context_length_tokens < now.context_length_tokens or then.mem_fraction > now.mem_fraction


def _more_off(now: Rung, then: Rung) -> bool:
    return then.features_off > now.features_off or then.tensor_parallel < now.tensor_parallel


_ANY = Better("asks for less", lambda now, then: then.index > now.index)
_LESS_PREFILL = Better("has a smaller prefill chunk, a lower memory fraction or fewer sequences", _less_prefill)
_LESS_CONTEXT = Better("has a shorter context or a higher memory fraction", _less_context)
_FEWER_SEQUENCES = Better("decodes fewer sequences together", lambda now, then: then.max_running < now.max_running)
_MORE_OFF = Better("has more of the engine's features switched off, or fewer cards", _more_off)
_MUST_BE_OFF = Better(_MORE_OFF.words, _more_off, needed=True)


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table."""

    response: Response
    better: Better = _ANY


_CHANCE = Row(Response.SAME_THEN_SAFER)
_OUTSIDE = Row(Response.OUTSIDE)
_PERSON = Row(Response.PARK)

TABLE: dict[Cause, Row] = {
    Cause.CUDA_OOM_PREFILL: Row(Response.SAFER, _LESS_PREFILL),
    Cause.CUDA_OOM_RUNTIME: Row(Response.SAFER, _LESS_PREFILL),
    Cause.CUDA_OOM_STARTUP: Row(Response.SAFER),
    Cause.KV_POOL_TOO_SMALL: Row(Response.SAFER, _LESS_CONTEXT),
    Cause.KV_POOL_EXHAUSTED: Row(Response.SAFER, _FEWER_SEQUENCES),
    Cause.VRAM_HELD_BY_OTHER: Row(Response.WAIT),
    # It may be another program that took the memory: once more, then ask for less.
    Cause.HOST_OOM: Row(Response.SAME_THEN_SAFER, _LESS_PREFILL),
    Cause.KILLED_UNKNOWN: _OUTSIDE,
    Cause.CUDA_ILLEGAL_ACCESS: _CHANCE,
    Cause.CUDA_DEVICE_ASSERT: _CHANCE,
    Cause.CUDA_LAUNCH_FAILURE: _CHANCE,
    Cause.CUBLAS_ERROR: _CHANCE,
    Cause.GPU_HANG_RC: Row(Response.SAFER, _MORE_OFF),
    # The transport never worked: the same setting would hang again.
    Cause.NCCL_P2P_HANG: Row(Response.SAFER, _MORE_OFF),
    Cause.NCCL_TIMEOUT: _CHANCE,
    Cause.NCCL_INIT_FAILURE: _CHANCE,
    Cause.SHM_TOO_SMALL: _PERSON,
    # The same setting would reset the machine again.
    Cause.P2P_UNSAFE: Row(Response.SAFER, _MUST_BE_OFF),
    Cause.ENGINE_WATCHDOG: _CHANCE,
    Cause.ENGINE_RPC_TIMEOUT: _CHANCE,
    # The next start finds files read and kernels compiled; how many there may be, supervisor.start_failures_max says.
    Cause.START_TIMEOUT: _OUTSIDE,
    Cause.SEGFAULT_NATIVE: _CHANCE,
    Cause.SIGILL_CPU: _PERSON,
    Cause.EXTERNAL_SIGTERM: _OUTSIDE,
    Cause.CLIENT_DISCONNECT_CRASH: _CHANCE,
    Cause.GPU_OFF_BUS: Row(Response.LOST_CARD),
    Cause.GPU_MCU_HALT: Row(Response.LOST_CARD),
    Cause.GSP_TIMEOUT: Row(Response.LOST_CARD),
    Cause.ECC_UNCORRECTABLE: Row(Response.LOST_CARD),
    Cause.NVLINK_ERROR: Row(Response.LOST_CARD),
    Cause.PCIE_ERROR: Row(Response.LOST_CARD),
    Cause.IOMMU_FAULT: _PERSON,
    Cause.GPU_NEEDS_RESET: Row(Response.LOST_CARD),
    Cause.GPU_UNKILLABLE_PROCESS: Row(Response.LOST_CARD),
    Cause.HOST_POWER_RESET: _OUTSIDE,
    Cause.DRIVER_LIB_MISMATCH: _PERSON,
    Cause.DRIVER_TOO_OLD: _PERSON,
    Cause.DRIVER_NOT_READY: Row(Response.WAIT_FOR_GPU),
    Cause.CONTAINER_LOST_GPU: _PERSON,
    Cause.PORT_IN_USE: Row(Response.WAIT),
    Cause.MODEL_MISSING: _PERSON,
    Cause.MODEL_CORRUPT: _PERSON,
    Cause.HF_DOWNLOAD: Row(Response.WAIT),
    Cause.TEMPLATE_ERROR: _PERSON,
    Cause.UNSUPPORTED_ARCH: _PERSON,
    Cause.DISK_FULL: Row(Response.WAIT),
    Cause.FD_EXHAUSTED: _CHANCE,
    Cause.ENGINE_CONFIG: _PERSON,
    Cause.BAD_NUMBERS: _CHANCE,
    Cause.SD_WATCHDOG: _OUTSIDE,
    Cause.SD_START_LIMIT: _PERSON,
    Cause.SD_STOP_TIMEOUT: _OUTSIDE,
    Cause.SUPERVISOR_DIED: _OUTSIDE,
    # The engine is gone and nothing points to a crash: the service still has to come back.
    Cause.OK_NORMAL: _OUTSIDE,
    Cause.OK_SHUTDOWN: _OUTSIDE,
    Cause.OK_CLIENT_DISCONNECT: _OUTSIDE,
    Cause.OK_CLIENT_ERROR: _OUTSIDE,
    Cause.OK_BENIGN_WARNING: _OUTSIDE,
    Cause.OK_DEGRADED: _OUTSIDE,
    Cause.UNKNOWN: _CHANCE,
}


_NOT_THE_RUNTIME = frozenset(
    (
        *(cause for cause, row in TABLE.items() if row.response in (*_PASSING, Response.LOST_CARD)),
        *(cause for cause, row in TABLE.items() if row.response is Response.OUTSIDE and cause is not Cause.START_TIMEOUT),
        Cause.MODEL_MISSING, Cause.MODEL_CORRUPT, Cause.SHM_TOO_SMALL, Cause.IOMMU_FAULT, Cause.CONTAINER_LOST_GPU, Cause.SD_START_LIMIT,
    )
)  # fmt: skip
"""Another runtime would meet the same."""


def decide(
    diagnosis: Diagnosis,
    history: History,
    ladder: tuple[Rung, ...],
    settings: MachineSettings,
    failure: Failure,
    *,
    jitter: float = 0.0,
    cards_left: int | None = None,
    offers: tuple[Rung, ...] | None = None,
) -> Action:
    """The action for an engine that is gone.

    Args:
        diagnosis: why.
        history: with this failure already counted (`History.with_failure`); `history.rung` is the rung that failed.
        ladder: every rung, in order; index 0 is what the owner configured.
        offers: the rungs that help against this cause, worked out from the one that failed, the cheapest first; None: nobody could work
            them out, and what stands below on the ladder is all there is.
        failure: whether the start failed or the service broke, and whether somebody did it from outside.
        jitter: a random number in [0, 1).
        cards_left: that can still be used; None where nobody knows which one is lost.
    """
    if failure.refused and (rung := rung_for_refused(history, ladder, offers)) is not None:
        return _onto(rung, diagnosis, 0.0) if history.climbed_from is None else _fall_back(diagnosis, rung, 0.0)
    if _is_the_runtime(diagnosis.cause, failure, history, ladder[history.rung]) and history.start_failures < settings.start_failures_max:
        return _roll_back(diagnosis, history, ladder[history.rung], failure.runtime)
    row = _OUTSIDE if failure.outside else TABLE[diagnosis.cause]
    if row.response is Response.PARK:
        return _park(diagnosis, "")
    if failure.phase is Phase.START and (spent := _spent_starts(row.response, history, settings)):
        return _park(diagnosis, spent)
    if row.response is Response.LOST_CARD:
        return _use_remaining(diagnosis, history, ladder, cards_left, offers)
    if row.response in _PASSING:
        delay_s = max(settings.backoff_first_s, backoff_s(history.failures, settings, jitter))
        return _same(ActionKind.WAIT, diagnosis, ladder[history.rung], delay_s)
    delay_s = backoff_s(history.failures, settings, jitter)
    if row.response is not Response.OUTSIDE and history.climbed_from is not None:
        return _fall_back(diagnosis, ladder[history.climbed_from], delay_s)
    chance = row.response is Response.SAME_THEN_SAFER and _may_be_chance(diagnosis, history, ladder, failure)
    if row.response is Response.OUTSIDE or chance:
        return _same(ActionKind.RESTART_SAME, diagnosis, ladder[history.rung], delay_s)
    lasting = row.response is Response.SAME_THEN_SAFER and failure.uptime_s >= FAIR_TRIAL_S
    return _safer(diagnosis, history, ladder, offers, row.better, delay_s, lasting=lasting)


def _spent_starts(response: Response, history: History, settings: MachineSettings) -> str:
    """What a parking says of the failed starts; empty while some are left."""
    passes = response in _PASSING and settings.start_failures_max < WAITED_STARTS
    if history.start_failures < (WAITED_STARTS if passes else settings.start_failures_max):
        return ""
    return f" after {history.start_failures} failed starts in a row{'' if passes else ' (supervisor.start_failures_max)'}"


def _may_be_chance(diagnosis: Diagnosis, history: History, ladder: tuple[Rung, ...], failure: Failure) -> bool:
    """The first time. What ran out of memory under the longest prompt that it promises to take did not do so by chance."""
    proved_wrong = failure.worst_case and diagnosis.cause is Cause.HOST_OOM
    return history.times(diagnosis.cause, ladder[history.rung]) < 2 and not proved_wrong


def _is_the_runtime(cause: Cause, failure: Failure, history: History, rung: Rung) -> bool:
    """A start failed in an environment that has not served yet, and another one has; not where the rung itself asks for an older one."""
    is_new = bool(failure.runtime and history.runtime) and failure.runtime != history.runtime and CURRENT_RUNTIME not in rung.features_off
    return is_new and failure.phase is Phase.START and not failure.outside and not failure.refused and cause not in _NOT_THE_RUNTIME


def after_failed_plan(diagnosis: Diagnosis, history: History, rung: Rung, failure: Failure, settings: MachineSettings) -> Action:
    """Nothing could be started at all: an environment that is gone or does not fit the driver is left for the one that served; else only a
    person can help."""
    if _is_the_runtime(diagnosis.cause, failure, history, rung) and history.start_failures < settings.start_failures_max:
        return _roll_back(diagnosis, history, rung, failure.runtime)
    return _park(diagnosis, "")


def _roll_back(diagnosis: Diagnosis, history: History, rung: Rung, failed: str) -> Action:
    did = f"went back to the runtime {history.runtime} from {failed}, which has never served,"
    return Action(ActionKind.ROLL_BACK, because(did, diagnosis), rung=rung, runtime=history.runtime)


def rung_for_refused(history: History, ladder: tuple[Rung, ...], offers: tuple[Rung, ...] | None) -> Rung | None:
    """Where to go from a rung whose proof was refused: back from a climb; else to the first below that asks for less at the prefill peak
    and fits what was measured, else to the next one. None: this is the last."""
    if history.climbed_from is not None:
        return ladder[history.climbed_from]
    below = ladder[history.rung + 1 :] if offers is None else offers
    less = [rung for rung in below if _less_prefill(ladder[history.rung], rung)]
    fits = [rung for rung in less if rung.plan is None or rung.plan.fits]
    chosen = next(iter((*fits, *less, *below)), None)
    return chosen if offers is None or chosen is None else replace(chosen, index=history.rung + 1)


def backoff_s(failures: int, settings: MachineSettings, jitter: float) -> float:
    """The wait before the restart that follows the n-th failure in a row: 0, first, 2 first, 4 first ... longest."""
    if failures <= 1:
        return 0.0
    doublings = min(failures - 2, 32)  # 2**32 s is longer than any longest wait; keeps the number a number
    wait_s: float = settings.backoff_first_s * 2**doublings * (1 + JITTER_SHARE * jitter)
    return min(wait_s, settings.backoff_max_s)


def _safer(
    diagnosis: Diagnosis,
    history: History,
    ladder: tuple[Rung, ...],
    offers: tuple[Rung, ...] | None,
    better: Better,
    delay_s: float,
    *,
    lasting: bool,
) -> Action:
    """The first that was offered and did not fail of this twice; it comes right below the present one. Without offers a fixed step."""
    now = ladder[history.rung]
    below = [rung for rung in (ladder[now.index + 1 :] if offers is None else offers) if history.times(diagnosis.cause, rung) < 2]
    if offers is None:
        fitting = [rung for rung in below if better.than(now, rung)] or ([] if better.needed else below)
    else:
        fitting = [replace(rung, index=now.index + 1) for rung in below]
    if fitting:
        return _onto(fitting[0], diagnosis, delay_s)
    if lasting:
        return _same(ActionKind.RESTART_SAME, diagnosis, now, delay_s)
    if offers is not None:
        return _park(diagnosis, f" as no setting is left that would help, after rung {now.index}")
    left = f"as no rung {better.words} than" if better.needed and below else "with no rung left below"
    return _park(diagnosis, f" {left} rung {now.index} of {len(ladder)}")


def _onto(rung: Rung, diagnosis: Diagnosis, delay_s: float) -> Action:
    costs = "; ".join(words for words in (rung.gives_up and f"gives up {rung.gives_up}", rung.gains and f"gains {rung.gains}") if words)
    did = f"restarted on the safer rung {rung.index}" + (f" ({costs})" if costs else "") + _after(delay_s)
    return Action(ActionKind.RESTART_SAFER, because(did, diagnosis), delay_s, rung)


def _fall_back(diagnosis: Diagnosis, rung: Rung, delay_s: float) -> Action:
    did = f"fell back to rung {rung.index}, from which it had climbed,{_after(delay_s)}".rstrip(",")
    return Action(ActionKind.RESTART_SAFER, because(did, diagnosis), delay_s, rung)


def _same(kind: ActionKind, diagnosis: Diagnosis, rung: Rung, delay_s: float) -> Action:
    verb = "waited" if kind is ActionKind.WAIT else "restarted"
    did = f"{verb} on rung {rung.index}" if kind is ActionKind.RESTART_SAME else f"{verb} to try rung {rung.index} again"
    return Action(kind, because(did + _after(delay_s), diagnosis), delay_s, rung)


def _use_remaining(
    diagnosis: Diagnosis, history: History, ladder: tuple[Rung, ...], cards_left: int | None, offers: tuple[Rung, ...] | None
) -> Action:
    if not cards_left:
        return _park(diagnosis, "" if cards_left == 0 else " as nothing says which card it is")
    reach = ladder if offers is None else (*ladder[: history.rung + 1], *offers)
    on = history.on_cards(cards_left, reach)
    if on is None:
        return _park(diagnosis, f" as no rung fits the {cards_left} cards that are left")
    rung = replace(reach[on.rung], index=min(on.rung, history.rung + 1)) if offers is not None else reach[on.rung]
    cards = "card that is" if cards_left == 1 else f"{cards_left} cards that are"
    return Action(ActionKind.USE_REMAINING_GPU, because(f"restarted on the {cards} left (rung {rung.index})", diagnosis), 0.0, rung)


def _park(diagnosis: Diagnosis, circumstance: str) -> Action:
    """With what the owner should do."""
    cure = f"{diagnosis.remedies[0].rstrip('.')}, then appliancectl resume" if diagnosis.remedies else "appliancectl resume"
    return Action(ActionKind.PARK, f"{because(f'parked{circumstance}', diagnosis)}; to do: {cure}")


def because(did: str, diagnosis: Diagnosis) -> str:
    """ "did X because Y (evidence Z)": the same string in the log, the incident and the status."""
    first, space, rest = diagnosis.sentence.rstrip(".").partition(" ")
    why = f"{first.lower() if first in _ARTICLES else first}{space}{rest}"
    return f"{did} because {why} ({_evidence(diagnosis)})"


def _evidence(diagnosis: Diagnosis) -> str:
    root = diagnosis.root
    if root is None:
        return "no line of evidence carries a cause"
    place = f"{root.source.value} line {root.line}" if root.line else root.source.value
    return f"evidence {place}: {root.text[:200]!r}"


def _after(delay_s: float) -> str:
    return f" after a wait of {format_duration(delay_s)}" if delay_s else ""
