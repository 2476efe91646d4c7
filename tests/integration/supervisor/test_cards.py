"""A box with cards: a made-up /sys, /proc and /dev, NVML's child played by a script, the kernel log a FIFO; everything else is real."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from appliance import diagnosis
from appliance.config.schema import Config, DiagnosisTable, EngineTable
from appliance.core.states import EngineState
from appliance.gpu.nvml import NvmlProbe
from appliance.gpu.readiness import Roots
from appliance.supervisor import events as ev
from appliance.supervisor.daemon import Supervisor
from appliance.supervisor.incidents import IncidentStore
from appliance.supervisor.notify import NullNotifier
from appliance.supervisor.run_dir import RunDir
from tests.integration.supervisor.harness import FAKE_ENGINE

XID_79 = "NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
ONE_CARD = {"code": 0, "problem": "", "driver": "595", "gpus": [{"name": "RTX 3090", "persistence": True}]}


def make_box(folder: Path) -> Roots:
    """One card, its driver loaded, its nodes not there yet."""
    device = folder / "sys/bus/pci/devices/0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030000\n")
    (folder / "proc/driver/nvidia").mkdir(parents=True)
    (folder / "proc/driver/nvidia/version").write_text("NVRM version: 595")
    (folder / "dev").mkdir()
    return Roots(folder / "sys", folder / "proc", folder / "dev")


def record(sequence: int, text: str, priority: int = 3) -> str:
    """As the kernel would write it now."""
    return f"{priority},{sequence},{int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)},-;{text}\n"


@asynccontextmanager
async def supervising(folder: Path) -> AsyncIterator[tuple[Supervisor, Roots]]:
    """A supervisor in this process, stopped at the end."""
    roots = make_box(folder)
    os.mkfifo(folder / "kmsg")
    engine = EngineTable(backend="custom", command=(sys.executable, str(FAKE_ENGINE), "--socket", "{socket}"))
    config = replace(Config(), engine=engine, diagnosis=DiagnosisTable(kernel_log=str(folder / "kmsg")))
    run_dir = RunDir(folder / "run")
    run_dir.take()
    store = IncidentStore(folder, 100)
    nvml = NvmlProbe((sys.executable, "-c", f"print({json.dumps(ONE_CARD)!r})"))
    supervisor = Supervisor(
        config, run_dir, store, NullNotifier(), diagnose=diagnosis.diagnose, is_fatal_line=diagnosis.is_fatal_line, roots=roots, nvml=nvml
    )
    running = asyncio.create_task(supervisor.run())
    try:
        yield supervisor, roots
    finally:
        supervisor.post(ev.StopRequested("the test is over"))
        await asyncio.wait_for(running, 20)
        store.close()


async def reach(supervisor: Supervisor, state: EngineState) -> None:
    """Wait for a state, 20 s at the most."""
    async with asyncio.timeout(20):
        async for publication in supervisor.board.follow():
            if publication.state is state:
                return


async def test_it_waits_for_the_card_and_says_for_what(tmp_path: Path) -> None:
    """Device nodes missing: the sentence names the node; they appear, the engine starts, the card's state is in the sensors."""
    async with supervising(tmp_path) as (supervisor, roots):
        async with asyncio.timeout(10):
            while "/dev/nvidiactl" not in supervisor.board.current.reason:
                await asyncio.sleep(0.01)
        assert supervisor.state.state is EngineState.WAITING_FOR_GPU
        for name in ("nvidiactl", "nvidia0", "nvidia-uvm"):
            (roots.dev / name).touch()
        await reach(supervisor, EngineState.SERVING)
        assert supervisor.state.uses_gpu
        assert "1 card" in supervisor.sensors()["gpu"]["detail"]


async def test_a_card_that_falls_off_the_bus_parks(tmp_path: Path) -> None:
    """Xid 79 in the kernel log, the engine still alive: ended at once, gpu_off_bus, PARKED with what to do; it never loops."""
    async with supervising(tmp_path) as (supervisor, roots):
        for name in ("nvidiactl", "nvidia0", "nvidia-uvm"):
            (roots.dev / name).touch()
        await reach(supervisor, EngineState.SERVING)
        (tmp_path / "kmsg").write_text(record(77, XID_79))
        await reach(supervisor, EngineState.PARKED)
        incident = supervisor.last_incident
        assert incident is not None
        assert incident["diagnosis"]["cause"] == "gpu_off_bus"
        assert incident["diagnosis"]["root"]["text"] == XID_79
        assert incident["action"]["kind"] == "park"
        assert supervisor.state.generation == 1


async def test_other_kernel_messages_end_nothing(tmp_path: Path) -> None:
    """An application-class Xid, and an Xid 79 that a program wrote into the log, are no reason to end a healthy engine."""
    async with supervising(tmp_path) as (supervisor, roots):
        for name in ("nvidiactl", "nvidia0", "nvidia-uvm"):
            (roots.dev / name).touch()
        await reach(supervisor, EngineState.SERVING)
        application_class = record(78, "NVRM: Xid (PCI:0000:01:00): 43, pid=1, name=x, Ch 8")
        (tmp_path / "kmsg").write_text(application_class + record(79, XID_79, priority=12) + record(80, "the last line"))
        async with asyncio.timeout(5):
            while not any(item.text == "the last line" for item in supervisor.desk.collect(())):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        assert supervisor.state.state is EngineState.SERVING
