"""The worst prompt that a rung promises to take, run through an engine that serves nobody yet, while its memory is looked at."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from appliance.backends import ProofRequest
from appliance.core.launch import LaunchSpec
from appliance.planner.proof import ProofReading
from appliance.supervisor.http_get import NoAnswer, exchange
from appliance.supervisor.memory_room import MEMORY, Look

LOOK_S = 0.01
"""A prefill step of the smallest model on the CPU takes tens of milliseconds; its widest layer comes thirty times in each."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The KV cache of an engine that takes its memory page by page: what a prompt writes stays, what no prompt wrote is still to come."""

    size_bytes: int = 0
    token_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        reading: what was measured; None where nothing was.
        problem: the engine took the prompt and could not answer it.
        cannot: it did not take the prompt, so that nothing is known.
        broke: the connection broke or the deadline passed: the engine is dead or hangs.
    """

    prompt_tokens: int
    reading: ProofReading | None = None
    problem: str = ""
    cannot: str = ""
    broke: str = ""


@dataclass(frozen=True, slots=True)
class WorstCase:
    """One run to be.

    Attributes:
        look: at the memory, this moment; None: it cannot be looked at.
    """

    request: ProofRequest
    prompt_tokens: int
    deadline_s: float
    pool: Pool = field(default_factory=Pool)

    async def run(self, spec: LaunchSpec, look: Callable[[], Awaitable[Look | None]], before: Look | None = None) -> Outcome:
        """Send it, looking all the while. `before`: a look from before any prompt, where that was long ago."""
        first = before or await look()
        looks = [first] if first is not None else []
        watching = asyncio.create_task(_watch(look, looks)) if looks else None
        try:
            answer = await exchange(spec.endpoint, self.request.path, self.deadline_s, dict(self.request.body))
        except NoAnswer as error:
            return Outcome(self.prompt_tokens, broke=str(error))
        finally:
            if watching is not None:
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching
        words = f"{self.request.path} answered {answer.status}: {answer.body[:200].decode(errors='replace')}"
        if 400 <= answer.status < 500:
            return Outcome(self.prompt_tokens, cannot=f"it does not take a prompt of {self.prompt_tokens:,} tokens ({words})")
        if answer.status != 200 or not self.request.accepts(answer.json()):
            return Outcome(self.prompt_tokens, problem=f"it could not answer a prompt of {self.prompt_tokens:,} tokens ({words})")
        if looks and (last := await look()) is not None:
            looks.append(last)
        return Outcome(self.prompt_tokens, read(looks, self.prompt_tokens, self.pool))


async def _watch(look: Callable[[], Awaitable[Look | None]], looks: list[Look]) -> None:
    while True:
        await asyncio.sleep(LOOK_S)
        seen = await look()
        if seen is not None:
            looks.append(seen)


def read(looks: Sequence[Look], prompt_tokens: int, pool: Pool) -> ProofReading | None:
    """What the looks say; the first is from before the prompt, the last from after its answer.

    On cards the peak is what was taken of any card. On the CPU it is what the engine's processes grew by, less what the prompt left in
    the KV cache, and that is no more than what it holds more at the end, for an earlier prompt may have written those pages; and of the
    machine's memory and the cgroups' what the rest of that cache is still to take is not free.
    """
    if len(looks) < 2:
        return None
    least = {place: min(look.free_bytes.get(place, free) for look in looks) for place, free in looks[0].free_bytes.items()}
    if not least:
        return None
    held = [look.held_bytes for look in looks if look.held_bytes is not None]
    if not held:
        taken = {place: looks[0].free_bytes[place] - free for place, free in least.items()}
        peak = max(0, *taken.values())
        ours = [place for place, size in taken.items() if 2 * size >= peak]  # the engine's cards, and not others that are full
        scarce = min(ours, key=lambda place: least[place])
        return ProofReading(peak, least[scarce], prompt_tokens, f"the card at {scarce}")
    written = min(prompt_tokens * pool.token_bytes, pool.size_bytes)
    peak = max(held) - held[0] - min(written, max(0, held[-1] - held[0]))
    # Address space was taken for the whole cache when it was mapped.
    left = {place: free - (pool.size_bytes - written if _by_pages(place) else 0) for place, free in least.items()}
    scarce = min(left, key=lambda place: left[place])
    return ProofReading(max(0, peak), left[scarce], prompt_tokens, scarce)


def _by_pages(place: str) -> bool:
    return place == MEMORY or place.startswith("memory.max")
