"""Facts, the memory chain, and a rung: one complete serving setting."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class LinearStateFacts:
    """What one linear-attention layer (gated delta net, Kimi delta, Mamba 2) keeps of one sequence.

    Attributes:
        conv_channels: inputs of the short convolution; the state keeps conv_kernel - 1 steps of them.
        state_elements: numbers of the recurrent state: value heads x value width x key width.
        value_heads, value_head_dim: the prefill kernels keep one value_head_dim row a head and token.
        state_dtype: of the recurrent state, as the model's own configuration asks; the convolution's is 16 bits wide.
    """

    conv_channels: int
    conv_kernel: int
    state_elements: int
    value_heads: int = 0
    value_head_dim: int = 0
    state_dtype: str = "float32"


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
        max_context_tokens: the model's own limit (core/context.py).
        named_context_tokens: what config.json names beside a scaling that goes further; 0: the same.
        vocab_size: rows of the output projection.
        hidden_size: width of the residual stream.
        linear_state_bytes_per_slot: recurrent and convolution state of one sequence, all linear layers.
        chat_template: whether the model brings one.
        dtype: of activations and of weights that are not quantised, such as "bfloat16".
        attention_heads: query heads.
        v_head_dim: width of a value head where it is not head_dim; 0: head_dim.
        intermediate_size: of the dense feed-forward layers.
        experts_per_token, expert_intermediate_size: of a mixture of experts, shared experts counted in; 0 without.
        sliding_kv_heads, sliding_head_dim: of the sliding layers where they differ from the full ones; 0: the same.
        kv_lora_rank, qk_rope_head_dim: of multi-head latent attention; 0 without.
        index_head_dim: of a sparse-attention indexer, which keeps a cache of its own; 0 without.
        linear: shape of one linear layer's state.
        rotary_dim: dimensions that are rotated; the engines keep a table of max_context_tokens rows of it.
        draft_layers, draft_weight_bytes: the built-in multi-token-prediction drafter; its bytes are part of weight_bytes.
        vision_weight_bytes, vision_hidden_size, vision_intermediate_size: of the vision tower; its bytes are part of weight_bytes.
        host_weight_bytes: part of weight_bytes that llama.cpp keeps in host memory: the input embedding, where the output has its own.
        quantisation: "gptq 4 bit, groups of 128" or empty.
        weights_from: what weight_bytes was read from.
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
    named_context_tokens: int = 0
    sliding_window_layers: int = 0
    sliding_window_tokens: int = 0
    linear_attention_layers: int = 0
    linear_state_bytes_per_slot: int = 0
    chat_template: bool = False
    dtype: str = "bfloat16"
    attention_heads: int = 0
    v_head_dim: int = 0
    intermediate_size: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    sliding_kv_heads: int = 0
    sliding_head_dim: int = 0
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    index_head_dim: int = 0
    linear: LinearStateFacts | None = None
    rotary_dim: int = 0
    draft_layers: int = 0
    draft_weight_bytes: int = 0
    vision_weight_bytes: int = 0
    vision_hidden_size: int = 0
    vision_intermediate_size: int = 0
    host_weight_bytes: int = 0
    quantisation: str = ""
    weights_from: str = "safetensors headers"


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """What a card says of itself, or what was given in its place.

    Attributes:
        total_bytes: what CUDA can see (23.56 GiB on a "24 GiB" 3090), not the label.
        free_at_start_bytes: free before the engine starts; None where it was not read.
        compute_capability: (8, 6) on a 3090; None where unknown.
        nvlinks: NVLink connections that are up; None: it has none, or was not asked.
    """

    name: str
    total_bytes: int
    free_at_start_bytes: int | None = None
    uuid: str = ""
    pci_bus_id: str = ""
    compute_capability: tuple[int, int] | None = None
    nvlinks: int | None = None


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

    All sizes are of one rank (one card), in bytes. `kv_tokens` is the number that the engine prints, `longest_tokens` the longest single
    sequence where that is another number (layers that keep different amounts of it); None: the same.
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
    longest_tokens: int | None = None

    @property
    def sequence_tokens(self) -> int:
        """The longest single sequence that the pool holds."""
        return self.kv_tokens if self.longest_tokens is None else self.longest_tokens

    @property
    def fits(self) -> bool:
        """The pool holds at least one sequence of the planned context and the headroom covers the peak."""
        return self.sequence_tokens >= self.context_length_tokens > 0 and self.headroom_bytes >= self.activation_peak_bytes

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
        draft_tokens: drafted at each step by the model's own drafter; 0: no speculative decoding.
        state_slots, state_dtype: of linear-attention layers; None: the model has none, or the engine decides.
        prefix_cache: whether prompts share their beginnings.
        block_tokens: of one KV block; None: the engine's own.
        language_only: a vision tower stays unloaded.
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
    draft_tokens: int = 0
    state_slots: int | None = None
    state_dtype: str | None = None
    prefix_cache: bool = True
    block_tokens: int | None = None
    language_only: bool = False
    gives_up: str = ""
    gains: str = ""
    plan: MemoryPlan | None = None

    @property
    def setting(self) -> Rung:
        """Itself without its number, its words and its plan: two rungs with the same one ask for the same."""
        return replace(self, index=0, gives_up="", gains="", plan=None)
