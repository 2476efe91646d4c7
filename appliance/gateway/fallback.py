"""Another OpenAI-compatible endpoint for requests that this box would refuse. Off unless the owner names one: prompts leave the box.

Only what would be refused for want of an engine or of room goes there (TAKEN), never what is over a key's own limits. An
answer that came from there says so in `x-appliance-fallback`. If it does not come, the client gets our own refusal.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import urlsplit

from appliance.config.api_keys import read_fallback_key
from appliance.config.client_tables import FallbackTable
from appliance.core.errors import ConfigError
from appliance.core.launch import Endpoint
from appliance.gateway import sse
from appliance.gateway.client import UNBUFFERED, Client
from appliance.gateway.envelope import JSON_TYPE, Refused, in_envelope
from appliance.gateway.headers import Headers, downstream, value_of
from appliance.gateway.inflight import LiveRequest
from appliance.gateway.upstream import CONNECT_TIMEOUT_S, Connection, LossKind, Upstream, UpstreamLost

T = TypeVar("T")
log = logging.getLogger("gateway.fallback")

TAKEN = frozenset({"engine_parked", "queue_full", "queue_timeout", "deadline_unmeetable", "memory_short"})
"""Codes of the refusals that send a request there."""
PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses"})
CLIENT_S_OWN = frozenset({400, 404, 413, 422})
"""Statuses that are the client's business; with any other error, ours is the better one."""
WHOLE_MAX_BYTES = 8 * 1024**2
MARK = b"x-appliance-fallback"


@dataclass(frozen=True, slots=True)
class Place:
    """Where it is."""

    host: str
    port: int
    tls: bool
    prefix: str
    """In front of what follows `/v1` in a client's path."""

    @property
    def authority(self) -> str:
        """For the Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"


def place_of(base_url: str) -> Place:
    """Raises ConfigError for what is no http(s) URL of an API."""
    parts = urlsplit(base_url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.username is not None:
        raise ConfigError(f"fallback.base_url = {base_url!r} is no URL of an API", hint="write for example https://api.example.com/v1")
    tls = parts.scheme == "https"
    return Place(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))


class Elsewhere(Upstream):
    """Connections to another machine."""

    def __init__(self, place: Place) -> None:
        super().__init__(Endpoint(port=place.port))
        self._place = place
        self._tls = ssl.create_default_context() if place.tls else None

    async def _connect(self) -> Connection:
        place, connection = self._place, Connection(self)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await asyncio.get_running_loop().create_connection(lambda: connection, place.host, place.port, ssl=self._tls)
        except OSError as error:  # ssl.SSLError and TimeoutError are some too
            raise UpstreamLost(LossKind.CONNECT, f"{place.authority}: {error.strerror or error or 'no answer to connect'}") from error
        self._open.add(connection)
        return connection


class Fallback:
    """Serves there, or says that it did not."""

    def __init__(self, table: FallbackTable) -> None:
        """Raises ConfigError where the configuration cannot be used."""
        self.outcomes: Counter[str] = Counter()
        """answered, refused, lost, too_many → requests."""
        self._table = table
        self._busy = 0
        self._place = place_of(table.base_url) if table.base_url else None
        self._upstream: Elsewhere | None = None
        self._key = read_fallback_key(table.api_key_file)

    async def serve(self, request: LiveRequest, client: Client, refused: Refused) -> bool:
        """Whether the client has been answered. Where it has not, nothing of an answer was sent.

        Raises:
            Refused: the answer broke off.
        """
        if self._place is None or refused.code not in TAKEN or request.path not in PATHS or request.sent_bytes:
            return False
        if self._busy >= self._table.max_concurrent:
            self.outcomes["too_many"] += 1
            return False
        self._busy += 1
        try:
            answered = await self._pass(request, client, self._place)
        except UpstreamLost as lost:
            self.outcomes["lost"] += 1
            log.warning("%s gave no whole answer: %s", self._place.authority, lost)
            if request.sent_bytes:
                raise Refused(502, "fallback_lost", f"the endpoint that answered in our place broke off: {lost.detail}") from lost
            answered = False
        finally:
            self._busy -= 1
        return answered

    async def _pass(self, request: LiveRequest, client: Client, place: Place) -> bool:
        if self._upstream is None:  # here and not before: reading all of the system's certificates takes memory
            self._upstream = Elsewhere(place)
        body = _body(request.body, self._table.model)
        connection = await self._within(self._upstream.begin(self._head(request, place, len(body)), body))
        try:
            if connection.status == 200 and _is_events(connection):
                await self._pass_events(request, client, connection, place)
            elif not await self._pass_whole(request, client, connection, place):
                connection.close()
                return False
        except BaseException:
            connection.close()
            raise
        self._upstream.give_back(connection)
        self.outcomes["answered"] += 1
        return True

    async def _pass_events(self, request: LiveRequest, client: Client, connection: Connection, place: Place) -> None:
        framer, mark = sse.Framer(), _mark(place)
        if client.status and client.takes_comments:  # they have begun its stream, and its head is out
            await client.write(b": %s: %s\n\n" % mark)
        client.extra.append(mark)
        await client.begin(200, [*_content_type(connection), UNBUFFERED, (b"cache-control", b"no-cache")])
        while (data := await self._within(connection.read())) is not None:
            whole = framer.feed(data)
            if whole:
                request.sent_bytes += len(whole)
                await client.write(whole)
        if not framer.finished(request.dialect):
            raise UpstreamLost(LossKind.TRUNCATED, "the stream ended without its last event")
        if framer.rest():
            await client.write(framer.rest())
        await client.finish()

    async def _pass_whole(self, request: LiveRequest, client: Client, connection: Connection, place: Place) -> bool:
        parts: list[bytes] = []
        while (data := await self._within(connection.read())) is not None:
            parts.append(data)
            if sum(map(len, parts)) > WHOLE_MAX_BYTES:
                raise UpstreamLost(LossKind.GARBAGE, f"an answer of more than {WHOLE_MAX_BYTES} bytes")
        body, status = b"".join(parts), connection.status
        if not 200 <= status < 300 and status not in CLIENT_S_OWN:
            self.outcomes["refused"] += 1
            log.warning("%s answers %d: %s", place.authority, status, body[:200].decode("utf-8", "replace"))
            return False
        if client.status:  # comments have begun its stream
            if status >= 400:
                self.outcomes["refused"] += 1
                return False
            await client.write(sse.as_events(body))
            await client.finish()
            return True
        client.extra.append(_mark(place))
        request.sent_bytes += len(body)
        if status < 400:
            await client.answer(status, _content_type(connection), body)
        else:
            await client.answer(status, [JSON_TYPE], in_envelope(status, body))
        return True

    async def _within(self, work: Coroutine[Any, Any, T]) -> T:
        """With a deadline for its next byte."""
        try:
            async with asyncio.timeout(self._table.timeout_s):
                return await work
        except TimeoutError:
            raise UpstreamLost(LossKind.RESET, f"no byte for {self._table.timeout_s:g} s") from None

    def _head(self, request: LiveRequest, place: Place, body_bytes: int) -> bytes:
        """Of the client's headers only what it accepts: cookies, addresses and keys are not for others."""
        target = place.prefix.encode() + request.target.removeprefix(b"/v1")
        lines = [
            b"POST " + target + b" HTTP/1.1",
            b"host: " + place.authority.encode(),
            b"user-agent: llm-appliance",
            b"content-type: application/json",
            b"content-length: %d" % body_bytes,
            b"x-request-id: " + request.request_id.encode("ascii"),
        ]
        if self._key:
            lines.append(b"x-api-key: " + self._key if request.dialect is sse.Dialect.ANTHROPIC else b"authorization: Bearer " + self._key)
        lines += [name + b": " + value for name, value in request.headers if name in (b"accept", b"anthropic-version")]
        return b"\r\n".join(lines) + b"\r\n\r\n"


def _body(body: bytes, model: str) -> bytes:
    """The client's, with the model that is known there."""
    if not model:
        return body
    document = json.loads(body)
    return json.dumps({**document, "model": model}, separators=(",", ":")).encode()


def _mark(place: Place) -> tuple[bytes, bytes]:
    return MARK, place.host.encode("ascii", "replace")


def _content_type(connection: Connection) -> Headers:
    """Of the other's headers no more: cookies and the like are not ours to give."""
    return [header for header in downstream(connection.headers) if header[0] == b"content-type"]


def _is_events(connection: Connection) -> bool:
    return (value_of(connection.headers, b"content-type") or b"").startswith(b"text/event-stream")
