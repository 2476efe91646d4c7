"""The race that takes a KV cache apart, as a model, and the harness that finds it; the same harness over our pool finds nothing.

Prompts that share a beginning come and go in several threads. Each holds the shared block while it reads it, again and again, and
writes blocks of its own to their very ends, and would write one number more. The model of the defect has three faults that were found
together in the field: counts are read, incremented and written back; the kernel looks at a second copy of the count, which lags behind, for
what is free; and its check of a block's end is one too far.
"""

from __future__ import annotations

import contextlib
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest
import torch

from appliance.engine.block_pool import BlockPool, PoolGeometry, Region
from appliance_kernels.kv_write.reference import Guard, Reason, Violations, plan_write

BLOCK_TOKENS = 4
BLOCKS = 6
CLIENTS = 4
ROUNDS = 60


FAULTS = ("count", "copy", "end")


class Store(Protocol):
    """Blocks of numbers that threads share."""

    memory: list[int]

    def begin(self, owner: int) -> tuple[int, int] | None:
        """Hold the shared block, and one of one's own to write; None: not now."""

    def write(self, owner: int, block: int, offset: int, value: int) -> None:
        """As a kernel does, behind its checks."""

    def end(self, owner: int, shared: int, own: int) -> None:
        """Give both back."""


class Racing:
    """The defect, or some of its faults; without any it is sound. Every step of it is a line that looks right."""

    def __init__(self, *faults: str) -> None:
        self._faults = faults
        self._lock = threading.RLock()
        self.memory = [0] * (BLOCKS * BLOCK_TOKENS + 1)
        self.counts = [0] * BLOCKS
        self.seen_by_kernel = [0] * BLOCKS
        self.counts[0] = self.seen_by_kernel[0] = 1

    def _whole(self, *unless: str) -> contextlib.AbstractContextManager[object]:
        """Nobody comes between; unless that is one of the faults."""
        return contextlib.nullcontext() if {*unless} & {*self._faults} else self._lock

    def _change(self, block: int, by: int) -> None:
        with self._whole("count"):
            count = self.counts[block]
            time.sleep(0)  # another thread, between the read and the write
            self.counts[block] = count + by
            if "copy" not in self._faults:
                self.seen_by_kernel[block] = count + by
        if "copy" in self._faults:
            time.sleep(0)
            self.seen_by_kernel[block] = count + by

    def begin(self, owner: int) -> tuple[int, int] | None:
        self._change(0, 1)
        for block in range(BLOCKS):
            with self._whole("count", "copy"):
                if self.seen_by_kernel[block] <= 0:  # also the shared one, once its count has lost an update
                    self._change(block, 1)
                    return 0, block
        self._change(0, -1)
        return None

    def write(self, owner: int, block: int, offset: int, value: int) -> None:
        if offset < BLOCK_TOKENS or (offset == BLOCK_TOKENS and "end" in self._faults):
            self.memory[block * BLOCK_TOKENS + offset] = value

    def end(self, owner: int, shared: int, own: int) -> None:
        self._change(shared, -1)
        self._change(own, -1)


class Ours:
    """BlockPool as the engine uses it: one thread changes it, the others leave notes; a write is judged as the engine's are."""

    def __init__(self) -> None:
        self.pool = BlockPool(PoolGeometry(BLOCK_TOKENS, 1, CLIENTS - 1))  # somebody waits, and the last block is written to its end
        self.memory = [0] * (self.pool.geometry.end_block * BLOCK_TOKENS)
        self.guard = Guard(self.pool.words, self.pool.owners, *self.pool.geometry.bounds(Region.DECODE))
        self.violations = Violations()
        self.pool.allocate(Region.PREFILL, 1, 0)
        self.pool.seal([0])
        self.pool.keep(0)
        self.pool.release([0])
        self._notes: queue.Queue[tuple[Callable[[], object], queue.Queue[object]] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while (note := self._notes.get()) is not None:
            work, answer = note
            answer.put(work())

    def _ask(self, work: Callable[[], object]) -> object:
        answer: queue.Queue[object] = queue.Queue()
        self._notes.put((work, answer))
        return answer.get(timeout=30)

    def begin(self, owner: int) -> tuple[int, int] | None:
        def work() -> tuple[int, int] | None:
            blocks = self.pool.allocate(Region.DECODE, 1, owner)
            if blocks is None:
                return None
            self.pool.retain([0])
            return 0, blocks[0]

        found = self._ask(work)
        assert found is None or isinstance(found, tuple)
        return found

    def write(self, owner: int, block: int, offset: int, value: int) -> None:
        def work() -> None:
            slot = torch.tensor([block * BLOCK_TOKENS + offset])
            plan = plan_write(slot, torch.tensor([owner]), BLOCK_TOKENS, self.guard, self.violations)
            for where, at in zip(plan.blocks.tolist(), plan.offsets.tolist(), strict=True):
                self.memory[where * BLOCK_TOKENS + at] = value

        self._ask(work)

    def end(self, owner: int, shared: int, own: int) -> None:
        self._ask(lambda: self.pool.release([shared, own]))

    def close(self) -> None:
        """Nothing is held any more, but what the cache keeps; every number too many was refused, and told."""
        self._notes.put(None)
        self._thread.join()
        self.pool.check_integrity([], [0])
        assert self.pool.used_blocks == 0
        assert int(self.pool.owners[-1]) > 0, "the last block was never used; the test shows less than it says"
        assert int(self.violations.count) > 0
        assert {violation.reason for violation in self.violations.take()} <= {Reason.OUTSIDE, Reason.NOT_OPEN, Reason.FOREIGN}


def stress(store: Store) -> list[str]:
    """What was read that nobody should have read."""
    shared_before = store.memory[:BLOCK_TOKENS]
    wrong: list[str] = []

    def client(number: int) -> None:
        try:
            for turn in range(ROUNDS):
                turn_of(number, turn, random.Random(number * ROUNDS + turn))
        except BaseException as error:  # noqa: BLE001  # told to the test
            wrong.append(f"client {number} failed: {error!r}")

    def turn_of(number: int, turn: int, draw: random.Random) -> None:
        found = store.begin(number)
        if found is None:
            time.sleep(0)
            return
        shared, own = found
        mine = number * 1000 + turn
        for offset in range(BLOCK_TOKENS + 1):
            store.write(number, own, offset, mine)
            if draw.random() < 0.5:
                time.sleep(0)
        if store.memory[shared * BLOCK_TOKENS : (shared + 1) * BLOCK_TOKENS] != shared_before:
            wrong.append(f"client {number} reads {store.memory[:BLOCK_TOKENS]} in the block that all share")
        if store.memory[own * BLOCK_TOKENS : (own + 1) * BLOCK_TOKENS] != [mine] * BLOCK_TOKENS:
            wrong.append(f"client {number} reads somebody else's tokens in its own block {own}")
        store.end(number, shared, own)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(1, CLIENTS + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return wrong


@pytest.fixture(autouse=True)
def eager_threads() -> Iterator[None]:
    """Threads that take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("faults", [FAULTS, *((fault,) for fault in FAULTS)], ids="+".join)
def test_the_harness_finds_the_race_and_each_of_its_faults(faults: tuple[str, ...]) -> None:
    """Somebody reads what was written over what it holds; in one of a few runs at the latest."""
    assert any(stress(Racing(*faults)) for _ in range(20))


def test_the_harness_finds_nothing_where_there_is_no_fault() -> None:
    """The model without its faults: what the harness finds is theirs."""
    for _ in range(3):
        assert stress(Racing()) == []


def test_the_same_harness_finds_nothing_in_our_pool() -> None:
    """As often, with as many threads."""
    for _ in range(3):
        store = Ours()
        assert stress(store) == []
        store.close()
