"""Facts, the memory chain, and a rung: one complete serving setting."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model folder says of itself. Facts only, no judgement.

    Attributes:
        name: the id that clients use.
        architecture: as in config.json, such as "LlamaForCausalLM".
        weight_bytes: sum over the safetensors headers.
        full_attention_layers, sliding_window_layers, linear_attention_layers: they add up to the layer count.
        sliding_window_tokens: 0 where no layer slides.
        kv_heads, head_dim: of the attention layers.
        max_context_tokens: the model's own limit.
        vocab_size: rows of the output projection.
        hidden_size: width of the residual stream.
        linear_state_bytes_per_slot: recurrent and convolution state of one sequence, all linear layers.
        chat_template: whether the model brings one.
    """

    name: str
    architecture: str
    weight_bytes: int
    full_attention_layers: int
    kv_heads: int
    head_dim: int
    max_context_tokens: int
    vocab_size: int
    hidden_size: int
    sliding_window_layers: int = 0
    sliding_window_tokens: int = 0
    linear_attention_layers: int = 0
    linear_state_bytes_per_slot: int = 0
    chat_template: bool = False


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What a card says of itself, or what was given in its place.

    Attributes:
        total_bytes: what CUDA can see (23.56 GiB on a "24 GiB" 3090), not the label.
        free_at_start_bytes: free before the engine starts; None where it was not read.
        compute_capability: (8, 6) on a 3090; None where unknown.
    """

    name: str
    total_bytes: int
    free_at_start_bytes: int | None = None
    uuid: str = ""
    pci_bus_id: str = ""
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Term:
    """One link of the chain: a number with its formula and where the number comes from."""

    name: str
    size_bytes: int
    formula: str
    source: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The chain, a field a term: free at start × mem_fraction − weights − linear state = KV pool bytes → KV tokens.

    All sizes are of one rank (one card), in bytes.
    """

    free_at_start_bytes: int
    mem_fraction: float
    weight_bytes: int
    linear_state_bytes: int
    kv_pool_bytes: int
    kv_bytes_per_token: int
    kv_tokens: int
    headroom_bytes: int
    activation_peak_bytes: int
    context_length_tokens: int
    terms: tuple[Term, ...] = ()

    @property
    def fits(self) -> bool:
        """The pool holds at least one sequence of the planned context and the headroom covers the peak."""
        return self.kv_tokens >= self.context_length_tokens > 0 and self.headroom_bytes >= self.activation_peak_bytes

    def explain(self) -> tuple[str, ...]:
        """A sentence a term."""
        return tuple(f"{term.name}: {term.formula} ({term.source})" for term in self.terms)


@dataclass(frozen=True, slots=True)
class Rung:
    """One complete serving setting. The ladder is a list of these, strictly falling in demand.

    Attributes:
        index: 0 is the setting the owner configured; higher is safer.
        mem_fraction: share of the memory free at start that weights, state and KV pool may take.
        context_length_tokens: longest prompt plus answer.
        prefill_chunk_tokens: tokens of one prefill step: the activation peak grows with it.
        max_running: sequences decoded together.
        kv_dtype: of the KV cache, an engine's own word such as "float32", "bfloat16", "fp8_e4m3".
        tensor_parallel: cards that share one model.
        features_off: engine features that this rung switches off, such as "cuda_graph".
        gives_up, gains: one sentence each, printed with every move onto this rung.
        plan: the arithmetic behind it; None where there is none yet (facts missing).
    """

    index: int
    mem_fraction: float
    context_length_tokens: int
    prefill_chunk_tokens: int
    max_running: int
    kv_dtype: str
    tensor_parallel: int = 1
    features_off: frozenset[str] = field(default_factory=frozenset)
    gives_up: str = ""
    gains: str = ""
    plan: MemoryPlan | None = None
