"""Answers that gave way to older ones, in memory of their own until they come back.

Copying a block there and back takes a hundredth of the time that computing it again takes. What is here is bounded, because a
machine's memory is planned: what does not fit is computed again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Several

import torch
from torch import Tensor

from appliance.engine.kv_cache import KvCache

log = logging.getLogger("appliance.engine.swap")


class SwapSpace:
    """Owns the copies.

    Attributes:
        used_bytes: of all copies.
    """

    def __init__(self, cache: KvCache, most_bytes: int) -> None:
        self.used_bytes = 0
        self._cache = cache
        self._most_bytes = most_bytes
        self._copies: dict[int, Tensor] = {}  # by owner

    def save(self, owner: int, blocks: Several[int]) -> bool:
        """Copy what these blocks hold. False: it is too much, or there is no memory."""
        if self.used_bytes + len(blocks) * self._cache.block_bytes > self._most_bytes:
            return False
        try:
            copy = self._cache.read(torch.tensor(blocks))
        except (MemoryError, RuntimeError) as error:
            log.warning("An answer that gives way cannot be set aside and will be computed again: %s: %s", type(error).__name__, error)
            return False
        self.drop(owner)
        self._copies[owner] = copy
        self.used_bytes += copy.nbytes
        return True

    def restore(self, owner: int, targets: Tensor, which: Tensor) -> None:
        """Write the copies numbered `which` to these blocks, and let go of all."""
        self._cache.write(targets, self._copies[owner], which.cpu())
        self.drop(owner)

    def drop(self, owner: int) -> None:
        """Let go, where there is something."""
        copy = self._copies.pop(owner, None)
        if copy is not None:
            self.used_bytes -= copy.nbytes
