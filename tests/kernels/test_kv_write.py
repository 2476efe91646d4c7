"""Writing keys and values: the reference and the Triton kernel do the same, and neither writes where it has no business."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from appliance_kernels.kv_write import triton as kernel
from appliance_kernels.kv_write.reference import (
    ANYBODY,
    Guard,
    Reason,
    Violation,
    Violations,
    checked_tables,
    kv_write,
    plan_blocks,
    plan_write,
)
from appliance_kernels.refcount.reference import FREE, KEPT, OPEN, SEALED

BLOCKS = 7
FIRST, END = 2, 6
ME, OTHER = 11, 12
WORDS = [OPEN, OPEN, OPEN, OPEN, SEALED | 1, FREE, OPEN]
OWNERS = [ME, ME, ME, OTHER, ME, ME, ME]


class Case:
    """A cache full of NaN between guard blocks, and some rows."""

    def __init__(self, tokens: int, heads: int, block_tokens: int, dim: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.block_tokens = block_tokens
        # Rows of a turned and of a fused projection: not contiguous, and not as far apart, as the engine's are.
        turned, fused = (torch.randn(tokens, wide * heads, dim, generator=generator) for wide in (2, 3))
        self.k, self.v = turned[:, heads:], fused[:, 2 * heads :]
        self.memory = torch.full((2, BLOCKS + 2, heads, block_tokens, dim), float("nan"))
        self.guard = Guard(torch.tensor(WORDS, dtype=torch.int32), torch.tensor(OWNERS), FIRST, END)
        self.violations = Violations(capacity=16)

    @property
    def caches(self) -> tuple[Tensor, Tensor]:
        """Without their guard blocks."""
        return self.memory[0, 1:-1], self.memory[1, 1:-1]

    def reference(self, slots: Sequence[int]) -> list[Violation]:
        where = torch.tensor(slots)
        plan = plan_write(where, torch.full_like(where, ME), self.block_tokens, self.guard, self.violations)
        kv_write(self.k, self.v, *self.caches, plan)
        return self.violations.take()

    def triton(self, slots: Sequence[int]) -> list[Violation]:
        where = torch.tensor(slots)
        kernel.kv_write(self.k, self.v, *self.caches, where, torch.full_like(where, ME), self.guard, self.violations)
        return self.violations.take()


SHAPES = [
    pytest.param(3, 16, 64, id="smollm2"),
    pytest.param(1, 16, 256, id="gemma3"),
    pytest.param(5, 7, 24, id="odd"),
    pytest.param(1, 1, 16, id="ones"),
]


@pytest.mark.parametrize(("heads", "block_tokens", "dim"), SHAPES)
@pytest.mark.parametrize("way", ["reference", "triton"])
def test_only_open_blocks_of_the_writer_in_its_region_are_written(way: str, heads: int, block_tokens: int, dim: int) -> None:
    """Each way to stray is told with its reason and leaves the cache as it was; the good rows arrive, bit for bit."""
    last = block_tokens - 1
    wanted = [
        (2, 0, None),
        (3, last, Reason.FOREIGN),
        (4, 0, Reason.NOT_OPEN),
        (5, last, Reason.NOT_OPEN),
        (6, 0, Reason.OUTSIDE),
        (1, last, Reason.OUTSIDE),
        (-1, last, Reason.OUTSIDE),
        (BLOCKS + 1000, 0, Reason.OUTSIDE),
        (-(2**33), 0, Reason.OUTSIDE),
        (2**33, 0, Reason.OUTSIDE),
        (2**32 + 2, 0, Reason.OUTSIDE),  # its lower half is a good one
    ]
    if block_tokens > 1:
        wanted.append((2, last, None))
    case = Case(len(wanted), heads, block_tokens, dim)
    told = getattr(case, way)([block * block_tokens + offset for block, offset, _ in wanted])
    assert told == [Violation(ME, block, offset, reason) for block, offset, reason in wanted if reason is not None]
    expected = torch.full_like(case.memory, float("nan"))
    for token, (block, offset, reason) in enumerate(wanted):
        if reason is None:
            expected[0, 1 + block, :, offset] = case.k[token]
            expected[1, 1 + block, :, offset] = case.v[token]
    assert torch.equal(case.memory.nan_to_num(99.0), expected.nan_to_num(99.0))


@pytest.mark.parametrize("way", ["reference", "triton"])
def test_a_slot_below_0_is_outside_though_the_region_begins_at_0(way: str) -> None:
    """A division that rounds towards 0 would make it the first block's, and an offset in front of it."""
    case = Case(3, 2, 7, 24)
    case.guard = Guard(case.guard.words, case.guard.owners, 0, END)
    assert getattr(case, way)([-1, -6, 0]) == [Violation(ME, -1, offset, Reason.OUTSIDE) for offset in (6, 1)]
    assert torch.equal(case.memory[0, 1, :, 0], case.k[2])
    assert int(case.memory.isfinite().sum()) == 2 * case.k[2].numel()


@pytest.mark.parametrize("way", ["reference", "triton"])
def test_more_violations_than_fit_are_counted_and_write_past_nothing(way: str) -> None:
    """The buffer keeps the first, and says that there were more; the next step starts with an empty one."""
    case = Case(5, 1, 4, 16)
    rows = torch.full((5, 4), -7, dtype=torch.int64)
    case.violations.rows = rows[1:3]
    told = getattr(case, way)([0, 1, 2, 3, 4])
    assert told == [*(Violation(ME, 0, offset, Reason.OUTSIDE) for offset in (0, 1)), Violation(ANYBODY, -1, 0, Reason.UNTOLD)]
    assert rows[0].eq(-7).all()
    assert rows[3:].eq(-7).all()
    assert case.violations.take() == []
    fits = Case(2, 1, 4, 16)
    fits.violations.rows = rows[1:3]
    assert len(getattr(fits, way)([0, 1])) == 2, "as many as fit are all told"


@pytest.mark.parametrize("way", ["reference", "triton"])
def test_refusals_of_several_chunks_are_told_one_after_the_other(way: str) -> None:
    """As far as there is room."""
    case = Case(3, 1, 4, 16)
    case.violations.rows = case.violations.rows[:4]
    take, case.violations.take = case.violations.take, list  # type: ignore[method-assign]
    for slots in ([0, 1, 2], [24, 25, 26]):
        getattr(case, way)(slots)
    told = [(violation.block, violation.offset) for violation in take()]
    assert told == [(0, 0), (0, 1), (0, 2), (6, 0), (-1, 0)]


def test_a_step_without_tokens_launches_nothing() -> None:
    """An empty grid is an error in Triton."""
    case = Case(0, 1, 4, 16)
    assert case.triton([]) == []


def test_whole_blocks_are_judged_alike() -> None:
    """Before they are zeroed or copied into."""
    case = Case(1, 1, 4, 16)
    good = plan_blocks([2, 3, 5, 2, 0, 99], [ME] * 6, case.guard, case.violations)
    assert good.tolist() == [0, 3]
    assert [(v.block, v.reason) for v in case.violations.take()] == [
        (3, Reason.FOREIGN),
        (5, Reason.NOT_OPEN),
        (0, Reason.OUTSIDE),
        (99, Reason.OUTSIDE),
    ]


def test_a_table_with_a_block_that_its_reader_may_not_read_gets_the_null_block() -> None:
    """Sealed blocks are anybody's to read, open ones their owner's, free and kept ones nobody's."""
    case = Case(1, 1, 4, 16)
    case.guard.words[6] = SEALED | KEPT
    sound = [[4, 2, 0], [3, 4]]
    assert checked_tables(sound, [ME, OTHER], case.guard, BLOCKS, case.violations) is sound
    assert case.violations.take() == []
    torn = [[4, 3, 2], [5, 3], [2**32 + 2, -1, 6]]
    assert checked_tables(torn, [ME, OTHER, ME], case.guard, BLOCKS, case.violations) == [[4, 7, 2], [7, 3], [7, 7, 7]]
    assert [(v.owner, v.block) for v in case.violations.take()] == [(ME, 3), (OTHER, 5), (ME, 2**32 + 2), (ME, -1), (ME, 6)]
