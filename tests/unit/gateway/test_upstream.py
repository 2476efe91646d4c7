"""The client of the engine, against servers that say exactly what the test wants."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from appliance.core.launch import Endpoint
from appliance.gateway.headers import upstream_head
from appliance.gateway.upstream import HIGH_WATER_BYTES, LossKind, Upstream, UpstreamLost

HEAD = upstream_head("POST", b"/x", [], "r", 0)
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[Upstream]:
    """A server on a loopback port; the handler gets each connection."""
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError), contextlib.closing(writer):
            await handler(reader, writer)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    upstream = Upstream(Endpoint(port=server.sockets[0].getsockname()[1]))
    try:
        yield upstream
    finally:
        upstream.end("the test is over")
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def saying(*pieces: bytes, close: bool = False) -> Handler:
    """Answer each request with these pieces, each in a segment of its own."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await reader.readuntil(b"\r\n\r\n")
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.001)
            if close:
                return

    return handler


async def ask(upstream: Upstream, *, bodiless: bool = False) -> tuple[int, bytes]:
    """One exchange: status and whole body; the connection is given back."""
    connection = await upstream.begin(HEAD, b"", bodiless=bodiless)
    body = b""
    while (data := await connection.read()) is not None:
        body += data
    upstream.give_back(connection)
    return connection.status, body


async def test_answers_with_a_length_in_chunks_and_until_the_end() -> None:
    """However they are cut into segments."""
    for pieces, close in (
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",), False),
        ((b"HTTP/1.1 200 OK\r\nconte", b"nt-length: 5\r\n\r", b"\nhe", b"llo"), False),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nhel\r\n2\r", b"\nlo\r\n0\r\n\r\n"), False),
        ((b"HTTP/1.0 200 OK\r\n\r\nhel", b"lo"), True),
    ):
        async with serving(saying(*pieces, close=close)) as upstream:
            assert await ask(upstream) == (200, b"hello")


async def test_a_complete_exchange_leaves_a_connection_for_the_next() -> None:
    """One connection for many requests in a row; `connection: close` is obeyed."""
    opened = 0

    async def counting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await saying(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")(reader, writer)

    async with serving(counting) as upstream:
        for _ in range(5):
            await ask(upstream)
    assert opened == 1
    opened = 0

    async def closing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await saying(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 1\r\n\r\nx", close=True)(reader, writer)

    async with serving(closing) as upstream:
        for _ in range(3):
            await ask(upstream)
    assert opened == 3


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"", LossKind.RESET),
        (b"HTTP/1.1 200", LossKind.RESET),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", LossKind.RESET),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n", LossKind.RESET),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n", LossKind.GARBAGE),
        (b"SSH-2.0-OpenSSH_9.2\r\n", LossKind.GARBAGE),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nyyy", LossKind.GARBAGE),
        (b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 300_000, LossKind.GARBAGE),
    ],
)
async def test_every_incomplete_answer_is_a_loss(said: bytes, kind: LossKind) -> None:
    """Of the right kind, and counted as delivered."""
    async with serving(saying(said, close=True)) as upstream:
        with pytest.raises(UpstreamLost) as lost:
            await ask(upstream)
        assert lost.value.kind is kind
        assert lost.value.delivered


async def test_what_came_before_the_loss_can_still_be_read() -> None:
    """Then the loss is raised, each time."""
    async with serving(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", close=True)) as upstream:
        connection = await upstream.begin(HEAD, b"")
        assert await connection.read() == b"half"
        for _ in range(2):
            with pytest.raises(UpstreamLost):
                await connection.read()


async def test_nobody_there_is_a_loss_that_was_not_delivered() -> None:
    """Refused, no such socket, not a socket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for endpoint in (Endpoint(port=port), Endpoint(socket_path="/nowhere/engine.sock"), Endpoint(socket_path="/dev/null")):
        with pytest.raises(UpstreamLost) as lost:
            await ask(Upstream(endpoint))
        assert lost.value.kind is LossKind.CONNECT
        assert not lost.value.delivered


async def test_a_kept_connection_closed_meanwhile_is_replaced_once() -> None:
    """The request is not lost; a fresh connection that closes without a word is."""
    async with serving(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx", close=True)) as upstream:
        for _ in range(10):
            assert await ask(upstream) == (200, b"x")
    async with serving(saying(close=True)) as upstream:
        with pytest.raises(UpstreamLost):
            await ask(upstream)


async def test_a_kept_connection_that_died_with_its_engine_is_a_loss_that_counts() -> None:
    """The request was written to it: it may be what the engine died of, so it must not pass for one that never left us."""
    servers: list[asyncio.Server] = []

    async def mortal(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")
        await reader.readuntil(b"\r\n\r\n")
        servers[0].close()
        writer.close()

    servers.append(await asyncio.start_server(mortal, "127.0.0.1", 0))
    upstream = Upstream(Endpoint(port=servers[0].sockets[0].getsockname()[1]))
    assert await ask(upstream) == (200, b"x")
    with pytest.raises(UpstreamLost) as lost:
        await ask(upstream)
    assert lost.value.kind is LossKind.RESET
    assert lost.value.delivered


async def test_the_end_of_a_life_ends_its_exchanges_and_begins_no_other() -> None:
    """SUPERSEDED, with the reason."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(silent) as upstream:
        task = asyncio.ensure_future(ask(upstream))
        await asyncio.sleep(0.05)
        upstream.end("generation 1 is over")
        for again in (task, ask(upstream)):
            with pytest.raises(UpstreamLost, match="generation 1 is over") as lost:
                await again
            assert lost.value.kind is LossKind.SUPERSEDED


async def test_giving_up_closes_the_connection_at_once() -> None:
    """Cancelled before the head came: the server sees the end of the file."""
    seen = asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.read()
        seen.set()

    async with serving(silent) as upstream:
        task = asyncio.ensure_future(ask(upstream))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.wait_for(seen.wait(), 1)


async def test_a_reader_that_is_slow_slows_the_engine_down() -> None:
    """What is not read yet is bounded; all of it arrives in the end."""
    total = 20 * HIGH_WATER_BYTES
    written = 0

    async def plenty(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal written
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        while written < total:
            writer.write(b"x" * 65536)
            written += 65536
            await writer.drain()

    async with serving(plenty) as upstream:
        connection = await upstream.begin(HEAD, b"")
        await asyncio.sleep(0.2)
        first = await connection.read()
        assert first is not None
        assert len(first) < 3 * HIGH_WATER_BYTES
        received = len(first)
        while (data := await connection.read()) is not None:
            received += len(data)
    assert received == total


async def test_head_has_no_body_to_wait_for() -> None:
    """A length without a body is complete."""
    async with serving(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n")) as upstream:
        assert await ask(upstream, bodiless=True) == (200, b"")


@pytest.mark.parametrize("status", [204, 304])
async def test_statuses_without_a_body_are_complete(status: int) -> None:
    """No length is needed."""
    async with serving(saying(b"HTTP/1.1 %d X\r\n\r\n" % status)) as upstream:
        assert await ask(upstream) == (status, b"")


async def test_health_is_asked_over_a_fresh_connection() -> None:
    """200 is alive; anything else, silence and nobody are not."""

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(saying(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")) as upstream:
        assert await upstream.healthy(1.0)
    async with serving(saying(b"HTTP/1.1 503 X\r\ncontent-length: 0\r\n\r\n")) as upstream:
        assert not await upstream.healthy(1.0)
    async with serving(silent) as upstream:
        assert not await upstream.healthy(0.1)
    assert not await Upstream(Endpoint(socket_path="/nowhere")).healthy(1.0)
