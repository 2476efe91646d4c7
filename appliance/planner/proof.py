"""The judgement of a proof run: a worst-case prefill was served while memory was sampled. The run itself is the supervisor's."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.planner.chain import gib

MARGIN = 0.25
"""Share of the measured peak that must stay free on top of it."""


@dataclass(frozen=True, slots=True)
class ProofReading:
    """What was sampled.

    Attributes:
        peak_bytes: the most that the prompt took for a moment, beyond what the engine held before and what its KV cache keeps of it.
        left_bytes: the least that was free, with what the KV cache has not taken yet (on the CPU it is taken page by page) taken off.
        prompt_tokens: length of the prompt.
        scarce: what would have run out first, such as "the machine's memory".
    """

    peak_bytes: int
    left_bytes: int
    prompt_tokens: int
    scarce: str = ""


@dataclass(frozen=True, slots=True)
class ProofVerdict:
    """What follows.

    Attributes:
        holds: the margin is still there; if not, the next rung is taken now.
        sentence: for the log, the status and the incident.
    """

    holds: bool
    sentence: str


def judge(reading: ProofReading, planned_peak_bytes: int | None, margin: float = MARGIN) -> ProofVerdict:
    """Whether the headroom that is left after a worst-case prefill covers the margin."""
    kept_free = round(margin * reading.peak_bytes)
    planned = f" (planned {gib(planned_peak_bytes)})" if planned_peak_bytes is not None else ""
    took = f"a prompt of {reading.prompt_tokens:,} tokens took {gib(reading.peak_bytes)} at its peak{planned}"
    of = f" of {reading.scarce}" if reading.scarce else ""
    if reading.left_bytes >= kept_free:
        return ProofVerdict(True, f"{took}; {gib(reading.left_bytes)}{of} stayed free, {gib(kept_free)} are the margin")
    if reading.left_bytes < 0:
        return ProofVerdict(False, f"{took}; with its KV cache full the engine would lack {gib(-reading.left_bytes)}{of}")
    return ProofVerdict(False, f"{took}; only {gib(reading.left_bytes)}{of} stayed free, less than the margin of {gib(kept_free)}")
