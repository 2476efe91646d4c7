"""One engine's room: its slots, its KV pool and its memory, and what of them is taken."""

from __future__ import annotations

from dataclasses import dataclass

from appliance.gateway.memory import Memory
from appliance.gateway.schedule import Ticket


@dataclass(frozen=True, slots=True)
class Space:
    """What an engine takes at once.

    Attributes:
        capacity: requests.
        pool_tokens: what its KV pool holds; 0: unknown, or not to be looked at.
        longest_tokens: of one prompt; 0: unknown.
    """

    capacity: int
    pool_tokens: int = 0
    longest_tokens: int = 0


class Room:
    """Counts; decides nothing but whether one more fits.

    Attributes:
        space: of the engine that is there, or was there last.
        is_open: it answers.
        longest_tokens: longer prompts are for another engine that takes them; 0: none takes longer ones.
    """

    __slots__ = ("in_use", "is_open", "longest_tokens", "memory", "reserved_tokens", "space")

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.space = Space(0)
        self.is_open = False
        self.longest_tokens = 0
        self.in_use = 0
        self.reserved_tokens = 0

    def has_slot(self) -> bool:
        """For one more."""
        return self.is_open and self.in_use < self.space.capacity

    def takes(self, ticket: Ticket) -> bool:
        """This one, now. One alone always fits: whether it is too long for the engine is the engine's to say."""
        if not self.has_slot() or 0 < self.longest_tokens < ticket.prompt_tokens:
            return False
        if not self.in_use:
            return True
        pool_tokens = self.space.pool_tokens
        has_tokens = not pool_tokens or self.reserved_tokens + ticket.tokens <= pool_tokens
        return has_tokens and not self.memory.holds_back(ticket.prompt_tokens)

    @property
    def busy(self) -> float:
        """How much of it is taken: of its slots or its pool, whichever is more."""
        slots = self.in_use / self.space.capacity if self.space.capacity else 1.0
        return max(slots, self.reserved_tokens / self.space.pool_tokens if self.space.pool_tokens else 0.0)

    def let_in(self, ticket: Ticket) -> None:
        """It is with the engine."""
        ticket.alone = not self.in_use and bool(self.memory.holds_back(ticket.prompt_tokens))
        self.in_use += 1
        self.reserved_tokens += ticket.tokens

    def let_out(self, ticket: Ticket) -> None:
        """It is not any more."""
        self.in_use -= 1
        self.reserved_tokens -= ticket.tokens
