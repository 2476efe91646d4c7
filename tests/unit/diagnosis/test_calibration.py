"""How sure a verdict may be, and what one request's trouble is."""

from __future__ import annotations

import pytest

from appliance.core.causes import Cause
from appliance.core.diagnosis import Confidence
from appliance.core.evidence import Source
from appliance.diagnosis import diagnose, exit_evidence, read_evidence, report
from tests.unit.diagnosis.corpus_cases import CORPUS, load
from tests.unit.diagnosis.damages import Judged, judge

WORKED = load(CORPUS)

SERVED = "[2026-09-09 17:40:01 TP0] Prefill batch, #new-seq: 1, #new-token: 8192, #cached-token: 0, token usage: 0.91\n"
CUT = SERVED + (
    "[2026-09-09 17:40:06 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    '  File "/opt/sgl/lib/python3.12/site-packages/sglang/srt/managers/scheduler.py", line 4940, in run_scheduler_process\n'
)


@pytest.mark.parametrize("word", ["SIGKILL", "SIGSEGV", "137", "-11", "143"])
def test_an_exit_code_alone_is_never_certain(word: str) -> None:
    """It tells how the process ended, not why."""
    assert diagnose([exit_evidence(word)]).confidence is not Confidence.HIGH


def test_a_worker_that_is_gone_without_a_word_is_no_certain_segfault() -> None:
    """The line says that it died, not of what."""
    died = "ERROR 07-17 18:34:44 [multiproc_executor.py:284] Worker proc VllmWorker-0 died unexpectedly, shutting down executor."
    found = diagnose(read_evidence(died, Source.ENGINE_LOG))
    assert (found.cause, found.confidence) == (Cause.SEGFAULT_NATIVE, Confidence.MEDIUM)


def test_a_log_cut_inside_a_traceback_is_no_killing_by_nobody() -> None:
    """Parents kill their own tree after a child's exception; which exception it was is cut off."""
    found = diagnose([*read_evidence(CUT, Source.ENGINE_LOG), exit_evidence("137")])
    assert (found.cause, found.confidence) == (Cause.UNKNOWN, Confidence.LOW)
    healthy = [*read_evidence(CUT + SERVED, Source.ENGINE_LOG), exit_evidence("137")]
    assert (diagnose(healthy).cause, diagnose(healthy).confidence) == (Cause.KILLED_UNKNOWN, Confidence.LOW)
    kernel = read_evidence("[ 7460.48] usb 1-2: new high-speed USB device number 4 using xhci_hcd", Source.KERNEL_LOG)
    assert diagnose([*healthy, *kernel]).confidence is Confidence.MEDIUM


@pytest.mark.parametrize(
    "line",
    [
        'msg="error loading llama server" error="timed out waiting for llama runner to start - progress 1.00 - "',
        "timed out waiting for llama-server to start",
    ],
)
def test_a_loader_that_gave_up_waiting_says_so_and_no_more(line: str) -> None:
    """ollama's own deadline."""
    found = diagnose(read_evidence(line, Source.ENGINE_LOG))
    assert (found.cause, found.confidence) == (Cause.START_TIMEOUT, Confidence.LOW)


def test_most_right_verdicts_on_whole_evidence_are_sure_ones() -> None:
    """Doubt is not bought by doubting everything."""
    right = [item for item in judge(WORKED, "whole") if item.right]
    assert sum(item.confidence is not Confidence.LOW for item in right) >= 0.9 * len(right)
    assert sum(item.confidence is Confidence.HIGH for item in right) >= 0.6 * len(right)


def shares(wrong: list[Judged]) -> tuple[float, float]:
    """Of wrong verdicts: how many are high, and how many are not low."""
    assert len(wrong) >= 10
    high = sum(item.confidence is Confidence.HIGH for item in wrong)
    return high / len(wrong), sum(item.confidence is not Confidence.LOW for item in wrong) / len(wrong)


def test_what_a_cut_log_cannot_tell_is_said_with_doubt() -> None:
    """The line that tells is cut off: of what is said instead and is wrong, most is low."""
    cases = [*WORKED, *load(CORPUS / "variants"), *load(CORPUS / "exam")]
    high, sure = shares([item for item in judge(cases, "cut-before-root") if item.wrong])
    assert (high <= 0.1, sure <= 0.35) == (True, True), (high, sure)


def test_what_nobody_wrote_a_pattern_for_is_said_with_doubt() -> None:
    """The line that tells is there in words that are not known."""
    cases = [*WORKED, *load(CORPUS / "exam")][::2]
    high, sure = shares([item for item in judge(cases, "unknown-wording") if item.wrong])
    assert (high <= 0.15, sure <= 0.5) == (True, True), (high, sure)


@pytest.mark.parametrize("name", ["whole", "cut-before-root"])
def test_doubts_are_said_wherever_the_confidence_is_not_high(name: str) -> None:
    """Each in words, in the report too."""
    for item in judge(WORKED, name):
        if item.verdict.cause is not Cause.UNKNOWN:
            assert bool(item.verdict.doubts) is (item.confidence is not Confidence.HIGH)
            assert all(doubt in report.text(item.verdict) for doubt in item.verdict.doubts)
            assert report.to_json_dict(item.verdict)["doubts"] == list(item.verdict.doubts)


REFUSED = [
    "srv    send_error: task id = 311, error: request (140211 tokens) exceeds the available context size (131072 tokens)",
    "srv    send_error: task id = 311, error: input (9000 tokens) is too large to process. increase the physical batch size",
    'srv    operator(): got exception: {"code":400,"message":"Unsupported param: tools","type":"invalid_request_error"}',
    "srv  log_server_r: done request: POST /v1/chat/completions 10.0.0.2 400",
    "srv  log_server_r: request: POST /v1/chat/completions 10.0.0.2 404",
    '[GIN] 2026/08/30 - 10:11:02 | 400 |     812.11µs |       127.0.0.1 | POST     "/api/generate"',
    '[GIN] 2026/08/30 - 10:11:02 | 401 |     812.11µs |       127.0.0.1 | POST     "/api/generate"',
    'INFO:     10.0.0.2:33110 - "POST /v1/chat/completions HTTP/1.1" 401 Unauthorized',
    "ERROR chat_completions: text_generation_router::infer: Tool error: Invalid tool choice",
    "[2026-08-16 09:41:40] [http_server] Error: max_new_tokens must be at least 0, got -1.",
    "[2026-08-16 09:41:40 TP0] Hit invalid json_schema: key_string='{', e=RuntimeError('x')",
]


@pytest.mark.parametrize("line", REFUSED)
def test_a_refused_request_is_its_client_s(line: str) -> None:
    """The engine goes on."""
    served = 'INFO:     10.0.0.2:33110 - "POST /v1/completions HTTP/1.1" 200 OK'
    assert diagnose(read_evidence(f"{line}\n{served}", Source.ENGINE_LOG)).cause is Cause.OK_CLIENT_ERROR


def test_a_failed_computation_is_not_the_client_s() -> None:
    """llama-server answers 500 for it in the same words."""
    line = "srv    send_error: task id = 311, error: Compute error."
    assert diagnose(read_evidence(line, Source.ENGINE_LOG)).cause is not Cause.OK_CLIENT_ERROR


def test_a_template_that_fails_a_request_is_no_crash_while_others_are_served() -> None:
    """And is the template's fault where nothing was served after it."""
    ready, served = "INFO:     Application startup complete.\n", 'INFO:     10.0.0.2:1 - "POST /v1/completions HTTP/1.1" 200 OK\n'
    error = "ERROR 11-11 21:14:55 serving_chat.py:158] jinja2.exceptions.TemplateSyntaxError: expected token 'x', got 'name'\n"
    assert diagnose(read_evidence(ready + error + served, Source.ENGINE_LOG)).cause is Cause.OK_CLIENT_ERROR
    assert diagnose(read_evidence(ready + error, Source.ENGINE_LOG)).cause is Cause.TEMPLATE_ERROR
    assert diagnose(read_evidence(error, Source.ENGINE_LOG)).cause is Cause.TEMPLATE_ERROR


OLLAMA = """time=2026-08-30T10:12:00.100+02:00 level=INFO source=llama_server.go:433 msg="starting llama-server" cmd="llama-server --port 1"
time=2026-08-30T10:12:01.100+02:00 level=INFO source=llama_server.go:1295 msg="waiting for llama-server to start responding"
"""


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ('level=ERROR msg="error loading llama server" error="timed out waiting for llama-server to start - "', Cause.START_TIMEOUT),
        (
            'level=WARN msg="client connection closed before llama-server finished loading, aborting load"\n'
            'level=INFO msg="Load failed" error="timed out waiting for llama-server to start: context canceled"',
            Cause.OK_CLIENT_DISCONNECT,
        ),
        ('level=INFO msg="Load failed" error="llama-server process has terminated: signal: killed"', Cause.KILLED_UNKNOWN),
        ('level=INFO msg="Load failed" error="llama-server process has terminated: exit status 1"', Cause.UNKNOWN),
        ('level=ERROR msg="llama-server terminated" error="signal: segmentation fault (core dumped)"', Cause.SEGFAULT_NATIVE),
        (
            'level=INFO msg="Load failed" error="llama-server process has terminated: cudaMalloc failed: out of memory"',
            Cause.CUDA_OOM_STARTUP,
        ),
    ],
)
def test_ollama_around_llama_server(line: str, cause: Cause) -> None:
    """It calls its child by that name since 2026."""
    assert diagnose(read_evidence(OLLAMA + line, Source.ENGINE_LOG)).cause is cause


@pytest.mark.parametrize(
    ("line", "smi", "other"),
    [
        ("RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`", "", "where memory ran out"),
        ("OSError: [Errno 28] No space left on device", "", "names no place"),
        (
            "ValueError: Free memory on device (22.90/23.56 GiB) on startup is less than desired GPU memory utilization (0.99, 23.32 GiB).",
            "",
            "more may have been asked for",
        ),
    ],
)  # fmt: skip
def test_a_line_that_others_would_print_too_is_not_certain(line: str, smi: str, other: str) -> None:
    """The other account is named."""
    found = diagnose([*read_evidence(line, Source.ENGINE_LOG), exit_evidence("1")])
    assert found.confidence is Confidence.MEDIUM
    assert any(other in doubt for doubt in found.doubts)


def test_a_lost_card_that_nvidia_smi_shows_at_work_is_not_certainly_lost() -> None:
    """What was read may be old, or it came back."""
    lost = "[  120.5] NVRM: Xid (PCI:0000:0a:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    rows = (
        "|   0  NVIDIA GeForce RTX 3090        On  |   00000000:{card}:00.0 Off |                  N/A |\n"
        "| 34%   55C    P2            241W /  280W |   23312MiB /  24576MiB |     97%      Default |\n"
    )
    for card, confidence in (("0A", Confidence.MEDIUM), ("41", Confidence.HIGH)):
        evidence = [*read_evidence(lost, Source.KERNEL_LOG), *read_evidence(rows.format(card=card), Source.NVIDIA_SMI)]
        assert (diagnose(evidence).cause, diagnose(evidence).confidence) == (Cause.GPU_OFF_BUS, confidence)
