"""Bundles leave the box without secrets."""

from __future__ import annotations

import time

import pytest

from appliance.diagnosis.redact import Redactor, redact


@pytest.mark.parametrize(
    ("line", "secret", "kept"),
    [
        ("HF_TOKEN=hf_AbCdEfGhIjKlMnOpQrSt python -m x", "hf_AbCdEfGhIjKlMnOpQrSt", "python -m x"),
        ("openai key sk-proj-1234567890abcdefABCDEF used", "sk-proj-1234567890abcdefABCDEF", "used"),
        ("Authorization: Bearer abc.def-ghi123 200 OK", "abc.def-ghi123", "200 OK"),
        ("server_args=ServerArgs(api_key='topsecret99', port=30000)", "topsecret99", "port=30000"),
        ("--api-key topsecret99 --port 8000", "topsecret99", "--port 8000"),
        ("password: hunter2hunter2 next", "hunter2hunter2", "next"),
        ("postgres://app:s3cr3tpw@db/x", "s3cr3tpw", "@db/x"),
        (
            "Received request cmpl-1: prompt: 'My name is Ann and I have...', params: SamplingParams(n=1)",
            "My name is Ann",
            "SamplingParams(n=1)",
        ),
        ('obj=GenerateReqInput(rid=\'a\', text="tell me \\"all\\" of it", stream=True)', "tell me", "stream=True"),
        ('{"role": "user", "content": "it is private"}', "it is private", '"role": "user"'),
        ("prompt_token_ids: [1, 22, 333, 4444], lora_request: None", "22, 333", "lora_request: None"),
        ('  File "/home/annette/venv/lib/x.py", line 7, in load', "annette", 'venv/lib/x.py", line 7, in load'),
        ("_SYSTEMD_OWNER username=annette uid=1000", "annette", "uid=1000"),
        ("mail from ann.ette@example.org now", "ann.ette@example.org", "now"),
        ("Aug 27 14:03:48 gpubox7 kernel: NVRM: Xid (PCI:0000:01:00): 79", "gpubox7", "NVRM: Xid (PCI:0000:01:00): 79"),
        ("2026-08-27T14:03:48+02:00 gpubox7 vllm[5]: ready", "gpubox7", "vllm[5]: ready"),
        ('INFO:     10.11.12.13:40112 - "POST /v1/chat/completions HTTP/1.1" 200 OK', "10.11.12.13", ':40112 - "POST /v1'),
        ("peer 2001:db8:85a3:0:0:8a2e:370:7334 closed", "2001:db8:85a3:0:0:8a2e:370:7334", "closed"),
        ("link/ether 52:54:00:12:34:56 up", "52:54:00:12:34:56", "up"),
        ("GPU at PCI:0000:01:00: GPU-12345678-1234-1234-1234-123456789abc", "GPU-12345678-1234-1234-1234-123456789abc", "PCI:0000:01:00"),
    ],
)
def test_a_secret_goes_and_the_rest_stays(line: str, secret: str, kept: str) -> None:
    """Tokens, keys, prompts, users, hosts, addresses, serial numbers."""
    clean, report = redact(line)
    assert secret not in clean
    assert kept in clean
    assert sum(item.count for item in report) >= 1


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 23.56 GiB",
        "[2026-08-16 09:41:20 TP0] Decode batch, #running-req: 1, #token: 1210, token usage: 0.01, gen throughput (token/s): 44.10",
        "INFO:     Uvicorn running on http://127.0.0.1:8000 (Press CTRL+C to quit)",
        "NVRM: Xid (PCI:0000:06:00): 79, GPU has fallen off the bus.",
        "max_total_num_tokens=105256, chunked_prefill_size=4096, context_len=102400",
        "Avg prompt throughput: 3921.2 tokens/s, Avg generation throughput: 0.0 tokens/s",
        "ggml-cuda.cu:132: CUDA error",
        "CUDA version 12.4.5.8 driver 550.90.07",
    ],
)
def test_what_a_diagnosis_needs_is_left_alone(line: str) -> None:
    """Numbers, times, loopback addresses and PCI ids are no secrets."""
    clean, _report = redact(line)
    assert clean.replace("<ip-1>", "12.4.5.8") == line


def test_a_prompt_that_the_line_cuts_off_goes_to_its_end() -> None:
    """A list of messages whose end was not written is as secret as one that has an end; the next line stays."""
    said, _ = redact("messages=[{'role': 'user', 'content': 'my secret\nINFO ready")
    assert "secret" not in said
    assert said.endswith("\nINFO ready")


def test_equal_secrets_get_equal_names_over_a_whole_bundle() -> None:
    """So that a line of the gateway and one of the engine can still be matched."""
    bundle = Redactor()
    first = bundle.redact("10.1.2.3 connected, then 10.9.9.9")
    second = bundle.redact("10.9.9.9 left")
    assert first == "<ip-1> connected, then <ip-2>"
    assert second == "<ip-2> left"
    (report,) = bundle.report()
    assert (report.kind, report.count, report.distinct) == ("ip", 3, 2)


def test_redacting_twice_changes_nothing() -> None:
    """Placeholders are not secrets."""
    clean, _report = redact("host=gpubox7 10.1.2.3 api_key=abcdef123456 /home/ann/x")
    assert redact(clean)[0] == clean


@pytest.mark.parametrize("run", ["-", "a-", "sk-", "token", "a.", "a@", "a-b.", "eyJAAAAAAAAAA-", "prompt: ['", "://a:", "ab:"])
def test_a_long_line_takes_time_with_its_length_and_not_with_its_square(run: str) -> None:
    """A table's rule of thirty thousand dashes took sixteen seconds: eight times the text may take thirty times as long, not sixty-four."""

    def took_s(length: int) -> float:
        text = run * (length // len(run))
        found = []
        for _ in range(3):
            began_s = time.process_time()
            redact(text)
            found.append(time.process_time() - began_s)
        return min(found)

    assert took_s(32_000) < 30 * max(took_s(4_000), 1e-3)
