"""The built-in CPU engine's arithmetic (appliance/engine: build.py, block_pool.py, kv_cache.py), on the machine's memory instead of a card.

pool tokens = (pool bytes ÷ block bytes − 1) × block tokens, the block taken off being the null block; 60 % of the blocks hold prompts and
40 % answers. Answers that give way to others are set aside in swap bytes beside the pool (engine/swap.py):

    headroom = free at start − weights − pool − swap

Keys, values and activations are 32 bits wide; weights are served in 8 bits with a 16-bit scale for each 32 of them, or in 32
(`engine.weights_dtype`; kernels/x86/int8.h).
"""

from __future__ import annotations

from dataclasses import replace

from appliance.core.plan import MemoryPlan, Term
from appliance.core.units import MIB
from appliance.planner.activation import step_token_bytes
from appliance.planner.chain import (
    CONTEXT_STEP_TOKENS,
    fitting_context,
    free_before_engine,
    gib,
    link,
    loaded_weight_bytes,
    needed_headroom_bytes,
    whole_plan,
)
from appliance.planner.elements import dtype_bytes
from appliance.planner.inputs import PlanInputs

PROCESS_BYTES = 350 * MIB
"""Interpreter, torch and tokenizer before the weights."""
PREFILL_SHARE = 0.6
"""engine.prefill_fraction: blocks that hold prompts."""
_NUMBER_BYTES = 4
_SERVED = {
    "float32": (4.0, "32 bits"),
    "int8": (1 + 2 / 32, "8 bits and scales"),
    "bfloat16": (2.0, "16 bits"),
    "float16": (2.0, "16 bits"),
}
"""engine.weights_dtype → bytes of one number, and how it is said."""
SWAP_BYTES = 64 * MIB
"""engine.swap_bytes, where nobody says."""
_TILE_TOKENS = 64
"""Query tokens whose scores are computed together (kernels/paged_prefill)."""


def resolve(inputs: PlanInputs) -> PlanInputs:
    """Fill in what was not said: the defaults of appliance.toml."""
    assumed = list(inputs.assumptions)
    if inputs.prefill_chunk_tokens is None:
        assumed.append("prefill chunk of 256 tokens")
    if inputs.max_running is None:
        assumed.append("8 sequences at once")
    if not inputs.weights_dtype:
        assumed.append("weights served in 8 bits (engine.weights_dtype)")
    if inputs.swap_bytes is None:
        assumed.append(f"{gib(SWAP_BYTES)} for answers that give way (engine.swap_bytes)")
    return replace(
        inputs,
        swap_bytes=SWAP_BYTES if inputs.swap_bytes is None else inputs.swap_bytes,
        prefill_chunk_tokens=inputs.prefill_chunk_tokens or 256,
        max_running=inputs.max_running or 8,
        block_tokens=inputs.block_tokens or 16,
        kv_dtype="float32",
        weights_dtype=inputs.weights_dtype or "int8",
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
    """The checkpoint in 32 bits a number, or in 8 with a 16-bit scale for each 32 numbers."""
    own = dtype_bytes(inputs.model.dtype) if not inputs.model.quantisation else _NUMBER_BYTES
    served_bytes, served = _SERVED[inputs.weights_dtype]
    size = round(loaded_weight_bytes(inputs) * served_bytes / own)
    formula = f"{gib(inputs.model.weight_bytes)} in {inputs.model.dtype}, served in {served}"
    return link(inputs, "weights", inputs.measured.weight_bytes, size, formula, inputs.model.weights_from)


def swap(inputs: PlanInputs) -> Term:
    """engine.swap_bytes, all of it: what is set aside is bounded by that alone, and taken when the pool is full, which is when a step
    needs its headroom too."""
    size = SWAP_BYTES if inputs.swap_bytes is None else inputs.swap_bytes
    return Term("swap", size, "engine.swap_bytes", "answers that give way")


def cell_bytes(inputs: PlanInputs) -> int:
    """2 × layers × heads × width × 4; sliding layers keep everything too."""
    model = inputs.model
    layers = model.full_attention_layers + model.sliding_window_layers
    return 2 * layers * model.kv_heads * model.head_dim * _NUMBER_BYTES


def attention_token_bytes(inputs: PlanInputs) -> int:
    """What the prefill kernel takes for each token that the chunk's last one sees, beside the layer's own tensors, 32 bits each:

    gathered keys and values 2 × kv heads × width; masks chunk × group; and for a tile of 64 query tokens six matrices kv heads × 64 × group
    of scores, exponents and what the allocator keeps of them (kernels/paged_prefill, tiles.attend_tiles).
    Source: 13.1, 24.0 and 49.4 MiB measured for chunks of 64, 256 and 1,024 at 1,024 tokens of SmolLM2-135M, 136.5 for 256 at 6,976.
    """
    model = inputs.model
    group = max(1, (model.attention_heads or model.kv_heads) // model.kv_heads)
    scores = 6 * model.kv_heads * min(inputs.chunk, _TILE_TOKENS) * group
    return (2 * model.kv_heads * model.head_dim + inputs.chunk * group + scores) * _NUMBER_BYTES


def step_bytes(inputs: PlanInputs) -> int:
    """What a prefill step takes however long its prompt is: the chunk's widest layer, and three rows of logits a sequence."""
    return inputs.chunk * step_token_bytes(inputs.model, 1, _NUMBER_BYTES) + 3 * inputs.running * inputs.model.vocab_size * _NUMBER_BYTES


def _context(inputs: PlanInputs, kv_tokens: int, left_bytes: int) -> int:
    """The wanted one, else the largest multiple of 1,024 that pool and headroom allow: the peak grows with it."""
    context = fitting_context(inputs, kv_tokens)
    if inputs.context_length_tokens is not None or inputs.measured.activation_peak_bytes is not None:
        return context
    room = int(left_bytes / (1 + inputs.margin)) - step_bytes(inputs)
    return min(context, max(0, room // attention_token_bytes(inputs)) // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS)


def tightest_fraction(inputs: PlanInputs) -> float:
    """The fraction with the longest context, the highest of several: more pool is less headroom, which the peak of a long prompt needs."""
    fractions = [round(inputs.red_line - step * 0.01, 4) for step in range(max(1, round((inputs.red_line - 0.2) / 0.01) + 1))]

    def worth(fraction: float) -> tuple[bool, int, float]:
        plan = plan_at(inputs, fraction)
        enough = plan.headroom_bytes >= needed_headroom_bytes(inputs, plan.activation_peak_bytes)
        return enough, plan.context_length_tokens, fraction

    return max(fractions, key=worth)


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
    aside = swap(inputs)
    left = free.size_bytes - weight.size_bytes - pool.size_bytes - aside.size_bytes
    context = _context(inputs, tokens, left)
    attention = context * attention_token_bytes(inputs)
    words = f"chunk of {inputs.chunk:,} tokens, {gib(attention)} of attention over {context:,}, {inputs.running} rows of logits"
    measured = inputs.measured.activation_peak_bytes
    peak = link(inputs, "prefill peak", measured, step_bytes(inputs) + attention, words, "widest layer")
    headroom = Term("headroom", left, "free − weights − pool − swap", "what a step may take")
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
        context_tokens=context,
        terms=(free, weight, pool, aside, headroom, peak),
    )
