"""The kernel's segfault lines of a process or thread that nobody knows count only where nothing speaks against it."""

from __future__ import annotations

import pytest

from appliance.core.causes import Cause
from appliance.core.diagnosis import Diagnosis
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose

FOREIGN = "python3[12627]: segfault at 0 ip 00007f10 sp 00007ffd error 4 in libc.so.6[7f1000+1000]"
FATAL = "Fatal Python error: Segmentation fault"


def verdict(fault_s: float, exit_signal: str, *, told: bool | None = None, fatal: bool = True, engine: str = "native") -> Diagnosis:
    """Of an engine that ended at second 100, by a fault of its own where `fatal`."""
    kernel = Evidence(Source.KERNEL_LOG, FOREIGN, fault_s, 1, data={} if told is None else {"of_engine": told})
    own = [Evidence(Source.ENGINE_LOG, FATAL, 100.0, 9)] if fatal else []
    serving = Evidence(Source.ENGINE_LOG, "INFO:     Application startup complete.", 10.0, 1)
    ended = Evidence(Source.EXIT, f"killed by {exit_signal}", 100.3, data={"signal": exit_signal})
    return diagnose([serving, kernel, *own, ended], engine=engine)


def test_a_fault_that_the_engine_outlived_was_somebody_elses() -> None:
    """Seven seconds before its own: the root is the engine's own line."""
    found = verdict(93.0, "SIGSEGV")
    assert (found.cause, found.root.text) == (Cause.SEGFAULT_NATIVE, FATAL)


@pytest.mark.parametrize("told", [None, True])
def test_a_fault_at_its_end_is_its_own(told: bool | None) -> None:
    """The kernel's line says where in the code it was."""
    found = verdict(99.8, "SIGSEGV", told=told)
    assert (found.cause, found.root.text) == (Cause.SEGFAULT_NATIVE, FOREIGN)


def test_the_built_in_engine_does_not_end_by_sigkill_of_a_fault() -> None:
    """It is one process: whoever killed it, the neighbour's fault did not. SGLang's tree is killed by its parent."""
    assert verdict(99.8, "SIGKILL", fatal=False).cause is Cause.KILLED_UNKNOWN
    assert verdict(99.8, "SIGKILL", fatal=False, engine="sglang").cause is Cause.SEGFAULT_NATIVE


NEIGHBOUR = "python3[12627]: segfault at 0 ip 00007f10 sp 00007ffd error 4 in libc.so.6[7f1000+1000]"
OWN = "python3[4711]: segfault at 8 ip 00007e77 sp 00007ffe error 6 in libcuda.so.550[7e7000+1000]"


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("how", ["told", "logged"])
def test_of_two_faults_in_one_moment_the_engine_s_own_is_quoted(order: int, how: str) -> None:
    """A neighbour of the same name dies within the same second; applianced knows the number, or the log gives it."""
    kernel = [
        Evidence(Source.KERNEL_LOG, NEIGHBOUR, 99.1, 1),
        Evidence(Source.KERNEL_LOG, OWN, 99.7, 2, data={"of_engine": True} if how == "told" else {}),
    ]
    started = Evidence(Source.ENGINE_LOG, "INFO:     Started server process [4711]" if how == "logged" else "INFO:     ready", 10.0, 1)
    died = Evidence(Source.ENGINE_LOG, FATAL, 100.0, 9)
    found = diagnose([started, *kernel[::order], died, Evidence(Source.EXIT, "", 100.3, data={"signal": "SIGSEGV"})])
    assert (found.cause, found.root.text) == (Cause.SEGFAULT_NATIVE, OWN)
