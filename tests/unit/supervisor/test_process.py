"""Real children: start, listen, end the whole group."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.core.launch import Endpoint, LaunchSpec
from appliance.supervisor import proc_table
from appliance.supervisor.groups import CgroupGroup, Group, SessionGroup
from appliance.supervisor.log_ring import LogRing
from appliance.supervisor.process import EngineProcess, ExitStatus, spawn
from tests.unit.supervisor.machine_cases import LADDER


class Child:
    """A spawned script with what it said and how it ended."""

    def __init__(self, code: str, group: Group | None = None) -> None:
        self.said: list[str] = []
        self.ended = asyncio.Event()
        argv = (sys.executable, "-u", "-c", code)
        spec = LaunchSpec(argv, {"PATH": os.environ["PATH"]}, "/", Endpoint(port=1), "/health", 1.0, 1.0, "x", LADDER[0])
        self.process: EngineProcess = spawn(spec, group or SessionGroup(), LogRing(100), self._hear, self._end)

    def _hear(self, lines: object) -> None:
        self.said.extend(line.text for line in lines)  # type: ignore[attr-defined]

    def _end(self, status: ExitStatus) -> None:
        self.ended.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for it, 10 s at the most."""
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.005)


FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
runaway = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)
print(grandchild.pid, runaway.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise SystemExit(3)", "exited with code 3"),
        ("pass", "exited with code 0"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "killed by SIGSEGV"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN)", "killed by SIGRTMIN"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 1)", "killed by SIGRTMIN+1"),
    ],
)
async def test_the_exit_is_read(code: str, expected: str) -> None:
    """Code or signal of the leader, without reaping anybody else's children."""
    child = Child(code)
    await asyncio.wait_for(child.ended.wait(), 10)
    assert str(child.process.exit) == expected
    assert await child.process.end(1.0) is None
    child.process.close()


async def test_output_is_complete_when_the_group_is_empty() -> None:
    """What was printed right before death is in the ring: verdicts stand on it."""
    child = Child("import os, sys\nfor n in range(2000): print('line', n)\nos.kill(os.getpid(), 9)")
    await asyncio.wait_for(child.ended.wait(), 10)
    await child.process.end(1.0)
    child.process.drain_output()
    await child.until(lambda: child.said[-1:] == ["line 1999"])
    child.process.close()


@pytest.mark.parametrize("leader_first", [False, True])
async def test_the_whole_group_goes(leader_first: bool) -> None:
    """Grandchildren and those that moved to a session of their own die too, whether or not the leader died before them."""
    child = Child(FAMILY)
    await child.until(lambda: bool(child.said))
    pids = [child.process.pid, *map(int, child.said[0].split())]
    if leader_first:
        os.kill(child.process.pid, signal.SIGKILL)
        await asyncio.wait_for(child.ended.wait(), 10)
        pids.pop()  # without a subreaper or a cgroup an orphan in its own session is out of reach: see the next tests
        runaway = int(child.said[0].split()[1])
    assert await child.process.end(5.0) is None
    child.process.close()
    for pid in pids:
        stat = proc_table.read_stat(pid)
        assert stat is None or not stat.is_alive, stat
    if leader_first:
        os.kill(runaway, signal.SIGKILL)


async def test_a_stopped_child_is_ended_with_its_stacks() -> None:
    """SIGSTOP and then a hang kill: it is continued for its SIGABRT, and faulthandler's stacks are read."""
    child = Child("import faulthandler, time\nfaulthandler.enable()\nprint('up', flush=True)\ntime.sleep(600)")
    await child.until(lambda: bool(child.said))
    os.kill(child.process.pid, signal.SIGSTOP)
    await child.until(lambda: child.process.state == "T")
    assert await child.process.end(5.0, for_stacks=True) is None
    child.process.drain_output()
    child.process.close()
    assert child.process.exit == ExitStatus(signal="SIGABRT")
    assert any("Fatal Python error: Aborted" in line for line in child.said)


async def test_abort_ignored_is_followed_by_kill() -> None:
    """A child that blocks SIGABRT is killed after the grace."""
    child = Child("import signal, time\nsignal.signal(signal.SIGABRT, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)")
    await child.until(lambda: bool(child.said))
    started_s = time.monotonic()
    assert await child.process.end(5.0, for_stacks=True) is None
    child.process.close()
    assert child.process.exit == ExitStatus(signal="SIGKILL")
    assert time.monotonic() - started_s < 3


async def test_the_child_inherits_nothing() -> None:
    """Only its own environment, /dev/null as input, its own session, a higher OOM score, and no descriptor of ours."""
    leak = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leak, True)
    code = (
        "import os, sys\n"
        "print(sorted(os.environ), sys.stdin.read() == '', os.getsid(0) == os.getpid(), open('/proc/self/oom_score_adj').read().strip())\n"
        f"print(os.path.exists('/proc/self/fd/{leak}'))"
    )
    child = Child(code)
    await asyncio.wait_for(child.ended.wait(), 10)
    await child.process.end(1.0)
    child.process.close()
    os.close(leak)
    assert child.said[0].replace("'LC_CTYPE', ", "") == "['PATH'] True True 300"
    assert child.said[1] == "False"


def test_a_program_that_does_not_exist_is_an_oserror() -> None:
    """No half-started process, no leaked pipe."""

    async def attempt() -> None:
        before = len(list(Path("/proc/self/fd").iterdir()))
        spec = LaunchSpec(("/no/such/engine",), {}, "/", Endpoint(port=1), "/health", 1.0, 1.0, "x", LADDER[0])
        with pytest.raises(FileNotFoundError):
            spawn(spec, SessionGroup(), LogRing(10), lambda lines: None, lambda status: None)
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    asyncio.run(attempt())


def _children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


class Counted(SessionGroup):
    """Knows whether it was given back."""

    removed = 0

    def remove(self) -> None:
        """Once more."""
        self.removed += 1
        super().remove()


async def test_what_cannot_be_watched_is_not_left_running() -> None:
    """No descriptor is free, however far the start has come by then: no process that nobody knows of, and the group is given back."""
    highest = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    filling = [os.open("/dev/null", os.O_RDONLY)]
    while filling[-1] <= highest:
        filling.append(os.open("/dev/null", os.O_RDONLY))
    before = _children()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spec = LaunchSpec(("/bin/sleep", "600"), {}, "/", Endpoint(port=1), "/health", 1.0, 1.0, "x", LADDER[0])
    failures = 0
    for spare in range(40):
        group, process = Counted(), None
        resource.setrlimit(resource.RLIMIT_NOFILE, (filling[-1] + 1 + spare, hard))
        try:
            process = spawn(spec, group, LogRing(10), lambda lines: None, lambda status: None)
        except OSError:
            failures += 1
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if process is not None:
            assert await process.end(5.0) is None
            process.close()
            break
        assert group.removed == 1
        assert _children() == before, f"a child is left at {spare} descriptors"
    for descriptor in filling:
        os.close(descriptor)
    assert process is not None
    assert failures > 2


async def test_descriptors_are_given_back() -> None:
    """Twenty lives leave not one descriptor more."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        child = Child("pass")
        await asyncio.wait_for(child.ended.wait(), 10)
        await child.process.end(1.0)
        child.process.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_child_dies_with_its_parent(tmp_path: Path) -> None:
    """kill -9 of the supervising process: the kernel kills the engine."""
    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, sys, time\n"
        "from tests.unit.supervisor.test_process import Child\n"
        "async def main():\n"
        "    child = Child('import time; time.sleep(600)')\n"
        "    print(child.process.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait(10)
    deadline_s = time.monotonic() + 5
    while (stat := proc_table.read_stat(pid)) is not None and stat.is_alive:
        assert time.monotonic() < deadline_s, stat
        time.sleep(0.01)


def cgroup2_for_tests() -> Path | None:
    """A place where this user may make cgroups (v2)."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if " - cgroup2 " in line and os.access(line.split()[4], os.W_OK):
            return Path(line.split()[4])
    return None


@pytest.mark.skipif(cgroup2_for_tests() is None, reason="no writable cgroup v2 mount")
async def test_a_cgroup_holds_everybody() -> None:
    """In a cgroup of its own nobody escapes, not even an orphan in its own session, and the folder is gone afterwards."""
    root = cgroup2_for_tests()
    assert root is not None
    path = root / f"appliance-test-{os.getpid()}"
    child = Child(FAMILY, CgroupGroup(path))
    await child.until(lambda: bool(child.said))
    os.kill(child.process.pid, signal.SIGKILL)
    await asyncio.wait_for(child.ended.wait(), 10)
    assert await child.process.end(5.0) is None
    for pid in map(int, child.said[0].split()):
        stat = proc_table.read_stat(pid)
        assert stat is None or not stat.is_alive, stat
    child.process.close()
    assert not path.exists()


async def test_signals_that_our_shell_ignores_are_not_ignored_by_the_engine() -> None:
    """`applianced &` in a script ignores SIGINT and SIGQUIT; an engine that inherited that would survive kill -QUIT."""
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    try:
        child = Child("import time; print('up', flush=True); time.sleep(600)")
    finally:
        signal.signal(signal.SIGQUIT, before)
    await child.until(lambda: "up" in child.said)
    os.kill(child.process.pid, signal.SIGQUIT)
    await asyncio.wait_for(child.ended.wait(), 10)
    assert str(child.process.exit) == "killed by SIGQUIT"
    assert await child.process.end(1.0) is None
    child.process.close()
