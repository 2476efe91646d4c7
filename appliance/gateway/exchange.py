"""One exchange with one engine life: the request as this engine takes it, the answer as its client has to get it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

from appliance.core.launch import ContinuesBy
from appliance.gateway import sse
from appliance.gateway.client import UNBUFFERED, Client
from appliance.gateway.continuing import CHAT
from appliance.gateway.envelope import JSON_TYPE, Refused, in_envelope
from appliance.gateway.gate import Life
from appliance.gateway.generated import PATH as GENERATE
from appliance.gateway.headers import Headers, downstream, upstream_head, value_of
from appliance.gateway.inflight import LiveRequest
from appliance.gateway.metrics import Metrics
from appliance.gateway.notes import ASK
from appliance.gateway.resume import Way, way_on
from appliance.gateway.said import MESSAGES
from appliance.gateway.upstream import Connection, LossKind, UpstreamLost

WHOLE_MAX_BYTES = 8 * 1024**2
"""A longer answer is passed on before it is complete; until then a crash of the engine costs its client nothing."""
PRELUDE_MAX_BYTES = 64 * 1024
_NOT_READY_WORDS = (b"loading", b"starting", b"draining", b"not ready", b"unavailable_error")
LAST_WORDS_S = 2.0
"""An engine that dies (vLLM) may first tell its clients of an error. For so long its end is waited for; only then is it for them."""
ALTERED = b"x-appliance-prompt"
"""Says that the prompt was altered, and how: padded, truncated."""
Take = Callable[[bytes], bytes]
"""Whole events of the engine's → what of them goes to the client."""


class Exchange:
    """`got_further` is called when a request has got further than any engine before has brought it; `stands_aside` is asked.

    `outlives`: whether this life still serves after so many seconds.
    """

    def __init__(
        self,
        metrics: Metrics,
        got_further: Callable[[LiveRequest], None],
        stands_aside: Callable[[LiveRequest], bool],
        outlives: Callable[[Life, float], Awaitable[bool]],
    ) -> None:
        self._metrics = metrics
        self._outlives = outlives
        self._got_further = got_further
        self._stands_aside = stands_aside

    async def run(self, request: LiveRequest, client: Client, life: Life) -> None:
        """To the last byte.

        Raises:
            UpstreamLost: the engine did not answer to the end.
            Refused: this engine cannot go on with what an earlier one began.
        """
        way = way_on(request.progress, life.continues_by)
        if way is None:
            raise cannot_go_on(request, "the engine that took over cannot go on with it")
        if request.altered and not client.status and value_of(client.extra, ALTERED) is None:
            client.extra = [*client.extra, (ALTERED, request.altered.encode("ascii"))]
        request.way, request.got_further, request.notes.whole = way, False, 0
        request.by_message = life.continues_by is ContinuesBy.MESSAGE
        body, take, asked = _given(request, way)
        target = CHAT.encode() if way is Way.MESSAGE and request.path == MESSAGES else request.target
        head = upstream_head(request.method, target, request.headers, request.request_id, len(body), *asked)
        connection = request.connection = await life.upstream.begin(head, body, bodiless=request.method == "HEAD")
        try:
            if request.can_stand_aside and self._stands_aside(request):
                raise UpstreamLost(LossKind.SET_ASIDE, "a suspect is tried alone")
            await self._pass(request, client, connection, take)
        except BaseException:  # our client left, or the answer broke: the engine must not go on with it
            connection.close()
            raise
        finally:
            request.connection = None
        life.upstream.give_back(connection)

    async def _pass(self, request: LiveRequest, client: Client, connection: Connection, take: Take) -> None:
        if not _is_event_stream(connection):
            await self._pass_whole(request, client, connection)
        elif request.way is Way.IDS and not request.stream:
            await self._pass_noted(request, client, connection)
        else:
            await self._pass_events(request, client, connection, take)

    async def _pass_events(self, request: LiveRequest, client: Client, connection: Connection, take: Take) -> None:
        framer, known = sse.Framer(), len(request.notes.ids)
        held = b""
        while (data := await connection.read()) is not None:
            whole = framer.feed(data)
            if sse.is_engine_failure(whole):
                await self._hear_last_words(request, whole)
            told = take(whole) if whole else b""
            if not request.got_further:
                self._watch(request, told, known)
            if not told:
                continue
            if not request.sent_bytes:
                held += told
                if sse.is_prelude(told) and len(held) < PRELUDE_MAX_BYTES:
                    continue
                told = held
                await client.begin(connection.status, [*downstream(connection.headers), UNBUFFERED])
                self._metrics.first_token.observe(asyncio.get_running_loop().time() - request.arrived_s)
            request.sent_bytes += len(told)
            await client.write(told)
        if not framer.finished(request.dialect):
            raise UpstreamLost(LossKind.TRUNCATED, "the stream ended without its last event")
        if not request.sent_bytes:
            await client.begin(connection.status, [*downstream(connection.headers), UNBUFFERED])
        rest = (held if not request.sent_bytes else b"") + take(framer.rest())
        if rest:
            await client.write(rest)
        await client.finish()

    def _watch(self, request: LiveRequest, told: bytes, known: int) -> None:
        """Has it got further? Where an engine notes token ids, by these; else by what is new to the client."""
        if request.way is Way.IDS:
            request.got_further = len(request.notes.ids) > known
        else:
            request.got_further = bool(told) and not sse.is_prelude(told)
        if request.got_further:
            request.losses.got_further()
            self._got_further(request)

    async def _pass_noted(self, request: LiveRequest, client: Client, connection: Connection) -> None:
        """An answer without a stream, from an engine that notes how far it is before the answer is there."""
        framer, known, answer = sse.Framer(), len(request.notes.ids), b""
        while not request.notes.whole:
            data = await connection.read()
            if data is None:
                raise UpstreamLost(LossKind.TRUNCATED, "the engine ended its notes without an answer")
            answer += request.notes.take(framer.feed(data))
            if not request.got_further:
                self._watch(request, b"", known)
        body = answer.removeprefix(b"data: ").rstrip(b"\n")
        await _deliver(request, client, request.notes.whole, [JSON_TYPE], body)
        with contextlib.suppress(UpstreamLost):  # the client has its answer: an engine that dies now has lost nothing
            while await connection.read() is not None:
                pass

    async def _pass_whole(self, request: LiveRequest, client: Client, connection: Connection) -> None:
        parts: list[bytes] = []
        size_bytes = 0
        while (data := await connection.read()) is not None:
            parts.append(data)
            size_bytes += len(data)
            if size_bytes > WHOLE_MAX_BYTES:
                if client.status:
                    raise _too_long(size_bytes)
                await self._pass_on(request, client, connection, parts)
                return
        body = parts[0] if len(parts) == 1 else b"".join(parts)
        if connection.status == 503 and _not_ready(body):
            raise UpstreamLost(LossKind.NOT_READY, body[:200].decode("utf-8", "replace"))
        if connection.status == 500:
            await self._hear_last_words(request, body)
        if connection.ends_by_close and not _is_whole(connection, body):
            raise UpstreamLost(LossKind.TRUNCATED, "the engine closed the connection inside its JSON")
        headers = downstream(connection.headers)
        if request.method == "HEAD":
            length = value_of(connection.headers, b"content-length")
            await client.begin(connection.status, headers + ([(b"content-length", length)] if length is not None else []))
            await client.finish()
            return
        await _deliver(request, client, connection.status, headers, body)

    async def _hear_last_words(self, request: LiveRequest, words: bytes) -> None:
        """Raises UpstreamLost where the engine dies of what it says; else it is for the client."""
        if request.life is not None and not await self._outlives(request.life, LAST_WORDS_S):
            raise UpstreamLost(LossKind.RESET, f"its last words: {words[:200].decode('utf-8', 'replace').strip()}")

    async def _pass_on(self, request: LiveRequest, client: Client, connection: Connection, parts: list[bytes]) -> None:
        """Too long to hold: from here on a loss breaks the client's connection, so that it does not look complete."""
        await client.begin(connection.status, downstream(connection.headers))
        request.sent_bytes += WHOLE_MAX_BYTES
        for part in parts:
            await client.write(part)
        parts.clear()
        while (data := await connection.read()) is not None:
            request.sent_bytes += len(data)
            await client.write(data)
        await client.finish()


def cannot_go_on(request: LiveRequest, why: str) -> Refused:
    """Part of the answer is with the client, and that is all it will get."""
    reason = "" if request.notes.usable else request.why_incomparable()
    because = f"; it cannot be gone on with: {reason}" if reason else ""
    return Refused(
        503,
        "engine_lost",
        f"the engine was lost while this answer was being written: {why}{because}",
        hint="send the request again",
        retry_after_s=1,
    )


def _given(request: LiveRequest, way: Way) -> tuple[bytes, Take, Headers]:
    """The body for the engine, what becomes of its events on their way, and headers of ours."""
    match way:
        case Way.IDS:
            known = request.notes.document(sent=bool(request.sent_bytes) or not request.stream)
            return known + request.body if known else request.body, _noted(request), [(ASK, b"%d" % len(known))]
        case Way.MESSAGE:
            rest = request.rest()
            if rest is None:
                raise cannot_go_on(request, "its text cannot be given to the next one")
            return rest.body, rest.take, []
        case Way.REPLAY:
            return request.body, request.said.replay().take, []
        case Way.PLAIN:
            kept = request.keeps_text or not request.why_incomparable()
            keep = request.generated.take if request.path == GENERATE else request.said.take
            return request.body, keep if kept else _as_it_is, []


def _noted(request: LiveRequest) -> Take:
    """Notes are kept; where the engine makes none (of several answers to one request), what is said is."""
    notes = request.notes

    def take(events: bytes) -> bytes:
        told = notes.take(events)
        if told and not notes.ticket and not request.why_incomparable():
            request.said.take(told)
        return told

    return take


def _as_it_is(events: bytes) -> bytes:
    return events


async def _deliver(request: LiveRequest, client: Client, status: int, headers: Headers, body: bytes) -> None:
    """A whole answer; as events where its client was promised a stream and comments have begun it."""
    client.stop_comments()
    if client.status and status < 400:
        await client.write(sse.as_events(body))
        await client.finish()
    elif client.status:
        error = json.loads(in_envelope(status, body))["error"]
        await client.refuse(Refused(status, str(error.get("code") or "engine_error"), str(error["message"])), request.dialect)
    else:
        if status >= 400:
            headers, body = _error(status, headers, body, request.path)
        request.sent_bytes += len(body)
        await client.answer(status, headers, body)


def _is_event_stream(connection: Connection) -> bool:
    if connection.status != 200 or value_of(connection.headers, b"content-encoding") is not None:
        return False
    return (value_of(connection.headers, b"content-type") or b"").startswith(b"text/event-stream")


def _is_whole(connection: Connection, body: bytes) -> bool:
    """Of an answer without a length. What is not JSON has to be believed."""
    if b"json" not in (value_of(connection.headers, b"content-type") or b""):
        return True
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def _error(status: int, headers: Headers, body: bytes, path: str) -> tuple[Headers, bytes]:
    """The engine's error in our envelope; untouched where it is one already."""
    wrapped = in_envelope(status, body, path)
    if wrapped is body:
        return headers, body
    return [header for header in headers if header[0] != b"content-type"] + [JSON_TYPE], wrapped


def _too_long(size_bytes: int) -> Refused:
    return Refused(
        502,
        "answer_too_long",
        f"the engine answered a stream with a body of more than {size_bytes} bytes that is no stream; the limit is {WHOLE_MAX_BYTES}",
    )


def _not_ready(body: bytes) -> bool:
    """Whether this 503 means "not yet" (loading, draining) and not "too much": a full queue is the client's to hear of."""
    lower = body[:2000].lower()
    return any(word in lower for word in _NOT_READY_WORDS)
