"""A core dump is named by the signal it was made of: systemd's own watchdog makes some, and so does whoever gives up."""

from __future__ import annotations

import pytest

from appliance.core.causes import Cause
from appliance.core.diagnosis import Confidence
from appliance.core.evidence import Source
from appliance.diagnosis import diagnose, read_evidence

UNIT = "Oct 02 09:15:02 ws systemd[1]: vllm.service: "
DUMPED = "Oct 02 09:15:03 ws systemd-coredump[4999]: Process 4711 (python3) of user 998 dumped core."


@pytest.mark.parametrize(
    ("before", "status", "cause"),
    [
        ("Watchdog timeout (limit 1min)!", "6/ABRT", Cause.SD_WATCHDOG),
        ("State 'stop-sigterm' timed out. Aborting.", "6/ABRT", Cause.SD_STOP_TIMEOUT),
        ("start operation timed out. Aborting.", "6/ABRT", Cause.START_TIMEOUT),
        ("x", "11/SEGV", Cause.SEGFAULT_NATIVE),
        ("x", "4/ILL", Cause.SIGILL_CPU),
        ("x", "6/ABRT", Cause.UNKNOWN),
    ],
)
def test_the_units_end_names_the_signal(before: str, status: str, cause: Cause) -> None:
    """`dumped core` alone is said of every one of them."""
    log = "\n".join([UNIT + before, UNIT + "Killing process 4711 (python3) with signal SIGABRT." if "6/" in status else "", DUMPED])
    log += f"\n{UNIT}Main process exited, code=dumped, status={status}\n"
    assert diagnose(read_evidence(log, Source.SYSTEMD)).cause is cause


def test_a_dump_of_which_nothing_tells_the_signal_is_no_sure_segfault() -> None:
    """It may be; most dumps are aborts. Of a program that only has Python's name it is not even sure that it was an engine."""
    found = diagnose(read_evidence(DUMPED, Source.SYSTEMD))
    assert (found.cause, found.confidence) == (Cause.SEGFAULT_NATIVE, Confidence.LOW)
    named = diagnose(read_evidence(DUMPED.replace("python3", "llama-server"), Source.SYSTEMD))
    assert (named.cause, named.confidence) == (Cause.SEGFAULT_NATIVE, Confidence.MEDIUM)


def test_a_dump_of_the_teardown_in_a_stop_that_was_asked_for_is_no_crash() -> None:
    """As the unit's end is none."""
    log = [UNIT.removesuffix("vllm.service: ") + "Stopping vllm.service - vLLM...", DUMPED]
    log.append(UNIT + "Main process exited, code=dumped, status=11/SEGV")
    engine = "INFO:     Shutting down\nINFO:     Application shutdown complete."
    found = diagnose([*read_evidence(engine, Source.ENGINE_LOG), *read_evidence("\n".join(log), Source.SYSTEMD)])
    assert found.cause is Cause.OK_SHUTDOWN


def test_what_systemd_says_of_its_own_services_is_not_the_engines() -> None:
    """Its watchdog watches others too."""
    log = UNIT.replace("vllm", "systemd-udevd") + "Watchdog timeout (limit 3min)!\n"
    served = '(APIServer pid=1) INFO:     10.8.0.2:40120 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
    assert not diagnose([*read_evidence(served, Source.ENGINE_LOG), *read_evidence(log, Source.SYSTEMD)]).crashed
