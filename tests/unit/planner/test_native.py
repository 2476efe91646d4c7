"""The built-in engine's arithmetic is the engine's own."""

from dataclasses import replace
from pathlib import Path

from appliance.core.plan import GpuFacts
from appliance.core.units import GIB
from appliance.engine.block_pool import PoolGeometry
from appliance.engine.settings import EngineSettings
from appliance.planner.inputs import PlanInputs
from appliance.planner.native import plan_at, resolve
from appliance.planner.ways_out import plan
from tests.unit.planner import shapes

SMOLLM = shapes.facts(
    shapes.dense(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, head_dim=64,
                 vocab_size=49152, max_position_embeddings=8192, tie_word_embeddings=True)
)  # fmt: skip


def _machine(gib: float) -> PlanInputs:
    return PlanInputs(SMOLLM, GpuFacts("the machine", round(gib * GIB)), "native")


def test_the_pool_has_as_many_tokens_as_the_engine_makes_of_its_bytes() -> None:
    """The same division into blocks, the null block taken off."""
    choice = plan(_machine(2.0))
    cell = 2 * 30 * 3 * 64 * 4
    geometry = PoolGeometry.divide(choice.plan.kv_pool_bytes, cell, 16, 0.6)
    assert choice.plan.kv_bytes_per_token == cell
    assert choice.plan.kv_tokens == geometry.total_blocks * geometry.block_tokens


def test_sixteen_bit_weights_are_served_in_8_or_in_32() -> None:
    """One byte a number and a 16-bit scale for each 32, as the engine packs them by default; the checkpoint doubles in float32."""
    numbers = SMOLLM.weight_bytes // 2
    assert plan(_machine(4.0)).plan.weight_bytes == round(numbers * (1 + 2 / 32))
    assert plan(replace(_machine(4.0), weights_dtype="float32")).plan.weight_bytes == 4 * numbers


def test_a_small_model_does_not_take_the_whole_machine() -> None:
    """A pool for eight sequences of the model's limit is enough."""
    small, large = plan(_machine(8.0)), plan(_machine(64.0))
    assert small.plan.kv_pool_bytes == large.plan.kv_pool_bytes < 4 * GIB
    assert large.plan.context_length_tokens == 8192


def test_what_is_set_aside_for_answers_that_give_way_is_a_term_of_the_chain() -> None:
    """headroom = free at start − weights − pool − swap, and the term is shown; the default is the engine's own, named as assumed."""
    for swap_bytes in (0, GIB // 4, None):
        inputs = resolve(replace(_machine(4.0), swap_bytes=swap_bytes))
        worked_out = plan_at(inputs, 0.5)
        terms = {term.name: term for term in worked_out.terms}
        wanted = EngineSettings(Path()).swap_bytes if swap_bytes is None else swap_bytes
        assert terms["swap"].size_bytes == wanted
        left = terms["free at start"].size_bytes - terms["weights"].size_bytes - terms["KV pool"].size_bytes - wanted
        assert worked_out.headroom_bytes == terms["headroom"].size_bytes == left
        assert any("engine.swap_bytes" in sentence for sentence in inputs.assumptions) == (swap_bytes is None)


def test_a_plan_leaves_room_for_a_large_swap() -> None:
    """What is set aside is not there for a step: of a machine that is just large enough, a pool gets less."""
    small, large = (plan(replace(_machine(2.0), swap_bytes=size)).plan for size in (0, GIB // 2))
    assert large.kv_pool_bytes < small.kv_pool_bytes
    assert large.headroom_bytes >= large.activation_peak_bytes
