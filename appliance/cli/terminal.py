"""A terminal's whole screen, borrowed for a while: given back as it was, however that ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence
from types import FrameType

import click

from appliance.cli.printing import coloured

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _LINE_END, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class Screen:
    """What `whole_screen` gives."""

    def __init__(self, woken: int) -> None:
        self._woken = woken

    def draw(self, lines: Sequence[str]) -> None:
        """In place of what stands there, in one write: nothing flickers."""
        shown = lines if coloured() else [click.unstyle(line) for line in lines]
        sys.stdout.write(_HOME + f"{_LINE_END}\r\n".join(shown) + _LINE_END + _BELOW)
        sys.stdout.flush()

    def leave_within(self, patience_s: float) -> bool:
        """Whether q (or the end of the input) comes within that time; a new size of the window ends the wait."""
        readable, _, _ = select.select([sys.stdin, self._woken], [], [], patience_s)
        if self._woken in readable:
            os.read(self._woken, 4096)
        return sys.stdin in readable and os.read(sys.stdin.fileno(), 64)[:1] in (b"q", b"Q", b"")


@contextlib.contextmanager
def whole_screen() -> Iterator[Screen]:
    """Standard input and output must be a terminal. SIGTERM and a hang-up end it as Ctrl-C does: by KeyboardInterrupt."""
    before = termios.tcgetattr(sys.stdin)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)

    def resized(_number: int, _frame: FrameType | None) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(writer, b"w")

    def ended(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    handlers = {signal.SIGWINCH: resized, signal.SIGTERM: ended, signal.SIGHUP: ended}
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        tty.setcbreak(sys.stdin)
        sys.stdout.write(_ENTER)
        yield Screen(reader)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        with contextlib.suppress(OSError, termios.error):  # the terminal itself may be gone
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        os.close(reader)
        os.close(writer)
