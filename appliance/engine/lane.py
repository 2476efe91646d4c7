"""A scheduler and the runner of its cache. The engine has one lane for everybody, and makes one for a sequence that must be apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from appliance.engine.block_pool import PoolGeometry
from appliance.engine.runner import ModelRunner
from appliance.engine.scheduler import Scheduler
from appliance.engine.sequence import Sequence

if TYPE_CHECKING:
    from appliance.engine.card_runner import CardRunner

Runner: TypeAlias = "ModelRunner | CardRunner"
"""What computes. The one for cards needs Triton, and is imported where there is a card."""


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """What computes sequences. Each has blocks, a cache and books of its own."""

    scheduler: Scheduler
    runner: Runner

    def apart(self, sequence: Sequence) -> Lane:
        """The safe path: a lane for this sequence alone, in memory that nobody else's block numbers can reach, just
        large enough. What it computes is what the shared one would have computed, to the last bit (docs/adr/0002).

        Raises:
            OSError, MemoryError: there is no room for its cache.
        """
        block_tokens = self.scheduler.pool.geometry.block_tokens
        tail_tokens = sequence.prompt_tokens % block_tokens
        answer_blocks = -(-(tail_tokens + sequence.request.sampling.max_new_tokens) // block_tokens)
        pool = self.scheduler.pool.beside(PoolGeometry(block_tokens, -(-sequence.prompt_tokens // block_tokens), answer_blocks))
        scheduler = Scheduler(pool, max_running=1, chunk_tokens=self.scheduler.chunk_tokens, prefix_cache=False)
        scheduler.add(sequence)
        return Lane(scheduler, self.runner.beside(pool))
