"""Writers and steps on words at the same time, from concurrent launches: the real kernels under the explorer's schedules."""

from __future__ import annotations

import torch
from torch import Tensor

from appliance_kernels.kv_write import triton as kv_write
from appliance_kernels.kv_write.reference import Guard, Reason, Violation, Violations
from appliance_kernels.refcount import triton as refcount
from appliance_kernels.refcount.reference import OPEN, REFUSED, Step
from tests.kernels import planted
from tests.kernels.interleave import Program, explore, sample

ME, OTHER, THIRD = 11, 12, 13
BLOCK = 2
BLOCK_TOKENS = 4


class Race:
    """An open block of mine; I write its first row, OTHER would write the same one, and somebody would share it."""

    def __init__(self) -> None:
        self.foreign = 0

    def make(self) -> tuple[list[Program], list[Tensor]]:
        """Fresh memory and programs."""
        self.words = torch.full((4,), OPEN, dtype=torch.int32)
        self.owners = torch.full((4,), ME)
        self.violations = Violations(capacity=8)
        self.result = torch.full((1,), -99, dtype=torch.int32)
        self.k_cache, self.v_cache = (torch.full((4, 1, BLOCK_TOKENS, 8), float("nan")) for _ in range(2))
        block = torch.tensor([BLOCK])
        programs: list[Program] = [
            self.write(ME, 1.0),
            self.write(OTHER, 2.0),
            lambda: refcount.take_step(self.words, block, Step.RETAIN, self.result),
        ]
        return programs, [self.words, self.owners, self.k_cache, self.v_cache]

    def write(self, writer: int, value: float) -> Program:
        """One token's keys and values, all of them `value`."""
        row, guard = torch.full((1, 1, 8), value), Guard(self.words, self.owners, 1, 4)
        slots, writers = torch.tensor([BLOCK * BLOCK_TOKENS]), torch.tensor([writer])
        return lambda: kv_write.kv_write(row, row, self.k_cache, self.v_cache, slots, writers, guard, self.violations)

    def check(self) -> None:
        """After each schedule: mine arrived, the other's did not and was told of, nobody shares the block, nothing else changed."""
        for cache in (self.k_cache, self.v_cache):
            assert cache[BLOCK, 0, 0].eq(1.0).all()
            assert int(cache.isnan().sum()) == cache.numel() - 8
        assert self.violations.take() == [Violation(OTHER, BLOCK, 0, Reason.FOREIGN)]
        assert int(self.result) == REFUSED
        assert self.words.tolist() == [OPEN] * 4


def test_under_every_schedule_a_foreign_writer_is_refused_and_the_holder_is_not() -> None:
    """All interleavings of the two writers with a step on the block's word."""
    race = Race()
    assert explore(race.make, race.check) == 105


def test_drawn_schedules_of_three_strays_tell_of_each_once() -> None:
    """Violations are appended by several launches at the same time: none is lost, and no row is half one and half another."""
    memory: list[Violations] = []

    def make() -> tuple[list[Program], list[Tensor]]:
        race = Race()
        race.make()
        memory[:] = [race.violations]
        return [race.write(owner, 2.0) for owner in (OTHER, THIRD, THIRD + 1)], [race.violations.count, race.violations.rows]

    def check() -> None:
        told = memory[0].take()
        assert sorted(violation.owner for violation in told) == [OTHER, THIRD, THIRD + 1]
        assert {(violation.block, violation.offset, violation.reason) for violation in told} == {(BLOCK, 0, Reason.FOREIGN)}

    sample(make, check, 40, seed=3)


def test_the_explorer_finds_the_write_that_a_count_alone_lets_through() -> None:
    """Planted: whoever holds the block, the count says that it is held, and in some schedules mine is what is overwritten."""
    memory: list[Tensor] = []
    overwritten = 0

    def make() -> tuple[list[Program], list[Tensor]]:
        memory[:] = [torch.ones(4, dtype=torch.int32), torch.zeros(4)]
        counts, cache = memory
        return [lambda value=value: planted.write_by_count[(1,)](counts, BLOCK, cache, value) for value in (1.0, 2.0)], [counts, cache]  # type: ignore[misc]

    def check() -> None:
        nonlocal overwritten
        overwritten += float(memory[1][BLOCK]) == 2.0

    assert explore(make, check) == 6
    assert overwritten == 3


def test_the_explorer_finds_the_violation_that_load_and_store_lose() -> None:
    """Planted: two append at the same place."""
    memory: list[Tensor] = []
    lost = 0

    def make() -> tuple[list[Program], list[Tensor]]:
        memory[:] = [torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int64)]
        count, rows = memory
        return [lambda owner=owner: planted.tell_by_load_and_store[(1,)](count, rows, owner) for owner in (ME, OTHER)], [count, rows]  # type: ignore[misc]

    def check() -> None:
        nonlocal lost
        lost += sorted(memory[1][:2].tolist()) != [ME, OTHER] or int(memory[0]) != 2

    schedules = explore(make, check)
    assert 0 < lost < schedules
