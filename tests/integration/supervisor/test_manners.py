"""Deaths in the manner of engines that people run: by other words and other signals than one would think."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.integration.supervisor.harness import Applianced, is_alive

Start = Callable[..., Applianced]

SGLANG_OOM = [
    "[2026-08-16 09:41:37 TP0] Prefill batch, #new-seq: 1, #new-token: 4096, #cached-token: 0, token usage: 0.35, #running-req: 1, ",
    "[2026-08-16 09:41:40 TP0] Scheduler hit an exception: Traceback (most recent call last):",
    '  File "/opt/engine/lib/python3.11/site-packages/sglang/srt/managers/scheduler.py", line 4940, in run_scheduler_process',
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which "
    "5.19 MiB is free. Including non-PyTorch memory, this process has 23.23 GiB memory in use.",
    "[2026-08-16 09:41:40] SIGQUIT received. signum=3, frame=<frame at 0x7f02c4000d60>. It usually means one child failed.",
    "[2026-08-16 09:41:40] kill_process_tree called: parent_pid=901, include_parent=True, pid=901",
]
VLLM_DEAD = [
    "(EngineCore_DP0 pid=812) ERROR 08-25 12:00:00 [core.py:1138] EngineCore encountered a fatal error.",
    "(EngineCore_DP0 pid=812) ERROR 08-25 12:00:00 [core.py:1138] torch.AcceleratorError: CUDA error: an illegal memory access was "
    "encountered",
    "(APIServer pid=700) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the "
    "root cause.",
]
LLAMA_OOM = [
    "main: server is listening on http://127.0.0.1:8080 - starting the main loop",
    "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 838.86 MiB on device 0: cudaMalloc failed: out of memory",
    "ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 838447104",
]


def lines(texts: list[str]) -> list[dict[str, Any]]:
    """As steps of a script."""
    return [{"kind": "log", "text": text} for text in texts]


def test_sglang_is_not_waited_for_while_it_lingers(applianced: Start) -> None:
    """Its parent lives on for 65 s after the fatal line and then kills itself: ended at once, and the root is the child's exception."""
    one = applianced()
    before = one.wait_state("serving")
    began_s = time.monotonic()
    one.fault(kind="script", steps=[*lines(SGLANG_OOM), {"kind": "wait", "s": 65}, {"kind": "signal", "signal": "SIGKILL"}])
    status = one.wait_state("degraded", above=1)
    assert time.monotonic() - began_s < 10
    assert not is_alive(before["engine_pid"])
    (incident,) = one.wait_incident()
    assert incident["diagnosis"]["cause"] == "cuda_oom_prefill"
    assert incident["diagnosis"]["root"]["text"].startswith("torch.OutOfMemoryError")
    assert (incident["action"]["kind"], status["rung"]["index"]) == ("restart_safer", 1)


def test_sglang_ends_by_sigkill_and_nobody_else_did_it(applianced: Start) -> None:
    """It kills its own process tree, itself included: no OOM killer, no stranger."""
    one = applianced()
    one.wait_state("serving")
    one.fault(kind="script", steps=[*lines(SGLANG_OOM), {"kind": "signal", "signal": "SIGKILL"}])
    one.wait_state("degraded", above=1)
    (incident,) = one.wait_incident()
    assert incident["diagnosis"]["cause"] == "cuda_oom_prefill"


def test_vllm_leaves_with_code_0(applianced: Start) -> None:
    """Its API server ends politely when its core is dead: a crash, by the core's own words."""
    one = applianced()
    one.wait_state("serving")
    one.fault(kind="script", steps=[*lines(VLLM_DEAD), {"kind": "exit", "code": 0}])
    one.wait_state("serving", above=1)
    (incident,) = one.wait_incident()
    assert incident["diagnosis"]["cause"] == "cuda_illegal_access"
    assert incident["action"]["kind"] == "restart_same"


def test_llama_server_stays_alive_and_dead(applianced: Start) -> None:
    """An allocation failed, it lives on and answers nobody: found by our probes, and the allocation is the root, not our time-out."""
    one = applianced()
    before = one.wait_state("serving")
    one.fault(kind="script", steps=[*lines(LLAMA_OOM), {"kind": "hang"}])
    one.wait_state("degraded", above=1)
    assert not is_alive(before["engine_pid"])
    (incident,) = one.wait_incident()
    assert incident["diagnosis"]["cause"] == "cuda_oom_runtime"
    assert "out of memory" in incident["diagnosis"]["root"]["text"]
