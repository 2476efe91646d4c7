"""A lane: who may go to the engine now, who waits, and who is refused. schedule.py decides the order.

A lane is open while the engine answers. While it is closed nobody goes in and nobody's queue time passes: waiting for a
restart is not the client's fault, and is bounded by `max_wait_s` instead. A request that lost its engine gives its slot
back and comes back in front of those who have not been in yet, in the order in which they all arrived.

Each engine has a room of its own (room.py), and the queue is one: whose turn it is does not depend on where it goes (balance.py).

A full queue refuses those who fill it: a newcomer whose flow has fewer waiting takes the place of the flow with the most.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from appliance.gateway import queue_refusals
from appliance.gateway.balance import Load, choose
from appliance.gateway.envelope import Refused
from appliance.gateway.memory import Memory
from appliance.gateway.room import Room, Space
from appliance.gateway.schedule import Schedule, Ticket

_SMOOTHING = 0.2
"""Weight of the newest answer in the running mean of how long a slot is held."""


@dataclass(eq=False, slots=True)
class Waiter:
    """One request in the queue.

    Attributes:
        since_s: when it began to wait, on the loop's clock.
        since_open_s: the same on the clock that stands still while the lane is closed.
        deadline: its client's patience, where it has said how long that is.
    """

    ticket: Ticket
    since_s: float
    since_open_s: float
    granted: asyncio.Future[None]
    deadline: asyncio.TimerHandle | None = None


class Lane:
    """Rooms and their queue. One event loop, no locks: every method either completes or has only queued a waiter.

    Attributes:
        rooms: by the engine's index; with one engine, one.
    """

    def __init__(
        self,
        *,
        queue_size: int,
        queue_timeout_s: float,
        max_wait_s: float,
        refused_while_closed: Callable[[], Refused],
        new_memory: Callable[[], Memory],
    ) -> None:
        """`new_memory`: of one more engine."""
        self._new_memory = new_memory
        self.rooms = [Room(new_memory())]
        self.is_open = False
        self.queue_size = queue_size
        self._queue_timeout_s = queue_timeout_s
        self._max_wait_s = max_wait_s
        self._refused_while_closed = refused_while_closed
        self._schedule = Schedule()
        self._waiters: dict[Ticket, Waiter] = {}
        """In the order in which they came: the first is the first whose time is up."""
        self._returning: list[Waiter] = []
        self._running: dict[Ticket, float] = {}
        self._running_of: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closed_since_s = self._loop.time()
        self._closed_total_s = self._closed_since_s
        self._mean_held_s: float | None = None

    # who goes in

    async def acquire(self, ticket: Ticket, *, returning: bool = False) -> None:
        """Take a slot (`ticket.replica` says of which engine), after waiting if need be. `returning`: was in before and lost its engine.

        Raises:
            Refused: the queue is full, the wait took too long, or would take longer than the client waits.
        """
        if not self.queue_length and self._flow_is_open(ticket) and (room := self._room_for(ticket)) is not None:
            if not returning:
                self._schedule.pass_through(ticket)
            self._let_in(ticket, room)
            return
        waiter = self._queue(ticket, returning)
        self._grant()
        if not returning and not waiter.granted.done():
            self._check_queue(waiter)
        await self._turn_of(waiter)

    def release(self, ticket: Ticket, held_s: float | None = None) -> None:
        """Give the slot back; `held_s` of a complete answer teaches the estimate."""
        self._let_out(ticket)
        if held_s is not None:
            if ticket.alone:
                self.rooms[ticket.replica].memory.answered(ticket.prompt_tokens)
            self._schedule.settle(ticket)
            mean = self._mean_held_s
            self._mean_held_s = held_s if mean is None else mean + _SMOOTHING * (held_s - mean)
        self._grant()

    def enter_alone(self, ticket: Ticket, replica: int) -> None:
        """This room is closed and has run empty: this one goes in, and nobody beside it until the room is opened."""
        room = self.rooms[replica]
        assert not room.is_open
        assert not room.in_use
        self._let_in(ticket, replica)

    # one writer: the gate's watcher

    def open(self, *spaces: Space | None) -> None:
        """What each engine takes; None: nobody goes to this one until it is opened, and where there is none left, nobody goes in at all."""
        self._furnish(spaces)
        is_open = any(space is not None for space in spaces)
        if is_open is not self.is_open:
            self.is_open = is_open
            if is_open:
                self._closed_total_s += self._loop.time() - self._closed_since_s
            else:
                self._closed_since_s = self._loop.time()
        elif not is_open:
            return
        self._grant()
        self._rearm()

    def close(self) -> None:
        """No engine answers."""
        self.open(*[None] * len(self.rooms))

    def refuse_all(self, refused: Callable[[], Refused]) -> None:
        """Everybody who waits gets one of these."""
        for waiter in [*self._returning, *self._waiters.values()]:
            self._drop(waiter, refused())

    # what is known

    def waiting(self) -> list[Waiter]:
        """Those who wait, in the order in which they will go in if nobody else comes."""
        return [*self._returning, *(self._waiters[ticket] for ticket in self._schedule.preview())]

    def waiting_by_level(self) -> tuple[int, ...]:
        """How many of each class wait."""
        return self._schedule.by_level()

    @property
    def capacity(self) -> int:
        """Requests that are taken at once, or were while there was an engine."""
        return self._of_open(lambda room: room.space.capacity)

    @property
    def pool_tokens(self) -> int:
        """What the KV pools hold; 0: unknown, or not to be looked at."""
        return self._of_open(lambda room: room.space.pool_tokens)

    @property
    def in_use(self) -> int:
        """Slots that are taken."""
        return sum(room.in_use for room in self.rooms)

    def in_use_of(self, replica: int) -> int:
        """Of one engine, which may not have been opened yet."""
        return self.rooms[replica].in_use if replica < len(self.rooms) else 0

    @property
    def reserved_tokens(self) -> int:
        """Of the KV pools."""
        return sum(room.reserved_tokens for room in self.rooms)

    @property
    def queue_length(self) -> int:
        """How many wait."""
        return len(self._returning) + len(self._waiters)

    def estimated_wait_s(self, position: int) -> float | None:
        """How long the one at this position (0 is next) will wait; None while nothing is known or nothing is open.

        Before the first answer is complete, the oldest one under way stands for it: that is too little, but not nothing.
        """
        if not self.is_open or self.capacity <= 0:
            return None
        held_s = self._mean_held_s
        if held_s is None and self._running:
            held_s = self._loop.time() - next(iter(self._running.values()))
        return None if held_s is None else (position + 1) * held_s / self.capacity

    # inside

    def _furnish(self, spaces: Sequence[Space | None]) -> None:
        while len(self.rooms) < len(spaces):
            self.rooms.append(Room(self._new_memory()))
        longest = [space.longest_tokens for space in spaces if space is not None]
        most = 0 if 0 in longest else max(longest, default=0)
        for room in self.rooms[len(spaces) :]:  # of engines that are not there any more
            room.is_open = False
            room.memory.new_life()
        for room, space in zip(self.rooms, spaces, strict=False):
            room.is_open = space is not None
            if space is not None:
                room.space = space
                room.longest_tokens = space.longest_tokens if space.longest_tokens != most else 0

    def _of_open(self, what: Callable[[Room], int]) -> int:
        """The sum over the engines that answer; while none does, over all."""
        return sum(what(room) for room in self.rooms if room.is_open or not self.is_open)

    def _fits(self, ticket: Ticket) -> bool:
        return any(room.takes(ticket) for room in self.rooms)

    def _room_for(self, ticket: Ticket) -> int | None:
        if len(self.rooms) == 1:
            return 0 if self.rooms[0].takes(ticket) else None
        loads = [Load(replica, room.busy, room.takes(ticket)) for replica, room in enumerate(self.rooms) if room.is_open]
        return choose(ticket.conversation, ticket.order, loads)

    def _held_back(self, ticket: Ticket) -> Memory | None:
        """The memory that it waits for; None where an engine has it."""
        memories = [room.memory for room in self.rooms if room.is_open] or [room.memory for room in self.rooms]
        return memories[0] if all(memory.holds_back(ticket.prompt_tokens) for memory in memories) else None

    def _flow_is_open(self, ticket: Ticket) -> bool:
        return not ticket.max_concurrent or self._running_of[ticket.flow] < ticket.max_concurrent

    def _let_in(self, ticket: Ticket, replica: int) -> None:
        ticket.replica = replica
        self.rooms[replica].let_in(ticket)
        self._running[ticket] = self._loop.time()
        self._running_of[ticket.flow] += 1

    def _let_out(self, ticket: Ticket) -> None:
        self.rooms[ticket.replica].let_out(ticket)
        del self._running[ticket]
        self._running_of[ticket.flow] -= 1
        if not self._running_of[ticket.flow]:
            del self._running_of[ticket.flow]

    def _open_clock_s(self) -> float:
        now = self._loop.time() if self.is_open else self._closed_since_s
        return now - self._closed_total_s

    def _queue(self, ticket: Ticket, returning: bool) -> Waiter:
        waiter = Waiter(ticket, self._loop.time(), self._open_clock_s(), self._loop.create_future())
        if memory := self._held_back(ticket):
            memory.held_back[memory.holds_back(ticket.prompt_tokens)] += 1
        if returning:
            bisect.insort(self._returning, waiter, key=lambda other: other.ticket.order)
        else:
            self._schedule.add(ticket)
            self._waiters[ticket] = waiter
        return waiter

    def _check_queue(self, waiter: Waiter) -> None:
        """May this one, which has just been queued, wait? Raises Refused and takes it back."""
        refused: Refused | None = None
        counts, ticket = self._schedule.counts, waiter.ticket
        if ticket.max_queued and counts[ticket.flow] > ticket.max_queued:
            refused = self._refused_share(ticket)
        elif ticket.due_s is not None:
            refused = self._refused_deadline(ticket)
        if refused is None and len(self._waiters) > self.queue_size:
            last = self._schedule.newest_of_largest()
            assert last is not None
            if counts[last.flow] > counts[ticket.flow]:
                self._drop(self._waiters[last], self._refused_full())
            else:
                refused = self._refused_full()
        if refused is not None:
            self._forget(waiter)
            raise refused

    async def _turn_of(self, waiter: Waiter) -> None:
        if waiter.granted.done():
            return
        if waiter.ticket.due_s is not None and waiter not in self._returning:  # who was in has been in time
            waiter.deadline = self._loop.call_at(waiter.ticket.due_s, self._expire_one, waiter)
        self._rearm()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if self._forget(waiter):
                self._grant()  # it may have been the one that the KV pool was saved up for
            elif waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self.release(waiter.ticket)  # granted in the same turn in which its client left
            raise

    def _grant(self) -> None:
        while any(room.has_slot() for room in self.rooms):
            if self._returning:
                waiter = self._returning[0]
                if not self._fits(waiter.ticket):
                    return
                del self._returning[0]
            else:
                ticket = self._schedule.take(self._fits, self._flow_is_open)
                if ticket is None:
                    return
                waiter = self._waiters.pop(ticket)
            self._stop_deadline(waiter)
            if not waiter.granted.cancelled():  # its client left, and its task has not been told yet
                room = self._room_for(waiter.ticket)
                assert room is not None, "it fits"
                self._let_in(waiter.ticket, room)
                waiter.granted.set_result(None)

    def _forget(self, waiter: Waiter) -> bool:
        """Take it out of the queue; False where it is not in it."""
        self._stop_deadline(waiter)
        if waiter in self._returning:
            self._returning.remove(waiter)
        elif self._waiters.pop(waiter.ticket, None) is not None:
            self._schedule.remove(waiter.ticket)
        else:
            return False
        return True

    def _drop(self, waiter: Waiter, refused: Refused) -> None:
        if self._forget(waiter) and not waiter.granted.done():
            waiter.granted.set_exception(refused)

    @staticmethod
    def _stop_deadline(waiter: Waiter) -> None:
        if waiter.deadline is not None:
            waiter.deadline.cancel()
            waiter.deadline = None

    def _rearm(self) -> None:
        """One timer for the whole queue: the first of each part is the first whose time is up."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = [self._due_s(waiter) for waiter in self._firsts()]
        if due_s:
            self._timer = self._loop.call_at(min(due_s), self._expire)

    def _firsts(self) -> list[Waiter]:
        """Who has waited longest, of those who return and of the others."""
        firsts = [min(self._returning, key=lambda waiter: waiter.since_s)] if self._returning else []
        return firsts + [waiter for waiter in [next(iter(self._waiters.values()), None)] if waiter is not None]

    def _due_s(self, waiter: Waiter) -> float:
        if self.is_open:
            return waiter.since_open_s + self._queue_timeout_s + self._closed_total_s
        return max(waiter.since_s, self._closed_since_s) + self._max_wait_s

    def _expire(self) -> None:
        now_s = self._loop.time() + 0.001
        while overdue := [waiter for waiter in self._firsts() if self._due_s(waiter) <= now_s]:
            for waiter in overdue:
                self._drop(
                    waiter, self._refused_late(waiter.ticket, self._queue_timeout_s) if self.is_open else self._refused_while_closed()
                )
        self._grant()
        self._rearm()

    def _expire_one(self, waiter: Waiter) -> None:
        """Its client waits no longer."""
        waited_s = self._loop.time() - waiter.since_s
        refused = self._refused_late(waiter.ticket, waited_s, "X-Request-Timeout") if self.is_open else self._refused_while_closed()
        self._drop(waiter, refused)
        self._grant()

    # refusals

    def _retry_after_s(self, position: int) -> float:
        return self.estimated_wait_s(position) or 1.0

    def _refused_full(self) -> Refused:
        if not self.is_open:
            return self._refused_while_closed()
        return queue_refusals.queue_full(self.in_use, self.capacity, self.queue_size, self._retry_after_s(self.queue_size))

    def _refused_share(self, ticket: Ticket) -> Refused:
        waiting = self._schedule.counts[ticket.flow] - 1
        return queue_refusals.key_queue_full(ticket.flow, waiting, ticket.max_queued, self._retry_after_s(waiting))

    def _refused_deadline(self, ticket: Ticket) -> Refused | None:
        assert ticket.due_s is not None
        left_s = ticket.due_s - self._loop.time()
        position = len(self._returning) + self._schedule.preview().index(ticket)
        wait_s = self.estimated_wait_s(position)
        if left_s > 0 and (wait_s is None or wait_s <= left_s):
            return None
        return queue_refusals.deadline_unmeetable(wait_s or 0.0, position, left_s)

    def _refused_late(self, ticket: Ticket, limit_s: float, which: str = "[admission] queue_timeout_s") -> Refused:
        retry_after_s = self._retry_after_s(self.queue_length)
        if memory := self._held_back(ticket):
            return queue_refusals.memory_short(memory.why(ticket.prompt_tokens), limit_s, retry_after_s)
        return queue_refusals.queue_timeout(limit_s, which, self.in_use, self.queue_length, retry_after_s)
