"""Runs the model on a card: as runner.py does on the CPU, with every operation a kernel of Triton's and every tensor in the card's memory.

The host sends block tables, slots and token ids, and takes back chosen tokens, violations and the words of changed blocks. Nothing else
crosses over.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several

import torch
from torch import Tensor

from appliance.engine.block_keeping import BlockKeeping
from appliance.engine.block_pool import BlockPool, Region
from appliance.engine.kv_cache import KvCache
from appliance.engine.models.decoder import Attend as DecoderAttend
from appliance.engine.models.decoder import Decoder
from appliance.engine.models.linear import padded_rows
from appliance.engine.prompt_likelihoods import add_likelihoods
from appliance.engine.scheduler import Chunk
from appliance.engine.sequence import Sequence
from appliance_kernels.on_card import Attend, Cache, OnCard, Piece, Reader, Write
from appliance_kernels.tiles import CacheShape

_WANT_OF_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
"""How an error says so that is not torch.OutOfMemoryError: Triton where it loads a kernel, a library of CUDA's, the host's allocator."""


class CardFailed(Exception):
    """The driver reported an error of a kernel, not of memory: what this process computes on the card is worth nothing any more."""


def wants_memory(error: RuntimeError) -> bool:
    """Whether another try with less can help. Torch raises AcceleratorError for all else, Triton's launches a bare RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _WANT_OF_MEMORY)


class CardRunner(BlockKeeping):
    """Owns the decoder too, all of it on the card; what loop.py asks of a ModelRunner."""

    def __init__(self, decoder: Decoder, pool: BlockPool, card: OnCard, swap_bytes: int = 0) -> None:
        """The cache is allocated here; so much of it can be set aside in the host's memory."""
        config, geometry = decoder.config, pool.geometry
        super().__init__(KvCache(config, geometry, card.device, decoder.dtype), pool, card.violations(), swap_bytes, card.device)
        self._decoder = decoder
        self._card = card
        shape = CacheShape(geometry.block_tokens, config.kv_heads, config.group, geometry.null_block)
        self._readable_cache = Cache(shape, config.head_dim, decoder.dtype, self._whole, self._violations)
        self._short_of_memory = False
        self._window_of_layer = [layer.window_tokens for layer in config.layers]
        self._windows = sorted(set(self._window_of_layer))

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._decoder.config.vocab_size

    def beside(self, pool: BlockPool) -> CardRunner:
        """The same model over another cache.

        Raises:
            MemoryError: the card has no room for it.
        """
        try:
            return CardRunner(self._decoder, pool, self._card)
        except RuntimeError as error:
            if not wants_memory(error):
                raise
            raise MemoryError(str(error)) from error

    def prefill(self, chunks: Several[Chunk]) -> Tensor | None:
        """Compute chunks of different sequences in one pass.

        Returns:
            [n, vocab_size], on the card: the logits of the chunks that choose a token, in order; None when there are none.

        Raises:
            RuntimeError: there was no memory; another one may be tried, which begins with an emptied cache of torch's.
            CardFailed: the process has to end.
        """
        if self._short_of_memory:  # not where it was caught: the error still held what the pass had
            torch.cuda.empty_cache()
            self._short_of_memory = False
        try:
            return self._prefill(chunks)
        except RuntimeError as error:
            if not wants_memory(error):
                raise CardFailed(f"{type(error).__name__}: {error}") from error
            self._short_of_memory = True
            raise

    def _prefill(self, chunks: Several[Chunk]) -> Tensor | None:
        token_ids: list[int] = []
        positions: list[int] = []
        pieces, writes = [], []
        for chunk in chunks:
            piece = Piece(self._reader(chunk.sequence), len(token_ids), chunk.start, chunk.count)
            pieces.append(piece)
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.start + chunk.count]
            positions += (places := range(chunk.start, chunk.start + chunk.count))
            # A prompt goes to the prefill region, an answer that is computed again to the decode region.
            region = Region.DECODE if chunk.sequence.decode_blocks else Region.PREFILL
            writes.append((piece.row, self._plan_write([(piece.reader, place) for place in places], region)))
        attend = self._attention(len(token_ids), writes, self._card.plan_prefill(pieces, self._windows, self._readable_cache))
        hidden = self._decoder.forward(*self._padded(token_ids, positions), attend)
        for piece, chunk in zip(pieces, chunks, strict=True):
            add_likelihoods(chunk, piece.row, lambda rows: self._logits(hidden, list(rows)))
        last = [piece.row + piece.count - 1 for piece, chunk in zip(pieces, chunks, strict=True) if chunk.chooses]
        return self._logits(hidden, last) if last else None

    def decode(self, sequences: Several[Sequence]) -> Tensor:
        """One token of each: its newest, whose keys and values are written.

        Returns:
            [sequences, vocab_size], on the card.
        """
        readers = [self._reader(sequence) for sequence in sequences]
        positions = [len(sequence.token_ids) - 1 for sequence in sequences]
        write = self._plan_write(list(zip(readers, positions, strict=True)), Region.DECODE)
        plans = self._card.plan_decode(readers, positions, self._windows, self._readable_cache)
        attend = self._attention(len(readers), [(0, write)], plans)
        hidden = self._decoder.forward(*self._padded([sequence.token_ids[-1] for sequence in sequences], positions), attend)
        return self._logits(hidden, list(range(len(readers))))

    def _attention(self, rows: int, writes: Several[tuple[int, Write]], plans: Mapping[int, Attend]) -> DecoderAttend:
        """Write all rows, then attend; `writes` begin at those rows. The rows behind, which fill up, stay zero."""
        config = self._decoder.config
        mixed = torch.zeros(padded_rows(rows), config.heads * config.head_dim, dtype=self._decoder.dtype, device=self._device)
        ends = [*(row for row, _ in writes[1:]), rows]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache.keys(layer), self._cache.values(layer)
            for (begin, write), end in zip(writes, ends, strict=True):
                write(k[begin:end], v[begin:end], keys, values)
            plans[self._window_of_layer[layer]](q[:rows], keys, values, config.attention_scale, mixed)
            return mixed

        return attend

    def _plan_write(self, places: Several[tuple[Reader, int]], region: Region) -> Write:
        """Of tokens of these sequences at these positions."""
        block_tokens = self._geometry.block_tokens
        slots = [reader.table[position // block_tokens] * block_tokens + position % block_tokens for reader, position in places]
        return self._card.plan_write(slots, [reader.owner for reader, _ in places], self._guards[region], self._readable_cache)

    def _reader(self, sequence: Sequence) -> Reader:
        table = sequence.table(self._geometry.block_tokens)
        return Reader(sequence.arrival, table, len(table) - len(sequence.decode_blocks))

    def _padded(self, token_ids: list[int], positions: list[int]) -> tuple[Tensor, Tensor]:
        """With rows of token 0 that nobody reads, up to what `linear` wants."""
        extra = [0] * (padded_rows(len(token_ids)) - len(token_ids))
        return self._place(token_ids + extra), self._place(positions + extra)

    def _logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """In float32, whatever they were computed in: penalties and shares of 16 bits would not be those of the model."""
        extra = [0] * (padded_rows(len(rows)) - len(rows))
        return self._decoder.logits(hidden.index_select(0, self._place(rows + extra)))[: len(rows)].float()
