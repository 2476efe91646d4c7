"""When a suspect is tried, what that means for the lane, and what follows from the outcome."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from appliance.gateway import trials as module
from appliance.gateway.envelope import Refused
from appliance.gateway.inflight import LiveRequest, next_order
from appliance.gateway.resume import LifeName
from appliance.gateway.schedule import Ticket
from appliance.gateway.sse import Dialect
from appliance.gateway.trials import Trials


def request(*generations: int, body: bytes = b"{}") -> LiveRequest:
    """One that was with engines which died."""
    order = next_order()
    ticket = Ticket(order, f"r{order}")
    path = "/v1/completions"
    one = LiveRequest(f"r{order}", "POST", path, path.encode(), [], body, True, Dialect.OPENAI, 0.0, ticket)
    one.losses.crashes.extend(map(LifeName, generations))
    return one


class Court:
    """Trials, and what the relay would do around them."""

    def __init__(self) -> None:
        self.inflight: set[LiveRequest] = set()
        self.with_engine: set[LiveRequest] = set()
        self.serves = True
        self.made_room = 0
        self.trials = Trials(self.inflight, lambda _: len(self.with_engine), self._make_room, self.settle)

    def _make_room(self) -> None:
        self.made_room += 1

    def settle(self) -> None:
        self.trials.review([0] if self.serves else [])

    def come(self, one: LiveRequest, *, running: bool = False) -> LiveRequest:
        """Accepted; perhaps with the engine."""
        self.inflight.add(one)
        if running:
            self.with_engine.add(one)
        return one

    def go(self, one: LiveRequest) -> None:
        """Answered."""
        self.inflight.discard(one)
        self.with_engine.discard(one)
        self.settle()

    def suspect(self, one: LiveRequest, patience_s: float = 20.0) -> asyncio.Task[bool]:
        """Waits for its trial."""
        self.come(one)
        return asyncio.create_task(self.trials.enter(one, patience_s))


async def turns(count: int = 5) -> None:
    """Let tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_those_who_came_before_are_served_first() -> None:
    """While they are, the lane stays open; then the suspect has the engine to itself."""
    court = Court()
    before = court.come(request(), running=True)
    trial = court.suspect(one := request(1, 2))
    await turns()
    assert not trial.done()
    assert court.trials.closes is None
    court.go(before)
    assert await trial is True
    assert court.trials.closes == 0
    assert court.trials.is_alone(one)


async def test_newcomers_wait_for_the_trial_and_go_in_behind_it() -> None:
    """The lane is closed until those inside are out (or taken back), then for the trial, and no longer."""
    court = Court()
    trial = court.suspect(one := request(1, 2))
    await trial
    court.with_engine.add(one)
    other = court.suspect(two := request(1, 2))
    await turns()
    assert not other.done()
    court.trials.clear(one)
    assert court.trials.closes == 0  # the next trial is due, and it does not wait for the end of the first one
    assert court.made_room == 1
    court.with_engine.discard(one)
    court.settle()
    assert await other is True
    assert court.trials.leave(two) is not None
    court.go(two)
    assert court.trials.closes is None


async def test_whoever_came_last_is_tried_first() -> None:
    """The engine was fine before it came."""
    court = Court()
    blocker = court.come(request(), running=True)
    first, last = request(1, 2), request(1, 2)
    waiting = court.suspect(first), court.suspect(last)
    await turns()
    court.go(blocker)
    await turns()
    assert court.trials.is_alone(last)
    assert [task.done() for task in waiting] == [False, True]
    waiting[0].cancel()


async def test_a_conviction_explains_the_crashes_of_others() -> None:
    """Who has the same body shares its fate; whose crashes it explains is free; who has others stays suspected."""
    court = Court()
    blocker = court.come(request(), running=True)
    culprit = request(1, 2, 3, body=b'{"poison": 1}')
    twin, innocent, other = request(1, 2, body=culprit.body), request(2), request(2, 9)
    tasks = [court.suspect(one) for one in (twin, innocent, other)]
    await turns()
    told = Refused(500, "request_quarantined", "it kills engines")
    court.trials.convicted(culprit, lambda one: one.body.decode(), told)
    with pytest.raises(Refused) as refused:
        await tasks[0]
    assert refused.value is told
    assert await tasks[1] is False
    assert innocent.losses.crashes == []
    assert not tasks[2].done()
    tasks[2].cancel()
    court.go(blocker)


async def test_whoever_comes_with_the_body_of_a_suspect_waits_for_its_trial() -> None:
    """It is not let in beside the others, where it would kill the next engine; nor does its trial wait for it."""
    court = Court()
    trial = court.suspect(one := request(1, 2, body=b"poison"))
    assert await trial is True
    like, other = court.come(request(body=b"poison")), court.come(request(body=b"good"))
    assert (court.trials.accuses(like), court.trials.accuses(other), court.trials.accuses(one)) == (True, False, False)
    waiting = asyncio.create_task(court.trials.await_like(like, 20.0))
    second = court.suspect(request(7, 8, body=b"another"))
    court.go(other)
    court.trials.leave(one)
    await turns()
    assert not waiting.done(), "the engine died, and it has not been judged"
    told = Refused(500, "request_quarantined", "it kills engines")
    court.trials.convicted(one, lambda one: one.body.decode(), told)
    with pytest.raises(Refused) as refused:
        await waiting
    assert refused.value is told
    court.trials.forget(one)
    court.go(like)
    court.go(one)
    assert await second is True


@pytest.mark.parametrize("how", ["cleared", "gone", "acquitted"])
async def test_the_like_of_one_that_is_suspected_no_more_goes_on(how: str) -> None:
    """It has got further, its client has left, or its crashes are explained."""
    court = Court()
    blocker = court.come(request(), running=True)
    trial = court.suspect(one := request(1, 2, body=b"suspect"))
    like = court.come(request(body=b"suspect"))
    waiting = asyncio.create_task(court.trials.await_like(like, 20.0))
    await turns()
    assert not waiting.done()
    if how == "acquitted":
        court.trials.convicted(request(1, 2, 3), lambda one: one.body.decode(), Refused(500, "request_quarantined", "it kills engines"))
        assert await trial is False
    elif how == "gone":
        trial.cancel()
        await turns()
        court.trials.forget(one)
    else:
        court.go(blocker)
        assert await trial is True
        court.trials.clear(one)
    assert await asyncio.wait_for(waiting, 5.0) is None
    assert not court.trials.accuses(like)


async def test_the_like_of_a_suspect_does_not_wait_for_ever() -> None:
    """503 with the time; and when a person is needed, it is told."""
    court = Court()
    court.come(request(), running=True)
    trial = court.suspect(request(1, 2, body=b"suspect"))
    await turns()
    with pytest.raises(Refused, match="not found out within 0 s"):
        await court.trials.await_like(court.come(request(body=b"suspect")), 0.05)
    waiting = asyncio.create_task(court.trials.await_like(court.come(request(body=b"suspect")), 20.0))
    await turns()
    court.trials.refuse_all(lambda: Refused(503, "engine_parked", "a person is needed"))
    for task in (trial, waiting):
        with pytest.raises(Refused, match="a person is needed"):
            await task


async def _within(condition: Callable[[], bool], limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_lane_that_does_not_run_empty_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newcomers do not wait for a long answer for ever: the trial is put off until that is over."""
    monkeypatch.setattr(module, "CLOSED_MAX_S", 0.05)
    court = Court()
    before = court.come(request(), running=True)
    trial = court.suspect(request(1, 2))
    await turns()
    long = court.come(request(), running=True)
    court.go(before)
    assert court.trials.closes == 0
    await _within(lambda: court.trials.closes is None)
    assert not trial.done()
    court.go(long)
    assert await trial is True


async def test_others_who_are_never_done_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """After OTHERS_MAX_S the lane is closed for the trial, whoever is still there."""
    monkeypatch.setattr(module, "OTHERS_MAX_S", 0.05)
    court = Court()
    endless = court.come(request(), running=True)
    trial = court.suspect(request(1, 2))
    await turns()
    assert court.trials.closes is None
    await _within(lambda: court.trials.closes == 0)
    court.with_engine.discard(endless)
    court.settle()
    assert await trial is True


async def test_patience_ends() -> None:
    """503 with the numbers; the lane is open again."""
    court = Court()
    court.come(request(), running=True)
    with pytest.raises(Refused, match="2 engines died while they had this request"):
        await court.suspect(request(1, 2), patience_s=0.05)
    assert not court.trials
    assert court.trials.closes is None


async def test_a_client_that_leaves_takes_its_trial_along() -> None:
    """The lane that was closed for it is opened."""
    court = Court()
    before = court.come(request(), running=True)
    trial = court.suspect(request(1, 2))
    await turns()
    court.come(request(), running=True)
    court.go(before)
    assert court.trials.closes == 0
    trial.cancel()
    await asyncio.gather(trial, return_exceptions=True)
    assert not court.trials
    assert court.trials.closes is None


async def test_without_an_engine_nobody_is_tried() -> None:
    """The lane is closed anyway; when a person is needed, all are told."""
    court = Court()
    court.serves = False
    trial = court.suspect(request(1, 2))
    await turns()
    assert not trial.done()
    court.trials.refuse_all(lambda: Refused(503, "engine_parked", "a person is needed"))
    with pytest.raises(Refused, match="a person is needed"):
        await trial


async def test_a_trial_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that lives for long enough with a request that shows no progress: others may come in."""
    monkeypatch.setattr(module, "ALONE_MAX_S", 0.05)
    court = Court()
    one = request(1, 2)
    assert await court.suspect(one) is True
    await _within(lambda: court.trials.closes is None)
    assert not court.trials.is_alone(one)


class Bench(Court):
    """A court with several engines; whoever is with one is there by its index."""

    def __init__(self, *engines: int) -> None:
        super().__init__()
        self.engines = list(engines)
        self.more_may_come = False
        self.busy = dict.fromkeys(engines, 0)
        self.trials = Trials(self.inflight, lambda engine: self.busy[engine], self._make_room, self.settle)

    def settle(self) -> None:
        self.trials.review(self.engines, more_may_come=self.more_may_come)


async def test_with_several_engines_a_trial_begins_at_once_where_least_is_to_do() -> None:
    """The others serve everybody meanwhile, so nobody has to be served first."""
    bench = Bench(0, 1, 2)
    bench.busy = {0: 2, 1: 1, 2: 3}
    bench.come(request())
    trial = bench.suspect(one := request(1, 2))
    await turns()
    assert (bench.trials.closes, bench.made_room, trial.done()) == (1, 1, False)
    bench.busy[1] = 0
    bench.settle()
    assert await trial is True
    assert bench.trials.closes == 1
    assert bench.trials.is_alone(one)
    bench.trials.leave(one)
    assert bench.trials.closes is None


async def test_a_trial_waits_for_a_second_engine_that_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would take the only one from everybody; but not for ever."""
    monkeypatch.setattr(module, "OTHERS_MAX_S", 0.2)
    bench = Bench(0, 1)
    bench.engines, bench.more_may_come = [1], True
    first = bench.suspect(request(1, 2))
    await turns()
    assert (first.done(), bench.trials.closes) == (False, None)
    bench.engines = [0, 1]
    bench.settle()
    assert await first is True
    assert bench.trials.closes == 0
    bench.trials.refuse_all(lambda: Refused(503, "engine_parked", "a person is needed"))
    late = Bench(0, 1)
    late.engines, late.more_may_come = [1], True
    second = late.suspect(request(1, 2))
    await turns()
    assert not second.done()
    assert await asyncio.wait_for(second, 5.0) is True
    assert late.trials.closes == 1


async def test_an_engine_that_dies_before_its_trial_begins_is_replaced_by_another() -> None:
    """The one that was to run empty is not there any more."""
    bench = Bench(0, 1, 2)
    bench.busy = {0: 1, 1: 2, 2: 3}
    trial = bench.suspect(request(1, 2))
    await turns()
    assert bench.trials.closes == 0
    bench.engines = [1, 2]
    bench.settle()
    assert bench.trials.closes == 1
    bench.busy[1] = 0
    bench.settle()
    assert await trial is True
