"""Bytes of one number, by the engines' own words for a dtype."""

from __future__ import annotations

from appliance.planner.inputs import PlanInputError

BITS: dict[str, float] = {
    "float32": 32, "fp32": 32, "f32": 32,
    "bfloat16": 16, "bf16": 16, "float16": 16, "fp16": 16, "f16": 16, "half": 16,
    "fp8": 8, "fp8_e4m3": 8, "fp8_e5m2": 8, "fp8_inc": 8, "int8": 8, "float8_e4m3fn": 8, "float8_e5m2": 8, "mxfp8": 8.25,
    "int8_per_token_head": 8, "fp8_per_token_head": 8, "int4_per_token_head": 4,
    "nvfp4": 4.5, "fp4_e2m1": 4.5,
    # ggml: a block of 32 numbers and its scales (ggml-common.h, block_q8_0 and the rest).
    "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5, "iq4_nl": 4.5,
}  # fmt: skip
"""Width of one number of the KV cache, scales of its block included; scales a token and head are added by the engine that has them."""

SAFETENSORS_BITS: dict[str, int] = {
    "F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "C64": 64,
}  # fmt: skip


def bits_of(dtype: str) -> float:
    """Bits of one number.

    Raises:
        PlanInputError: a word that we do not know.
    """
    word = dtype.lower().removeprefix("torch.")
    if word not in BITS:
        raise PlanInputError(f"KV dtype {dtype!r} is not known", hint=f"one of {', '.join(sorted(BITS))}")
    return BITS[word]


def dtype_bytes(dtype: str) -> float:
    """Bytes of one number: 2 for "bfloat16", 1 for "fp8_e4m3", 1.0625 for "q8_0"."""
    return bits_of(dtype) / 8


def is_16_bit(dtype: str) -> bool:
    """Whether half as much would be eight bits."""
    return bits_of(dtype) == 16
