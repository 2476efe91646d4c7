"""What good starts and proof runs teach the next plan."""

import json

import pytest

from appliance.core.units import GIB, MIB
from appliance.planner.calibration import calibrated, calibration_key, from_record, to_record
from appliance.planner.inputs import Measured
from appliance.planner.proof import ProofReading, judge
from appliance.planner.ways_out import plan
from tests.unit.planner import shapes

HYBRID = shapes.facts(shapes.hybrid_27b())
MEASURED = Measured(23 * GIB, 17 * GIB, GIB, 512 * MIB, 700 * MIB, 3 * GIB, source="lines 1 to 9 of the log")


def test_terms_survive_as_json() -> None:
    """Whatever keeps them."""
    assert from_record(json.loads(json.dumps(to_record(MEASURED)))) == MEASURED


def test_a_damaged_record_is_as_if_nothing_had_been_measured() -> None:
    """Wrong types, negative sizes, unknown keys."""
    assert from_record({"weight_bytes": "big", "fixed_bytes": -1, "linear_state_bytes": True, "colour": 3}) == Measured(
        source="an earlier start"
    )


def test_another_card_version_model_or_count_has_terms_of_its_own() -> None:
    """The key names all of them."""
    keys = {
        calibration_key("GPU-1", "sglang", "0.5.17", "m"),
        calibration_key("GPU-2", "sglang", "0.5.17", "m"),
        calibration_key("GPU-1", "vllm", "0.5.17", "m"),
        calibration_key("GPU-1", "sglang", "0.5.23", "m"),
        calibration_key("GPU-1", "sglang", "0.5.17", "n"),
        calibration_key("GPU-1", "sglang", "0.5.17", "m", 2),
    }
    assert len(keys) == 6


def test_the_next_plan_uses_what_was_measured_except_the_pool() -> None:
    """The pool is what the next plan is to choose; what a person gave stays."""
    asked = shapes.inputs(HYBRID, "rtx3090", "sglang", kv_dtype="fp8_e4m3", measured={"weight": 17.67})
    after = calibrated(asked, MEASURED)
    assert after.measured.weight_bytes == round(17.67 * GIB)
    assert after.measured.free_at_start_bytes == 23 * GIB
    assert after.measured.kv_pool_bytes is None
    sources = {term.name: term.source for term in plan(after).plan.terms}
    assert sources["free at start"] == "lines 1 to 9 of the log"


@pytest.mark.parametrize(("least_gib", "holds"), [(0.60, True), (0.10, False)])
def test_a_proof_run_judges_the_margin_and_keeps_the_peak(least_gib: float, holds: bool) -> None:
    """0.50 and 1.00 GiB taken of 1.10: a quarter of the peak must stay free."""
    asked = shapes.inputs(HYBRID, "rtx3090", "sglang", kv_dtype="fp8_e4m3")
    choice = plan(asked)
    verdict = judge(choice.inputs, choice.plan, ProofReading(round(1.1 * GIB), round(least_gib * GIB), 102_400))
    assert verdict.holds is holds
    assert verdict.activation_peak_bytes == pytest.approx((1.1 - least_gib) * GIB, abs=2)
    assert "102,400 tokens" in verdict.sentence
    assert verdict.inputs.measured.activation_peak_bytes == verdict.activation_peak_bytes
