"""The terms that every engine's chain shares: one function a term, bytes of one rank.

CUDA-visible → context and communicator → free at start P → × fraction → − weights → − linear state → = KV pool → tokens;
and beside it the headroom, into which the activation peak must fit.
"""

from __future__ import annotations

from collections.abc import Iterable

from appliance.core.plan import MemoryPlan, ModelFacts, Term
from appliance.core.units import GIB, MIB, format_bytes
from appliance.planner.elements import dtype_bytes
from appliance.planner.inputs import PlanInputs
from appliance.planner.model_config import state_bytes_per_layer

CONTEXT_STEP_TOKENS = 1024
CONTEXT_SLACK_TOKENS = 2048
"""Kept free under the pool: what the engines hold back per request, and the answer that is being written."""


def context_bytes(total_bytes: int) -> int:
    """What a CUDA context with the engine's kernels takes, in bytes: 0.21 GiB + 0.5 % of the card.

    Source: 23.56 − 23.23 GiB on a 3090 (the article's two pool sizes solved for P); 0.6 GiB on H100, 0.7 on H200 ("Load weight begin").
    Larger cards have more multiprocessors, and the driver reserves per multiprocessor.
    """
    return round(0.21 * GIB + 0.005 * total_bytes)


def communicator_bytes(tensor_parallel: int) -> int:
    """NCCL's and the custom all-reduce's buffers of one rank, in bytes: 0 alone, else 0.2 GiB + 60 MiB a rank.

    Source: "Init torch distributed ends ... mem usage" of public multi-card logs; part of P in SGLang, of the consumed memory in vLLM.
    """
    return 0 if tensor_parallel == 1 else round(0.2 * GIB) + 60 * MIB * tensor_parallel


def free_before_engine(inputs: PlanInputs) -> int:
    """Free before the engine starts, in bytes: what was read from the card, else all that CUDA sees."""
    free = inputs.gpu.free_at_start_bytes
    return inputs.gpu.total_bytes if free is None else min(free, inputs.gpu.total_bytes)


def loaded_weight_bytes(inputs: PlanInputs) -> int:
    """Weights of one rank before the engine's own additions, in bytes: (all − drafter unless used − vision unless used) ÷ tp."""
    model = inputs.model
    skipped = 0 if speculative(inputs) else model.draft_weight_bytes
    if inputs.language_only:
        skipped += model.vision_weight_bytes
    return (model.weight_bytes - skipped) // inputs.tensor_parallel


def speculative(inputs: PlanInputs) -> bool:
    """Whether the drafter runs."""
    return inputs.draft_tokens > 0 and "speculative" not in inputs.features_off


def draft_layers(inputs: PlanInputs) -> int:
    """Attention layers that speculative decoding adds: the drafter's, one where the model does not say."""
    return max(inputs.model.draft_layers, 1) if speculative(inputs) else 0


def rotary_table_bytes(model: ModelFacts, number_bytes: int) -> int:
    """The cosines and sines of all positions, in bytes: positions × rotated dimensions × bytes of a number; replicated on each rank.

    Source: 14.9888 GiB printed for Llama-3.1-8B against 14.9575 GiB of tensors: 131,072 × 128 × 2 (vllm#10517).
    """
    return model.max_context_tokens * model.rotary_dim * number_bytes


def heads_of_rank(kv_heads: int, tensor_parallel: int) -> int:
    """KV heads of one rank: shared out, replicated where there are fewer than ranks (both SGLang's and vLLM's rule)."""
    return max(1, kv_heads // tensor_parallel)


def full_token_bytes(model: ModelFacts, tensor_parallel: int, kv_dtype: str) -> float:
    """KV bytes of one token in one layer that sees everything: heads × (key + value width) × bytes; latent: (rank + rope) × bytes."""
    if model.kv_lora_rank:
        return (model.kv_lora_rank + model.qk_rope_head_dim) * dtype_bytes(kv_dtype)
    heads = heads_of_rank(model.kv_heads, tensor_parallel)
    return heads * (model.head_dim + (model.v_head_dim or model.head_dim)) * dtype_bytes(kv_dtype)


def sliding_token_bytes(model: ModelFacts, tensor_parallel: int, kv_dtype: str) -> float:
    """The same for one sliding layer, whose heads may differ."""
    heads = heads_of_rank(model.sliding_kv_heads or model.kv_heads, tensor_parallel)
    return heads * 2 * (model.sliding_head_dim or model.head_dim) * dtype_bytes(kv_dtype)


def state_slot_bytes(inputs: PlanInputs, extra_steps: int = 0) -> int:
    """Linear state of one slot on one rank, in bytes: layers × (convolution + recurrent state) ÷ tp."""
    linear = inputs.model.linear
    if linear is None:
        return 0
    layer = state_bytes_per_layer(linear, inputs.state_dtype, extra_steps)
    return inputs.model.linear_attention_layers * layer // inputs.tensor_parallel


def resolved_kv_dtype(inputs: PlanInputs) -> str:
    """The KV dtype's own name: "auto" is the model's dtype."""
    return inputs.model.dtype if inputs.kv_dtype in ("auto", "") else inputs.kv_dtype


def fitting_context(inputs: PlanInputs, kv_tokens: int) -> int:
    """The context that a pool allows: the wanted one, else the largest multiple of 1024 under the pool less the slack.

    The slack is 2,048 tokens, a sixteenth of a small pool. Never more than the model's own limit; 0 when nothing is left.
    """
    if inputs.context_length_tokens is not None:
        return inputs.context_length_tokens
    room = kv_tokens - min(CONTEXT_SLACK_TOKENS, kv_tokens // 16)
    return max(0, min(room // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS, inputs.model.max_context_tokens))


def needed_headroom_bytes(inputs: PlanInputs, activation_peak_bytes: int) -> int:
    """Headroom that a plan must have, in bytes: the peak and its margin, and half as much again as what was not enough before."""
    return max(round(activation_peak_bytes * (1 + inputs.margin)), round(1.5 * inputs.oom_headroom_bytes))


def link(inputs: PlanInputs, name: str, measured: int | None, worked_out: float, formula: str, source: str) -> Term:
    """A link of the chain: the measured number where there is one, else the one that the formula gives."""
    if measured is not None:
        return Term(name, measured, "measured", inputs.measured.source)
    return Term(name, round(worked_out), formula, source)


def gib(size_bytes: float) -> str:
    """For formulas: "23.23 GiB"."""
    return format_bytes(round(size_bytes))


def whole_plan(
    mem_fraction: float,
    *,
    free_bytes: int,
    weight_bytes: int,
    state_bytes: int,
    pool_bytes: int,
    cell_bytes: float,
    kv_tokens: int,
    headroom_bytes: int,
    peak_bytes: int,
    context_tokens: int,
    terms: Iterable[Term],
    longest_tokens: int | None = None,
) -> MemoryPlan:
    """The chain as core's MemoryPlan; a pool below nothing is an empty one."""
    return MemoryPlan(
        free_at_start_bytes=free_bytes,
        mem_fraction=mem_fraction,
        weight_bytes=weight_bytes,
        linear_state_bytes=state_bytes,
        kv_pool_bytes=max(0, pool_bytes),
        kv_bytes_per_token=round(cell_bytes),
        kv_tokens=max(0, kv_tokens),
        headroom_bytes=headroom_bytes,
        activation_peak_bytes=peak_bytes,
        context_length_tokens=max(0, context_tokens),
        terms=tuple(terms),
        longest_tokens=longest_tokens,
    )
