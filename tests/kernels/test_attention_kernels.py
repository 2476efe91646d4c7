"""Paged attention as Triton kernels, in its interpreter: against plain attention in float64, and what they do with bad tables."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from appliance_kernels import tables as tables_kernel
from appliance_kernels.kv_write.reference import ANYBODY, Guard, Reason, Violation
from appliance_kernels.on_card import Cache, OnCard, Piece, Reader
from appliance_kernels.paged_decode import triton as decode_kernel
from appliance_kernels.paged_prefill import triton as prefill_kernel
from appliance_kernels.refcount.reference import OPEN, SEALED
from appliance_kernels.tables import lay_tables
from appliance_kernels.tiles import CacheShape
from tests.kernels.whole_products import whole_products

NULL, END = 30, 60
"""Prompts' blocks lie below, answers' between."""
CARD = OnCard(torch.device("cpu"))


@pytest.fixture(autouse=True)
def short_splits(guarded: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that a few dozen tokens are several splits. Products of bfloat16 are such."""
    monkeypatch.setattr(decode_kernel, "SPLIT", 64)
    with whole_products():
        yield


class Case:
    """Some sequences in a cache whose every other number is NaN; half of each table lies in the answers' region."""

    def __init__(self, lengths: Sequence[int], block_tokens: int, kv_heads: int, group: int, dim: int, kind: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(7)
        self.scale, self.group, self.dim, self.kind = dim**-0.5, group, dim, kind
        self.memory = torch.full((2, END + 2, kv_heads, block_tokens, dim), float("nan"), dtype=kind)
        self.memory[:, 1 + NULL] = 0.0
        pools = [list(range(NULL)), list(range(NULL + 1, END))]
        for pool in pools:
            random.Random(3).shuffle(pool)
        words, owners = torch.zeros(END, dtype=torch.int32), torch.full((END,), -1)
        words[NULL] = OPEN
        self.readers, self.q, self.k, self.v = [], [], [], []
        for owner, length in enumerate(lengths):
            entries = -(-length // block_tokens)
            table = [pools[index >= (entries + 1) // 2].pop() for index in range(entries)]
            words[table], owners[table] = OPEN, owner
            q, k, v = (torch.randn(length, heads, dim, generator=draw).to(kind) for heads in (kv_heads * group, kv_heads, kv_heads))
            for position in range(length):
                for side, rows in enumerate((k, v)):
                    self.memory[side, 1 + table[position // block_tokens], :, position % block_tokens] = rows[position]
            for store, value in zip(
                (self.readers, self.q, self.k, self.v), (Reader(owner, table, (entries + 1) // 2), q, k, v), strict=True
            ):
                store.append(value)  # type: ignore[attr-defined]
        guard = Guard(words, owners, 0, END)
        self.cache = Cache(CacheShape(block_tokens, kv_heads, group, NULL), dim, kind, guard, CARD.violations())

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """Without the guard blocks before and behind them."""
        return self.memory[0, 1:-1], self.memory[1, 1:-1]

    def exact(self, sequence: int, position: int, window: int, cap: float = 0.0, hidden: range = range(0)) -> Tensor:
        """Attention of one token, head by head, in float64; zeros in place of the keys and values of `hidden` positions."""
        first = max(0, position - window + 1) if window else 0
        k, v = self.k[sequence].double().clone(), self.v[sequence].double().clone()
        k[hidden.start : hidden.stop], v[hidden.start : hidden.stop] = 0.0, 0.0
        heads = []
        for head, q in enumerate(self.q[sequence][position].double()):
            scores = k[first : position + 1, head // self.group] @ q * self.scale
            scores = cap * torch.tanh(scores / cap) if cap else scores
            heads.append(torch.softmax(scores, 0) @ v[first : position + 1, head // self.group])
        return torch.cat(heads)

    def out(self, rows: int) -> Tensor:
        """For results: NaN between guards."""
        return torch.empty(rows, len(self.q[0][0]) * self.dim, dtype=self.kind)

    def newest(self) -> tuple[Tensor, list[int]]:
        """The last token of each sequence, inside wider rows as the engine's lie, and its position."""
        newest = torch.stack([q[-1] for q in self.q])
        wider = torch.cat((newest, torch.full_like(newest, float("nan"))), 1)
        return wider[:, : newest.shape[1]], [len(q) - 1 for q in self.q]


def _check(found: Tensor, exact: Tensor, error: float, what: str) -> None:
    off = (found.double() - exact).abs()
    assert off.isfinite().all(), f"{what}: {int((~off.isfinite()).sum())} numbers are none"
    assert float(off.max()) <= error, f"{what}: off by {float(off.max()):.2e}"


SHAPES = [
    # block_tokens, kv_heads, group, dim, type, error, window
    pytest.param(16, 2, 3, 64, torch.float32, 3e-6, 0, id="smollm2-fp32"),
    pytest.param(16, 1, 4, 128, torch.float16, 2e-3, 70, id="128-fp16-window"),
    pytest.param(16, 2, 2, 64, torch.bfloat16, 2e-2, 33, id="64-bf16-window"),
    pytest.param(7, 2, 1, 24, torch.float32, 3e-6, 20, id="odd-blocks-odd-heads-window"),
    pytest.param(5, 1, 17, 16, torch.float32, 3e-6, 0, id="group-over-16"),
]


@pytest.mark.parametrize(("block_tokens", "kv_heads", "group", "dim", "kind", "error", "window"), SHAPES)
def test_decode_is_attention(block_tokens: int, kv_heads: int, group: int, dim: int, kind: torch.dtype, error: float, window: int) -> None:
    """Sequences of one and of several splits in one call; with the window, one whose first split is not the first."""
    case = Case([1, 45, 131], block_tokens, kv_heads, group, dim, kind)
    q, positions = case.newest()
    out = case.out(3)
    CARD.plan_decode(case.readers, positions, [window], case.cache)[window](q, *case.caches, case.scale, out)
    for row, position in enumerate(positions):
        _check(out[row], case.exact(row, position, window), error, f"sequence of {position + 1}")
    assert case.cache.violations.take() == []


@pytest.mark.parametrize(("block_tokens", "kv_heads", "group", "dim", "kind", "error", "window"), SHAPES)
def test_prefill_is_attention(block_tokens: int, kv_heads: int, group: int, dim: int, kind: torch.dtype, error: float, window: int) -> None:
    """A whole prompt, a chunk behind a cached beginning and a single token, side by side in one launch."""
    case = Case([9, 71, 40], block_tokens, kv_heads, group, dim, kind)
    starts = [0, 58, 39]
    pieces, rows = [], []
    for reader, q, start in zip(case.readers, case.q, starts, strict=True):
        pieces.append(Piece(reader, len(rows), start, len(q) - start))
        rows += [q[position] for position in range(start, len(q))]
    out = case.out(len(rows))
    CARD.plan_prefill(pieces, [window], case.cache)[window](torch.stack(rows), *case.caches, case.scale, out)
    for sequence, piece in enumerate(pieces):
        for index in range(piece.count):
            position = piece.start + index
            what = f"sequence {sequence}, token {position}"
            _check(out[piece.row + index], case.exact(sequence, position, window), error, what)
    assert case.cache.violations.take() == []


@pytest.mark.parametrize("length", [131, 160, 200])
def test_a_window_that_begins_in_the_middle_of_a_split(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split is several tiles, as on a card: those that nobody sees are passed over, for they would make −∞ − (−∞)."""
    monkeypatch.setattr(decode_kernel, "SPLIT", 256)
    case = Case([length], 16, 1, 2, 64, torch.float32)
    q, positions = case.newest()
    out = case.out(1)
    CARD.plan_decode(case.readers, positions, [40], case.cache)[40](q, *case.caches, case.scale, out)
    _check(out[0], case.exact(0, length - 1, 40), 3e-6, f"sequence of {length}")


def test_a_row_that_sees_nothing_of_the_first_tile_of_keys() -> None:
    """A chunk longer than its window: its last rows begin to see where its first ones have long ended."""
    case = Case([90], 16, 1, 1, 32, torch.float32)
    out = case.out(32)
    CARD.plan_prefill([Piece(case.readers[0], 0, 50, 32)], [5], case.cache)[5](case.q[0][50:82], *case.caches, case.scale, out)
    for row in range(32):
        _check(out[row], case.exact(0, 50 + row, 5), 3e-6, f"token {50 + row}")


def test_scores_are_capped() -> None:
    """c · tanh(s / c), in both kernels."""
    case = Case([50], 16, 1, 2, 32, torch.float32)
    reader = case.readers[0]
    tables = lay_tables([reader.table], [reader.prompt_blocks], [0], (NULL, END), CARD.device)
    q, positions = case.newest()
    out, chunk = case.out(1), case.out(50)
    decode_kernel.paged_decode(q, *case.caches, decode_kernel.plan_decode(tables, positions, 0), 1.0, out, None, soft_cap=3.0)
    plan = prefill_kernel.plan_prefill(tables, [(0, 0, 50)], 2, 32, 4, 0)
    prefill_kernel.paged_prefill(case.q[0], *case.caches, plan, 1.0, chunk, None, soft_cap=3.0)
    case.scale = 1.0
    exact = case.exact(0, 49, 0, cap=3.0)
    _check(out[0], exact, 3e-6, "decode")
    _check(chunk[49], exact, 3e-6, "prefill")


def test_a_row_does_not_depend_on_what_else_is_computed() -> None:
    """To the last bit: a token decoded alone or beside others, a prompt whole, in chunks, or beside another.

    The chunk begins where a program's rows do: the interpreter's products, unlike a card's, depend on where in a matrix a row lies.
    """
    case = Case([131, 30], 16, 1, 2, 32, torch.float32)
    q, positions = case.newest()
    both, alone = case.out(2), case.out(1)
    CARD.plan_decode(case.readers, positions, [0], case.cache)[0](q, *case.caches, case.scale, both)
    CARD.plan_decode(case.readers[:1], positions[:1], [0], case.cache)[0](q[:1], *case.caches, case.scale, alone)
    assert torch.equal(both[:1], alone)
    whole, chunk = case.out(131), case.out(36)
    CARD.plan_prefill([Piece(case.readers[0], 0, 0, 131)], [0], case.cache)[0](case.q[0], *case.caches, case.scale, whole)
    pieces = [Piece(case.readers[1], 0, 29, 1), Piece(case.readers[0], 1, 96, 35)]
    rows = torch.cat((case.q[1][29:], case.q[0][96:]))
    CARD.plan_prefill(pieces, [0], case.cache)[0](rows, *case.caches, case.scale, chunk)
    assert torch.equal(chunk[1:], whole[96:])


STRAYS = [
    pytest.param(0, -5, id="below-all-blocks"),
    pytest.param(0, NULL + 1, id="an-answers-block-in-the-prompt"),
    pytest.param(2, 3, id="a-prompts-block-in-the-answer"),
    pytest.param(2, END, id="behind-all-blocks"),
    pytest.param(2, 2**40, id="far-outside"),
    pytest.param(0, 2**32 + 1, id="of-which-half-is-a-block"),
]


@pytest.mark.parametrize(("entry", "block"), STRAYS)
@pytest.mark.parametrize("way", ["decode", "prefill"])
def test_an_entry_outside_its_segment_is_told_and_never_read(way: str, entry: int, block: int) -> None:
    """The kernel's own check, behind that of the tables: zeros stand in, the reader is named once a launch, others are as ever."""
    case = Case([40, 40], 16, 2, 2, 16, torch.float32)
    sound, torn = case.readers[0].table, list(case.readers[1].table)
    torn[entry] = block
    tables = lay_tables([sound, torn], [2, 2], [100, 101], (NULL, END), CARD.device)
    told = CARD.violations()
    if way == "decode":
        q, positions = case.newest()
        out = case.out(2)
        decode_kernel.paged_decode(q, *case.caches, decode_kernel.plan_decode(tables, positions, 0), case.scale, out, told)
    else:
        out = case.out(2)
        plan = prefill_kernel.plan_prefill(tables, [(0, 39, 1), (1, 39, 1)], 2, 16, 4, 0)
        q = torch.stack([case.q[0][39], case.q[1][39]])
        prefill_kernel.paged_prefill(q, *case.caches, plan, case.scale, out, told)
    assert int(told.count) == 1
    assert told.take() == [Violation(101, block, 0, Reason.OUTSIDE)]
    _check(out[0], case.exact(0, 39, 0), 3e-6, "the other")
    _check(out[1], case.exact(1, 39, 0, hidden=range(entry * 16, min(40, entry * 16 + 16))), 3e-6, "with zeros")


@pytest.mark.parametrize("way", ["decode", "prefill"])
def test_what_lies_before_the_window_is_not_looked_at(way: str) -> None:
    """A stray there is nobody's business: it is not read, and not told."""
    case = Case([40], 16, 1, 2, 16, torch.float32)
    torn = [2**40, *case.readers[0].table[1:]]
    tables = lay_tables([torn], [2], [100], (NULL, END), CARD.device)
    told, out = CARD.violations(), case.out(1)
    q, positions = case.newest()
    if way == "decode":
        decode_kernel.paged_decode(q, *case.caches, decode_kernel.plan_decode(tables, positions, 20), case.scale, out, told)
    else:
        plan = prefill_kernel.plan_prefill(tables, [(0, 39, 1)], 2, 16, 4, 20)
        prefill_kernel.paged_prefill(q, *case.caches, plan, case.scale, out, told)
    assert told.take() == []
    _check(out[0], case.exact(0, 39, 20), 3e-6, "within the window")


def test_a_table_that_is_too_short_is_a_stray_and_not_read_past() -> None:
    """What lies behind the last table is another tensor's memory."""
    case = Case([40], 16, 1, 1, 16, torch.float32)
    tables = lay_tables([case.readers[0].table[:2]], [2], [100], (NULL, END), CARD.device)
    told, out = CARD.violations(), case.out(1)
    q, positions = case.newest()
    decode_kernel.paged_decode(q, *case.caches, decode_kernel.plan_decode(tables, positions, 0), case.scale, out, told)
    assert told.take() == [Violation(100, -1, 0, Reason.OUTSIDE)]
    _check(out[0], case.exact(0, 39, 0, hidden=range(32, 40)), 3e-6, "with zeros")


@pytest.mark.parametrize("way", ["decode", "prefill"])
def test_a_reader_whose_table_is_too_short_is_told_of_once_a_step(way: str) -> None:
    """By the first layer that runs: the others have the same tables."""
    case = Case([40], 16, 1, 1, 16, torch.float32)
    short = Reader(5, case.readers[0].table[:2], 2)
    case.cache.guard.owners[short.table] = 5
    q, positions = case.newest()
    plans = (
        CARD.plan_decode([short], positions, [0], case.cache)
        if way == "decode"
        else CARD.plan_prefill([Piece(short, 0, 39, 1)], [0], case.cache)
    )
    for _layer in range(3):
        plans[0](q, *case.caches, case.scale, case.out(1))
    assert int(case.cache.violations.count) == 1
    assert case.cache.violations.take() == [Violation(5, -1, 0, Reason.OUTSIDE)]


def test_more_strays_than_can_be_told_write_past_nothing() -> None:
    """The buffer keeps the first, and says that there were more."""
    case = Case([70], 16, 1, 1, 16, torch.float32)
    case.cache.guard.words[case.readers[0].table] = 0
    rows = torch.full((8, 4), -7, dtype=torch.int64)
    case.cache.violations.rows = rows[3:5]
    q, positions = case.newest()
    CARD.plan_decode(case.readers, positions, [0], case.cache)[0](q, *case.caches, case.scale, case.out(1))
    told = case.cache.violations.take()
    assert told == [
        *(Violation(0, block, 0, Reason.UNREADABLE) for block in case.readers[0].table[:2]),
        Violation(ANYBODY, -1, 0, Reason.UNTOLD),
    ]
    assert rows[:3].eq(-7).all()
    assert rows[5:].eq(-7).all()


@pytest.mark.parametrize("way", ["decode", "prefill"])
def test_a_long_table_is_looked_through_to_its_end(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More entries than a program looks at together."""
    monkeypatch.setattr(decode_kernel, "SPLIT", 256)
    k_cache, v_cache = torch.zeros(2, END, 1, 1, 16)
    tables = lay_tables([[*[1] * 69, 2**40]], [70], [100], (NULL, END), CARD.device)
    told, q, out = CARD.violations(), torch.zeros(1, 1, 16), torch.empty(1, 16)
    if way == "decode":
        decode_kernel.paged_decode(q, k_cache, v_cache, decode_kernel.plan_decode(tables, [69], 0), 1.0, out, told)
    else:
        prefill_kernel.paged_prefill(q, k_cache, v_cache, prefill_kernel.plan_prefill(tables, [(0, 69, 1)], 1, 16, 4, 0), 1.0, out, told)
    assert told.take() == [Violation(100, 2**40, 0, Reason.OUTSIDE)]


@pytest.mark.parametrize("entries", [64, 2])
def test_what_its_reader_may_not_read_is_replaced_by_the_null_block(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sealed blocks are anybody's, open ones their writer's, free ones nobody's: judged by the words on the card, before any layer; by one
    program, or by several that look at two entries each."""
    monkeypatch.setattr(tables_kernel, "_ENTRIES", entries)
    case = Case([70, 20], 16, 1, 1, 16, torch.float32)
    guard, (first, second) = case.cache.guard, case.readers
    guard.words[first.table[0]] = SEALED | 2
    guard.owners[first.table[0]] = 99  # sealed: whoever wrote it does not matter
    guard.words[first.table[1]] = 0  # free
    guard.owners[first.table[3]] = 1  # open, and another's
    q, positions = case.newest()
    out = case.out(2)
    CARD.plan_decode([first, second], positions, [0], case.cache)[0](q, *case.caches, case.scale, out)
    assert case.cache.violations.take() == [
        Violation(0, first.table[1], 0, Reason.UNREADABLE),
        Violation(0, first.table[3], 0, Reason.UNREADABLE),
    ]
    case.k[0][16:32] = case.v[0][16:32] = 0.0
    _check(out[0], case.exact(0, 69, 0, hidden=range(48, 64)), 3e-6, "with zeros")
    _check(out[1], case.exact(1, 19, 0), 3e-6, "the other")
