"""What good starts and proof runs teach the next plan."""

import json
from dataclasses import replace

import pytest

from appliance.control.codec import from_json, to_json
from appliance.core.units import GIB, MIB
from appliance.planner.calibration import PROOFS_KEPT, Calibration, Proof, Setting, best_of, calibrated
from appliance.planner.inputs import Measured
from appliance.planner.proof import ProofReading, judge
from appliance.planner.ways_out import plan
from tests.unit.planner import shapes

HYBRID = shapes.facts(shapes.hybrid_27b())
DENSE = shapes.facts(shapes.dense())
MEASURED = Measured(23 * GIB, 17 * GIB, GIB, 512 * MIB, 700 * MIB, 3 * GIB, source="the start of 2026-11-30 07:00")
SETTING = Setting(2048, 3, 102_400)


def proof(setting: Setting = SETTING, peak_bytes: int | None = 700 * MIB, *, holds: bool = True) -> Proof:
    """One run."""
    return Proof(setting, setting.context_length_tokens - 1, peak_bytes, GIB, holds, "as it was judged", 1.0)


def known(engine: str = "sglang", **changes: object) -> Calibration:
    """Of a start with SETTING."""
    base = Calibration("GPU-1", engine, "0.5.17", "m", measured=MEASURED, setting=SETTING, proofs=(proof(),), time_s=1.0)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_a_calibration_survives_as_json() -> None:
    """As applianced keeps it and appliancectl reads it."""
    one = known(setting=replace(SETTING, features_off=frozenset({"cuda_graph"})))
    assert from_json(Calibration, json.loads(json.dumps(to_json(one)))) == one


def test_another_card_version_model_or_count_has_terms_of_its_own() -> None:
    """The key names all of them."""
    base = Calibration("GPU-1", "sglang", "0.5.17", "m")
    others = [
        replace(base, gpu="GPU-2"), replace(base, engine="vllm"), replace(base, engine_version="0.5.23"), replace(base, model="n"),
        replace(base, tensor_parallel=2),
    ]  # fmt: skip
    assert len({one.key for one in (base, *others)}) == 6


def test_the_next_plan_uses_what_was_measured_except_the_pool() -> None:
    """The pool is what the next plan is to choose; what a person gave stays."""
    asked = shapes.inputs(HYBRID, "rtx3090", "sglang", kv_dtype="fp8_e4m3", max_running=3, measured={"weight": 17.67})
    after = calibrated(asked, known())
    assert after.measured.weight_bytes == round(17.67 * GIB)
    assert after.measured.free_at_start_bytes == 23 * GIB
    assert after.measured.fixed_bytes == 512 * MIB
    assert after.measured.kv_pool_bytes is None
    chain = plan(after).plan
    sources = {term.name: term.source for term in chain.terms}
    assert sources["free at start"] == sources["prefill peak"] == MEASURED.source
    assert chain.activation_peak_bytes == 700 * MIB


@pytest.mark.parametrize(("chunk", "peak_mib"), [(2048, 700), (1024, 413), (4096, 1252)])
def test_a_measured_peak_is_carried_over_to_another_chunk_by_the_formula(chunk: int, peak_mib: int) -> None:
    """Measured × worked out for the new chunk ÷ worked out for the measured one."""
    asked = shapes.inputs(HYBRID, "rtx3090", "sglang", kv_dtype="fp8_e4m3", max_running=3, prefill_chunk_tokens=chunk)
    peak = calibrated(asked, known()).measured.activation_peak_bytes
    assert peak == pytest.approx(peak_mib * MIB, rel=0.02)


def test_what_belongs_to_another_setting_is_worked_out_again() -> None:
    """Graphs and linear state of three sequences say nothing of eight; a drafter's weights are not those of a plan without it."""
    eight = calibrated(shapes.inputs(HYBRID, "rtx3090", "sglang", max_running=8), known()).measured
    assert (eight.fixed_bytes, eight.linear_state_bytes) == (None, None)
    assert eight.weight_bytes == 17 * GIB
    drafted = calibrated(shapes.inputs(HYBRID, "rtx3090", "sglang", max_running=3, draft_tokens=3), known()).measured
    assert drafted.weight_bytes is None


def test_an_engine_that_profiles_itself_is_believed_and_not_the_proof() -> None:
    """vLLM sets its profiled peak aside before the cache: what a proof sees beyond that is not the term."""
    inputs = shapes.inputs(DENSE, "rtx3090", "vllm", prefill_chunk_tokens=2048, max_running=3)
    one = known("vllm", proofs=(proof(peak_bytes=5 * MIB),))
    assert calibrated(inputs, one).measured.activation_peak_bytes == 700 * MIB
    assert calibrated(inputs, replace(one, setting=None)).measured.activation_peak_bytes is None


def test_a_start_that_printed_less_keeps_what_is_known() -> None:
    """A warm spare had loaded before: its weights are those of the start before; figures of another setting go."""
    one = Calibration("cpu", "native", "1", "m").with_start(Measured(8 * GIB, GIB, fixed_bytes=7, source="a"), SETTING, 1.0)
    again = one.with_start(Measured(kv_pool_bytes=MIB, source="b"), SETTING, 2.0)
    assert (again.measured.weight_bytes, again.measured.fixed_bytes, again.measured.kv_pool_bytes) == (GIB, 7, MIB)
    other = again.with_start(Measured(source="c"), replace(SETTING, max_running=1), 3.0)
    assert (other.measured.weight_bytes, other.measured.fixed_bytes, other.measured.kv_pool_bytes) == (GIB, None, None)


def test_sizes_that_cannot_be_are_not_learned() -> None:
    """A log may print a negative number (SGLang's graph captures do)."""
    one = Calibration("cpu", "native", "1", "m").with_start(Measured(weight_bytes=-1), SETTING, 1.0)
    assert one.measured.weight_bytes is None


def test_of_each_setting_the_last_proof_counts() -> None:
    """And no more of them are kept than a ladder has rungs, by far."""
    one = known().with_proof(proof(peak_bytes=1, holds=False))
    found = one.proof_of(SETTING)
    assert found is not None
    assert (found.peak_bytes, found.holds, len(one.proofs)) == (1, False, 1)
    for running in range(40):
        one = one.with_proof(proof(replace(SETTING, max_running=running)))
    assert len(one.proofs) == PROOFS_KEPT
    assert one.proof_of(replace(SETTING, kv_pool_bytes=1)) is None


def test_the_newest_of_the_asked_version_is_taken() -> None:
    """None where it is another card's, engine's or model's."""
    old, new = known(), known(engine_version="0.5.23", time_s=2.0)
    inputs = shapes.inputs(HYBRID, "rtx3090", "sglang")
    inputs = replace(inputs, gpu=replace(inputs.gpu, uuid="GPU-1"))
    assert best_of((new, old), inputs, "m") is new
    assert best_of((new, old), replace(inputs, engine_version="0.5.17"), "m") is old
    assert best_of((new, old), inputs, "n") is None
    assert best_of((new, old), replace(inputs, gpu=replace(inputs.gpu, uuid="")), "m") is None


@pytest.mark.parametrize(
    ("left_mib", "holds", "words"),
    [
        (600, True, "600.00 MiB of the card at 0a:00 stayed free"),
        (100, False, "less than the margin of 125.00"),
        (-50, False, "lack 50.00"),
    ],
)
def test_a_proof_run_judges_the_margin(left_mib: int, holds: bool, words: str) -> None:
    """A quarter of the peak must stay free; below nothing the KV cache would not even fit."""
    verdict = judge(ProofReading(500 * MIB, left_mib * MIB, 102_400, "the card at 0a:00"), 400 * MIB)
    assert verdict.holds is holds
    assert words in verdict.sentence
    assert "102,400 tokens took 500.00 MiB" in verdict.sentence
    assert "(planned 400.00 MiB)" in verdict.sentence
