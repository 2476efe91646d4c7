"""Block words: the table, the CPU's steps, and the real Triton kernel under every interleaving."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from appliance_kernels.refcount import triton as kernel
from appliance_kernels.refcount.reference import (
    FREE,
    HOLDERS,
    KEPT,
    NO_BLOCK,
    OPEN,
    REFUSED,
    SEALED,
    Step,
    count_held,
    free_blocks,
    next_word,
    take_step,
)
from tests.kernels import planted
from tests.kernels.interleave import Program, explore, sample

WORDS = (FREE, OPEN, SEALED | 1, SEALED | 2, SEALED | KEPT, SEALED | KEPT | 1)
"""One of every kind that the table can lead to."""


def test_no_step_leads_out_of_the_kinds_of_words() -> None:
    """Free, open with one holder, sealed with holders, kept: from each, every step stays among them or is refused."""
    for word, step in itertools.product((*WORDS, SEALED | 7, SEALED | KEPT | 7), Step):
        after = next_word(word, step)
        holders, sealed, kept = after & HOLDERS, after & SEALED, after & KEPT
        assert after in (FREE, OPEN) or (sealed and (holders or kept)), f"{step.name} leads from {word:#x} to {after:#x}"


def test_a_free_block_is_only_claimed_and_an_open_one_never_shared() -> None:
    """What the table is for."""
    assert [step for step in Step if next_word(FREE, step) != FREE] == [Step.CLAIM]
    assert [step for step in Step if next_word(OPEN, step) != OPEN] == [Step.SEAL, Step.RELEASE]
    assert next_word(SEALED | 1, Step.RELEASE) == FREE
    assert next_word(SEALED | KEPT | 1, Step.RELEASE) == SEALED | KEPT
    assert next_word(SEALED | HOLDERS, Step.RETAIN) == SEALED | HOLDERS  # full: one more would read as kept


def test_what_is_kept_is_neither_free_nor_held() -> None:
    """Who looks for room does not find it, and nobody is counted for it."""
    words = torch.tensor([FREE, SEALED | KEPT, OPEN, SEALED | 1, FREE, SEALED | KEPT | 2, FREE], dtype=torch.int32)
    assert free_blocks(words, 0, 7, 9).tolist() == [0, 4, 6]
    assert free_blocks(words, 1, 6, 9).tolist() == [4]
    assert free_blocks(words, 0, 7, 2).tolist() == [0, 4]
    assert count_held(words) == 3


@given(st.lists(st.tuples(st.integers(-2, 9), st.sampled_from(Step)), max_size=60))
@settings(max_examples=300, deadline=None)
def test_steps_in_any_order_keep_the_books(steps: list[tuple[int, Step]]) -> None:
    """Against counting by hand: holders never below zero, no block both open and shared, numbers that are no block refused."""
    words = torch.zeros(8, dtype=torch.int32)
    holders, kept = [0] * 8, [False] * 8
    for block, step in steps:
        (result,) = take_step(words, [block], step)
        if not 0 <= block < 8:
            assert result == NO_BLOCK
            continue
        if result != REFUSED:
            assert result == int(words[block])
            holders[block] += {Step.CLAIM: 1, Step.RETAIN: 1, Step.RELEASE: -1}.get(step, 0)
            kept[block] = {Step.KEEP: True, Step.EVICT: False}.get(step, kept[block])
        for index in range(8):
            word = int(words[index])
            assert word & HOLDERS == holders[index] >= 0
            assert bool(word & KEPT) == kept[index]
            assert word & SEALED or holders[index] <= 1
            assert (word == FREE) == (not holders[index] and not kept[index])
    assert count_held(words) == sum(count > 0 for count in holders)
    assert free_blocks(words, 2, 8, 3).tolist() == [index for index in range(2, 8) if int(words[index]) == FREE][:3]


@pytest.mark.parametrize("step", Step)
def test_the_kernel_takes_the_steps_of_the_table(step: Step) -> None:
    """Every kind of word, numbers that are no block, the ends of the tensor; nothing beside it is touched."""
    guarded = torch.full((len(WORDS) + 8,), 77, dtype=torch.int32)
    words = guarded[4:-4]
    words.copy_(torch.tensor(WORDS))
    expected = words.clone()
    blocks = [*range(len(WORDS)), -1, len(WORDS), 2**40, -(2**40), *(2**32 + block for block in range(len(WORDS)))]
    wanted = take_step(expected, blocks, step)
    results = torch.full((len(blocks),), -99, dtype=torch.int32)
    kernel.take_step(words, torch.tensor(blocks), step, results)
    assert results.tolist() == wanted
    assert words.tolist() == expected.tolist()
    assert guarded[:4].eq(77).all()
    assert guarded[-4:].eq(77).all()


def test_the_same_block_several_times_in_one_launch() -> None:
    """Each counts."""
    words = torch.tensor([SEALED | 1, OPEN], dtype=torch.int32)
    results = torch.empty(5, dtype=torch.int32)
    kernel.take_step(words, torch.tensor([0, 0, 1, 0, 0]), Step.RETAIN, results)
    assert words.tolist() == [SEALED | 5, OPEN]
    assert results.tolist() == [SEALED | 2, SEALED | 3, REFUSED, SEALED | 4, SEALED | 5]


class Racing:
    """Programs that each take one step on block 1 of three, from a word; what came of it must be what some order gives."""

    def __init__(self, word: int, steps: Sequence[Step]) -> None:
        self.word, self.steps = word, steps
        self.words: Tensor = torch.empty(0)
        self.results: list[Tensor] = []
        self.allowed = {self._in_order(order) for order in itertools.permutations(range(len(steps)))}

    def _in_order(self, order: Sequence[int]) -> tuple[int, ...]:
        words = torch.tensor([self.word], dtype=torch.int32)
        results = {index: take_step(words, [0], self.steps[index])[0] for index in order}
        return int(words[0]), *(results[index] for index in range(len(self.steps)))

    def make(self) -> tuple[list[Program], list[Tensor]]:
        """Fresh memory and programs."""
        self.words = torch.tensor([77, self.word, 77], dtype=torch.int32)
        self.results = [torch.full((1,), -99, dtype=torch.int32) for _ in self.steps]
        block = torch.tensor([1])

        def program(step: Step, result: Tensor) -> Program:
            return lambda: kernel.take_step(self.words, block, step, result)

        return [program(step, result) for step, result in zip(self.steps, self.results, strict=True)], [self.words]

    def check(self) -> None:
        """After each schedule."""
        found = int(self.words[1]), *(int(result) for result in self.results)
        assert found in self.allowed, f"{[step.name for step in self.steps]} from {self.word:#x}: {found}, allowed {self.allowed}"
        assert self.words[0] == self.words[2] == 77


@pytest.mark.parametrize("word", WORDS, ids=hex)
def test_every_interleaving_of_two_steps_equals_an_order_of_whole_steps(word: int) -> None:
    """All pairs of operations, all schedules: no update is lost, nothing is done twice, nobody holds what was freed."""
    schedules = 0
    for pair in itertools.combinations_with_replacement(Step, 2):
        racing = Racing(word, pair)
        schedules += explore(racing.make, racing.check)
    assert schedules > 2 * 21


@pytest.mark.parametrize(
    ("word", "steps"),
    [
        (SEALED | 1, (Step.RELEASE, Step.RETAIN, Step.RETAIN)),
        (SEALED | 2, (Step.RELEASE, Step.RELEASE, Step.RETAIN)),
        (SEALED | KEPT, (Step.EVICT, Step.RETAIN, Step.CLAIM)),
        (SEALED | KEPT | 1, (Step.RELEASE, Step.EVICT, Step.RETAIN)),
        (OPEN, (Step.SEAL, Step.RETAIN, Step.RELEASE)),
    ],
)
def test_every_interleaving_of_three_steps_equals_an_order_of_whole_steps(word: int, steps: tuple[Step, ...]) -> None:
    """The mixtures that a cache, its readers and its evictor make: all schedules."""
    racing = Racing(word, steps)
    assert explore(racing.make, racing.check) > 6


def test_drawn_interleavings_of_five_steps_equal_an_order_of_whole_steps() -> None:
    """More programs than can be gone through."""
    racing = Racing(SEALED | KEPT | 2, (Step.RELEASE, Step.RELEASE, Step.EVICT, Step.RETAIN, Step.RETAIN))
    sample(racing.make, racing.check, 150, seed=5)


def test_the_explorer_finds_the_update_that_load_and_store_lose() -> None:
    """The article's defect, planted: two retains of a block that one holds, and the count says two, not three."""
    memory: list[Tensor] = []
    lost = 0

    def make() -> tuple[list[Program], list[Tensor]]:
        memory[:] = [torch.tensor([1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)]
        counts, *took = memory
        return [lambda mine=mine: planted.retain_by_load_and_store[(1,)](counts, 0, mine) for mine in took], [counts]  # type: ignore[misc]

    def check() -> None:
        nonlocal lost
        lost += int(memory[0]) != 3

    assert explore(make, check) == 6
    assert lost == 4


def test_the_explorer_finds_the_freed_block_that_add_and_undo_hand_out() -> None:
    """A release against two retains with plain adds: in some order a retainer holds what was freed. Ours: in none (above)."""
    memory: list[Tensor] = []
    wrong = 0

    def make() -> tuple[list[Program], list[Tensor]]:
        memory[:] = [torch.tensor([1], dtype=torch.int32), *(torch.zeros(1, dtype=torch.int32) for _ in range(3))]
        counts, freed, one, other = memory
        retains = [lambda mine=mine: planted.retain_by_add_and_undo[(1,)](counts, 0, mine) for mine in (one, other)]  # type: ignore[misc]
        return [lambda: planted.release_by_add[(1,)](counts, 0, freed), *retains], [counts]

    def check() -> None:
        nonlocal wrong
        _, freed, one, other = memory
        wrong += bool(freed) and bool(one or other)

    schedules = explore(make, check)
    assert 0 < wrong < schedules
