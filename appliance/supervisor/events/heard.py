"""What happens to the supervisor. An event of an engine life carries its generation; the reducer drops those of a life that is over."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.core.diagnosis import Diagnosis
from appliance.core.launch import EngineLimits, LaunchSpec
from appliance.core.plan import Rung
from appliance.supervisor.events.words import Timer
from appliance.supervisor.settings import MachineSettings


@dataclass(frozen=True, slots=True)
class Started:
    """applianced is up; the first event."""


@dataclass(frozen=True, slots=True)
class GpuReady:
    """The cards can be used; `note` says how many and what is missing.

    `ladder`: what is worked out for a card that had not been looked at before; None: no news.
    """

    cards: int
    note: str = ""
    ladder: tuple[Rung, ...] | None = None


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
    """No command line can be made, such as a model folder that is missing. Only a person can change that, but for a runtime that is broken.

    Attributes:
        runtime: the environment in force; empty where it has no name.
    """

    generation: int
    diagnosis: Diagnosis
    incident_id: str
    runtime: str = ""


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

    `diagnosis` is None where the engine's own evidence is to say why. `offers`: as in Diagnosed.
    """

    generation: int
    text: str
    diagnosis: Diagnosis | None = None
    offers: tuple[Rung, ...] | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A probe was answered. `block_violations`: accesses to KV blocks that this life refused so far."""

    generation: int
    running: int
    waiting: int
    block_violations: int = 0


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
    `offers`: the rungs that help against this cause, worked out from the one that failed, the cheapest first; None where they cannot be
    worked out, so that the fixed steps on the ladder are all there is.
    """

    generation: int
    diagnosis: Diagnosis
    incident_id: str
    jitter: float
    cards_left: int | None = None
    offers: tuple[Rung, ...] | None = None


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
    """A reload, or news of the memory that the rungs' plans stand on. `anew`: the ladder is another configuration's."""

    settings: MachineSettings
    ladder: tuple[Rung, ...]
    anew: bool = False


Event = (
    Started | GpuReady | NoGpu | GpuWaiting | CardsGone | Planned | PlanFailed | SpawnFailed | Loading | EngineReady | WorstCaseBegun
    | Proved | ProofFailed | ProofRefused | Progress | HangDetected | FatalLine | EngineEnding | EngineExited | GroupEmpty | GroupStuck
    | GpuLost | Diagnosed | TimerFired | DrainRequested | RestartRequested | ResumeRequested | StopRequested | SettingsChanged
)  # fmt: skip
