"""The next token of each sequence of a batch."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence as Several

from torch import Tensor

from appliance.engine.sequence import Sequence
from appliance_kernels.sample.reference import greedy, sample

_WORD = 2**64
_COLDEST = 1e-5
"""Below this temperature nothing but the best token has a share that a float can hold."""


class NotFinite(Exception):
    """The model's logits of these sequences are NaN or infinite."""

    def __init__(self, sequences: list[Sequence]) -> None:
        super().__init__(f"logits of {len(sequences)} sequences are not finite")
        self.sequences = sequences


def uniform(seed: int, position: int) -> float:
    """In [0, 1): a pure function of both, so that a seed gives the same tokens whatever else runs, and after a restart."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed % _WORD, position), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> 11) * 2.0**-53)


def choose(logits: Tensor, sequences: Several[Sequence]) -> list[int]:
    """A token for each.

    Args:
        logits: [sequences, vocab_size].

    Raises:
        NotFinite: naming those whose logits are not; nothing was chosen.
    """
    best = greedy(logits)
    finite = logits.gather(1, best.unsqueeze(1)).squeeze(1).isfinite().tolist()  # NaN counts as the largest
    if not all(finite):
        raise NotFinite([sequence for sequence, good in zip(sequences, finite, strict=True) if not good])
    tokens: list[int] = best.tolist()
    for row, sequence in enumerate(sequences):
        sampling = sequence.request.sampling
        if sampling.temperature >= _COLDEST:
            u = uniform(sequence.seed, len(sequence.token_ids))
            tokens[row] = sample(logits[row], sampling.temperature, sampling.top_k, sampling.top_p, u)
    return tokens
