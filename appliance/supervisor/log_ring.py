"""The engine's output as numbered lines, bounded by lines and by bytes, whatever it prints."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

LINE_MAX_BYTES = 8192
"""A longer line is cut: a token dump of a megabyte carries no more diagnosis than its first pages."""
RING_MAX_BYTES = 8 * 1024**2
CUT = " [cut]"
FLOOD_LINES = 2000
"""In one piece of output; more are looked at more closely: each costs its time, and a pipe full of newlines would cost ten seconds."""
SHORT_BYTES, FLOOD_EDGE = 32, 500
"""Of a flood, shorter lines are left out between its first and its last ones. What tells of a crash is longer."""
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line: its number in this engine life (from 1), when it was read (epoch), and what it says."""

    number: int
    time_s: float
    text: str


class LogRing:
    """Owns the lines of one engine life."""

    def __init__(self, max_lines: int, *, max_bytes: int = RING_MAX_BYTES, line_max_bytes: int = LINE_MAX_BYTES) -> None:
        self._max_lines = max_lines
        self._max_bytes = max_bytes
        self._line_max_bytes = line_max_bytes
        self._lines: deque[LogLine] = deque()
        self._bytes = 0
        self._count = 0
        self._partial = bytearray()
        self._skipping = False

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def lines(self) -> tuple[LogLine, ...]:
        """What is kept, oldest first."""
        return tuple(self._lines)

    @property
    def size_bytes(self) -> int:
        """Of the kept texts."""
        return self._bytes

    def feed(self, data: bytes, time_s: float) -> list[LogLine]:
        """Take output as it comes; gives the lines that it completed."""
        *complete, rest = data.split(b"\n")
        if len(complete) > FLOOD_LINES:
            complete = _thinned(complete)
        found = [line for piece in complete if (line := self._end_line(piece, time_s)) is not None]
        if not self._skipping:
            self._partial += rest
            if len(self._partial) > self._line_max_bytes:
                found.append(self._keep(bytes(self._partial[: self._line_max_bytes]), time_s, CUT))
                self._partial.clear()
                self._skipping = True
        return found

    def finish(self, time_s: float) -> list[LogLine]:
        """The output has ended: a last line without its newline counts too."""
        line = self._end_line(b"", time_s) if self._partial else None
        return [line] if line is not None else []

    def _end_line(self, piece: bytes, time_s: float) -> LogLine | None:
        if self._skipping:
            self._skipping = False
            return None
        whole = bytes(self._partial) + piece
        self._partial.clear()
        cut = CUT if len(whole) > self._line_max_bytes else ""
        return self._keep(whole[: self._line_max_bytes], time_s, cut)

    def _keep(self, raw: bytes, time_s: float, mark: str) -> LogLine:
        text = raw.decode("utf-8", errors="replace").rstrip("\r")
        text = text.rpartition("\r")[2]  # a progress bar repaints its line: the last picture is the line
        text = _COLOURS.sub("", text) + mark
        self._count += 1
        line = LogLine(self._count, time_s, text)
        self._lines.append(line)
        self._bytes += len(text)
        while len(self._lines) > self._max_lines or self._bytes > self._max_bytes:
            self._bytes -= len(self._lines.popleft().text)
        return line


def _thinned(flood: list[bytes]) -> list[bytes]:
    """A flood without most of its short lines, and how many those were."""
    middle = [piece for piece in flood[FLOOD_EDGE:-FLOOD_EDGE] if len(piece) >= SHORT_BYTES]
    left_out = len(flood) - 2 * FLOOD_EDGE - len(middle)
    told = [f"[{left_out} lines of less than {SHORT_BYTES} bytes are left out here]".encode()] if left_out else []
    return [*flood[:FLOOD_EDGE], *middle, *told, *flood[-FLOOD_EDGE:]]
