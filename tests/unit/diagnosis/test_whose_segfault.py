"""The kernel's segfault lines of a process or thread that nobody knows count only where nothing speaks against it."""

from __future__ import annotations

import pytest

from appliance.core.causes import Cause
from appliance.core.diagnosis import Confidence, Diagnosis
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


BUSY = "[2026-09-05 08:25:50 TP0] Decode batch, #running-req: 15, #token: 60112, token usage: 0.68, cuda graph: True, #queue-req: 0, "


def beside(text: str, fault_s: float | None, last_s: float = 100.0, source: Source = Source.KERNEL_LOG) -> Diagnosis:
    """Of an engine whose log ends at work, with no word of an end, and what another source tells."""
    serving = [Evidence(Source.ENGINE_LOG, BUSY, moment_s, line) for line, moment_s in enumerate((10.0, last_s), 1)]
    return diagnose([*serving, Evidence(source, text, fault_s, 1)])


def test_a_fault_beside_an_engine_at_work_is_not_its_own() -> None:
    """By the clock; where none tells, a name that any program has is not taken for the engine, and the verdict says so."""
    assert beside(FOREIGN, 40.0).cause is Cause.OK_NORMAL
    assert beside(FOREIGN, 99.5).cause is Cause.SEGFAULT_NATIVE
    found = beside(FOREIGN, None)
    assert (found.cause, found.confidence) == (Cause.OK_NORMAL, Confidence.LOW)
    assert any("many programs have that name" in doubt for doubt in found.doubts)


@pytest.mark.parametrize(
    ("text", "source", "confidence"),
    [
        (
            "llama-server[12627]: segfault at 0 ip 00007f10 sp 00007ffd error 4 in libc.so.6[7f1000+1000]",
            Source.KERNEL_LOG,
            Confidence.MEDIUM,
        ),
        ("Out of memory: Killed process 12627 (python3) total-vm:48123456kB, anon-rss:30123456kB", Source.KERNEL_LOG, Confidence.LOW),
        ("NVRM: Xid (PCI:0000:0a:00): 31, pid=12627, name=python3, MMU Fault: ENGINE GRAPHICS", Source.KERNEL_LOG, Confidence.LOW),
        ("NVRM: Xid (PCI:0000:0a:00): 31, pid=12627, name=VLLM::EngineCor, MMU Fault", Source.KERNEL_LOG, Confidence.MEDIUM),
        (
            "NVRM: Xid (PCI:0000:0a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
            Source.KERNEL_LOG,
            Confidence.MEDIUM,
        ),
    ],
)
def test_a_crash_of_which_nothing_shows_an_end_is_doubted(text: str, source: Source, confidence: Confidence) -> None:
    """The engine's log ends with a sign of life, and no clock tells which was first."""
    found = beside(text, None, source=source)
    assert (found.crashed, found.confidence) == (True, confidence)
    assert any("nothing tells that it ended" in doubt for doubt in found.doubts)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("Out of memory: Killed process 12627 (python3) total-vm:48123456kB, anon-rss:30123456kB", Source.KERNEL_LOG),
        ("job.service: Failed with result 'oom-kill'.", Source.SYSTEMD),
        ("job.service: Main process exited, code=killed, status=9/KILL", Source.SYSTEMD),
        ("Process 12627 (python3) of user 1000 dumped core.", Source.SYSTEMD),
        ("NVRM: Xid (PCI:0000:0a:00): 31, pid=12627, name=python3, MMU Fault: ENGINE GRAPHICS", Source.KERNEL_LOG),
        ("Killed /user.slice/app.slice/slack.service due to memory used (1) / total (2)", Source.SYSTEMD),
    ],
)
def test_whose_end_it_was_that_the_engine_outlived(text: str, source: Source) -> None:
    """Another process' or unit's; of the engine's own unit, it is the engine's however the clocks stand."""
    assert beside(text, 40.0, source=source).cause is Cause.OK_NORMAL
    assert beside("ollama.service: Failed with result 'oom-kill'.", 40.0, source=Source.SYSTEMD).cause is Cause.HOST_OOM


def test_a_fault_alone_is_certain_of_what_has_an_engine_s_name() -> None:
    """Where nothing of the engine's own was given, any other program's may be somebody else's."""
    assert diagnose([Evidence(Source.KERNEL_LOG, FOREIGN, 1.0, 1)]).confidence is Confidence.MEDIUM
    named = FOREIGN.replace("python3", "llama-server")
    assert diagnose([Evidence(Source.KERNEL_LOG, named, 1.0, 1)]).confidence is Confidence.HIGH


def test_a_crash_told_between_an_engine_s_lines_is_doubted_where_it_goes_on() -> None:
    """A shell's or a client's line in the same log; the clock is that of the lines around it."""
    told = Evidence(Source.ENGINE_LOG, "/srv/run.sh: line 7: 4410 Segmentation fault      (core dumped) python3 client.py", None, 2)
    lines = [Evidence(Source.ENGINE_LOG, BUSY, moment_s, 3) for moment_s in (10.0, 30.0, 400.0)]
    assert diagnose([lines[0], told]).confidence is Confidence.HIGH
    assert diagnose([lines[0], told, *lines[1:]]).confidence is Confidence.LOW
