"""One request inside the engine: its tokens, its blocks, where it stands."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field

from appliance.engine.messages import FinishReason, GenerateRequest, Likelihood, TokenOutput


class Stage(enum.Enum):
    """Where a sequence stands. One writer: scheduler.py."""

    WAITING = "waiting"
    """No blocks yet, or those of its prompt only (preempted; or begun in an earlier engine life)."""
    PREFILLING = "prefilling"
    """Its blocks are there; its prompt, or then its own answer so far, is being computed in chunks."""
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and the answer so far.

    Attributes:
        arrival: counts submissions; the highest is the youngest.
        seed: the request's, or the one drawn for it.
        token_ids: prompt and answer.
        computed_tokens: how many of them have their keys and values in the cache.
        digests: of the prompt's full blocks; see prefix_cache.py.
        most_chunk_tokens: of one prefill step, where more found no memory; 0: no such limit.
        cached_tokens: of the prompt, taken from the prefix cache when it was admitted.
        overtaken: how often younger ones went past it; see order.py.
        prompt_likelihoods: of the prompt's tokens but the first, where they were asked for, until they are given out.
        saved_blocks: how many blocks of its answer so far lie in the host's memory, while it waits to come back; see swap.py.
        prompt_blocks: of the prefill region; the last may be partly filled.
        decode_blocks: of the decode region. The first begins where the prompt's last full block ends: with a copy of the
            prompt's tail, if it has one, so that a token's place follows from its position alone.
    """

    request: GenerateRequest
    on_output: Callable[[TokenOutput], None]
    arrival: int
    seed: int
    token_ids: list[int]
    stage: Stage = Stage.WAITING
    computed_tokens: int = 0
    digests: list[bytes] = field(default_factory=list)
    most_chunk_tokens: int = 0
    cached_tokens: int = 0
    overtaken: int = 0
    prompt_likelihoods: list[Likelihood] = field(default_factory=list)
    saved_blocks: int = 0
    prompt_blocks: list[int] = field(default_factory=list)
    decode_blocks: list[int] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def answer_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def prefill_target_tokens(self) -> int:
        """What prefill computes: the prompt; of an answer computed again all but the newest token, which decode takes as its input."""
        return max(self.prompt_tokens, len(self.token_ids) - 1) if self.decode_blocks else self.prompt_tokens

    @property
    def blocks(self) -> list[int]:
        """All that it holds."""
        return self.prompt_blocks + self.decode_blocks

    def give_out(
        self,
        token_ids: tuple[int, ...] = (),
        finish: FinishReason | None = None,
        error: str | None = None,
        likelihoods: tuple[Likelihood, ...] = (),
        hopeless: bool = False,
    ) -> None:
        """Tell whoever asked; the first time also of the prompt's tokens."""
        of_prompt, self.prompt_likelihoods = tuple(self.prompt_likelihoods), []
        told = TokenOutput(self.request.request_id, token_ids, finish, self.cached_tokens, error, likelihoods, of_prompt, hopeless)
        self.on_output(told)

    def table(self, block_tokens: int) -> list[int]:
        """Its blocks in order of position."""
        if not self.decode_blocks:
            return self.prompt_blocks
        return self.prompt_blocks[: self.prompt_tokens // block_tokens] + self.decode_blocks
