"""What the HTTP side and the engine loop say to each other. Token ids only; text stays on the HTTP side.

No torch here: the HTTP side and its tests import this without it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from appliance.core.launch import EngineLimits


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen.

    Attributes:
        temperature: 0 is greedy.
        top_p, top_k: 1.0 and 0 switch them off.
        seed: with one, the tokens depend on the prompt and the parameters alone, not on the batch; None draws one.
        max_new_tokens: at least 1.
        stop_token_ids: ends the answer; the token itself is not part of it. The model's own end tokens are added by
            the HTTP side unless the client said `ignore_eos`.
        min_p: tokens with less than this share of the likeliest one's are out of the question; 0 switches it off.
        min_new_tokens: until then no stop token is chosen.
        presence_penalty, frequency_penalty: taken from the logit of a token that the answer holds, once or a time.
        repetition_penalty: a positive logit of a token of prompt or answer is divided by it, a negative one multiplied; 1 is off.
        logit_bias: (token id, what is added to its logit).
        logprobs: report each token's log probability, and those of so many likeliest; None: do not.
        prompt_logprobs: the same of the prompt's tokens.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    min_p: float = 0.0
    min_new_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def adjusts(self) -> bool:
        """Logits are not taken as the model gives them."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0) or bool(self.logit_bias) or self.min_new_tokens > 0


class Constraint(Protocol):
    """What an answer may say, a token at a time. Written by the engine's thread alone, once its request is submitted."""

    def allowed(self) -> bytes:
        """A byte a token id: 0 where it may not come next.

        Raises:
            ConstraintFailed: the grammar has become too much for its limits.
        """

    def take(self, token_id: int) -> None:
        """It came next."""

    @property
    def complete(self) -> bool:
        """Nothing may follow any more."""


class ConstraintFailed(Exception):
    """The message is fit for a client."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to continue.

    Attributes:
        answer_ids: the beginning of the answer, from an earlier engine life: computed again at the places where it was
            computed then, not given out again, and counted in max_new_tokens, which is more than they are.
        constraint: what the answer may say; it has taken answer_ids already. None: anything.
        priority: who has the lower one is served first; see order.py.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    answer_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    priority: int = 0


class FinishReason(enum.Enum):
    """The value is OpenAI's word where OpenAI has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Likelihood:
    """How likely a token was, of all that the model could have said, before anything was adjusted.

    Attributes:
        logprob: the natural logarithm of its share.
        top: (token id, logprob) of the likeliest, in order.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """New tokens of one sequence, or its end.

    Attributes:
        token_ids: new since the last output; may be empty with a finish reason (a stop token is never in it).
        finish: set in the last output of a request, exactly once.
        cached_tokens: of the prompt, found in the prefix cache.
        error: for ERROR: one sentence with numbers, fit for a client.
        hopeless: for ERROR: the same request would fail again.
        likelihoods: of these tokens, where the request asked for them.
        prompt_likelihoods: of the prompt's tokens but the first, where the request asked for them: in the first output.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    cached_tokens: int = 0
    error: str | None = None
    likelihoods: tuple[Likelihood, ...] = ()
    prompt_likelihoods: tuple[Likelihood, ...] = ()
    hopeless: bool = False


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and gauges of now; what /health and /metrics print."""

    progress: int
    """Completed scheduler steps that prefilled a chunk or produced a token."""
    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    kv_blocks_total: int
    kv_blocks_used: int
    last_step_s: float
    """Duration of the last completed step."""
    block_violations: int = 0
    """Writes to KV blocks, or reads of them, that were refused; each has cost a sequence its blocks."""
    cached_tokens: int = 0
    """Of prompts, taken from the prefix cache; they are not among prompt_tokens."""
    kv_blocks_kept: int = 0
    """By the prefix cache alone: anybody may have them."""
    swaps: int = 0
    """Preemptions whose blocks were set aside, not computed again."""
    evictions: int = 0
    """Blocks that the prefix cache gave up for others."""
    decode_launches: int = 0
    """Of the decode kernels: one a step, for all layers and everybody who decodes."""
    block_references: tuple[tuple[int, int], ...] = ()
    """(holders, how many KV blocks have so many), fewest first; at most a second old."""


class RequestRefused(Exception):
    """The request can never run on this engine; the message names both numbers and what would fit."""


class Engine(Protocol):
    """The engine as the HTTP side sees it. `loop.py` implements it over a thread; tests may too."""

    @property
    def limits(self) -> EngineLimits: ...

    def submit(self, request: GenerateRequest, on_output: Callable[[TokenOutput], None]) -> None:
        """Queue a request. `on_output` is called from the engine's thread, in order, until a finish.

        Raises:
            RequestRefused: prompt plus max_new_tokens exceeds the context or the KV pool.
        """

    def abort(self, request_id: str) -> None:
        """Drop a request at the next step; unknown or finished ids are ignored. One output with ABORT follows."""

    def stats(self) -> EngineStats:
        """A consistent snapshot; callable from any thread, never waits for a step."""
