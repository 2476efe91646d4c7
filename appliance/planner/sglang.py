"""SGLang's arithmetic. Read in the sources of 0.5.9, 0.5.17 and 0.5.23; versions between follow the older of their neighbours.

pool bytes = mem_fraction_static × P − weights − state; tokens = pool ÷ cell, rounded down to pages (mem_cache/kv_cache_configurator.py,
model_executor/pool_configurator.py; before 0.5.10 model_executor/model_runner_kv_cache_mixin.py). The fraction multiplies P, the memory
free after the CUDA context and before the weights, not the card. Nothing but (1 − f) × P protects the activation peak.
"""

from __future__ import annotations

from dataclasses import replace

from appliance.core.plan import MemoryPlan, ModelFacts, Term
from appliance.core.units import GIB, MIB
from appliance.core.versions import version_of
from appliance.planner.activation import serving_peak_bytes
from appliance.planner.chain import (
    communicator_bytes,
    context_bytes,
    draft_layers,
    fitting_context,
    free_before_engine,
    full_token_bytes,
    gib,
    link,
    loaded_weight_bytes,
    resolved_kv_dtype,
    rotary_table_bytes,
    sliding_token_bytes,
    speculative,
    state_slot_bytes,
    whole_plan,
)
from appliance.planner.inputs import PlanInputs, as_served

NEWEST = (0, 5, 23)
_BUDGETS_PADDING_AND_DRAFT = (0, 5, 10)
"""From here on the state's padding slot and the drafter's cache are inside the budget; before, they came out of the headroom."""
_RESERVES_MULTIMODAL = (0, 5, 20)
"""From here on a multimodal model's embedding cache is taken off the KV budget (mm_runtime_reservation_gb)."""

SLIDING_SHARE = 0.8
"""--swa-full-tokens-ratio: tokens of the sliding layers' pool for each of the full layers'."""
SLOTS_PER_REQUEST = 3
"""State slots of one running request with the prefix cache on and --mamba-radix-cache-strategy no_buffer; 1 with it off."""
DEFAULT_CHUNK_TOKENS = 2048
"""SGLang's own default for cards under 35 GiB; its larger ones for larger cards cost headroom, so they are asked for, not assumed."""
DEFAULT_RUNNING = 8
DEFAULT_RUNNING_LINEAR = 3
"""Each sequence takes three state slots, which is three times 75 MiB for a 27B hybrid."""
LOAD_OVERHEAD_BYTES = 100 * MIB
"""Kernels loaded with the weights and the allocator's roundings: 56.98 GiB were used by 56.87 GiB of tensors (Qwen3-30B-A3B)."""
REPACK_OVERHEAD_BYTES = 64 * MIB
"""What repacking quantised weights for their kernels leaves behind on top."""
_SLIDING_POOLS = (
    "GptOss", "Llama4", "Gemma4", "MiMoV2", "Step3p", "Laguna", "Mellum", "Inkling",
)  # fmt: skip
"""Architectures whose sliding layers get a pool of their own; all others keep every token in every layer."""


def resolve(inputs: PlanInputs) -> PlanInputs:
    """Fill in what was not said, with a sentence for each assumption. None depends on the card: more memory never gives less context."""
    inputs, assumed = as_served(inputs), list(inputs.assumptions)
    if inputs.prefill_chunk_tokens is None:
        assumed.append(f"a prefill chunk of {DEFAULT_CHUNK_TOKENS:,} tokens (--chunk)")
    running = inputs.max_running or _default_running(inputs)
    if inputs.max_running is None:
        assumed.append(f"{running} sequences at once (--max-running)")
    state_dtype = inputs.state_dtype
    worked_out = inputs.model.linear is not None and inputs.measured.linear_state_bytes is None
    if inputs.model.linear and worked_out and state_dtype is None:
        state_dtype = "bfloat16"
        assumed.append(f"linear state in bfloat16 (--ssm-dtype; the model asks for {inputs.model.linear.state_dtype})")
    chunk = inputs.prefill_chunk_tokens or DEFAULT_CHUNK_TOKENS
    filled = replace(inputs, prefill_chunk_tokens=chunk, state_dtype=state_dtype, max_running=running)
    if inputs.measured.linear_state_bytes is not None and state_dtype is None:
        filled = replace(filled, state_dtype=_dtype_behind(filled, inputs.measured.linear_state_bytes))
    if worked_out and inputs.state_slots is None:
        assumed.append(
            f"{state_slots(filled)} linear-state slots, {slots_per_request(filled)} a sequence, and one of padding (--state-slots)"
        )
    return replace(filled, assumptions=tuple(assumed))


def _default_running(inputs: PlanInputs) -> int:
    if inputs.state_slots is not None:
        return max(1, inputs.state_slots // slots_per_request(inputs))
    return DEFAULT_RUNNING_LINEAR if inputs.model.linear else DEFAULT_RUNNING


def _dtype_behind(inputs: PlanInputs, state_bytes: int) -> str:
    """Which dtype a measured state was in: the one whose slots come nearest."""

    def distance(dtype: str) -> int:
        return abs((state_slots(inputs) + 1) * state_slot_bytes(replace(inputs, state_dtype=dtype)) - state_bytes)

    return min(("bfloat16", "float32"), key=distance)


def slots_per_request(inputs: PlanInputs) -> int:
    """State slots of one running request."""
    return SLOTS_PER_REQUEST if inputs.prefix_cache else 1


def state_slots(inputs: PlanInputs) -> int:
    """K, --max-mamba-cache-size: slots without the padding one."""
    if inputs.state_slots is not None:
        return inputs.state_slots
    return inputs.running * slots_per_request(inputs)


def free_at_start(inputs: PlanInputs) -> Term:
    """P = free before the engine − CUDA context − communicator; "Load weight begin. avail mem" (distributed/bootstrap.py)."""
    free, tp = free_before_engine(inputs), inputs.tensor_parallel
    context, communicator = context_bytes(inputs.gpu.total_bytes), communicator_bytes(tp)
    formula = f"{gib(free)} free − {gib(context)} CUDA context − {gib(communicator)} communicator"
    measured = inputs.measured.free_at_start_bytes
    return link(inputs, "free at start", measured, max(0, free - context - communicator), formula, "worked out from the card")


def weights(inputs: PlanInputs) -> Term:
    """W, "Load weight end ... mem usage": tensors ÷ tp + table of rotations in 32 bits + kernels loaded on the way."""
    tensors, table = loaded_weight_bytes(inputs), rotary_table_bytes(inputs.model, 4)
    overhead = LOAD_OVERHEAD_BYTES + (REPACK_OVERHEAD_BYTES if inputs.model.quantisation else 0)
    formula = f"{gib(tensors)} of tensors a rank + {gib(table)} rotary table + {gib(overhead)} of kernels"
    return link(inputs, "weights", inputs.measured.weight_bytes, tensors + table + overhead, formula, inputs.model.weights_from)


def linear_state(inputs: PlanInputs, version: tuple[int, ...]) -> Term:
    """M = (K + 1) × slot [K before 0.5.10], and with a drafter (requests + 1) × slot × draft tokens more (_handle_max_mamba_cache)."""
    if inputs.model.linear is None and inputs.measured.linear_state_bytes is None:
        return Term("linear state", 0, "no linear layers", "the model")
    slot, slots = state_slot_bytes(inputs), state_slots(inputs)
    padding = 1 if version >= _BUDGETS_PADDING_AND_DRAFT else 0
    size = (slots + padding) * slot
    formula = f"({slots} slots + {padding} of padding) × {gib(slot)}"
    if speculative(inputs):
        extra = inputs.running + padding
        size += extra * slot * inputs.draft_tokens
        formula += f" + {extra} × {inputs.draft_tokens} drafted × {gib(slot)}"
    return link(inputs, "linear state", inputs.measured.linear_state_bytes, size, formula, f"{inputs.state_dtype} recurrent state")


def cell_bytes(inputs: PlanInputs, version: tuple[int, ...]) -> float:
    """Bytes of one token on one rank over all layers that keep it; with a drafter its layers on top (from 0.5.10)."""
    model, tp, dtype = inputs.model, inputs.tensor_parallel, resolved_kv_dtype(inputs)
    full = full_token_bytes(model, tp, dtype)
    drafted = draft_layers(inputs) if version >= _BUDGETS_PADDING_AND_DRAFT else 0
    indexer = (model.index_head_dim + model.index_head_dim // 128 * 4) if model.kv_lora_rank else 0
    if model.kv_lora_rank and indexer and dtype.startswith("fp8"):  # scales beside the latent part, the rope part in 16 bits
        full = model.kv_lora_rank + model.kv_lora_rank // 128 * 4 + 2 * model.qk_rope_head_dim
    if not model.sliding_window_layers:
        return (model.full_attention_layers + drafted) * (full + indexer)
    sliding = sliding_token_bytes(model, tp, dtype)
    if not has_sliding_pool(model):
        return model.full_attention_layers * full + model.sliding_window_layers * sliding + drafted * full
    share = SLIDING_SHARE if model.full_attention_layers else 1.0
    return (model.full_attention_layers + drafted) * full + share * model.sliding_window_layers * sliding


def has_sliding_pool(model: ModelFacts) -> bool:
    """Whether the sliding layers keep less than everything (is_hybrid_swa_model)."""
    return model.architecture.startswith(_SLIDING_POOLS)


def fixed_after_pool(inputs: PlanInputs) -> Term:
    """G: what comes after the pools and out of the headroom: the attention backend's workspace and the CUDA graphs.

    FlashInfer's workspace is 384 MiB, 512 for Qwen2 and Qwen3 (flashinfer_backend.py). Decode graphs: 48 MiB, 24 a captured batch size
    and 2 a sequence of the largest: 128 MiB for the batches 1, 2, 4 of the article's box. Prefill graphs 336 MiB where there is room.
    """
    workspace = 512 * MIB if inputs.model.architecture.startswith(("Qwen2", "Qwen3For", "Qwen3Moe", "MiMo")) else 384 * MIB
    sizes = captured_batches(inputs.running)
    graphs = 0 if "cuda_graph" in inputs.features_off else (48 + 24 * sizes + 2 * inputs.running) * MIB
    roomy = max(0, inputs.gpu.total_bytes - 24 * GIB) // 50  # they are skipped where less than 4 GiB are free
    prefill = 0 if "cuda_graph" in inputs.features_off else min(336 * MIB, roomy)
    small = 20 * MIB  # request tables and the backend's integer workspaces
    formula = f"{gib(workspace)} workspace + {gib(graphs)} for {sizes} decode graphs + {gib(prefill)} prefill graphs + {gib(small)}"
    measured = inputs.measured.fixed_bytes
    return link(inputs, "workspaces and graphs", measured, workspace + graphs + prefill + small, formula, "allocated after the pool")


def captured_batches(running: int) -> int:
    """How many batch sizes are captured up to `running`: 1, 2, 4, 8, 12, 16, then every eighth, 256 at most (server_args.py)."""
    largest = min(running, 256)
    return len({size for size in (1, 2, 4, 8, 12, 16, *range(24, largest, 8)) if size < largest} | {largest})


def plan_at(inputs: PlanInputs, mem_fraction: float) -> MemoryPlan:
    """The whole chain of resolved inputs at one fraction."""
    version = version_of(inputs.engine_version, NEWEST)
    free, weight, state = free_at_start(inputs), weights(inputs), linear_state(inputs, version)
    fixed, cell = fixed_after_pool(inputs), cell_bytes(inputs, version)
    reserved = _multimodal_reserve(inputs, version)
    budget = mem_fraction * free.size_bytes
    pool = link(
        inputs, "KV pool", inputs.measured.kv_pool_bytes,
        max(0.0, budget - weight.size_bytes - state.size_bytes - reserved),
        f"{mem_fraction:g} × {gib(free.size_bytes)} − {gib(weight.size_bytes)} − {gib(state.size_bytes)}"
        + (f" − {gib(reserved)} for images" if reserved else ""),
        "what is left of the fraction",
    )  # fmt: skip
    page = inputs.block_tokens or 1
    tokens = int(max(0, pool.size_bytes) // cell) // page * page if cell else inputs.model.max_context_tokens
    outside, outside_words = _outside_budget(inputs, version, tokens)
    headroom = round((1 - mem_fraction) * free.size_bytes) - fixed.size_bytes - outside
    peak = link(
        inputs, "prefill peak", inputs.measured.activation_peak_bytes,
        serving_peak_bytes(inputs.model, inputs.tensor_parallel, inputs.chunk, inputs.running),
        f"chunk of {inputs.chunk:,} tokens", "widest layer of one chunk, and what the allocator keeps",
    )  # fmt: skip
    formula = f"(1 − {mem_fraction:g}) × {gib(free.size_bytes)} − {gib(fixed.size_bytes)}{outside_words}"
    return whole_plan(
        mem_fraction,
        free_bytes=free.size_bytes,
        weight_bytes=weight.size_bytes,
        state_bytes=state.size_bytes,
        pool_bytes=pool.size_bytes,
        cell_bytes=cell,
        kv_tokens=tokens,
        headroom_bytes=headroom,
        peak_bytes=peak.size_bytes,
        context_tokens=fitting_context(inputs, tokens),
        terms=(free, weight, state, pool, fixed, Term("headroom", headroom, formula, "what a step may take"), peak),
    )


def _multimodal_reserve(inputs: PlanInputs, version: tuple[int, ...]) -> int:
    """SGLANG_VLM_CACHE_SIZE_MB, 100 MiB, off the KV budget; the 1 GiB of the cuda_ipc transport is avoided by our flags."""
    seeing = inputs.model.vision_weight_bytes and not inputs.language_only
    return 100 * MIB if seeing and version >= _RESERVES_MULTIMODAL else 0


def _outside_budget(inputs: PlanInputs, version: tuple[int, ...], tokens: int) -> tuple[int, str]:
    """Before 0.5.10 the padding slot, and the drafter's weights and cache, come out of the headroom."""
    if version >= _BUDGETS_PADDING_AND_DRAFT:
        return 0, ""
    size = state_slot_bytes(inputs) if inputs.measured.linear_state_bytes is None else 0
    if speculative(inputs):
        layer = full_token_bytes(inputs.model, inputs.tensor_parallel, resolved_kv_dtype(inputs))
        size += round(draft_layers(inputs) * layer * tokens)
    return size, f" − {gib(size)} outside the budget" if size else ""
