"""Paged attention against plain attention in float64: odd sizes, poisoned cache, every kind of window and table."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from appliance_kernels.kv_write.reference import Guard, Violations, kv_write, plan_write
from appliance_kernels.paged_decode.reference import paged_decode, plan_decode
from appliance_kernels.paged_prefill.reference import paged_prefill, plan_prefill
from appliance_kernels.tiles import CacheShape, tile_tokens

BLOCKS = 96


class Case:
    """Some sequences' keys and values, contiguous and in a shuffled paged cache whose other blocks hold no numbers."""

    def __init__(self, lengths: list[int], block_tokens: int, kv_heads: int, group: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.shape = CacheShape(block_tokens, kv_heads, group, null_block=BLOCKS)
        self.scale = dim**-0.5
        self.k_cache = torch.full((BLOCKS + 1, kv_heads, block_tokens, dim), float("nan"))
        self.v_cache = torch.full((BLOCKS + 1, kv_heads, block_tokens, dim), float("nan"))
        self.k_cache[BLOCKS] = self.v_cache[BLOCKS] = 0.0
        free = list(range(BLOCKS))
        random.Random(3).shuffle(free)
        self.tables, self.q, self.k, self.v = [], [], [], []
        for length in lengths:
            table = [free.pop() for _ in range(-(-length // block_tokens))]
            self.k_cache[table] = self.v_cache[table] = 0.0  # as the engine scrubs blocks that it hands out
            q = torch.randn(length, kv_heads * group, dim, generator=generator)
            k, v = (torch.randn(length, kv_heads, dim, generator=generator) for _ in range(2))
            slots = torch.tensor([table[p // block_tokens] * block_tokens + p % block_tokens for p in range(length)])
            guard = Guard(torch.ones(BLOCKS, dtype=torch.int32), torch.zeros(BLOCKS, dtype=torch.int64), 0, BLOCKS)
            plan = plan_write(slots, torch.zeros_like(slots), block_tokens, guard, Violations())
            kv_write(k, v, self.k_cache, self.v_cache, plan)
            for store, value in zip((self.tables, self.q, self.k, self.v), (table, q, k, v), strict=True):
                store.append(value)  # type: ignore[attr-defined]

    def exact(self, sequence: int, position: int, window: int) -> Tensor:
        """Attention of one token, head by head, in float64."""
        first = max(0, position - window + 1) if window else 0
        k, v = self.k[sequence][first : position + 1].double(), self.v[sequence][first : position + 1].double()
        heads = []
        for head, q in enumerate(self.q[sequence][position].double()):
            kv_head = head // self.shape.group
            shares = torch.softmax(k[:, kv_head] @ q * self.scale, 0)
            heads.append(shares @ v[:, kv_head])
        return torch.cat(heads)


SHAPES = [
    # block_tokens, kv_heads, group, dim
    pytest.param(16, 3, 3, 64, id="smollm2"),
    pytest.param(16, 1, 4, 256, id="gemma3"),
    pytest.param(7, 2, 1, 32, id="odd-blocks"),
    pytest.param(1, 1, 2, 16, id="blocks-of-one"),
    pytest.param(48, 2, 9, 16, id="group-over-8"),
]


@pytest.mark.parametrize(("block_tokens", "kv_heads", "group", "dim"), SHAPES)
@pytest.mark.parametrize("window", [0, 5, 40])
def test_decode_is_attention(block_tokens: int, kv_heads: int, group: int, dim: int, window: int) -> None:
    """One new token of sequences of very different lengths, in one call, within and without a window."""
    lengths = [1, 6, 64] if block_tokens == 1 else [1, 2, 15, 16, 17, 127, 128, 300]
    case = Case(lengths, block_tokens, kv_heads, group, dim)
    positions = [length - 1 for length in lengths]
    plan = plan_decode(case.shape, dim, case.tables, positions, window)
    q = torch.stack([q[-1] for q in case.q])
    out = torch.full((len(lengths), kv_heads * group * dim), float("nan"))
    paged_decode(q, case.k_cache, case.v_cache, plan, case.scale, out)
    for row, position in enumerate(positions):
        assert torch.allclose(out[row].double(), case.exact(row, position, window), atol=2e-5), f"sequence of {position + 1}"


@pytest.mark.parametrize(("block_tokens", "kv_heads", "group", "dim"), SHAPES)
@pytest.mark.parametrize("window", [0, 5, 40])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 50), (3, 1), (37, 13), (5, 80)])
def test_prefill_is_attention(block_tokens: int, kv_heads: int, group: int, dim: int, window: int, start: int, count: int) -> None:
    """Chunks at the beginning and in the middle of a prompt, of odd sizes."""
    case = Case([start + count], block_tokens, kv_heads, group, dim)
    plan = plan_prefill(case.shape, dim, case.tables[0], start, count, window)
    out = torch.full((count, kv_heads * group * dim), float("nan"))
    paged_prefill(case.q[0][start:], case.k_cache, case.v_cache, plan, case.scale, out)
    for row in range(count):
        assert torch.allclose(out[row].double(), case.exact(0, start + row, window), atol=2e-5), f"token {start + row}"


@pytest.mark.parametrize("window", [0, 100])
def test_decode_and_prefill_agree_to_the_last_bit(window: int) -> None:
    """The same token, decoded in a batch or prefilled in a chunk of any size: what recomputing an answer relies on."""
    case = Case([431, 150, 20], 16, 3, 3, 64)
    last = 430
    q = torch.stack([q[-1] for q in case.q])
    out = torch.zeros(3, 9 * 64)
    plan = plan_decode(case.shape, 64, case.tables, [last, 149, 19], window)
    paged_decode(q, case.k_cache, case.v_cache, plan, case.scale, out)
    for count in (1, 2, 63, 64, 65, 200, 431):
        chunk = torch.zeros(count, 9 * 64)
        plan_chunk = plan_prefill(case.shape, 64, case.tables[0], last + 1 - count, count, window)
        paged_prefill(case.q[0][last + 1 - count :], case.k_cache, case.v_cache, plan_chunk, case.scale, chunk)
        assert torch.equal(chunk[-1], out[0]), f"chunk of {count}"


@pytest.mark.parametrize("block_tokens", [1, 7, 16, 24, 100, 128, 1000])
def test_a_tile_is_whole_blocks_and_whole_vectors(block_tokens: int) -> None:
    """At least 128 keys, and neither a block nor a vector register is cut."""
    tile = tile_tokens(block_tokens)
    assert tile >= 128
    assert tile % block_tokens == 0
    assert tile % 16 == 0
