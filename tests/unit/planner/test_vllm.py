"""vLLM's arithmetic against public logs: what the engine printed is reproduced from what it printed before."""

from typing import Any

import pytest

from appliance.core.plan import MemoryPlan
from appliance.core.units import GIB
from appliance.planner import vllm
from appliance.planner.vllm_blocks import geometry, group_size
from tests.unit.planner import shapes

LLAMA = shapes.facts(shapes.dense())
HYBRID = shapes.facts(shapes.hybrid_27b())
MOE = shapes.facts(shapes.hybrid_35b())
GEMMA_12B = shapes.facts(shapes.gemma4())
GEMMA_31B = shapes.facts(shapes.gemma4(hidden_size=5376, intermediate_size=21504, num_hidden_layers=60, num_attention_heads=32,
                                       num_key_value_heads=16, num_global_key_value_heads=4, max_position_embeddings=262144,
                                       layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 10))  # fmt: skip
QWEN3_MOE = shapes.facts(shapes.dense(model_type="qwen3_moe", hidden_size=2048, num_hidden_layers=48, num_key_value_heads=4, head_dim=128,
                                      max_position_embeddings=262144))  # fmt: skip
FULL = 262_144
TWO = {"tensor_parallel": 2, "kv_dtype": "fp8", "context_length_tokens": FULL, "engine_version": "0.24.0"}


def _pool(model: Any, gib: float, card: str = "rtx3090", **setting: Any) -> MemoryPlan:
    """The plan of a start whose "Available KV cache memory" is known."""
    return shapes.plan_of(shapes.inputs(model, card, "vllm", measured={"kv_pool": gib}, **setting), setting.pop("fraction", 0.9))


FROM_AVAILABLE = [
    ("Llama-3.1-8B, 1952 blocks (vllm#10517)", LLAMA, 3.81, {"engine_version": "0.6.4", "context_length_tokens": 20_000}, 31_232),
    ("Qwen3.6-27B, 3 drafted", HYBRID, 11.05, {**TWO, "draft_tokens": 3}, 623_873),
    ("Qwen3.6-27B, none drafted", HYBRID, 9.84, TWO, 619_202),
    ("Qwen3.8-27B, 64 sequences, no prefix cache", HYBRID, 6.96,
     {"kv_dtype": "fp8", "context_length_tokens": 150_000, "prefix_cache": False, "state_dtype": "float16"}, 223_821),
    ("Gemma-4-12B, sliding", GEMMA_12B, 8.16,
     {"tensor_parallel": 2, "context_length_tokens": 131_072, "prefill_chunk_tokens": 4096, "engine_version": "0.22.0"}, 384_019),
    ("Gemma-4-31B, scales a token and head", GEMMA_31B, 10.82,
     {"tensor_parallel": 2, "kv_dtype": "int8_per_token_head", "context_length_tokens": FULL, "prefill_chunk_tokens": 4096,
      "engine_version": "0.21.0"}, 466_892),
    ("Qwen3-30B-A3B (vllm#25350)", QWEN3_MOE, 10.55, {"kv_dtype": "fp8", "context_length_tokens": 221_000, "engine_version": "0.11.0"},
     230_528),
]  # fmt: skip


@pytest.mark.parametrize(("model", "gib", "setting", "tokens"), [pytest.param(*row[1:], id=row[0]) for row in FROM_AVAILABLE])
def test_tokens_follow_from_the_available_memory(model: Any, gib: float, setting: dict[str, Any], tokens: int) -> None:
    """Within 0.5 %, most of which is the two digits that the engine prints."""
    assert _pool(model, gib, **setting).kv_tokens == pytest.approx(tokens, rel=0.005)


@pytest.mark.parametrize(
    ("setting", "blocks", "tokens"),
    [
        ({**TWO, "draft_tokens": 3}, 426, 623_873),
        (TWO, 433, 652_346),
        ({**TWO, "draft_tokens": 4}, 392, 567_737),
        ({**TWO, "draft_tokens": 3}, 185, 270_930),
        ({"kv_dtype": "fp8", "context_length_tokens": 150_000, "prefix_cache": False, "state_dtype": "float16"}, 285, 223_821),
        ({"kv_dtype": "fp8", "context_length_tokens": 150_000, "state_dtype": "float16"}, 250, 193_298),
        ({"kv_dtype": "fp8", "context_length_tokens": 150_000, "state_dtype": "float16", "draft_tokens": 3}, 228, 174_489),
    ],
)
def test_the_hybrids_block_geometry_is_exact(setting: dict[str, Any], blocks: int, tokens: int) -> None:
    """Printed tokens are int(blocks ÷ blocks a request × length), to the last digit, for seven public starts of the 27B hybrid."""
    resolved = vllm.resolve(shapes.inputs(HYBRID, "rtx3090", "vllm", **setting))
    shape = geometry(resolved, (0, 24, 0))
    assert shape.tokens(blocks, setting["context_length_tokens"], (0, 24, 0)) == tokens


@pytest.mark.parametrize(
    ("setting", "block_tokens", "request_blocks"),
    [({**TWO, "draft_tokens": 3}, 1600, 179), (TWO, 1568, 174), ({**TWO, "prefix_cache": False}, 1568, 171)],
)
def test_attention_blocks_grow_to_a_states_size(setting: dict[str, Any], block_tokens: int, request_blocks: int) -> None:
    """ "Setting attention block size to 1568 tokens": the page of a state in 16-token steps; 1600 with three drafted steps."""
    shape = geometry(vllm.resolve(shapes.inputs(HYBRID, "rtx3090", "vllm", **setting)), (0, 24, 0))
    assert shape.groups[0].block_tokens == block_tokens
    assert shape.blocks_of_request(FULL) == request_blocks


def test_a_refused_start_is_estimated_as_the_engine_estimates_it() -> None:
    """ "65,536 needs 4.76 GiB, 1.56 available, estimated maximum model length 15984" (a 3090, four drafted, 16-bit state)."""
    refused = _pool(HYBRID, 1.56, context_length_tokens=65_536, draft_tokens=4, state_dtype="float16")
    assert not refused.fits
    assert refused.kv_tokens == 15_984
    assert 65_536 * refused.kv_bytes_per_token / GIB == pytest.approx(4.76, rel=0.002)


def test_before_0_20_1_the_printed_number_counts_groups_instead_of_requests() -> None:
    """4 × 3090: 483,200 printed is 302 × 1600, whatever a request needs."""
    resolved = vllm.resolve(shapes.inputs(HYBRID, "rtx3090", "vllm", **{**TWO, "tensor_parallel": 4, "draft_tokens": 3}))
    shape = geometry(resolved, (0, 20, 0))
    assert shape.tokens(1211, FULL, (0, 20, 0)) == 483_200
    assert 1211 / shape.blocks_of_request(FULL) == pytest.approx(6.77, abs=0.005)


END_TO_END = [
    ("Llama-3.1-8B at 20,000", LLAMA, "23.58GiB", 0.90,
     {"engine_version": "0.6.4", "context_length_tokens": 20_000, "prefill_chunk_tokens": 20_000, "max_running": 256}, {}, 31_232),
    ("Qwen3.8-27B W4A16 on two", HYBRID, "rtx3090", 0.90, TWO, {}, 652_346),
    ("the same with its weights given", HYBRID, "rtx3090", 0.90, TWO, {"weight": 8.80}, 652_346),
    ("the same with a drafter", HYBRID, "rtx3090", 0.90, {**TWO, "draft_tokens": 4}, {}, 567_737),
    ("Qwen3.6-27B int4 with a drafter", HYBRID, "rtx3090", 0.92, {**TWO, "draft_tokens": 3}, {"weight": 8.80}, 623_873),
    ("Qwen3.6-35B-A3B on two", MOE, "rtx3090", 0.95, TWO, {"weight": 9.96}, 2_047_345),
    ("Gemma-4-12B on two", GEMMA_12B, "rtx3090", 0.90,
     {"tensor_parallel": 2, "context_length_tokens": 131_072, "prefill_chunk_tokens": 4096, "engine_version": "0.22.0"},
     {"weight": 11.53}, 384_019),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "card", "fraction", "setting", "measured", "tokens"), [pytest.param(*row[1:], id=row[0]) for row in END_TO_END]
)
def test_end_to_end_the_tokens_are_within_five_per_cent(
    model: Any, card: str, fraction: float, setting: dict[str, Any], measured: dict[str, float], tokens: int
) -> None:
    """From the card, the configuration and the utilization to the printed tokens."""
    worked_out = shapes.plan_of(shapes.inputs(model, card, "vllm", measured=measured, **setting), fraction)
    assert worked_out.kv_tokens == pytest.approx(tokens, rel=0.05)


def test_llamas_terms_are_the_printed_ones() -> None:
    """14.9888 GiB of weights, 2.07 of activation at 20,000 tokens, 0.36 beside torch, 3.81 for the cache."""
    asked = shapes.inputs(LLAMA, "23.58GiB", "vllm", engine_version="0.6.4", context_length_tokens=20_000, prefill_chunk_tokens=20_000,
                          max_running=256)  # fmt: skip
    terms = {term.name: term.size_bytes / GIB for term in shapes.plan_of(asked, 0.9).terms}
    assert terms["weights"] == pytest.approx(14.9888, abs=1e-3)
    assert terms["prefill peak"] == pytest.approx(2.07, abs=0.02)
    assert terms["non-torch"] == pytest.approx(0.36, abs=0.01)
    assert terms["KV pool"] == pytest.approx(3.81, abs=0.02)


def test_cuda_graphs_count_from_0_20_on() -> None:
    """Before, they came out of what was left of the card."""
    old, new = (shapes.plan_of(shapes.inputs(LLAMA, "rtx3090", "vllm", engine_version=version), 0.9) for version in ("0.19.1", "0.20.0"))
    graphs = next(term.size_bytes for term in new.terms if term.name == "CUDA graphs")
    assert old.kv_pool_bytes - new.kv_pool_bytes == graphs
    assert new.headroom_bytes - old.headroom_bytes == graphs


def test_groups_are_the_fewer_layers_unless_padding_is_cheap() -> None:
    """gpt-oss with a drafter: 13 full and 12 sliding make two groups of 13, not one of 12 and one of 1."""
    assert [group_size(12, 12), group_size(13, 12), group_size(10, 52), group_size(17, 48)] == [12, 13, 10, 17]


def test_a_sequence_may_be_longer_than_the_number_that_old_versions_print() -> None:
    """Before 0.20.1 the sliding layers were counted as if they kept everything; the engine starts all the same."""
    old = {"tensor_parallel": 2, "prefill_chunk_tokens": 4096, "engine_version": "0.19.1", "context_length_tokens": 131_072}
    found = _pool(GEMMA_12B, 3.2, **old)
    assert found.kv_tokens < 131_072 <= found.sequence_tokens
    assert found.fits
