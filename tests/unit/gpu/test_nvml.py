"""The NVML child and its keeper, on a library that is lost or hangs on command."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from appliance.gpu.nvml import NvmlReader, read_report
from appliance.supervisor.proc_table import read_stat
from tests.fakes.cards import HAS_COMPILER, FakeNvml, uuid_of

needs_library = pytest.mark.skipif(
    not HAS_COMPILER or importlib.util.find_spec("pynvml") is None, reason="no gcc to build the library with, or no pynvml to ask it"
)
DEADLINE_S = 0.5


@asynccontextmanager
async def reading(command: tuple[str, ...], deadline_s: float = DEADLINE_S) -> AsyncIterator[NvmlReader]:
    """A reader, closed in the end."""
    reader = NvmlReader(command, first_deadline_s=10.0, deadline_s=deadline_s)
    try:
        yield reader
    finally:
        await reader.close()


def script(code: str) -> tuple[str, ...]:
    """A stand-in for the NVML child."""
    return (sys.executable, "-c", code)


@needs_library
async def test_cards_are_read_by_one_child_that_lives_on(tmp_path: Path) -> None:
    """Two questions, one nvmlInit; what changes is new, what a card does not support is absent."""
    nvml = FakeNvml(tmp_path, cards=2)
    async with reading(nvml.command) as reader:
        report = await reader.ask()
        assert [(gpu.address, gpu.uuid) for gpu in report.gpus] == [("0000:01:00", uuid_of(0)), ("0000:02:00", uuid_of(1))]
        assert (report.driver, report.gpus[0].temperature_c, report.gpus[0].power_w) == ("595.45.04", 61, None)
        nvml.order("used 1 5000")
        report = await reader.ask()
        assert (report.gpus[1].used_bytes, report.used_bytes) == (5000, 5000)
        nvml.order("used 1 5000", "holder 1 4711")
        report = await reader.ask(processes=True)
        assert [gpu.processes for gpu in report.gpus] == [(), (4711,)]
    assert nvml.calls().count("init -1") == 1


@needs_library
@pytest.mark.parametrize(("order", "links"), [((), None), (("nvlinks 0",), 0), (("nvlinks 4",), 4)])
async def test_nvlink_is_asked_once(order: tuple[str, ...], links: int | None, tmp_path: Path) -> None:
    """A card without NVLink, one without its bridge, one with it; asked when the child begins, and not with every question."""
    nvml = FakeNvml(tmp_path)
    nvml.order(*order)
    async with reading(nvml.command) as reader:
        assert [gpu.nvlinks for gpu in (await reader.ask()).gpus] == [links]
        nvml.calls()
        assert [gpu.nvlinks for gpu in (await reader.ask()).gpus] == [links]
        assert "nvlink 0" not in nvml.calls()


@needs_library
async def test_a_lost_card_is_named_and_never_touched_again(tmp_path: Path) -> None:
    """GPU_IS_LOST for one of two: told once; after that no call is about it, and the other one is still read by its handle alone."""
    nvml = FakeNvml(tmp_path, cards=2)
    async with reading(nvml.command) as reader:
        await reader.ask()
        nvml.order("lost 0")
        report = await reader.ask()
        assert report.lost == ("0000:01:00",)
        assert report.gpus[1].problem is None
        reader.left = frozenset({"0000:01:00"})
        nvml.calls()
        report = await reader.ask()
        assert [gpu.address for gpu in report.gpus] == ["0000:02:00"]
        assert {call.split()[1] for call in nvml.calls()} == {"1"}


@needs_library
async def test_after_a_loss_no_second_child_is_started(tmp_path: Path) -> None:
    """nvmlInit touches every card: a child that dies beside a lost card has no successor, and the reason is told."""
    nvml = FakeNvml(tmp_path, cards=2)
    async with reading(nvml.command) as reader:
        await reader.ask()
        reader.left = frozenset({"0000:01:00"})
        await reader.close()
        nvml.calls()
        report = await reader.ask()
        assert "not asked any more" in report.problem
        assert nvml.calls() == []


@needs_library
async def test_a_hung_card_costs_the_deadline_once(tmp_path: Path) -> None:
    """Given up after the deadline, killed; not asked again before the wait is over; the next child reads the cards when all is well."""
    nvml = FakeNvml(tmp_path)
    async with reading(nvml.command) as reader:
        await reader.ask()
        nvml.order("hang 0")
        began_s = time.monotonic()
        report = await reader.ask()
        assert report.hung
        assert "within 0.5 s" in report.problem
        assert time.monotonic() - began_s < DEADLINE_S + 1.0
        nvml.calls()
        assert "not asked for another" in (await reader.ask()).problem
        assert nvml.calls() == []
        reader._not_before_s = 0.0
        nvml.order()
        assert (await reader.ask()).gpus[0].problem is None


async def test_a_second_hang_waits_twice_as_long() -> None:
    """One child after the other, never two, and ever more rarely; an answer makes it as it was."""
    reader = NvmlReader(script("import time; time.sleep(600)"), first_deadline_s=0.1, deadline_s=0.1)
    for expected_s in (5.0, 10.0, 20.0):
        reader._not_before_s = 0.0
        assert (await reader.ask()).hung
        assert reader._not_before_s - time.monotonic() == pytest.approx(expected_s, abs=1.0)
        assert reader._child is None
    reader._command, reader._not_before_s = script('print(\'{"code": 0, "problem": ""}\')'), 0.0
    reader._first_deadline_s = 10.0
    assert (await reader.ask()).code == 0
    assert reader._hangs == 0
    await reader.close()


@needs_library
async def test_a_hang_at_the_very_start(tmp_path: Path) -> None:
    """nvmlInit never returns: the longer first deadline, then the same."""
    nvml = FakeNvml(tmp_path)
    nvml.order("hang init")
    reader = NvmlReader(nvml.command, first_deadline_s=1.0, deadline_s=0.1)
    report = await reader.ask()
    assert report.hung
    assert "within 1 s" in report.problem


@needs_library
@pytest.mark.parametrize("code", [9, 12, 18, 8])
async def test_a_driver_that_cannot_be_used_is_asked_afresh_each_time(tmp_path: Path, code: int) -> None:
    """nvmlInit's error by its number; as soon as it works, the cards are there."""
    nvml = FakeNvml(tmp_path)
    nvml.order(f"init {code}")
    async with reading(nvml.command) as reader:
        assert (await reader.ask()).code == code
        nvml.order()
        assert (await reader.ask()).gpus[0].name == "NVIDIA GeForce RTX 3090"


async def test_never_two_stuck_children() -> None:
    """A child that survives SIGKILL (here: one whose death nobody has noticed) is named, and no other is started beside it."""
    async with reading(script("import time; time.sleep(600)"), 0.1) as reader:
        reader._first_deadline_s = 0.1
        await reader.ask()
        stuck = await asyncio.create_subprocess_exec(*script("import time; time.sleep(600)"))
        reader._stuck, reader._not_before_s = stuck, 0.0
        try:
            report = await reader.ask()
            assert report.hung
            assert f"pid {stuck.pid} in state" in report.problem
            assert reader._child is None
        finally:
            stuck.kill()
            await stuck.wait()
        reader._command = script('print(\'{"code": 0, "problem": ""}\')')
        reader._first_deadline_s = 10.0
        assert (await reader.ask()).code == 0


async def test_a_child_is_not_forgotten_by_who_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """It hung and is being ended when whoever asked goes away: it is still the only one, until it is gone."""

    async def takes_its_time(child: asyncio.subprocess.Process) -> None:
        await asyncio.sleep(600)

    monkeypatch.setattr("appliance.gpu.nvml._end", takes_its_time)
    reader = NvmlReader(script("import time; time.sleep(600)"), first_deadline_s=0.1, deadline_s=0.1)
    asking = asyncio.create_task(reader.ask())
    async with asyncio.timeout(10):
        while reader._stuck is None:
            await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    stuck = reader._stuck
    reader._not_before_s = 0.0
    try:
        assert f"its child pid {stuck.pid}" in (await reader.ask()).problem
        assert reader._child is None
    finally:
        stuck.kill()
        await stuck.wait()


async def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next() -> None:
    """The asker was cancelled; the late answer is passed over by its number."""
    slow = (
        "import json, sys, time\n"
        "for line in sys.stdin:\n"
        "    n = json.loads(line)['number']\n"
        "    time.sleep(0.3)\n"
        "    print(json.dumps({'number': n, 'code': 0, 'problem': '', 'driver': str(n)}), flush=True)\n"
    )
    async with reading(script(slow), 10.0) as reader:
        asking = asyncio.create_task(reader.ask())
        await asyncio.sleep(0.15)
        asking.cancel()
        assert (await reader.ask()).driver == "2"


@pytest.mark.parametrize("code", ["import os; os.abort()", "print('[]')", "print('{\"code\": 0}')", "print('x' * 2**21)"])
async def test_a_child_that_dies_or_babbles_is_an_error_not_a_crash(code: str) -> None:
    """A library that crashes takes the child, not us."""
    async with reading(script(code)) as reader:
        assert (await reader.ask()).code == -1


async def test_the_child_goes_with_its_keeper() -> None:
    """applianced is killed: the child's input ends, and so does it."""
    keeper = (
        "import asyncio, sys\n"
        "from appliance.gpu.nvml import NvmlReader\n"
        "async def main():\n"
        "    reader = NvmlReader((sys.executable, '-c', 'import sys\\nfor _ in sys.stdin: print(\"{}\", flush=True)\\n'))\n"
        "    await reader._start()\n"
        "    print(reader._child.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", keeper, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    child = int(await process.stdout.readline())
    process.kill()
    await process.wait()
    async with asyncio.timeout(10):
        while (stat := read_stat(child)) is not None and stat.is_alive:
            await asyncio.sleep(0.02)


async def test_the_real_child_runs() -> None:
    """On a machine without the driver it names what is missing; on one with it, the cards."""
    async with reading((sys.executable, "-m", "appliance.gpu.nvml_child")) as reader:
        assert (await reader.ask()).code in (0, 9, 12, 18)


def test_a_cards_words_are_kept_once() -> None:
    """A sample a second for a quarter of an hour: each with words of its own would be half a megabyte a card."""
    card = b'{"address": "0000:0a:00.0", "uuid": "GPU-1", "name": "NVIDIA GeForce RTX 3090"}'
    answer = b'{"code": 0, "problem": "", "driver": "570.1", "gpus": [' + card + b"]}"
    first, second = read_report(answer), read_report(answer)
    for name in ("address", "uuid", "name"):
        assert getattr(first.gpus[0], name) is getattr(second.gpus[0], name)
    assert first.driver is second.driver
