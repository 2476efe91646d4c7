"""What must fit into the headroom: the transient memory of one prefill step, which grows with the chunk.

peak(T) = T × (residual stream + the widest of feed-forward, attention and linear mixer), each in 16 bits, ÷ tp where it is sharded.
Against measurements: Llama-3.1-8B at 20,000 tokens 2.06 GiB worked out, 2.07 profiled by vLLM (vllm#10517); a Qwen3.8-27B chunk of 2,048
asked for 48.00 MiB at once, which is the mixer's chunk states below: 2048 ÷ 64 × 48 × 128 × 128 × 2.
"""

from __future__ import annotations

from appliance.core.plan import ModelFacts
from appliance.core.units import MIB

_BYTES = 2
"""Activations are 16 bits wide on a card."""
_DELTA_CHUNK_TOKENS = 64
"""The gated delta rule is computed in chunks of so many tokens, with one recurrent state each (fla, chunk_delta_h)."""


def step_token_bytes(model: ModelFacts, tensor_parallel: int, number_bytes: int = _BYTES) -> int:
    """Transient bytes of one token in flight on one rank: two copies of the residual stream and the widest layer."""
    residual = 2 * model.hidden_size * number_bytes
    widest = max(
        _feed_forward(model, tensor_parallel, number_bytes),
        _attention(model, tensor_parallel, number_bytes),
        _mixer(model, tensor_parallel, number_bytes),
    )
    return residual + widest


def _feed_forward(model: ModelFacts, tensor_parallel: int, number_bytes: int) -> int:
    """gate and up, their product, and the output; for experts that of each chosen expert."""
    dense = 3 * model.intermediate_size // tensor_parallel + model.hidden_size
    routed = model.experts_per_token * (3 * model.expert_intermediate_size // tensor_parallel + model.hidden_size)
    return (max(dense, routed) if model.experts_per_token else dense) * number_bytes


def _attention(model: ModelFacts, tensor_parallel: int, number_bytes: int) -> int:
    """Queries, keys, values and the attention's output."""
    heads = max(model.attention_heads, 1)
    width = 2 * heads * model.head_dim + model.kv_heads * (model.head_dim + (model.v_head_dim or model.head_dim))
    return (width // tensor_parallel + model.hidden_size) * number_bytes


def _mixer(model: ModelFacts, tensor_parallel: int, number_bytes: int) -> int:
    """A linear layer: its projections, the convolution's output, four rows of values, the 64 × 64 matrices and the chunk states."""
    linear = model.linear
    if linear is None:
        return 0
    values = linear.value_heads * linear.value_head_dim
    rows = 2 * linear.conv_channels + 5 * values
    matrices = linear.value_heads * _DELTA_CHUNK_TOKENS * 3  # one in 32 bits, one in 16
    states = linear.state_elements // _DELTA_CHUNK_TOKENS
    return ((rows + matrices + states) // tensor_parallel + model.hidden_size) * number_bytes


def sampler_bytes(model: ModelFacts, sequences: int) -> int:
    """Logits, probabilities, their sorted copies with 64-bit indices, and the sums of top-p: 40 bytes a logit.

    Source: 1.26 GiB of "activation peak" for Llama-3-8B with 256 sequences (vllm#10511); 1.22 by this formula.
    """
    return sequences * model.vocab_size * 40


def vision_bytes(model: ModelFacts) -> int:
    """The vision tower on one image of the largest size, as vLLM profiles it; 0 without a tower.

    patches × (6 × width + feed-forward) × 2, then one row of the text's width for each four patches. Qwen's towers take 65,536 patches.
    Source: 1.46 to 1.59 GiB of "peak activation" in public logs of Qwen3.5 to 3.8 with a 1152-wide tower; 1.53 by this formula.
    """
    if not model.vision_hidden_size:
        return 0
    patches = 65_536 if "qwen" in model.architecture.lower() else 16_384
    width = 6 * model.vision_hidden_size + (model.vision_intermediate_size or 4 * model.vision_hidden_size)
    return patches * width * _BYTES + patches // 4 * model.hidden_size * _BYTES


def serving_peak_bytes(model: ModelFacts, tensor_parallel: int, chunk_tokens: int, sequences: int) -> int:
    """The peak of an engine that does not profile itself (SGLang): live tensors × 1.75 for the allocator's leftovers, logits, 128 MiB.

    Source: for 344 MiB of live tensors 0.65 GiB of headroom were not enough and 1.09 were (the article's two rows); 0.72 by this formula.
    """
    logits = sequences * model.vocab_size * 6
    return round(1.75 * chunk_tokens * step_token_bytes(model, tensor_parallel)) + logits + 128 * MIB
