"""One engine process: started, listened to, and ended with everything that it started itself."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import functools
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.core.launch import LaunchSpec, SpareSpec
from appliance.supervisor import proc_table
from appliance.supervisor.groups import Group
from appliance.supervisor.log_ring import LogLine, LogRing
from appliance.supervisor.proc_table import ProcStat

READ_BYTES = 65536
READS_AT_ONCE = 32
"""When a verdict waits for all that was said. Else one read a turn of the loop: a flood may not keep it from its other duties."""
ABORT_GRACE_S = 1.0
"""From SIGABRT to SIGKILL: time for faulthandler to write the stacks, not for a core dump of the whole card."""
CLEAR_PAUSE_S = 0.002
CLEAR_PAUSE_MAX_S = 0.2
LEADER_PAUSE_S = 0.05
"""The end of a leader wakes us; so often it is looked at all the same, and at who else is there."""
OOM_SCORE_ADJ = 300
"""When memory runs out the engine is to die, not the gateway, not applianced, not the owner's shell."""
SPARE_OOM_SCORE_ADJ = 900
"""And before the engine its spare, which nobody misses."""
CORE_MAX_BYTES = 2 * 1024**3
PIPE_BYTES = 1024**2
_IGNORED_BY_SHELLS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
"""In what they start with `&` or nohup; that would be inherited down to the engine, which then survives kill -QUIT."""
_PR_SET_PDEATHSIG = 1
_F_SETPIPE_SZ = 1031
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """How the leader ended: exactly one of the two is set."""

    code: int | None = None
    signal: str | None = None

    def __str__(self) -> str:
        return f"killed by {self.signal}" if self.signal is not None else f"exited with code {self.code}"


def spawn(
    spec: LaunchSpec | SpareSpec,
    group: Group,
    ring: LogRing,
    on_lines: Callable[[Sequence[LogLine]], None],
    on_exit: Callable[[ExitStatus], None],
    channel: int = subprocess.DEVNULL,
) -> EngineProcess:
    """Start it: in a session and group of its own, with nothing inherited but its end of a spare's channel, and bound to die with us.

    Must be called from the main thread: PDEATHSIG is tied to the thread that forks.

    Raises:
        OSError: no such program, not permitted, no memory, no descriptor left. The group is given back, and nobody is in it.
    """
    try:
        popen, output = _started(spec, group, channel)
        try:
            group.started(popen.pid)
            return EngineProcess(popen, output, group, ring, on_lines, on_exit)
        except OSError:  # nobody would know of it, and the next one would be started beside it
            os.close(output)
            popen.kill()
            popen.wait()
            raise
    except OSError:
        group.remove()
        raise


def _started(spec: LaunchSpec | SpareSpec, group: Group, channel: int) -> tuple[subprocess.Popen[bytes], int]:
    """The child, and our end of what it prints into."""
    score = SPARE_OOM_SCORE_ADJ if isinstance(spec, SpareSpec) else OOM_SCORE_ADJ
    ours, theirs = os.pipe()
    try:
        with contextlib.suppress(OSError):  # over the user's pipe quota: the default size works too
            fcntl.fcntl(ours, _F_SETPIPE_SZ, PIPE_BYTES)
        popen = subprocess.Popen(
            spec.argv,
            env=dict(spec.env),
            cwd=spec.cwd,
            stdin=channel,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=functools.partial(_in_child, os.getpid(), group, score, spec.forensic == spec.cwd),
        )
    except (OSError, subprocess.SubprocessError) as error:
        os.close(ours)
        raise error if isinstance(error, OSError) else OSError(str(error)) from error
    finally:
        os.close(theirs)
    return popen, ours


def signal_name(number: int) -> str:
    """SIGKILL, SIGRTMIN+1...: Python knows the first and the last of the real-time signals by name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if number > signal.SIGRTMIN else f"signal {number}"


def _in_child(parent: int, group: Group, oom_score_adj: int, dumps_core: bool) -> None:
    """Between fork and exec: die with the parent, join the group, and be the one that the OOM killer takes."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it died between fork and prctl
    for number in _IGNORED_BY_SHELLS:
        signal.signal(number, signal.SIG_DFL)
    group.join()
    _set_oom_score_adj("self", oom_score_adj)
    if dumps_core:
        _allow_core()


def _allow_core() -> None:
    """Stacks and heaps, no files and no shared memory (weights); as large as we may, and no larger than CORE_MAX_BYTES."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    size = CORE_MAX_BYTES if hard == resource.RLIM_INFINITY else min(hard, CORE_MAX_BYTES)
    resource.setrlimit(resource.RLIMIT_CORE, (size, hard))
    with contextlib.suppress(OSError):
        Path("/proc/self/coredump_filter").write_text("0x11")  # core(5): anonymous private mappings, ELF headers


def _set_oom_score_adj(process: str, value: int) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/{process}/oom_score_adj").write_text(str(value))


def _nobody(lines: Sequence[LogLine]) -> None:
    """Who listens to an engine that was abandoned."""


class EngineProcess:
    """Owns the child's pidfd, its output pipe and its group. Made by `spawn`, given back by `close`."""

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        output: int,
        group: Group,
        ring: LogRing,
        on_lines: Callable[[Sequence[LogLine]], None],
        on_exit: Callable[[ExitStatus], None],
    ) -> None:
        self.pid = popen.pid
        self.started_s = time.time()
        self.exit: ExitStatus | None = None
        self._popen = popen
        self._group = group
        self._ring = ring
        self._on_lines = on_lines
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._output: int | None = output
        self._unread = False
        self._pidfd = os.pidfd_open(popen.pid)
        self._exited = asyncio.Event()
        self._clearing: asyncio.Task[str | None] | None = None
        os.set_blocking(output, False)
        self._loop.add_reader(output, self._read_output)
        self._loop.add_reader(self._pidfd, self._read_exit)

    def becomes_engine(self, ring: LogRing, on_lines: Callable[[Sequence[LogLine]], None], on_exit: Callable[[ExitStatus], None]) -> None:
        """A spare is one from here on: what it says and how it ends is told to others."""
        self._read_output(READS_AT_ONCE)
        self._ring, self._on_lines, self._on_exit = ring, on_lines, on_exit
        self._group.becomes_engine()
        _set_oom_score_adj(str(self.pid), OOM_SCORE_ADJ)

    @property
    def state(self) -> str:
        """The kernel's letter: R, S, D (cannot be killed), T (stopped)...; empty when it is gone."""
        stat = proc_table.read_stat(self.pid)
        return stat.state if stat is not None else ""

    def cpu_s(self) -> float:
        """CPU time used by the leader so far: an engine that computes is not one that sleeps for ever."""
        stat = proc_table.read_stat(self.pid)
        return stat.cpu_ticks / os.sysconf("SC_CLK_TCK") if stat is not None else 0.0

    @property
    def is_unread(self) -> bool:
        """It says more than we could read so far: then it may wait for us, not we for it."""
        return self._unread

    def members(self) -> tuple[ProcStat, ...]:
        """Everybody of its group who is alive."""
        return self._group.survivors()

    @property
    def group(self) -> Group:
        """Its own."""
        return self._group

    def oom_kills(self) -> int | None:
        """See Group."""
        return self._group.oom_kills()

    def terminate(self) -> None:
        """SIGTERM to the leader: it may finish what it does."""
        self._signal_leader(signal.SIGTERM)

    async def end(self, survive_s: float, *, for_stacks: bool = False) -> str | None:
        """Kill the whole group and wait until it is empty. Asking again while it is under way joins the first.

        Args:
            survive_s: who is not gone so long after SIGKILL will not go (D state).
            for_stacks: SIGABRT first and ABORT_GRACE_S for what it writes.

        Returns:
            None when nobody is left; else who survives.
        """
        if for_stacks and self.exit is None and self._clearing is None:
            self._signal_leader(signal.SIGABRT)
            self._signal_leader(signal.SIGCONT)  # a stopped process acts on no signal but SIGKILL
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ABORT_GRACE_S):
                    await self._exited.wait()
        if self._clearing is None or self._clearing.done():
            self._clearing = asyncio.ensure_future(self._clear(survive_s))
        return await asyncio.shield(self._clearing)

    def drain_output(self) -> None:
        """Read what is in the pipe now, so that a verdict stands on all that was said."""
        self._read_output(READS_AT_ONCE)

    def close(self) -> None:
        """Reap the leader and give the descriptors back. Only after end() returned None, or when it does not matter any more."""
        if self._output is not None:
            self._read_output(READS_AT_ONCE)
            self._close_output()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
            self._popen.returncode = 0  # reaped by pidfd, not by Popen: keep it from trying
            os.close(self._pidfd)
            self._pidfd = -1
            self._group.remove()

    def abandon(self) -> None:
        """Wait for nobody and signal nobody any more: a stuck process goes when the kernel lets it. Its leader is then reaped."""
        if self._clearing is not None:
            self._clearing.cancel()
        self._close_output()
        if self.exit is not None:
            self.close()
        else:
            self._on_lines, self._on_exit = _nobody, lambda _: self.close()

    async def _clear(self, survive_s: float) -> str | None:
        deadline_s = time.monotonic() + survive_s
        pause_s = CLEAR_PAUSE_S
        while True:
            self._group.kill()
            # The kernel tells when the leader is gone, so nobody is looked for before: that reads all of /proc.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(pause_s, LEADER_PAUSE_S)):
                    await self._exited.wait()
            survivors = self._group.survivors()
            if not survivors and self._exited.is_set():
                return None
            if time.monotonic() > deadline_s:
                return proc_table.describe(survivors) or f"pid {self.pid}, not reaped"
            if self._exited.is_set():
                await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, CLEAR_PAUSE_MAX_S)

    def _signal_leader(self, number: signal.Signals) -> None:
        if self._pidfd >= 0 and self.exit is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _read_output(self, reads: int = 1) -> None:
        for _ in range(reads):
            if self._output is None:
                return
            try:
                data = os.read(self._output, READ_BYTES)
            except BlockingIOError:
                self._unread = False
                return
            self._unread = len(data) == READ_BYTES
            lines = self._ring.feed(data, time.time()) if data else self._ring.finish(time.time())
            if not data:
                self._close_output()
            if lines:
                self._on_lines(lines)

    def _close_output(self) -> None:
        if self._output is not None:
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._output = None

    def _read_exit(self) -> None:
        # WNOWAIT leaves the zombie: as long as it is there, its process group's number cannot be given to anybody else.
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return
        self._loop.remove_reader(self._pidfd)
        self._read_output(READS_AT_ONCE)
        if result.si_code == os.CLD_EXITED:
            self.exit = ExitStatus(code=result.si_status)
        else:
            self.exit = ExitStatus(signal=signal_name(result.si_status))
        self._exited.set()
        self._on_exit(self.exit)
