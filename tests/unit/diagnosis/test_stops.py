"""A stop that was asked for, told from systemd's automatic restarts and from crashes."""

from __future__ import annotations

import pytest

from appliance.core.causes import Cause
from appliance.core.diagnosis import Diagnosis
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose, exit_evidence, read_evidence


def journal(text: str, *, engine: str = "", stopped_by_us: bool = False, exit_word: str | None = None) -> Diagnosis:
    """The verdict on systemd's lines ("HH:MM:SS text"), and on what the engine printed."""
    lines = "\n".join(f"Aug 08 {line[:8]} box systemd[1]: {line[9:]}" for line in text.strip().split("\n") if line)
    evidence = [*read_evidence(engine, Source.ENGINE_LOG), *read_evidence(lines, Source.SYSTEMD)]
    return diagnose([*evidence, *([exit_evidence(exit_word)] if exit_word else [])], stopped_by_us=stopped_by_us)


OLD_RESTART = """
09:02:33 Started Ollama Service.
09:02:33 ollama.service: main process exited, code=exited, status=127/n/a
09:02:33 Unit ollama.service entered failed state.
09:02:33 ollama.service failed.
09:02:36 ollama.service holdoff time over, scheduling restart.
09:02:36 Stopped Ollama Service.
"""
MIDDLE_RESTART = """
09:02:33 vllm.service: Main process exited, code=exited, status=1/FAILURE
09:02:33 vllm.service: Unit entered failed state.
09:02:33 vllm.service: Failed with result 'exit-code'.
09:02:36 vllm.service: Service hold-off time over, scheduling restart.
09:02:36 Stopped vLLM.
"""
NEW_RESTART = """
09:02:33 vllm.service: Main process exited, code=exited, status=1/FAILURE
09:02:33 vllm.service: Failed with result 'exit-code'.
09:02:36 vllm.service: Scheduled restart job, restart counter is at 1.
09:02:36 Stopped vllm.service - vLLM.
"""


@pytest.mark.parametrize("restart", [OLD_RESTART, MIDDLE_RESTART, NEW_RESTART], ids=["219", "237", "252"])
def test_what_systemd_says_in_a_restart_is_no_wish(restart: str) -> None:
    """`Stopped X.` without `Stopping X...` after a failure: nobody asked for anything."""
    assert journal(restart).cause is Cause.UNKNOWN
    assert journal(restart, exit_word="SIGSEGV").cause is Cause.SEGFAULT_NATIVE


@pytest.mark.parametrize(
    "refusal", ["start request repeated too quickly for ollama.service", "ollama.service: Start request repeated too quickly."]
)
def test_the_start_limit_is_known_in_old_words_and_new(refusal: str) -> None:
    """Restarts until systemd gives up."""
    assert journal(f"{OLD_RESTART}09:02:39 {refusal}\n09:02:39 Failed to start Ollama Service.").cause is Cause.SD_START_LIMIT


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("vllm.service stop-sigterm timed out. Killing.", Cause.SD_STOP_TIMEOUT),
        ("vllm.service: Stopping timed out. Terminating.", Cause.SD_STOP_TIMEOUT),
        ("vllm.service watchdog timeout (limit 30s)!", Cause.SD_WATCHDOG),
        ("vllm.service start operation timed out. Terminating.", Cause.START_TIMEOUT),
        ("vllm.service: Start operation timed out. Terminating.", Cause.START_TIMEOUT),
        ("vllm.service: start operation timed out. Aborting.", Cause.START_TIMEOUT),
        ("vllm.service: Service reached runtime time limit. Stopping.", Cause.EXTERNAL_SIGTERM),
        ("vllm.service: The kernel OOM killer killed some processes in this unit.", Cause.HOST_OOM),
    ],
)
def test_systemd_s_other_words(line: str, cause: Cause) -> None:
    """Of 219 and of 257."""
    assert journal(f"09:00:00 {line}").cause is cause


def test_a_stop_that_was_asked_for_is_one() -> None:
    """With and without a start before it; and no longer once the service was started again."""
    stop = "\n09:10:00 Stopping Ollama Service...\n09:10:02 ollama.service: Main process exited, code=killed, status=9/KILL"
    assert journal(f"{OLD_RESTART}09:02:36 Started Ollama Service.{stop}").cause is Cause.OK_SHUTDOWN
    assert journal(stop).cause is Cause.OK_SHUTDOWN
    again = "\n09:10:03 Started Ollama Service.\n09:30:00 ollama.service: Main process exited, code=killed, status=11/SEGV"
    assert journal(stop + again).cause is Cause.SEGFAULT_NATIVE


def test_another_unit_s_stop_is_not_the_engine_s() -> None:
    """A whole journal: other services come and go."""
    text = "09:10:00 Stopping man-db.service - Daily man-db regeneration...\n09:10:00 man-db.service: Deactivated successfully.\n"
    assert journal(f"{text}09:10:02 vllm.service: Main process exited, code=killed, status=11/SEGV").cause is Cause.SEGFAULT_NATIVE


def test_docker_s_own_stop_is_not_that_of_an_engine_beside_it() -> None:
    """It calls itself a container engine; an engine inside one goes with it."""
    docker = "09:10:00 Stopping docker.service - Docker Application Container Engine...\n"
    assert journal(f"{docker}09:10:02 vllm.service: Main process exited, code=killed, status=11/SEGV").cause is Cause.SEGFAULT_NATIVE
    served = "INFO:     Application startup complete.\nINFO:     Shutting down\n"
    assert journal(docker, engine=served, exit_word="SIGKILL").cause is Cause.OK_SHUTDOWN


def test_yesterday_s_death_is_no_part_of_today_s_stop() -> None:
    """Clocks without a zone differ by hours, not by days."""
    died = "(EngineCore_DP0 pid=101) ERROR 07-15 12:00:01 [x.py:1] Worker proc W-0 died unexpectedly, shutting down executor.\n"
    stop = "2026-07-{day}T12:00:00+00:00 box systemd[1]: Stopping vllm.service - vLLM...\n"
    for day, cause in ((15, Cause.OK_SHUTDOWN), (18, Cause.SEGFAULT_NATIVE)):
        evidence = [*read_evidence(died, Source.ENGINE_LOG), *read_evidence(stop.format(day=day), Source.SYSTEMD)]
        assert diagnose(evidence).cause is cause


NOISY = """(APIServer pid=88) INFO 07-16 12:00:00 [launcher.py:130] Shutting down FastAPI HTTP server.
(EngineCore_DP0 pid=101) [shutdown] EngineCore: trigger received signal=SIGTERM
(EngineCore_DP0 pid=101) ERROR 07-16 12:00:01 [multiproc_executor.py:246] Worker proc W-0 died unexpectedly, shutting down executor.
(APIServer pid=88) ERROR 07-16 12:00:01 [async_llm.py:525] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
(APIServer pid=88) INFO:     Finished server process [88]
"""
FATAL = "(EngineCore_DP0 pid=101) ERROR 07-16 12:00:01 torch.AcceleratorError: CUDA error: an illegal memory access was encountered\n"
SEGFAULT = "Jul 16 12:00:01 box kernel: VLLM::Worker_TP[811]: segfault at 0 ip 00007f sp 00007f error 4 in libcuda.so.550[7f+1]"


def test_workers_that_die_in_a_stop_are_its_consequence() -> None:
    """However they say it; unless a fault of the card or the kernel's own line stands there."""
    assert journal("", engine=NOISY, stopped_by_us=True, exit_word="143").cause is Cause.OK_SHUTDOWN
    assert journal("", engine=NOISY + FATAL, stopped_by_us=True, exit_word="143").cause is Cause.CUDA_ILLEGAL_ACCESS
    evidence = [*read_evidence(NOISY, Source.ENGINE_LOG), *read_evidence(SEGFAULT, Source.KERNEL_LOG)]
    assert diagnose(evidence, stopped_by_us=True).cause is Cause.SEGFAULT_NATIVE


def test_a_log_that_begins_inside_the_stop_is_believed() -> None:
    """Whoever gave it says that the stop was asked for; the lines about that were cut off."""
    died = "".join(line for line in NOISY.splitlines(keepends=True) if "died unexpectedly" in line)
    assert journal("", engine=died, stopped_by_us=True).cause is Cause.OK_SHUTDOWN
    assert journal("", engine=FATAL + died, stopped_by_us=True).cause is Cause.CUDA_ILLEGAL_ACCESS


def test_what_died_before_the_stop_was_asked_for_died_of_something_else() -> None:
    """The ledger's clock tells."""
    died = Evidence(
        Source.ENGINE_LOG, "ERROR [multiproc_executor.py:246] Worker proc VllmWorker-0 died unexpectedly, shutting down executor.", 100.0
    )
    stop = Evidence(Source.STOP_LEDGER, "", 160.0, data={"signal": "SIGTERM", "reason": "stop", "asked_by": "appliancectl"})
    assert diagnose([died, stop]).cause is Cause.SEGFAULT_NATIVE
    assert diagnose([died, Evidence(Source.STOP_LEDGER, "", 99.0, data=stop.data)]).cause is Cause.OK_SHUTDOWN
