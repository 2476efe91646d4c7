"""The next token of each sequence of a batch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import dataclass

import torch
from torch import Tensor

from appliance.engine.messages import Constraint, ConstraintFailed, Likelihood
from appliance.engine.sequence import Sequence
from appliance_kernels.sample.reference import NOT_FINITE, Draw, adjusted, log_shares, sample, tokens

Tokens = Callable[[Tensor, Several[Draw]], list[int]]
"""As sample.reference.tokens."""

_WORD = 2**64
_NEVER = float("-inf")
_COLDEST = 1e-5
"""Below this temperature nothing but the best token has a share that a float can hold."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A token, and how likely it was where the request wants to know."""

    token: int
    likelihoods: tuple[Likelihood, ...] = ()


@dataclass(frozen=True, slots=True)
class NoChoice:
    """There is no next token; `why` is fit for a client.

    Attributes:
        not_finite: the model's logits are NaN or infinite.
    """

    why: str
    not_finite: bool = False


def uniform(seed: int, position: int) -> float:
    """In [0, 1): a pure function of both, so that a seed gives the same tokens whatever else runs, and after a restart."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed % _WORD, position), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def choose(logits: Tensor, sequences: Several[Sequence], choose_tokens: Tokens = tokens) -> list[Choice | NoChoice]:
    """A token for each, by its own row alone.

    Args:
        logits: [sequences, vocab_size].
        choose_tokens: for all rows together, where the logits lie.
    """
    chosen = choose_tokens(logits, [_draw(sequence) for sequence in sequences])
    return [_choose(logits[row], token, sequence) for row, (token, sequence) in enumerate(zip(chosen, sequences, strict=True))]


def _draw(sequence: Sequence) -> Draw:
    """How to choose from the row as it is; from one that is changed first, here only whether its largest is a number."""
    sampling = sequence.request.sampling
    if _changes(sequence) or sampling.temperature < _COLDEST:
        return Draw()
    u = uniform(sequence.seed, len(sequence.token_ids))
    return Draw(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, u)


def _changes(sequence: Sequence) -> bool:
    return sequence.request.sampling.adjusts or sequence.request.constraint is not None


def _choose(logits: Tensor, token: int, sequence: Sequence) -> Choice | NoChoice:
    """One row's; `token` is what was chosen from it as it is."""
    sampling = sequence.request.sampling
    if token == NOT_FINITE:
        count = len(sequence.token_ids)
        return NoChoice(f"the model gave no usable numbers after {count} tokens (NaN or infinity)", not_finite=True)
    usable = logits
    if _changes(sequence):
        try:
            usable = _going_on(_allowed(_adjusted(logits.cpu(), sequence), sequence.request.constraint), sequence)
        except ConstraintFailed as failure:
            return NoChoice(str(failure))
        token = int(usable.argmax())
        if usable[token] == _NEVER:
            return NoChoice("what the answer may say leaves no token to choose")
        if sampling.temperature >= _COLDEST:
            u = uniform(sequence.seed, len(sequence.token_ids))
            token = sample(usable, sampling.temperature, sampling.top_k, sampling.top_p, u, sampling.min_p)
    if sampling.logprobs is None:
        return Choice(token)
    logprob, top = log_shares(logits.cpu(), token, sampling.logprobs)
    return Choice(token, (Likelihood(logprob, tuple(top)),))


def _adjusted(logits: Tensor, sequence: Sequence) -> Tensor:
    """Penalties and biases; new."""
    sampling = sequence.request.sampling
    return adjusted(
        logits,
        torch.tensor(sequence.request.prompt_ids),
        torch.tensor(sequence.token_ids[sequence.prompt_tokens :], dtype=torch.int64),
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.logit_bias,
    )


def _going_on(logits: Tensor, sequence: Sequence) -> Tensor:
    """No end before its time, unless the end is all that may be said."""
    sampling = sequence.request.sampling
    if sequence.answer_tokens >= sampling.min_new_tokens or not sampling.stop_token_ids:
        return logits
    longer = logits.clone()
    longer[list(sampling.stop_token_ids)] = _NEVER
    return longer if longer.max() > _NEVER else logits


def _allowed(logits: Tensor, constraint: Constraint | None) -> Tensor:
    """Without what may not be said; changed in place. A vocabulary is often padded: no text has those ids."""
    if constraint is not None:
        allowed = torch.frombuffer(bytearray(constraint.allowed()), dtype=torch.uint8)[: logits.shape[0]]
        logits[: allowed.shape[0]].masked_fill_(allowed == 0, _NEVER)
        logits[allowed.shape[0] :] = _NEVER
    return logits
