"""Connections that are gone are freed at once: under a flood nobody waits for the garbage collector, and memory stays where it was."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from appliance.gateway.connection import EXTENSION, ClientConnection, ConnectionPolicy
from appliance.gateway.intake import Receive
from tests.fakes.scripted_appliance import eventually

WHOLE = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


@pytest.fixture
def collector_off() -> Iterator[None]:
    """What is freed then is freed by its last reference."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def answer(scope: MutableMapping[str, Any], receive: Receive, send: Any) -> None:
    """As app.py does, as far as connections are concerned."""
    connection: ClientConnection = scope["extensions"][EXTENSION]
    connection.task = asyncio.current_task()
    try:
        if scope["path"] == "/never":
            await asyncio.sleep(60)
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"{}"})
    except asyncio.CancelledError:
        return
    finally:
        connection.task = None


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HT", b"rubbish\r\n\r\n", WHOLE, 2 * WHOLE, WHOLE[:-1], WHOLE.replace(b" / ", b" /never ")],
    ids=["nothing", "half-a-head", "no-http", "answered", "pipelined", "half-a-body", "unanswered"],
)
@pytest.mark.usefixtures("collector_off")
async def test_whoever_leaves_leaves_nothing(sent: bytes) -> None:
    """Whatever it had sent before."""
    loop = asyncio.get_running_loop()
    config, state, made = Config(answer, ws="none", lifespan="off", log_config=None), ServerState(), []
    config.load()

    def accept() -> ClientConnection:
        connection = ClientConnection(ConnectionPolicy(10, 10, 10), config, state)
        made.append(weakref.ref(connection))
        return connection

    async with await loop.create_server(accept, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(sent)
        await eventually(lambda: made and made[0]() is not None, "it is accepted")
        if sent.startswith(WHOLE):
            assert (await reader.read(200)).startswith(b"HTTP/1.1 200")
        else:
            await asyncio.sleep(0.02)
        writer.transport.abort()
        del reader, writer
        await eventually(lambda: made[0]() is None, "it is freed", 5)
