"""What happens to the supervisor (events) and what it does (effects). Frozen dataclasses without behaviour.

Events that belong to an engine life carry its generation; the reducer drops those of a life that is over.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from appliance.core.action import Action
from appliance.core.diagnosis import Diagnosis
from appliance.core.launch import EngineLimits, LaunchSpec
from appliance.core.plan import Rung
from appliance.core.publication import Publication
from appliance.supervisor.history import Failure, History
from appliance.supervisor.settings import MachineSettings


class Timer(enum.Enum):
    """What may run out. Setting a timer again replaces it."""

    START = "start"
    """The engine has not proved itself by its start deadline; the longest prompt has as long again."""
    SETTLE = "settle"
    """A fatal line was read; the lines that follow it (a traceback) had this long to arrive."""
    DRAIN = "drain"
    """Running answers had their time."""
    STOP = "stop"
    """The engine ignored SIGTERM, ours or somebody else's."""
    BACKOFF = "backoff"
    STABLE = "stable"
    """It served long enough to forget earlier failures."""
    CLIMB = "climb"
    """It served long enough on a safer rung to try the one above."""


class KillHow(enum.Enum):
    """How an engine is ended."""

    TERM = "term"
    """Politely, the leader only: it may finish and report. A Timer.STOP runs."""
    ABORT = "abort"
    """It hangs: SIGABRT for its stacks, then the whole group as NOW."""
    NOW = "now"
    """The whole group, SIGKILL, verified empty."""


@dataclass(frozen=True, slots=True)
class Started:
    """applianced is up; the first event."""


@dataclass(frozen=True, slots=True)
class GpuReady:
    """The cards can be used; `note` says how many and what is missing."""

    cards: int
    note: str = ""


@dataclass(frozen=True, slots=True)
class NoGpu:
    """This machine has no card, or we were told not to look."""

    reason: str


@dataclass(frozen=True, slots=True)
class GpuWaiting:
    """Not yet, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class CardsGone:
    """Every card was lost in this boot: nothing but a reboot brings one back."""

    reason: str


@dataclass(frozen=True, slots=True)
class Planned:
    """A rung was turned into a command line."""

    generation: int
    spec: LaunchSpec


@dataclass(frozen=True, slots=True)
class PlanFailed:
    """No command line can be made, such as a model folder that is missing. Only a person can change that."""

    generation: int
    diagnosis: Diagnosis
    incident_id: str


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """exec failed: there is no process."""

    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class Loading:
    """It has not answered yet, and bytes or memory were moved since this was said last."""

    generation: int


@dataclass(frozen=True, slots=True)
class EngineReady:
    """It answered its probe for the first time."""

    generation: int
    limits: EngineLimits


@dataclass(frozen=True, slots=True)
class WorstCaseBegun:
    """The canary's answer is in, and the longest prompt that the rung promises to take is under way."""

    generation: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Proved:
    """The canary's answer is in, and that of the longest prompt where it was asked."""

    generation: int


@dataclass(frozen=True, slots=True)
class ProofFailed:
    """It answers probes and cannot answer a prompt."""

    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class ProofRefused:
    """It works, but the longest prompt that its rung promises to take leaves too little memory, or had no answer.

    `diagnosis` is None where the engine's own evidence is to say why.
    """

    generation: int
    text: str
    diagnosis: Diagnosis | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A probe was answered."""

    generation: int
    running: int
    waiting: int


@dataclass(frozen=True, slots=True)
class HangDetected:
    """Silence that nothing explains. `stopped`: the process was stopped by a signal (state T), so no setting is to blame."""

    generation: int
    text: str
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class FatalLine:
    """The engine's log says that it is beyond help, whether or not it dies of it."""

    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class EngineEnding:
    """It refuses new requests and finishes the running ones, and we had not asked for that."""

    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class EngineExited:
    """The group's leader is dead; others of the group may live."""

    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class GroupEmpty:
    """Nobody of that life is left."""

    generation: int


@dataclass(frozen=True, slots=True)
class GroupStuck:
    """SIGKILL was sent and somebody is still there (D state in a driver)."""

    generation: int
    text: str


@dataclass(frozen=True, slots=True)
class GpuLost:
    """The kernel log says that a card is gone."""

    text: str


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """The verdict on `MachineState.failure`, with what the reducer cannot make itself: an id and a random number in [0, 1).

    `cards_left`: cards that can still be used; None where no card is used, or where it is not known which one is lost.
    """

    generation: int
    diagnosis: Diagnosis
    incident_id: str
    jitter: float
    cards_left: int | None = None


@dataclass(frozen=True, slots=True)
class TimerFired:
    """See Timer."""

    generation: int
    timer: Timer


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Let what runs finish, stop the engine, and wait for `resume`."""

    reason: str


@dataclass(frozen=True, slots=True)
class RestartRequested:
    """A new life, on the same rung or on another."""

    reason: str
    rung: int | None = None


@dataclass(frozen=True, slots=True)
class ResumeRequested:
    """Leave PARKED."""

    reason: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """applianced is to end. `immediately` is the second SIGTERM."""

    reason: str
    immediately: bool = False


@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """A reload."""

    settings: MachineSettings
    ladder: tuple[Rung, ...]


Event = (
    Started | GpuReady | NoGpu | GpuWaiting | CardsGone | Planned | PlanFailed | SpawnFailed | Loading | EngineReady | WorstCaseBegun
    | Proved | ProofFailed | ProofRefused | Progress | HangDetected | FatalLine | EngineEnding | EngineExited | GroupEmpty | GroupStuck
    | GpuLost | Diagnosed | TimerFired | DrainRequested | RestartRequested | ResumeRequested | StopRequested | SettingsChanged
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WaitForGpu:
    """Watch the cards come up; answers with GpuWaiting, then GpuReady or NoGpu."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Turn a rung into a command line; answers with Planned or PlanFailed."""

    generation: int
    rung: Rung


@dataclass(frozen=True, slots=True)
class Spawn:
    """Start it and watch it; answers with SpawnFailed, or EngineReady, FatalLine, EngineExited, HangDetected..."""

    generation: int
    spec: LaunchSpec


@dataclass(frozen=True, slots=True)
class Prove:
    """Ask for one short real answer, and run the longest prompt where that is due; answers with Proved, ProofFailed or ProofRefused."""

    generation: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End it; NOW and ABORT answer with GroupEmpty or GroupStuck. `reason` goes to the stop ledger."""

    generation: int
    how: KillHow
    reason: str
    requested: bool
    """A person or the service manager wanted it, as opposed to a failure that we are cleaning up."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Its processes are stuck on a lost card and will not go before the next boot: the next life does not wait for them."""

    generation: int


@dataclass(frozen=True, slots=True)
class Diagnose:
    """Collect the evidence of this life and judge it, or take the verdict that is known; answers with Diagnosed."""

    generation: int
    known: Diagnosis | None = None


@dataclass(frozen=True, slots=True)
class RecordIncident:
    """Keep it."""

    incident_id: str
    failure: Failure
    diagnosis: Diagnosis
    action: Action
    rung_after: int


@dataclass(frozen=True, slots=True)
class RecordRecovery:
    """The incident is over."""

    incident_id: str
    recovered_s: float


@dataclass(frozen=True, slots=True)
class SetTimer:
    """TimerFired after so long."""

    timer: Timer
    generation: int
    delay_s: float


@dataclass(frozen=True, slots=True)
class SaveHistory:
    """To disk, before what follows it is done."""

    history: History
    generation: int


@dataclass(frozen=True, slots=True)
class Publish:
    """To the gateway, systemd's STATUS and the log."""

    publication: Publication


@dataclass(frozen=True, slots=True)
class UseRuntime:
    """Go back to this environment of the engine, for the next life."""

    runtime: str


@dataclass(frozen=True, slots=True)
class RunHook:
    """supervisor.on_park."""

    sentence: str


@dataclass(frozen=True, slots=True)
class Reboot:
    """A lost card keeps the service down: supervisor.auto_reboot."""

    reason: str


@dataclass(frozen=True, slots=True)
class Exit:
    """The loop ends."""


Effect = (
    WaitForGpu | Plan | Spawn | Prove | Kill | Abandon | Diagnose | RecordIncident | RecordRecovery
    | SetTimer | SaveHistory | Publish | UseRuntime | RunHook | Reboot | Exit
)  # fmt: skip
