"""The judgement of a proof run: a worst-case prefill was served while free memory was sampled. The run itself is the supervisor's."""

from __future__ import annotations

from dataclasses import dataclass, replace

from appliance.core.plan import MemoryPlan
from appliance.planner.chain import gib
from appliance.planner.inputs import PlanInputs


@dataclass(frozen=True, slots=True)
class ProofReading:
    """What was sampled.

    Attributes:
        idle_free_bytes: free memory of the card (or up to the process's limit) before the prefill.
        least_free_bytes: the least during it.
        prompt_tokens: length of the prompt.
    """

    idle_free_bytes: int
    least_free_bytes: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class ProofVerdict:
    """What follows.

    Attributes:
        holds: the margin is still there; if not, the next rung is taken now.
        activation_peak_bytes: measured; replaces the assumed one.
        sentence: for the log and the status.
        inputs: for the next plan, with the measured peak.
    """

    holds: bool
    activation_peak_bytes: int
    sentence: str
    inputs: PlanInputs


def judge(inputs: PlanInputs, plan: MemoryPlan, reading: ProofReading) -> ProofVerdict:
    """Whether the headroom that is left after a worst-case prefill covers the margin.

    The allocator gives memory back late, so what was taken between the idle and the least reading is the measured peak.
    """
    peak = max(0, reading.idle_free_bytes - reading.least_free_bytes)
    margin = round(inputs.margin * peak)
    holds = reading.least_free_bytes >= margin
    words = f"a prompt of {reading.prompt_tokens:,} tokens took {gib(peak)} (planned {gib(plan.activation_peak_bytes)})"
    left = f"{gib(reading.least_free_bytes)} stayed free, {gib(margin)} are the margin"
    measured = replace(inputs.measured, activation_peak_bytes=peak, source="a proof run")
    return ProofVerdict(holds, peak, f"{words}; {left}", replace(inputs, measured=measured))
