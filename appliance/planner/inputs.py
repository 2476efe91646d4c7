"""What goes into a plan and what comes out. Frozen; a variation is `dataclasses.replace`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from appliance.core.errors import BudgetError, ExitCode
from appliance.core.plan import GpuFacts, MemoryPlan, ModelFacts, Rung

DEFAULT_RED_LINE = 0.95
"""No more of the memory than this is planned, unless the owner says so."""
WARN_SHARE = 0.80
"""Above this share of the card a plan is said to be tight: the second article lost its engine at the edge."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Terms that were measured (given by hand, or read out of a start-up log); None: the term is worked out.

    Attributes:
        free_at_start_bytes: what the engine found free, its own CUDA context already taken.
        weight_bytes: of one rank.
        linear_state_bytes: of all slots of one rank.
        fixed_bytes: workspaces and graphs, which come after the pool.
        activation_peak_bytes: the transient peak of a prefill step.
        kv_pool_bytes: bytes given to the KV cache (vLLM's "Available KV cache memory").
        non_torch_bytes: what the process takes beside torch's allocations (vLLM counts it).
        source: where they come from, printed with each of them.
    """

    free_at_start_bytes: int | None = None
    weight_bytes: int | None = None
    linear_state_bytes: int | None = None
    fixed_bytes: int | None = None
    activation_peak_bytes: int | None = None
    kv_pool_bytes: int | None = None
    non_torch_bytes: int | None = None
    source: str = "given"

    def shared_otherwise(self, share: float) -> Measured:
        """The same model on another number of cards, each with `share` of what a card had; the pool's size then is unknown."""

        def part(size: int | None) -> int | None:
            return None if size is None else round(size * share)

        return replace(self, weight_bytes=part(self.weight_bytes), linear_state_bytes=part(self.linear_state_bytes), kv_pool_bytes=None)


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """All that a plan depends on.

    Attributes:
        engine_version: "0.5.17"; empty: the newest rules we know.
        mem_fraction: work this one out; None: choose.
        context_length_tokens: this much is wanted; None: as much as fits.
        min_context_tokens: a choice with less is refused.
        kv_dtype: "auto": the model's dtype.
        weights_dtype: of the built-in engine (`engine.weights_dtype`): float32 or int8; empty: its default.
        swap_bytes: host memory of the built-in engine for answers that give way (`engine.swap_bytes`); None: its default.
        prefill_chunk_tokens, max_running: None: a default that `resolve` names.
        draft_tokens: drafted tokens a step of speculative decoding; 0: none.
        state_dtype, state_slots: of linear layers; None: a default that `resolve` names.
        prefix_cache: whether prompts share their prefixes.
        block_tokens: of the KV cache; None: the engine's own.
        language_only: leave the vision tower unloaded.
        features_off: as in Rung.
        engines: such engines side by side, each on cards of its own; the plan is that of one.
        oom_headroom_bytes: the largest headroom with which the engine ran out of memory; 0: never.
        margin: share of the activation peak that is kept on top of it.
        assumptions: sentences of `resolve`.
    """

    model: ModelFacts
    gpu: GpuFacts
    engine: str
    engine_version: str = ""
    mem_fraction: float | None = None
    context_length_tokens: int | None = None
    min_context_tokens: int = 0
    kv_dtype: str = "auto"
    weights_dtype: str = ""
    swap_bytes: int | None = None
    tensor_parallel: int = 1
    prefill_chunk_tokens: int | None = None
    max_running: int | None = None
    draft_tokens: int = 0
    state_dtype: str | None = None
    state_slots: int | None = None
    prefix_cache: bool = True
    block_tokens: int | None = None
    language_only: bool = False
    features_off: frozenset[str] = frozenset()
    engines: int = 1
    measured: Measured = Measured()
    oom_headroom_bytes: int = 0
    margin: float = 0.25
    red_line: float = DEFAULT_RED_LINE
    assumptions: tuple[str, ...] = ()

    @property
    def chunk(self) -> int:
        """Tokens of one prefill step, of resolved inputs."""
        assert self.prefill_chunk_tokens is not None, "resolve() comes first"
        return self.prefill_chunk_tokens

    @property
    def running(self) -> int:
        """Sequences decoded together, of resolved inputs."""
        assert self.max_running is not None, "resolve() comes first"
        return self.max_running


@dataclass(frozen=True, slots=True)
class TableRow:
    """One line of the table of fractions."""

    mem_fraction: float
    kv_tokens: int
    headroom_bytes: int
    context_length_tokens: int
    fits: bool


@dataclass(frozen=True, slots=True)
class WayOut:
    """One change that makes a refused plan run; `options` are those of `appliancectl plan`, so that it can be tried."""

    change: str
    gain: str
    options: tuple[str, ...]
    plan: MemoryPlan


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan that runs.

    Attributes:
        inputs: resolved, with the fraction and the context that were chosen.
        rung: the same as a setting.
        table: what other fractions would give.
        reason: why this fraction and this context.
        warnings: what is legal and still worth knowing.
    """

    inputs: PlanInputs
    rung: Rung
    table: tuple[TableRow, ...]
    reason: str
    warnings: tuple[str, ...] = ()

    @property
    def plan(self) -> MemoryPlan:
        """The arithmetic behind the rung."""
        assert self.rung.plan is not None
        return self.rung.plan


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Why a plan cannot run: a sentence, and the plan that shows it, with its inputs resolved."""

    sentence: str
    inputs: PlanInputs
    plan: MemoryPlan
    table: tuple[TableRow, ...] = ()


class PlanInputError(BudgetError):
    """Something that was asked for cannot be: a card, an engine, a number out of its range."""

    exit_code = ExitCode.USAGE


class PlanRefused(BudgetError):
    """A plan that cannot run, with what would make it run."""

    def __init__(self, shortfall: Shortfall, ways_out: tuple[WayOut, ...]) -> None:
        hint = "; or ".join(f"{way.change} ({way.gain})" for way in ways_out) or None
        super().__init__(shortfall.sentence, hint=hint)
        self.shortfall = shortfall
        self.inputs = shortfall.inputs
        self.ways_out = ways_out


def counted(sequences: int) -> str:
    """ "1 sequence", "3 sequences"."""
    return f"{sequences} sequence" + ("" if sequences == 1 else "s")


def as_served(inputs: PlanInputs) -> PlanInputs:
    """SGLang refuses a longer context than config.json names, whatever scaling stands beside it, unless an environment variable allows it
    (sglang/srt/utils/hf_transformers_utils.py, get_context_length)."""
    named = inputs.model.named_context_tokens
    if inputs.engine != "sglang" or named in (0, inputs.model.max_context_tokens):
        return inputs
    return replace(inputs, model=replace(inputs.model, max_context_tokens=named))
