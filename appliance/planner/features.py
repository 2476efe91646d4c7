"""What a rung may switch off."""

from __future__ import annotations

CURRENT_RUNTIME = "current_runtime"
FEATURES = {
    "cuda_graph": "CUDA graphs",
    "overlap_schedule": "the scheduler that works ahead of the card",
    "speculative": "speculative decoding",
    "attention_backend": "the engine's first choice of attention kernels",
    "p2p": "direct traffic between the cards (NCCL_P2P_DISABLE=1)",
    "state_float32": "32 bits for the linear-attention state; 16 are used (--mamba-ssm-dtype bfloat16)",
    "custom_all_reduce": "the engine's own all-reduce",
    CURRENT_RUNTIME: "the installed engine version; the one before it is used",
}
"""Words of Rung.features_off and what they switch off."""
