"""Slots, the queue and its bounds, as clients see them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from tests.fakes.scripted_appliance import appliance, gateway


async def test_the_engine_never_has_more_than_its_slots(run_dir: Path) -> None:
    """Thirty clients, three slots: never more than three at once, all answered, first come first served."""
    async with appliance(run_dir, max_running=3) as (running, _):
        finished: list[int] = []

        async def client(number: int) -> None:
            answer = await running.post({"do": "whole", "delay_s": 0.02})
            assert answer.status == 200
            finished.append(number)

        first = [asyncio.ensure_future(running.post({"do": "whole", "delay_s": 3})) for _ in range(3)]
        await running.until(lambda status: status["slots"]["in_use"] == 3, "three run")
        clients = []
        for number in range(12):
            clients.append(asyncio.ensure_future(client(number)))
            await running.until(lambda status, number=number: status["queue"]["length"] == number + 1, "queued")
        status = await running.status()
        assert (status["slots"]["capacity"], status["slots"]["in_use"], len(status["slots"]["holding"])) == (3, 3, 3)
        assert [waiter["position"] for waiter in status["queue"]["waiting"]] == list(range(12))
        most = 0
        while not all(task.done() for task in clients):
            most = max(most, (await running.status())["slots"]["in_use"])
        await asyncio.gather(*first, *clients)
    assert most == 3
    # Three run side by side, so neighbours may finish in either order; nobody overtakes a whole round.
    assert all(abs(place - number) < 3 for place, number in enumerate(finished))


async def test_a_full_queue_is_told_so_with_the_numbers(run_dir: Path) -> None:
    """429 with Retry-After and a code; reads still go through."""
    async with appliance(run_dir, "admission.max_concurrent_decodes=1", "admission.queue_size=2") as (running, _):
        tasks = [asyncio.ensure_future(running.post({"do": "whole", "delay_s": 1.0})) for _ in range(3)]
        await running.until(lambda status: (status["slots"]["in_use"], status["queue"]["length"]) == (1, 2), "full")
        refused = await running.post({"do": "whole"})
        models = await running.ask("GET", "/v1/models")
        for task in tasks:
            task.cancel()
    assert (refused.status, refused.error()["code"]) == (429, "queue_full")
    assert "1 requests run (1 slots) and 2 wait, which is the limit of 2" in refused.error()["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert models.status == 200


async def test_waiting_too_long_is_refused(run_dir: Path) -> None:
    """429 after queue_timeout_s, and Retry-After grows with what is known of the others."""
    async with appliance(run_dir, "admission.max_concurrent_decodes=1", "admission.queue_timeout_s=0.3") as (running, _):
        assert (await running.post({"do": "whole", "delay_s": 2})).status == 200
        long = asyncio.ensure_future(running.post({"do": "whole", "delay_s": 1.5}))
        await running.until(lambda status: status["slots"]["in_use"] == 1, "one runs")
        late = await running.post({"do": "whole"})
        assert (late.status, late.error()["code"]) == (429, "queue_timeout")
        assert int(late.headers["retry-after"]) >= 2
        assert (await long).status == 200


async def test_queue_time_does_not_pass_while_there_is_no_engine(run_dir: Path) -> None:
    """A restart longer than queue_timeout_s refuses nobody who waits."""
    async with appliance(run_dir, "admission.queue_timeout_s=0.4", max_running=1) as (running, scripted):
        asked = [asyncio.ensure_future(running.post({"do": "whole", "delay_s": 0.1})) for _ in range(2)]
        await running.until(lambda status: status["queue"]["length"] == 1, "one runs, one waits")
        await scripted.crash()
        await asyncio.sleep(0.8)
        await scripted.start_engine()
        assert [answer.status for answer in await asyncio.gather(*asked)] == [200, 200]


async def test_those_who_lost_the_engine_go_first(run_dir: Path) -> None:
    """A request that was in comes back before one that was not, also when fewer slots are left."""
    async with appliance(run_dir, max_running=2) as (running, scripted):
        order: list[str] = []

        async def client(name: str) -> None:
            assert (await running.post({"do": "whole", "delay_s": 0.2})).status == 200
            order.append(name)

        was_in = [asyncio.ensure_future(client("in")) for _ in range(2)]
        await running.until(lambda status: status["slots"]["in_use"] == 2, "two run")
        waited = asyncio.ensure_future(client("waiting"))
        await running.until(lambda status: status["queue"]["length"] == 1, "one waits")
        await scripted.crash()
        await running.until(lambda status: status["queue"]["length"] == 3, "all wait")
        await scripted.start_engine(publish=False)
        scripted.serve(replace(scripted.limits, max_running=1))
        await asyncio.gather(*was_in, waited)
    assert order == ["in", "in", "waiting"]


async def test_holding_is_bounded_by_the_queue_too(run_dir: Path) -> None:
    """While there is no engine, one more than the queue takes is refused with the reason, not with "queue full"."""
    async with gateway(run_dir, "admission.queue_size=3") as running:
        tasks = [asyncio.ensure_future(running.post({"do": "whole"})) for _ in range(3)]
        await running.until(lambda status: status["queue"]["length"] == 3, "three are held")
        refused = await running.post({"do": "whole"})
        for task in tasks:
            task.cancel()
    assert (refused.status, refused.error()["code"]) == (503, "engine_unavailable")
    assert "applianced is not answering" in refused.error()["message"]


async def test_the_patience_of_a_client_is_for_the_queue_and_not_for_a_crash(run_dir: Path) -> None:
    """X-Request-Timeout says how long it waits for a slot. It had one in time: hours later, a crash is a pause as for everybody."""
    body = {"do": "stream", "stream": True, "temperature": 0, "events": 30, "gap_s": 0.05}
    async with appliance(run_dir) as (running, scripted):
        asked = asyncio.ensure_future(running.ask("POST", "/v1/chat/completions", body, x_request_timeout="0.5"))
        await running.until(lambda status: any(one["age_s"] > 0.6 for one in status["inflight"]), "its patience would be over")
        await scripted.crash()
        await running.until(lambda status: status["queue"]["length"] == 1, "it waits for the next engine")
        await asyncio.sleep(0.2)
        assert not asked.done()
        await scripted.start_engine()
        answer = await asked
    assert answer.events()[-1] == "[DONE]"
    assert answer.body.count(b" t29 ") == 1
