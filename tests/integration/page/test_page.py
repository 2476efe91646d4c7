"""The page in a real browser: what its owner sees of a crash, of every state, of silence, of a day; and that everybody can read it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from appliance.core.states import EngineState
from tests.fakes.scripted_appliance import GatewayProcess, free_port, gateway
from tests.fakes.scripted_box import ScriptedBox, flight_since, incident
from tests.fakes.scripted_replicas import replicas
from tests.integration.gateway.test_keys import bearer, keys_file
from tests.integration.page.conftest import NewTab, Tab
from tests.integration.supervisor.harness import Applianced

SHOWN_S = 2.0
"""A crash is on the page by then."""
HOSTILE = "<img src=x onerror=alert(1)> & <b>not markup</b>"


@asynccontextmanager
async def boxed(run_dir: Path, *settings: str) -> AsyncIterator[tuple[ScriptedBox, GatewayProcess]]:
    """A scripted box with an engine, and a gateway that serves."""
    box = ScriptedBox(run_dir)
    try:
        await box.listen()
        await box.start_engine()
        async with gateway(run_dir, *settings) as running:
            yield box, running
    finally:
        await box.close()


async def opened(tab: Tab, port: int) -> Tab:
    """On this gateway's page."""
    await tab.page.goto(f"http://127.0.0.1:{port}/")
    return tab


async def test_a_crash_is_seen_and_so_is_the_recovery(tmp_path: Path, run_dir: Path, new_tab: NewTab) -> None:
    """A real applianced, kill -9 to its engine: on the page within 2 s, then the incident with cause and time to recovery."""
    box = Applianced(tmp_path, "--ready-after-s", "2.5")
    try:
        box.wait_state("serving")
        async with gateway(box.run_dir) as running, new_tab() as tab:
            await opened(tab, running.port)
            await tab.shows("#state", "serving")
            await tab.shows("#incidents-words", "Nothing has crashed")
            os.kill(box.status()["engine_pid"], signal.SIGKILL)
            killed_s = time.monotonic()
            away = "() => !['serving', 'not heard yet'].includes(document.querySelector('#state').textContent)"
            await tab.page.wait_for_function(away, timeout=10_000)
            seen_s = time.monotonic() - killed_s
            await tab.shows("#state", "serving", 30)
            await tab.shows("#incidents", "serving again after")
            await tab.page.click("#incidents summary")
            await tab.shows("#incidents details", "SIGKILL")
            print(f"\nthe crash was on the page after {seen_s:.2f} s")
            assert seen_s < SHOWN_S
            assert tab.faults == []
    finally:
        box.stop()


async def test_every_state_has_its_words(run_dir: Path, new_tab: NewTab) -> None:
    """In the order of their declaration; the sentence is applianced's own; the title tells it too."""
    async with boxed(run_dir) as (box, running), new_tab() as tab:
        await opened(tab, running.port)
        await tab.shows("#state", "serving")
        for state in EngineState:
            box.state = state.value
            box.say(state, f"because of {state.value}")
            await tab.shows("#state", state.value.replace("_", " "))
            await tab.shows("#sentence", f"because of {state.value}")
            assert state.value.replace("_", " ") in await tab.page.title()
        assert await tab.page.get_attribute("#state", "class") == "state bad"
        assert tab.faults == []


async def test_slots_queue_ladder_budget_and_cards_are_there(run_dir: Path, new_tab: NewTab) -> None:
    """What is in the slots and who waits; which rung and why; planned beside measured; both cards. Never a word of a prompt."""
    secret = "nobody-may-read-this"
    async with boxed(run_dir, "admission.max_concurrent_decodes=2") as (box, running), new_tab() as tab:
        crash = incident(1, time.time() - 60, 1.9, after=1)
        box.incidents, box.rung, box.why = [crash], 1, crash["action"]["basis"]
        body = {"do": "stream", "stream": True, "events": 600, "gap_s": 0.05, "messages": [{"role": "user", "content": secret}]}
        async with running.connection() as one, running.connection() as two, running.connection() as three:
            for connection in (one, two, three):
                connection.send("POST", "/v1/chat/completions", body)
            await opened(tab, running.port)
            await tab.shows("#slots-words", "2 of 2 slots in use")
            await tab.shows("#slots tbody", "/v1/chat/completions")
            await tab.shows("#queue-words", "1 request waits")
        await tab.shows("#ladder [aria-current]", "Rung 1, in force")
        await tab.shows("#ladder-why", "ran out of memory")
        await tab.shows("#budget table", "17.67 GiB")
        await tab.shows("#cards", "0000:02:00.0")
        await tab.shows("#cards", "PCIe generation 4, 8 lanes")
        assert await tab.page.locator("#cards canvas").count() == 5
        await tab.shows("#queue-words", "Nobody waits")
        assert secret not in await tab.page.content()
        assert tab.faults == []


async def test_each_of_several_engines_has_a_line(run_dir: Path, new_tab: NewTab) -> None:
    """Its state, its slots and what it says; with one engine there is no such table."""
    async with replicas(run_dir, max_running=4) as (running, scripted), new_tab() as tab:
        body = {"do": "stream", "stream": True, "events": 600, "gap_s": 0.05}
        async with running.connection() as one, running.connection() as two:
            for connection in (one, two):
                connection.send("POST", "/v1/chat/completions", body)
            await opened(tab, running.port)
            await tab.shows("#engines tbody tr:nth-child(1)", "1 of 4")
            await tab.shows("#engines tbody tr:nth-child(2)", "1 of 4")
            await tab.shows("#slots tbody", "1 of engine 0")
            await scripted.engines[1].crash(reason=f"it died of SIGKILL {HOSTILE}")
            await tab.shows("#engines tbody tr:nth-child(2)", f"it died of SIGKILL {HOSTILE}")
            await tab.shows("#sentence", "1 of 2 engines serves; card 0000:02:00: it died")
            await tab.shows("#engines tbody tr:nth-child(1)", "serving")
        assert await tab.page.locator("#engines tbody tr").count() == 2
        assert tab.faults == []
    async with boxed(run_dir) as (_, running), new_tab() as tab:
        await opened(tab, running.port)
        await tab.shows("#slots-words", "slots in use")
        assert await tab.page.is_hidden("#engines")


async def test_what_is_held_back_or_refused_is_said_and_why(run_dir: Path, new_tab: NewTab) -> None:
    """Nothing while there is nothing; then the card over its red line, the lengths that are configured, and those that diagnosis found."""
    async with boxed(run_dir) as (_, running), new_tab() as tab:
        await opened(tab, running.port)
        await tab.shows("#state", "serving")
        assert await tab.page.is_hidden("#restrictions")
    settings = ("admission.vram_red_line=0.9", "admission.fused_lengths=[513]")
    async with boxed(run_dir, *settings) as (box, running), new_tab() as tab:
        box.fused = [{"tokens": 777, "why": f"3 of 3 crashes met it {HOSTILE}"}]
        await box.crash()
        await box.start_engine()
        await opened(tab, running.port)
        await tab.shows("#restrictions", "above the red line of 90.0 %")
        await tab.shows("#restrictions", "Prompts of exactly 513 tokens are refused")
        await tab.shows("#restrictions", f"Prompts of exactly 777 tokens are refused, because 3 of 3 crashes met it {HOSTILE}.")
        assert await tab.page.is_visible("#restrictions")
        assert await tab.page.locator("#restrictions > li").count() == 3
        assert tab.faults == []


async def test_silence_is_said_and_a_new_gateway_is_found(run_dir: Path, new_tab: NewTab) -> None:
    """Everything is killed: what stands is marked as old. Everything is back: the page goes on, nothing reloaded, nothing twice."""
    port = free_port()
    box = ScriptedBox(run_dir)
    await box.listen()
    await box.start_engine()
    async with new_tab() as tab:
        async with gateway(run_dir, f"gateway.port={port}") as first:
            await opened(tab, port)
            await tab.shows("#state", "serving")
            await tab.page.evaluate("() => (window.notReloaded = true)")
            await box.close()
            await tab.shows("#away", "applianced does not answer")
            await first.stop(signal.SIGKILL)
        await tab.shows("#stale", "Nothing was heard since")
        assert await tab.page.is_visible("#stale")
        await box.listen()
        await box.start_engine()
        async with gateway(run_dir, f"gateway.port={port}"):
            await tab.page.wait_for_selector("#stale", state="hidden", timeout=20_000)
            await tab.page.wait_for_selector("#away", state="hidden", timeout=20_000)
            await tab.shows("#facts", "generation 2")
            assert await tab.page.evaluate("() => window.notReloaded")
        assert tab.faults == []
    await box.close()


async def test_with_keys_the_page_asks_for_one_and_an_admin_has_buttons(run_dir: Path, new_tab: NewTab) -> None:
    """By keyboard alone: key, restart, yes. Alice's key shows all and has no buttons; no key stands in an address."""
    path, secrets = keys_file(run_dir, alice="", owner="admin = true")
    async with boxed(run_dir, f"gateway.api_keys_file={path}", "gateway.admin_actions=true") as (box, running), new_tab() as tab:
        await opened(tab, running.port)
        await tab.shows("#key-why", "API key")
        await tab.page.keyboard.type("sk-lla-wrong")
        await tab.page.keyboard.press("Enter")
        await tab.shows("#key-why", "not one of this endpoint's")
        await tab.page.keyboard.type(secrets["alice"])
        await tab.page.keyboard.press("Enter")
        await tab.shows("#state", "serving")
        assert not await tab.page.is_visible("#actions")
        await tab.page.focus("#key-button")
        await tab.page.keyboard.press("Enter")
        await tab.page.keyboard.type(secrets["owner"])
        await tab.page.keyboard.press("Enter")
        await tab.page.wait_for_selector("#actions", state="visible")
        await tab.page.focus("text=Original rung")
        await tab.page.keyboard.press("Enter")
        await tab.page.focus("#confirm-yes")
        await tab.page.keyboard.press("Enter")
        await tab.shows("#actions", "draining")
        assert [(verb, arguments.get("rung")) for verb, arguments in box.asked] == [("restart", 0)]
        assert "sk-lla" not in tab.page.url
        status = await running.ask("GET", "/status", **bearer(secrets["alice"]))
        assert status.status == 200
        assert tab.faults == []


async def test_a_question_is_answered_and_a_report_copied(run_dir: Path, new_tab: NewTab) -> None:
    """Through the public API, streamed; and the Markdown of an incident lands on the clipboard."""
    async with boxed(run_dir) as (box, running), new_tab(permissions=["clipboard-read", "clipboard-write"]) as tab:
        box.incidents = [incident(1, time.time() - 60, 1.9)]
        box.incidents[0]["diagnosis"]["sentence"] = HOSTILE
        await opened(tab, running.port)
        await tab.shows("#model", "fake")
        await tab.page.fill("#try-text", json.dumps({"do": "stream", "events": 5}))
        await tab.page.click("#try-send")
        await tab.shows("#try-status", "complete")
        await tab.shows("#try-answer", "t4")
        await tab.page.click("#incidents summary")
        await tab.page.click("text=Copy report as Markdown")
        await tab.shows("#incidents", "Copied")
        assert "**oom_activation**" in await tab.page.evaluate("() => navigator.clipboard.readText()")
        await tab.shows("#incidents", HOSTILE)
        assert await tab.page.locator("#incidents img").count() == 0
        async with tab.page.expect_download() as download:
            await tab.page.click("text=Download bundle")
        assert (await download.value).suggested_filename == f"{box.incidents[0]['incident_id']}.tar.zst"
        await tab.page.click("#snippets summary >> nth=0")
        await tab.shows("#snippets", f"http://127.0.0.1:{running.port}/v1/chat/completions")
        assert tab.faults == []


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
async def test_everybody_can_read_it(run_dir: Path, new_tab: NewTab, scheme: str, width: int) -> None:
    """axe-core finds nothing, in both colours, on a screen and on a phone, with all there is opened; nothing runs out sideways."""
    axe = pytest.importorskip(
        "axe_playwright_python.async_playwright", reason="NOT CHECKED: accessibility; pip install axe-playwright-python"
    )
    size = {"width": width, "height": 844}
    look = {"color_scheme": scheme, "viewport": size, "reduced_motion": "reduce"}
    async with boxed(run_dir, "admission.vram_red_line=0.9") as (box, running), new_tab(**look) as tab:
        box.incidents = [incident(2, time.time() - 60, None, after=1), incident(1, time.time() - 600, 1.9)]
        async with running.connection() as busy:
            busy.send("POST", "/v1/chat/completions", {"do": "stream", "stream": True, "events": 600, "gap_s": 0.05})
            await opened(tab, running.port)
            await tab.shows("#slots tbody", "/v1/")
            await tab.shows("#cards", "PCIe")
            await tab.shows("#restrictions", "red line")
            await tab.page.click("#incidents summary >> nth=0")
            await tab.page.click("#snippets summary >> nth=0")
            found = [await axe.Axe().run(tab.page)]
            box.say(EngineState.PARKED, "parked because nothing is left to try", retry_after_s=None)
            await tab.shows("#state", "parked")
            found.append(await axe.Axe().run(tab.page))
            await tab.page.evaluate("() => document.querySelector('main').append(document.createElement('button'))")
            assert (await axe.Axe().run(tab.page)).violations_count > 0, "axe finds nothing in what is wrong: it does not look"
        told = [violation for results in found for violation in results.response["violations"]]
        words = [f"{one['id']}: {one['help']}: {[node['html'][:120] for node in one['nodes']][:3]}" for one in told]
        assert words == []
        assert await tab.page.evaluate("() => document.documentElement.scrollWidth") <= width


async def test_a_day_of_data_stays_smooth_and_small(run_dir: Path, new_tab: NewTab) -> None:
    """24 hours in steps of ten seconds and two cards: an update costs under 50 ms of processor, the page under 100 MB."""
    async with boxed(run_dir) as (_, running), new_tab(viewport={"width": 1280, "height": 900}) as tab:
        real = await running.status()
        answers = _a_day(real, time.time())

        async def answer(route: Any) -> None:
            await route.fulfill(status=200, content_type="text/event-stream", body=answers.pop(0) if len(answers) > 1 else answers[0])

        await tab.page.route("**/status/events", answer)
        session = await tab.page.context.new_cdp_session(tab.page)
        await session.send("Performance.enable", {"timeDomain": "threadTicks"})
        await opened(tab, running.port)
        await tab.page.select_option("#range", "86400")
        await tab.shows("#cards", "0000:02:00.0")
        before = await _measured(session)
        frames = await tab.page.evaluate(_WATCH_FRAMES)
        after = await _measured(session)
        await session.send("HeapProfiler.collectGarbage")
        heap_mb = (await _measured(session))["JSHeapUsedSize"] / 1e6
        cost_ms = 1000 * (after["TaskDuration"] - before["TaskDuration"]) / frames["updates"]
        print(f"\n{frames['updates']} updates: {cost_ms:.1f} ms of processor each; heap {heap_mb:.1f} MB; frames (ms): {frames['frames']}")
        assert frames["updates"] >= 4
        assert cost_ms < 50
        assert heap_mb < 100
        assert await tab.page.evaluate("() => document.querySelectorAll('#speed canvas').length") == 4
        assert tab.faults == []


_WATCH_FRAMES = """
async () => {
  const frames = [];
  let updates = 0;
  const watcher = new MutationObserver(() => updates++);
  watcher.observe(document.querySelector("#facts"), { childList: true, characterData: true, subtree: true });
  let last = performance.now();
  const end = last + 6000;
  while (last < end) {
    await new Promise(requestAnimationFrame);
    frames.push(performance.now() - last);
    last = performance.now();
  }
  watcher.disconnect();
  frames.sort((a, b) => a - b);
  const at = (share) => Math.round(frames[Math.floor(share * (frames.length - 1))]);
  return { updates, frames: { half: at(0.5), "95 %": at(0.95), most: at(1) } };
}
"""


async def _measured(session: Any) -> dict[str, float]:
    found = await session.send("Performance.getMetrics")
    return {metric["name"]: metric["value"] for metric in found["metrics"]}


def _a_day(status: dict[str, Any], now_s: float) -> list[str]:
    """A first answer with all of it, and then one with a second's news each."""

    def event(name: str, document: Any) -> str:
        return f"id: {now_s:.1f}\nevent: {name}\ndata: {json.dumps(document)}\n\n"

    def step(time_s: int) -> dict[str, Any]:
        slow = 0.01 * (time_s // 10 % 17)
        return {
            "time_s": time_s, "tokens_per_s": 40 + time_s // 10 % 60, "first_p50_s": 0.2 + slow, "first_p95_s": 0.9 + slow,
            "between_p50_s": 0.02, "between_p95_s": 0.02 + slow, "running": 4, "waiting": 1,
        }  # fmt: skip

    def second(number: int) -> str:
        shown = {**status, "uptime_s": 1000 + number, "time_s": now_s + number, "applianced": {"heard_s": now_s, "problem": ""}}
        steps = [step(int(now_s) + 10 * number)]
        since = flight_since(now_s + number - 1, now_s + number)
        return event("now", shown) + event("series", {"step_s": 10, "steps": steps}) + event("flight", since)

    whole = [step(time_s) for time_s in range(int(now_s) - 86_400, int(now_s), 10)]
    first = event("hello", {"version": "0", "key": "", "actions": False, "admin": False})
    first += event("series", {"step_s": 10, "steps": whole}) + event("flight", flight_since(0, now_s))
    return [first, *(second(number) for number in range(1, 60))]
