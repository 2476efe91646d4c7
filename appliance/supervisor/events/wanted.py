"""What the supervisor does about it."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.core.action import Action
from appliance.core.diagnosis import Diagnosis
from appliance.core.launch import LaunchSpec
from appliance.core.plan import Rung
from appliance.core.publication import Publication
from appliance.supervisor.events.words import KillHow, Timer
from appliance.supervisor.history import Failure, History


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
