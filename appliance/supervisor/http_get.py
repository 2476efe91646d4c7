"""One small HTTP/1.1 exchange with the engine over its own endpoint, with a deadline. Not a client library: a probe."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import Any

import h11

from appliance.core.launch import Endpoint

BODY_MAX_BYTES = 1024**2
"""A probe's answer is small; a broken server that sends without end may not fill our memory."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Status and body of a whole answer."""

    status: int
    body: bytes

    def json(self) -> dict[str, Any]:
        """The body as a JSON object; empty where it is none."""
        with contextlib.suppress(ValueError, RecursionError):
            document = json.loads(self.body)
            return document if isinstance(document, dict) else {}
        return {}


class NoAnswer(Exception):
    """Nobody listens, the connection broke, the deadline passed, or what came back is no HTTP. `str()` is a sentence part."""


async def exchange(endpoint: Endpoint, path: str, deadline_s: float, body: dict[str, Any] | None = None) -> Answer:
    """GET, or POST where there is a body, over a connection of its own.

    Raises:
        NoAnswer: see there.
    """
    try:
        async with asyncio.timeout(deadline_s):
            reader, writer = await _connect(endpoint)
            with contextlib.closing(writer):
                return await _converse(reader, writer, path, body)
    except TimeoutError:
        raise NoAnswer(f"no answer to {path} within {deadline_s:g} s") from None
    except OSError as error:
        raise NoAnswer(f"{path}: {error.strerror or error}") from error
    except h11.RemoteProtocolError as error:
        raise NoAnswer(f"{path}: not HTTP: {error}") from error


async def _connect(endpoint: Endpoint) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if endpoint.socket_path is not None:
        return await asyncio.open_unix_connection(endpoint.socket_path)
    return await asyncio.open_connection("127.0.0.1", endpoint.port)


async def _converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, body: dict[str, Any] | None) -> Answer:
    connection = h11.Connection(h11.CLIENT)
    content = json.dumps(body).encode() if body is not None else b""
    headers = [("Host", "engine"), ("Connection", "close"), ("Content-Length", str(len(content))), ("Content-Type", "application/json")]
    request = h11.Request(method="POST" if body is not None else "GET", target=path, headers=headers)
    for part in (request, h11.Data(content), h11.EndOfMessage()):
        writer.write(connection.send(part) or b"")
    await writer.drain()
    status, received = 0, bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(65536))
        elif isinstance(event, h11.Response):
            status = event.status_code
        elif isinstance(event, h11.Data):
            received += event.data
            if len(received) > BODY_MAX_BYTES:
                raise NoAnswer(f"{path}: an answer of over {BODY_MAX_BYTES} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return Answer(status, bytes(received))
        elif isinstance(event, h11.ConnectionClosed):
            raise NoAnswer(f"{path}: closed before the answer was complete")
