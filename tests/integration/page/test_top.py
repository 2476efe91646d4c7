"""`appliancectl top` against a real gateway: on a terminal, in a pipe, once, as data, and without a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

from tests.fakes.scripted_appliance import DEADLINE_S, ROOT, appliance, gateway
from tests.fakes.scripted_box import ScriptedBox, incident
from tests.integration.gateway.test_keys import keys_file


def command(run_dir: Path, *arguments: str) -> list[str]:
    """appliancectl top, for the appliance of this folder."""
    return [sys.executable, "-m", "appliance.cli", "--run-dir", str(run_dir), "top", *arguments]


async def said(run_dir: Path, *arguments: str) -> tuple[int, str, str]:
    """To its end."""
    process = await asyncio.create_subprocess_exec(
        *command(run_dir, *arguments), cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


class Terminal:
    """A window in which it runs."""

    def __init__(self, argv: list[str], columns: int, lines: int) -> None:
        self.master, slave = pty.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        environment = {**os.environ, "TERM": "xterm-256color"}
        environment.pop("NO_COLOR", None)
        self.process = subprocess.Popen(
            argv, cwd=ROOT, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True, preexec_fn=_own_terminal
        )
        self.seen = b""

    def resize(self, columns: int, lines: int) -> None:
        """The window's new size; the kernel tells who is in front."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    async def until(self, condition: Callable[[bytes], object], what: str) -> None:
        """Read until it has been seen."""
        os.set_blocking(self.master, False)
        due_s = time.monotonic() + DEADLINE_S
        while not condition(self.seen):
            assert time.monotonic() < due_s, f"{what}: {self.seen[-2000:]!r}"
            with contextlib.suppress(BlockingIOError, OSError):
                self.seen += os.read(self.master, 65536)
            await asyncio.sleep(0.02)

    async def ended(self) -> int:
        """Its exit code."""
        await self.until(lambda _: self.process.poll() is not None, "it ends")
        with contextlib.suppress(BlockingIOError, OSError):
            self.seen += os.read(self.master, 65536)
        return int(self.process.returncode)

    def close(self) -> None:
        """Whatever happened."""
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


def _own_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


async def test_on_a_terminal_it_is_live_follows_the_window_and_leaves_it_as_it_was(run_dir: Path) -> None:
    """Colours, every line within the window, the news of a crash, a smaller window, and Ctrl-C."""
    box = ScriptedBox(run_dir)
    await box.listen()
    await box.start_engine()
    async with gateway(run_dir) as running:
        window = Terminal(command(run_dir, "--url", f"http://127.0.0.1:{running.port}"), 100, 30)
        try:
            await window.until(lambda seen: b"Qwen3.6-27B" in seen and b"\x1b[32m" in seen, "serving, in green")
            await box.crash(reason="the engine died of SIGKILL")
            await window.until(lambda seen: b"died of SIGKILL" in seen, "the crash")
            window.seen = b""
            window.resize(60, 10)
            await window.until(lambda seen: seen.count(b"\x1b[H") >= 3, "three pictures more")
            newest = window.seen.split(b"\x1b[H")[-2]
            assert newest.count(b"\r\n") <= 9
            os.write(window.master, b"\x03")
            assert await window.ended() == 0
            assert window.seen.rstrip().endswith(b"\x1b[?25h\x1b[?1049l")
            assert b"Traceback" not in window.seen
            assert termios.tcgetattr(window.slave) == window.before
        finally:
            window.close()
    await box.close()


async def test_q_and_a_stop_end_it_too(run_dir: Path) -> None:
    """And give the screen back."""
    async with appliance(run_dir) as (running, _):
        for leave in (lambda window: os.write(window.master, b"q"), lambda window: window.process.send_signal(signal.SIGTERM)):
            window = Terminal(command(run_dir, "--url", f"http://127.0.0.1:{running.port}"), 80, 24)
            try:
                await window.until(lambda seen: b"slots 0/8" in seen, "the slots")
                leave(window)
                assert await window.ended() == 0
                assert b"\x1b[?1049l" in window.seen
            finally:
                window.close()


async def test_in_a_pipe_once_and_as_data(run_dir: Path) -> None:
    """No escape of a terminal anywhere; both cards; a document for programs."""
    box = ScriptedBox(run_dir)
    box.incidents = [incident(1, time.time() - 60, 1.9)]
    await box.listen()
    await box.start_engine()
    async with gateway(run_dir) as running:
        url = f"http://127.0.0.1:{running.port}"
        code, out, err = await said(run_dir, "--once", "--url", url)
        assert (code, err) == (0, "")
        assert "\x1b" not in out
        assert all(words in out for words in ("serving", "02:00.0", "rung 0, as configured", "oom_activation", "nobody asks"))
        code, out, _ = await said(run_dir, "--once", "--json", "--url", url)
        document = json.loads(out)
        assert (code, document["now"]["slots"]["capacity"], len(document["cards"])) == (0, 8, 2)
    await box.close()


async def test_without_a_gateway_applianced_is_asked(run_dir: Path) -> None:
    """And said why; with neither it is exit code 3 and the cure."""
    box = ScriptedBox(run_dir)
    await box.listen()
    code, out, _ = await said(run_dir, "--once", "--url", "http://127.0.0.1:9")
    assert code == 0
    assert "Connection refused" in out
    assert "Qwen3.6-27B" in out
    await box.close()
    code, out, err = await said(run_dir, "--once", "--url", "http://127.0.0.1:9")
    assert (code, out) == (3, "")
    assert "--url" in err


async def test_with_keys_it_needs_one(run_dir: Path) -> None:
    """From a file; a wrong address is usage."""
    path, secrets = keys_file(run_dir, alice="")
    (run_dir / "key").write_text(secrets["alice"])
    async with appliance(run_dir, f"gateway.api_keys_file={path}", engine=False) as (running, _):
        url = f"http://127.0.0.1:{running.port}"
        without = await said(run_dir, "--once", "--url", url)
        with_key = await said(run_dir, "--once", "--url", url, "--api-key-file", str(run_dir / "key"))
    assert without[0] == 3
    assert "needs an API key" in without[2]
    assert "--api-key-file FILE" in without[2]
    assert "Bearer" not in without[2], "how a key is sent is our business"
    assert with_key[0] == 0
    assert (await said(run_dir, "--once", "--url", "nowhere"))[0] == 1
