"""What must hold for any model on any card with any engine."""

import math
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from appliance.core.causes import Cause
from appliance.core.plan import GpuFacts, MemoryPlan, Rung
from appliance.core.units import GIB
from appliance.planner.choose import attempt
from appliance.planner.inputs import Choice, PlanInputs, PlanRefused
from appliance.planner.ladder import FAMILIES, ladder
from appliance.planner.ways_out import plan
from tests.unit.planner import shapes

ANY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
FEWER = settings(ANY, max_examples=60)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Dense, grouped, latent, sliding, hybrid, and mixtures of experts, of 0.1 to 300 G numbers."""
    heads = draw(st.sampled_from([4, 8, 12, 16, 24, 32, 64]))
    head_dim = draw(st.sampled_from([64, 80, 128, 256]))
    config = shapes.dense(
        hidden_size=heads * head_dim // draw(st.sampled_from([1, 2])),
        intermediate_size=draw(st.integers(8, 256)) * 128,
        num_hidden_layers=draw(st.integers(2, 96)),
        num_attention_heads=heads,
        num_key_value_heads=draw(st.sampled_from([k for k in (1, 2, 4, 8, heads) if k <= heads])),
        head_dim=head_dim,
        vocab_size=draw(st.integers(1000, 300_000)),
        max_position_embeddings=draw(st.sampled_from([2048, 8192, 40_960, 131_072, 1_048_576])),
        tie_word_embeddings=draw(st.booleans()),
    )
    kind = draw(st.sampled_from(["dense", "latent", "sliding", "split sliding", "hybrid", "experts"]))
    if kind == "latent":
        config |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128}
    if kind in ("sliding", "split sliding"):
        config |= {"sliding_window": draw(st.sampled_from([128, 1024, 4096])), "sliding_window_pattern": draw(st.integers(2, 6)),
                   "model_type": "gemma3_text"}  # fmt: skip
    if kind == "split sliding":
        config |= {"architectures": ["Gemma4ForCausalLM"], "global_head_dim": 2 * head_dim}
    if kind == "hybrid":
        every = draw(st.integers(2, min(6, config["num_hidden_layers"])))
        config |= {"linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
                   "full_attention_interval": every, "mtp_num_hidden_layers": 1}  # fmt: skip
    if kind == "experts":
        config |= {"num_experts": draw(st.sampled_from([8, 64, 256])), "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    if draw(st.booleans()):
        config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    return config


@st.composite
def wishes(draw: st.DrawFn) -> PlanInputs:
    """A model, a card of 4 to 200 GiB, an engine, and sometimes a wish."""
    engine, versions = draw(
        st.sampled_from([("sglang", ("0.5.9", "0.5.17", "0.5.23")), ("vllm", ("0.19.1", "0.20.2", "0.33.0")), ("llamacpp", ("",)),
                         ("native", ("",))])
    )  # fmt: skip
    model = shapes.facts(draw(configs()))
    total = draw(st.integers(4 * GIB, 200 * GIB))
    asked = PlanInputs(model, GpuFacts("a card", total), engine, draw(st.sampled_from(versions)))
    if engine != "native":
        dtype = draw(st.sampled_from(["auto", "q8_0" if engine == "llamacpp" else "fp8_e4m3"]))
        asked = replace(asked, kv_dtype=dtype, tensor_parallel=draw(st.sampled_from([1, 1, 2, 4])))
    return replace(
        asked,
        max_running=draw(st.sampled_from([None, 1, 3, 16, 64])),
        prefill_chunk_tokens=draw(st.sampled_from([None, 256, 1024, 4096, 16_384])),
        prefix_cache=draw(st.booleans()),
        draft_tokens=draw(st.sampled_from([0, 0, 3])) if engine == "vllm" else 0,
        context_length_tokens=draw(st.sampled_from([None, None, None, 2048])),
    )


def _numbers(worked_out: MemoryPlan) -> list[float]:
    return [
        worked_out.free_at_start_bytes, worked_out.mem_fraction, worked_out.weight_bytes, worked_out.linear_state_bytes,
        worked_out.kv_pool_bytes, worked_out.kv_bytes_per_token, worked_out.kv_tokens, worked_out.headroom_bytes,
        worked_out.activation_peak_bytes, worked_out.context_length_tokens, *(term.size_bytes for term in worked_out.terms),
    ]  # fmt: skip


@ANY
@given(wishes())
def test_a_plan_that_fits_is_physical(asked: PlanInputs) -> None:
    """No negative number and no NaN; what is planned at the peak is on the card; the pool holds the context."""
    result = attempt(asked)
    assume(isinstance(result, Choice))
    worked_out = result.plan
    assert all(math.isfinite(number) and number >= 0 for number in _numbers(worked_out))
    parts = worked_out.weight_bytes + worked_out.linear_state_bytes + worked_out.kv_pool_bytes + worked_out.activation_peak_bytes
    assert parts <= asked.gpu.total_bytes
    assert 0 < worked_out.context_length_tokens <= min(worked_out.sequence_tokens, asked.model.max_context_tokens)
    assert worked_out.fits
    assert 0 < worked_out.mem_fraction <= 1


@ANY
@given(wishes(), st.integers(1, 64 * GIB))
def test_less_memory_never_gives_more_context(asked: PlanInputs, less_bytes: int) -> None:
    """Nor makes fit what did not."""
    assume(asked.gpu.total_bytes - less_bytes >= 2 * GIB)
    more = attempt(asked)
    less = attempt(replace(asked, gpu=replace(asked.gpu, total_bytes=asked.gpu.total_bytes - less_bytes)))
    if isinstance(less, Choice):
        assert isinstance(more, Choice)
        assert less.plan.context_length_tokens <= more.plan.context_length_tokens


@ANY
@given(wishes())
def test_heavier_weights_never_give_more_context(asked: PlanInputs) -> None:
    """The same for a measured term."""
    own = asked.model.weight_bytes // asked.tensor_parallel
    light = attempt(replace(asked, measured=replace(asked.measured, weight_bytes=own)))
    heavy = attempt(replace(asked, measured=replace(asked.measured, weight_bytes=own + GIB)))
    if isinstance(heavy, Choice):
        assert isinstance(light, Choice)
        assert heavy.plan.context_length_tokens <= light.plan.context_length_tokens


@ANY
@given(wishes())
def test_a_refusal_names_a_way_out_that_a_second_plan_confirms(asked: PlanInputs) -> None:
    """One at least, whatever the model."""
    try:
        plan(asked)
    except PlanRefused as refused:
        assert 1 <= len(refused.ways_out) <= 3
        for way in refused.ways_out:
            assert way.plan.fits
            assert way.options


@FEWER
@given(wishes(), st.sampled_from(sorted(FAMILIES, key=lambda cause: cause.label)))
def test_every_rung_is_a_setting_that_can_be_started(asked: PlanInputs, cause: Cause) -> None:
    """Its context is in its pool, its numbers are numbers, and no two rungs are the same."""
    assume(isinstance(attempt(asked), Choice))
    rungs = ladder(asked, cause)
    settings_seen = {
        (r.mem_fraction, r.context_length_tokens, r.prefill_chunk_tokens, r.max_running, r.kv_dtype, r.tensor_parallel, r.features_off)
        for r in rungs
    }
    assert len(settings_seen) == len(rungs)
    for rung in rungs:
        assert rung.plan is not None
        assert rung.plan.sequence_tokens >= rung.context_length_tokens > 0
        assert all(math.isfinite(number) for number in _numbers(rung.plan))
        assert _planned_anew(asked, rung) == rung.plan
        assert rung.max_running >= 1
        assert rung.gives_up
        assert rung.gains


def _planned_anew(asked: PlanInputs, rung: Rung) -> MemoryPlan:
    """The plan of the setting that a rung is, from what the rung says alone."""
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
    return attempt(same).plan
