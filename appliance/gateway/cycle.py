"""What uvicorn's cycle writes of an answer, on its way to the socket: in as few system calls as it takes, and as HTTP/1.0 has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class HeadWithBody:
    """The transport as uvicorn's cycle sees it: the head of an answer goes out with the first of its body, in one system call."""

    __slots__ = ("_close", "_head", "_transport", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport = transport
        self._close = close
        self._head = b""
        self.write = self._keep_head

    def is_closing(self) -> bool:
        """Asked by the cycle."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Called by the cycle after the last answer of a connection."""
        if self._head:
            self._transport.write(self._head)
        self._close()

    def let_go(self) -> None:
        """The connection is lost: what is written now goes nowhere."""
        self.write, self._close = self._transport.write, self._transport.close

    def _keep_head(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 100"):  # an interim answer waits for nothing
            self._transport.write(data)
            return
        self._head = data
        self.write = self._send_both

    def _send_both(self, data: bytes) -> None:
        head, self._head = self._head, b""
        self._transport.write(head + data)
        self.write = self._transport.write


def end_by_closing(cycle: RequestResponseCycle) -> None:
    """HTTP/1.0 knows no chunks: a body without a length ends where its connection does (RFC 9112, 6.3)."""
    send = cycle.send

    async def send_plainly(message: Any) -> None:
        if message["type"] == "http.response.body":
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.chunked_encoding = False
    cycle.send = send_plainly  # type: ignore[method-assign]
