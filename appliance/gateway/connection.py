"""A client's connection: uvicorn's HTTP/1.1 protocol, and what a port open to strangers needs besides.

Added here: deadlines for heads, bodies and clients that read nothing, a limit on the head, our error envelope, keep-alive
probes for peers that vanished, a drain that lets the last answer out, and acting on a closed socket at once: the task
that serves the request is cancelled from `connection_lost` itself. (ASGI would have us wait on `receive()` in a task
of its own a request; an app that does not, like Starlette's StreamingResponse beside a reader of its own, never hears of it.)
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools
from uvicorn import Config as UvicornConfig
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from appliance.gateway.cycle import HeadWithBody, end_by_closing
from appliance.gateway.envelope import Refused
from appliance.gateway.headers import value_of
from appliance.gateway.peers import is_reset, probe_when_silent, unheard_s

EXTENSION = "appliance.connection"
"""Key in the scope's extensions under which the app finds its ClientConnection."""
HEAD_MAX_BYTES = 64 * 1024
BODY_MIN_BYTES_PER_S = 1024
"""A body that comes slower than this, after its first `header_timeout_s`, is cut off."""
KEEP_ALIVE_S = 75
LINGER_S = 1.0
"""How long a refused body may pause while we go on reading it: closing with unread bytes resets the connection, and the
client never reads the refusal."""
LINGER_MAX_S = 30.0
"""However steadily it comes."""
FRESH_GRACE_S = 1.0
"""On a drain, how long a connection that has not asked anything yet may still begin: its request may be on the wire."""
NUDGE_EVERY_S = 2.0
"""How often a peer that has closed its side is written to while it waits."""
LOOK_FIRST_S = 0.001
LOOK_MAX_S = 0.3
"""When to look whether a peer that has closed its side has reset the connection: a round trip after we wrote."""
_TAKES_APP_STATE = "app_state" in inspect.signature(HttpToolsProtocol.__init__).parameters
"""uvicorn before 0.19 has none."""


@dataclass(slots=True)
class ConnectionPolicy:
    """The limits, and the counts of what they cut off.

    Attributes:
        silent_peer_s: how long a peer may be unreachable before the kernel's keep-alive probes call it gone.
        draining: set once, when the gateway is to stop.
        cut: reason → connections cut off for it.
    """

    header_timeout_s: float
    write_timeout_s: float
    silent_peer_s: float
    draining: bool = False
    cut: dict[str, int] = field(default_factory=dict)

    def count(self, reason: str) -> None:
        """One more."""
        self.cut[reason] = self.cut.get(reason, 0) + 1


class ClientConnection(HttpToolsProtocol):
    """One accepted socket. `check` is called about every second and does all that depends on time."""

    def __init__(self, policy: ConnectionPolicy, config: UvicornConfig, state: ServerState) -> None:
        more: dict[str, Any] = {"app_state": {}} if _TAKES_APP_STATE else {}
        super().__init__(config=config, server_state=state, **more)
        self.policy = policy
        self.task: asyncio.Task[Any] | None = None
        """The task that serves the request under way; set and cleared by the app."""
        self.gone = False
        self.nudge: Callable[[], bool] | None = None
        """Set by the app with `task`: write what means nothing to a client that is there. False: nothing can be written now."""
        self.interruption: Refused | None = None
        """Why the task was cancelled, when it was not because the client left."""
        self._head_due_s: float | None = None
        self._head_bytes = 0
        self._asked = False
        self._in_message = False
        self._body_began_s: float | None = None
        self._body_due_s = 0.0
        self._stalled: tuple[float, int] | None = None
        self._deaf = False
        self._accepted: socket.socket | None = None
        self._linger_due_s: float | None = None
        self._linger_end_s = 0.0
        self._writer: HeadWithBody | None = None
        self._offered = False
        """The head that was read last offers to go on in another protocol."""
        self._half_closed_s: float | None = None
        """When a peer that has closed its side was last written to, to see whether it is still there."""

    # the app's side

    @property
    def body_pending(self) -> bool:
        """The request under way has not arrived to its end. An answer that is sent now must end the connection."""
        return self.cycle is not None and self.cycle.more_body and not self._deaf

    def await_body(self, received_bytes: int) -> None:
        """The app waits for more of a body of which it has so much."""
        if self._body_began_s is None:
            self._body_began_s = self.loop.time()
        self._body_due_s = self._body_began_s + self.policy.header_timeout_s + received_bytes / BODY_MIN_BYTES_PER_S

    def body_complete(self) -> None:
        """The app has all of it."""
        self._body_began_s = None
        self.flow.resume_reading()  # paused after a large body, and a leaving client would not be seen

    def interrupt(self, refused: Refused) -> None:
        """Cancel the request under way (or about to begin); its client gets this, as far as it can still be told."""
        if self.interruption is None:
            self.interruption = refused
            if self.task is not None:
                self.task.cancel()

    def abort(self) -> None:
        """Break the connection: an answer that cannot be completed must not look complete."""
        self.transport.abort()

    # the listener's side

    def check(self, now_s: float) -> None:
        """Act on what is overdue."""
        if self._accepted is not None and self.task is not None and unheard_s(self._accepted) > self.policy.silent_peer_s:
            self.policy.count("silent_peer")
            self.transport.abort()
        elif self._half_closed_s is not None:
            self._check_half_closed(now_s)
        elif self._linger_due_s is not None:
            if now_s > self._linger_due_s:
                self.transport.abort()
        elif self._stalled is not None:
            self._check_stalled(now_s)
        elif self._body_began_s is not None and now_s > self._body_due_s:
            self._body_began_s = None
            self.policy.count("slow_body")
            self.interrupt(_slow("the request's body", self.policy.header_timeout_s, f"then {BODY_MIN_BYTES_PER_S} bytes/s"))
        elif self._head_due_s is not None and now_s > self._head_due_s:
            self._head_due_s = None
            self.policy.count("slow_head")
            if self._head_bytes:
                self._refuse(_slow("the request's head", self.policy.header_timeout_s, "[gateway] header_timeout_s"))
            else:
                self.transport.close()

    def drain(self) -> None:
        """No further request after the one under way."""
        if not self._asked:
            due_s = self.loop.time() + FRESH_GRACE_S
            self._head_due_s = due_s if self._head_due_s is None else min(self._head_due_s, due_s)
        elif self.cycle.response_complete:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    # asyncio's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Called by asyncio."""
        super().connection_made(transport)
        self._head_due_s = self.loop.time() + self.policy.header_timeout_s
        accepted = transport.get_extra_info("socket")
        if accepted.family in (socket.AF_INET, socket.AF_INET6):
            self._accepted = accepted
            with contextlib.suppress(OSError):  # already reset by the peer
                probe_when_silent(accepted, self.policy.silent_peer_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio."""
        super().connection_lost(exc)
        self.gone = True
        self._head_due_s = self._body_began_s = self._stalled = self._accepted = None
        self._untie()
        if self.task is not None:
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        if self._deaf:
            if self._linger_due_s is not None:
                self._linger_due_s = min(self.loop.time() + LINGER_S, self._linger_end_s)
            return
        if self._head_due_s is None and not self._in_message and (self.cycle is None or self.cycle.response_complete):
            self._head_due_s = self.loop.time() + self.policy.header_timeout_s
        self._head_bytes += len(data)
        self._parse(data)
        if self._head_due_s is not None and self._head_bytes > HEAD_MAX_BYTES and not self._deaf:
            self.policy.count("long_head")
            self._refuse(Refused(431, "headers_too_large", f"the request's head exceeds {HEAD_MAX_BYTES} bytes", hint="send fewer headers"))

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Called by asyncio: the peer sends no more. True: it may still be read from.

        One that has left looks like one that waits for its answer (`nc -N`). But where nobody is left, the peer's kernel
        answers whatever we write with a reset.
        """
        answering = self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body
        if not answering or self._accepted is None or self.scheme == "https" or self.nudge is None or not self.nudge():
            return None
        self._half_closed_s = self.loop.time()
        self.cycle.keep_alive = False
        self._look_for_reset(LOOK_FIRST_S)
        return True

    def pause_writing(self) -> None:
        """Called by asyncio."""
        super().pause_writing()
        self._stalled = (self.loop.time(), self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """Called by asyncio."""
        super().resume_writing()
        self._stalled = None

    # uvicorn's side

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._offered = self.parser.should_upgrade() and value_of(self.headers, b"upgrade") is not None
        if self._offered:
            return
        self._head_due_s = None
        self._in_message = True
        if self.cycle is not None and not self.cycle.response_complete:
            # Pipelined. uvicorn would stop reading until the first answer is out, and a client that left be noticed by
            # nobody. Instead this connection ends after that answer, and the client asks again, as RFC 9112 9.3.2 has it.
            self._deaf = True
            self.cycle.keep_alive = False
            self.policy.count("pipelined")
            return
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":  # for which the cycle writes no body
            self.cycle.transport = self._writer = HeadWithBody(self.transport, self._close)  # type: ignore[assignment]
        if self.scope["http_version"] == "1.0":
            end_by_closing(self.cycle)
        self._asked = True
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope["extensions"] = {EXTENSION: self}
        if self.policy.draining and self.cycle is not None:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        if not self._deaf:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._offered:
            return
        self._in_message = False
        self._head_bytes = 0
        if not self._deaf:
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what is no HTTP."""
        self.policy.count("bad_http")
        self._refuse(Refused(400, "invalid_http", msg.rstrip("."), hint="is the client speaking HTTP/1.1?"))

    # inside

    def _parse(self, data: bytes) -> None:
        """As uvicorn has it, but that an offer to go on in another protocol costs the client nothing."""
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            if self._offered:
                self._decline(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")

    def _decline(self, rest: bytes) -> None:
        """RFC 9110, 7.8: an offer may be ignored, and Java's own client and `curl --http2` make one with each first request (h2c).
        The parser takes it for accepted and all behind the head for the other protocol: it reads the head again without it."""
        first = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode("ascii"))
        kept = [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        self._parse(b"\r\n".join([first, *kept, b"", b""]) + rest)

    def _untie(self) -> None:
        """It refers to itself through these. Left so, the collector alone would free it, hundreds of dead ones and their bodies later."""
        if self._writer is not None:
            self._writer.let_go()
        self.cycle = self.scope = self._writer = None  # type: ignore[assignment]

    def _check_stalled(self, now_s: float) -> None:
        assert self._stalled is not None
        since_s, buffered_bytes = self._stalled
        left_bytes = self.transport.get_write_buffer_size()
        if left_bytes < buffered_bytes:
            self._stalled = (now_s, left_bytes)
        elif now_s - since_s > self.policy.write_timeout_s:
            self.policy.count("never_reads")
            self.transport.abort()

    def _refuse(self, refused: Refused) -> None:
        """What came is not a request. Nothing that comes after it is looked at."""
        self._head_due_s = None
        self._deaf = True
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._refuse_here(refused)
            return
        cycle.keep_alive = False  # the answer under way is finished first: bytes between its bytes would be taken for it
        if cycle.more_body:
            self.interrupt(refused)

    def _close(self) -> None:
        """Called after the last answer of a connection."""
        if self.cycle.more_body and not self.transport.is_closing():
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """All has been said; what still comes is read away for a while."""
        self._deaf = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():  # TLS cannot be closed on one side; there the client goes by the length
            with contextlib.suppress(OSError):  # already reset by the peer
                self.transport.write_eof()
        now_s = self.loop.time()
        self._linger_due_s, self._linger_end_s = now_s + LINGER_S, now_s + LINGER_MAX_S

    def _check_half_closed(self, now_s: float) -> None:
        """It may have waited for a while and left then, and that is not told: again something has to be written."""
        assert self._half_closed_s is not None
        if now_s - self._half_closed_s > NUDGE_EVERY_S and self.nudge is not None:
            self._half_closed_s = now_s
            self.nudge()
        self._look_for_reset(LOOK_FIRST_S)

    def _look_for_reset(self, pause_s: float) -> None:
        if self._accepted is None:
            return
        if is_reset(self._accepted):
            self.transport.abort()
        elif pause_s < LOOK_MAX_S:
            self.loop.call_later(pause_s, self._look_for_reset, 2 * pause_s)

    def _refuse_here(self, refused: Refused) -> None:
        body = refused.body()
        head = [STATUS_LINE[refused.status]]
        head += [b"%s: %s\r\n" % header for header in refused.headers()]
        head.append(b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body))
        self.transport.write(b"".join(head) + body)
        self._linger()


def _slow(what: str, limit_s: float, rest: str) -> Refused:
    return Refused(408, "request_timeout", f"{what} did not arrive in time (limit: {limit_s:g} s, {rest})", hint="send faster")
