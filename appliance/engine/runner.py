"""Runs the model over what the scheduler chose: lays tokens side by side, gives attention its tables, keeps the cache."""

from __future__ import annotations

from collections.abc import Sequence as Several

import torch
from torch import Tensor

from appliance.engine.block_keeping import BlockKeeping
from appliance.engine.block_pool import BlockPool, Region
from appliance.engine.kv_cache import KvCache
from appliance.engine.models.decoder import Attend, Decoder
from appliance.engine.models.int8_decoder import Int8Decoder, Paging, Span
from appliance.engine.models.linear import padded_rows
from appliance.engine.prompt_likelihoods import add_likelihoods
from appliance.engine.scheduler import Chunk
from appliance.engine.sequence import Sequence
from appliance_kernels.kv_write.reference import Violations, WritePlan, kv_write, plan_write
from appliance_kernels.paged_decode.reference import paged_decode, plan_decode
from appliance_kernels.paged_prefill.reference import paged_prefill, plan_prefill
from appliance_kernels.tiles import CacheShape

_HOST = torch.device("cpu")


class ModelRunner(BlockKeeping):
    """Owns the decoder too. On the CPU."""

    def __init__(self, decoder: Decoder | Int8Decoder, pool: BlockPool, swap_bytes: int = 0) -> None:
        """The cache is mapped here; what may be written of it is the pool's to say."""
        config, geometry = decoder.config, pool.geometry
        super().__init__(KvCache(config, geometry), pool, Violations(), swap_bytes, _HOST)
        self._decoder = decoder
        self._shape = CacheShape(geometry.block_tokens, config.kv_heads, config.group, geometry.null_block)
        self._head_dim = config.head_dim
        self._window_of_layer = [layer.window_tokens for layer in config.layers]
        self._windows = sorted(set(self._window_of_layer))

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._decoder.config.vocab_size

    def beside(self, pool: BlockPool) -> ModelRunner:
        """The same model over another cache, which is mapped now; raises OSError or MemoryError where there is no room for it."""
        return ModelRunner(self._decoder, pool)

    def prefill(self, chunks: Several[Chunk]) -> Tensor | None:
        """Compute chunks of different sequences in one pass.

        Returns:
            [n, vocab_size]: the logits of the chunks that choose a token, in order; None when there are none.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        spans, writes = [], []
        for chunk in chunks:
            spans.append(Span(len(token_ids), chunk.count, chunk.start, self._readable_table(chunk.sequence)))
            writes.append(self._chunk_write(chunk))
            token_ids += chunk.sequence.token_ids[chunk.start : chunk.start + chunk.count]
            positions += range(chunk.start, chunk.start + chunk.count)
        if isinstance(self._decoder, Int8Decoder):
            hidden = self._paged_forward(self._decoder, token_ids, positions, spans, writes)
        else:
            attend = self._prefill_attention(spans, writes, self._mixed_rows(len(token_ids)))
            hidden = self._decoder.forward(*self._padded(token_ids, positions), attend)
        for span, chunk in zip(spans, chunks, strict=True):
            add_likelihoods(chunk, span.begin, lambda rows: self._logits(hidden, list(rows)))
        last = [span.begin + span.count - 1 for span, chunk in zip(spans, chunks, strict=True) if chunk.chooses]
        return self._logits(hidden, last) if last else None

    def decode(self, sequences: Several[Sequence]) -> Tensor:
        """One token of each: its newest, whose keys and values are written.

        Returns:
            [sequences, vocab_size].
        """
        # Ordered by length, so that attention groups neighbours; the result is put back in the caller's order.
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index].token_ids))
        chosen = [sequences[index] for index in order]
        positions = [len(sequence.token_ids) - 1 for sequence in chosen]
        owners = [sequence.arrival for sequence in chosen]
        tables = [sequence.table(self._geometry.block_tokens) for sequence in chosen]
        slots = torch.tensor([self._slot(table, position) for table, position in zip(tables, positions, strict=True)])
        write = self._plan_write(slots, torch.tensor(owners), Region.DECODE)
        readable = self._readable(tables, owners)
        newest = [sequence.token_ids[-1] for sequence in chosen]
        if isinstance(self._decoder, Int8Decoder):
            spans = [Span(row, 1, position, table) for row, (position, table) in enumerate(zip(positions, readable, strict=True))]
            hidden = self._paged_forward(self._decoder, newest, positions, spans, [write])
        else:
            hidden = self._decoder.forward(*self._padded(newest, positions), self._decode_attention(readable, positions, write))
        return self._logits(hidden, sorted(range(len(order)), key=order.__getitem__))

    def _paged_forward(
        self, decoder: Int8Decoder, token_ids: list[int], positions: list[int], spans: Several[Span], writes: Several[WritePlan]
    ) -> Tensor:
        paging = Paging.of(spans, writes, self._geometry.block_tokens, self._geometry.null_block)
        return decoder.forward(torch.tensor(token_ids), torch.tensor(positions), paging, self._cache, self._whole)

    def _decode_attention(self, tables: Several[Several[int]], positions: list[int], write: WritePlan) -> Attend:
        plans = {window: plan_decode(self._shape, self._head_dim, tables, positions, window) for window in self._windows}
        count, scale = len(positions), self._decoder.config.attention_scale
        mixed = self._mixed_rows(count)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache.keys(layer), self._cache.values(layer)
            kv_write(k[:count], v[:count], keys, values, write)
            paged_decode(q[:count], keys, values, plans[self._window_of_layer[layer]], scale, mixed[:count])
            return mixed

        return attend

    def _prefill_attention(self, spans: Several[Span], writes: Several[WritePlan], mixed: Tensor) -> Attend:
        """Write and attend, one chunk after the other."""
        plans = [
            {window: plan_prefill(self._shape, self._head_dim, span.table, span.start, span.count, window) for window in self._windows}
            for span in spans
        ]
        scale = self._decoder.config.attention_scale

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache.keys(layer), self._cache.values(layer)
            for span, write, by_window in zip(spans, writes, plans, strict=True):
                rows = slice(span.begin, span.begin + span.count)
                kv_write(k[rows], v[rows], keys, values, write)
                paged_prefill(q[rows], keys, values, by_window[self._window_of_layer[layer]], scale, mixed[rows])
            return mixed

        return attend

    def _chunk_write(self, chunk: Chunk) -> WritePlan:
        """A prompt goes to the prefill region, an answer that is computed again to the decode region."""
        table = chunk.sequence.table(self._geometry.block_tokens)
        slots = torch.tensor([self._slot(table, position) for position in range(chunk.start, chunk.start + chunk.count)])
        region = Region.DECODE if chunk.sequence.decode_blocks else Region.PREFILL
        return self._plan_write(slots, torch.full_like(slots, chunk.sequence.arrival), region)

    def _readable_table(self, sequence: Sequence) -> Several[int]:
        (table,) = self._readable([sequence.table(self._geometry.block_tokens)], [sequence.arrival])
        return table

    def _plan_write(self, slots: Tensor, owners: Tensor, region: Region) -> WritePlan:
        return plan_write(slots, owners, self._geometry.block_tokens, self._guards[region], self._violations)

    def _slot(self, table: Several[int], position: int) -> int:
        block, offset = divmod(position, self._geometry.block_tokens)
        return table[block] * self._geometry.block_tokens + offset

    def _mixed_rows(self, rows: int) -> Tensor:
        """Memory for attention's result, used by one layer after the other; the padding stays zero."""
        config = self._decoder.config
        return torch.zeros(padded_rows(rows), config.heads * config.head_dim)

    def _padded(self, token_ids: list[int], positions: list[int]) -> tuple[Tensor, Tensor]:
        """With rows of token 0 that nobody reads, up to what `linear` wants."""
        extra = [0] * (padded_rows(len(token_ids)) - len(token_ids))
        return torch.tensor(token_ids + extra), torch.tensor(positions + extra)

    def _logits(self, hidden: Tensor, rows: list[int]) -> Tensor:
        """Of these rows, in this order."""
        if isinstance(self._decoder, Int8Decoder):
            chosen = hidden if rows == list(range(hidden.shape[0])) else hidden.index_select(0, torch.tensor(rows))
            return self._decoder.logits(chosen)
        extra = [0] * (padded_rows(len(rows)) - len(rows))
        return self._decoder.logits(hidden.index_select(0, torch.tensor(rows + extra)))[: len(rows)]
