"""Server and clients over a real unix socket."""

from __future__ import annotations

import asyncio
import socket
import stat
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from appliance.control import protocol
from appliance.control.client import AsyncControl, ControlClient, ask, subscribe
from appliance.control.server import MAX_CONNECTIONS, ControlServer, PublicationBoard
from appliance.core.errors import ControlError, NotPermitted, Unreachable
from appliance.core.publication import Publication
from appliance.core.requests import InflightRequest, Resumability
from appliance.core.states import EngineState


def publication(generation: int) -> Publication:
    """One that differs by its generation."""
    return Publication(EngineState.BACKOFF, generation, None, None, f"life {generation}", 1.0)


async def echo(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Answers what it was asked."""
    return {"echo": dict(arguments)}


async def refuse(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Refuses with a cure."""
    raise ControlError("the engine is parked", hint="appliancectl resume")


async def fail(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Has a defect."""
    raise ZeroDivisionError


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Path, PublicationBoard]]:
    """A server with the verbs echo, refuse and report."""
    board = PublicationBoard(publication(1))
    path = folder / "control.sock"
    server = ControlServer(path, {"echo": echo, "refuse": refuse, "report": echo, "fail": fail}, board)
    await server.start()
    try:
        yield path, board
    finally:
        await server.close()


async def test_blocking_client_asks_many_times(tmp_path: Path) -> None:
    """One connection carries several questions; each answer is its own and comes without `ok`."""
    async with serving(tmp_path) as (path, _):

        def talk() -> list[dict[str, Any]]:
            with ControlClient(path) as client:
                return [client.ask("echo", number=number) for number in range(3)]

        assert await asyncio.to_thread(talk) == [{"echo": {"number": number}} for number in range(3)]


async def test_refusal_carries_error_and_hint(tmp_path: Path) -> None:
    """A handler's error reaches the asker with its hint, and the connection goes on."""
    async with serving(tmp_path) as (path, _):
        control = AsyncControl(path)
        with pytest.raises(ControlError) as caught:
            await control.ask("refuse")
        assert (caught.value.message, caught.value.hint) == ("the engine is parked", "appliancectl resume")
        assert await control.ask("echo", a=1) == {"echo": {"a": 1}}
        control.close()


async def test_a_defect_in_a_verb_is_answered(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The asker is told, the traceback is logged, and the server goes on."""
    async with serving(tmp_path) as (path, _):
        control = AsyncControl(path)
        with pytest.raises(ControlError, match="defect"):
            await control.ask("fail")
        assert await control.ask("echo") == {"echo": {}}
        control.close()
    assert "ZeroDivisionError" in caplog.text


async def test_unknown_verb_names_the_known_ones(tmp_path: Path) -> None:
    """A mistyped verb is refused with the list of verbs."""
    async with serving(tmp_path) as (path, _):
        with pytest.raises(ControlError, match=r"unknown verb 'brew'.*echo, fail, refuse, report, subscribe"):
            await AsyncControl(path).ask("brew")


async def test_subscriber_gets_current_then_changes(tmp_path: Path) -> None:
    """The current publication comes at once, each change after it, and an equal one is no change."""
    async with serving(tmp_path) as (path, board):
        stream = subscribe(path)
        assert await anext(stream) == publication(1)
        board.post(publication(1))
        board.post(publication(2))
        assert await anext(stream) == publication(2)
        assert board.subscribers == 1
        await stream.aclose()  # type: ignore[attr-defined]
        async with asyncio.timeout(5):
            while board.subscribers:
                await asyncio.sleep(0.01)


async def test_subscription_ends_unreachable(tmp_path: Path) -> None:
    """When applianced goes away the subscriber is told so instead of waiting for ever."""
    async with serving(tmp_path) as (path, _):
        stream = subscribe(path)
        await anext(stream)
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
    with pytest.raises(Unreachable):
        await asyncio.wait_for(waiting, 5)


async def test_a_subscription_that_nobody_answers_is_given_up(tmp_path: Path) -> None:
    """A connection in the backlog of one that is stopped, or that fell between two servers; its silence later on is no fault."""
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with pytest.raises(Unreachable, match="does not answer"):
            await asyncio.wait_for(anext(subscribe(path, timeout_s=0.1)), 5)
    path.unlink()
    async with serving(tmp_path) as (path, board):
        stream = subscribe(path, timeout_s=0.1)
        await anext(stream)
        asyncio.get_running_loop().call_later(0.3, board.post, publication(2))
        assert await asyncio.wait_for(anext(stream), 5) == publication(2)
        await stream.aclose()  # type: ignore[attr-defined]


async def test_report_carries_inflight_requests(tmp_path: Path) -> None:
    """The gateway's report arrives as JSON of InflightRequest."""
    request = InflightRequest("req-1", "/v1/completions", "f", 9, None, 0, False, 1, 1, 0.5, Resumability.REPLAY)
    async with serving(tmp_path) as (path, _):
        control = AsyncControl(path)
        answer = await control._exchange({"verb": "report", "kind": "traffic", "requests": []})
        assert answer["ok"] is True
        await control.report("traffic", [request])
        control.close()


async def test_async_client_reconnects(tmp_path: Path) -> None:
    """After applianced was restarted the same client asks again without being made anew."""
    path = tmp_path / "control.sock"
    async with serving(tmp_path):
        control = AsyncControl(path)
        await control.ask("echo")
    with pytest.raises(Unreachable):
        await control.ask("echo")
    async with serving(tmp_path):
        assert await control.ask("echo", x=1) == {"echo": {"x": 1}}
        control.close()


def test_nobody_listens(tmp_path: Path) -> None:
    """No socket, or a dead one, is Unreachable with the command that starts it."""
    with pytest.raises(Unreachable, match="systemctl start llm-appliance"):
        ask(tmp_path / "control.sock", "status")
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))
    with pytest.raises(Unreachable, match="nobody listens"):
        ask(dead, "status")


def test_permission_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """EACCES is NotPermitted (exit code 4) and names the group. (Patched: the tests may run as root, who is never refused.)"""

    def refuse_connect(self: socket.socket, address: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "connect", refuse_connect)
    with pytest.raises(NotPermitted, match="llm-appliance"):
        ask(tmp_path / "control.sock", "status")


async def test_silent_server_is_unreachable(tmp_path: Path) -> None:
    """An applianced that is stopped (SIGSTOP) answers nothing: the question ends after its deadline."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with pytest.raises(Unreachable, match="does not answer"):
            await AsyncControl(tmp_path / "s", timeout_s=0.05).ask("status")
        with pytest.raises(Unreachable, match="does not answer"):
            await asyncio.to_thread(ask, tmp_path / "s", "status", timeout_s=0.05)


async def test_socket_mode_is_0660(tmp_path: Path) -> None:
    """Owner and group may talk to applianced, others may not."""
    async with serving(tmp_path) as (path, _):
        assert stat.S_IMODE(path.stat().st_mode) == 0o660


async def test_too_long_path_is_refused(tmp_path: Path) -> None:
    """The kernel's limit on socket paths is named instead of a bare OSError."""
    with pytest.raises(ControlError, match="107"):
        await ControlServer(tmp_path / ("x" * 120), {}, PublicationBoard(publication(1))).start()


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (struct.pack(">I", protocol.MAX_FRAME_BYTES + 1), "exceeds the limit"),
        (struct.pack(">I", 3) + b"\xff{}", "is no JSON"),
        (struct.pack(">I", 2) + b"[]", "expected an object"),
        (struct.pack(">I", 100_000) + b"[" * 100_000, "is no JSON"),
    ],
)
async def test_bad_frames_are_answered_and_closed(tmp_path: Path, frame: bytes, words: str) -> None:
    """A peer that does not speak the protocol gets one sentence, and the server lives on."""
    async with serving(tmp_path) as (path, _):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(frame)
        body = await asyncio.wait_for(protocol.read_body(reader), 5)
        assert body is not None
        assert words in protocol.decode(body)["error"]
        assert await protocol.read_body(reader) is None
        writer.close()
        assert await AsyncControl(path).ask("echo") == {"echo": {}}


async def test_half_a_frame_then_gone(tmp_path: Path) -> None:
    """A peer that leaves inside a frame leaves nothing behind."""
    async with serving(tmp_path) as (path, _):
        _, writer = await asyncio.open_unix_connection(str(path))
        writer.write(b"\x00\x00")
        writer.close()
        assert await AsyncControl(path).ask("echo") == {"echo": {}}


async def test_connections_are_bounded(tmp_path: Path) -> None:
    """One connection too many is refused with the limit, and a closed one makes room."""
    async with serving(tmp_path) as (path, _):
        clients = [AsyncControl(path) for _ in range(MAX_CONNECTIONS)]
        for client in clients:
            await client.ask("echo")
        with pytest.raises(ControlError, match="64 connections"):
            await AsyncControl(path).ask("echo")
        for client in clients:
            client.close()
        async with asyncio.timeout(5):
            while True:
                try:
                    await AsyncControl(path).ask("echo")
                    break
                except ControlError:
                    await asyncio.sleep(0.01)


def test_too_large_message_is_refused() -> None:
    """We never send what the other side would refuse."""
    with pytest.raises(protocol.FrameError, match="exceeds the limit"):
        protocol.encode({"x": "y" * protocol.MAX_FRAME_BYTES})
