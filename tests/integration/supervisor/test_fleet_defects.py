"""Several supervisors in this process: a defect of ours in one of them, SGLang's double on two cards, memory that is not there twice."""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from appliance import diagnosis
from appliance.config import load_config
from appliance.config.schema import Config, DiagnosisTable, EngineTable, GpuTable, SupervisorTable
from appliance.core.states import EngineState
from appliance.core.units import GIB
from appliance.gpu.nvml import NvmlReader
from appliance.supervisor import events as ev
from appliance.supervisor import fleet as module
from appliance.supervisor.box import Box
from appliance.supervisor.daemon import Supervisor
from appliance.supervisor.fleet import Fleet
from appliance.supervisor.incidents import IncidentStore
from appliance.supervisor.layout import Machine, laid_out
from appliance.supervisor.notify import NullNotifier
from appliance.supervisor.run_dir import RunDir
from tests.fakes.cards import HAS_COMPILER, FakeNvml, make_box
from tests.integration.engines import double
from tests.integration.supervisor.harness import FAKE_ENGINE, is_alive
from tests.integration.supervisor.test_cards import environment_of, eventually

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no gcc to build a libnvidia-ml with")

CARDS = ("0000:01:00", "0000:02:00")
COMMAND = (sys.executable, str(FAKE_ENGINE), "--socket", "{socket}")


class Manager(NullNotifier):
    """Of services."""

    watchdog_interval_s = 0.2

    def __init__(self) -> None:
        self.fed = 0
        self.sentence = ""

    def turn_done(self) -> None:
        """WATCHDOG=1."""
        self.fed += 1

    def status(self, sentence: str) -> None:
        """STATUS=."""
        self.sentence = sentence


@asynccontextmanager
async def fleet_of(folder: Path, config: Config, memory_bytes: int = 64 * GIB) -> AsyncIterator[tuple[Fleet, Manager]]:
    """On a box with two cards; all of it is stopped at the end."""
    nvml, store, manager = FakeNvml(folder / "nvml", 2), IncidentStore(folder, 100), Manager()
    box = Box.of(config, store, roots=make_box(folder / "box", 2), nvml=NvmlReader(nvml.command, deadline_s=2.0))
    run_dir = RunDir(folder / "run")
    run_dir.take()
    layout = laid_out(config, Machine(CARDS, 2, memory_bytes), uses_gpu=True)
    make = functools.partial(Supervisor, diagnose=diagnosis.diagnose, is_fatal_line=diagnosis.is_fatal_line)
    fleet = Fleet(config, layout, run_dir, store, manager, box, make)
    running = asyncio.create_task(fleet.run())
    try:
        yield fleet, manager
    finally:
        fleet.post(ev.StopRequested("the test is over", immediately=True))
        await asyncio.wait_for(running, 20)
        store.close()


def custom() -> Config:
    """The fake engine, on both cards."""
    quick = SupervisorTable(backoff_first_s=0.1, probe_interval_s=0.1, stop_deadline_s=5.0)
    engine = EngineTable(backend="custom", command=COMMAND)
    return replace(
        Config(), engine=engine, gpu=GpuTable(layout="replicas"), diagnosis=DiagnosisTable(kernel_log=""), supervisor=quick
    )  # fmt: skip


def states(fleet: Fleet) -> list[str]:
    """As they are published."""
    return [one.state.value for one in fleet.board.current.replicas]


async def test_a_defect_of_ours_stays_where_it_is(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of one supervisor breaks: its engine is ended, it is published with the reason and begun anew; the other and the watchdog
    notice nothing."""
    monkeypatch.setattr(module, "ANEW_S", 0.5)
    async with fleet_of(short_path, custom()) as (fleet, manager):
        await eventually(lambda: states(fleet) == ["serving", "serving"], "both serve")
        broken, other = (one.supervisor for one in fleet.replicas)
        pids = [one.life.pid if one.life is not None else 0 for one in (broken, other)]
        assert all(pids)

        def fail() -> None:
            raise AssertionError("a move that is none")

        broken._turn = fail  # type: ignore[method-assign]
        broken.post(ev.Progress(1, 0, 0))
        await eventually(lambda: states(fleet)[0] == "backoff", "it is published")
        assert "applianced itself failed here (AssertionError: a move that is none)" in manager.sentence
        assert fleet.board.current.state is EngineState.DEGRADED
        assert not is_alive(pids[0] or 0)
        fed = manager.fed
        await eventually(lambda: manager.fed > fed, "the watchdog is fed meanwhile")
        await eventually(lambda: states(fleet) == ["serving", "serving"], "it is back")
        assert fleet.replicas[0].supervisor is not broken
        assert [one.generation for one in fleet.board.current.replicas] == [2, 1]
        assert (other.life.pid if other.life is not None else 0) == pids[1]
    assert [*(short_path / "run").rglob("*.sock")] == []


async def test_a_stop_finds_one_that_is_broken(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not begun anew first."""
    monkeypatch.setattr(module, "ANEW_S", 60.0)
    async with fleet_of(short_path, custom()) as (fleet, _):
        await eventually(lambda: states(fleet) == ["serving", "serving"], "both serve")

        def fail() -> None:
            raise AssertionError("a move that is none")

        fleet.replicas[1].supervisor._turn = fail  # type: ignore[method-assign]
        await eventually(lambda: states(fleet)[1] == "backoff", "it broke")
    assert states(fleet) == ["stopped", "stopped"]
    assert fleet.board.current.state is EngineState.STOPPED


async def test_sglang_on_two_cards(short_path: Path) -> None:
    """Its double, as two engines of one card each: ports of their own, each shown its card; one dies of an illegal access and is back."""
    engine = double("sglang", "0.5.17", short_path / "sglang")
    assignments = dict(setting.split("=", 1) for setting in engine.settings)
    variables = json.loads(assignments.pop("engine.environment"))
    values = {**assignments, "engine.environment": variables, "model.path": engine.model, "gpu.layout": "replicas", "ladder.prove": "off"}
    config = load_config(None, {**values, "diagnosis.kernel_log": "", "supervisor.backoff_first_s": 0.1}).config
    async with fleet_of(short_path, config) as (fleet, _):
        await eventually(lambda: states(fleet) == ["serving", "serving"], "both serve")
        lives = [one.supervisor.life for one in fleet.replicas]
        pids = [life.pid if life is not None else None for life in lives]
        assert [environment_of(pid)["CUDA_VISIBLE_DEVICES"][:13] for pid in pids] == ["GPU-00000000-", "GPU-00000001-"]
        ports = [one.endpoint.port if one.endpoint is not None else None for one in fleet.board.current.replicas]
        assert len({*ports}) == 2
        _, writer = await asyncio.open_connection("127.0.0.1", ports[0])
        body = json.dumps({"kind": "illegal"}).encode()
        writer.write(b"POST /fault HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        await writer.drain()
        await eventually(lambda: fleet.board.current.replicas[0].generation == 2 and states(fleet)[0] in ("serving", "degraded"), "back")
        writer.close()
        assert states(fleet)[1] == "serving"
        incident = fleet.replicas[0].supervisor.casework.last_incident
        assert incident is not None
        assert (incident["diagnosis"]["cause"], incident["card"]) == ("cuda_illegal_access", CARDS[0])
        assert fleet.replicas[1].supervisor.casework.last_incident is None


async def test_memory_that_is_not_there_twice_is_refused_by_name(short_path: Path) -> None:
    """The second engine parks with what was asked, what there is and the cure; the first serves."""
    asks = replace(custom().engine, command=("/bin/sh", "-c", f"exec {' '.join(COMMAND)}", "sh"), extra_args=("--swap-space", "40"))
    async with fleet_of(short_path, replace(custom(), engine=asks)) as (fleet, manager):
        await eventually(lambda: states(fleet) == ["serving", "parked"], "one serves")
        for words in ("2 times 40.00 GiB", "--swap-space 40", "64.00 GiB", "gpu.layout"):
            assert words in manager.sentence
        incident = fleet.replicas[1].supervisor.casework.last_incident
        assert incident is not None
        assert (incident["diagnosis"]["cause"], incident["card"]) == ("engine_config", CARDS[1])
