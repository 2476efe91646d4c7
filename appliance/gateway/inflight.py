"""The requests between acceptance and last byte, and what of them may be told to others: shapes, never text."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from appliance.core.requests import InflightRequest, Resumability
from appliance.gateway.accounting import Account
from appliance.gateway.continuing import Onward, Rest, going_on
from appliance.gateway.gate import Life
from appliance.gateway.generated import PATH as GENERATE
from appliance.gateway.generated import Generated
from appliance.gateway.headers import Headers
from appliance.gateway.messages import MessageRest
from appliance.gateway.notes import Notes
from appliance.gateway.resume import Losses, Progress, Way
from appliance.gateway.said import MESSAGES, Said, why_incomparable
from appliance.gateway.schedule import Ticket
from appliance.gateway.sse import Dialect
from appliance.gateway.upstream import Connection

log = logging.getLogger("gateway.inflight")

KEY_BYTES = 32
GENERATING = frozenset({"/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages"})
"""Endpoints whose answers an engine can note token by token."""
_orders = itertools.count(1)
_PREFIX = secrets.token_hex(4)


def new_request_id() -> str:
    """`req-...`: unique on this box, cheap, and no clock in it."""
    return f"req-{_PREFIX}{next(_orders):08x}"


def next_order() -> int:
    """The place of a request among all that this gateway has accepted."""
    return next(_orders)


@dataclass(eq=False, slots=True)
class LiveRequest:
    """One request that goes to the engine.

    Attributes:
        deterministic: a second run says the same, as far as it is the engine's to say.
        plain: its answer is one text: no tools, no grammar, no log probabilities.
        by_message: the engine that has it, or had it last, can finish a message that has begun.
        altered: how its prompt was made one whose length goes; empty: it was not.
        prompt_tokens: where known; the ticket's tokens are an estimate.
        life: the engine that it is with; None while it waits.
        sent_bytes: of the answer's own bytes.
        waited_s: between losing an engine and being given to the next one, over all its losses.
        way: how it was given to the engine that has it, or had it last.
        got_further: with that engine, than ever before.
        lost_life: the engine it has lost, until it is given to another one or that one turns out to live.
        connection: to that engine, while the answer is coming.
        notes, said, generated: what is known of the answer so far, as engines have noted it, or as the client was sent it (of /generate).
        losses: the engines it has lost.
        account: what its client is sent, counted.
    """

    request_id: str
    method: str
    path: str
    target: bytes
    headers: Headers
    body: bytes
    stream: bool
    dialect: Dialect
    arrived_s: float
    ticket: Ticket
    takes_slot: bool = True
    deterministic: bool = False
    plain: bool = False
    by_message: bool = False
    altered: str = ""
    prompt_tokens: int | None = None
    life: Life | None = None
    attempt: int = 0
    sent_bytes: int = 0
    waited_s: float = 0.0
    way: Way = Way.PLAIN
    got_further: bool = False
    lost_life: Life | None = None
    connection: Connection | None = None
    notes: Notes = field(default_factory=Notes)
    said: Said = field(default_factory=Said)
    generated: Generated = field(default_factory=Generated)
    losses: Losses = field(default_factory=Losses)
    account: Account | None = None

    @property
    def order(self) -> int:
        """Of arrival."""
        return self.ticket.order

    @property
    def generation(self) -> int:
        """Of the engine that it is with; 0 while it waits."""
        return self.life.generation if self.life is not None else 0

    @property
    def tokens(self) -> int:
        """Of its answer so far: as the engine notes them, else by the events of its stream."""
        return max(self.notes.count, self.account.answer_tokens if self.account is not None else 0)

    @property
    def resumability(self) -> Resumability:
        """What could be done if the engine died now."""
        if not self.sent_bytes:
            return Resumability.REPLAY
        can = self.notes.usable or self.keeps_text or self.comparable
        return Resumability.CONTINUE if can else Resumability.FAIL

    @property
    def comparable(self) -> bool:
        """All that was sent is kept, and a second run could be measured against it. (What was noted is not kept.)"""
        return not self.notes.ticket and not self.why_incomparable()

    @property
    def keeps_text(self) -> bool:
        """What its client is sent is kept, to be gone on with as a message."""
        return self.by_message and self.plain and self.stream and self.path in GENERATING and not self.said.overflow

    def why_incomparable(self) -> str:
        """Why a second run could not be measured against what was sent; empty where it could."""
        return why_incomparable(self.path, self.deterministic) or self.said.overflow if self.stream else "it is no stream"

    def rest(self) -> Onward | None:
        """How an engine that finishes messages goes on behind what the client has; None: it cannot."""
        if self.path == GENERATE:
            return self.generated.going_on(self.body)
        request = going_on(self.path, self.body, self.said)
        if request is None:
            return None
        rest = Rest(self.said, request)
        return MessageRest(rest) if self.path == MESSAGES else rest

    @property
    def can_stand_aside(self) -> bool:
        """It can be taken from a living engine, and gone on with later as if nothing had happened."""
        return self.way is Way.IDS and (not self.sent_bytes or self.notes.usable)

    @property
    def progress(self) -> Progress:
        """For the choice of a way on."""
        sent = bool(self.sent_bytes)
        comparable = sent and self.comparable
        plain = sent and self.keeps_text and self.rest() is not None
        return Progress(sent, self.notes.usable, comparable, self.path in GENERATING and self.method == "POST", plain)


class InflightTable:
    """Who is in flight. Fingerprints are keyed with a secret of this box: equal bodies are seen, bodies are not."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._requests: set[LiveRequest] = set()

    def add(self, request: LiveRequest) -> None:
        """Accepted."""
        self._requests.add(request)

    def discard(self, request: LiveRequest) -> None:
        """Its last byte is out, or it was given up."""
        self._requests.discard(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._requests)

    def fingerprint_of(self, request: LiveRequest) -> str:
        """See `fingerprint`."""
        return fingerprint(self._key, request.body)

    def of_life(self, life: Life) -> tuple[InflightRequest, ...]:
        """The shapes of what one engine life holds."""
        return self.shapes(request for request in self._requests if request.life is life)

    def all(self) -> tuple[InflightRequest, ...]:
        """The shapes of all, oldest first."""
        return self.shapes(self._requests)

    def shapes(self, requests: Iterable[LiveRequest]) -> tuple[InflightRequest, ...]:
        """Lengths and fingerprints, oldest first."""
        now_s = asyncio.get_running_loop().time()
        return tuple(self._shape(request, now_s) for request in sorted(requests, key=lambda request: request.order))

    def _shape(self, request: LiveRequest, now_s: float) -> InflightRequest:
        return InflightRequest(
            request_id=request.request_id,
            path=request.path,
            fingerprint=self.fingerprint_of(request),
            body_bytes=len(request.body),
            prompt_tokens=request.prompt_tokens,
            sent_bytes=request.sent_bytes,
            stream=request.stream,
            generation=request.generation,
            attempt=request.attempt,
            age_s=round(now_s - request.arrived_s, 3),
            resumability=request.resumability,
            replica=request.life.replica if request.life is not None else None,
        )


def fingerprint(key: bytes, body: bytes) -> str:
    """Keyed hash of a body: 32 hexadecimal digits."""
    return hashlib.blake2b(body, key=key, digest_size=16).hexdigest()


def load_key(state_dir: Path) -> bytes:
    """This box's key, made at the first start. Without a writable state folder it lasts as long as the process."""
    path = state_dir / "fingerprint.key"
    try:
        if not path.exists():
            state_dir.mkdir(parents=True, exist_ok=True)
            _create_whole(path, os.urandom(KEY_BYTES))
        key = path.read_bytes()
    except OSError as error:
        log.warning("fingerprints will change at the next start: %s cannot be used (%s)", path, error.strerror)
        return os.urandom(KEY_BYTES)
    if len(key) != KEY_BYTES:
        log.warning("fingerprints will change at the next start: %s has %d bytes, not %d; delete it", path, len(key), KEY_BYTES)
        return os.urandom(KEY_BYTES)
    return key


def _create_whole(path: Path, content: bytes) -> None:
    """Create the file with all of its content or not at all; the first of two at the same time wins."""
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        Path(temporary).unlink()
