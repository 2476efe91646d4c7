"""The KV cache's memory as the operating system sees it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from appliance.engine import kv_cache
from appliance.engine.block_pool import PoolGeometry
from appliance.engine.kv_cache import CacheCorrupt, KvCache
from appliance.engine.models.config import DecoderConfig, LayerSpec, RopeSpec

MIB = 1024**2


def anonymous_bytes() -> int:
    """Memory of our own that was really touched."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def test_a_pool_costs_nothing_until_it_is_used() -> None:
    """2 GiB: no page of it is touched by making it, nor by reading zeros; a block that is written takes its own pages."""
    config = DecoderConfig(
        "LlamaForCausalLM", 32, 64, 96, 8, 8, 64, (LayerSpec(0, RopeSpec(1e4)),) * 8, 1e-5, "silu", 0.125, True, 4096
    )  # fmt: skip
    before = anonymous_bytes()
    cache = KvCache(config, PoolGeometry(16, 2000, 2095))
    keys = cache.keys(7)
    assert keys.shape == (4097, 8, 16, 64)
    assert keys.is_contiguous()
    assert anonymous_bytes() - before < 8 * MIB
    assert keys[::512].count_nonzero() == 0
    cache.scrub(torch.tensor([5]))
    assert keys[5].count_nonzero() == 0
    keys[5] += 1.0
    assert cache.keys(7)[4:7].sum() == 8 * 16 * 64
    assert anonymous_bytes() - before < 16 * MIB


def test_a_write_before_between_or_behind_the_regions_is_found() -> None:
    """In any layer, keys or values, also of a zero with a sign; a cache that was written where it may be is sound."""
    config = DecoderConfig(
        "LlamaForCausalLM", 32, 64, 96, 2, 2, 16, (LayerSpec(0, RopeSpec(1e4)),) * 3, 1e-5, "silu", 0.125, True, 4096
    )  # fmt: skip
    geometry = PoolGeometry(4, 3, 2)
    cache = KvCache(config, geometry)
    for layer in range(3):
        for plane in (cache.keys(layer), cache.values(layer)):
            plane[:3] = plane[4:6] = float("nan")
    cache.check_guards()
    cache.values(2)[3, 1, 3, 15] = -0.0
    with pytest.raises(CacheCorrupt, match="between the regions was written, first in the values of layer 2"):
        cache.check_guards()
    cache.values(2)[3] = 0.0
    cache.keys(1)[6, 0, 0, 0] = 1e-40
    with pytest.raises(CacheCorrupt, match="behind the regions was written, first in the keys of layer 1"):
        cache.check_guards()
    cache.keys(1)[6] = 0.0
    cache.check_guards()
    block_bytes = cache.keys(0)[0].nbytes
    for distance in (1, block_bytes):
        ctypes.memset(cache.address - distance, 1, 1)
        with pytest.raises(CacheCorrupt, match="before the regions was written, in front of the keys of layer 0"):
            cache.check_guards()
        ctypes.memset(cache.address - distance, 0, 1)
    cache.check_guards()


class _Largest(TorchFunctionMode):
    """What lies between reading and writing while it is entered: the most bytes that an index took together."""

    bytes = 0

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and not result._is_view():
            self.bytes = max(self.bytes, result.nbytes)
        return result


def test_many_blocks_are_moved_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """All answers of a busy hour are promoted when the engine is idle: on a card that is full, no copy of them all has room beside them.
    What arrives is what was there, block by block; also what was set aside and of which a part comes back."""
    config = DecoderConfig(
        "LlamaForCausalLM", 32, 64, 96, 2, 2, 16, (LayerSpec(0, RopeSpec(1e4)),) * 3, 1e-5, "silu", 0.125, True, 4096
    )  # fmt: skip
    cache = KvCache(config, PoolGeometry(4, 20, 20))
    monkeypatch.setattr(kv_cache, "_PIECE_BYTES", 3 * cache.block_bytes + 1)
    sources, targets, others = torch.arange(21, 32), torch.arange(0, 11), torch.tensor([19, 12, 15, 11])
    for layer in range(3):
        for plane in (cache.keys(layer), cache.values(layer)):
            plane[21:41] = torch.randn(20, 2, 4, 16)
    with _Largest() as largest:
        cache.copy(sources, targets)
        content = cache.read(sources)
        cache.write(others, content, torch.tensor([10, 0, 4, 9]))
    assert 0 < largest.bytes <= 3 * cache.block_bytes
    for layer in range(3):
        for plane in (cache.keys(layer), cache.values(layer)):
            assert torch.equal(plane[targets], plane[sources])
            assert torch.equal(plane[others], plane[torch.tensor([31, 21, 25, 30])])
    cache.check_guards()
