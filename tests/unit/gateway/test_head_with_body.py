"""The head of an answer goes out with the first of its body."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from appliance.gateway.cycle import HeadWithBody


class Written:
    """What reached the socket, call by call."""

    def __init__(self) -> None:
        self.calls: list[bytes] = []

    def write(self, data: bytes) -> None:
        """One system call."""
        self.calls.append(data)

    def close(self) -> None:
        """The end."""
        self.calls.append(b"closed")

    def is_closing(self) -> bool:
        """Not yet."""
        return False


def held() -> tuple[Any, Written]:
    """One answer's view of its transport."""
    written = Written()
    return HeadWithBody(cast(asyncio.Transport, written), written.close), written


def test_head_and_body_are_one_write_and_the_rest_is_not_held() -> None:
    """Two system calls for a stream of two events, one for a whole answer."""
    transport, written = held()
    for data in (b"head", b"first", b"second"):
        transport.write(data)
    assert written.calls == [b"headfirst", b"second"]
    assert not transport.is_closing()


def test_nothing_is_lost_when_it_ends_after_the_head() -> None:
    """An answer without a body."""
    transport, written = held()
    transport.write(b"head")
    transport.close()
    assert written.calls == [b"head", b"closed"]


def test_an_interim_answer_waits_for_nothing() -> None:
    """Its client has not sent the body yet."""
    transport, written = held()
    transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    assert written.calls == [b"HTTP/1.1 100 Continue\r\n\r\n"]
    transport.write(b"head")
    transport.write(b"")
    assert written.calls[1:] == [b"head"]
