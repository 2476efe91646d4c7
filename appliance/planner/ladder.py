"""Safer rungs after a failure: for each cause the moves that help, each computed, each asking for strictly less than the one before.

What "less" is depends on the cause (`demand`): bytes at the peak for an engine out of memory, missing bytes for one that refused to
start, sequences for a pool that ran out, and what is switched on for a fault in software.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from appliance.core.causes import Cause
from appliance.core.plan import MemoryPlan, Rung
from appliance.planner import moves
from appliance.planner.choose import attempt, rung_of
from appliance.planner.features import FEATURES
from appliance.planner.inputs import Choice, PlanInputs, counted
from appliance.planner.moves import Move, Step

MOST_RUNGS = 12


@dataclass(frozen=True, slots=True)
class Tried:
    """A rung that the engine was lost on, and why."""

    rung: Rung
    cause: Cause


@dataclass(frozen=True, slots=True)
class _Family:
    """How one kind of trouble is met.

    Attributes:
        demand: what must fall with each rung.
        moves: in the order in which they are tried; a repeated move goes further.
        settles: what a move frees goes to the headroom; else to the KV cache.
    """

    demand: Callable[[Step], float]
    moves: tuple[Move, ...]
    settles: bool = True


def demand_bytes(step: Step) -> float:
    """Bytes that are spoken for at the peak, free − headroom + peak, and once more those of a prefill step.

    Engines that profile their peak (vLLM) run out of memory on what the profile did not see, and that grows with the step.
    """
    plan = step.plan
    return plan.free_at_start_bytes - plan.headroom_bytes + plan.activation_peak_bytes + moves.step_bytes(step.inputs)


def missing_bytes(step: Step) -> float:
    """Bytes that one sequence of the planned context needs beyond what the pool offers; falls below nothing when there is room."""
    plan = step.plan
    return plan.context_length_tokens * plan.kv_bytes_per_token - plan.kv_pool_bytes


def sequences_and_chunk(step: Step) -> float:
    """Tokens that may be asked for at once: sequences × context + chunk."""
    return step.inputs.running * step.plan.context_length_tokens + step.inputs.chunk


def switched_on(step: Step) -> float:
    """Features in use, cards and sequences: what may be at fault in software."""
    return len(FEATURES) - len(step.inputs.features_off) + step.inputs.tensor_parallel + step.inputs.running


def all_asked_for(step: Step) -> float:
    """Bytes at the peak, as shares of the memory, and what is switched on: every move lowers one of them, and none raises the other."""
    return demand_bytes(step) / max(1, step.plan.free_at_start_bytes) + switched_on(step)


_MEMORY = (
    moves.half_chunk, moves.lower_fraction, moves.half_running, moves.graphs_off,
    moves.half_chunk, moves.lower_fraction, moves.lower_fraction, moves.half_running, moves.lower_fraction, moves.lower_fraction,
)  # fmt: skip
_OUT_OF_MEMORY = _Family(demand_bytes, _MEMORY)
_AT_RUN_TIME = _Family(demand_bytes, (moves.lower_fraction, moves.half_chunk, *_MEMORY[2:]))
_AT_START = _Family(demand_bytes, (moves.half_running, moves.graphs_off, moves.drafter_off, moves.lower_fraction, *_MEMORY))
_REFUSED = _Family(
    missing_bytes,
    (
        moves.raise_fraction, moves.raise_fraction, moves.half_running, moves.half_state, moves.eight_bit_kv, moves.drafter_off,
        moves.shorter_context, moves.shorter_context, moves.shorter_context,
    ),
    settles=False,
)  # fmt: skip
_ANOTHER_DIMENSION = _Family(
    missing_bytes,
    (moves.drafter_off, moves.half_state, moves.eight_bit_kv, moves.half_running, moves.shorter_context, moves.shorter_context),
    settles=False,
)
_LESS_AT_THE_PEAK = _Family(
    demand_bytes,
    (moves.half_chunk, moves.drafter_off, moves.half_running, moves.graphs_off, moves.half_chunk, moves.half_running, moves.half_running),
    settles=False,
)
_POOL_RAN_OUT = _Family(sequences_and_chunk, (moves.half_running, moves.half_chunk, moves.half_running, moves.half_running))
_SOFTWARE = _Family(
    switched_on,
    (
        moves.overlap_off, moves.drafter_off, moves.other_attention, moves.one_card, moves.half_running_only, moves.half_running_only,
        moves.runtime_back,
    ),
)  # fmt: skip
_HUNG = _Family(switched_on, (moves.graphs_off, *_SOFTWARE.moves))
_COLLECTIVES = _Family(switched_on, (moves.p2p_off, moves.custom_all_reduce_off, moves.one_card))
_SLOW = _Family(sequences_and_chunk, (moves.half_chunk, moves.half_running, moves.half_chunk))
_LOST_CARD = _Family(switched_on, (moves.one_card,))
_DESCRIPTORS = _Family(sequences_and_chunk, (moves.half_running, moves.half_running, moves.half_running))
_UNEXPLAINED = _Family(
    all_asked_for,
    (
        moves.half_chunk, moves.overlap_off, moves.lower_fraction, moves.drafter_off, moves.half_running, moves.graphs_off,
        moves.other_attention, moves.half_chunk, moves.lower_fraction, moves.half_running, moves.one_card,
    ),
)  # fmt: skip
"""Nothing says which: a little of everything, what costs least first."""

FAMILIES: dict[Cause, _Family] = {
    Cause.CUDA_OOM_PREFILL: _OUT_OF_MEMORY,
    Cause.CUDA_OOM_RUNTIME: _AT_RUN_TIME,
    Cause.CUDA_OOM_STARTUP: _AT_START,
    Cause.HOST_OOM: _OUT_OF_MEMORY,
    Cause.KV_POOL_TOO_SMALL: _REFUSED,
    Cause.KV_POOL_EXHAUSTED: _POOL_RAN_OUT,
    Cause.CUDA_ILLEGAL_ACCESS: _SOFTWARE,
    Cause.CUDA_DEVICE_ASSERT: _SOFTWARE,
    Cause.CUDA_LAUNCH_FAILURE: _SOFTWARE,
    Cause.CUBLAS_ERROR: _SOFTWARE,
    Cause.BAD_NUMBERS: _SOFTWARE,
    Cause.SEGFAULT_NATIVE: _SOFTWARE,
    Cause.CLIENT_DISCONNECT_CRASH: _SOFTWARE,
    Cause.GPU_HANG_RC: _HUNG,
    Cause.NCCL_P2P_HANG: _COLLECTIVES,
    Cause.NCCL_TIMEOUT: _COLLECTIVES,
    Cause.NCCL_INIT_FAILURE: _COLLECTIVES,
    Cause.P2P_UNSAFE: _COLLECTIVES,
    Cause.ENGINE_WATCHDOG: _SLOW,
    Cause.ENGINE_RPC_TIMEOUT: _SLOW,
    Cause.FD_EXHAUSTED: _DESCRIPTORS,
    Cause.UNKNOWN: _UNEXPLAINED,
    Cause.GPU_OFF_BUS: _LOST_CARD,
    Cause.GPU_MCU_HALT: _LOST_CARD,
    Cause.GSP_TIMEOUT: _LOST_CARD,
    Cause.ECC_UNCORRECTABLE: _LOST_CARD,
    Cause.NVLINK_ERROR: _LOST_CARD,
    Cause.PCIE_ERROR: _LOST_CARD,
    Cause.GPU_NEEDS_RESET: _LOST_CARD,
    Cause.GPU_UNKILLABLE_PROCESS: _LOST_CARD,
}
"""Cause → moves. A cause that is not here is met without another setting."""

_NOT_ENOUGH = (Cause.KV_POOL_TOO_SMALL,)
_TOO_MUCH = (Cause.CUDA_OOM_PREFILL, Cause.CUDA_OOM_RUNTIME, Cause.CUDA_OOM_STARTUP)


def ladder(
    inputs: PlanInputs,
    cause: Cause,
    history: tuple[Tried, ...] = (),
    *,
    failed: Rung | None = None,
    first_index: int = 1,
    estimated_context_tokens: int | None = None,
) -> tuple[Rung, ...]:
    """Rungs below the setting that `inputs` describe, strictly falling in the demand that the cause is about.

    Args:
        inputs: of the setting that failed; its fraction and context are chosen where they are not given.
        cause: of the failure.
        history: earlier failures. Rungs that are in it are left out; as many moves as there were failures of this kind come last, so that
            the next move is another one; and refusals in both directions move to another dimension.
        failed: the setting that failed, as the history knows it; None: it is not among the earlier ones.
        first_index: of the first rung.
        estimated_context_tokens: what the engine itself said would fit (vLLM's "estimated maximum model length").

    Returns:
        Empty for a cause that no setting helps against.
    """
    family = _family(cause, history)
    if family is None:
        return ()
    step = replace(_first(inputs), settles=family.settles)
    family = _after_those_made(family, cause, [tried for tried in history if failed is None or tried.rung.setting != failed.setting])
    if estimated_context_tokens is not None and cause in _NOT_ENOUGH:
        rungs = list(_from(moves.context_of(step, estimated_context_tokens), step, family))
    else:
        rungs = list(_from(step, step, family))
    left = {tried.rung.setting for tried in history}
    fresh = [rung for rung in rungs if rung.setting not in left]
    return tuple(replace(rung, index=first_index + number) for number, rung in enumerate(fresh[:MOST_RUNGS]))


_WORDS: dict[Move, str] = {
    moves.half_chunk: "half the prefill chunk, which costs no context",
    moves.lower_fraction: "a fraction of 0.02 less, with the context that then fits",
    moves.raise_fraction: "a higher fraction, as far as the pool is short and the headroom covers the peak",
    moves.half_running: "half the sequences",
    moves.half_running_only: "half the sequences",
    moves.graphs_off: "CUDA graphs off",
    moves.drafter_off: "speculative decoding off",
    moves.overlap_off: "the overlapping scheduler off",
    moves.other_attention: "the other attention kernels",
    moves.half_state: "linear state in 16 bits",
    moves.eight_bit_kv: "KV cache in 8 bits",
    moves.shorter_context: "three quarters of the context",
    moves.p2p_off: "P2P off",
    moves.custom_all_reduce_off: "the engine's own all-reduce off",
    moves.one_card: "one card",
    moves.runtime_back: "the engine version before",
}


def moves_against(cause: Cause) -> tuple[str, ...]:
    """The moves that are tried, in their order, in words; none for a cause that no setting helps against."""
    family = FAMILIES.get(cause)
    return () if family is None else tuple(dict.fromkeys(_WORDS[move] for move in family.moves))


def demand(inputs: PlanInputs, plan: MemoryPlan, cause: Cause) -> float:
    """The number that falls along `ladder` for this cause."""
    family = FAMILIES[cause]
    return family.demand(Step(inputs, plan))


def _family(cause: Cause, history: tuple[Tried, ...]) -> _Family | None:
    """Refusals in both directions (too much at 0.85, too little at 0.84) leave no fraction in between: it stays, something else moves."""
    before = {tried.cause for tried in history}
    if cause in _TOO_MUCH and before & set(_NOT_ENOUGH):
        return _LESS_AT_THE_PEAK
    if cause in _NOT_ENOUGH and before & set(_TOO_MUCH):
        return _ANOTHER_DIMENSION
    return FAMILIES.get(cause)


def _after_those_made(family: _Family, cause: Cause, earlier: list[Tried]) -> _Family:
    """Each earlier setting that failed of this kind was left by one of the moves, in their order: the others come before them now."""
    kind = FAMILIES.get(cause)
    made = len({tried.rung.setting for tried in earlier if FAMILIES.get(tried.cause) is kind}) % len(family.moves)
    return replace(family, moves=(*family.moves[made:], *family.moves[:made]))


def _first(inputs: PlanInputs) -> Step:
    """The setting that failed, chosen or as given; a plan that does not fit is a start too."""
    result = attempt(inputs)
    if isinstance(result, Choice):
        return Step(result.inputs, result.plan)
    fraction, context = result.plan.mem_fraction, max(1, result.plan.context_length_tokens)
    return Step(replace(result.inputs, mem_fraction=fraction, context_length_tokens=context), result.plan)


def _from(start: Step, failed: Step, family: _Family) -> Iterator[Rung]:
    """Each move that lowers the demand, on top of the ones before."""
    step = failed
    if start is not failed and family.demand(start) < family.demand(failed):
        yield rung_of(start.inputs, start.plan, gives_up=start.gives_up, gains=start.gains)
        step = start
    for move in family.moves:
        after = move(step)
        if after is None or family.demand(after) >= family.demand(step):
            continue
        yield rung_of(after.inputs, after.plan, gives_up=after.gives_up, gains=after.gains)
        step = after


def native_ladder(rung: Rung, *, chunk_min_tokens: int = 32, context_min_tokens: int = 512) -> tuple[Rung, ...]:
    """Rungs below one of the built-in CPU engine, without facts: halve the chunk, the sequences, the context, and round again."""
    rungs: list[Rung] = []
    now = rung
    while True:
        before = now
        if (chunk := now.prefill_chunk_tokens // 2) >= chunk_min_tokens:
            words = f"time to the first token: prompts are read {chunk} tokens at a time instead of {now.prefill_chunk_tokens}"
            now = _below(now, words, "half the memory of a prefill step", prefill_chunk_tokens=chunk)
            rungs.append(now)
        if (running := now.max_running // 2) >= 1:
            words = f"throughput: {counted(running)} at once instead of {now.max_running}"
            now = _below(now, words, "half the memory of the running sequences", max_running=running)
            rungs.append(now)
        if (context := now.context_length_tokens // 2) >= context_min_tokens:
            words = f"long prompts: a context of {context:,} tokens instead of {now.context_length_tokens:,}"
            now = _below(now, words, "half the memory of the longest sequence", context_length_tokens=context)
            rungs.append(now)
        if now is before or len(rungs) >= MOST_RUNGS:
            return tuple(rungs[:MOST_RUNGS])


def _below(rung: Rung, gives_up: str, gains: str, **changes: int) -> Rung:
    return replace(rung, index=rung.index + 1, gives_up=gives_up, gains=gains, plan=None, **changes)  # type: ignore[arg-type]
