"""A card that fills up under load: a real applianced with its flight recorder on a made-up libnvidia-ml, a real gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from appliance.core.units import GIB
from tests.fakes.cards import HAS_COMPILER, FakeNvml, make_box
from tests.fakes.scripted_appliance import ROOT, Answer, GatewayProcess, gateway
from tests.integration.supervisor.harness import Applianced

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no gcc to build a libnvidia-ml with")

LONG = "word " * 1800
"""Some 2,250 tokens by its bytes."""


async def asked(running: GatewayProcess, content: str, max_tokens: int, **headers: str) -> Answer:
    """One message."""
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": max_tokens}
    return await running.ask("POST", "/v1/chat/completions", body, **headers)


async def metric(running: GatewayProcess, line: str) -> float:
    """The value of a series."""
    page = (await running.ask("GET", "/metrics")).body.decode()
    return next((float(found.split()[-1]) for found in page.splitlines() if found.startswith(f"{line} ")), -1.0)


async def test_over_the_red_line_long_prompts_go_in_alone(tmp_path: Path, run_dir: Path) -> None:
    """Said in /status, /metrics and to the client; short prompts go on; below the line all is as before."""
    box = make_box(tmp_path / "box")
    (tmp_path / "box/boot_id").write_text("0c1b\n")
    nvml = FakeNvml(tmp_path / "nvml")
    environment = {"BOX": str(tmp_path / "box"), "PYTHONPATH": str(ROOT), **nvml.environment}
    launcher = (str(ROOT / "tests/fakes/boxed_applianced.py"),)
    applianced = Applianced(tmp_path, "--step-s", "0.02", environment=environment, program=launcher)
    assert box.dev.exists()
    try:
        applianced.wait_state("serving")
        async with gateway(applianced.run_dir) as running:
            await running.until(lambda status: status["standing"] == "open", "open")
            nvml.order(f"used 0 {int(23.8 * GIB)}")
            status = await running.until(lambda status: status["memory"]["over"], "the card is over the line")
            held = asyncio.ensure_future(asked(running, "hello", 1000))
            await running.until(lambda status: status["slots"]["in_use"] == 1, "a short prompt is answered")
            refused = await asked(running, LONG, 1, x_request_timeout="0.5")
            short = await asked(running, "hello", 1)
            counted = await metric(running, 'appliance_memory_held_back_total{reason="red_line"}')
            red = await metric(running, "appliance_memory_red")
            waiting = asyncio.ensure_future(asked(running, LONG, 1))
            await running.until(lambda status: status["queue"]["length"] == 1, "a long one waits")
            nvml.order(f"used 0 {20 * GIB}")
            answered = await waiting
            assert not held.done(), "it went in beside the one that runs"
            after = await running.status()
            held.cancel()
    finally:
        applianced.stop()
    assert "card 0000:01:00 has 99.2 % of its 24.00 GiB taken, above the red line of 98.0 %" in status["sentence"]
    assert (refused.status, refused.error()["code"], "retry-after" in refused.headers) == (503, "memory_short", True)
    assert "99.2 %" in refused.error()["message"]
    assert (short.status, answered.status) == (200, 200)
    assert (red, counted) == (1, 1)
    assert (after["memory"]["over"], after["memory"]["sentence"]) == (False, "")
