"""Safer rungs: strictly falling for every cause, each with its price, in the order that the cause asks for."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from appliance.core.causes import Cause
from appliance.core.plan import Rung
from appliance.planner.choose import attempt
from appliance.planner.inputs import PlanInputs
from appliance.planner.ladder import FAMILIES, Tried, demand, ladder, moves_against, native_ladder
from appliance.planner.ways_out import plan
from tests.unit.planner import shapes

HYBRID = shapes.facts(shapes.hybrid_27b())
TERMS = {"weight": 17.67, "linear_state": 0.73}
ONE = shapes.inputs(HYBRID, "rtx3090", "sglang", engine_version="0.5.17", kv_dtype="fp8_e4m3", mem_fraction=0.95, measured=TERMS)
TWO = shapes.inputs(HYBRID, "rtx3090", "vllm", engine_version="0.24.0", kv_dtype="fp8", tensor_parallel=2, draft_tokens=3)
LLAMA = shapes.facts(shapes.dense())
SETTINGS = {
    "sglang, one card": ONE,
    "sglang, two cards, drafting": replace(TWO, engine="sglang", engine_version="0.5.17", kv_dtype="fp8_e4m3", draft_tokens=4),
    "vllm, two cards, drafting": TWO,
    "vllm, dense": shapes.inputs(LLAMA, "24GiB", "vllm"),
    "llama.cpp": shapes.inputs(HYBRID, "rtx3090", "llamacpp", kv_dtype="q8_0", max_running=2, measured={"weight": 13.27}),
    "big card": shapes.inputs(LLAMA, "h100", "sglang", max_running=64, prefill_chunk_tokens=8192),
}


@pytest.mark.parametrize("cause", FAMILIES, ids=lambda cause: cause.label)
@pytest.mark.parametrize("asked", SETTINGS.values(), ids=SETTINGS)
def test_every_ladder_falls_strictly(asked: PlanInputs, cause: Cause) -> None:
    """In the demand that the cause is about; each rung says what it gives up and what it gains, and its plan holds its context."""
    before = demand_of(asked, None, cause)
    for number, rung in enumerate(ladder(asked, cause), start=1):
        now = demand_of(asked, rung, cause)
        assert now < before
        before = now
        assert rung.index == number
        assert rung.gives_up
        assert rung.gains
        assert rung.plan is not None
        assert rung.plan.kv_tokens >= rung.context_length_tokens > 0


def demand_of(asked: PlanInputs, rung: Rung | None, cause: Cause) -> float:
    """The demand of a rung, worked out anew from the setting that it is."""
    if rung is None:
        result = attempt(asked)
        return demand(result.inputs, result.plan, cause)
    assert rung.plan is not None
    same = replace(
        asked,
        mem_fraction=rung.mem_fraction,
        context_length_tokens=rung.context_length_tokens,
        prefill_chunk_tokens=rung.prefill_chunk_tokens,
        max_running=rung.max_running,
        kv_dtype=rung.kv_dtype,
        tensor_parallel=rung.tensor_parallel,
        features_off=rung.features_off,
    )
    return demand(same, rung.plan, cause)


def moves_of(asked: PlanInputs, cause: Cause, **more: Any) -> list[str]:
    """What changes from rung to rung."""
    chosen = plan(asked).rung
    said, before = [], chosen
    for rung in ladder(asked, cause, **more):
        changed = [
            name
            for name in ("prefill_chunk_tokens", "max_running", "kv_dtype", "tensor_parallel", "features_off", "mem_fraction")
            if getattr(rung, name) != getattr(before, name)
        ]
        said.append(changed[0] if changed else "context_length_tokens")
        before = rung
    return said


def test_out_of_memory_in_a_prefill_halves_the_chunk_first() -> None:
    """Which costs no context; then the fraction with the context to fit, then the sequences, then the graphs."""
    asked = replace(ONE, mem_fraction=None)
    assert moves_of(asked, Cause.CUDA_OOM_PREFILL)[:4] == ["prefill_chunk_tokens", "mem_fraction", "max_running", "features_off"]
    first, second, *_ = ladder(asked, Cause.CUDA_OOM_PREFILL)
    assert first.context_length_tokens == plan(asked).plan.context_length_tokens
    assert second.mem_fraction == pytest.approx(plan(asked).plan.mem_fraction - 0.02)
    assert second.context_length_tokens < first.context_length_tokens


def test_the_articles_second_setting_is_on_its_first_ones_ladder() -> None:
    """0.95 crashed; 0.93 and 102,400 is the rung after the smaller chunk."""
    asked = replace(ONE, context_length_tokens=119_808)
    second = ladder(asked, Cause.CUDA_OOM_PREFILL)[1]
    assert (second.mem_fraction, second.context_length_tokens) == (0.93, 102_400)
    assert "102,400 tokens instead of 119,808" in second.gives_up


def test_a_refusal_at_start_goes_the_other_direction() -> None:
    """The fraction rises while the headroom covers the peak; a run-time out-of-memory never raises it."""
    asked = replace(ONE, mem_fraction=0.85)
    up = ladder(asked, Cause.KV_POOL_TOO_SMALL)[0]
    down = ladder(asked, Cause.CUDA_OOM_RUNTIME)[0]
    assert up.mem_fraction > 0.85 > down.mem_fraction


def test_the_engines_own_estimate_is_taken_first() -> None:
    """ "the estimated maximum model length is 15984" → a context of 15,360."""
    asked = shapes.inputs(HYBRID, "rtx3090", "vllm", kv_dtype="fp8")
    assert ladder(asked, Cause.KV_POOL_TOO_SMALL, estimated_context_tokens=15_984)[0].context_length_tokens == 15_360


def test_refusals_in_both_directions_move_another_dimension() -> None:
    """0.85 is too much and 0.84 too little: no fraction is left, so the drafter or the context goes (sglang#4330)."""
    asked = replace(SETTINGS["sglang, two cards, drafting"], mem_fraction=0.84)
    history = (Tried(plan(replace(asked, mem_fraction=0.85)).rung, Cause.CUDA_OOM_STARTUP),)
    rungs = ladder(asked, Cause.KV_POOL_TOO_SMALL, history)
    assert {rung.mem_fraction for rung in rungs} == {0.84}
    assert "speculative" in rungs[0].features_off


def test_what_was_tried_is_not_tried_again() -> None:
    """A rung of the history is left out."""
    first, second, *_ = ladder(ONE, Cause.CUDA_OOM_PREFILL)
    again = ladder(ONE, Cause.CUDA_OOM_PREFILL, (Tried(first, Cause.CUDA_OOM_PREFILL),))
    assert again[0].mem_fraction == second.mem_fraction
    assert again[0].index == 1


def test_an_illegal_access_switches_things_off() -> None:
    """Overlap, drafter, one card, half the sequences, the runtime before; the kernels only where others read this KV dtype."""
    said = [sorted(rung.features_off) for rung in ladder(TWO, Cause.CUDA_ILLEGAL_ACCESS)]
    assert said[0] == ["overlap_schedule"]
    assert said[1] == ["overlap_schedule", "speculative"]
    assert "current_runtime" in said[-1]
    assert not any("attention_backend" in features for features in said)  # fp8 on sm_86: Triton refuses
    on_ada = replace(TWO, gpu=shapes.gpu_facts("rtx4090"))
    assert any("attention_backend" in rung.features_off for rung in ladder(on_ada, Cause.CUDA_ILLEGAL_ACCESS))


def test_a_hang_between_cards_gives_up_direct_traffic_then_a_card() -> None:
    """P2P, the engine's all-reduce, one card; nothing on a single card."""
    rungs = ladder(TWO, Cause.NCCL_P2P_HANG)
    assert [rung.tensor_parallel for rung in rungs] == [2, 2, 1]
    assert "p2p" in rungs[0].features_off
    assert ladder(ONE, Cause.NCCL_P2P_HANG) == ()


def test_a_lost_card_leaves_one_that_is_planned_anew() -> None:
    """The context is what one card holds."""
    (rung,) = ladder(TWO, Cause.GPU_OFF_BUS)
    assert rung.tensor_parallel == 1
    assert rung.context_length_tokens < plan(TWO).plan.context_length_tokens
    assert rung.plan is not None
    assert rung.plan.fits


def test_causes_that_no_setting_helps_have_no_ladder() -> None:
    """A port in use is not met by a smaller context."""
    for cause in (Cause.PORT_IN_USE, Cause.MODEL_MISSING, Cause.EXTERNAL_SIGTERM, Cause.OK_SHUTDOWN):
        assert ladder(ONE, cause) == ()


def test_indices_go_on_from_where_they_are_told() -> None:
    """The supervisor numbers its ladder."""
    assert [rung.index for rung in ladder(ONE, Cause.CUDA_OOM_PREFILL, first_index=4)][:3] == [4, 5, 6]


def test_a_pool_too_small_for_slack_gives_the_slack_up_and_then_context() -> None:
    """1,776 tokens are left of 2,048: the rung asks for 1,024, not for what the engine would refuse at its start."""
    model = replace(
        LLAMA, weight_bytes=7_798_585_344, full_attention_layers=25, sliding_window_layers=25, sliding_window_tokens=128, kv_heads=24,
        sliding_kv_heads=24, sliding_head_dim=128, attention_heads=24, hidden_size=3072, intermediate_size=4352, vocab_size=1000,
        max_context_tokens=2048,
    )  # fmt: skip
    card = replace(ONE.gpu, total_bytes=10_793_019_976, free_at_start_bytes=None)
    small = replace(shapes.inputs(model, "rtx3090", "vllm", engine_version="0.19.1", kv_dtype="fp8_e4m3"), gpu=card)
    rungs = ladder(small, Cause.HOST_OOM)
    assert rungs[-1].context_length_tokens == 1024
    assert all(rung.plan is not None and rung.plan.sequence_tokens >= rung.context_length_tokens for rung in rungs)


def test_the_built_in_engines_ladder_halves_one_thing_a_rung() -> None:
    """Down to its least; each rung asks for less and says what it costs."""
    rungs = native_ladder(Rung(0, 0.9, 8192, 256, 8, "float32"))
    top = (256, 8, 8192)
    sizes = [top, *((rung.prefill_chunk_tokens, rung.max_running, rung.context_length_tokens) for rung in rungs)]
    for before, after in itertools.pairwise(sizes):
        assert after != before
        assert all(a <= b for a, b in zip(after, before, strict=True))
    assert [rung.index for rung in rungs] == list(range(1, len(rungs) + 1))
    assert all(rung.gives_up and rung.gains for rung in rungs)
    assert rungs[-1].prefill_chunk_tokens == 32


def test_a_rung_at_its_least_has_nothing_below() -> None:
    """No rung that changes nothing."""
    assert native_ladder(Rung(3, 0.9, 512, 32, 1, "float32")) == ()


def test_every_family_says_its_moves_in_words() -> None:
    """For docs/failures.md; a cause that no setting helps against has none."""
    assert all(moves_against(cause) for cause in FAMILIES)
    assert moves_against(Cause.CUDA_OOM_PREFILL)[:2] == (
        "half the prefill chunk, which costs no context",
        "a fraction of 0.02 less, with the context that then fits",
    )
    assert moves_against(Cause.PORT_IN_USE) == ()


def test_a_move_that_was_made_comes_last() -> None:
    """The second out-of-memory lowers the fraction, the third takes half of the sequences; the chunk is halved again after the others."""
    now, history, said = replace(ONE, context_length_tokens=119_808), (), []
    failed = plan(replace(ONE, mem_fraction=0.9)).rung
    for _ in range(4):
        rung = ladder(now, Cause.CUDA_OOM_PREFILL, history)[0]
        said.append((rung.prefill_chunk_tokens, rung.mem_fraction, rung.max_running, sorted(rung.features_off)))
        history, failed = (*history, Tried(failed, Cause.CUDA_OOM_PREFILL)), rung
        now = replace(
            now, prefill_chunk_tokens=rung.prefill_chunk_tokens, mem_fraction=rung.mem_fraction, max_running=rung.max_running,
            context_length_tokens=rung.context_length_tokens, features_off=rung.features_off,
        )  # fmt: skip
    assert said == [(1024, 0.95, 3, []), (1024, 0.93, 3, []), (1024, 0.92, 1, []), (1024, 0.92, 1, ["cuda_graph"])]


def test_what_was_measured_is_carried_to_the_next_setting() -> None:
    """A measured state of nine slots is a third with three, a measured peak half for half the chunk, measured graphs less without them."""
    measured = {"weight": 17.67, "linear_state": 0.73, "activation_peak": 0.60, "fixed": 0.80}
    asked = shapes.inputs(HYBRID, "rtx3090", "sglang", engine_version="0.5.17", kv_dtype="fp8_e4m3", mem_fraction=0.95, measured=measured)
    chunk, _, fewer, off, *_ = [rung.plan for rung in ladder(asked, Cause.CUDA_OOM_PREFILL)]
    assert chunk is not None
    assert fewer is not None
    assert off is not None
    assert chunk.activation_peak_bytes == pytest.approx(0.35 * 2**30, rel=0.1)
    assert fewer.linear_state_bytes == pytest.approx(0.73 * 2**30 * 4 / 10, rel=0.02)
    fixed = next(term.size_bytes for term in off.terms if term.name == "workspaces and graphs")
    assert fixed < 0.75 * 2**30
