"""Two things at once, with real processes: what nobody tries until it happens."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.core.states import EngineState
from appliance.supervisor import events as ev
from tests.fakes.cards import HAS_COMPILER
from tests.fakes.small_disk import NEEDS_ROOT, fill, small_disk
from tests.integration.supervisor.harness import FAKE_ENGINE, ROOT, Applianced, is_alive, wait_for
from tests.integration.supervisor.test_cards import CardBox, eventually, reach, record

Start = Callable[..., Applianced]
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no gcc to build a library with")


def ask_for_minutes(one: Applianced) -> None:
    """An answer that is under way from here on."""

    def ask() -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            one.engine("/generate", {"sampling_params": {"max_new_tokens": 100_000}}, timeout_s=60)

    threading.Thread(target=ask, daemon=True).start()
    wait_for(lambda: one.engine("/health")["running"] == 1, "the request runs")


def engines_of(folder: Path) -> list[int]:
    """Every fake engine alive whose sockets are in this folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if str(FAKE_ENGINE).encode() in words and any(word.startswith(bytes(folder)) for word in words) and is_alive(int(entry.name)):
                found.append(int(entry.name))
    return found


def test_two_stops_under_an_engine_that_leaves_by_itself(applianced: Start) -> None:
    """Somebody sent the engine SIGTERM and it finishes its answers; applianced is told to end, and then to end now: nobody is left."""
    one = applianced("--step-s", "0.05", "--spawn-stray", settings={"supervisor.stop_deadline_s": "600"})
    pid = one.wait_state("serving")["engine_pid"]
    stray = one.engine("/stats")["stray_pid"]
    ask_for_minutes(one)
    os.kill(pid, signal.SIGTERM)
    one.wait_state("backoff")
    one.process.terminate()
    time.sleep(0.3)
    assert one.process.poll() is None, "the first one waits for the answers"
    assert one.stop() == 0
    assert [alive for alive in (pid, stray) if is_alive(alive)] == []


def test_an_engine_that_leaves_by_itself_and_breaks(applianced: Start) -> None:
    """Under its last answers it says that CUDA is gone: the next life does not wait for supervisor.stop_deadline_s."""
    one = applianced("--step-s", "0.05", settings={"supervisor.stop_deadline_s": "600"})
    pid = one.wait_state("serving")["engine_pid"]
    ask_for_minutes(one)
    os.kill(pid, signal.SIGTERM)
    one.wait_state("backoff")
    socket_path = one.run_dir / "engine-1.sock"
    _post(socket_path, {"kind": "log", "text": "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"})
    one.wait_state("serving", above=1)
    assert one.wait_incident()[0]["diagnosis"]["cause"] == "cuda_illegal_access"


def _post(socket_path: Path, fault: dict[str, Any]) -> None:
    import socket

    connection = http.client.HTTPConnection("engine")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(5)
    connection.sock.connect(str(socket_path))
    connection.request("POST", "/fault", json.dumps(fault))
    connection.getresponse().read()


def test_a_signal_without_a_name(applianced: Start) -> None:
    """Real-time signals end a process too; Python has names for two of them."""
    one = applianced()
    os.kill(one.wait_state("serving")["engine_pid"], signal.SIGRTMIN + 1)
    one.wait_state("serving", above=1)
    exits = [item["text"] for item in one.ask("incident")["incident"]["evidence"] if item["source"] == "exit"]
    assert exits == ["killed by SIGRTMIN+1"]


@pytest.mark.parametrize("stage", ["loading", "serving"])
def test_never_two_engines_over_a_kill_of_applianced(applianced: Start, stage: str) -> None:
    """kill -9 of applianced while a start is under way, and it is begun again at once, five times: one engine in the end."""
    one = applianced("--ready-after-s", "0.3")
    for life in range(5):
        wait_for(lambda: one.status().get("engine_pid"), "an engine is there")
        if stage == "serving":
            one.wait_state("serving", above=life)
        one.process.kill()
        one.process.wait()
        one.start()
    status = one.wait_state("serving")
    assert engines_of(one.folder) == [status["engine_pid"]]
    assert status["generation"] >= 6


@NEEDS_ROOT
def test_parked_on_a_full_disk_and_resumed(applianced: Start, tmp_path: Path) -> None:
    """The rung that was left, three failed starts and the resume all happen on a disk without room; a new applianced on the same full disk
    still begins on the rung that was written before, and all is written when there is room."""
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.56 GiB"
    with small_disk(tmp_path / "state", "size=1m") as disk:
        one = applianced("--fail-start", text, "--fail-starts", "1", "--count-in", str(tmp_path))
        assert one.wait_state("degraded")["rung"]["index"] == 1
        wait_for(lambda: one.status()["sensors"]["incidents"]["ok"], "it is written")
        filler = fill(disk)
        one.ask("drain", reason="x")
        one.wait_state("parked")
        one.ask("resume")
        assert one.wait_state("degraded", above=2)["rung"]["index"] == 1
        one.process.kill()
        one.process.wait()
        one.start()
        after = one.wait_state("degraded", above=3)
        assert after["rung"]["index"] == 1
        assert after["sensors"]["incidents"]["ok"] is False
        filler.unlink()
        wait_for(lambda: one.status()["sensors"]["incidents"]["ok"], "it is written")
        assert one.stop() == 0


@needs_compiler
def test_a_clock_that_is_set_back_in_a_back_off(applianced: Start, tmp_path: Path) -> None:
    """By a day: the wait is as long as it was to be, and so is the time that applianced has been up."""
    shim, clock = tmp_path / "clock.so", tmp_path / "clock"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", shim, ROOT / "tests/fakes/clock.c", "-ldl"], check=True)
    clock.write_text("0")
    environment = {"LD_PRELOAD": str(shim), "FAKE_CLOCK": str(clock)}
    one = applianced(settings={"supervisor.backoff_first_s": "1.5", "supervisor.backoff_max_s": "3"}, environment=environment)
    for life in (1, 2):
        os.kill(one.wait_state("serving", above=life - 1)["engine_pid"], signal.SIGKILL)
    one.wait_state("backoff")
    (tmp_path / "fresh").write_text("-86400")
    (tmp_path / "fresh").replace(clock)
    began_s = time.monotonic()
    status = one.wait_state("serving", above=2)
    assert time.monotonic() - began_s < 5
    assert 0 < status["uptime_s"] < 600


def test_a_log_of_empty_lines_holds_up_nothing(applianced: Start) -> None:
    """As fast as the pipe takes them: applianced answers, and a crash meanwhile is dealt with."""
    flood = "import sys\nwhile True: sys.stdout.write('\\n' * 65536)"
    command = [sys.executable, str(FAKE_ENGINE), "--socket", "{socket}"]
    shell = ["/bin/sh", "-c", f'{sys.executable} -c "$0" & exec "$@"', flood, *command]
    one = applianced(settings={"engine.command": json.dumps(shell)})
    pid = one.wait_state("serving")["engine_pid"]
    took_s = []
    for _ in range(10):
        began_s = time.monotonic()
        one.status()
        took_s.append(time.monotonic() - began_s)
    print(f"status took {[round(1000 * t) for t in took_s]} ms")
    assert sorted(took_s)[5] < 2.0
    os.kill(pid, signal.SIGKILL)
    one.wait_state("serving", above=1)
    assert one.wait_incident()[0]["diagnosis"]["cause"] == "killed_unknown"


@needs_compiler
async def test_an_engine_that_we_failed_to_watch_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect of ours after it was started: the next one is not started beside it."""
    from appliance.supervisor import life

    made: list[int] = []

    class Failing(life.Kinship):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(1)
            if len(made) == 1:
                raise RuntimeError("a defect")

    monkeypatch.setattr(life, "Kinship", Failing)
    box = CardBox(tmp_path, 1, nodes=True)
    async with box.supervising() as supervisor:
        await eventually(lambda: supervisor.state.generation == 2 and supervisor.state.answering, "the second life serves")
        assert supervisor.life is not None
        assert engines_of(tmp_path) == [supervisor.life.pid]


@needs_compiler
async def test_a_machine_that_serves_again_is_not_rebooted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parked for a card that a reset cures; somebody has reset it and resumed before the grace is over."""
    monkeypatch.setattr("appliance.supervisor.reboot.reboot.__defaults__", (1.0,))
    box = CardBox(tmp_path, 1, nodes=True)
    async with box.supervising() as supervisor:
        await reach(supervisor, EngineState.SERVING)
        box.kmsg.write_text(record(77, "NVRM: Xid (PCI:0000:01:00): 95, pid=1, name=python, Uncontained ECC error"))
        await eventually(lambda: supervisor.desk.xids[95] == 1, "it was read")
        assert supervisor.life is not None
        os.kill(supervisor.life.pid or 0, signal.SIGABRT)
        await reach(supervisor, EngineState.PARKED)
        assert supervisor.reboots.asked
        supervisor.post(ev.ResumeRequested("a person"))
        await reach(supervisor, EngineState.SERVING)
        await asyncio.sleep(1.5)
        assert not (tmp_path / "reboots").exists()


@needs_compiler
async def test_a_reload_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a new configuration would be in force with the ladder of the old one."""
    box = CardBox(tmp_path, 1, nodes=True)
    async with box.supervising() as supervisor:
        await reach(supervisor, EngineState.SERVING)
        before = supervisor.config

        def broken(*_: object) -> None:
            raise RuntimeError("a defect")

        with monkeypatch.context() as patch:
            patch.setattr(supervisor.budget, "ladder", broken)
            with pytest.raises(RuntimeError):
                supervisor.reload(type(before)())
        assert supervisor.config is before
