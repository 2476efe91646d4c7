"""The terminal, written without waiting: a stopped terminal (Ctrl-S) or a slow pipe must not stop the service behind it."""

from __future__ import annotations

import os
import select
from collections import deque

import click

HELD_LINES_MAX = 10_000
_PIECE_BYTES = 4096
"""PIPE_BUF: a pipe that polls writable takes so many without blocking."""


class Output:
    """Lines for one file descriptor. Nothing here blocks until `finish`; the oldest lines go first when too many wait."""

    def __init__(self, fd: int, *, coloured: bool = False) -> None:
        self.fd = fd
        self._coloured = coloured
        self._lines: deque[bytes] = deque()
        self._partial = b""
        self._dropped = 0
        self._closed = False

    @property
    def waiting(self) -> bool:
        """There is something to write: poll the descriptor for it."""
        return bool(self._lines or self._partial) and not self._closed

    def put(self, line: str) -> None:
        """Take a line, and write what can be written now."""
        if len(self._lines) >= HELD_LINES_MAX:
            self._lines.popleft()
            self._dropped += 1
        shown = line if self._coloured else click.unstyle(line)
        self._lines.append(shown.encode(errors="backslashreplace") + b"\n")
        self.write_some()

    def write_some(self) -> None:
        """Write as long as the other side takes it."""
        while self.waiting and self._writable(0):
            self._write_piece()

    def finish(self, patience_s: float = 2.0) -> None:
        """Write the rest, waiting at most so long for each piece."""
        while self.waiting and self._writable(patience_s):
            self._write_piece()

    def _writable(self, patience_s: float) -> bool:
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        return bool(poll.poll(patience_s * 1000))

    def _write_piece(self) -> None:
        if not self._partial:
            self._partial = self._next()
        try:
            written = os.write(self.fd, self._partial[:_PIECE_BYTES])
        except BlockingIOError:
            return
        except OSError:  # the reader has gone: serve on in silence
            self._closed = True
            self._lines.clear()
            return
        self._partial = self._partial[written:]

    def _next(self) -> bytes:
        if self._dropped:
            note = f"... {self._dropped} lines were not shown: this terminal did not take them ...\n".encode()
            self._dropped = 0
            return note
        return self._lines.popleft()
