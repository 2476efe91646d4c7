"""/status/events and what stands behind the page: live, resumable, honest about what it does not know, closed to strangers."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from appliance.core.errors import ControlError
from appliance.core.states import EngineState
from tests.fakes.scripted_appliance import GatewayProcess, ScriptedAppliance, appliance, eventually, gateway
from tests.integration.gateway.test_keys import bearer, keys_file

SECRET = "the-prompt-nobody-may-see"


class Watcher:
    """One who looks."""

    def __init__(self, running: GatewayProcess) -> None:
        self._running = running
        self.seen: list[tuple[str, Any, str]] = []
        self.bytes = b""

    async def read(self, **headers: str) -> AsyncIterator[tuple[str, Any, str]]:
        """Events as they come: name, document, id."""
        async with self._running.connection() as connection:
            connection.send("GET", "/status/events", **headers)
            status, head = await connection.head()
            assert (status, head["content-type"]) == (200, "text/event-stream")
            while data := await connection.chunk():
                self.bytes += data
                for block in data.decode().split("\n\n")[:-1]:
                    fields = dict(line.split(": ", 1) for line in block.split("\n"))
                    event = fields["event"], json.loads(fields["data"]), fields["id"]
                    self.seen.append(event)
                    yield event

    async def until(self, name: str, condition: Any = lambda document: True, **headers: str) -> Any:
        """The first such event's document."""
        async with asyncio.timeout(15):
            async for event, document, _ in self.read(**headers):
                if event == name and condition(document):
                    return document
        raise AssertionError(f"the stream ended before {name}")


def scripted_status(**more: Any) -> dict[str, Any]:
    """As applianced's `status`, as far as the gateway looks at it."""
    return {
        "state": "serving",
        "generation": 1,
        "sentence": "serving fake",
        "rung": {"index": 0},
        "rungs": 1,
        "last_incident": None,
        **more,
    }


def give(scripted: ScriptedAppliance, status: dict[str, Any], asked: list[str]) -> None:
    """Verbs that applianced has."""

    def verb(name: str, answer: Any) -> Any:
        async def handler(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
            asked.append(name)
            return answer(arguments) if callable(answer) else answer

        return handler

    def flight(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        now_s = round(time.time(), 1)
        times = [now_s] if now_s > arguments["since_s"] else []
        return {"samples": {"time_s": times, "running": [1] * len(times)}, "cards": []}

    answers = {"status": status, "ladder": {"rungs": []}, "timeline": {"incidents": []}, "flight": flight, "restart": {"state": "draining"}}
    scripted.verbs = {name: verb(name, answer) for name, answer in answers.items()}


async def test_somebody_who_looks_is_told_all_and_then_what_is_new(run_dir: Path) -> None:
    """Everything once, then a second's news each second; nothing of a prompt or an answer; only what admission wants when nobody looks."""
    asked: list[str] = []
    async with appliance(run_dir, engine=False) as (running, scripted):
        await scripted.hang_up()
        give(scripted, scripted_status(), asked)
        await scripted.listen()
        await scripted.start_engine()
        await running.until(lambda status: status["standing"] == "open", "the gateway is open")
        assert not {"ladder", "timeline"} & set(asked)
        body = {"do": "stream", "stream": True, "events": 200, "gap_s": 0.05, "messages": [{"role": "user", "content": SECRET}]}
        async with running.connection() as busy:
            busy.send("POST", "/v1/chat/completions", body)
            watcher = Watcher(running)
            now = await watcher.until(
                "now", lambda document: document["slots"]["holding"] and document["slots"]["holding"][0]["tokens"] > 3
            )
        holding = now["slots"]["holding"][0]
        assert holding["path"] == "/v1/chat/completions"
        assert holding["age_s"] > holding["last_token_s"] >= 0
        names = [name for name, _, _ in watcher.seen]
        assert names[0] == "hello"
        assert {"now", "machine", "ladder", "incidents", "flight"} <= set(names)
        assert (names.count("machine"), names.count("ladder")) == (1, 1)
        assert SECRET.encode() not in watcher.bytes
        again = Watcher(running)
        await again.until("flight", last_event_id=watcher.seen[-1][2])
        first = next(document for name, document, _ in again.seen if name == "flight")
        assert min(first["samples"]["time_s"]) > float(watcher.seen[-1][2]) - 0.1


async def test_a_crash_is_told_at_once(run_dir: Path) -> None:
    """Not with the next second: the publication itself wakes the stream."""
    async with appliance(run_dir) as (running, scripted):
        watcher, began_s = Watcher(running), 0.0
        async with asyncio.timeout(10):
            async for name, document, _ in watcher.read():
                if name == "now" and not began_s:
                    await scripted.crash(reason="the engine died of SIGKILL")
                    began_s = time.monotonic()
                elif name == "now" and document["publication"]["state"] == "backoff":
                    break
        assert time.monotonic() - began_s < 0.9


async def test_an_applianced_that_is_away_is_said(run_dir: Path) -> None:
    """With the moment at which it was heard last; the stream goes on, and so does the news when it is back."""
    asked: list[str] = []
    async with appliance(run_dir, engine=False) as (running, scripted):
        await scripted.hang_up()
        give(scripted, scripted_status(), asked)
        await scripted.listen()
        seen: list[str] = []
        async with asyncio.timeout(20):
            async for name, document, _ in Watcher(running).read():
                if name != "now":
                    continue
                problem = document["applianced"]["problem"]
                if not seen and not problem:
                    seen.append("heard")
                    await scripted.hang_up()
                elif seen == ["heard"] and problem:
                    assert time.time() - 10 < document["applianced"]["heard_s"] < time.time()
                    seen.append("away")
                    await scripted.listen()
                elif seen == ["heard", "away"] and not problem:
                    break


async def test_an_open_page_holds_up_no_drain(run_dir: Path) -> None:
    """SIGTERM ends the stream as HTTP ends one."""
    async with appliance(run_dir, "gateway.drain_s=20") as (running, _):
        names, began_s = [], 0.0
        async for name, _, _ in Watcher(running).read():
            names.append(name)
            if name == "now" and not began_s:
                began_s = time.monotonic()
                running.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(running.process.wait(), 10) == 0
        assert time.monotonic() - began_s < 5
        assert "now" in names


async def test_with_keys_the_data_needs_one_and_the_page_none(run_dir: Path) -> None:
    """The page itself says nothing of anybody; a monitor's key is enough to look."""
    path, secrets = keys_file(run_dir, alice="", prometheus="monitor_only = true")
    async with appliance(run_dir, f"gateway.api_keys_file={path}", engine=False) as (running, _):
        page = await running.ask("GET", "/", accept="text/html,*/*")
        script = await running.ask("GET", "/page/main.js")
        closed = [await running.ask("GET", path) for path in ("/status/events", "/status/incident.md?id=inc-1")]
        hello = await Watcher(running).until("hello", **bearer(secrets["prometheus"]))
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert (script.status, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert [answer.status for answer in closed] == [401, 401]
    assert (hello["key"], hello["admin"], hello["actions"]) == ("prometheus", False, False)


async def test_the_page_lets_no_foreign_script_in(run_dir: Path) -> None:
    """Its policy names ourselves alone, nothing inline; a file that the browser has is not sent again; curl gets words."""
    async with gateway(run_dir) as running:
        page = await running.ask("GET", "/", accept="text/html")
        again = await running.ask("GET", "/", accept="text/html", if_none_match=page.headers["etag"])
        words = await running.ask("GET", "/", accept="*/*")
        missing = await running.ask("GET", "/page/../../keys.py")
        head = await running.ask("HEAD", "/status/events")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert (again.status, again.body) == (304, b"")
    assert words.headers["content-type"].startswith("text/plain")
    assert (missing.status, head.status) == (404, 405)


@pytest.mark.parametrize("path", ["/admin/drain", "/admin/resume", "/admin/restart", "/admin/original"])
async def test_nobody_stops_an_engine_whose_owner_did_not_allow_it(run_dir: Path, path: str) -> None:
    """Without keys, without the switch, with the key of somebody else; and not by a link."""
    keys, secrets = keys_file(run_dir, alice="", owner="admin = true")
    asked: list[str] = []
    async with appliance(run_dir, engine=False) as (running, scripted):
        await scripted.hang_up()
        give(scripted, scripted_status(), asked)
        await scripted.listen()
        open_one = await running.ask("POST", path)
        async with gateway(run_dir, f"gateway.api_keys_file={keys}") as off:
            switched_off = await off.ask("POST", path, **bearer(secrets["owner"]))
            stranger = await off.ask("POST", path)
        async with gateway(run_dir, f"gateway.api_keys_file={keys}", "gateway.admin_actions=true") as on:
            alice = await on.ask("POST", path, **bearer(secrets["alice"]))
            link = await on.ask("GET", path, **bearer(secrets["owner"]))
            nobody = await on.ask("POST", path)
    codes = [(answer.status, answer.error()["code"]) for answer in (open_one, switched_off, stranger, alice, link, nobody)]
    assert codes == [
        *[(403, "actions_off")] * 2, (401, "no_api_key"), (403, "not_admin"), (405, "method_not_allowed"), (401, "no_api_key"),
    ]  # fmt: skip
    assert asked == []


async def test_an_admin_restarts_and_is_told_what_applianced_says(run_dir: Path) -> None:
    """Its answer, its refusal as 409, its absence as 503; whose key it was stands in the log and in the reason."""
    keys, secrets = keys_file(run_dir, owner="admin = true")
    given: list[Mapping[str, Any]] = []

    async def restart(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        given.append(arguments)
        return {"state": "draining", "sentence": "draining"}

    async with appliance(run_dir, f"gateway.api_keys_file={keys}", "gateway.admin_actions=true", engine=False) as (running, scripted):
        await scripted.hang_up()
        scripted.verbs = {"restart": restart}
        await scripted.listen()
        owner = bearer(secrets["owner"])
        done = await running.ask("POST", "/admin/original", **owner)
        refused = await running.ask("POST", "/admin/drain", **owner)
        await scripted.hang_up()
        away = await running.ask("POST", "/admin/restart", **owner)
        await eventually(lambda: b"admin key owner" in running.log.read_bytes(), "the log names the key")
    assert (done.status, done.json()["state"]) == (200, "draining")
    assert given == [{"rung": 0, "reason": "asked through the gateway with the key owner"}]
    assert (refused.status, refused.error()["code"]) == (409, "not_now")
    assert (away.status, away.error()["code"]) == (503, "applianced_unreachable")


async def test_an_incident_can_be_taken_along_by_whom_it_may(run_dir: Path) -> None:
    """Markdown for whoever may look, the bundle for an admin; what is no id, and what nobody knows, is named."""
    keys, secrets = keys_file(run_dir, alice="", owner="admin = true")

    async def dossier(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        if arguments["id"] != "inc-20261130-060000-ab01":
            raise ControlError(f"no incident {arguments['id']!r} on this box")
        return {"markdown": "**oom**", **({"bundle": "KLUv/SQ="} if arguments["bundle"] else {})}

    async with appliance(run_dir, f"gateway.api_keys_file={keys}", engine=False) as (running, scripted):
        await scripted.hang_up()
        scripted.verbs = {"dossier": dossier}
        await scripted.listen()

        async def get(kind: str, who: str, incident_id: str = "inc-20261130-060000-ab01") -> Any:
            return await running.ask("GET", f"/status/incident.{kind}?id={incident_id}", **bearer(secrets[who]))

        report, bundle, refused = await get("md", "alice"), await get("tar.zst", "owner"), await get("tar.zst", "alice")
        nonsense, unknown = await get("md", "alice", "../../etc/passwd"), await get("md", "alice", "inc-2")
    assert (report.status, report.headers["content-type"], report.body) == (200, "text/markdown; charset=utf-8", b"**oom**")
    assert (bundle.status, bundle.body) == (200, bytes.fromhex("28b52ffd24"))
    assert "inc-20261130-060000-ab01.tar.zst" in bundle.headers["content-disposition"]
    assert (refused.status, refused.error()["code"]) == (403, "not_admin")
    assert (nonsense.status, nonsense.error()["code"]) == (400, "invalid_incident")
    assert (unknown.status, unknown.error()["code"]) == (404, "unknown_incident")


def test_buttons_without_keys_are_refused_at_the_start(run_dir: Path) -> None:
    """Anybody could stop the engine."""
    from appliance.config import load_config, parse_overrides
    from appliance.core.errors import ConfigError

    with pytest.raises(ConfigError, match="admin_actions"):
        load_config(None, parse_overrides(["gateway.admin_actions=true"]))


async def test_every_state_has_a_place_in_the_stream(run_dir: Path) -> None:
    """The page shows all of them; here it is what carries them."""
    async with appliance(run_dir, engine=False) as (running, scripted):
        wanted = list(EngineState)
        told: list[str] = []
        async with asyncio.timeout(20):
            async for name, document, _ in Watcher(running).read():
                if name != "now":
                    continue
                told.append(document["publication"]["state"] if document["publication"] else "none")
                if told[-1] == wanted[0].value:
                    wanted.pop(0)
                if not wanted:
                    break
                scripted.say(wanted[0], f"it is {wanted[0].value}")
    assert {state.value for state in EngineState} <= set(told)
