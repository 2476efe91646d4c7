"""Keeps the process that holds the weights (appliance/engine/weight_holder.py) through the engine's lives. docs/adr/0082-weight-holder.md.

One is started with a life, never beside one that has loaded by itself: the weights would lie in memory twice. Whatever is wrong with
it costs that life a load from the files.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from appliance.core.action import ActionKind
from appliance.core.causes import Cause
from appliance.core.launch import WEIGHTS_SOCKET, SpareSpec
from appliance.core.units import format_duration
from appliance.supervisor.groups import Group
from appliance.supervisor.life import Start
from appliance.supervisor.log_ring import LogLine, LogRing
from appliance.supervisor.process import EngineProcess, ExitStatus, spawn
from appliance.supervisor.spare import SURVIVE_S, Spare

TRIES = 3
"""Holders in a row that failed; then engines load by themselves until something is changed."""
GOOD_AFTER_S = 60.0
HELD = "The weights are held."
"""How its line begins once engines can map them."""
EXIT_REFUSED = 65
_LINES_KEPT = 100
_BACKLOG = 8

NOT_AFTER = frozenset(
    {
        Cause.GPU_OFF_BUS, Cause.GPU_MCU_HALT, Cause.GSP_TIMEOUT, Cause.ECC_UNCORRECTABLE, Cause.NVLINK_ERROR, Cause.PCIE_ERROR,
        Cause.IOMMU_FAULT, Cause.GPU_NEEDS_RESET, Cause.GPU_UNKILLABLE_PROCESS,
        Cause.DRIVER_LIB_MISMATCH, Cause.DRIVER_TOO_OLD, Cause.DRIVER_NOT_READY, Cause.CONTAINER_LOST_GPU,
        Cause.MODEL_MISSING, Cause.MODEL_CORRUPT, Cause.BAD_NUMBERS,
    }
)  # fmt: skip
"""The card, its reset or its driver took what was held with it, or what was read is itself in doubt: read it anew. After anything else,
an illegal access above all, what is held is served from once its checksums are right."""
_STUCK = frozenset({Cause.ENGINE_WATCHDOG, Cause.START_TIMEOUT})

log = structlog.get_logger()


def may_be_served_after(cause: Cause) -> bool:
    """Whether weights that were held through a crash of this cause may be mapped by the next life, which checks them."""
    return cause not in NOT_AFTER


class WeightKeeper:
    """Owns the holder, if there is one. All of it in the loop's thread."""

    def __init__(self, run_dir: Path, group: Callable[[int], Group], start: Start, on_refused: Callable[[str], None]) -> None:
        """`on_refused` is told why an engine would not have what was held."""
        self._socket_path = run_dir / WEIGHTS_SOCKET
        self._group = group
        self._start = start
        self._on_refused = on_refused
        self._holder: Holder | None = None
        self._leaving: set[Holder] = set()
        self._number = 0
        self._failures = 0
        self._failed_with: SpareSpec | None = None
        self._words = ""

    def begin_life(self, spec: SpareSpec | None, spare: Spare | None) -> None:
        """Before a life is started: the holder that it will ask is there, or it finds nobody. A spare that has mapped all asks nobody."""
        if self._holder is not None and self._holder.spec != spec:
            self._let_go("other weights are wanted" if spec is not None else "none is wanted")
        if spec is None:
            self._words = ""
        if spec is None or self._holder is not None or (spare is not None and spare.mapped):
            return
        if spec != self._failed_with:
            self._failures, self._failed_with = 0, spec
        if self._failures >= TRIES:
            return
        self._number += 1
        try:
            self._holder = Holder(spec, self._listen(), self._group(self._number), self._ended)
        except OSError as error:
            self._failed(f"cannot be started: {error.strerror or error}")

    def judged(self, cause: Cause, action: ActionKind) -> None:
        """A life has ended of this, and this is done about it. Where nothing is served, for nobody knows how long, nothing is held."""
        if action is ActionKind.PARK:
            self._failures, self._words = 0, ""
        if self._holder is None:
            return
        if action is ActionKind.PARK:
            self._let_go("the appliance is parked")
        elif not may_be_served_after(cause):
            self._let_go(f"the engine ended by {cause.label}, after which nothing that was held is trusted")
        elif cause in _STUCK and self._holder.held_s is None:
            self._failed("was loading when the start was given up")
            self._let_go("it did not get ready")

    @property
    def sensors(self) -> dict[str, dict[str, Any]]:
        """For the status; none where no holder is configured."""
        sensor = self._sensor
        return {} if sensor is None else {"weight_holder": sensor}

    @property
    def _sensor(self) -> dict[str, Any] | None:
        if self._holder is None:
            return {"ok": False, "detail": self._words} if self._words else None
        since_s = self._holder.held_s
        if since_s is None:
            return {"ok": not self._failures, "detail": f"pid {self._holder.pid} loads since {_ago(self._holder.began_s)}"}
        return {"ok": True, "detail": f"held since {_ago(since_s)} (pid {self._holder.pid})"}

    async def close(self) -> None:
        """applianced ends."""
        if self._holder is not None:
            self._leaving.add(self._holder)
            self._holder = None
        for holder in tuple(self._leaving):  # their tasks are cancelled by now
            await self._see_off(holder)
        self._socket_path.unlink(missing_ok=True)

    def _listen(self) -> socket.socket:
        """Ours until the holder has it: so an engine finds it also while the holder still starts, and nobody when it is dead."""
        self._socket_path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            listener.bind(str(self._socket_path))
            self._socket_path.chmod(0o600)
            listener.listen(_BACKLOG)
        except OSError:
            listener.close()
            raise
        return listener

    def _ended(self, holder: Holder, status: ExitStatus, last: str) -> None:
        """By itself, or by somebody else."""
        if holder is not self._holder:
            return
        self._holder = None
        if holder.held_s is not None and time.monotonic() - holder.held_s > GOOD_AFTER_S:
            self._failures = 0
        self._failed(f"{'was ' if status.signal else ''}{status}" + (f": {last}" if last else ""))
        if status.code == EXIT_REFUSED:
            self._on_refused(last)
        self._put_away(holder)

    def _failed(self, how: str) -> None:
        self._failures += 1
        if self._failures < TRIES:
            then = "the next engine that loads gets a new one"
        else:
            then = f"engines load by themselves from now on, because {self._failures} in a row have failed"
        self._words = f"the weight holder {how}; {then}"
        log.warning(self._words)

    def _let_go(self, why: str) -> None:
        holder, self._holder = self._holder, None
        assert holder is not None, "asked by who has seen it"
        log.info(f"the weight holder is ended because {why}", pid=holder.pid)
        self._socket_path.unlink(missing_ok=True)
        self._put_away(holder)

    def _put_away(self, holder: Holder) -> None:
        self._leaving.add(holder)
        self._start(self._see_off(holder), "end of a weight holder", None)

    async def _see_off(self, holder: Holder) -> None:
        await holder.end()
        self._leaving.discard(holder)


class Holder:
    """Owns the process. `held_s`: since when engines can map what it holds."""

    def __init__(self, spec: SpareSpec, listener: socket.socket, group: Group, on_exit: Callable[[Holder, ExitStatus, str], None]) -> None:
        """Start it, on a listener that is its own from here on. Raises OSError."""
        self.spec = spec
        self.began_s = time.monotonic()
        self.held_s: float | None = None
        self._on_exit = on_exit
        self._ring = LogRing(_LINES_KEPT)
        try:
            self._process: EngineProcess = spawn(spec, group, self._ring, self._hear, self._exited, listener.fileno())
        finally:
            listener.close()
        log.info("the weight holder was started", pid=self.pid, argv=" ".join(spec.argv))

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    async def end(self) -> None:
        """It, and everything of it."""
        survivors = await self._process.end(SURVIVE_S)
        if survivors is not None:
            log.warning("a weight holder survives SIGKILL and is left to the kernel", survivors=survivors)
            self._process.abandon()
        else:
            self._process.close()

    def _hear(self, lines: Sequence[LogLine]) -> None:
        for line in lines:
            log.info(line.text, holder=self.pid)
            if HELD in line.text:
                self.held_s = time.monotonic()

    def _exited(self, status: ExitStatus) -> None:
        with contextlib.suppress(OSError):
            self._process.drain_output()
        last = self._ring.lines[-1].text[-300:] if self._ring.lines and status.code else ""
        self._on_exit(self, status, last)


def _ago(since_s: float) -> str:
    return format_duration(time.monotonic() - since_s)
