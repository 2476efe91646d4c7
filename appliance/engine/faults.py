"""Planted defects, for tests of what answers them: `--fault KIND@STEP` damages the running engine's books once.

The kinds (settings.FAULTS), each done to the oldest sequence at its decode step number STEP:

    stray        the last entry of its block table is the number of no block
    sealed       ... is a block of its own sealed prompt
    foreign      ... is the block that another sequence writes (waits for a step with two)
    freed        the word of the block that it writes says that it is free
    unreadable   the first entry of its block table is a block that nobody holds
    leaked       a block that nobody holds is marked as held
    overrun      a number is written just behind the prompts' region, as by a kernel that goes one too far
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from torch import Tensor

from appliance.engine.block_pool import BlockPool, Region
from appliance.engine.models.decoder import Decoder
from appliance.engine.models.int8_decoder import Int8Decoder
from appliance.engine.runner import ModelRunner
from appliance.engine.sequence import Sequence
from appliance_kernels.refcount.reference import FREE, OPEN, free_blocks


class FaultyRunner(ModelRunner):
    """A runner that does one damage; the caches beside it are sound."""

    def __init__(self, decoder: Decoder | Int8Decoder, pool: BlockPool, kind: str, at_step: int, swap_bytes: int = 0) -> None:
        super().__init__(decoder, pool, swap_bytes)
        self._pool = pool
        self._kind = kind
        self._steps_left: int | None = at_step

    def decode(self, sequences: Several[Sequence]) -> Tensor:
        """As ever, but for the one step."""
        if self._steps_left is not None:
            self._steps_left = max(0, self._steps_left - 1)
            if self._steps_left == 0 and not (self._kind == "foreign" and len(sequences) < 2):
                self._damage(sequences)
                self._steps_left = None
        return super().decode(sequences)

    def _damage(self, sequences: Several[Sequence]) -> None:
        victim = sequences[0]
        match self._kind:
            case "stray":
                victim.decode_blocks[-1] = 1_000_000
            case "sealed":
                victim.decode_blocks[-1] = victim.prompt_blocks[0]
            case "foreign":
                victim.decode_blocks[-1] = sequences[1].decode_blocks[-1]
            case "freed":
                self._pool.words[victim.decode_blocks[-1]] = FREE
            case "leaked":
                self._pool.words[self._pool.geometry.end_block - 1] = OPEN
            case "overrun":
                self._cache.values(-1)[self._pool.geometry.null_block, 0, 0, 0] = 1.0
            case "unreadable":
                victim.prompt_blocks[0] = int(free_blocks(self._pool.words, *self._pool.geometry.bounds(Region.PREFILL), 1)[0])
