"""What is told of stacks and dumps."""

# ruff: noqa: E501 (lines are quoted as programs print them)

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from typing import Any

import pytest

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.dumps import found_in, stacks_in
from appliance.diagnosis.nccl_trace import TraceError, read_trace

PY_SPY = """Process 4711: python3 -m sglang.launch_server
Python v3.11.2 (/usr/bin/python3.11)

Thread 4711 (idle): "MainThread"
    wait (threading.py:327)
    run (server.py:88)
Thread 4720 (active+gil): "scheduler"
    copy_kernel (memory_pool.py:214)
    alloc (allocation.py:240)
    forward_extend (model_runner.py:1210)
"""
GDB = [
    "#0  0x00007f32a1ca9eec in ?? () from /lib/x86_64-linux-gnu/libc.so.6",
    "#1  0x00007f32a1c5afb2 in raise () from /lib/x86_64-linux-gnu/libc.so.6",
    "#2  0x00007f31f2d01a10 in at::native::copy_device (self=...) at /build/Copy.cpp:88",
    "#3  0x00007f31f2d01a10 n/a (libtorch_cpu.so + 0x1234)",
]


def test_the_stack_of_a_real_python_that_dies(tmp_path: Any) -> None:
    """faulthandler's own words, of this interpreter: the thread that died, innermost frame first."""
    code = "import ctypes\ndef poke():\n    ctypes.string_at(0)\ndef step():\n    poke()\nstep()\n"
    script = tmp_path / "loop.py"
    script.write_text(code)
    died = subprocess.run(
        [sys.executable, script], env={**os.environ, "PYTHONFAULTHANDLER": "1"}, capture_output=True, text=True, timeout=60
    )
    assert died.returncode == -signal.SIGSEGV
    (found,) = stacks_in(died.stderr.splitlines())
    assert found.startswith("faulthandler (Segmentation fault): the thread was in string_at (__init__.py:")
    assert found.endswith("< poke (loop.py:3) < step (loop.py:5) < <module> (loop.py:6)")


def test_of_a_py_spy_dump_the_threads_that_do_something() -> None:
    """In a log or as evidence of our own."""
    expected = "py-spy: scheduler (active+gil) was in copy_kernel (memory_pool.py:214) < alloc (allocation.py:240) < forward_extend (model_runner.py:1210)"
    lines = PY_SPY.splitlines()
    assert found_in([Evidence(Source.ENGINE_LOG, line) for line in lines]) == (expected,)
    assert found_in([Evidence(Source.STACK, line, data={"kind": "py-spy"}) for line in lines]) == (expected,)


def test_the_top_of_a_core_s_stack() -> None:
    """gdb's frames and coredumpctl's, with the library or the file."""
    (found,) = found_in([Evidence(Source.STACK, line) for line in GDB])
    assert (
        found
        == "core dump: the process was in ?? (libc.so.6) < raise (libc.so.6) < at::native::copy_device (Copy.cpp:88) < n/a (libtorch_cpu.so + 0x1234)"
    )


def test_a_quiet_log_has_none() -> None:
    """Nor does a log that only mentions such things."""
    lines = ["INFO Thread pool started", "#0 items", 'File "x.py" was read', "Current thread count: 5"]
    assert found_in([Evidence(Source.ENGINE_LOG, line) for line in lines]) == ()


def test_the_recorder_s_findings_are_told_beside_them() -> None:
    """The three quick checks: jitter, counts out of bounds, dumps of the last day."""
    swing = Evidence(Source.NVML, "video memory swung by 412.00 MiB within 3 min 0 s", data={"kind": "vram_swing"})
    sample = Evidence(Source.NVML, "a sample", data={"kind": "sample"})
    dumps = [Evidence(Source.CORE_DUMP, f"core dump of python (SIGSEGV) /cores/{number}", data={"signal": "SIGSEGV"}) for number in (1, 2)]
    told = found_in([sample, swing, *dumps])
    assert told == (swing.text, "2 core dumps of the engine within a day, such as: core dump of python (SIGSEGV) /cores/2")


def test_torch_s_own_lists_are_lists() -> None:
    """Its C++ writes lists of numbers by the name of a function that makes them."""
    sizes = b"ctorch.jit._pickle\nbuild_intlist\n(](K\x01M\x00\x10etR"
    raw = (
        b"\x80\x02}(X\x07\x00\x00\x00entries]}(X\x05\x00\x00\x00stateX\x07\x00\x00\x00startedX\x0b\x00\x00\x00input_sizes" + sizes + b"uau."
    )
    assert read_trace(raw) == [
        "0 of the last 1 collectives completed; the first that did not is a collective number ? of [1, 4096], started"
    ]


def entry(number: int, state: str, **fields: object) -> dict[str, object]:
    """One collective."""
    return {"profiling_name": "nccl:all_reduce", "collective_seq_id": number, "state": state, "input_sizes": [[1, 4096]], **fields}


def test_a_trace_names_the_first_collective_that_hangs() -> None:
    """And where it was called."""
    frames = [{"name": f"f{number}", "filename": "/a/b.py", "line": number} for number in range(9)]
    raw = pickle.dumps({"entries": [entry(1, "completed"), entry(2, "started", frames=frames), entry(3, "scheduled")]})
    (said,) = read_trace(raw)
    assert said.startswith(
        "1 of the last 3 collectives completed; the first that did not is nccl:all_reduce number 2 of [[1, 4096]], started"
    )
    assert said.endswith("called in f0 (b.py:0) < f1 (b.py:1) < f2 (b.py:2)")
    assert read_trace(pickle.dumps({"entries": [entry(1, "completed")]}))[0].endswith(
        "the last one was nccl:all_reduce number 1 of [[1, 4096]]"
    )
    assert read_trace(pickle.dumps({"entries": []})) == ["it holds no collectives"]


class _Bomb:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/bomb-of-test-dumps",)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x80",
        b"not a pickle",
        pickle.dumps(_Bomb()),
        pickle.dumps({"entries": [_Bomb()]}),
        b"\x80\x04" + b"(" * 10_000,
        b"\x80\x05\x96" + b"\xff" * 8,
        b"\x80\x02Nr\xff\xff\xff\x7f.",
    ],
)
def test_a_trace_is_read_and_never_run(raw: bytes) -> None:
    """What is no plain data is refused with the reason."""
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(raw)
    assert not os.path.exists("/tmp/bomb-of-test-dumps")  # noqa: PTH110


@pytest.mark.parametrize(
    "trace", [[], {"entries": "x"}, {"entries": [1, None]}, {"entries": [{"frames": 3}]}, {"entries": [{"frames": [{}], "state": 7}]}]
)
def test_a_trace_of_another_make_is_no_error(trace: Any) -> None:
    """Fields come and go with torch's versions."""
    assert read_trace(pickle.dumps(trace))
