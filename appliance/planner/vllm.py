"""vLLM's arithmetic, from the sources of 0.19.1, 0.20.0, 0.20.1, 0.20.2 and 0.33.0.

requested = --gpu-memory-utilization × all that CUDA sees; KV = requested − consumed (weights + non-torch) − profiled activation peak − CUDA
graphs (v1/worker/gpu_worker.py, determine_available_memory). The fraction multiplies the card, not what is free, and the peak is inside it:
a run-time out-of-memory comes from what the profile did not see.
"""

from __future__ import annotations

from dataclasses import replace

from appliance.core.plan import MemoryPlan, Term
from appliance.core.units import MIB
from appliance.core.versions import version_of
from appliance.planner.activation import sampler_bytes, step_token_bytes, vision_bytes
from appliance.planner.chain import (
    CONTEXT_SLACK_TOKENS,
    CONTEXT_STEP_TOKENS,
    communicator_bytes,
    context_bytes,
    free_before_engine,
    gib,
    link,
    loaded_weight_bytes,
    rotary_table_bytes,
    whole_plan,
)
from appliance.planner.inputs import PlanInputs
from appliance.planner.vllm_blocks import Geometry, blocks_label, geometry

NEWEST = (0, 33, 0)
COUNTS_GRAPHS = (0, 20)
"""From here on the CUDA graphs' estimate is taken off the KV cache (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS is on)."""
NON_TORCH_BYTES = 150 * MIB
"""Beyond the context that is there before the first look: cuBLAS, kernels, the attention backend's buffers."""
OLD_NON_TORCH_BYTES = 370 * MIB
"""Before the V1 engine the context itself was counted: 0.36 GiB printed on a 3090 (vllm#10517)."""
LEAST_PEAK_BYTES = 700 * MIB
"""No profiled peak of the V1 engine that we know is smaller: compiled graphs keep their buffers (fitted on public logs)."""
_V1 = (0, 8)


def resolve(inputs: PlanInputs) -> PlanInputs:
    """Fill in what was not said, with a sentence for each assumption."""
    assumed = list(inputs.assumptions)
    chunk = inputs.prefill_chunk_tokens or 2048
    if inputs.prefill_chunk_tokens is None:
        assumed.append(f"batches of {chunk:,} prefill tokens (--chunk)")
    running = inputs.max_running or 8
    if inputs.max_running is None:
        assumed.append(f"{running} sequences at once (--max-running)")
    state_dtype = inputs.state_dtype
    if inputs.model.linear:
        state_dtype = state_dtype or inputs.model.linear.state_dtype
        blocks = (2 if inputs.prefix_cache else 1) + inputs.draft_tokens
        if inputs.state_dtype is None:
            assumed.append(f"linear state in {state_dtype} as the model asks, {blocks} blocks of it a sequence in each group")
    return replace(inputs, prefill_chunk_tokens=chunk, max_running=running, state_dtype=state_dtype, assumptions=tuple(assumed))


def free_at_start(inputs: PlanInputs) -> Term:
    """ "Free memory on device (x/y GiB) on startup": free before the engine − its CUDA context."""
    free, context = free_before_engine(inputs), context_bytes(inputs.gpu.total_bytes)
    formula = f"{gib(free)} free − {gib(context)} CUDA context"
    return link(inputs, "free at start", inputs.measured.free_at_start_bytes, max(0, free - context), formula, "worked out from the card")


def weights(inputs: PlanInputs) -> Term:
    """ "Model loading took x GiB": tensors ÷ tp + table of rotations in the model's dtype (14.9888 for Llama-3.1-8B, to four digits)."""
    tensors, table = loaded_weight_bytes(inputs), rotary_table_bytes(inputs.model, 2)
    formula = f"{gib(tensors)} of tensors a rank + {gib(table)} rotary table"
    return link(inputs, "weights", inputs.measured.weight_bytes, tensors + table, formula, inputs.model.weights_from)


def non_torch(inputs: PlanInputs, version: tuple[int, ...]) -> Term:
    """What the process takes beside torch's allocations: kernels, cuBLAS, and the communicator of several ranks."""
    own = NON_TORCH_BYTES if version >= _V1 else OLD_NON_TORCH_BYTES
    communicator = communicator_bytes(inputs.tensor_parallel)
    formula = f"{gib(own)} + {gib(communicator)} communicator"
    return link(inputs, "non-torch", inputs.measured.non_torch_bytes, own + communicator, formula, "typical of public logs")


def activation(inputs: PlanInputs, version: tuple[int, ...]) -> Term:
    """ "GiB for peak activation": the largest of a full batch, the sampler, and one image of the largest size, as vLLM profiles them."""
    step = inputs.chunk * step_token_bytes(inputs.model, inputs.tensor_parallel)
    sampler = sampler_bytes(inputs.model, inputs.running)
    seeing = 0 if inputs.language_only else vision_bytes(inputs.model)
    least = LEAST_PEAK_BYTES if version >= _V1 else 0
    formula = f"the largest of {gib(step)} for {inputs.chunk:,} tokens, {gib(sampler)} to sample, {gib(seeing)} for an image, {gib(least)}"
    peak = max(step, sampler, seeing, least)
    return link(inputs, "prefill peak", inputs.measured.activation_peak_bytes, peak, formula, "profiled at every start")


def graphs(inputs: PlanInputs) -> Term:
    """ "GiB for CUDAGraph memory": 40 MiB and 8 a captured size; sizes 1, 2, 4, then every eighth up to twice the sequences."""
    if "cuda_graph" in inputs.features_off:
        return link(inputs, "CUDA graphs", inputs.measured.fixed_bytes, 0, "off", "--enforce-eager")
    sizes = 3 + min(2 * inputs.running, 512) // 8
    formula = f"40 MiB + {sizes} captured sizes × 8 MiB"
    return link(inputs, "CUDA graphs", inputs.measured.fixed_bytes, (40 + 8 * sizes) * MIB, formula, "typical of public logs")


def plan_at(inputs: PlanInputs, mem_fraction: float) -> MemoryPlan:
    """The whole chain of resolved inputs at one --gpu-memory-utilization."""
    version = version_of(inputs.engine_version, NEWEST)
    total = inputs.gpu.total_bytes
    free, weight, other = free_at_start(inputs), weights(inputs), non_torch(inputs, version)
    peak, captured = activation(inputs, version), graphs(inputs)
    inside = captured.size_bytes if version >= COUNTS_GRAPHS else 0
    requested = -(-total * round(mem_fraction * 10000) // 10000)
    pool = link(
        inputs, "KV pool", inputs.measured.kv_pool_bytes,
        max(0, requested - weight.size_bytes - other.size_bytes - peak.size_bytes - inside),
        f"{mem_fraction:g} × {gib(total)} − {gib(weight.size_bytes)} − {gib(other.size_bytes)} − {gib(peak.size_bytes)} − {gib(inside)}",
        "what is left of the requested memory",
    )  # fmt: skip
    shape = geometry(inputs, version)
    blocks = shape.blocks_of(pool.size_bytes)
    context = _context(inputs, shape, blocks)
    longest = shape.longest(blocks, max(context, inputs.model.max_context_tokens), 1)
    # A context that the blocks do not hold is refused at the start: "the estimated maximum model length".
    tokens = longest if longest < context else shape.tokens(blocks, context, version)
    headroom = free.size_bytes - requested + peak.size_bytes - (captured.size_bytes - inside)
    formula = f"{gib(free.size_bytes)} − {gib(requested)} requested + {gib(peak.size_bytes)} of peak inside it"
    return whole_plan(
        mem_fraction,
        free_bytes=free.size_bytes,
        weight_bytes=weight.size_bytes,
        state_bytes=0,
        pool_bytes=pool.size_bytes,
        cell_bytes=shape.block_bytes * shape.blocks_of_request(context) / context if context else 0,
        kv_tokens=tokens,
        headroom_bytes=headroom,
        peak_bytes=peak.size_bytes,
        context_tokens=context,
        terms=(
            free, weight, other, peak, captured, pool,
            Term("KV blocks", blocks * shape.block_bytes, blocks_label(blocks, shape.block_bytes), "whole blocks"),
            Term("headroom", headroom, formula, "what a step may take"),
        ),
        longest_tokens=longest,
    )  # fmt: skip


def _context(inputs: PlanInputs, shape: Geometry, blocks: int) -> int:
    """--max-model-len: the wanted one, else the longest that the blocks hold, a multiple of 1024, with the slack left free."""
    if inputs.context_length_tokens is not None:
        return inputs.context_length_tokens
    longest = shape.longest(blocks, inputs.model.max_context_tokens + CONTEXT_SLACK_TOKENS, CONTEXT_STEP_TOKENS)
    room = longest - min(CONTEXT_SLACK_TOKENS, longest // 16)
    return min(room // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS, inputs.model.max_context_tokens)
