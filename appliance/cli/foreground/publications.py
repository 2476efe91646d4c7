"""Following applianced's publications without waiting: a socket for a selector loop."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path

from appliance.control import protocol
from appliance.control.codec import publication_from_json
from appliance.core.errors import Unreachable
from appliance.core.publication import Publication

_READ_BYTES = 64 * 1024


class PublicationFeed:
    """A subscription. Unconnected at first and after every loss; connecting again is the caller's timer's business."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._received = b""

    @property
    def connected(self) -> bool:
        """`fileno()` may be asked."""
        return self._socket is not None

    def fileno(self) -> int:
        """For the selector."""
        assert self._socket is not None
        return self._socket.fileno()

    def connect(self) -> bool:
        """Subscribe if somebody listens already; False while nobody does."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            connection.connect(str(self._path))
            connection.sendall(protocol.encode({"verb": "subscribe"}))
        except OSError:
            connection.close()
            return False
        self._socket, self._received = connection, b""
        return True

    def read(self) -> Iterator[Publication]:
        """The publications that have arrived whole.

        Raises:
            Unreachable: the connection has ended.
            ControlError: the other side does not speak the protocol.
        """
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            piece = self._socket.recv(_READ_BYTES)
            if not piece:
                raise Unreachable(f"applianced closed {self._path}")
            self._received += piece
        while len(self._received) >= protocol.HEADER_BYTES:
            end = protocol.HEADER_BYTES + protocol.body_length(self._received[: protocol.HEADER_BYTES])
            if len(self._received) < end:
                return
            body, self._received = self._received[protocol.HEADER_BYTES : end], self._received[end:]
            yield publication_from_json(protocol.decode(body).get("publication"))

    def close(self) -> None:
        """Give the connection up."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
