"""Processes in uninterruptible sleep, for real: SIGKILL does not reach them, and nobody waits for them for ever."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.core.errors import ControlError
from appliance.core.states import EngineState
from appliance.gpu.nvml import NvmlReader
from appliance.supervisor import proc_table
from tests.fakes.frozen_disk import FrozenDisk, frozen_disk
from tests.integration.supervisor.harness import Applianced, is_alive, wait_for
from tests.integration.supervisor.test_cards import XID_79, CardBox, eventually, reach, record
from tests.integration.supervisor.test_cgroup import delegated  # noqa: F401
from tests.unit.supervisor.test_process import cgroup2_for_tests

Start = Callable[..., Applianced]


@pytest.fixture
def disk() -> Iterator[FrozenDisk]:
    """Frozen."""
    with frozen_disk() as made:
        if made is None:
            pytest.skip("a disk that can be frozen needs root, a loop device, mkfs.ext4 and fsfreeze")
        made.freeze()
        yield made


def state_of(pid: int) -> str:
    """The kernel's letter."""
    stat = proc_table.read_stat(pid)
    return stat.state if stat is not None else ""


def test_an_engine_that_survives_sigkill_is_not_doubled(applianced: Start, disk: FrozenDisk) -> None:
    """It hangs in the kernel: found, killed without effect, PARKED with what to do; never a second one beside it. When the kernel lets
    it go, `resume` serves again."""
    one = applianced(settings={"supervisor.stop_deadline_s": "1"})
    pid = one.wait_state("serving")["engine_pid"]
    threading.Thread(target=lambda: one.fault(kind="write", path=str(disk.path / "x")), daemon=True).start()
    wait_for(lambda: state_of(pid) == "D", "it sleeps in the kernel")
    parked = one.wait_state("parked")
    assert "survive SIGKILL" in parked["sentence"]
    assert "reboot" in parked["sentence"]
    assert is_alive(pid)
    incident = one.ask("incident")["incident"]
    assert any(item["data"].get("process_state") == "D" for item in incident["evidence"])
    with pytest.raises(ControlError, match="still parked"):
        one.ask("resume")
    assert one.status()["generation"] == 1
    disk.thaw()
    wait_for(lambda: not is_alive(pid), "it is gone")
    wait_for(lambda: _resumes(one), "resume is taken")
    assert one.wait_state("serving")["generation"] == 2


@pytest.mark.skipif(cgroup2_for_tests() is None, reason="no writable cgroup v2 mount")
def test_a_new_applianced_waits_for_the_engine_of_the_one_that_was_killed(
    applianced: Start,
    disk: FrozenDisk,
    delegated: Path,  # noqa: F811
) -> None:
    """kill -9 of applianced, and its engine is stuck in the kernel: no second one beside it, and the status says for whom it waits."""
    one = applianced(cgroup=delegated)
    pid = one.wait_state("serving")["engine_pid"]
    threading.Thread(target=lambda: one.fault(kind="write", path=str(disk.path / "x")), daemon=True).start()
    wait_for(lambda: state_of(pid) == "D", "it sleeps in the kernel")
    one.process.kill()
    one.process.wait()
    one.start()
    waiting = one.wait_state("waiting_for_gpu")
    wait_for(lambda: f"pid {pid} " in one.status()["sentence"], "it says for whom")
    assert waiting["engine_pid"] is None
    assert is_alive(pid)
    disk.thaw()
    assert one.wait_state("serving")["generation"] == 2
    assert not is_alive(pid)
    assert one.stop() == 0  # before its cgroup is taken away


def _resumes(one: Applianced) -> bool:
    try:
        one.ask("resume")
    except ControlError:
        return False
    return True


async def test_a_corpse_on_a_lost_card_holds_nobody_up(tmp_path: Path, disk: FrozenDisk) -> None:
    """Xid 79, and the engine is stuck on the dead card: the next one serves on the other card while the corpse is still there."""
    box = CardBox(tmp_path, 2, nodes=True)
    async with box.supervising() as supervisor:
        await reach(supervisor, EngineState.SERVING)
        assert supervisor.life is not None
        corpse = supervisor.life.pid or 0
        spec = supervisor.life.spec
        await asyncio.to_thread(_write, str(spec.endpoint).removeprefix("unix:"), str(disk.path / "x"))
        await eventually(lambda: state_of(corpse) == "D", "it sleeps in the kernel")
        box.kmsg.write_text(record(77, XID_79))
        await eventually(lambda: supervisor.state.generation == 2 and supervisor.state.answering, "the other card serves")
        assert state_of(corpse) == "D"
        assert supervisor.casework.last_incident is not None
        assert supervisor.casework.last_incident["action"]["kind"] == "use_remaining_gpu"
        disk.thaw()
        await eventually(lambda: proc_table.read_stat(corpse) is None, "the corpse is reaped when the kernel lets it go")
        assert supervisor.state.answering


def _write(socket_path: str, path: str) -> None:
    import http.client
    import json
    import socket

    connection = http.client.HTTPConnection("engine")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(2)
    connection.sock.connect(socket_path)
    connection.request("POST", "/fault", json.dumps({"kind": "write", "path": path}))
    connection.getresponse().read()


async def test_an_nvml_child_that_survives_sigkill_stays_the_only_one(disk: FrozenDisk) -> None:
    """Stuck in the kernel: given up after its deadline, named with its state, and no second one until it is gone."""
    command = (sys.executable, "-c", f"open({str(disk.path / 'y')!r}, 'wb', buffering=0).write(b'x' * 4096)")
    reader = NvmlReader(command, first_deadline_s=1.0)
    assert (await reader.ask()).hung
    reader._not_before_s = 0.0
    report = await reader.ask()
    assert "in state D survives SIGKILL" in report.problem
    assert reader._stuck is not None
    disk.thaw()
    await asyncio.wait_for(reader._stuck.wait(), 10)
    assert reader.problem is None
