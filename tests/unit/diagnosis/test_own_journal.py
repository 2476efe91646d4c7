"""`journalctl -u llm-appliance | appliancectl diagnose -`: our own supervisor's sentences stand between the engine's lines."""

# ruff: noqa: E501 (lines are quoted as the journal prints them)

from __future__ import annotations

import pytest

from appliance.core.causes import Cause
from appliance.core.diagnosis import Role
from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose
from appliance.diagnosis.own_words import own_words
from appliance.diagnosis.reading.intake import read_evidence

NOW_S = 1_796_000_000.0
WHO = "Nov 30 09:46:{second:02} appliance applianced[174]: "
LIFE = """\
[2026-11-30 09:46:32] INFO Listening on unix:/run/llm-appliance/engine-1.sock.
[2026-11-30 09:46:35] INFO Load weight begin. model=/var/lib/llm-appliance/models/demo
[2026-11-30 09:46:35] INFO The engine is ready. model=demo context_length_tokens=8192 max_running=8 kv_tokens=11632 elapsed=3.12 s
serving demo on rung 0 (generation 1) generation=1
[2026-11-30 09:46:36] INFO Decode batch. tokens=2 tokens_per_s=2.0 preemptions=0 running=0 waiting=0 kv_blocks=0/727
""".splitlines()
KILLED = [
    "the engine failed: the engine was killed by SIGKILL generation=1",
    "ending the engine how=now generation=1 reason=its leader is gone",
    "The engine was killed (SIGKILL) and no record says by whom: neither the OOM killer, nor systemd, nor we. cause=killed_unknown confidence=medium took_s=0.01",
    "restarted on rung 0 because the engine was killed (SIGKILL) and no record says by whom: neither the OOM killer, nor systemd, nor we (evidence exit: 'killed by SIGKILL') generation=1",
]
SEGFAULT = [
    "Fatal Python error: Segmentation fault",
    "the engine failed: Fatal Python error: Segmentation fault generation=1",
    "Native code crashed (segmentation fault); no GPU fault stands before it. cause=segfault_native confidence=high took_s=0.01",
    "restarted on rung 0 because Native code crashed (segmentation fault); no GPU fault stands before it (evidence engine_log line 7: 'Fatal Python error: Segmentation fault') generation=1",
]


def _journal(*lines: str) -> list[Evidence]:
    """As journalctl prints them, a second a line."""
    text = "\n".join(WHO.format(second=30 + number) + line for number, line in enumerate(lines))
    return read_evidence(text, now_s=NOW_S)


@pytest.mark.parametrize("after", [[], LIFE], ids=["still away", "back again"])
def test_a_kill_that_applianced_saw_is_no_good_health(after: list[str]) -> None:
    """Nothing else says it: an engine that is killed prints nothing."""
    verdict = diagnose(_journal(*LIFE, *KILLED, *after))
    assert verdict.cause is Cause.KILLED_UNKNOWN
    assert verdict.root is not None
    assert verdict.root.text.startswith("the engine failed: the engine was killed by SIGKILL")


def test_a_sentence_that_quotes_the_evidence_is_not_evidence_once_more() -> None:
    """The root is where it happened; the verdict and the reason for the next start are no second crash, however late they come."""
    verdict = diagnose(_journal(*LIFE, *SEGFAULT, *LIFE[:2], SEGFAULT[3], *LIFE[2:]))
    assert verdict.cause is Cause.SEGFAULT_NATIVE
    assert verdict.root is not None
    assert verdict.root.text == "Fatal Python error: Segmentation fault"
    assert not [link for link in verdict.chain if "evidence" in link.citation.text or "confidence=" in link.citation.text]


@pytest.mark.parametrize("line", [KILLED[2], KILLED[3], SEGFAULT[2], SEGFAULT[3]])
def test_what_was_done_is_left_of_such_a_sentence(line: str) -> None:
    """And the verdict's label; the quotation goes."""
    assert "Segmentation" not in own_words(line)
    assert "segmentation" not in own_words(line)
    assert own_words(line).startswith(("restarted on rung 0 because", "... cause="))


def test_the_chain_is_told_in_the_order_of_the_clocks() -> None:
    """Files are read one after the other: what the kernel said first stands first, and what was over long before follows from nothing here."""
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 48.00 MiB. GPU 0 has a total capacity of 23.56 GiB of which 5.19 MiB is free."
    told = [
        Evidence(Source.SYSTEMD, "sglang.service: Main process exited, code=exited, status=1/FAILURE", NOW_S - 180, 1),
        Evidence(Source.ENGINE_LOG, oom, NOW_S, 2),
        Evidence(Source.ENGINE_LOG, "resource_tracker: There appear to be 1 leaked shared_memory objects to clean up", NOW_S + 4, 4),
        Evidence(Source.ENGINE_LOG, "SIGQUIT received. signum=None, frame=None. It usually means one child failed.", NOW_S + 2, 3),
    ]
    verdict = diagnose(told)
    assert verdict.root is not None and verdict.root.text == oom
    times = [link.citation.time_s for link in verdict.chain[1:] if link.citation.time_s is not None]
    assert times == sorted(times)
    early = [link for link in verdict.chain if link.role is Role.CONSEQUENCE and (link.citation.time_s or NOW_S) < NOW_S - 60]
    assert early == []
