"""The built-in CPU engine's arithmetic (appliance/engine: build.py, block_pool.py, kv_cache.py), on the machine's memory instead of a card.

pool tokens = (pool bytes ÷ block bytes − 1) × block tokens, the block taken off being the null block; 60 % of the blocks hold prompts and
40 % answers. Keys, values and activations are 32 bits wide; 16-bit checkpoints are widened when they are loaded.
"""

from __future__ import annotations

from dataclasses import replace

from appliance.core.plan import MemoryPlan, Term
from appliance.core.units import MIB
from appliance.planner.activation import step_token_bytes
from appliance.planner.chain import CONTEXT_STEP_TOKENS, fitting_context, free_before_engine, gib, link, loaded_weight_bytes, whole_plan
from appliance.planner.elements import dtype_bytes
from appliance.planner.inputs import PlanInputs

PROCESS_BYTES = 350 * MIB
"""Interpreter, torch and tokenizer before the weights."""
PREFILL_SHARE = 0.6
"""engine.prefill_fraction: blocks that hold prompts."""
_NUMBER_BYTES = 4


def resolve(inputs: PlanInputs) -> PlanInputs:
    """Fill in what was not said: the defaults of appliance.toml."""
    assumed = list(inputs.assumptions)
    if inputs.prefill_chunk_tokens is None:
        assumed.append("prefill chunk of 256 tokens")
    if inputs.max_running is None:
        assumed.append("8 sequences at once")
    return replace(
        inputs,
        prefill_chunk_tokens=inputs.prefill_chunk_tokens or 256,
        max_running=inputs.max_running or 8,
        block_tokens=inputs.block_tokens or 16,
        kv_dtype="float32",
        tensor_parallel=1,
        draft_tokens=0,
        assumptions=tuple(assumed),
    )


def free_at_start(inputs: PlanInputs) -> Term:
    """Memory that the engine may take, less the process itself."""
    free = free_before_engine(inputs)
    formula = f"{gib(free)} free − {gib(PROCESS_BYTES)} process"
    return link(inputs, "free at start", inputs.measured.free_at_start_bytes, max(0, free - PROCESS_BYTES), formula, "the machine's memory")


def weights(inputs: PlanInputs) -> Term:
    """The checkpoint in 32 bits."""
    own = dtype_bytes(inputs.model.dtype) if not inputs.model.quantisation else _NUMBER_BYTES
    size = round(loaded_weight_bytes(inputs) * _NUMBER_BYTES / own)
    formula = f"{gib(inputs.model.weight_bytes)} in {inputs.model.dtype}, served in 32 bits"
    return link(inputs, "weights", inputs.measured.weight_bytes, size, formula, inputs.model.weights_from)


def cell_bytes(inputs: PlanInputs) -> int:
    """2 × layers × heads × width × 4; sliding layers keep everything too."""
    model = inputs.model
    layers = model.full_attention_layers + model.sliding_window_layers
    return 2 * layers * model.kv_heads * model.head_dim * _NUMBER_BYTES


def plan_at(inputs: PlanInputs, mem_fraction: float) -> MemoryPlan:
    """The whole chain of resolved inputs at one share of the free memory."""
    free, weight, cell = free_at_start(inputs), weights(inputs), cell_bytes(inputs)
    block = inputs.block_tokens or 16
    room = round(mem_fraction * free.size_bytes) - weight.size_bytes
    pool = link(
        inputs, "KV pool", inputs.measured.kv_pool_bytes, max(0, room),
        f"{mem_fraction:g} × {gib(free.size_bytes)} − {gib(weight.size_bytes)}", "what is left of the fraction",
    )  # fmt: skip
    tokens = max(0, pool.size_bytes // (block * cell) - 1) * block if cell else inputs.model.max_context_tokens
    # One sequence cannot use more than the model's limit; a pool for all of them at once is enough.
    useful = inputs.running * (inputs.model.max_context_tokens + CONTEXT_STEP_TOKENS)
    if inputs.measured.kv_pool_bytes is None and tokens > useful:
        tokens = useful // block * block
        pool = replace(pool, size_bytes=(tokens // block + 1) * block * cell, formula=f"{inputs.running} sequences of the model's limit")
    step = inputs.chunk * step_token_bytes(inputs.model, 1, _NUMBER_BYTES) + 3 * inputs.running * inputs.model.vocab_size * _NUMBER_BYTES
    peak = link(
        inputs, "prefill peak", inputs.measured.activation_peak_bytes, step,
        f"chunk of {inputs.chunk:,} tokens and {inputs.running} rows of logits, 32 bits", "widest layer",
    )  # fmt: skip
    left = free.size_bytes - weight.size_bytes - pool.size_bytes
    headroom = Term("headroom", left, "free − weights − pool", "what a step may take")
    return whole_plan(
        mem_fraction,
        free_bytes=free.size_bytes,
        weight_bytes=weight.size_bytes,
        state_bytes=0,
        pool_bytes=pool.size_bytes,
        cell_bytes=cell,
        kv_tokens=tokens,
        headroom_bytes=left,
        peak_bytes=peak.size_bytes,
        context_tokens=fitting_context(inputs, tokens),
        terms=(free, weight, pool, headroom, peak),
    )
