"""What an engine that continues by token ids notes beside its events, taken out of the stream and kept for the next life.

The format is the engine's (appliance/engine/api/continuation.py): comment lines in front of an event's data, in the same
block, so that a text is here together with its ids or not at all. Kept as the bytes they are: a request costs about six
bytes a token, and nothing is parsed on the way.
"""

from __future__ import annotations

from collections.abc import Iterator

ASK = b"x-appliance-resume"
"""The request header. Clients cannot send it: every `x-appliance-` header of theirs is dropped."""
KNOWN_MAX_BYTES = 8 * 1024**2
"""Of ids: more than a million tokens. An answer beyond that is not gone on with."""


class Notes:
    """Of one request, over all its lives.

    Attributes:
        ids: comma-separated, empty or ending in a comma.
        count: how many that are.
        ticket: what the engine wants back; empty while it has told none.
        finish: the word with which the text ended; empty while it goes on.
        ended: events behind the text.
        whole: the status of an answer without a stream, once it is here.
    """

    __slots__ = ("count", "ended", "finish", "ids", "ticket", "whole")

    def __init__(self) -> None:
        self.ids = bytearray()
        self.ticket = self.finish = b""
        self.count = self.ended = self.whole = 0

    def take(self, blocks: bytes) -> bytes:
        """Whole blocks of a stream; what is left of them for the client."""
        if not blocks.startswith(b":") and b"\n:" not in blocks:
            return blocks
        return b"".join(self._rest(blocks))

    @property
    def usable(self) -> bool:
        """Another life can go on from here."""
        return bool(self.ticket) and len(self.ids) <= KNOWN_MAX_BYTES

    def document(self, *, sent: bool) -> bytes:
        """What the next life is told; empty where there is nothing to tell. `sent`: the client has what the ids say."""
        if not self.usable:
            return b""
        finish = b'"%s"' % self.finish if self.finish else b"null"
        parts = self.ticket, self.ids[:-1], b"true" if sent else b"false", finish, self.ended
        return b'{"ticket":%s,"ids":[%s],"sent":%s,"finish":%s,"ended":%d}' % parts

    def _rest(self, blocks: bytes) -> Iterator[bytes]:
        for block in blocks.split(b"\n\n"):
            lines = block
            while lines.startswith(b":"):
                line, _, behind = lines.partition(b"\n")
                if not self._note(line):
                    break
                lines = behind
            if lines:
                yield lines + b"\n\n"

    def _note(self, line: bytes) -> bool:
        """Take a comment that is ours; False where it is somebody else's."""
        name, _, value = line.partition(b" ")
        match name:
            case b":ids":
                self.ids += value + b","
                self.count += value.count(b",") + 1
            case b":ticket":
                self.ticket = value
            case b":finish":
                self.finish = value
            case b":end":
                self.ended += 1
            case b":whole":
                self.whole = int(value)
            case _:
                return False
        return True
