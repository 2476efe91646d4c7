"""Where a hung engine's threads are, asked of a real py-spy about a real process that hangs."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose
from appliance.diagnosis.dumps import found_in
from appliance.supervisor import py_spy
from appliance.supervisor.py_spy import py_spy_of, stacks_of

HUNG = """
import threading, sys

def wait_for_a_kernel_that_never_ends(mutex):
    print("hung", flush=True)
    with mutex:
        pass

mutex = threading.Lock()
mutex.acquire()
threading.Thread(target=threading.Event().wait, name="detokenizer", daemon=True).start()
wait_for_a_kernel_that_never_ends(mutex)
"""
needs_py_spy = pytest.mark.skipif(py_spy_of(sys.executable) is None, reason="py-spy is not installed")


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[int]:
    """The number of a Python process whose main thread waits for a lock that nobody gives back."""
    program = tmp_path / "engine_loop.py"
    program.write_text(HUNG)
    child = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "hung\n"
    yield child.pid
    child.kill()
    child.wait()
    child.stdout.close()


@needs_py_spy
async def test_the_thread_that_hangs_is_named_and_those_that_wait_for_work_are_not(hung: int) -> None:
    """As applianced does it: lines become evidence, evidence a sentence of the report beside the verdict."""
    lines = await stacks_of(sys.executable, [hung])
    evidence = [Evidence(Source.STACK, line, data={"kind": "py-spy"}) for line in lines]
    evidence.append(Evidence(Source.PROBE, "", data={"kind": "hang", "silent_s": 30.0}))
    told = [sentence for sentence in found_in(evidence) if sentence.startswith("py-spy")]
    assert len(told) == 1, lines
    assert "wait_for_a_kernel_that_never_ends (engine_loop.py:6)" in told[0]
    assert "MainThread" in told[0]
    assert diagnose(evidence).cause.label == "engine_watchdog"


@needs_py_spy
async def test_a_process_that_is_gone_has_no_stack() -> None:
    """It ended while it was asked about: nothing is told, nobody is kept waiting."""
    gone = await asyncio.create_subprocess_exec("true")
    await gone.wait()
    assert found_in([Evidence(Source.STACK, line, data={"kind": "py-spy"}) for line in await stacks_of(sys.executable, [gone.pid])]) == ()


async def test_a_py_spy_that_hangs_itself_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is to be ended: nobody waits longer than the deadline for a look at it."""
    monkeypatch.setattr(py_spy, "DEADLINE_S", 0.2)
    (tmp_path / "py-spy").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "py-spy").chmod(0o755)
    assert await stacks_of(str(tmp_path / "python3"), [os.getpid()]) == []


async def test_without_a_py_spy_nothing_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is optional."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await stacks_of(str(tmp_path / "python3"), [os.getpid()]) == []
