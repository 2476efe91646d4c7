"""llama.cpp's arithmetic, from the sources of b11434 (llama-context, llama-kv-cache, llama-kv-cache-iswa, llama-memory-recurrent).

There is no fraction in llama.cpp: -c fixes the KV cache, and everything else is allocated around it. Here the fraction is the share of the
free memory that weights, state and KV cache may take; the compute buffer, which is the activation peak, must fit into the rest.
"""

from __future__ import annotations

from dataclasses import replace

from appliance.core.plan import MemoryPlan, Term
from appliance.core.units import MIB
from appliance.planner.activation import step_token_bytes
from appliance.planner.chain import (
    CONTEXT_STEP_TOKENS,
    context_bytes,
    free_before_engine,
    full_token_bytes,
    gib,
    heads_of_rank,
    link,
    loaded_weight_bytes,
    needed_headroom_bytes,
    resolved_kv_dtype,
    sliding_token_bytes,
    whole_plan,
)
from appliance.planner.elements import is_16_bit
from appliance.planner.inputs import PlanInputs
from appliance.planner.model_config import state_bytes_per_layer

PAD_TOKENS = 256
"""n_ctx, and the sliding layers' cache, are rounded up to this (GGML_PAD)."""
_WORDS = {"auto": "f16", "bfloat16": "bf16", "float16": "f16", "float32": "f32", "fp8": "q8_0", "fp8_e4m3": "q8_0", "fp8_e5m2": "q8_0"}
"""Our words for a KV dtype → --cache-type-k. There is no 8-bit float: q8_0 is the nearest."""


def resolve(inputs: PlanInputs) -> PlanInputs:
    """Fill in what was not said, with a sentence for each assumption."""
    assumed = list(inputs.assumptions)
    chunk = inputs.prefill_chunk_tokens or 512
    if inputs.prefill_chunk_tokens is None:
        assumed.append(f"--ubatch-size {chunk}")
    running = inputs.max_running or 1
    if inputs.max_running is None:
        assumed.append("one sequence at a time (--parallel 1)")
    word = _WORDS.get(inputs.kv_dtype, inputs.kv_dtype)
    if word != inputs.kv_dtype:
        assumed.append(f"KV cache in {word}")
    return replace(inputs, prefill_chunk_tokens=chunk, max_running=running, kv_dtype=word, assumptions=tuple(assumed))


def free_at_start(inputs: PlanInputs) -> Term:
    """Free before the engine − its CUDA context."""
    free, context = free_before_engine(inputs), context_bytes(inputs.gpu.total_bytes)
    formula = f"{gib(free)} free − {gib(context)} CUDA context"
    return link(inputs, "free at start", inputs.measured.free_at_start_bytes, max(0, free - context), formula, "worked out from the card")


def weights(inputs: PlanInputs) -> Term:
    """ "CUDA0 model buffer size": tensors ÷ cards, less the input embedding, which stays in host memory."""
    host = inputs.model.host_weight_bytes
    tensors = loaded_weight_bytes(inputs) - host // inputs.tensor_parallel
    formula = f"tensors a card − {gib(host)} of input embedding in host memory" if host else "tensors a card"
    return link(inputs, "weights", inputs.measured.weight_bytes, tensors, formula, inputs.model.weights_from)


def recurrent_state(inputs: PlanInputs) -> Term:
    """ "RS buffer size": sequences × layers × (convolution + state), both in 32 bits."""
    linear = inputs.model.linear
    if linear is None:
        return Term("linear state", 0, "no linear layers", "the model")
    both = state_bytes_per_layer(linear, "float32") + (linear.conv_kernel - 1) * linear.conv_channels * 2  # the convolution in 32 bits
    size = inputs.running * inputs.model.linear_attention_layers * both // inputs.tensor_parallel
    formula = f"{inputs.running} sequences × {inputs.model.linear_attention_layers} layers × {gib(both)}"
    return link(inputs, "linear state", inputs.measured.linear_state_bytes, size, formula, "32 bits, convolution included")


def cell_bytes(inputs: PlanInputs) -> float:
    """Bytes of one token in all layers that see everything; a card's share of the layers."""
    layers = inputs.model.full_attention_layers
    return layers * full_token_bytes(inputs.model, 1, resolved_kv_dtype(inputs)) / inputs.tensor_parallel


def sliding_cache(inputs: PlanInputs) -> Term:
    """The sliding layers' cache: window × sequences + ubatch, rounded up to 256, whatever the context (llama_kv_cache_iswa)."""
    model = inputs.model
    if not model.sliding_window_layers:
        return Term("sliding KV", 0, "no sliding layers", "the model")
    cells = -(-(model.sliding_window_tokens * inputs.running + inputs.chunk) // PAD_TOKENS) * PAD_TOKENS
    size = cells * model.sliding_window_layers * sliding_token_bytes(model, 1, resolved_kv_dtype(inputs)) / inputs.tensor_parallel
    return Term("sliding KV", round(size), f"{cells:,} cells × {model.sliding_window_layers} layers", "window and one batch")


def compute_buffer(inputs: PlanInputs, context_tokens: int) -> Term:
    """ "CUDA0 compute buffer size" and what flash attention takes beside it.

    ubatch × (vocabulary × 4 + one layer's activations in 32 bits) + mask: context × ubatch × 2 + a 16-bit copy of one layer's quantised
    cache. Source: 258.50 MiB printed for Llama-3-8B at 8,192 (250.5 of logits and 8 of mask).
    """
    model, ubatch = inputs.model, inputs.chunk
    logits = ubatch * model.vocab_size * 4
    step = ubatch * step_token_bytes(model, 1, 4) // 2
    mask = context_tokens * ubatch * 2
    copy = 0
    if not is_16_bit(resolved_kv_dtype(inputs)) and model.full_attention_layers:
        copy = context_tokens * heads_of_rank(model.kv_heads, 1) * 2 * model.head_dim * 2
    size = max(logits, step) + mask + copy + 32 * MIB
    formula = f"{ubatch} × {model.vocab_size:,} logits × 4 + mask {gib(mask)}" + (f" + 16-bit copy of a layer {gib(copy)}" if copy else "")
    return link(inputs, "compute buffer", inputs.measured.activation_peak_bytes, size, formula, "reserved for the worst batch")


def plan_at(inputs: PlanInputs, mem_fraction: float) -> MemoryPlan:
    """The whole chain of resolved inputs at one share of the free memory."""
    free, weight, state, window = free_at_start(inputs), weights(inputs), recurrent_state(inputs), sliding_cache(inputs)
    cell = cell_bytes(inputs)
    room = round(mem_fraction * free.size_bytes) - weight.size_bytes - state.size_bytes - window.size_bytes
    most = int(max(0, room) // cell) // PAD_TOKENS * PAD_TOKENS if cell else inputs.model.max_context_tokens
    context = _context(inputs, most)
    cells = -(-context // PAD_TOKENS) * PAD_TOKENS  # llama.cpp allocates what -c asks for, not what is free
    cache = round(cells * cell)
    pool = link(
        inputs, "KV cache", inputs.measured.kv_pool_bytes, cache + window.size_bytes,
        f"{cells:,} cells × {cell:g} bytes" + (f" + {gib(window.size_bytes)} sliding" if window.size_bytes else ""),
        f"-c {context}, {resolved_kv_dtype(inputs)}",
    )  # fmt: skip
    peak = compute_buffer(inputs, cells)
    left = free.size_bytes - weight.size_bytes - state.size_bytes - pool.size_bytes
    headroom = Term("headroom", left, "free − weights − state − KV cache", "what the compute buffer may take")
    fits_room = pool.size_bytes <= room + window.size_bytes
    return whole_plan(
        mem_fraction,
        free_bytes=free.size_bytes,
        weight_bytes=weight.size_bytes,
        state_bytes=state.size_bytes,
        pool_bytes=pool.size_bytes,
        cell_bytes=cell,
        kv_tokens=cells if fits_room else most,
        headroom_bytes=left,
        peak_bytes=peak.size_bytes,
        context_tokens=context,
        terms=(free, weight, state, pool, headroom, peak),
    )


def tightest_fraction(inputs: PlanInputs) -> float:
    """The fraction whose context is the longest that leaves the compute buffer its room, on resolved inputs without a context.

    The buffer grows with the context, so the search is over contexts: steps of the fraction would lose some of it.
    """
    fixed = weights(inputs).size_bytes + recurrent_state(inputs).size_bytes + sliding_cache(inputs).size_bytes
    free, cell = free_at_start(inputs).size_bytes, cell_bytes(inputs)
    low, high = 0, inputs.model.max_context_tokens // CONTEXT_STEP_TOKENS
    while low < high:
        middle = (low + high + 1) // 2
        cells = middle * CONTEXT_STEP_TOKENS
        left = free - fixed - round(cells * cell)
        enough = left >= needed_headroom_bytes(inputs, compute_buffer(inputs, cells).size_bytes)
        low, high = (middle, high) if enough and fixed + cells * cell <= inputs.red_line * free else (low, middle - 1)
    return min(1.0, (fixed + low * CONTEXT_STEP_TOKENS * cell + 1) / free) if free else 1.0


def _context(inputs: PlanInputs, most: int) -> int:
    """-c: the wanted one, else the largest multiple of 1024 that there is room for; nothing is kept free, as nothing is shared."""
    if inputs.context_length_tokens is not None:
        return inputs.context_length_tokens
    return min(most // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS, inputs.model.max_context_tokens)
