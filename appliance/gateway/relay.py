"""One request, from its place in the queue to its last byte, over as many engine lives as it takes."""

from __future__ import annotations

import asyncio
import json
import logging

from appliance.config import Config
from appliance.gateway import sse
from appliance.gateway.admission import Lane
from appliance.gateway.client import UNBUFFERED, Client
from appliance.gateway.envelope import JSON_TYPE, Refused, in_envelope
from appliance.gateway.gate import RETRY_AFTER_UNKNOWN_S, Gate, Life, Standing
from appliance.gateway.headers import Headers, downstream, upstream_head, value_of
from appliance.gateway.inflight import InflightTable, LiveRequest
from appliance.gateway.metrics import Metrics
from appliance.gateway.report import Reporter
from appliance.gateway.resume import Loss, Verdict, after_loss
from appliance.gateway.upstream import Connection, LossKind, UpstreamLost

log = logging.getLogger("gateway.relay")

WHOLE_MAX_BYTES = 8 * 1024**2
"""A longer answer is passed on before it is complete; until then a crash of the engine costs its client nothing."""
PRELUDE_MAX_BYTES = 64 * 1024
NEWS_WAIT_S = 0.5
"""How long a broken stream waits for applianced's sentence on it, to end with the incident's id in its error."""
SLOTS_WHEN_UNKNOWN = 8
READS_MAX = 256
"""Requests that take no slot, such as the list of models, given to the engine at once."""
_NOT_READY_WORDS = (b"loading", b"starting", b"draining", b"not ready", b"unavailable_error")


class Relay:
    """Owns the lanes: `slots` for what decodes, `reads` for what does not."""

    def __init__(self, config: Config, gate: Gate, inflight: InflightTable, reporter: Reporter, metrics: Metrics) -> None:
        self._config = config
        self._gate = gate
        self._inflight = inflight
        self._reporter = reporter
        self._metrics = metrics
        self.slots = self._lane()
        self.reads = self._lane()

    def settle(self) -> None:
        """The gate's standing may have moved: open, close or empty the lanes."""
        standing = self._gate.standing
        if standing is Standing.OPEN:
            self.slots.open(self._capacity(), self._pool_tokens())
            self.reads.open(READS_MAX)
            return
        for lane in (self.slots, self.reads):
            lane.close()
            if standing is Standing.REFUSE:
                lane.refuse_all(self._gate.refusal)

    async def serve(self, request: LiveRequest, client: Client) -> None:
        """Answer it, or raise Refused."""
        self._inflight.add(request)
        try:
            if request.stream:
                client.start_comments()
            await self._serve(request, client, self.slots if request.takes_slot else self.reads)
        finally:
            client.stop_comments()
            self._inflight.discard(request)

    async def _serve(self, request: LiveRequest, client: Client, lane: Lane) -> None:
        loop = asyncio.get_running_loop()
        lost: UpstreamLost | None = None
        while True:
            if self._gate.standing is Standing.REFUSE:
                raise self._gate.refusal()
            asked_s = loop.time()
            await lane.acquire(request.ticket, returning=lost is not None)
            began_s = loop.time()
            self._metrics.queue_wait.observe(began_s - asked_s)
            if lost is not None:
                request.waited_s += began_s - asked_s
                self._metrics.resent += 1
            held_s: float | None = None
            try:
                lost = await self._attempt(request, client)
                if lost is None:
                    held_s = loop.time() - began_s
                    return
            finally:
                request.generation = 0
                lane.release(request.ticket, held_s)
            await self._judge(request, lost)

    async def _attempt(self, request: LiveRequest, client: Client) -> UpstreamLost | None:
        life = self._gate.life
        if life is None or self._gate.standing is not Standing.OPEN:
            return UpstreamLost(LossKind.CONNECT, "the engine went away in this moment")
        request.generation = life.generation
        request.attempt += 1
        try:
            await self._exchange(request, client, life)
        except UpstreamLost as lost:
            self._metrics.lost[lost.kind.value] += 1
            if self._gate.lost(life, lost):
                shapes = self._inflight.of_generation(life.generation)
                log.warning("generation %d lost with %d requests in flight: %s", life.generation, len(shapes), lost)
                self._reporter.upstream_lost(shapes)
            if not lost.delivered:
                request.attempt -= 1
            return lost
        return None

    async def _judge(self, request: LiveRequest, lost: UpstreamLost) -> None:
        """Return when the request may be sent again; else raise the reason."""
        resume = self._config.resume
        facts = Loss(request.resumability, request.attempt, request.waited_s)
        verdict = after_loss(facts, max_attempts=resume.max_attempts, max_wait_s=resume.max_wait_s)
        if verdict is Verdict.AGAIN:
            return
        if self._gate.standing is Standing.HOLD and verdict is not Verdict.FAIL_WAITED:
            await self._gate.news(NEWS_WAIT_S)
        raise self._failed(request, lost, verdict)

    def _failed(self, request: LiveRequest, lost: UpstreamLost, verdict: Verdict) -> Refused:
        now = self._gate.refusal()
        if verdict is Verdict.FAIL_WAITED:
            return now
        serves = self._gate.standing is Standing.OPEN
        why = lost.detail if serves else now.message
        if verdict is Verdict.FAIL_SENT:
            message = f"the engine was lost while this answer was being written: {why}"
            code, hint = "engine_lost", "send the request again"
        else:
            code, hint = "engine_lost_repeatedly", "see `appliancectl incidents`"
            message = (
                f"{request.attempt} engines were lost while they had this request, "
                f"[resume] max_attempts forgives {self._config.resume.max_attempts}: {why}"
            )
        incident_id = None if serves else now.incident_id
        return Refused(503, code, message, hint=hint, retry_after_s=now.retry_after_s or RETRY_AFTER_UNKNOWN_S, incident_id=incident_id)

    # one exchange with one life

    async def _exchange(self, request: LiveRequest, client: Client, life: Life) -> None:
        head = upstream_head(request.method, request.target, request.headers, request.request_id, len(request.body))
        connection = await life.upstream.begin(head, request.body, bodiless=request.method == "HEAD")
        try:
            if _is_event_stream(connection):
                await self._pass_events(request, client, connection)
            else:
                await self._pass_whole(request, client, connection)
        except BaseException:  # our client left, or the answer broke: the engine must not go on with it
            connection.close()
            raise
        life.upstream.give_back(connection)

    async def _pass_events(self, request: LiveRequest, client: Client, connection: Connection) -> None:
        framer = sse.Framer()
        held = b""
        while (data := await connection.read()) is not None:
            whole = framer.feed(data)
            if not whole:
                continue
            if not request.sent_bytes:
                held += whole
                if sse.is_prelude(whole) and len(held) < PRELUDE_MAX_BYTES:
                    continue
                whole = held
                await client.begin(connection.status, [*downstream(connection.headers), UNBUFFERED])
                self._metrics.first_token.observe(asyncio.get_running_loop().time() - request.arrived_s)
            request.sent_bytes += len(whole)
            await client.write(whole)
        if not framer.finished(request.dialect):
            raise UpstreamLost(LossKind.TRUNCATED, "the stream ended without its last event")
        if not request.sent_bytes:
            await client.begin(connection.status, [*downstream(connection.headers), UNBUFFERED])
        rest = (held if not request.sent_bytes else b"") + framer.rest()
        if rest:
            await client.write(rest)
        await client.finish()

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
        if connection.ends_by_close and not _is_whole(connection, body):
            raise UpstreamLost(LossKind.TRUNCATED, "the engine closed the connection inside its JSON")
        client.stop_comments()
        if client.status:
            await self._as_events(request, client, connection.status, body)
            return
        headers = downstream(connection.headers)
        if request.method == "HEAD":
            length = value_of(connection.headers, b"content-length")
            await client.begin(connection.status, headers + ([(b"content-length", length)] if length is not None else []))
            await client.finish()
            return
        if connection.status >= 400:
            headers, body = _error(connection.status, headers, body)
        request.sent_bytes += len(body)
        await client.answer(connection.status, headers, body)

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

    async def _as_events(self, request: LiveRequest, client: Client, status: int, body: bytes) -> None:
        """A whole answer to a client whose stream has been begun with comments."""
        if status < 400:
            await client.write(sse.as_events(body))
            await client.finish()
            return
        error = json.loads(in_envelope(status, body))["error"]
        await client.refuse(Refused(status, str(error.get("code") or "engine_error"), str(error["message"])), request.dialect)

    # inside

    def _capacity(self) -> int:
        configured = self._config.admission.max_concurrent_decodes
        publication = self._gate.view.publication
        if configured or publication is None or publication.limits is None:
            return configured or SLOTS_WHEN_UNKNOWN
        return max(1, publication.limits.max_running)

    def _pool_tokens(self) -> int:
        publication = self._gate.view.publication
        known = publication.limits.kv_tokens if publication is not None and publication.limits is not None else 0
        return int(known * self._config.admission.kv_fill)

    def _lane(self) -> Lane:
        return Lane(
            queue_size=self._config.admission.queue_size,
            queue_timeout_s=self._config.admission.queue_timeout_s,
            max_wait_s=self._config.resume.max_wait_s,
            refused_while_closed=self._gate.refusal,
        )


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


def _error(status: int, headers: Headers, body: bytes) -> tuple[Headers, bytes]:
    """The engine's error in our envelope; untouched where it is one already."""
    wrapped = in_envelope(status, body)
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
