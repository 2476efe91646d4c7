"""What admission holds back or refuses beyond the queue, a sentence each: for the page, `appliancectl top` and `status`. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from appliance.gateway.memory import REASONS, Memory

LEARNED_MAX = 8
"""Of the lengths that nobody has configured; the others are counted."""
_DONE = {"reject": "are refused", "pad": "are padded", "truncate": "are padded or truncated"}
"""By [admission] length_policy; under `any` nothing is done."""
_WAITED = {"red_line": "a card was over the red line", "headroom": "the headroom is less than their prefill takes"}


def restrictions(memories: Sequence[Memory], policy: str, configured: Sequence[int], learned: Mapping[int, str]) -> list[str]:
    """None where there is nothing to say. `memories`: of the engines; `policy`: what is done with a length that does not go."""
    fused = of_lengths(policy, learned)
    more = [f"and {len(fused) - LEARNED_MAX} lengths more"] if len(fused) > LEARNED_MAX else []
    return [*_of_memory(memories), *_of_configured(policy, configured), *fused[:LEARNED_MAX], *more]


def of_lengths(policy: str, learned: Mapping[int, str]) -> list[str]:
    """Lengths that nobody has configured, and why."""
    done = _DONE.get(policy)
    return [f"prompts of exactly {tokens} tokens {done}, because {why}" for tokens, why in sorted(learned.items())] if done else []


def held_back(memories: Iterable[Memory]) -> Counter[str]:
    """Reason → requests that had to wait for memory, of all engines."""
    total: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
    for memory in memories:
        total.update(memory.held_back)
    return total


def _of_memory(memories: Sequence[Memory]) -> Iterator[str]:
    yield from (memory.sentence for memory in memories if memory.sentence)
    waited = [f"{count} because {_WAITED[reason]}" for reason, count in sorted(held_back(memories).items()) if count]
    if waited:
        yield f"requests that have waited for memory since the gateway started: {', '.join(waited)}"


def _of_configured(policy: str, lengths: Sequence[int]) -> Iterator[str]:
    if lengths and policy in _DONE:
        yield f"prompts of exactly {', '.join(map(str, sorted(lengths)))} tokens {_DONE[policy]}, as [admission] fused_lengths says"
