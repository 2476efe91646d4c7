"""Who goes next. Pure: no clock, no I/O; admission.py asks, and tests/unit/gateway/test_schedule.py proves the bounds.

Three questions, from the outside in:

1. *Which class?* The highest that waits, unless a lower one has been passed over PASSES_MAX times in a row.
2. *Whose?* Each flow (an API key, or an address where there are none) gets its share of the work, measured in tokens.
3. *Long or short?* Inside a flow, requests of about the same length wait in one line, first come first served, and the
   lines share the flow's work as the flows share the engine's: neither can starve the other.

2 and 3 are start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996).
"""

from __future__ import annotations

import bisect
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

PASSES_MAX = 8
"""Grants to higher classes in a row, then one goes to the lower class that waits."""
BYPASSES_MAX = 16
"""Grants to those behind the first in line who needs more KV tokens than are free; then these are saved up for it."""
LINES_TOKENS = (512, 4096, 32768)
"""Requests between two of these are of about the same length."""
_FLOWS_KEPT = 256
"""Above this, idle flows are forgotten: what they were given last is not held against them any more."""


@dataclass(eq=False, slots=True)
class Ticket:
    """One request as admission sees it.

    Attributes:
        order: of arrival at the appliance.
        flow: whose it is.
        tokens: prompt and answer, as far as known: its share of the KV pool, and what its flow is charged.
        level: its class; 0 goes first.
        max_concurrent, max_queued: of its flow; 0: no limit.
        due_s: on the loop's clock, when its client stops waiting; None: never.
        prompt_tokens: of its prompt, as far as known.
        used_tokens: prompt and answer as they were, once the engine has said so.
        bypassed: grants to others while it was first and the KV pool too full for it.
        alone: it went in when nothing else ran, because it was held back for its memory.
        conversation: balance.key_of its body, where there are several engines; 0: not known, or none.
        replica: the engine whose slot it has, or had last.
    """

    order: int
    request_id: str
    flow: str = ""
    tokens: int = 1
    level: int = 1
    max_concurrent: int = 0
    max_queued: int = 0
    due_s: float | None = None
    prompt_tokens: int = 1
    used_tokens: int | None = None
    bypassed: int = 0
    alone: bool = False
    conversation: int = 0
    replica: int = 0


LEVELS = 3


class _Contest:
    """Who of several parties is next, by the tokens that each has been given.

    A party that comes back from being idle starts at the clock, which is the start of the last grant; a grant moves its
    party's start on by its tokens. The lowest start is next. So nobody can save up, and who comes back is ahead of all
    who were served meanwhile.
    """

    __slots__ = ("clock", "starts")

    def __init__(self) -> None:
        self.clock = 0
        self.starts: dict[Hashable, int] = {}

    def join(self, party: Hashable) -> None:
        """It begins to wait."""
        self.starts[party] = max(self.clock, self.starts.get(party, 0))

    def grant(self, party: Hashable, tokens: int) -> None:
        """Its first in line goes."""
        start = self.starts[party]
        self.clock = max(self.clock, start)
        self.starts[party] = start + tokens

    def pass_through(self, party: Hashable, tokens: int) -> None:
        """It goes without having waited."""
        self.clock = max(self.clock, self.starts.get(party, 0))
        self.starts[party] = self.clock + tokens

    def refund(self, party: Hashable, tokens: int) -> None:
        """It was charged for more than it took (or, below zero, for less)."""
        if party in self.starts:
            self.starts[party] = max(self.clock, self.starts[party] - tokens)

    def copy(self) -> _Contest:
        """An independent one in the same state."""
        other = _Contest()
        other.clock, other.starts = self.clock, dict(self.starts)
        return other


class _Flow:
    """What one flow has waiting in one class: a line for each length."""

    __slots__ = ("contest", "lines")

    def __init__(self) -> None:
        self.contest = _Contest()
        self.lines: dict[int, deque[Ticket]] = {}

    def add(self, ticket: Ticket) -> None:
        line = _line_of(ticket)
        if line not in self.lines:
            self.lines[line] = deque()
            self.contest.join(line)
        self.lines[line].append(ticket)

    def remove(self, ticket: Ticket) -> None:
        line = _line_of(ticket)
        self.lines[line].remove(ticket)
        if not self.lines[line]:
            del self.lines[line]

    def grant(self, ticket: Ticket) -> None:
        self.contest.grant(_line_of(ticket), ticket.tokens)
        self.remove(ticket)

    def heads(self) -> Iterator[Ticket]:
        """The first of each line, in the order in which they should go."""
        starts = self.contest.starts
        return (line[0] for _, line in sorted(self.lines.items(), key=lambda item: (starts[item[0]], item[1][0].order)))

    def first_order(self) -> int:
        """When its longest waiting one came."""
        return min(line[0].order for line in self.lines.values())

    def copy(self) -> _Flow:
        other = _Flow()
        other.contest = self.contest.copy()
        other.lines = {name: deque(line) for name, line in self.lines.items()}
        return other


class _Level:
    """One class: its flows, and how often it has been passed over since its last grant."""

    __slots__ = ("contest", "flows", "passes", "waiting")

    def __init__(self) -> None:
        self.contest = _Contest()
        self.flows: dict[str, _Flow] = {}
        self.waiting: set[str] = set()
        self.passes = 0

    def add(self, ticket: Ticket) -> None:
        if ticket.flow not in self.flows:
            self.flows[ticket.flow] = _Flow()
        if ticket.flow not in self.waiting:
            self.waiting.add(ticket.flow)
            self.contest.join(ticket.flow)
        self.flows[ticket.flow].add(ticket)

    def pass_through(self, ticket: Ticket) -> None:
        self.contest.pass_through(ticket.flow, ticket.tokens)
        if len(self.contest.starts) > _FLOWS_KEPT + 2 * len(self.waiting):
            self._forget_idle()

    def remove(self, ticket: Ticket) -> None:
        self.flows[ticket.flow].remove(ticket)
        self._settle(ticket.flow)

    def grant(self, ticket: Ticket) -> None:
        self.contest.grant(ticket.flow, ticket.tokens)
        self.flows[ticket.flow].grant(ticket)
        self._settle(ticket.flow)

    def heads(self, is_open: Callable[[Ticket], bool]) -> Iterator[Ticket]:
        """The first of each line of each flow that is open, in the order in which they should go."""
        starts = self.contest.starts
        for name in sorted(self.waiting, key=lambda name: (starts[name], self.flows[name].first_order())):
            for ticket in self.flows[name].heads():
                if not is_open(ticket):
                    break
                yield ticket

    def copy(self) -> _Level:
        other = _Level()
        other.contest, other.passes, other.waiting = self.contest.copy(), self.passes, set(self.waiting)
        other.flows = {name: flow.copy() for name, flow in self.flows.items()}
        return other

    def _settle(self, name: str) -> None:
        if not self.flows[name].lines:
            self.waiting.discard(name)
            self.passes = self.passes if self.waiting else 0
            if len(self.contest.starts) > _FLOWS_KEPT + 2 * len(self.waiting):
                self._forget_idle()

    def _forget_idle(self) -> None:
        for name in [name for name in self.contest.starts if name not in self.waiting]:
            del self.contest.starts[name]
            self.flows.pop(str(name), None)


class Schedule:
    """The tickets that wait. `counts` says how many of each flow."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._levels = tuple(_Level() for _ in range(LEVELS))

    def __len__(self) -> int:
        return self.counts.total()

    def add(self, ticket: Ticket) -> None:
        """It begins to wait."""
        self._levels[ticket.level].add(ticket)
        self.counts[ticket.flow] += 1

    def pass_through(self, ticket: Ticket) -> None:
        """It goes at once, because nobody waits, and is charged all the same."""
        self._levels[ticket.level].pass_through(ticket)

    def remove(self, ticket: Ticket) -> None:
        """It does not wait any more, and was given nothing."""
        self._levels[ticket.level].remove(ticket)
        self._count_off(ticket)

    def take(self, fits: Callable[[Ticket], bool], is_open: Callable[[Ticket], bool]) -> Ticket | None:
        """The next one, which waits no more; None: nobody can go now.

        `fits`: the KV pool has room for it. `is_open`: its flow may have one more; the others do not wait for that.
        """
        first: Ticket | None = None
        for ticket in self._heads(is_open):
            if fits(ticket):
                if first is not None:
                    first.bypassed += 1
                self._grant(ticket)
                return ticket
            if first is None:
                first = ticket
                if first.bypassed >= BYPASSES_MAX:
                    return None
        return None

    def settle(self, ticket: Ticket) -> None:
        """A request is over: what its flow was charged becomes what it took."""
        if ticket.used_tokens is not None:
            self._levels[ticket.level].contest.refund(ticket.flow, ticket.tokens - ticket.used_tokens)

    def preview(self) -> list[Ticket]:
        """All, in the order in which they will go if nobody else comes."""
        other = Schedule()
        other._levels = tuple(level.copy() for level in self._levels)
        other.counts = self.counts.copy()
        order: list[Ticket] = []
        while (ticket := other.take(_always, _always)) is not None:
            order.append(ticket)
        return order

    def by_level(self) -> tuple[int, ...]:
        """How many of each class."""
        return tuple(sum(len(line) for name in level.waiting for line in level.flows[name].lines.values()) for level in self._levels)

    def newest_of_largest(self) -> Ticket | None:
        """Of the flow with the most waiting, the one that came last."""
        if not self.counts:
            return None
        flow = max(self.counts, key=lambda name: self.counts[name])
        lines = (line for level in self._levels if flow in level.waiting for line in level.flows[flow].lines.values())
        return max((line[-1] for line in lines), key=lambda ticket: ticket.order)

    def _heads(self, is_open: Callable[[Ticket], bool]) -> Iterator[Ticket]:
        waiting = [level for level in self._levels if level.waiting]
        overdue = [level for level in waiting if level.passes >= PASSES_MAX]
        for level in sorted(overdue, key=lambda level: -level.passes) + [level for level in waiting if level not in overdue]:
            yield from level.heads(is_open)

    def _grant(self, ticket: Ticket) -> None:
        for level in self._levels[ticket.level + 1 :]:
            if level.waiting:
                level.passes += 1
        self._levels[ticket.level].passes = 0
        self._levels[ticket.level].grant(ticket)
        self._count_off(ticket)

    def _count_off(self, ticket: Ticket) -> None:
        self.counts[ticket.flow] -= 1
        if not self.counts[ticket.flow]:
            del self.counts[ticket.flow]


def _line_of(ticket: Ticket) -> int:
    return bisect.bisect_left(LINES_TOKENS, ticket.tokens)


def _always(_: Ticket) -> bool:
    return True
