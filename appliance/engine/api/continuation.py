"""Answers that outlive this engine life: what a gateway is told to have them gone on with, and what it says when it does.

It asks by the header `x-appliance-resume: N`. Its own body then begins with N bytes of JSON, what it knows of the answer
already (N = 0: nothing), and the client's body follows. In the answer, comment lines stand in front of the data of an
event, in the same block, so that text and its token ids arrive together or not at all:

    :ticket {...}     once: the answer's identity, to be handed back as it is
    :ids 12,7         the tokens that are new
    :finish stop      the answer's text is complete with this block
    :end              this event is one of those behind the text
    :whole 200        this block's data is the answer to a request without a stream, and its status

Only the gateway sees these: it takes them out, and takes the header out of what clients send.
"""

from __future__ import annotations

import json
import secrets
import time
import uuid
from dataclasses import asdict, dataclass

from appliance.engine.api.errors import bad_request
from appliance.engine.api.fields import Fields, parse_object
from appliance.engine.messages import FinishReason

HEADER = b"x-appliance-resume"
MOST_KNOWN_BYTES = 64 * 1024**2
_MOST_COUNT_DIGITS = 20
_MOST_ENDED = 10_000
"""Events behind the text: three, and three more a call that was held back until then."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """Who an answer is, in whatever life: what a client could see change, and what chooses its tokens.

    Attributes:
        seed: the client's, or the one drawn for it.
        cached_tokens: of its prompt, when its first life began.
    """

    request_id: str
    created_s: float
    seed: int
    cached_tokens: int = 0


def new_ticket(kind: str, seed: int | None) -> Ticket:
    """For an answer that begins now."""
    return Ticket(f"{kind}-{uuid.uuid4().hex}", time.time(), secrets.randbits(63) if seed is None else seed)


@dataclass(frozen=True, slots=True)
class Continuation:
    """What the gateway knows of an answer.

    Attributes:
        ticket: None: it begins now.
        token_ids: so far.
        sent: what these say is with the client. Otherwise it is said once more.
        finish: set once all of the text has been said.
        ended: events behind the text that have been said.
    """

    ticket: Ticket | None = None
    token_ids: tuple[int, ...] = ()
    sent: bool = False
    finish: FinishReason | None = None
    ended: int = 0


BEGINNING = Continuation()


def is_count(header: str) -> bool:
    """A number as HTTP has it. Python takes a superscript two for a digit, and then for no number; nor for one are 5,000 digits."""
    return header.isascii() and header.isdigit() and len(header) <= _MOST_COUNT_DIGITS


def split_known(header: str, body: bytes) -> tuple[bytes | None, bytes]:
    """What the gateway knows, and the client's body; None where nobody asked for an answer that can be gone on with.

    Raises:
        ApiError: 400: the header is no number, or more than there is.
    """
    if not header:
        return None, body
    if not is_count(header) or int(header) > len(body):
        name = HEADER.decode()
        raise bad_request(f"{name}={header[:20]!r} is no number from 0 to {len(body)}, the length of the body", name, "invalid_value")
    return body[: int(header)], body[int(header) :]


def read_continuation(known: bytes, vocabulary: int) -> Continuation:
    """Parse what the gateway knows.

    Raises:
        ApiError: 400: it is nothing that this engine has told.
    """
    if not known:
        return BEGINNING
    fields = Fields(parse_object(known), HEADER.decode())
    ticket = _read_ticket(fields.nested("ticket"))
    finish = fields.text("finish")
    if finish not in (None, FinishReason.STOP.value, FinishReason.LENGTH.value):
        raise bad_request(f"{fields.path('finish')}={finish[:20]!r} is neither stop nor length", fields.path("finish"), "invalid_value")
    continuation = Continuation(
        ticket=ticket,
        token_ids=fields.token_ids("ids", vocabulary) or (),
        sent=fields.flag("sent"),
        finish=FinishReason(finish) if finish else None,
        ended=fields.integer("ended", 0, _MOST_ENDED) or 0,
    )
    fields.end()
    return continuation


def _read_ticket(fields: Fields) -> Ticket:
    request_id, seed = fields.text("request_id"), fields.integer("seed", 0, 2**63 - 1)
    created_s = fields.number("created_s", 0, 0, 2**53)
    cached_tokens = fields.integer("cached_tokens", 0, 2**53) or 0
    fields.end()
    if not request_id or seed is None:
        raise bad_request(f"{HEADER.decode()} holds no ticket of an answer", HEADER.decode(), "invalid_value")
    return Ticket(request_id, created_s, seed, cached_tokens)


class Notes:
    """The comment lines of one answer."""

    def __init__(self, ticket: Ticket, known_tokens: int) -> None:
        """`known_tokens`: of the first ones to come, told in an earlier life."""
        self._ticket: Ticket | None = ticket
        self._known_tokens = known_tokens

    def beside(self, token_ids: tuple[int, ...], finish: FinishReason | None, cached_tokens: int) -> bytes:
        """The lines for these new tokens; empty when there is nothing to note."""
        lines: list[str] = []
        if self._ticket is not None:
            fields = asdict(self._ticket) | {"cached_tokens": cached_tokens}
            lines.append(f":ticket {json.dumps(fields, separators=(',', ':'))}\n")
            self._ticket = None
        new = token_ids[self._known_tokens :] if self._known_tokens else token_ids
        self._known_tokens -= len(token_ids) - len(new)
        if new:
            lines.append(f":ids {','.join(map(str, new))}\n")
        if finish is not None:
            lines.append(f":finish {finish.value}\n")
        return "".join(lines).encode("ascii")
