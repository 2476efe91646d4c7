"""The pictures of docs/page.md, of a box that is not there: `python -m tests.integration.page.screenshots docs/page`. Needs chromium."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.async_api import async_playwright

from appliance.core.states import EngineState
from tests.fakes.scripted_appliance import GatewayProcess, gateway
from tests.fakes.scripted_box import ScriptedBox, incident

HISTORY_S = 65.0
"""So long something runs before the first picture: six steps of speed."""


async def _ask(running: GatewayProcess, events: int) -> None:
    body = {"do": "stream", "stream": True, "events": events, "gap_s": 0.03, "role": True, "messages": []}
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        async with running.connection() as connection:
            connection.send("POST", "/v1/chat/completions", body)
            await connection.answer()


async def _keep_busy(running: GatewayProcess) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number in range(11):
            tasks.create_task(_for_ever(running, 150 + 40 * number))


async def _for_ever(running: GatewayProcess, events: int) -> None:
    while True:
        await _ask(running, events)
        await asyncio.sleep(0.5)


async def _take(browser: Any, port: int, path: Path, *, shows: str, opened: bool = False, whole: bool = False, **options: Any) -> None:
    context = await browser.new_context(**({"viewport": {"width": 1180, "height": 900}} | options))
    page = await context.new_page()
    await page.goto(f"http://127.0.0.1:{port}/")
    await page.wait_for_function("(text) => document.querySelector('#state').textContent === text", arg=shows)
    await page.wait_for_selector("#cards canvas >> nth=4")
    await page.select_option("#range", "900")
    if opened:
        await page.click("#incidents summary >> nth=0")
        await page.locator("#incidents-title").scroll_into_view_if_needed()
    await asyncio.sleep(2.5)
    target = page.locator("section:has(#incidents-title)") if opened else page
    await target.screenshot(path=path, **({"full_page": True} if whole else {}))
    await context.close()
    print(path)


async def main(folder: Path) -> None:
    """All of them."""
    box_dir = Path(tempfile.mkdtemp(prefix="shots-"))
    folder.mkdir(parents=True, exist_ok=True)
    program = shutil.which("chromium")
    assert program is not None, "apt-get install chromium"
    box = ScriptedBox(box_dir)
    box.limits = type(box.limits)("Qwen3.6-27B-GPTQ-Int4", 102_400, 8, 109_000)
    box.incidents = [incident(1, time.time() - 420, 1.9, after=1)]
    box.rung, box.why = 1, box.incidents[0]["action"]["basis"]
    box.tried = [{"cause": "oom_activation", "rung": 0, "times": 1}]
    await box.listen()
    await box.start_engine()
    box.say_serving("serving Qwen3.6-27B-GPTQ-Int4 on rung 1 (generation 1)")
    async with gateway(box_dir) as running, async_playwright() as playwright:
        busy = asyncio.create_task(_keep_busy(running))
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        await asyncio.sleep(HISTORY_S)
        await _take(browser, running.port, folder / "serving.png", shows="degraded", whole=True)
        await _take(browser, running.port, folder / "incident.png", shows="degraded", opened=True)
        phone = {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"}
        await _take(browser, running.port, folder / "phone.png", shows="degraded", **phone)
        box.say(EngineState.STARTING, "the engine loads (rung 1, generation 2); restarted because it was killed by SIGKILL")
        await _take(browser, running.port, folder / "starting.png", shows="starting")
        box.say(EngineState.PARKED, "parked because 3 starts in a row failed: the model folder has no config.json", retry_after_s=None)
        await _take(browser, running.port, folder / "parked.png", shows="parked")
        busy.cancel()
        await browser.close()
    await box.close()
    shutil.rmtree(box_dir)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
