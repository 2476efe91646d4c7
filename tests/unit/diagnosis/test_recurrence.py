"""The same crash is recognised, and what crashes share is seen early."""

from __future__ import annotations

import random

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose
from appliance.diagnosis.recurrence import Features, patterns, signature

TRACE = (
    "[2026-08-16 09:41:40 TP0] Scheduler hit an exception: Traceback (most recent call last):",
    '  File "/opt/sglang/srt/layers/attention/flashinfer_backend.py", line {line}, in forward_extend',
    "torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
)


def crash(line: int = 700, address: str = "0xd_2892f000") -> list[Evidence]:
    """One crash; line numbers, times and addresses differ from crash to crash."""
    log = [Evidence(Source.ENGINE_LOG, text.format(line=line), 1e9 + line) for text in TRACE]
    return [*log, Evidence(Source.KERNEL_LOG, f"NVRM: Xid (PCI:0000:01:00): 31, pid={line}, name=python3, faulted @ {address}", 1e9 + line)]


def test_two_crashes_of_one_kind_have_one_signature() -> None:
    """Whatever their times, pids, line numbers and addresses are."""
    one, two = crash(), crash(811, "0xee7a_a0203000")
    assert signature(diagnose(one), one) == signature(diagnose(two), two)


def test_other_kinds_have_other_signatures() -> None:
    """Another cause, or another place in the code."""
    log = [Evidence(Source.ENGINE_LOG, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB.")]
    other = [Evidence(Source.ENGINE_LOG, TRACE[1].format(line=1).replace("forward_extend", "draft")), Evidence(Source.ENGINE_LOG, TRACE[2])]
    same = [Evidence(Source.ENGINE_LOG, TRACE[1].format(line=1)), Evidence(Source.ENGINE_LOG, TRACE[2])]
    found = [signature(diagnose(evidence), evidence) for evidence in (log, other, same, crash())]
    assert len({item.value for item in found if item}) == 4


def test_nothing_sure_has_no_signature() -> None:
    """Two unknown crashes are not the same crash."""
    assert signature(diagnose([]), []) is None


def healthy(count: int) -> list[Features]:
    """Ordinary traffic."""
    dice = random.Random(3)
    return [{"prompt_tokens": dice.randint(1, 4000), "batch": dice.randint(1, 40), "gpu": dice.choice("ab")} for _request in range(count)]


def test_a_length_and_batch_that_only_crashes_have_are_seen_at_the_third_crash() -> None:
    """127 tokens and batch 37, among a thousand healthy requests."""
    found = patterns([{"prompt_tokens": 127, "batch": 37, "gpu": "a"}] * 3, healthy(1000))
    assert {("prompt_tokens", "= 127"), ("batch", "= 37")} <= {(item.feature, item.value) for item in found}
    assert not [item for item in found if item.feature == "gpu"], "half of all requests run on card a: no pattern"
    assert "3 of 3 crashes had prompt_tokens = 127" in found[0].sentence() + found[1].sentence()
    assert all(item.lift > 10 for item in found if item.value.startswith("="))


def test_a_range_is_seen_where_no_value_repeats() -> None:
    """Only long prompts crash."""
    crashes: list[Features] = [{"prompt_tokens": length} for length in (3990, 3995, 3999, 4100)]
    assert (patterns(crashes, healthy(1000))[0].feature, patterns(crashes, healthy(1000))[0].value) == ("prompt_tokens", ">= 3990")


def test_two_crashes_or_chance_make_no_pattern() -> None:
    """Too few, nothing to compare with, or as common in healthy traffic."""
    assert patterns([{"batch": 37}] * 2, healthy(1000)) == ()
    assert patterns([{"batch": 37}] * 3, []) == ()
    assert patterns([{"gpu": "a"}] * 3, healthy(1000)) == ()
