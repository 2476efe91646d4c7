"""supervisor.on_park: told once, in bounded time, whatever the command does."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from appliance.supervisor import hook, proc_table
from appliance.supervisor.hook import run_hook

_PR_SET_CHILD_SUBREAPER = 36
LEAVES_ONE = (
    "import json, subprocess, sys, time; child = subprocess.Popen(['sleep', {sleep!r}]); open({told!r}, 'w').write(str(child.pid)); {then}"
)


@pytest.fixture(autouse=True)
def before() -> Iterator[set[str]]:
    """The children that other tests have. Orphans of ours fall to this process, as to applianced."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield children()
    prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def children() -> set[str]:
    """Of this process, the dead that nobody has taken included."""
    return {child for task in Path("/proc/self/task").iterdir() for child in (task / "children").read_text().split()}


@pytest.mark.parametrize("then", ["time.sleep(600)", "sys.exit(0)"])
async def test_what_takes_too_long_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: set[str], then: str
) -> None:
    """A script's sleep, whether the script waits for it or leaves it behind: gone, and no zombie is left."""
    monkeypatch.setattr(hook, "HOOK_TIMEOUT_S", 0.5)
    told = tmp_path / "pid"
    with structlog.testing.capture_logs() as said:
        await asyncio.wait_for(run_hook((sys.executable, "-c", LEAVES_ONE.format(sleep="600", told=str(told), then=then))), 10)
    assert "took too long" in said[-1]["event"]
    assert proc_table.read_stat(int(told.read_text())) is None
    assert children() <= before


async def test_what_ends_by_itself_is_waited_for(tmp_path: Path, before: set[str]) -> None:
    """A message that is sent in the background is sent, and is taken off the kernel's list afterwards."""
    told = tmp_path / "pid"
    began_s = time.monotonic()
    await run_hook((sys.executable, "-c", LEAVES_ONE.format(sleep="0.3", told=str(told), then="sys.exit(0)")))
    assert time.monotonic() - began_s >= 0.3
    assert children() <= before


async def test_a_command_that_fails_or_is_none_is_logged(tmp_path: Path) -> None:
    """Nothing more comes of it."""
    with structlog.testing.capture_logs() as said:
        await run_hook(("/no/such/hook", "x"))
        await run_hook(("/bin/sh", "-c", "exit 3"))
    assert [(line["log_level"], line.get("code")) for line in said] == [("error", None), ("error", 3)]


async def test_it_is_not_taken_for_the_engine_s(tmp_path: Path) -> None:
    """It stays in our session: what is ours in another one is ended with the engine, as its orphan."""
    told = tmp_path / "told"
    code = f"import json, os; open({str(told)!r}, 'w').write(json.dumps([os.getsid(0), os.getpgid(0) == os.getpid()]))"
    await run_hook((sys.executable, "-c", code))
    assert json.loads(told.read_text()) == [os.getsid(0), True]
