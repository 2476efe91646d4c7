"""What a client writes is not what the engine says."""

# ruff: noqa: E501 (lines are quoted as engines print them)

from __future__ import annotations

import pytest

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose, is_fatal_line
from appliance.diagnosis.own_words import before_body, own_words

SPOOFS = [
    'INFO:     10.0.0.1:5 - "GET /EngineDeadError HTTP/1.1" 404 Not Found',
    '[2026-08-16 10:00:00] INFO:     127.0.0.1:40001 - "POST /SIGSEGV: segmentation violation HTTP/1.1" 400 Bad Request',
    "srv  log_server_r: request: GET /EngineDeadError 127.0.0.1 404",
    '[GIN] 2026/08/30 - 10:11:02 | 404 |     812.11\u00b5s |       127.0.0.1 | GET      "/llama runner process has terminated: signal: killed"',
    "INFO 07-16 12:08:18 logger.py:37] Received request cmpl-8f1f: prompt: 'Fatal Python error: Segmentation fault', params: SamplingParams(n=1)",
    "[2026-08-16 10:00:00] Receive: obj=GenerateReqInput(rid='a', text='CUDA error: an illegal memory access was encountered')",
    "[2026-08-16 10:00:00] Finish: obj=GenerateReqInput(rid='a', text='Scheduler hit an exception'), out={'text': 'EngineDeadError'}",
    "INFO 09-05 16:03:47 [logger.py:60] Generated response chatcmpl-88b9d (streaming complete): output: 'Segmentation fault', output_token_ids: None",
    'time=2026-02-05T12:46:02.118+01:00 level=DEBUG source=routes.go:1517 msg="chat request" images=0 prompt="<|user|>why Segmentation fault?"',
    'Parsed message: {"role":"assistant","content":"CUDA error: an illegal memory access was encountered"}',
    "admin : TTY=pts/1 ; PWD=/opt/llm ; USER=root ; COMMAND=/usr/bin/tail -f /var/log/CUDA error: out of memory",
    "(root) CMD (grep -q 'CUDA error: an illegal memory access was encountered' /var/log/vllm.log)",
    "$ grep -c 'Fatal Python error: Segmentation fault' old.log",
    '(APIServer pid=1) ERROR 07-16 12:08:18 [serving.py:90] request body: {"messages": [{"content": "EngineCore encountered a fatal error"}]}',
]


@pytest.mark.parametrize("line", SPOOFS)
def test_a_clients_words_are_no_evidence(line: str) -> None:
    """Neither fatal for the supervisor nor a crash for `diagnose`."""
    assert is_fatal_line(line) is None
    healthy = Evidence(Source.ENGINE_LOG, "INFO:     Application startup complete.")
    assert not diagnose([healthy, Evidence(Source.ENGINE_LOG, line)]).crashed


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB.",
        'INFO:     127.0.0.1:40140 - "POST ... HTTP/1.1" 500 Internal Server Error',
        "INFO 08-16 [loggers.py:259] Engine 000: Avg prompt throughput: 3921.2 tokens/s, Running: 1 reqs",
        "ValueError: Request is disconnected from the client side (type 1). Abort request obj.rid='f2ea4cfe'",
        "slot update_slots: id  0 | task 12 | prompt processing progress, n_past = 2048",
    ],
)
def test_the_engines_words_stay(line: str) -> None:
    """Nothing is taken out of a line that no client wrote."""
    assert own_words(line) == line


@pytest.mark.parametrize(
    "line",
    [
        "jinja2.exceptions.TemplateError: Unknown role: RuntimeError: CUDA error: an illegal memory access was encountered",
        "ERROR 07-16 12:08:18 [serving.py:90] jinja2.exceptions.UndefinedError: 'torch.OutOfMemoryError: CUDA out of memory.' is undefined",
        "  Input should be 'user' [type=literal_error, input_value='Fatal Python error: Segmentation fault', input_type=str]",
        "{'type': 'string_type', 'loc': ('body', 'role'), 'input': 'CUDA error: an illegal memory access was encountered'}",
    ],
)
def test_a_refusal_that_quotes_its_client_ends_no_engine(line: str) -> None:
    """What a template raises over a role, and what is wrong with a field: anybody may call their role a CUDA error."""
    assert is_fatal_line(line) is None


def test_the_status_of_a_request_stays() -> None:
    """Only the path goes."""
    assert own_words('INFO:     10.0.0.1:5 - "GET /x HTTP/1.1" 404 Not Found') == 'INFO:     10.0.0.1:5 - "GET ... HTTP/1.1" 404 Not Found'


def test_a_quoted_raise_is_not_the_sentence() -> None:
    """A traceback quotes the statement with its placeholders; the root is the sentence that it built."""
    lines = [
        '(VllmWorkerProcess pid=760) ERROR 07-24 08:26:01 multiproc_worker_utils.py:226]     raise RuntimeError(f"NCCL error: {error_str}")',
        "(VllmWorkerProcess pid=760) ERROR 07-24 08:26:01 multiproc_worker_utils.py:226] RuntimeError: NCCL error: unhandled cuda error",
    ]
    verdict = diagnose([Evidence(Source.ENGINE_LOG, line, line=number) for number, line in enumerate(lines, 1)])
    assert verdict.root is not None and verdict.root.line == 2


@pytest.mark.parametrize("line", SPOOFS)
def test_the_quick_cut_takes_out_no_more(line: str) -> None:
    """What the scan of long logs cuts off, the patterns would not see either."""
    kept = before_body(line.encode()).decode()
    assert own_words(kept) == own_words(line)
