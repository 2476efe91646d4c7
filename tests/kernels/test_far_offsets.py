"""Numbers that lie 2³¹ elements and more behind a tensor's first: a cache of 24 GiB has them, and an offset of 32 bits would wrap.

The memory is mapped and never touched but where something lies: no page of the rest exists. Triton's interpreter computes offsets in the
widths that the kernel has them in.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from appliance_kernels.gated_mlp import reference as gated_mlp
from appliance_kernels.gated_mlp import triton as gated_mlp_kernel
from appliance_kernels.kv_write.reference import Guard, Violations
from appliance_kernels.kv_write.triton import kv_write
from appliance_kernels.paged_decode import triton as decode_kernel
from appliance_kernels.paged_prefill import triton as prefill_kernel
from appliance_kernels.refcount.reference import OPEN, Step
from appliance_kernels.refcount.triton import take_step
from appliance_kernels.rms_norm import reference as rms_norm
from appliance_kernels.rms_norm import triton as rms_norm_kernel
from appliance_kernels.rope import reference as rope
from appliance_kernels.rope import triton as rope_kernel
from appliance_kernels.sample.reference import Draw
from appliance_kernels.sample.triton import tokens
from appliance_kernels.tables import check_tables, lay_tables

FAR = 2**30 + 64
"""Elements between rows: the third begins behind 2³¹."""
BLOCK_TOKENS, DIM = 16, 64
LAST = 2**31 // (BLOCK_TOKENS * DIM) + 1
"""A block of one head that lies there."""
_MAP_NORESERVE = 0x4000


def far(*shape: int, strides: tuple[int, ...] = (), dtype: torch.dtype = torch.float16) -> Tensor:
    """Zeros that take no memory."""
    strides = strides or tuple(math.prod(shape[index + 1 :]) for index in range(len(shape)))
    count = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    return torch.frombuffer(pages, dtype=dtype).as_strided(shape, strides)


def far_rows(content: Tensor) -> Tensor:
    """Three rows, FAR elements apart."""
    rows = far(*content.shape, strides=(FAR, *content.stride()[1:]))
    rows.copy_(content)
    assert rows[2].data_ptr() - rows.data_ptr() > 2**31 * rows.element_size()
    return rows


def normal(*shape: int) -> Tensor:
    """Random."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).half()


def cache(content: Tensor) -> Tensor:
    """[LAST + 3, 1, BLOCK_TOKENS, DIM], with this [BLOCK_TOKENS, DIM] in block LAST."""
    blocks = far(LAST + 3, 1, BLOCK_TOKENS, DIM)
    blocks[LAST, 0] = content
    return blocks


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[heads, DIM] over [keys, DIM] each, in float64."""
    return (torch.softmax(q.double() @ k.double().t(), -1) @ v.double()).flatten()


def test_a_block_behind_2_31_elements_is_written() -> None:
    """Its own row, and no other one."""
    k, v = normal(1, 1, DIM), normal(2, 1, DIM)[1:]
    k_cache, v_cache = cache(torch.zeros(BLOCK_TOKENS, DIM)), cache(torch.zeros(BLOCK_TOKENS, DIM))
    words = torch.full((LAST + 2,), OPEN, dtype=torch.int32)
    guard = Guard(words, torch.zeros(LAST + 2, dtype=torch.int64), 1, LAST + 2)
    violations = Violations(4)
    kv_write(k, v, k_cache, v_cache, torch.tensor([LAST * BLOCK_TOKENS + 3]), torch.zeros(1, dtype=torch.int64), guard, violations)
    assert violations.take() == []
    for blocks, row in ((k_cache, k), (v_cache, v)):
        assert torch.equal(blocks[LAST, 0, 3], row[0, 0])
        assert int(blocks[LAST].count_nonzero()) == int(row.count_nonzero())


def test_rows_behind_2_31_elements_are_written_from() -> None:
    """Keys and values inside wider rows, as a fused product has them."""
    content = normal(3, 1, DIM)
    k = far_rows(content)
    k_cache, v_cache = torch.zeros(2, 4, 1, BLOCK_TOKENS, DIM, dtype=torch.float16)
    guard = Guard(torch.full((4,), OPEN, dtype=torch.int32), torch.zeros(4, dtype=torch.int64), 0, 4)
    kv_write(k, k, k_cache, v_cache, torch.tensor([5, 6, 7]), torch.zeros(3, dtype=torch.int64), guard, Violations(4))
    assert torch.equal(k_cache[0, 0, 5:8], content[:, 0])
    assert torch.equal(v_cache[0, 0, 5:8], content[:, 0])


def test_decode_reads_a_block_behind_2_31_elements_for_a_row_as_far_into_a_row_as_far() -> None:
    """Queries, keys, values and results."""
    k, v, q = normal(BLOCK_TOKENS, DIM), normal(2 * BLOCK_TOKENS, DIM)[BLOCK_TOKENS:], normal(3, 2, DIM) / 8
    tables = lay_tables([[LAST]] * 3, [1] * 3, [0, 1, 2], (LAST + 1, LAST + 2), torch.device("cpu"))
    out = far_rows(torch.zeros(3, 2 * DIM, dtype=torch.float16))
    plan = decode_kernel.plan_decode(tables, [15, 4, 9], 0)
    decode_kernel.paged_decode(far_rows(q), cache(k), cache(v), plan, 1.0, out, None)
    for row, position in enumerate((15, 4, 9)):
        exact = attention(q[row], k[: position + 1], v[: position + 1])
        assert (out[row].double() - exact).abs().max() < 5e-3


def test_prefill_reads_and_writes_as_far() -> None:
    """A chunk of three tokens behind thirteen cached ones."""
    k, v, q = normal(BLOCK_TOKENS, DIM), normal(2 * BLOCK_TOKENS, DIM)[BLOCK_TOKENS:], normal(3, 2, DIM) / 8
    tables = lay_tables([[LAST]], [1], [0], (LAST + 1, LAST + 2), torch.device("cpu"))
    out = far_rows(torch.zeros(3, 2 * DIM, dtype=torch.float16))
    plan = prefill_kernel.plan_prefill(tables, [(0, 13, 3)], 2, DIM, 2, 0)
    prefill_kernel.paged_prefill(far_rows(q), cache(k), cache(v), plan, 1.0, out, None)
    for row in range(3):
        assert (out[row].double() - attention(q[row], k[: 14 + row], v[: 14 + row])).abs().max() < 5e-3


@pytest.mark.parametrize("name", ["rms_norm", "rope", "silu_mul"])
def test_rows_behind_2_31_elements_are_computed(name: str) -> None:
    """As rows that lie side by side."""
    cos, sin = rope.rope_turn(10_000.0 ** (-torch.arange(0, DIM, 2) / DIM), torch.tensor([0, 1, 77]))
    weight = torch.ones(DIM)
    ways: dict[str, tuple[Tensor, Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
        "rms_norm": (normal(3, DIM), lambda x: rms_norm_kernel.rms_norm(x, weight, 1e-6), lambda x: rms_norm.rms_norm(x, weight, 1e-6)),
        "rope": (normal(3, 1, DIM), lambda x: rope_kernel.rope(x, cos, sin), lambda x: rope.rope(x, cos, sin)),
        "silu_mul": (normal(3, DIM), gated_mlp_kernel.silu_mul, gated_mlp.silu_mul),
    }
    content, kernel, formula = ways[name]
    assert (kernel(far_rows(content)).float() - formula(content.float())).abs().max() < 5e-3


def test_logits_behind_2_31_elements_are_chosen_from() -> None:
    """The largest, and one that is drawn."""
    content = torch.zeros(3, 50, dtype=torch.float16)
    content[torch.arange(3), torch.tensor([7, 41, 13])] = 9.0
    assert tokens(far_rows(content), [Draw(), Draw(1.0, top_k=1, u=0.5), Draw(0.1, u=0.5)]) == [7, 41, 13]


def test_many_blocks_are_many_words() -> None:
    """Steps and tables of block numbers that no product with a block's size fits 32 bits."""
    words = torch.zeros(LAST + 2, dtype=torch.int32)
    result = torch.empty(2, dtype=torch.int32)
    take_step(words, torch.tensor([LAST, 2**31 + LAST]), Step.CLAIM, result)
    assert result.tolist() == [OPEN, -2]
    tables = lay_tables([[LAST]], [1], [0], (LAST + 1, LAST + 2), torch.device("cpu"))
    violations = Violations(4)
    check_tables(tables, torch.tensor([1]), Guard(words, torch.zeros(LAST + 2, dtype=torch.int64), 0, LAST + 2), violations)
    assert violations.take() == []
    assert tables.entries.tolist() == [[LAST]]
