"""Trouble that the engine got over, and trouble that it did not: what the log as a whole says."""

from __future__ import annotations

import pytest

from appliance.core.causes import Cause
from appliance.core.diagnosis import Confidence, Diagnosis
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose, is_fatal_line, read_evidence

OOM = "CUDA out of memory. Tried to allocate 1.20 GiB. GPU 0 has a total capacity of 23.56 GiB of which 801.19 MiB is free."
READY = "(APIServer pid=1) INFO:     Application startup complete."
SERVED = '(APIServer pid=1) INFO:     10.8.0.2:40120 - "POST /v1/chat/completions HTTP/1.1" 200 OK'


def verdict(lines: list[str], code: int | None = None, kernel: str = "", systemd: str = "") -> Diagnosis:
    """Of an engine's log, the logs below it, and how the engine ended."""
    evidence = [
        *read_evidence("\n".join(lines), Source.ENGINE_LOG),
        *read_evidence(kernel, Source.KERNEL_LOG),
        *read_evidence(systemd, Source.SYSTEMD),
    ]
    return diagnose([*evidence, *([] if code is None else [Evidence(Source.EXIT, "", data={"code": code})])])


@pytest.mark.parametrize(
    "handled",
    [
        [f"WARNING [svc] generate failed: {OOM} -- retrying with batch=1"],
        [f"W0211 07:59:21.880000 112 torch/_inductor/select_algorithm.py:2100] Benchmarking mm_14 failed: {OOM} Ignoring this choice."],
        [
            "E0211 07:59:21.880000 112 torch/_inductor/select_algorithm.py:2100] Runtime error during autotuning: ",
            f"E0211 07:59:21.880000 112 torch/_inductor/select_algorithm.py:2100] {OOM} ",
            "E0211 07:59:21.880000 112 torch/_inductor/select_algorithm.py:2100] Ignoring this choice.",
        ],
    ],
)  # fmt: skip
def test_an_out_of_memory_that_the_program_got_over_is_no_cause(handled: list[str]) -> None:
    """It is called a warning or passed over, and the engine serves: an end without a word is unknown, a life without an end is well, and
    the report says what was frightening.
    """
    assert verdict([*handled, READY, SERVED], code=1).cause is Cause.UNKNOWN
    assert verdict([*handled, READY, SERVED]).cause is Cause.OK_BENIGN_WARNING


@pytest.mark.parametrize(
    ("head", "fatal"),
    [
        ("(EngineCore_DP0 pid=112) W0211 07:59:21.880000 112 torch/_inductor/select_algorithm.py:2100] mm_14 failed: ", False),
        ("E0211 07:59:21.880000 112 site-packages/torch/_inductor/select_algorithm.py:2100] [0/0] ", False),
        ("[rank1]:[W803 04:00:01.300221 CUDAGuardImpl.h:119] Warning: ", False),
        ("(EngineCore_DP0 pid=112) ERROR 02-11 07:59:21 [core.py:845] torch.OutOfMemoryError: ", True),
        ("E0211 07:59:21.880000 112 torch/distributed/elastic/multiprocessing/errors.py:1] ", True),
        ("[rank1]:[E803 04:00:01.300221 ProcessGroupNCCL.cpp:1896] ", True),
        ("torch.OutOfMemoryError: ", True),
    ],
)
def test_a_warning_s_line_does_not_make_the_supervisor_end_an_engine(head: str, fatal: bool) -> None:
    """By torch's own levels too; its autotuner passes over a candidate that does not fit."""
    assert (is_fatal_line(head + OOM) is not None) is fatal


def test_a_warning_that_nothing_follows_but_the_end_is_the_cause() -> None:
    """Whoever wrote it hoped to get over it."""
    assert verdict([READY, SERVED, f"WARNING generate failed: {OOM}"], code=1).cause is Cause.CUDA_OOM_RUNTIME
    died = [READY, f"WARNING step failed: {OOM}", "(EngineCore_DP0 pid=9) ERROR [core.py:1] EngineCore encountered a fatal error.", SERVED]
    assert verdict(died, code=1).cause.label.startswith("cuda_oom")


def test_an_error_long_before_an_unexplained_end_is_a_weak_cause() -> None:
    """One request failed, others were answered for minutes; then it ended of something nobody tells."""
    failed = f"[2026-03-19 12:10:01] torch.OutOfMemoryError: {OOM}"
    answered = [f'[2026-03-19 12:{minute}:00] INFO:     10.0.0.9:1 - "POST /generate HTTP/1.1" 200 OK' for minute in (12, 13, 14)]
    health = '[2026-03-19 12:15:00] INFO:     10.0.0.9:1 - "GET /health HTTP/1.1" 200 OK'
    assert verdict([failed, *answered, health], code=1).confidence is Confidence.LOW
    assert verdict([answered[0], failed.replace("12:10", "12:12"), health], code=1).confidence is not Confidence.LOW
    at_once = verdict([answered[0], f"[2026-03-19 12:12:01] torch.OutOfMemoryError: {OOM}"], code=1)
    assert at_once.confidence is not Confidence.LOW


DROPPED = "ValueError: Request is disconnected from the client side (type 3). Abort request rid='e77a01'"
SIGQUIT = "[2025-06-18 17:20:44] Received sigquit from a child process. It usually means the child failed."


def test_a_client_that_left_ends_the_server_only_where_the_common_task_raised_it() -> None:
    """The same sentence of one request's task is everyday; of another process's failure it is the aftermath."""
    task = ["[2025-06-18 17:20:44] TokenizerManager hit an exception: Traceback (most recent call last):", '  File "t.py", line 6, in f']
    crashed = verdict([*task, DROPPED, SIGQUIT], code=1)
    assert crashed.cause is Cause.CLIENT_DISCONNECT_CRASH
    assert crashed.root is not None
    assert crashed.root.text == DROPPED
    assert verdict([DROPPED, SERVED]).cause is Cause.OK_CLIENT_DISCONNECT
    scheduler = "[2025-06-18 17:20:44] Scheduler hit an exception: Traceback (most recent call last):"
    assert verdict([scheduler, "KeyError: 7", DROPPED, SIGQUIT], code=1).cause is Cause.UNKNOWN
    assert verdict([*task, "KeyError: 7", DROPPED, SIGQUIT], code=1).cause is Cause.UNKNOWN


@pytest.mark.parametrize("signal", ["Signals.SIGTERM", "SIGTERM", "15"])
def test_torchrun_told_to_go_was_ended_from_outside(signal: str) -> None:
    """Its own words for a signal in every version of Python; not where systemd was asked for the stop."""
    told = [
        f"W1111 02:00:07.399000 1 torch/distributed/elastic/agent/server/api.py:704] Received {signal} death signal, shutting down workers",
        "W1111 02:00:07.400000 1 torch/distributed/elastic/multiprocessing/api.py:897] Sending process 44 closing signal SIGTERM",
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 1 got signal: 15",
    ]
    assert verdict(told, code=1).cause is Cause.EXTERNAL_SIGTERM
    assert verdict(told[-1:]).cause is Cause.EXTERNAL_SIGTERM
    asked = "Nov 11 02:00:07 box systemd[1]: Stopping vllm.service - vLLM..."
    assert verdict(told, code=1, systemd=asked).cause is Cause.OK_SHUTDOWN


@pytest.mark.parametrize(
    ("request_line", "cause"),
    [
        ('INFO:     10.8.0.2:1 - "GET /favicon.ico HTTP/1.1" 404 Not Found', Cause.OK_NORMAL),
        ('INFO:     10.8.0.2:1 - "GET / HTTP/1.1" 404 Not Found', Cause.OK_NORMAL),
        ('[GIN] 2026/08/30 - 10:11:02 | 404 |     812.11µs |       127.0.0.1 | GET      "/favicon.ico"', Cause.OK_NORMAL),
        ("srv  log_server_r: request: GET /favicon.ico 127.0.0.1 404", Cause.OK_NORMAL),
        ('INFO:     10.8.0.2:1 - "POST /v1/chat/completions HTTP/1.1" 404 Not Found', Cause.OK_CLIENT_ERROR),
        ('INFO:     10.8.0.2:1 - "GET /metrics HTTP/1.1" 401 Unauthorized', Cause.OK_CLIENT_ERROR),
        ('[GIN] 2026/08/30 - 10:11:02 | 404 |     812.11µs |       127.0.0.1 | POST     "/api/chat"', Cause.OK_CLIENT_ERROR),
        ("srv  log_server_r: request: POST /v1/chat/completions 127.0.0.1 404", Cause.OK_CLIENT_ERROR),
    ],
)
def test_what_a_browser_asks_for_unbidden_is_no_clients_mistake(request_line: str, cause: Cause) -> None:
    """A page that is not there is nothing to tell an owner of; a request that names a wrong model is."""
    assert verdict([READY, SERVED, request_line]).cause is cause


def test_a_health_check_that_ran_out_of_time_is_harmless_once_the_engine_answers() -> None:
    """A long prefill; without an answer after it, it is no sign of health."""
    failed = "[2026-05-06 10:20:20] Health check failed. Server couldn't get a response from detokenizer for last 20 seconds."
    found = verdict([READY, failed, SERVED])
    assert found.cause is Cause.OK_BENIGN_WARNING
    assert found.root is not None
    assert found.root.text == failed
    assert verdict([failed]).cause is Cause.UNKNOWN


def test_the_kernel_tells_of_a_stuck_task_two_minutes_late() -> None:
    """Its line stands after systemd's last word of the stop, and tells more."""
    stuck = "Jun 14 02:40:12 box kernel: INFO: task VLLM::EngineCor:6120 blocked for more than 122 seconds."
    systemd = "\n".join(
        [
            "Jun 14 02:37:31 box systemd[1]: vllm.service: State 'stop-sigterm' timed out. Killing.",
            "Jun 14 02:39:01 box systemd[1]: vllm.service: Processes still around after SIGKILL. Ignoring.",
        ]
    )
    found = verdict([], kernel=stuck, systemd=systemd)
    assert found.cause is Cause.GPU_UNKILLABLE_PROCESS
    assert found.root is not None
    assert "blocked for more than" in found.root.text


@pytest.mark.parametrize(
    "text",
    [
        "OSError: Can't load the configuration of '/models/m'. If you were trying to load it from 'https://huggingface.co/models', make",
        "OSError: Can't load feature extractor for '/models/m'. If you were trying to load it from 'https://huggingface.co/models', make",
        "OSError: Can't load config for 'm'. Make sure that:",
    ],
)
def test_a_model_that_nothing_loads_of_is_missing(text: str) -> None:
    """transformers' last word, of every part of a model; a deeper reason that stands above it is the cause."""
    assert verdict([text], code=1).cause is Cause.MODEL_MISSING
    offline = "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an appropriate cached snapshot folder"
    assert verdict([offline, text], code=1).cause is Cause.HF_DOWNLOAD


@pytest.mark.parametrize(
    "line",
    [
        "[torch_memory_saver.cpp] cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue e.g. torch allocator will retry)",
        "[rank0]:[W905 08:25:49.09 ProcessGroupNCCL.cpp:1300] Warning: NCCL error: unhandled system error, retrying (function operator())",
        "[W905 08:25:49.09 CublasHandlePool.cpp:330] Warning: CUBLAS_STATUS_ALLOC_FAILED for a workspace; falling back to the default",
        "(APIServer pid=1) WARNING 09-05 08:25:41 [x.py:1] TimeoutError: RPC call to add_lora timed out, it is asked again",
    ],
)
def test_a_fault_that_the_line_itself_plays_down_is_none_while_the_engine_goes_on(line: str) -> None:
    """And is one as soon as it ends of it."""
    assert verdict([READY, SERVED, line, SERVED, SERVED]).cause is Cause.OK_BENIGN_WARNING
    ended = verdict(
        [READY, SERVED, line, "(EngineCore_DP0 pid=7) ERROR 09-05 08:25:41 [core.py:720] EngineCore encountered a fatal error."], code=1
    )
    assert ended.crashed


@pytest.mark.parametrize(
    "line", ["Lower max_num_seqs if you run into CUDA out of memory errors.", "A small value may cause CUDA out of memory."]
)
def test_advice_for_the_case_that_memory_runs_out_is_no_refusal(line: str) -> None:
    """Whatever the engine ended of."""
    taken = "ERROR:    [Errno 98] error while attempting to bind on address ('0.0.0.0', 8000): address already in use"
    assert verdict([line, taken], code=1).cause is Cause.PORT_IN_USE


def test_a_fault_that_the_engine_outlived_without_an_end_is_not_certain() -> None:
    """It answers minutes later, and nothing says that it ended."""
    fault = "(EngineCore_DP0 pid=7) ERROR 09-05 08:25:41 [core.py:720] CUDA error: an illegal memory access was encountered"
    later = "(APIServer pid=1) INFO 09-05 08:36:01 [loggers.py:259] Engine 000: Avg prompt throughput: 21.2 tokens/s, Running: 1 reqs"
    assert verdict([READY, SERVED, fault]).confidence is Confidence.HIGH
    assert verdict([READY, SERVED, fault, later]).confidence is Confidence.LOW


def test_what_a_request_asked_for_and_is_not_there_is_that_requests_trouble() -> None:
    """An adapter, of an engine that goes on; at a start it is the start's."""
    absent = "ERROR 09-05 16:03:47 [serving_models.py:190] FileNotFoundError: /models/loras/x/adapter_model.safetensors"
    assert verdict([READY, SERVED, absent, SERVED]).cause is Cause.OK_CLIENT_ERROR
    assert verdict([absent], code=1).cause is Cause.MODEL_MISSING
    assert verdict([READY, SERVED, absent], code=1).cause is Cause.MODEL_MISSING
