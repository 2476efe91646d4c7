"""Two cards with an engine each, from the client's port down: a real gateway, a real applianced, engines that obey."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from pathlib import Path

import pytest

from appliance.core.units import GIB
from tests.fakes.cards import HAS_COMPILER
from tests.fakes.scripted_appliance import Answer, GatewayProcess, gateway
from tests.integration.supervisor.test_fleet import SECOND, TwoCards

pytestmark = [pytest.mark.skipif(not HAS_COMPILER, reason="no gcc to build a libnvidia-ml with"), pytest.mark.timeout(120)]

TOKENS = 60
WHOLE = "".join(f" t{n}" for n in range(TOKENS))


async def ask(running: GatewayProcess, number: int) -> Answer:
    """A conversation of its own, whose answer a second run says again; every other one streams."""
    question = [{"role": "user", "content": f"question {number}"}]
    return await running.post({"model": "fake", "messages": question, "max_tokens": TOKENS, "temperature": 0, "stream": number % 2 == 0})


def text_of(answer: Answer) -> str:
    """All that the client was given."""
    if answer.headers["content-type"].startswith("application/json"):
        body = answer.json()
        return str(body["choices"][0]["message"]["content"] if "choices" in body else body)
    events = [json.loads(event) for event in answer.events() if event != "[DONE]"]
    return "".join(event["choices"][0]["delta"].get("content") or "" if "choices" in event else str(event) for event in events)


async def served(one: TwoCards) -> list[int]:
    """How many requests each engine that lives has answered."""
    return [(await asyncio.to_thread(one.engine_of, index, "/stats"))["served"] for index in (0, 1)]


async def test_clients_see_one_endpoint() -> None:
    """Requests go to both engines; one is killed under 12 of them, then both are restarted in turn: every answer is whole, and new ones
    are answered all the time."""
    with tempfile.TemporaryDirectory(prefix="two-", ignore_cleanup_errors=True) as folder:
        one = TwoCards(Path(folder))
        try:
            before = await asyncio.to_thread(one.wait_each, "serving", "serving")
            async with gateway(one.run_dir) as running:
                await running.until(lambda status: status["standing"] == "open", "open")
                answers = await asyncio.gather(*(ask(running, number) for number in range(12)))
                shared = await served(one)
                assert min(shared) >= 3, f"both have some of them: {shared}"

                under_way = [asyncio.ensure_future(ask(running, number)) for number in range(12, 24)]
                await running.until(lambda status: status["slots"]["in_use"] == 12, "they run")
                os.kill(before[0]["engine_pid"], signal.SIGKILL)
                answers += await asyncio.gather(*under_way)
                await asyncio.to_thread(one.wait_each, "serving", "serving")

                await asyncio.to_thread(one.ask, "restart")
                later = []
                while "the rolling restart is done" not in one.log.read_text():
                    later += await asyncio.gather(*(ask(running, number) for number in range(24, 28)))
                answers += later
                generations = [replica["generation"] for replica in one.replicas()]
                assert await running.stop() == 0
        finally:
            code = await asyncio.to_thread(one.stop)
    assert code == 0
    assert later, "none was asked during the restart"
    broken = [(answer.status, text_of(answer)) for answer in answers if (answer.status, text_of(answer)) != (200, WHOLE)]
    assert not broken, "\n".join(map(str, broken))
    assert generations == [3, 2]


async def test_each_engine_is_held_back_by_its_own_card() -> None:
    """One card over its red line: long prompts go alone to its engine and as ever to the other; metrics tell the two apart."""
    with tempfile.TemporaryDirectory(prefix="two-", ignore_cleanup_errors=True) as folder:
        one = TwoCards(Path(folder))
        try:
            await asyncio.to_thread(one.wait_each, "serving", "serving")
            async with gateway(one.run_dir) as running:
                one.nvml.order(f"used 1 {int(23.8 * GIB)}")
                status = await running.until(
                    lambda status: len(status["engines"]) == 2 and status["engines"][1]["memory"]["over"],
                    "the second card is over its line",
                )
                page = (await running.ask("GET", "/metrics")).body.decode()
                assert await running.stop() == 0
        finally:
            code = await asyncio.to_thread(one.stop)
    assert code == 0
    assert not status["engines"][0]["memory"]["over"]
    assert SECOND in status["engines"][1]["memory"]["sentence"]
    for name in ("appliance_engine_rung", "appliance_replica_generation", "appliance_replica_up"):
        assert [f'{name}{{replica="{replica}"}}' in page for replica in (0, 1)] == [True, True], name
