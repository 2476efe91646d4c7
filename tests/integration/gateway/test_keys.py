"""API keys, as clients and the owner meet them."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.config.api_keys import entry_text, new_key
from tests.fakes.scripted_appliance import ROOT, appliance, eventually, gateway

CHAT = "/v1/chat/completions"


def keys_file(run_dir: Path, **entries: str) -> tuple[Path, dict[str, str]]:
    """A file with a fresh key for each name; the value is what else its entry says. Names to keys."""
    path = run_dir / "keys.toml"
    secrets = {name: new_key() for name in entries}
    path.write_text("\n".join(entry_text(name, secret) + entries[name] for name, secret in secrets.items()))
    return path, secrets


def bearer(secret: str) -> dict[str, str]:
    """As OpenAI's clients send it."""
    return {"authorization": f"Bearer {secret}"}


async def test_with_keys_only_their_holders_come_in(run_dir: Path) -> None:
    """Either header; 401 in the envelope otherwise, before the body is looked at; the open pages stay open."""
    path, secrets = keys_file(run_dir, alice="")
    async with appliance(run_dir, f"gateway.api_keys_file={path}", engine=False) as (running, scripted):
        await scripted.start_engine()
        await eventually(lambda: b"open:" in running.log.read_bytes(), "the gateway is open")
        good = [
            await running.ask("POST", CHAT, {"do": "whole"}, **bearer(secrets["alice"])),
            await running.ask("POST", CHAT, {"do": "whole"}, x_api_key=secrets["alice"]),
            await running.ask("GET", "/v1/models", **bearer(secrets["alice"])),
            await running.ask("GET", "/status", **bearer(secrets["alice"])),
            await running.ask("GET", "/metrics", authorization=f"bearer {secrets['alice']}"),
            await running.ask("GET", "/health"),
            await running.ask("GET", "/"),
        ]
        none = await running.ask("POST", CHAT, b"no json")
        wrong = await running.ask("POST", CHAT, {"do": "whole"}, **bearer(new_key()))
        closed = [await running.ask("GET", path) for path in ("/status", "/metrics", "/v1/models")]
        basic = await running.ask("GET", "/v1/models", authorization=f"Basic {secrets['alice']}")
    assert [answer.status for answer in good] == [200] * 7
    assert (none.status, none.error()["code"], none.error()["type"]) == (401, "no_api_key", "authentication_error")
    assert (wrong.status, wrong.error()["code"]) == (401, "invalid_api_key")
    assert wrong.headers["www-authenticate"] == "Bearer"
    assert [answer.status for answer in (*closed, basic)] == [401] * 4


async def test_a_key_goes_neither_to_the_engine_nor_into_a_log(run_dir: Path) -> None:
    """The engine's own log may be anybody's."""
    path, secrets = keys_file(run_dir, alice="")
    async with appliance(run_dir, f"gateway.api_keys_file={path}", engine=False) as (running, scripted):
        await scripted.start_engine()
        body = {"do": "whole", "echo": True}
        seen = await running.ask("POST", CHAT, body, authorization=f"Bearer {secrets['alice']}", x_api_key="other", x_mine="kept")
        stray = new_key()
        await running.ask("POST", CHAT, body, **bearer(stray))
        metrics = await running.ask("GET", "/metrics", **bearer(secrets["alice"]))
        status = await running.ask("GET", "/status", **bearer(secrets["alice"]))
    assert seen.status == 200
    assert b"x-mine: kept" in seen.body
    assert b"authorization" not in seen.body
    assert b"x-api-key" not in seen.body
    for text in (seen.body, metrics.body, status.body, running.log.read_bytes()):
        assert secrets["alice"].encode() not in text
        assert stray.encode() not in text


async def test_without_keys_the_headers_are_the_engines(run_dir: Path) -> None:
    """An engine may have a key of its own."""
    async with appliance(run_dir) as (running, _):
        seen = await running.ask("POST", CHAT, {"do": "whole", "echo": True}, authorization="Bearer engines-own")
    assert b"authorization: bearer engines-own" in seen.body


async def test_a_monitoring_key_reads_and_does_nothing_else(run_dir: Path) -> None:
    """403 with the way out."""
    path, secrets = keys_file(run_dir, prometheus="monitor_only = true")
    async with appliance(run_dir, f"gateway.api_keys_file={path}", engine=False) as (running, _):
        metrics = await running.ask("GET", "/metrics", **bearer(secrets["prometheus"]))
        asked = await running.ask("POST", CHAT, {"do": "whole"}, **bearer(secrets["prometheus"]))
    assert metrics.status == 200
    assert (asked.status, asked.error()["code"], asked.error()["type"]) == (403, "monitor_only", "permission_error")


async def test_sighup_reads_the_file_again(run_dir: Path) -> None:
    """A new key comes in, a removed one is out, running answers go on; a broken file changes nothing and is said."""
    path, secrets = keys_file(run_dir, alice="", bob="")
    async with (
        appliance(run_dir, f"gateway.api_keys_file={path}", engine=False) as (running, scripted),
        running.connection() as stream,
    ):
        await scripted.start_engine()
        stream.send("POST", CHAT, {"do": "stream", "stream": True, "events": 20, "gap_s": 0.05}, **bearer(secrets["bob"]))
        assert (await stream.head())[0] == 200
        carol = new_key()
        path.write_text(entry_text("alice", secrets["alice"]) + entry_text("carol", carol))
        running.process.send_signal(signal.SIGHUP)
        await eventually(lambda: b"2 API keys read" in running.log.read_bytes(), "the file was read")
        codes = [(await running.ask("GET", "/status", **bearer(secret))).status for secret in (secrets["alice"], carol, secrets["bob"])]
        rest = b""
        while part := await stream.chunk():
            rest += part
        path.write_text("[alice\n")
        running.process.send_signal(signal.SIGHUP)
        await eventually(lambda: b"the API keys stay as they were" in running.log.read_bytes(), "the error was said")
        still = await running.ask("GET", "/status", **bearer(carol))
    assert codes == [200, 200, 401]
    assert rest.endswith(b"data: [DONE]\n\n")
    assert still.status == 200


async def test_keys_open_the_network(run_dir: Path) -> None:
    """An address that other machines reach needs no further leave once there are keys."""
    path, secrets = keys_file(run_dir, alice="")
    async with gateway(run_dir, "gateway.host=0.0.0.0", f"gateway.api_keys_file={path}") as running:
        assert (await running.ask("GET", "/status")).status == 401
        assert (await running.ask("GET", "/status", **bearer(secrets["alice"]))).status == 200
        assert "cross the network in clear text" in running.log.read_text()


@pytest.mark.parametrize(("content", "words"), [("", "holds no key"), (None, "cannot be read"), ("[alice]\n", "needs sha256")])
async def test_a_bad_file_of_keys_stops_the_start(run_dir: Path, content: str | None, words: str) -> None:
    """Rather than serving anybody, or nobody."""
    path = run_dir / "keys.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(AssertionError, match=words):
        async with gateway(run_dir, f"gateway.api_keys_file={path}"):
            pass


def test_the_command_makes_a_key_that_works(tmp_path: Path) -> None:
    """Entry on stdout, key on stderr; a key of one's own from stdin; weak ones and bad names are refused."""

    def made(*arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "appliance.cli", "key", *arguments]
        return subprocess.run(command, cwd=ROOT, input=said, capture_output=True, text=True, timeout=60)

    fresh, own = made("alice"), made("bob", "--stdin", said="x" * 30 + "\n")
    weak, nameless = made("bob", "--stdin", said="hunter2\n"), made("not a name")
    path = tmp_path / "keys.toml"
    path.write_text(fresh.stdout + own.stdout)
    secret = next(word for word in fresh.stderr.split() if word.startswith("sk-lla-"))

    async def ask() -> list[int]:
        async with gateway(tmp_path, f"gateway.api_keys_file={path}") as running:
            return [(await running.ask("GET", "/status", **bearer(key))).status for key in (secret, "x" * 30)]

    assert asyncio.run(ask()) == [200, 200]
    assert (weak.returncode, nameless.returncode) == (1, 1)
    assert "the key has 7 characters; it must have at least 24" in weak.stderr
    assert "is no name of a key" in nameless.stderr
    assert "hunter2" not in weak.stderr
