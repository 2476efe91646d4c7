"""How likely a prompt's own tokens were, for who wants to know (`echo` with `logprobs`): told chunk by chunk as it is computed.

log softmax(l_i)_{t_(i+1)}: each token's, but the first one's, from the logits behind the token before it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from appliance.engine.messages import Likelihood
from appliance.engine.scheduler import Chunk
from appliance_kernels.sample.reference import log_shares

_ROWS = 16
"""Logits that are there at once: of 262,144 tokens they take 16 MiB."""


def add_likelihoods(chunk: Chunk, begin: int, logits_of: Callable[[range], Tensor]) -> None:
    """Note in the chunk's sequence how likely the tokens behind the chunk's are, as far as they are of its prompt.

    Args:
        begin: the chunk's first row.
        logits_of: [rows, vocab_size] of such rows.
    """
    sequence = chunk.sequence
    count = sequence.request.sampling.prompt_logprobs
    judged = min(chunk.count, sequence.prompt_tokens - 1 - chunk.start)
    if count is None or judged <= 0 or sequence.answer_tokens:  # with the first token of the answer they were given out
        return
    found: list[Likelihood] = []
    for first in range(0, judged, _ROWS):
        rows = range(begin + first, begin + min(first + _ROWS, judged))
        for logits in logits_of(rows).cpu():
            token = sequence.token_ids[chunk.start + len(found) + 1]
            logprob, top = log_shares(logits, token, count)
            found.append(Likelihood(logprob, tuple(top)))
    sequence.prompt_likelihoods[chunk.start :] = found  # in the place of those of a try that failed
