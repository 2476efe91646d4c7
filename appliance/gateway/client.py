"""The answer to one client: whole, or as a stream that is kept alive while there is nothing to say."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from appliance.gateway.accounting import Account
from appliance.gateway.connection import ClientConnection
from appliance.gateway.envelope import Refused
from appliance.gateway.headers import Headers, value_of
from appliance.gateway.sse import BLANK, WAITING_COMMENT, Dialect, error_event, is_read_by_hand

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

COMMENT_AFTER_S = 5.0
"""A stream without a byte for so long gets (its headers and) a comment, then one as often: proxies cut silent answers."""
UNBUFFERED = (b"x-accel-buffering", b"no")
"""nginx in front passes each event on as it comes."""
_STREAM_HEADERS: Headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"), UNBUFFERED]


class Client:
    """Writes one answer.

    Attributes:
        status: what the client was sent; 0 before.
        outcome: the same, or the status of an error that could only be told inside a stream or by breaking it.
        label: what metrics call its path.
        events: it was promised server-sent events.
        account: of what the engine answers; None while there is nothing to account for.
        extra: headers of the gateway's own, on whatever is answered.
        takes_comments: else they would be lost on it, and with them parts of its answer.
    """

    __slots__ = (
        "_comment",
        "_commenting",
        "_http_version",
        "_loop",
        "_send",
        "_timer",
        "_wrote_s",
        "account",
        "connection",
        "events",
        "extra",
        "label",
        "outcome",
        "request_id",
        "status",
        "takes_comments",
    )

    def __init__(self, send: Send, connection: ClientConnection, request_id: str) -> None:
        self._send = send
        self._loop = connection.loop
        self._http_version = connection.scope["http_version"]
        self.connection = connection
        self.request_id = request_id
        self.takes_comments = not is_read_by_hand(value_of(connection.scope["headers"], b"user-agent"))
        self._timer: asyncio.TimerHandle | None = None
        self._commenting: asyncio.Task[None] | None = None
        self._comment = WAITING_COMMENT
        self._wrote_s = 0.0
        self.status = self.outcome = 0
        self.events = False
        self.label = "unknown"
        self.account: Account | None = None
        self.extra: Headers = []

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """A whole answer."""
        if self.account is not None and status < 400:
            self.account.whole(body)
            self.account.complete()
        length = [] if status in (204, 304) else [(b"content-length", b"%d" % len(body))]
        await self._start(status, headers + length)
        await self._send({"type": "http.response.body", "body": body})

    async def begin(self, status: int, headers: Headers) -> None:
        """The head of an answer whose body follows in pieces. Nothing is sent twice where comments have begun a stream."""
        if not self.status:
            self._stop_commenting()
            self.events = any(value.startswith(b"text/event-stream") for name, value in headers if name == b"content-type")
            await self._start(status, headers)

    async def write(self, data: bytes) -> None:
        """A piece, of a stream one or more whole events; waits while the client reads slower than we write."""
        self._wrote_s = self._loop.time()
        self._comment = WAITING_COMMENT
        if self.account is not None and self.events:
            self.account.piece(data, self._wrote_s)
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """The end of an answer in pieces."""
        self.stop_comments()
        if self.account is not None:
            self.account.complete()
        await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, refused: Refused, dialect: Dialect) -> None:
        """The refusal in the form that is still possible: an envelope, an event that ends the stream, a broken connection."""
        self.stop_comments()
        self.outcome = refused.status
        self.account = None
        if not self.status:
            await self.answer(refused.status, refused.headers(), refused.body())
        elif self.events:
            await self.write(error_event(refused, dialect))
            await self.finish()
        else:
            self.connection.abort()

    # comments

    def start_comments(self) -> None:
        """From now on the stream is kept alive while nothing else is written to it."""
        self._wrote_s = self._loop.time()
        self._timer = self._loop.call_later(COMMENT_AFTER_S, self._check_silence)

    def stop_comments(self) -> None:
        """Before the end, and before an answer that is no stream."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._stop_commenting()

    def say(self, comment: bytes) -> None:
        """What silence is filled with from now on. A stream that has begun gets it at once."""
        if comment != self._comment and self.events and self._timer is not None:
            self._write_comment()
        self._comment = comment

    def nudge(self) -> bool:
        """Write what a client that is there passes over. False where nothing can be written now: it is no stream."""
        if not self.status and self._http_version != "1.0":
            self.connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")  # RFC 9110, 15.2: to be expected at any time
        elif self.events or (not self.status and self._timer is not None):
            self._write_comment()
        else:
            return False
        return True

    def _check_silence(self) -> None:
        silent_s = self._loop.time() - self._wrote_s
        if silent_s >= COMMENT_AFTER_S:
            self._write_comment()
            silent_s = 0.0
        self._timer = self._loop.call_later(COMMENT_AFTER_S - silent_s, self._check_silence)

    def _write_comment(self) -> None:
        if self._commenting is None or self._commenting.done():  # else the client reads nothing: one is enough
            self._commenting = self._loop.create_task(self._send_comment())

    async def _send_comment(self) -> None:
        if not self.status:
            self.events = True
            await self._start(200, _STREAM_HEADERS)
        self._wrote_s = self._loop.time()
        body = self._comment if self.takes_comments else BLANK
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def _stop_commenting(self) -> None:
        if self._commenting is not None:
            self._commenting.cancel()
            self._commenting = None

    async def _start(self, status: int, headers: Headers) -> None:
        self.status = self.outcome = status
        headers = [*headers, (b"x-request-id", self.request_id.encode("ascii")), *self.extra]
        if self.connection.body_pending:
            headers.append((b"connection", b"close"))
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
