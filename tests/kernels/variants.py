"""What the engine would launch on a card: each kernel with its argument types and sizes, as the models that it serves have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from appliance_kernels import tables
from appliance_kernels.gated_mlp import triton as gated_mlp
from appliance_kernels.kv_write import triton as kv_write
from appliance_kernels.paged_decode import triton as decode
from appliance_kernels.paged_prefill import triton as prefill
from appliance_kernels.refcount import triton as refcount
from appliance_kernels.refcount.reference import Step
from appliance_kernels.rms_norm import triton as rms_norm
from appliance_kernels.rope import triton as rope
from appliance_kernels.sample import triton as sample

_BLOCK_TOKENS = 16
_TYPES = {"bf16": 2, "fp32": 4}
_HEADS = [("bf16", 64, 3), ("bf16", 80, 1), ("bf16", 128, 8), ("bf16", 256, 4), ("fp32", 64, 3), ("fp32", 128, 4), ("fp32", 256, 4)]
"""Type, head size, query heads a KV head."""

_ONES = (
    "kv_write.3x64",
    "tables.check",
    "rms_norm.40x128",
    "rope.12x64",
    "paged_decode.split.bf16.64x3",
    "paged_decode.combine.64",
    "paged_prefill.bf16.64x3",
    "sample.fp32",
)
"""Compiled once more with every number 1. Triton takes a 1 for a constant, which is no tensor: a region of one block, a table of one
entry or a window of one token is another program."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with its argument types.

    Attributes:
        matrix: it multiplies matrices.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    warps: int
    stages: int = 2
    matrix: bool = False


def variants() -> list[Variant]:
    """All of them."""
    found = [*_words(), *_writes(), *_rows(), *_decodes(), *_prefills(), *_samples()]
    return found + [_with_ones(one) for one in found if one.name in _ONES]


def _typed(kernel: Any, constants: dict[str, Any], **types: str) -> dict[str, str]:
    """Argument names by type: `types` maps a type to names; every other one that is not constant is i32."""
    named = {name: kind.replace("_", "*", 1) if kind.startswith("_") else kind for kind, names in types.items() for name in names.split()}
    return {name: named.get(name, "i32") for name in kernel.arg_names if name not in constants}


def _with_ones(variant: Variant) -> Variant:
    numbers = [name for name, kind in variant.signature.items() if kind == "i32"]
    signature = {name: kind for name, kind in variant.signature.items() if kind != "i32"}
    return replace(variant, name=f"{variant.name}.ones", signature=signature, constants=variant.constants | dict.fromkeys(numbers, 1))


def _words() -> Iterator[Variant]:
    for step in Step:
        constants = {"STEP": int(step)}
        types = _typed(refcount.take_step_kernel, constants, _i32="words_ptr results_ptr", _i64="blocks_ptr")
        yield Variant(f"refcount.{step.name.lower()}", refcount.take_step_kernel, types, constants, 1)


def _writes() -> Iterator[Variant]:
    for heads, dim in ((3, 64), (1, 256), (8, 128)):
        constants = {"HEADS": heads, "DIM": dim, "BLOCK_TOKENS": _BLOCK_TOKENS, "WIDTH": 512}
        types = _typed(
            kv_write.kv_write_kernel,
            constants,
            _bf16="k_ptr v_ptr k_cache_ptr v_cache_ptr",
            _i64="slots_ptr writers_ptr owners_ptr rows_ptr",
            _i32="words_ptr count_ptr",
        )
        yield Variant(f"kv_write.{heads}x{dim}", kv_write.kv_write_kernel, types, constants, 4)
    constants = {"ENTRIES": 64}
    types = _typed(
        tables.check_tables_kernel,
        constants,
        _i64="entries_ptr lengths_ptr prompt_entries_ptr readers_ptr owners_ptr rows_ptr",
        _i32="words_ptr count_ptr",
    )
    yield Variant("tables.check", tables.check_tables_kernel, types, constants, 1)


def _rows() -> Iterator[Variant]:
    for heads, dim in ((1, 576), (40, 128), (1, 4096), (1, 16384)):
        width = 1 << (dim - 1).bit_length()
        constants = {"HEADS": heads, "DIM": dim, "WIDTH": width}
        types = _typed(rms_norm.rms_norm_kernel, constants, _bf16="x_ptr out_ptr", _fp32="weight_ptr", fp32="eps")
        yield Variant(f"rms_norm.{heads}x{dim}", rms_norm.rms_norm_kernel, types, constants, rms_norm.warps(width))
    for heads, dim in ((12, 64), (40, 128), (5, 256)):
        half = dim // 2
        constants = {"HEADS": heads, "HALF": half, "HEAD_ROWS": rope.head_rows(heads, half), "WIDTH": half}
        types = _typed(rope.rope_kernel, constants, _bf16="x_ptr out_ptr", _fp32="cos_ptr sin_ptr")
        yield Variant(f"rope.{heads}x{dim}", rope.rope_kernel, types, constants, 4)
    for gelu in (False, True):
        constants = {"INNER": 14336, "WIDTH": 1024, "GELU": gelu}
        types = _typed(gated_mlp.gated_mlp_kernel, constants, _bf16="gate_up_ptr out_ptr")
        yield Variant(f"gated_mlp.{'gelu' if gelu else 'silu'}", gated_mlp.gated_mlp_kernel, types, constants, 4)


_PAGED = {
    "_i64": "tiles_ptr tables_ptr prompt_entries_ptr readers_ptr positions_ptr rows_ptr",
    "_i32": "count_ptr",
    "_fp32": "partial_ptr weight_ptr",
    "fp32": "scale cap",
}


def _decodes() -> Iterator[Variant]:
    for kind, dim, group in _HEADS:
        sizes = decode.split_sizes(8, group, dim, _BLOCK_TOKENS, _TYPES[kind])
        constants = sizes | {"CAPPED": dim == 80, "TELL": True}
        types = _typed(decode.split_kernel, constants, **_PAGED | {f"_{kind}": "q_ptr k_cache_ptr v_cache_ptr"} | _extra(kind))
        name = f"paged_decode.split.{kind}.{dim}x{group}"
        yield Variant(name, decode.split_kernel, types, constants, decode.WARPS, matrix=kind == "bf16" or dim <= 128)
    for dim in (64, 256):
        constants = {"QUERY_HEADS": 32, "DIM": dim, "WIDTH": dim, "SPLIT": decode.SPLIT}
        types = _typed(decode.combine_kernel, constants, _fp32="partial_ptr weight_ptr", _i64="positions_ptr", _bf16="out_ptr")
        yield Variant(f"paged_decode.combine.{dim}", decode.combine_kernel, types, constants, 1)


def _prefills() -> Iterator[Variant]:
    for kind, dim, group in _HEADS:
        sizes = prefill.tile_sizes(8, group, dim, _BLOCK_TOKENS, _TYPES[kind])
        constants = sizes | {"CAPPED": dim == 80, "TELL": True}
        types = _typed(prefill.prefill_kernel, constants, **_PAGED | {f"_{kind}": "q_ptr k_cache_ptr v_cache_ptr out_ptr"} | _extra(kind))
        name = f"paged_prefill.{kind}.{dim}x{group}"
        yield Variant(name, prefill.prefill_kernel, types, constants, prefill.warps(dim, _TYPES[kind]), matrix=kind == "bf16" or dim <= 128)


def _extra(kind: str) -> dict[str, str]:
    """With float32 caches, what is float32 anyway has the same type: one entry for both."""
    return {"_fp32": "partial_ptr weight_ptr q_ptr k_cache_ptr v_cache_ptr out_ptr"} if kind == "fp32" else {}


def _samples() -> Iterator[Variant]:
    for kind in _TYPES:
        constants = {"WIDTH": sample.WIDTH}
        floats = "temperatures_ptr top_ps_ptr min_ps_ptr us_ptr shares_ptr"
        types = _typed(sample.sample_kernel, constants, _fp32=floats, _i32="top_ks_ptr", _i64="tokens_ptr")
        types["logits_ptr"] = f"*{kind}"
        yield Variant(f"sample.{kind}", sample.sample_kernel, types, constants, sample.WARPS)
