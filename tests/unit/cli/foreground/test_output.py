"""The terminal must not stop the service."""

import os
import pty
import termios
from pathlib import Path

from appliance.cli.foreground.output import HELD_LINES_MAX, Output


def _drain(fd: int) -> bytes:
    read = b""
    os.set_blocking(fd, False)
    while True:
        try:
            piece = os.read(fd, 1 << 20)
        except BlockingIOError:
            return read
        if not piece:
            return read
        read += piece


def test_lines_come_out_in_order(tmp_path: Path) -> None:
    """To a file, at once."""
    with (tmp_path / "log").open("w+b") as file:
        output = Output(file.fileno())
        for number in range(3):
            output.put(f"line {number}")
        assert not output.waiting
        assert (tmp_path / "log").read_bytes() == b"line 0\nline 1\nline 2\n"


def test_a_reader_that_does_not_read_blocks_nobody_and_is_told_what_it_missed() -> None:
    """A full pipe: put() returns, the oldest lines go, and their number is said."""
    reader, writer = os.pipe()
    output = Output(writer)
    total = HELD_LINES_MAX + 5_000
    for number in range(total):
        output.put(f"{number:080}")
    assert output.waiting
    read = _drain(reader)
    while output.waiting:
        output.write_some()
        read += _drain(reader)
    lines = read.decode().splitlines()
    notes = [line for line in lines if "were not shown" in line]
    assert len(notes) == 1
    assert int(notes[0].split()[1]) == total - (len(lines) - 1)
    shown = [int(line) for line in lines if line not in notes]
    assert shown == sorted(shown)
    assert shown[-1] == total - 1
    os.close(reader)
    os.close(writer)


def test_a_stopped_terminal_blocks_nobody() -> None:
    """Ctrl-S: nothing is written until it flows again, and then everything is."""
    master, slave = pty.openpty()
    termios.tcflow(slave, termios.TCOOFF)
    output = Output(slave)
    output.put("held")
    assert output.waiting
    termios.tcflow(slave, termios.TCOON)
    output.finish()
    assert _drain(master) == b"held\r\n"
    os.close(master)
    os.close(slave)


def test_a_reader_that_has_gone_is_served_on_without() -> None:
    """`appliancectl run | head`: the service is not the log's servant."""
    reader, writer = os.pipe()
    os.close(reader)
    output = Output(writer)
    output.put("one")
    output.put("two")
    assert not output.waiting
    os.close(writer)
