"""The KV cache's memory: one allocation for all layers and both regions."""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

from appliance.engine.block_pool import PoolGeometry
from appliance.engine.models.config import DecoderConfig


def bytes_per_token(config: DecoderConfig, dtype: torch.dtype = torch.float32) -> int:
    """Keys and values of one token in all layers."""
    return 2 * len(config.layers) * config.kv_heads * config.head_dim * dtype.itemsize


class CacheCorrupt(AssertionError):
    """Something was written where nobody writes: a defect of ours, or of the memory. The message says where."""


class KvCache:
    """Owns the tensor [layers, 2, end_block + 1, kv_heads, block_tokens, head_dim]. Two blocks of each layer's keys and values stay
    zero for ever: the null block between the regions, and one behind them. They take no memory: their pages are never written.

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
        self._memory = _host_zeros(shape) if device is None else torch.zeros(shape, dtype=dtype, device=device)
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
        """Copy [n] blocks to [n] others, in all layers."""
        self._memory[:, :, targets] = self._memory[:, :, sources]

    @property
    def block_bytes(self) -> int:
        """Of one block in all layers."""
        return self._memory[:, :, 0].nbytes

    def read(self, blocks: Tensor) -> Tensor:
        """What [n] blocks hold in all layers, for `write`; new."""
        return self._memory[:, :, blocks]

    def write(self, blocks: Tensor, content: Tensor) -> None:
        """Put back what `read` gave, into these [n] blocks or others."""
        self._memory[:, :, blocks] = content


def _host_zeros(shape: tuple[int, ...]) -> Tensor:
    pages = mmap.mmap(-1, math.prod(shape) * torch.float32.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=torch.float32).view(shape)
