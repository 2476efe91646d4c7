"""HTTP/1.1 to the engine: one small client over asyncio protocols, parsed by httptools, keeping idle connections.

Not httpx: 5-7 ms of CPU a request against 0.1 (docs/adr/0010-gateway-hot-path.md). What an engine's death looks like is
decided here, once: every way in which an answer can fail to be complete ends in UpstreamLost.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
from collections.abc import AsyncIterator

import httptools

from appliance.core.launch import Endpoint
from appliance.gateway.envelope import Refused
from appliance.gateway.headers import Headers, upstream_head

CONNECT_TIMEOUT_S = 5.0
IDLE_MAX_S = 3.0
"""Below the 5 s after which uvicorn and httplib engines close an idle connection, so that we do not race with that."""
HEAD_MAX_BYTES = 256 * 1024
HIGH_WATER_BYTES = 256 * 1024
"""More that nobody has read yet, and we stop reading the engine's socket."""


class LossKind(enum.Enum):
    """How an answer was lost."""

    CONNECT = "connect"
    """Nobody accepts connections: the request never left us."""
    RESET = "reset"
    """The connection broke, or ended before the answer was complete."""
    GARBAGE = "garbage"
    """What came is not HTTP."""
    TRUNCATED = "truncated"
    """The HTTP was complete, the stream inside it was not: no [DONE]."""
    NOT_READY = "not_ready"
    """503 of an engine that loads or drains: it did not look at the request."""
    SUPERSEDED = "superseded"
    """The supervisor ended this generation; whatever may still come of it is void."""
    SET_ASIDE = "set_aside"
    """We ourselves took the request away from an engine that lives: a suspect is to be tried alone."""


_UNDELIVERED = frozenset({LossKind.CONNECT, LossKind.NOT_READY, LossKind.SET_ASIDE})


class UpstreamLost(Exception):
    """An engine life did not answer completely; `detail` is for the log."""

    def __init__(self, kind: LossKind, detail: str) -> None:
        super().__init__(f"{kind.value}: {detail}")
        self.kind = kind
        self.detail = detail

    @property
    def delivered(self) -> bool:
        """The engine may have worked on the request: it counts as an attempt."""
        return self.kind not in _UNDELIVERED


class Connection(asyncio.Protocol):
    """One connection to the engine, one exchange at a time. `status` and `headers` are valid after `answered()`.

    Attributes:
        ends_by_close: the answer has no length, so only its own form can tell a whole one from one that was cut.
        reusable: after a complete answer, whether the connection can take another request.
        idle_since_s: when it came back from its last exchange; None for a fresh one.
    """

    __slots__ = (
        "_bodiless",
        "_buffered_bytes",
        "_chunks",
        "_complete",
        "_head_complete",
        "_heard_bytes",
        "_lost",
        "_owner",
        "_parser",
        "_reading",
        "_transport",
        "_waiter",
        "ends_by_close",
        "headers",
        "idle_since_s",
        "reusable",
        "status",
    )

    def __init__(self, owner: Upstream) -> None:
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._complete = True
        self.idle_since_s: float | None = None

    def send(self, head: bytes, body: bytes, *, bodiless: bool = False) -> None:
        """Begin an exchange; `bodiless` for HEAD, whose answer has a length and no body."""
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: Headers = []
        self._chunks: list[bytes] = []
        self._buffered_bytes = self._heard_bytes = 0
        self._head_complete = self._complete = self.ends_by_close = False
        self.reusable = False
        self._reading = True
        self._bodiless = bodiless
        self._lost: UpstreamLost | None = None
        if self._transport is None or self._transport.is_closing():
            self._lost = UpstreamLost(LossKind.RESET, "closed before the request was written")
        elif len(body) <= HIGH_WATER_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    @property
    def silent(self) -> bool:
        """Not one byte of an answer came."""
        return not self._heard_bytes

    @property
    def drained(self) -> bool:
        """Our request has left us to its last byte (an engine may answer before it has read all of it)."""
        return self._transport is not None and not self._transport.get_write_buffer_size()

    async def answered(self) -> None:
        """Wait for the head of the answer. Raises UpstreamLost."""
        while not self._head_complete:
            if self._lost is not None:
                raise self._lost
            await self._wait()

    async def read(self) -> bytes | None:
        """The body's next bytes, all that are there; None at its end. Raises UpstreamLost, after what came before it."""
        while not self._chunks:
            if self._complete:
                return None
            if self._lost is not None:
                raise self._lost
            await self._wait()
        chunks = self._chunks
        if len(chunks) == 1:
            data = chunks[0]
            chunks.clear()
        else:
            data = b"".join(chunks)
            self._chunks = []
        self._buffered_bytes = 0
        if not self._reading and self._transport is not None:
            self._reading = True
            self._transport.resume_reading()
        return data

    def close(self) -> None:
        """At once, whatever is under way: the engine sees its client gone."""
        if self._transport is not None:
            self._transport.abort()

    def fail(self, loss: UpstreamLost) -> None:
        """End an exchange that is under way; `read` and `answered` raise this."""
        if not self._complete and self._lost is None:
            self._lost = loss
            self._wake()
        self.close()

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        if self._complete:
            self.reusable = False  # an answer nobody asked for: whatever it is, the next request must not get it
            self.close()
            return
        self._heard_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.reusable = False
            self.fail(UpstreamLost(LossKind.GARBAGE, f"the engine's answer is no HTTP: {error!r}"))
            return
        if not self._head_complete and self._heard_bytes > HEAD_MAX_BYTES:
            self.fail(UpstreamLost(LossKind.GARBAGE, f"the head of the answer exceeds {HEAD_MAX_BYTES} bytes"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        self._owner.forget(self)
        self._parser = None  # type: ignore[assignment]  # it refers to us: nobody has to look for the two of them
        self.reusable = False
        if self._complete:
            return
        if self.ends_by_close and exc is None:
            self._complete = True  # as far as HTTP can tell
        elif self._lost is None:
            self._lost = UpstreamLost(LossKind.RESET, str(exc) if exc else "closed before the answer was complete")
        self._wake()

    # httptools' side

    def on_message_begin(self) -> None:
        """Called by the parser."""
        if self._complete:
            raise ValueError("a second answer on the same connection")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        status = self._parser.get_status_code()
        if status < 200:  # 100 Continue, 103 Early Hints: the answer is still to come
            self.headers = []
            return
        self.status = status
        self._head_complete = True
        names = {name for name, _ in self.headers}
        self.ends_by_close = b"content-length" not in names and b"transfer-encoding" not in names and status not in (204, 304)
        if self._bodiless:
            self._complete = True
        self._wake()

    def on_body(self, data: bytes) -> None:
        """Called by the parser."""
        self._chunks.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes > HIGH_WATER_BYTES and self._reading and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()
        self._wake()

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._head_complete and not self._complete:
            self._complete = True
            self.reusable = bool(self._parser.should_keep_alive())
            self._wake()


class Upstream:
    """The connections to one engine life. A new life gets a new Upstream; nothing of the old one is used for it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._ended: str | None = None

    async def begin(self, head: bytes, body: bytes, *, bodiless: bool = False) -> Connection:
        """Send a request and wait for the head of its answer.

        A kept connection that the engine had already closed is replaced once: it closed without a byte, so the request
        was not read.

        Raises:
            UpstreamLost: see LossKind.
            Refused: we ourselves have no file descriptor left.
        """
        connection = self._kept() or await self._connect()
        try:
            return await self._exchange(connection, head, body, bodiless)
        except UpstreamLost as loss:
            if connection.idle_since_s is None or not connection.silent or self._ended is not None:
                raise
            try:
                connection = await self._connect()
            except UpstreamLost:
                raise loss from None  # it did not close an idle connection, it died: perhaps of this very request
        return await self._exchange(connection, head, body, bodiless)

    def give_back(self, connection: Connection) -> None:
        """After the end of an answer: keep the connection if it may be used again."""
        if connection.reusable and connection.drained and self._ended is None:
            connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.close()

    async def healthy(self, timeout_s: float) -> bool:
        """Whether the engine says 200 on /health, over a connection of its own: a kept one proves nothing."""
        try:
            async with asyncio.timeout(timeout_s), self._asked("/health") as connection:
                return connection.status == 200
        except (UpstreamLost, Refused, TimeoutError):
            return False

    async def page(self, path: str, max_bytes: int) -> str | None:
        """The text that the engine gives for a path, over a connection of its own; None unless it says 200.

        Raises:
            UpstreamLost: it did not answer completely, or with more than `max_bytes`.
            Refused: we ourselves have no file descriptor left.
        """
        async with self._asked(path) as connection:
            parts: list[bytes] = []
            while (data := await connection.read()) is not None:
                parts.append(data)
                if sum(map(len, parts)) > max_bytes:
                    raise UpstreamLost(LossKind.GARBAGE, f"{path} has more than {max_bytes} bytes")
            return b"".join(parts).decode("utf-8", "replace") if connection.status == 200 else None

    @contextlib.asynccontextmanager
    async def _asked(self, path: str) -> AsyncIterator[Connection]:
        connection = await self._connect()
        try:
            yield await self._exchange(connection, upstream_head("GET", path.encode(), [], "gateway-probe", 0), b"", False)
        finally:
            connection.close()

    def end(self, reason: str) -> None:
        """This life is over: exchanges under way are lost, and none begins any more."""
        self._ended = reason
        for connection in tuple(self._open):
            connection.fail(UpstreamLost(LossKind.SUPERSEDED, reason))

    def forget(self, connection: Connection) -> None:
        """Called by a connection that closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _kept(self) -> Connection | None:
        oldest_s = asyncio.get_running_loop().time() - IDLE_MAX_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since_s is not None and connection.idle_since_s >= oldest_s:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        if self._ended is not None:
            raise UpstreamLost(LossKind.SUPERSEDED, self._ended)
        loop = asyncio.get_running_loop()
        connection = Connection(self)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if self.endpoint.port is not None:
                    await loop.create_connection(lambda: connection, "127.0.0.1", self.endpoint.port)
                else:
                    await loop.create_unix_connection(lambda: connection, self.endpoint.socket_path)
        except OSError as error:  # TimeoutError is one too
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise Refused(
                    503, "gateway_overloaded", "the gateway has no file descriptor left", hint="raise LimitNOFILE", retry_after_s=5
                ) from error
            raise UpstreamLost(LossKind.CONNECT, f"{self.endpoint}: {error.strerror or 'no answer to connect'}") from error
        self._open.add(connection)
        return connection

    @staticmethod
    async def _exchange(connection: Connection, head: bytes, body: bytes, bodiless: bool) -> Connection:
        try:
            connection.send(head, body, bodiless=bodiless)
            await connection.answered()
        except BaseException:  # cancelled when our client left: the engine must see it now, not after its prefill
            connection.close()
            raise
        return connection
