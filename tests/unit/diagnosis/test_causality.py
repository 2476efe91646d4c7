"""The causal step: tiers, named edges, windows of time, exits, stops."""

from __future__ import annotations

import pytest

from appliance.core.causes import Cause
from appliance.core.diagnosis import Confidence, Diagnosis
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import action_for, diagnose, read_evidence

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. "
    "GPU 0 has a total capacity of 23.56 GiB of which 5.19 MiB is free."
)
IMA = "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"
RPC = "TimeoutError: RPC call to sample_tokens timed out."
SIGQUIT = "[2026-08-16 09:41:40] SIGQUIT received. signum=3, frame=None. It usually means one child failed."
T = 1_786_873_300.0


def log(*lines: str, at: float | None = None) -> list[Evidence]:
    """Engine log lines, one a second from `at`."""
    return [Evidence(Source.ENGINE_LOG, text, None if at is None else at + index, index + 1) for index, text in enumerate(lines)]


def xid(code: int, at: float | None = None, *, name: str = "python3", boot: str | None = None) -> Evidence:
    """A kernel line."""
    return Evidence(Source.KERNEL_LOG, f"NVRM: Xid (PCI:0000:01:00): {code}, pid=77, name={name}, Ch 00000008", at, 1, boot)


def ended(**data: object) -> Evidence:
    """How the process ended."""
    return Evidence(Source.EXIT, "", data=data)


STOP = Evidence(Source.STOP_LEDGER, "", T, data={"signal": "SIGTERM", "reason": "drain", "asked_by": "appliancectl"})


def refuted(verdict: Diagnosis) -> set[Cause]:
    """The causes that the verdict rules out."""
    return {item.cause for item in verdict.refuted}


@pytest.mark.parametrize(
    ("engine", "kernel_code", "distance_s", "cause"),
    [
        (IMA, 31, -1.0, Cause.CUDA_ILLEGAL_ACCESS),
        (OOM, 31, -1.0, Cause.CUDA_ILLEGAL_ACCESS),
        (OOM, 31, -4 * 86400.0, Cause.CUDA_OOM_RUNTIME),
        (OOM, 31, +4 * 86400.0, Cause.CUDA_OOM_RUNTIME),
        (RPC, 79, -310.0, Cause.GPU_OFF_BUS),
        (RPC, 79, -7 * 3600.0, Cause.GPU_OFF_BUS),
        (RPC, 79, +600.0, Cause.ENGINE_RPC_TIMEOUT),
        (RPC, 31, -310.0, Cause.CUDA_ILLEGAL_ACCESS),
        (RPC, 31, -3000.0, Cause.ENGINE_RPC_TIMEOUT),
    ],
)
def test_a_kernel_fault_counts_inside_its_window(engine: str, kernel_code: int, distance_s: float, cause: Cause) -> None:
    """Faults that CUDA reports at once: seconds. A time-out: its own length before. A lost card: until the end of the boot."""
    verdict = diagnose([xid(kernel_code, T + distance_s), *log(engine, at=T)])
    assert verdict.cause is cause


def test_a_fault_outside_its_window_is_refuted_with_the_distance() -> None:
    """The report says how far away it stands."""
    verdict = diagnose([xid(31, T - 86400), *log(OOM, at=T)])
    (item,) = [item for item in verdict.refuted if item.cause is Cause.CUDA_ILLEGAL_ACCESS]
    assert "86400 s before" in item.reason


def test_another_boot_is_another_world() -> None:
    """An Xid 79 of the boot before does not explain this one's crash."""
    now = Evidence(Source.ENGINE_LOG, OOM, T, 1, "boot-b")
    assert diagnose([xid(79, T - 5, boot="boot-a"), now]).cause is Cause.CUDA_OOM_RUNTIME
    assert diagnose([xid(79, T - 5, boot="boot-b"), now]).cause is Cause.GPU_OFF_BUS


def test_another_programs_fault_is_not_ours() -> None:
    """Xid 31 of a browser is context, Xid 79 concerns everybody on the card."""
    assert diagnose([xid(31, T, name="chrome"), *log(OOM, at=T)]).cause is Cause.CUDA_OOM_RUNTIME
    assert diagnose([xid(79, T, name="chrome"), *log(OOM, at=T)]).cause is Cause.GPU_OFF_BUS


@pytest.mark.parametrize(
    ("codes", "cause"),
    [
        ((48, 63, 94), Cause.ECC_UNCORRECTABLE),
        ((64, 94), Cause.ECC_UNCORRECTABLE),
        ((74, 62), Cause.NVLINK_ERROR),
        ((119, 120, 154), Cause.GSP_TIMEOUT),
        ((62, 154), Cause.GPU_MCU_HALT),
        ((79, 154), Cause.GPU_OFF_BUS),
        ((13, 43), Cause.CUDA_ILLEGAL_ACCESS),
        ((13, 109), Cause.CUDA_ILLEGAL_ACCESS),
        ((109, 45), Cause.GPU_HANG_RC),
        ((154,), Cause.GPU_NEEDS_RESET),
        ((63,), Cause.OK_DEGRADED),
        ((45,), Cause.OK_BENIGN_WARNING),
        ((999,), Cause.UNKNOWN),
    ],
)
def test_the_first_fault_of_a_known_sequence_is_the_root(codes: tuple[int, ...], cause: Cause) -> None:
    """43, 45, 63, 109, 120 and 154 are never the root where another Xid stands; an unknown number is no cause."""
    assert diagnose([xid(code, T + index) for index, code in enumerate(codes)]).cause is cause


def test_the_driver_names_the_cause_of_an_xid_45() -> None:
    """`caused by previous Xid N`: N counts."""
    line = "NVRM: Xid (PCI:0000:dc:00): 45, pid=18189, name=python3, Ch 00000001 caused by previous Xid 149"
    assert diagnose([Evidence(Source.KERNEL_LOG, line)]).cause is Cause.NVLINK_ERROR


def test_consequences_carry_no_cause() -> None:
    """SIGQUIT, the death of the tree, 500, EngineDeadError and the exit that follows: named, and never the root."""
    lines = ("Scheduler hit an exception: Traceback", SIGQUIT, "kill_process_tree called: parent_pid=1", "500 Internal Server Error")
    verdict = diagnose([*log(*lines), ended(signal="SIGKILL")])
    assert verdict.cause is Cause.UNKNOWN
    assert verdict.confidence is Confidence.LOW
    assert verdict.crashed


def test_sigkill_after_sigquit_is_not_the_oom_killer() -> None:
    """The suspicion is refuted, with the reason and the line."""
    verdict = diagnose([*log(OOM, SIGQUIT), ended(code=137)])
    assert verdict.cause in (Cause.CUDA_OOM_RUNTIME, Cause.CUDA_OOM_PREFILL)
    (item,) = [item for item in verdict.refuted if item.cause is Cause.HOST_OOM]
    assert "its own process tree" in item.reason
    assert item.citation is not None


def test_a_time_out_below_a_deeper_fault_is_refuted_and_explained() -> None:
    """The report says what the time-out's parameter means."""
    verdict = diagnose(log(OOM, "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)"))
    (item,) = [item for item in verdict.refuted if item.cause is Cause.ENGINE_WATCHDOG]
    assert "300 s" in item.reason
    assert "not why" in item.reason


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        ({"signal": "SIGKILL"}, Cause.KILLED_UNKNOWN),
        ({"code": 137}, Cause.KILLED_UNKNOWN),
        ({"code": -9}, Cause.KILLED_UNKNOWN),
        ({"signal": "SIGSEGV"}, Cause.SEGFAULT_NATIVE),
        ({"code": 139}, Cause.SEGFAULT_NATIVE),
        ({"signal": "SIGILL"}, Cause.SIGILL_CPU),
        ({"signal": "SIGBUS"}, Cause.SHM_TOO_SMALL),
        ({"signal": "SIGTERM"}, Cause.EXTERNAL_SIGTERM),
        ({"signal": "SIGQUIT"}, Cause.EXTERNAL_SIGTERM),
        ({"signal": "SIGABRT"}, Cause.UNKNOWN),
        ({"code": 70}, Cause.UNKNOWN),
        ({"code": True}, Cause.UNKNOWN),
        ({"signal": "NOPE", "code": "x"}, Cause.UNKNOWN),
    ],
)
def test_an_exit_alone_says_as_much_as_it_can(data: dict[str, object], cause: Cause) -> None:
    """A signal names a kind of fault; a code or SIGABRT names nothing."""
    assert diagnose([ended(**data)]).cause is cause


def test_a_stop_that_we_asked_for_is_no_crash() -> None:
    """From the ledger or the flag, whatever the teardown prints; a fault before it still is one."""
    teardown = log("Worker VllmWorkerProcess pid 1 died, exit code: -15", "vllm.v1.engine.exceptions.EngineDeadError: gone")
    assert diagnose([*teardown, ended(signal="SIGTERM")], stopped_by_us=True).cause is Cause.OK_SHUTDOWN
    assert diagnose([STOP, *teardown, ended(signal="SIGKILL")]).cause is Cause.OK_SHUTDOWN
    assert diagnose([*log(OOM), STOP, ended(signal="SIGKILL")]).crashed


def test_our_own_probe_names_the_hang() -> None:
    """The kill that ends a hang is ours; the hang is the cause, unless something deeper stands before it."""
    probe = Evidence(Source.PROBE, "", T, data={"kind": "progress", "silent_s": 95.0})
    assert diagnose([probe, STOP, ended(signal="SIGKILL")]).cause is Cause.ENGINE_WATCHDOG
    assert "1 min 35 s" in diagnose([probe]).sentence
    assert diagnose([xid(79, T - 100), probe, ended(signal="SIGKILL")]).cause is Cause.GPU_OFF_BUS


def test_the_cgroup_proves_a_host_oom() -> None:
    """`memory.events` counts it; nothing else has to be printed."""
    counters = Evidence(Source.CGROUP, "", data={"oom_kill": 1})
    assert diagnose([counters, ended(signal="SIGKILL")]).cause is Cause.HOST_OOM
    assert diagnose([Evidence(Source.CGROUP, "", data={"oom_kill": 0}), ended(signal="SIGKILL")]).cause is Cause.KILLED_UNKNOWN


def test_a_client_that_leaves_is_no_crash() -> None:
    """What the gateway saw, alone."""
    assert diagnose([Evidence(Source.GATEWAY, "", data={"kind": "client_disconnect"})]).cause is Cause.OK_CLIENT_DISCONNECT


@pytest.mark.parametrize(
    ("milestone", "cause"),
    [
        ("[2026-11-30 10:00:00] INFO Load weight begin.", Cause.CUDA_OOM_STARTUP),
        ("[2026-08-16 09:41:31 TP0] Prefill batch, #new-seq: 1", Cause.CUDA_OOM_PREFILL),
        ("[2026-08-16 09:41:31 TP0] Decode batch, #running-req: 1", Cause.CUDA_OOM_RUNTIME),
        ('  File "x.py", line 7, in forward_extend', Cause.CUDA_OOM_PREFILL),
        ('  File "model_loader/loader.py", line 7, in load_weights', Cause.CUDA_OOM_STARTUP),
        ("EngineCore failed to start.", Cause.CUDA_OOM_STARTUP),
    ],
)
def test_the_phase_of_an_allocation_failure_is_read_from_its_company(milestone: str, cause: Cause) -> None:
    """Wrappers, frames, then the last milestone."""
    assert diagnose(log(milestone, OOM)).cause is cause


def test_numbers_are_named_and_filled_in() -> None:
    """Bytes under their names, in the sentence as a person writes them."""
    verdict = diagnose(log("[2026-08-16 09:41:31 TP0] Prefill batch, #new-seq: 1", OOM))
    assert dict(verdict.numbers) == {"asked_bytes": 48 * 1024**2, "free_bytes": 5442109.0, "total_bytes": 25297357373.0}
    assert "48.00 MiB" in verdict.sentence
    assert dict(verdict.safer_config)["mem_fraction"] == "-0.02"


def test_every_cause_has_an_action() -> None:
    """The table of remedies is complete."""
    assert all(action_for(cause) for cause in Cause)


def test_no_evidence_is_unknown() -> None:
    """Nothing given, nothing said."""
    verdict = diagnose([])
    assert verdict.cause is Cause.UNKNOWN
    assert verdict.root is None


def test_a_stop_of_our_engine_that_nobody_asked_for_is_named_though_it_left_in_order() -> None:
    """applianced is the only one who stops it; with its ledger it is a shutdown, without one a stranger's signal."""
    lines = log(
        "[2026-11-30 10:00:00] INFO The engine is ready. model=m context_length_tokens=8192 max_running=8 kv_tokens=11632 elapsed=1.30 s",
        "[2026-11-30 10:00:01] INFO SIGTERM received. Running requests: 0; new ones are refused.",
        "[2026-11-30 10:00:01] INFO The engine has stopped.",
    )
    verdict = diagnose([*lines, ended(code=0)])
    assert (verdict.cause, verdict.root.line if verdict.root else 0) == (Cause.EXTERNAL_SIGTERM, 2)
    assert diagnose([*lines, ended(code=0), STOP]).cause is Cause.OK_SHUTDOWN


def test_a_stack_dump_that_crashes_does_not_make_a_segfault_of_an_abort() -> None:
    """Python prints the frames of threads that run, and now and then dies of it; the first fatal error is the fault."""
    aborted, segfault = "Fatal Python error: Aborted", "  File Fatal Python error: Segmentation fault"
    assert diagnose([*log(aborted, segfault), ended(signal="SIGSEGV")]).cause is Cause.UNKNOWN
    assert diagnose([*log(segfault, aborted), ended(signal="SIGSEGV")]).cause is Cause.SEGFAULT_NATIVE


def test_an_exception_after_the_last_sign_of_life_is_not_called_health() -> None:
    """Nobody can say that such an engine is well; traffic after the exception can."""
    ready, served = "INFO:     Application startup complete.", 'INFO:     10.0.0.1:5 - "POST /v1/completions HTTP/1.1" 200 OK'
    ended = diagnose(log(ready, served, "KeyError: 'blk.12'"), engine="vllm")
    assert ended.cause is Cause.UNKNOWN and ended.sentence.startswith("The engine (vllm) raised an exception")
    assert diagnose(log(ready, "KeyError: 'blk.12'", served)).cause is Cause.OK_NORMAL


@pytest.mark.parametrize("words", ["curl: (7) Failed to connect to 127.0.0.1 port 8080 after 0 ms", "curl: (52) Empty reply from server"])
def test_a_server_that_nobody_reaches_is_not_well(words: str) -> None:
    """A log that breaks off at work, and the client's own word on it: no cause, and not health; before it served, it was only early."""
    ready, served = "INFO:     Application startup complete.", 'INFO:     127.0.0.1:1 - "POST /v1/chat/completions HTTP/1.1" 200 OK'
    assert diagnose(log(ready, served, words)).cause is Cause.UNKNOWN
    assert diagnose(log(words, ready, served)).cause is Cause.OK_NORMAL


LOGOUT = "Jul 22 23:{minute}:01 ws systemd[1]: Stopping user@1000.service - User Manager for UID 1000...\n"
STOPPING = "Jul 22 23:10:01 ws systemd[{pid}]: Stopping vllm.service - vLLM in podman...\n"
STOPPED_ENGINE = """INFO 07-22 23:00:02 [api_server.py:1] Application startup complete.
[shutdown] EngineCore: trigger received signal=SIGTERM
ERROR 07-22 23:10:02 [async_llm.py:525] vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.
"""


@pytest.mark.parametrize(
    ("journal", "cause"),
    [
        (LOGOUT.format(minute="10") + STOPPING.format(pid=1801), Cause.EXTERNAL_SIGTERM),
        (LOGOUT.format(minute="02") + STOPPING.format(pid=1), Cause.OK_SHUTDOWN),
        (STOPPING.format(pid=1) + LOGOUT.format(minute="10"), Cause.OK_SHUTDOWN),
        (LOGOUT.format(minute="10"), Cause.EXTERNAL_SIGTERM),
    ],
    ids=["logout", "somebody-else-left-before", "the-administrator-left-after", "the-unit's-own-line-is-missing"],
)
def test_a_logout_is_nobody_s_wish(journal: str, cause: Cause) -> None:
    """It takes the user's services along; a logout at another time has nothing to do with a stop that was asked for."""
    evidence = [*read_evidence(STOPPED_ENGINE, Source.ENGINE_LOG), *read_evidence(journal, Source.SYSTEMD)]
    assert diagnose(evidence).cause is cause


CHILD = "[2026-03-02 13:00:43] Subprocess scheduler_0 (pid=77) crashed with exit code -9. Triggering SIGQUIT for cleanup...\n"
TREE = "[2026-03-02 13:00:43] kill_process_tree called: parent_pid=1, include_parent=True, pid=1\n"


@pytest.mark.parametrize(("log", "cause"), [(CHILD + TREE, Cause.KILLED_UNKNOWN), (TREE + CHILD, Cause.UNKNOWN)], ids=["before", "after"])
def test_who_killed_a_child_is_told_by_the_order(log: str, cause: Cause) -> None:
    """Gone before its parent cleans up: somebody outside did it. After that: the parent."""
    assert diagnose(read_evidence(log, Source.ENGINE_LOG)).cause is cause


def test_requests_aborted_by_a_death_are_not_its_cause() -> None:
    """vLLM V0 aborts every request once its loop is dead; the line after the fault is no client."""
    log = (
        "ERROR 06-13 02:36:52 async_llm_engine.py:52] Engine background task failed\n"
        "INFO 06-13 02:36:52 async_llm_engine.py:167] Aborted request cmpl-1.\n"
    )
    assert diagnose(read_evidence(log, Source.ENGINE_LOG)).cause is Cause.UNKNOWN


@pytest.mark.parametrize(
    ("last", "cause"),
    [
        ("ConnectionResetError: [Errno 104] Connection reset by peer", Cause.KILLED_UNKNOWN),
        ("RuntimeError: the scheduler's queue is broken", Cause.UNKNOWN),
    ],
    ids=["of-one-client", "of-the-engine"],
)
def test_a_clients_broken_connection_kills_nobody(last: str, cause: Cause) -> None:
    """asyncio prints it and goes on; after a fault of the engine's own, the parent may have killed its tree itself."""
    lines = log("Task exception was never retrieved", "Traceback (most recent call last):", last)
    assert diagnose([*lines, ended(signal="SIGKILL")]).cause is cause
