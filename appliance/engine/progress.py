"""A progress bar on a terminal, a line every few seconds anywhere else."""

from __future__ import annotations

import time
from typing import TextIO

from appliance.core.units import format_bytes

_BAR_COLUMNS = 30
_REDRAW_S = 0.1
_LINE_S = 5.0


class Progress:
    """Shows how many of a known number of bytes are done."""

    def __init__(self, what: str, total_bytes: int, stream: TextIO) -> None:
        self._what = what
        self._total_bytes = max(1, total_bytes)
        self._stream = stream
        self._done_bytes = 0
        self._interval_s = _REDRAW_S if stream.isatty() else _LINE_S
        self._started_s = self._shown_s = time.monotonic()

    def add(self, count_bytes: int) -> None:
        """So many more are done."""
        self._done_bytes += count_bytes
        now_s = time.monotonic()
        if now_s - self._shown_s >= self._interval_s:
            self._shown_s = now_s
            self._show(end="")

    def finish(self) -> None:
        """The last line, with the time it took."""
        self._show(end=f" in {time.monotonic() - self._started_s:.1f} s")
        if self._stream.isatty():
            self._stream.write("\n")
            self._stream.flush()

    def _show(self, end: str) -> None:
        share = min(1.0, self._done_bytes / self._total_bytes)
        text = f"{self._what}: {share:4.0%} {format_bytes(self._done_bytes)} of {format_bytes(self._total_bytes)}{end}"
        if self._stream.isatty():
            filled = round(share * _BAR_COLUMNS)
            text = f"\r[{'#' * filled}{'.' * (_BAR_COLUMNS - filled)}] {text}"
        else:
            text += "\n"
        self._stream.write(text)
        self._stream.flush()
