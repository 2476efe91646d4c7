"""Which of several lines that tell of one fault is quoted, and which run of several in one log is judged."""

from __future__ import annotations

import pytest

from appliance.core.causes import Cause
from appliance.core.evidence import Source
from appliance.diagnosis import diagnose, read_evidence

OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 448.00 MiB. "
    "GPU 7 has a total capacity of 95.00 GiB of which 402.31 MiB is free."
)
UNREACHED = "node5:240:901 [6] misc/socket.cc:473 NCCL WARN socketPollConnect: Connect to 10.0.0.4<56849> returned 113(No route to host)"
SERVED = '[2025-06-02 11:03:12] INFO:     172.18.0.5:60359 - "POST /generate HTTP/1.1" 200 OK'


@pytest.mark.parametrize(
    ("lines", "root"),
    [
        ([OOM, f"Exception: Capture cuda graph failed: {OOM.partition(': ')[2]}"], OOM),
        ([OOM, "RuntimeError: Not enough memory to handle 4096 prefill tokens. You need to decrease `--max-batch-prefill-tokens`"], OOM),
        (
            [
                "file_download.py:801: UserWarning: Not enough free disk space to download the file. No space left on device",
                "RuntimeError: Data processing error: CAS service error : IO Error: No space left on device (os error 28)",
            ],
            "RuntimeError: Data processing error: CAS service error : IO Error: No space left on device (os error 28)",
        ),
        (
            [
                "NVIDIA GeForce RTX 5090 with CUDA capability sm_120 is not compatible with the current PyTorch installation.",
                "RuntimeError: CUDA error: no kernel image is available for execution on the device",
            ],
            "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        ),
        (
            [UNREACHED, "RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)"],
            UNREACHED,
        ),
    ],
)  # fmt: skip
def test_the_line_that_tells_most_is_quoted(lines: list[str], root: str) -> None:
    """The exception and not the sentence that passes it on, the error and not the warning, the reason and not that there was one."""
    found = diagnose(read_evidence("\n".join(["[2025-04-11 09:03:00] Load weight begin.", *lines]), Source.ENGINE_LOG))
    assert found.root is not None
    assert found.root.text == root


WATCHDOG = (
    "[rank0]:[E602 11:14:18.399340163 ProcessGroupNCCL.cpp:629] [Rank 0] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=88117, OpType=ALLREDUCE, NumelIn=5120, NumelOut=5120, Timeout(ms)=600000) ran for 600010 milliseconds"
)


def test_what_a_rank_died_of_when_the_others_began_to_wait_is_the_cause() -> None:
    """Ten minutes before the first word of the others, in the kernel's log alone."""
    kernel = "Jun 02 11:04:19 box kernel: python3[3201]: segfault at 18 ip 00007f7e sp 00007ffc error 4 in libcuda.so.570[7f7e+69c000]"
    sigquit = "[2025-06-02 11:14:20] Received sigquit from a child process. It usually means the child failed."
    log = read_evidence(f"{SERVED}\n{WATCHDOG}\n{sigquit}", Source.ENGINE_LOG)
    assert diagnose([*log, *read_evidence(kernel, Source.KERNEL_LOG)]).cause is Cause.SEGFAULT_NATIVE
    earlier = read_evidence(kernel.replace("11:04", "10:54"), Source.KERNEL_LOG)
    assert diagnose([*log, *earlier]).cause is Cause.NCCL_TIMEOUT


@pytest.mark.parametrize(("first", "second", "cause"), [(62, 119, Cause.GPU_MCU_HALT), (119, 62, Cause.GSP_TIMEOUT)])
def test_of_two_faults_that_bring_each_other_about_the_first_is_the_cause(first: int, second: int, cause: Cause) -> None:
    """A halted micro-controller answers no more; a system processor that hangs halts the others."""
    rows = [f"[ 100.{n}] NVRM: Xid (PCI:0000:48:00): {code}, 00002740 00002b08" for n, code in ((1, first), (9, second))]
    assert diagnose(read_evidence("\n".join(rows), Source.KERNEL_LOG)).cause is cause


@pytest.mark.parametrize("unit", ["org.gnome.Shell@wayland.service", "plasma-kwin_wayland.service", "tool@7.service"])
def test_another_unit_s_crash_is_not_the_engine_s(unit: str) -> None:
    """By its name, or because the kernel names a program that is no engine the second before."""
    journal = [
        "Mar 03 08:03:40 box kernel: gnome-shell[2512]: segfault at 58 ip 00007f2b sp 00007ffd error 4 in libmutter-13.so[7f2b+13a000]",
        f"Mar 03 08:03:41 box systemd[2101]: {unit}: Main process exited, code=dumped, status=11/SEGV",
    ]
    log = read_evidence(SERVED.replace("2025-06-02 11:03", "2026-03-03 08:03"), Source.ENGINE_LOG)
    assert diagnose([*log, *read_evidence("\n".join(journal))]).cause is Cause.OK_NORMAL
    own = [*journal[:1], journal[1].replace(unit, "vllm.service")]
    assert diagnose([*log, *read_evidence("\n".join(own))]).cause is Cause.SEGFAULT_NATIVE


def test_a_start_that_failed_before_one_that_succeeded_is_history() -> None:
    """Run again with another setting, in one file: the engine is well; a crash while it served is none of that."""
    failed = f"(EngineCore pid=90) ERROR 12-12 12:00:40 [core.py:708] EngineCore failed to start.\n{OOM}\n"
    again = "(APIServer pid=1) INFO:     Application startup complete.\n" + SERVED
    assert diagnose(read_evidence(failed + again, Source.ENGINE_LOG)).cause is Cause.OK_NORMAL
    assert diagnose(read_evidence(f"{SERVED}\n{failed}{again}", Source.ENGINE_LOG)).crashed
    assert diagnose(read_evidence(failed, Source.ENGINE_LOG)).crashed


def test_a_stuck_task_with_colons_in_its_name_is_told() -> None:
    """As vLLM calls its processes."""
    rows = "INFO: task VLLM::EngineCor:50957 blocked for more than 120 seconds.\ntask:VLLM::EngineCor state:D stack: 0 pid:50957 ppid: 1"
    found = diagnose(read_evidence(f"{rows}\n os_acquire_rwlock_read+0x35/0x50 [nvidia]", Source.KERNEL_LOG))
    assert found.cause is Cause.GPU_UNKILLABLE_PROCESS
    assert found.root is not None
    assert found.root.text.startswith("INFO: task VLLM")
