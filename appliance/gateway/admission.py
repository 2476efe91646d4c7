"""A lane: who may go to the engine now, who waits, and who is refused. First come, first served.

A lane is open while the engine answers. While it is closed nobody goes in and nobody's queue time passes: waiting for a
restart is not the client's fault, and is bounded by `max_wait_s` instead. A request that lost its engine gives its slot
back and comes back in front of those who have not been in yet, in the order in which they all arrived.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from appliance.gateway.envelope import Refused

_SMOOTHING = 0.2
"""Weight of the newest answer in the running mean of how long a slot is held."""


@dataclass(eq=False, slots=True)
class Waiter:
    """One request in the queue.

    Attributes:
        order: of arrival at the appliance.
        since_s: when it began to wait, on the loop's clock.
        since_open_s: the same on the clock that stands still while the lane is closed.
    """

    order: int
    request_id: str
    since_s: float
    since_open_s: float
    granted: asyncio.Future[None]


class Lane:
    """Slots and their queue. One event loop, no locks: every method either completes or has only queued a waiter."""

    def __init__(
        self,
        *,
        queue_size: int,
        queue_timeout_s: float,
        max_wait_s: float,
        refused_while_closed: Callable[[], Refused],
        capacity: int = 0,
    ) -> None:
        self.capacity = capacity
        self.in_use = 0
        self.is_open = False
        self.queue_size = queue_size
        self._queue_timeout_s = queue_timeout_s
        self._max_wait_s = max_wait_s
        self._refused_while_closed = refused_while_closed
        self._returning: list[Waiter] = []
        self._arriving: deque[Waiter] = deque()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._closed_since_s = self._loop.time()
        self._closed_total_s = self._closed_since_s
        self._mean_held_s: float | None = None

    # who goes in

    async def acquire(self, order: int, request_id: str, *, returning: bool = False) -> None:
        """Take a slot, after waiting for one if need be. `returning`: was in before and lost its engine.

        Raises:
            Refused: the queue is full, or the wait took too long.
        """
        if self._has_room() and not self._returning and (returning or not self._arriving):
            self.in_use += 1
            return
        if not returning and len(self._arriving) >= self.queue_size:
            raise self._refused_full()
        await self._wait_turn(order, request_id, returning)

    def release(self, held_s: float | None = None) -> None:
        """Give the slot back; `held_s` of a complete answer teaches the estimate."""
        self.in_use -= 1
        if held_s is not None:
            mean = self._mean_held_s
            self._mean_held_s = held_s if mean is None else mean + _SMOOTHING * (held_s - mean)
        self._grant()

    # one writer: the gate's watcher

    def open(self, capacity: int) -> None:
        """The engine answers, and takes so many at once."""
        self.capacity = capacity
        if not self.is_open:
            self.is_open = True
            self._closed_total_s += self._loop.time() - self._closed_since_s
        self._grant()
        self._rearm()

    def close(self) -> None:
        """The engine does not answer: nobody goes in until `open`."""
        if self.is_open:
            self.is_open = False
            self._closed_since_s = self._loop.time()
            self._rearm()

    def refuse_all(self, refused: Callable[[], Refused]) -> None:
        """Everybody who waits gets one of these."""
        for waiter in self.waiting():
            waiter.granted.set_exception(refused())
        self._returning.clear()
        self._arriving.clear()

    # what is known

    def waiting(self) -> Iterator[Waiter]:
        """Those who wait, in the order in which they will go in."""
        return (waiter for queue in (tuple(self._returning), tuple(self._arriving)) for waiter in queue if not waiter.granted.done())

    @property
    def queue_length(self) -> int:
        """How many wait."""
        return len(self._returning) + len(self._arriving)

    def estimated_wait_s(self, position: int) -> float | None:
        """How long the one at this position (0 is next) will wait; None while no answer has been timed or nothing is open."""
        if self._mean_held_s is None or not self.is_open or self.capacity <= 0:
            return None
        return (position + 1) * self._mean_held_s / self.capacity

    # inside

    def _has_room(self) -> bool:
        return self.is_open and self.in_use < self.capacity

    def _open_clock_s(self) -> float:
        now = self._loop.time() if self.is_open else self._closed_since_s
        return now - self._closed_total_s

    async def _wait_turn(self, order: int, request_id: str, returning: bool) -> None:
        waiter = Waiter(order, request_id, self._loop.time(), self._open_clock_s(), self._loop.create_future())
        queue = self._returning if returning else self._arriving
        if returning:
            bisect.insort(self._returning, waiter, key=lambda other: other.order)
        else:
            self._arriving.append(waiter)
        if self.queue_length == 1 or queue[0] is waiter:
            self._rearm()
        try:
            await waiter.granted
        except asyncio.CancelledError:
            if waiter in queue:
                queue.remove(waiter)
            elif waiter.granted.done() and not waiter.granted.cancelled() and waiter.granted.exception() is None:
                self.release()  # granted in the same turn in which its client left
            raise

    def _grant(self) -> None:
        while self._has_room() and (self._returning or self._arriving):
            waiter = self._returning.pop(0) if self._returning else self._arriving.popleft()
            if not waiter.granted.done():
                self.in_use += 1
                waiter.granted.set_result(None)

    def _rearm(self) -> None:
        """One timer for the whole queue: the head of each part is the first whose time is up."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = [self._due_s(queue[0]) for queue in (self._returning, self._arriving) if queue]
        if due_s:
            self._timer = self._loop.call_at(min(due_s), self._expire)

    def _due_s(self, waiter: Waiter) -> float:
        if self.is_open:
            return waiter.since_open_s + self._queue_timeout_s + self._closed_total_s
        return max(waiter.since_s, self._closed_since_s) + self._max_wait_s

    def _expire(self) -> None:
        now_s = self._loop.time() + 0.001
        for queue in (self._returning, self._arriving):
            while queue and self._due_s(queue[0]) <= now_s:
                waiter = queue[0]
                del queue[0]
                if not waiter.granted.done():
                    waiter.granted.set_exception(self._refused_late() if self.is_open else self._refused_while_closed())
        self._rearm()

    def _refused_full(self) -> Refused:
        if not self.is_open:
            return self._refused_while_closed()
        return Refused(
            429,
            "queue_full",
            f"{self.in_use} requests run ({self.capacity} slots) and {len(self._arriving)} wait, which is the limit of {self.queue_size}",
            hint="try again later, or raise [admission] queue_size",
            retry_after_s=self.estimated_wait_s(0) or 1.0,
        )

    def _refused_late(self) -> Refused:
        return Refused(
            429,
            "queue_timeout",
            f"no slot became free within {self._queue_timeout_s:g} s; {self.in_use} requests run and {self.queue_length} wait",
            hint="try again later, or raise [admission] queue_timeout_s or max_concurrent_decodes",
            retry_after_s=self.estimated_wait_s(self.queue_length) or 1.0,
        )
