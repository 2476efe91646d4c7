"""The prompt to an idle engine: when it is sent, and what its silence means."""

from __future__ import annotations

import asyncio

from appliance.supervisor.canary import Canary
from appliance.supervisor.hang import Hang, HangLimits, Silence

LIMITS = HangLimits(floor_s=10.0, ceiling_s=60.0)
QUIET_S = 15.0


class Bird:
    """A canary whose answers are set by the test, and a clock."""

    def __init__(self, *problems: str | None) -> None:
        self.problems = list(problems)
        self.sent = 0
        self.silent = asyncio.Event()
        self.canary = Canary(self.ask, QUIET_S, LIMITS)
        self.now_s = 1e6
        self.cpu_s = 0.0
        self.progress = 7
        self.canary.look(self.now_s, 0.0, self.progress, 0, 0)

    async def ask(self) -> str | None:
        """None where an answer comes; waits for ever where the list is empty."""
        self.sent += 1
        if not self.problems:
            await self.silent.wait()
        return self.problems.pop(0)

    async def after(self, seconds: float, *, running: int = 0, waiting: int = 0, cpu_s: float = 0.0) -> Hang | None:
        """The next look."""
        self.now_s += seconds
        self.cpu_s += cpu_s
        found = self.canary.look(self.now_s, self.cpu_s, self.progress, running, waiting)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return found


async def test_an_idle_engine_is_asked_after_a_quiet_time_and_then_again() -> None:
    """Not before; one at a time; its answer begins the next quiet time."""
    bird = Bird(None, None)
    assert await bird.after(14.0) is None
    assert bird.sent == 0
    await bird.after(1.0)
    assert bird.sent == 1
    await bird.after(1.0)
    await bird.after(14.0)
    assert bird.sent == 1
    await bird.after(1.0)
    assert bird.sent == 2


async def test_clients_are_the_better_proof() -> None:
    """While requests run or wait, or tokens have just come, nothing is sent."""
    bird = Bird()
    for _ in range(10):
        await bird.after(10.0, running=1)
        await bird.after(10.0, waiting=1)
    for _ in range(10):
        bird.progress += 1
        await bird.after(14.0)
    assert bird.sent == 0


async def test_it_steps_back_when_clients_come() -> None:
    """A long prefill began beside it: it is taken back, and its silence means nothing."""
    bird = Bird()
    await bird.after(15.0)
    assert await bird.after(9.0, running=1) is None
    for _ in range(20):
        assert await bird.after(5.0, running=2) is None
    bird.canary.close()


async def test_silence_is_a_hang_after_the_floor_and_later_if_it_computes() -> None:
    """No token from an engine that has nothing else to do; one that computes gets the ceiling."""
    bird = Bird()
    await bird.after(15.0)
    assert await bird.after(9.0, running=1) is None
    found = await bird.after(2.0, running=1)
    assert found is not None
    assert found.silence is Silence.CANARY
    assert "no token for 11.0 s" in str(found)
    busy = Bird()
    await busy.after(15.0)
    assert await busy.after(30.0, running=1, cpu_s=25.0) is None
    assert await busy.after(31.0, running=1, cpu_s=25.0) is not None
    for one in (bird, busy):
        one.canary.close()


async def test_one_error_is_tried_again_and_two_are_a_death() -> None:
    """A server that answers 500 to a prompt while its health is fine: llama-server after an allocation failure."""
    bird = Bird("status 500", None)
    await bird.after(15.0)
    assert await bird.after(1.0) is None
    await bird.after(1.0)
    assert bird.sent == 2
    assert await bird.after(1.0) is None
    dead = Bird("status 500", "status 500")
    await dead.after(15.0)
    await dead.after(1.0)
    await dead.after(1.0)
    found = await dead.after(1.0)
    assert found is not None
    assert "failed twice: status 500" in str(found)


async def test_zero_is_never() -> None:
    """The owner does not want it."""
    canary = Canary(Bird().ask, 0.0, LIMITS)
    for second in range(100):
        assert canary.look(1e6 + second, 0.0, 1, 0, 0) is None
