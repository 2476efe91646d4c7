"""The KV cache's memory: one allocation for all layers and both regions."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

from appliance.engine.block_pool import PoolGeometry
from appliance.engine.models.config import DecoderConfig

_PIECE_BYTES = 16 * 1024**2
"""Blocks that are moved together: what lies between reading and writing them is memory that nobody planned."""


def bytes_per_token(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> int:
    """Keys and values of one token in all layers."""
    return 2 * len(config.layers) * config.kv_heads * config.head_dim * dtype.itemsize


class CacheCorrupt(AssertionError):
    """Something was written where nobody writes: a defect of ours, or of the memory. The message says where."""


class KvCache:
    """Owns the tensor [layers, 2, end_block + 1, kv_heads, block_tokens, head_dim]. Two blocks of each layer's keys and values stay
    zero for ever: the null block between the regions, and one behind them; so does one in front of it all. They take no memory: their
    pages are never written.

    With 8-bit weights (kernels/x86) a block's keys are turned: [kv_heads, head_dim, block_tokens]. A cache has one reader and writer.

    Attributes:
        block_tokens: of a block.
        address: of the first number.
        side_numbers: how many a layer's keys take; its values lie behind them.
    """

    def __init__(
        self, config: DecoderConfig, geometry: PoolGeometry, device: torch.device | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        """Zeroed. In the host's memory, where it is float32, that costs nothing: the kernel gives zero pages when they are first touched.

        Mapped by ourselves there, because torch.zeros touches them all: a third of a second for 512 MiB, at every start.
        """
        shape = (len(config.layers), 2, geometry.end_block + 1, config.kv_heads, geometry.block_tokens, config.head_dim)
        count, block = math.prod(shape), math.prod(shape[3:])
        whole = _host_zeros(block + count) if device is None else torch.zeros(block + count, dtype=dtype, device=device)
        self._before, self._memory = whole[:block], whole[block:].view(shape)
        self.block_tokens = geometry.block_tokens
        self.address, self.side_numbers = self._memory.data_ptr(), math.prod(shape[2:])
        self._guards = {"between the regions": geometry.null_block, "behind the regions": geometry.end_block}

    def keys(self, layer: int) -> Tensor:
        """[end_block + 1, kv_heads, block_tokens, head_dim], contiguous."""
        return self._memory[layer, 0]

    def values(self, layer: int) -> Tensor:
        """As `keys`."""
        return self._memory[layer, 1]

    def check_guards(self) -> None:
        """The blocks that nobody writes are zero, in all layers.

        Raises:
            CacheCorrupt: naming the first place that is not.
        """
        if self._before.view(torch.int16).count_nonzero():
            raise CacheCorrupt("the block before the regions was written, in front of the keys of layer 0; please report this")
        for where, block in self._guards.items():
            touched = self._memory[:, :, block].view(torch.int16).count_nonzero(dim=(-3, -2, -1)).nonzero()  # −0.0 is not zero here
            if touched.shape[0]:
                layer, side = touched[0].tolist()
                what = "values" if side else "keys"
                raise CacheCorrupt(f"the block {where} was written, first in the {what} of layer {layer} ({block=}); please report this")

    def scrub(self, blocks: Tensor) -> None:
        """Zero [n] blocks in all layers."""
        self._memory[:, :, blocks] = 0.0

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy [n] blocks to [n] others, in all layers. No target is a source."""
        for some in self._pieces(sources.shape[0]):
            self._memory[:, :, targets[some]] = self._memory[:, :, sources[some]]

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        return self._memory[:, :, 0].nbytes

    def read(self, blocks: Tensor) -> Tensor:
        """What [n] blocks hold in all layers, for `write`: new, in the host's memory, which a card reads and writes by itself."""
        shape = (*self._memory.shape[:2], blocks.shape[0], *self._memory.shape[3:])
        content = torch.empty(shape, dtype=self._memory.dtype, pin_memory=self._memory.is_cuda)
        for some in self._pieces(blocks.shape[0]):
            content[:, :, some].copy_(self._memory[:, :, blocks[some]])
        return content

    def write(self, blocks: Tensor, content: Tensor, which: Tensor) -> None:
        """Put the blocks numbered `which` of what `read` gave into these [n], or others."""
        for some in self._pieces(blocks.shape[0]):
            self._memory[:, :, blocks[some]] = content[:, :, which[some]].to(self._memory.device)

    def _pieces(self, count: int) -> Iterator[slice]:
        step = max(1, _PIECE_BYTES // self.block_bytes)
        return (slice(begin, begin + step) for begin in range(0, count, step))


def _host_zeros(count: int) -> Tensor:
    pages = mmap.mmap(-1, count * torch.float32.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.float32)
