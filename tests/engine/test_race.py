"""The race that takes a KV cache apart, as a model, and the harness that finds it; the same harness over our pool finds nothing.

Prompts that share a beginning come and go in several threads. Each holds the shared block while it reads it, again and again, and
writes blocks of its own to their very ends. The model of the defect has three faults that were found together in the field:
counts are read, incremented and written back; the kernel looks at a second copy of the count that lags behind; and what it
then believes to be free is written.
"""

from __future__ import annotations

import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from appliance.engine.block_pool import BlockPool, PoolGeometry, Region

BLOCK_TOKENS = 4
BLOCKS = 6
CLIENTS = 4
ROUNDS = 60


class Store(Protocol):
    """Blocks of numbers that threads share."""

    memory: list[int]

    def begin(self, owner: int) -> tuple[int, int] | None:
        """Hold the shared block, and one of one's own to write; None: not now."""

    def end(self, owner: int, shared: int, own: int) -> None:
        """Give both back."""


class Racing:
    """The defect. Every step of it is a line that looks right."""

    def __init__(self) -> None:
        self.memory = [0] * (BLOCKS * BLOCK_TOKENS)
        self.counts = [0] * BLOCKS
        self.seen_by_kernel = [0] * BLOCKS
        self.counts[0] = self.seen_by_kernel[0] = 1

    def _change(self, block: int, by: int) -> None:
        count = self.counts[block]
        time.sleep(0)  # another thread, between the read and the write
        self.counts[block] = count + by
        self.seen_by_kernel[block] = count + by

    def begin(self, owner: int) -> tuple[int, int] | None:
        self._change(0, 1)
        for block in range(BLOCKS):
            if self.seen_by_kernel[block] <= 0:  # also the shared one, once its count has lost an update
                self._change(block, 1)
                return 0, block
        self._change(0, -1)
        return None

    def end(self, owner: int, shared: int, own: int) -> None:
        self._change(shared, -1)
        self._change(own, -1)


class Ours:
    """BlockPool as the engine uses it: one thread changes it, the others leave notes."""

    def __init__(self) -> None:
        self.memory = [0] * (BLOCKS * BLOCK_TOKENS)
        self.pool = BlockPool(PoolGeometry(BLOCK_TOKENS, 1, BLOCKS - 1))
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

    def end(self, owner: int, shared: int, own: int) -> None:
        self._ask(lambda: self.pool.release([shared, own]))

    def close(self) -> None:
        """Nothing is held any more, but what the cache keeps."""
        self._notes.put(None)
        self._thread.join()
        self.pool.check_integrity([], [0])
        assert self.pool.used_blocks == 0


def stress(store: Store) -> list[str]:
    """What was read that nobody should have read."""
    shared_before = store.memory[:BLOCK_TOKENS]
    wrong: list[str] = []

    def client(number: int) -> None:
        draw = random.Random(number)
        for turn in range(ROUNDS):
            found = store.begin(number)
            if found is None:
                time.sleep(0)
                continue
            shared, own = found
            mine = number * 1000 + turn
            for offset in range(BLOCK_TOKENS):
                store.memory[own * BLOCK_TOKENS + offset] = mine
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


def test_the_harness_finds_the_race_of_read_increment_and_write_back() -> None:
    """Somebody reads what was written over what it holds; in one of a few runs at the latest."""
    assert any(stress(Racing()) for _ in range(20))


def test_the_same_harness_finds_nothing_in_our_pool() -> None:
    """As often, with as many threads."""
    for _ in range(3):
        store = Ours()
        assert stress(store) == []
        store.close()
