"""One warm spare: a loaded process that waits on a channel to be told what engine life it is. docs/adr/0031-warm-spare.md.

It is no engine: it holds no KV pool, listens nowhere and serves nothing. The words on the channel are those of
appliance/engine/spare.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from appliance.core.launch import LaunchSpec, SpareSpec
from appliance.core.units import format_bytes
from appliance.supervisor.groups import Group
from appliance.supervisor.log_ring import LogLine, LogRing
from appliance.supervisor.process import EngineProcess, ExitStatus, spawn

PING_DEADLINE_S = 5.0
TAKEN_DEADLINE_S = 0.5
"""A spare that does not say "taken" by then is not waited for: a cold start costs seconds, not more."""
SURVIVE_S = 2.0
_MESSAGE_MAX_BYTES = 4096
_LINES_KEPT = 100

log = structlog.get_logger()


class Spare:
    """Owns the process and our end of its channel, until the process is handed over or it is dismissed.

    Attributes:
        spec: what it was started by.
        warm_s: when it said that it is loaded; None before.
        mapped: its weights are mapped too, so that a take-over loads nothing.
        lost: what became of it, once nothing can be had from it any more.
        cost: its memory in words, measured when it became warm.
    """

    def __init__(self, spec: SpareSpec, group: Group, on_change: Callable[[], None]) -> None:
        """Start it. Raises OSError."""
        self.spec = spec
        self.began_s = time.monotonic()
        self.warm_s: float | None = None
        self.mapped = False
        self.lost: str | None = None
        self.cost = ""
        self._on_change = on_change
        self._ring = LogRing(_LINES_KEPT)
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        self._awaited: dict[bytes, asyncio.Future[bool]] = {}
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._process = spawn(spec, group, self._ring, self._on_lines, self._on_exit, theirs.fileno())
        except OSError:
            self._channel.close()
            raise
        finally:
            theirs.close()
        self._channel.setblocking(False)
        self._loop.add_reader(self._channel, self._read)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    @property
    def unfit(self) -> str | None:
        """Why it cannot take over right now; None when it can."""
        if self.lost is not None:
            return self.lost
        state = self._process.state
        if state not in ("S", "R"):
            return f"cannot run (state {state})" if state else "is gone"
        return "was not warm yet" if self.warm_s is None else None

    async def answers(self) -> bool:
        """Whether it lives and listens; if not, `lost` says why."""
        if await self._ask(b"ping", b"pong", PING_DEADLINE_S):
            return True
        if self._channel.fileno() < 0:  # closed at its end: it dies, and how it did is worth a moment
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PING_DEADLINE_S):
                    await self._exited.wait()
        self.lost = self.lost or "did not answer a ping"
        return False

    def hand_over(
        self, ring: LogRing, on_lines: Callable[[Sequence[LogLine]], None], on_exit: Callable[[ExitStatus], None]
    ) -> EngineProcess:
        """The process, which belongs to the caller from here on; what is left here is to `tell` it."""
        self._process.becomes_engine(ring, on_lines, on_exit)
        return self._process

    async def tell(self, spec: LaunchSpec) -> bool:
        """Which life it is. False: it did not take that in, or it died."""
        try:
            return await self._ask(json.dumps(spec.argv).encode(), b"taken", TAKEN_DEADLINE_S)
        finally:
            self._close_channel()

    async def dismiss(self) -> None:
        """End it, and everything of it."""
        self._close_channel()
        survivors = await self._process.end(SURVIVE_S)
        if survivors is not None:
            log.warning("a spare survives SIGKILL and is left to the kernel", survivors=survivors)
            self._process.abandon()
        else:
            self._process.close()

    async def _ask(self, message: bytes, answer: bytes, within_s: float) -> bool:
        if self._channel.fileno() < 0:
            return False
        heard = self._awaited[answer] = self._loop.create_future()
        try:
            self._channel.send(message)
            async with asyncio.timeout(within_s):
                answered: bool = await heard
                return answered
        except (OSError, TimeoutError):
            return False
        finally:
            self._awaited.pop(answer, None)

    def _read(self) -> None:
        message = b""
        with contextlib.suppress(ConnectionError):
            message = self._channel.recv(_MESSAGE_MAX_BYTES)
        if message.startswith(b"warm"):
            self.warm_s, self.mapped = time.monotonic(), message == b"warm mapped"
            self._weighing = self._loop.create_task(self._weigh())
        elif message in self._awaited and not self._awaited[message].done():
            self._awaited[message].set_result(True)
        elif not message:
            self._close_channel()

    async def _weigh(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            own_bytes, share_bytes = await asyncio.to_thread(memory_of, self.pid)
            self.cost = f"{format_bytes(own_bytes)} of its own ({format_bytes(share_bytes)} with its share of the weights)"
        self._on_change()

    def _close_channel(self) -> None:
        if self._channel.fileno() >= 0:
            self._loop.remove_reader(self._channel)
            self._channel.close()
        for heard in self._awaited.values():
            if not heard.done():
                heard.set_result(False)

    def _on_lines(self, lines: Sequence[LogLine]) -> None:
        for line in lines:
            log.info(line.text, spare=self.pid)

    def _on_exit(self, status: ExitStatus) -> None:
        last = f": {self._ring.lines[-1].text[:200]}" if status.code and self._ring.lines else ""
        self.lost = f"was {status}" if status.signal else f"{status}{last}"
        self._exited.set()
        self._on_change()


def memory_of(pid: int) -> tuple[int, int]:
    """What ending a process would give back (private), and its share of everything (PSS), in bytes.

    Walks its page tables: a few milliseconds. Raises OSError when it is gone or not ours.
    """
    found: dict[str, int] = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        found[name] = int(rest.split()[0]) * 1024
    return found["Anonymous"], found["Pss"]
