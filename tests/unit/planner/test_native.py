"""The built-in engine's arithmetic is the engine's own."""

from dataclasses import replace

from appliance.core.plan import GpuFacts
from appliance.core.units import GIB
from appliance.engine.block_pool import PoolGeometry
from appliance.planner.inputs import PlanInputs
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
