"""Kernel messages from a FIFO, a file and the real thing."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.gpu.kernel_line import KernelLine
from appliance.gpu.kernel_log import KernelLog, parse


def test_a_record_is_taken_apart() -> None:
    """Sequence, time on the wall clock, text with its escapes undone and without the KEY=VALUE lines."""
    line = parse(b"4,1234,2500000,-,caller=T1;NVRM: a\\x0aNVRM: b\n SUBSYSTEM=pci\n DEVICE=+pci:x\n", 1000.0, 1, replayed=True)
    assert line == KernelLine("NVRM: a\nNVRM: b", 1002.5, 1234, True, 2.5)


def test_what_a_program_wrote_is_not_believed() -> None:
    """Anybody who may write to the log could fake an Xid; printk's own facility is 0."""
    assert parse(b"12,5,1,-;NVRM: Xid (PCI:0000:0a:00): 79, GPU has fallen off the bus.\n", 0.0, 1, replayed=False) is None


def test_plain_lines_are_taken_as_they_are() -> None:
    """`dmesg` text, with or without its stamp."""
    assert parse(b"[   12.500000] NVRM: x", 1000.0, 7, replayed=False) == KernelLine("NVRM: x", 1012.5, 7, False, 12.5)
    assert parse(b"NVRM: x", 1000.0, 7, replayed=False) == KernelLine("NVRM: x", None, 7, False)


class Heard:
    """Collects."""

    def __init__(self, path: Path | str) -> None:
        self.lines: list[KernelLine] = []
        self.log = KernelLog(str(path))
        self.log.start(self.lines.extend)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for it, 5 s at the most."""
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)


async def test_a_fifo(tmp_path: Path) -> None:
    """Writers come and go; each line arrives once, at once, as new."""
    fifo = tmp_path / "kmsg"
    os.mkfifo(fifo)
    heard = Heard(fifo)
    for text in ("one\n", "4,2,0,-;two\n", "thr", "ee\n"):
        fifo.write_text(text)
    await heard.until(lambda: len(heard.lines) == 3)
    assert [(line.text, line.replayed) for line in heard.lines] == [("one", False), ("two", False), ("three", False)]
    heard.log.stop()


async def test_a_growing_file(tmp_path: Path) -> None:
    """What stands there already is replayed, what is added is new, half a line waits for its end."""
    file = tmp_path / "kmsg"
    file.write_text("old\n")
    heard = Heard(file)
    assert [(line.text, line.replayed) for line in heard.lines] == [("old", True)]
    with file.open("a") as writer:
        writer.write("new\nhal")
        writer.flush()
        await heard.until(lambda: len(heard.lines) == 2)
        writer.write("f\n")
    heard.log.drain()
    assert [line.text for line in heard.lines] == ["old", "new", "half"]
    assert not heard.lines[-1].replayed
    heard.log.stop()


async def test_all_that_was_said_before_is_replayed(tmp_path: Path) -> None:
    """A ring of thousands of records: none of them passes for news, or an OOM kill of last week would explain the next crash."""
    file = tmp_path / "kmsg"
    file.write_text("".join(f"{number:0200}\n" for number in range(30_000)))
    heard = Heard(file)
    assert len(heard.lines) == 30_000
    assert all(line.replayed for line in heard.lines)
    heard.log.stop()


@pytest.mark.parametrize(("path", "words"), [("", "not read"), ("/no/such/kmsg", "No such file")])
async def test_a_deaf_ear_says_why(path: str, words: str) -> None:
    """An unreadable kernel log is a degraded sensor with a reason, not a failure."""
    heard = Heard(path)
    assert heard.log.problem is not None
    assert words in heard.log.problem
    heard.log.drain()
    heard.log.stop()


async def test_what_could_not_be_read_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file comes later: heard from then on, and the sensor is well. What it holds by then was said before."""
    monkeypatch.setattr("appliance.gpu.kernel_log.TRY_AGAIN_S", 0.05)
    heard = Heard(tmp_path / "kmsg")
    assert heard.log.problem is not None
    (tmp_path / "fresh").write_text("old\n")
    (tmp_path / "fresh").replace(tmp_path / "kmsg")
    await heard.until(lambda: len(heard.lines) == 1)
    assert heard.log.problem is None
    with (tmp_path / "kmsg").open("a") as writer:
        writer.write("new\n")
    await heard.until(lambda: len(heard.lines) == 2)
    assert [line.replayed for line in heard.lines] == [True, False]
    heard.log.stop()


async def test_what_cannot_be_read_any_more_is_told_and_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder in its place can be opened, and no more: no crash, and the loop is not called for it without end."""
    monkeypatch.setattr("appliance.gpu.kernel_log.TRY_AGAIN_S", 0.05)
    heard = Heard(tmp_path)
    assert heard.log.problem is not None
    assert "Is a directory" in heard.log.problem
    before = len(list(Path("/proc/self/fd").iterdir()))
    await asyncio.sleep(0.3)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    heard.log.stop()


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="/dev/kmsg is not readable here")
async def test_the_real_kernel_log() -> None:
    """This machine's own messages: numbered, in order, with times between the boot and now, all of them replayed."""
    heard = Heard("/dev/kmsg")
    if heard.log.problem is not None:
        pytest.skip(heard.log.problem)
    assert heard.lines
    sequences = [line.sequence for line in heard.lines]
    assert sequences == sorted(set(sequences))
    uptime_s = time.clock_gettime(time.CLOCK_MONOTONIC)
    assert all(line.time_s is not None and -uptime_s - 5 <= line.time_s - time.time() <= 5 for line in heard.lines)
    assert all(line.replayed for line in heard.lines)
    heard.log.stop()


async def test_the_log_that_systemd_opened_for_us_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """StandardInput=file:/dev/kmsg: no right to open it is needed, and standard input stays what it was."""
    try:
        kmsg = os.open("/dev/kmsg", os.O_RDONLY)
    except OSError as error:
        pytest.skip(f"/dev/kmsg cannot be opened here: {error}")
    before = os.dup(0)
    os.dup2(kmsg, 0)
    try:

        def refuse(*_: object) -> int:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr("appliance.gpu.kernel_log.os.open", refuse)
        log = KernelLog("/dev/kmsg")
        log.start(lambda _: None)
        assert log.problem is None
        log.stop()
        assert os.fstat(0).st_rdev == os.fstat(kmsg).st_rdev
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(kmsg)
