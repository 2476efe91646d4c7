"""A box with cards: a made-up /sys, /proc and /dev, a libnvidia-ml that obeys, the kernel log a FIFO; everything else is real."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from appliance import diagnosis
from appliance.config.schema import Config, DiagnosisTable, EngineTable, SupervisorTable
from appliance.core.states import EngineState
from appliance.core.units import GIB
from appliance.gpu.nvml import NvmlReader
from appliance.supervisor import events as ev
from appliance.supervisor.box import Box
from appliance.supervisor.daemon import Supervisor
from appliance.supervisor.incidents import IncidentStore
from appliance.supervisor.notify import NullNotifier
from appliance.supervisor.run_dir import RunDir
from tests.fakes.cards import HAS_COMPILER, FakeNvml, make_box, make_nodes, uuid_of
from tests.integration.supervisor.harness import FAKE_ENGINE

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no gcc to build a libnvidia-ml with")

XID_79 = "NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."


def record(sequence: int, text: str, priority: int = 3) -> str:
    """As the kernel would write it now."""
    return f"{priority},{sequence},{int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)},-;{text}\n"


class CardBox:
    """The machine around the supervisor."""

    def __init__(self, folder: Path, cards: int, *, nodes: bool) -> None:
        self.folder = folder
        self.cards = cards
        self.roots = make_box(folder / "box", cards, nodes=nodes)
        self.nvml = FakeNvml(folder / "nvml", cards)
        self.kmsg = folder / "kmsg"
        self.supervised = 0
        self.engine: tuple[str, ...] = ()
        """More words of its command line."""
        self.tables: dict[str, object] = {}
        """Tables of the configuration in place of ours."""
        os.mkfifo(self.kmsg)

    @asynccontextmanager
    async def supervising(self) -> AsyncIterator[Supervisor]:
        """A supervisor in this process, stopped at the end."""
        engine = EngineTable(backend="custom", command=(sys.executable, str(FAKE_ENGINE), "--socket", "{socket}", *self.engine))
        watched = SupervisorTable(auto_reboot="always", reboot_command=("/bin/sh", "-c", f"echo x >> {self.folder}/reboots"))
        config = replace(Config(), engine=engine, diagnosis=DiagnosisTable(kernel_log=str(self.kmsg)), supervisor=watched)
        config = replace(config, **self.tables)  # type: ignore[arg-type]
        self.supervised += 1
        run_dir = RunDir(self.folder / f"run-{self.supervised}")  # its lock is the process's, which is ours
        run_dir.take()
        store = IncidentStore(self.folder, 100)
        supervisor = Supervisor(
            config,
            run_dir,
            store,
            NullNotifier(),
            Box.of(config, store, roots=self.roots, nvml=NvmlReader(self.nvml.command, deadline_s=0.5)),
            diagnose=diagnosis.diagnose,
            is_fatal_line=diagnosis.is_fatal_line,
        )
        running = asyncio.create_task(supervisor.run())
        try:
            yield supervisor
        finally:
            supervisor.post(ev.StopRequested("the test is over"))
            await asyncio.wait_for(running, 20)
            store.close()


@asynccontextmanager
async def supervising(folder: Path, cards: int = 1, *, nodes: bool = True) -> AsyncIterator[tuple[Supervisor, CardBox]]:
    """One supervisor on a new box."""
    box = CardBox(folder, cards, nodes=nodes)
    async with box.supervising() as supervisor:
        yield supervisor, box


async def reach(supervisor: Supervisor, state: EngineState) -> None:
    """Wait for a state, 20 s at the most."""
    async with asyncio.timeout(20):
        async for publication in supervisor.board.follow():
            if publication.state is state:
                return


async def eventually(condition: object, what: str) -> None:
    """Poll a callable, 10 s at the most."""
    assert callable(condition)
    try:
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not within 10 s: {what}") from None


def environment_of(pid: int | None) -> dict[str, str]:
    """What a process was started with."""
    return dict(word.split("=", 1) for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in word)


async def test_it_waits_for_the_card_and_says_for_what(tmp_path: Path) -> None:
    """Device nodes missing: the sentence names the node; they appear, the engine starts, the card's state is in the sensors."""
    async with supervising(tmp_path, nodes=False) as (supervisor, box):
        await eventually(lambda: "/dev/nvidiactl" in supervisor.board.current.reason, "the node is named")
        assert supervisor.state.state is EngineState.WAITING_FOR_GPU
        make_nodes(box.roots)
        await reach(supervisor, EngineState.SERVING)
        assert supervisor.state.uses_gpu
        assert "1 card" in supervisor.sensors()["gpu"]["detail"]
        assert "CUDA_VISIBLE_DEVICES" not in environment_of(supervisor.life.pid if supervisor.life else None)


async def test_a_driver_that_does_not_answer_is_waited_for(tmp_path: Path) -> None:
    """nvmlInit says that there is no driver, then there is one."""
    box = CardBox(tmp_path, 1, nodes=True)
    box.nvml.order("init 9")
    async with box.supervising() as supervisor:
        await eventually(lambda: "NVML finds no driver" in supervisor.board.current.reason, "the reason is told")
        box.nvml.order()
        await reach(supervisor, EngineState.SERVING)


async def test_a_card_that_falls_off_the_bus_parks(tmp_path: Path) -> None:
    """Xid 79 in the kernel log, the engine still alive: ended at once, gpu_off_bus, PARKED with what to do; it never loops."""
    async with supervising(tmp_path) as (supervisor, box):
        await reach(supervisor, EngineState.SERVING)
        box.kmsg.write_text(record(77, XID_79))
        await reach(supervisor, EngineState.PARKED)
        incident = supervisor.casework.last_incident
        assert incident is not None
        assert incident["diagnosis"]["cause"] == "gpu_off_bus"
        assert incident["diagnosis"]["root"]["text"] == XID_79
        assert incident["action"]["kind"] == "park"
        assert "eboot" in supervisor.state.sentence
        assert supervisor.state.generation == 1


async def test_nvml_may_be_the_first_to_know(tmp_path: Path) -> None:
    """GPU_IS_LOST and not a word in the kernel log: ended within seconds, gpu_off_bus by NVML's word, and on with the other card."""
    async with supervising(tmp_path, cards=2) as (supervisor, box):
        await reach(supervisor, EngineState.SERVING)
        box.nvml.order("lost 0")
        await eventually(lambda: supervisor.state.generation == 2 and supervisor.state.answering, "the second life serves")
        incident = supervisor.casework.last_incident
        assert incident is not None
        assert (incident["diagnosis"]["cause"], incident["action"]["kind"]) == ("gpu_off_bus", "use_remaining_gpu")
        assert incident["diagnosis"]["root"]["source"] == "nvml"
        assert supervisor.cards.lost == {"0000:01:00"}


async def test_a_card_that_is_lost_while_nvml_is_away_is_the_one_that_is_missing(tmp_path: Path) -> None:
    """NVML hung and is asked anew after the loss: the fresh child gets no handle of that card, only the news that one is lost."""
    async with supervising(tmp_path, cards=2) as (supervisor, box):
        await reach(supervisor, EngineState.SERVING)
        box.nvml.order("hang 0")
        await eventually(lambda: not supervisor.sensors()["nvml"]["ok"], "the sensor tells")
        box.nvml.order("lost 1")
        await eventually(lambda: supervisor.state.generation == 2 and supervisor.state.answering, "the second life serves")
        assert supervisor.cards.lost == {"0000:02:00"}
        incident = supervisor.casework.last_incident
        assert incident is not None
        assert incident["diagnosis"]["cause"] == "gpu_off_bus"


async def test_the_next_engine_waits_for_the_memory_of_the_last_one(tmp_path: Path) -> None:
    """The driver gives it back late: waited for, with the holder's name; as soon as it is back the next life begins."""
    async with supervising(tmp_path) as (supervisor, box):
        await reach(supervisor, EngineState.SERVING)
        assert supervisor.life is not None
        box.nvml.order(f"used 0 {5 * 2**30}", f"holder 0 {os.getpid()}")
        os.kill(supervisor.life.pid or 0, 9)
        await eventually(lambda: "are still held by" in supervisor.board.current.reason, "it is waited for")
        assert f"5.00 GiB of the card at 0000:01:00 are still held by pid {os.getpid()}" in supervisor.board.current.reason
        assert supervisor.state.generation == 1
        began_s = time.monotonic()
        box.nvml.order()
        await eventually(lambda: supervisor.state.generation == 2 and supervisor.state.answering, "the second life serves")
        assert time.monotonic() - began_s < 4.0


async def test_memory_that_does_not_come_back_delays_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program has taken it: after a bounded wait the engine is started, and has its own say."""
    monkeypatch.setattr("appliance.supervisor.gpu_watch.MEMORY_BACK_S", 0.3)
    async with supervising(tmp_path) as (supervisor, box):
        await reach(supervisor, EngineState.SERVING)
        assert supervisor.life is not None
        box.nvml.order(f"used 0 {5 * 2**30}")
        os.kill(supervisor.life.pid or 0, 9)
        await eventually(lambda: supervisor.state.generation == 2 and supervisor.state.answering, "the second life serves")


async def test_an_nvml_that_hangs_ends_nothing(tmp_path: Path) -> None:
    """The engine goes on, the sensor tells, and the recorder keeps what it knew."""
    async with supervising(tmp_path) as (supervisor, box):
        await reach(supervisor, EngineState.SERVING)
        box.nvml.order("used 0 5000")
        await eventually(lambda: supervisor.flight.record is not None and 5000 in supervisor.flight.record.vram_used_bytes, "it is read")
        box.nvml.order("hang 0")
        await eventually(lambda: not supervisor.sensors()["nvml"]["ok"], "the sensor tells")
        assert "NVML" in supervisor.sensors()["nvml"]["detail"]
        assert supervisor.state.state is EngineState.SERVING
        assert supervisor.flight.record is not None
        assert supervisor.flight.record.vram_used_bytes[-1] == 5000


async def test_what_the_recorder_shows_is_added_to_the_incident(tmp_path: Path) -> None:
    """Video memory rose by 2 GiB within a minute, then the engine died: evidence of that incident, once the service is back."""
    async with supervising(tmp_path) as (supervisor, box):
        await reach(supervisor, EngineState.SERVING)
        box.nvml.order("used 0 1000")
        await eventually(lambda: supervisor.flight.record is not None and 1000 in supervisor.flight.record.vram_used_bytes, "low")
        box.nvml.order(f"used 0 {2 * 2**30}")
        await eventually(lambda: 2 * 2**30 in supervisor.flight.record.vram_used_bytes, "high")  # type: ignore[union-attr]
        assert supervisor.life is not None
        os.kill(supervisor.life.pid or 0, 9)
        box.nvml.order()
        await eventually(lambda: supervisor.state.generation == 2 and supervisor.state.answering, "the second life serves")
        await eventually(lambda: _kinds(supervisor) == {"vram_swing", "vram_climb"}, "the findings are evidence")


def _kinds(supervisor: Supervisor) -> set[object]:
    incident = supervisor.store.one("")
    assert incident is not None
    return {item["data"].get("kind") for item in incident["evidence"] if item["source"] == "nvml"}


async def test_the_machine_is_rebooted_where_the_owner_wants_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parked for want of a card: the reboot command is run, after the record; a card that is left makes it unnecessary."""
    monkeypatch.setattr("appliance.supervisor.reboot.reboot.__defaults__", (0.1,))
    async with supervising(tmp_path, cards=2) as (supervisor, box):
        await reach(supervisor, EngineState.SERVING)
        box.kmsg.write_text(record(77, XID_79))
        await eventually(lambda: supervisor.state.generation == 2 and supervisor.state.answering, "the second life serves")
        assert not (tmp_path / "reboots").exists()
        box.kmsg.write_text(record(78, XID_79.replace(":01:", ":02:")))
        await reach(supervisor, EngineState.PARKED)
        await eventually((tmp_path / "reboots").exists, "the command was run")
        assert supervisor.store.recall("reboots")["times"]


async def test_the_lost_card_is_not_touched_again_in_this_boot(tmp_path: Path) -> None:
    """Not by `resume`, not after a restart of applianced: parked with the reason, and NVML is never asked about it."""
    async with supervising(tmp_path) as (supervisor, box):
        await reach(supervisor, EngineState.SERVING)
        box.kmsg.write_text(record(77, XID_79))
        await reach(supervisor, EngineState.PARKED)
        box.nvml.calls()
        supervisor.post(ev.ResumeRequested("a person"))
        await eventually(lambda: "0000:01:00 was lost in this boot" in supervisor.state.sentence, "it is parked again")
    async with box.supervising() as supervisor:
        await reach(supervisor, EngineState.PARKED)
        assert "0000:01:00 was lost in this boot" in supervisor.state.sentence
        assert not supervisor.sensors()["gpu"]["ok"]
    assert box.nvml.calls() == []


async def test_the_other_card_goes_on_alone(tmp_path: Path) -> None:
    """Two cards, the first falls off the bus and the driver says so in three wordings: one crash, DEGRADED would be wrong as the rung
    fits one card; the new engine does not see the dead one, which NVML is not asked about again; a later crash is not blamed on it."""
    async with supervising(tmp_path, cards=2) as (supervisor, box):
        await reach(supervisor, EngineState.SERVING)
        again = "NVRM: GPU 0000:01:00.0: GPU has fallen off the bus."
        box.kmsg.write_text(record(77, XID_79) + record(78, again))
        await eventually(lambda: supervisor.state.generation == 2 and supervisor.state.answering, "the second life serves")
        box.nvml.calls()
        incident = supervisor.casework.last_incident
        assert incident is not None
        assert (incident["diagnosis"]["cause"], incident["action"]["kind"]) == ("gpu_off_bus", "use_remaining_gpu")
        assert supervisor.life is not None
        assert environment_of(supervisor.life.pid)["CUDA_VISIBLE_DEVICES"] == uuid_of(1)
        box.kmsg.write_text(record(79, "NVRM: fallen off the bus and is not responding to commands.") + record(80, again))
        await eventually(lambda: any(item.text == "the last line" for item in supervisor.desk.collect(())) or _say(box), "it was read")
        assert supervisor.state.generation == 2
        os.kill(supervisor.life.pid or 0, 9)
        await eventually(lambda: supervisor.state.generation == 3 and supervisor.state.answering, "the third life serves")
        assert supervisor.casework.last_incident is not None
        assert supervisor.casework.last_incident["diagnosis"]["cause"] == "killed_unknown"
        assert not [call for call in box.nvml.calls() if call.endswith(" 0")]
        assert "0000:01:00 is not used" in supervisor.sensors()["gpu"]["detail"]


def _say(box: CardBox) -> bool:
    """Something else, so that the test knows that what came before was read."""
    box.kmsg.write_text(record(99, "the last line"))
    return False


async def test_other_kernel_messages_end_nothing(tmp_path: Path) -> None:
    """An application-class Xid, and an Xid 79 that a program wrote into the log, are no reason to end a healthy engine."""
    async with supervising(tmp_path) as (supervisor, box):
        await reach(supervisor, EngineState.SERVING)
        application_class = record(78, "NVRM: Xid (PCI:0000:01:00): 43, pid=1, name=x, Ch 8")
        box.kmsg.write_text(application_class + record(79, XID_79, priority=12) + record(80, "the last line"))
        await eventually(lambda: any(item.text == "the last line" for item in supervisor.desk.collect(())), "the log was read")
        await asyncio.sleep(0)
        assert supervisor.state.state is EngineState.SERVING


async def test_a_card_is_proved_by_what_nvml_sees_of_the_longest_prompt(tmp_path: Path) -> None:
    """The engine is asked for a prompt of its whole context while NVML is sampled: with 3 GiB taken and 4 left it is served, with the peak
    in the status; the next time nearly nothing is left: it never serves on that rung, and the next one is proved instead."""
    box = CardBox(tmp_path, 1, nodes=True)
    box.engine = ("--max-running", "{max_running}", "--step-s", "0.3", "--context-length", "4096")
    total = 24 * GIB
    box.nvml.order(f"used 0 {total - 7 * GIB}")
    async with box.supervising() as supervisor:
        await eventually(lambda: "prompt of 4,088 tokens" in supervisor.state.sentence, "the longest prompt")
        assert supervisor.state.state is EngineState.PROVING
        box.nvml.order(f"used 0 {total - 4 * GIB}")
        await reach(supervisor, EngineState.SERVING)
        proof = supervisor.budget.status(supervisor.config, supervisor.state.rung)
        assert (proof["proved"], proof["peak_bytes"], proof["left_bytes"]) == (True, 3 * GIB, 4 * GIB)
        assert "the card at 0000:01:00" in proof["detail"]
        box.nvml.order(f"used 0 {total - 7 * GIB}")
        await supervisor.obey(ev.RestartRequested("another rung", rung=1))
        await eventually(
            lambda: supervisor.state.generation == 2 and "prompt of" in supervisor.state.sentence, "the next one is proved too"
        )
        box.nvml.order(f"used 0 {total - GIB // 4}")
        await eventually(lambda: supervisor.state.generation == 3 and "prompt of" in supervisor.state.sentence, "a third life")
        box.nvml.order(f"used 0 {total - 7 * GIB}")
        await eventually(lambda: supervisor.state.answering, "it serves")
        assert supervisor.state.history.rung == 2
        incident = supervisor.casework.last_incident
        assert incident is not None
        assert (incident["diagnosis"]["cause"], incident["action"]["kind"]) == ("ok_degraded", "restart_safer")
        assert "only 256.00 MiB" in incident["diagnosis"]["sentence"]
