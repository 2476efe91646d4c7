"""Block words from two processes, and what their steps cost: `python tests/bench/block_words.py [--retains N]`. Exit code 1: a defect.

First two processes retain the same block in shared memory, three ways (tests/kernels/two_processes.py). Then the words' part of a decode
step of 8 sequences, three ways: counts under a lock, plain adds on a tensor, and the engine's steps. It is what this machine shows: on a
CPU one thread changes the words, and nobody waits for it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # two_processes chooses Triton's interpreter for all

from appliance_kernels.refcount import reference
from appliance_kernels.refcount.reference import Step
from tests.kernels.two_processes import LOSES, until_lost

SEQUENCES, BLOCKS, BLOCK_TOKENS = 8, 4096, 16


def from_two_processes(retains: int) -> bool:
    """Whether each way did what it is to do."""
    good = True
    for way, loses in LOSES.items():
        total, rounds, found = until_lost(way, retains)
        good &= (found > 0) == loses
        verdict = "" if (found > 0) == loses else "   WRONG" if found else "   not seen to lose: nothing is shown"
        print(f"  {way:26} {total:7} retains in {rounds} rounds, {found} lost{verdict}", flush=True)
    return good


Claim = Callable[[int], list[int]]
Release = Callable[[list[int]], None]


def under_a_lock() -> tuple[Claim, Release]:
    """Counts and a free list of Python's, changed under a lock."""
    lock, counts, free = threading.Lock(), [0] * BLOCKS, list(range(BLOCKS))

    def claim(count: int) -> list[int]:
        with lock:
            blocks = [free.pop() for _ in range(count)]
            for block in blocks:
                counts[block] += 1
        return blocks

    def release(blocks: list[int]) -> None:
        with lock:
            for block in blocks:
                counts[block] -= 1
                if not counts[block]:
                    free.append(block)

    return claim, release


def by_plain_adds() -> tuple[Claim, Release]:
    """Counts in a tensor, an add for each list of blocks; the free list beside them is a second truth."""
    counts, free = torch.zeros(BLOCKS, dtype=torch.int32), list(range(BLOCKS))

    def claim(count: int) -> list[int]:
        blocks = [free.pop() for _ in range(count)]
        counts.index_add_(0, torch.tensor(blocks), torch.ones(count, dtype=torch.int32))
        return blocks

    def release(blocks: list[int]) -> None:
        counts.index_add_(0, torch.tensor(blocks), torch.full((len(blocks),), -1, dtype=torch.int32))
        free.extend(block for block in blocks if not counts[block])

    return claim, release


def by_words() -> tuple[Claim, Release]:
    """What the engine does on a CPU: look for free words, take a step on each."""
    words = torch.zeros(BLOCKS, dtype=torch.int32)

    def claim(count: int) -> list[int]:
        blocks: list[int] = reference.free_blocks(words, 0, BLOCKS, count).tolist()
        assert all(result == reference.OPEN for result in reference.take_step(words, blocks, Step.CLAIM))
        return blocks

    def release(blocks: list[int]) -> None:
        assert all(result == reference.FREE for result in reference.take_step(words, blocks, Step.RELEASE))

    return claim, release


def cost(steps: int = 4000) -> None:
    """A sequence takes a block every 16 steps, and gives 16 back at once."""
    print(f"what {SEQUENCES} sequences change of their blocks, a block every {BLOCK_TOKENS} tokens, over {steps} decode steps:")
    for name, make in (("counts under a lock", under_a_lock), ("plain adds", by_plain_adds), ("words", by_words)):
        claim, release = make()
        held: list[list[int]] = [[] for _ in range(SEQUENCES)]
        claims, releases = [], []
        for number in range(steps):
            sequence, turn = number // 2 % SEQUENCES, number % 2
            if turn:
                continue
            started_ns = time.perf_counter_ns()
            held[sequence] += claim(1)
            claims.append(time.perf_counter_ns() - started_ns)
            if len(held[sequence]) == 16:
                started_ns = time.perf_counter_ns()
                release(held[sequence])
                releases.append(time.perf_counter_ns() - started_ns)
                held[sequence] = []
        claim_us, release_us = statistics.median(claims) / 1e3, statistics.median(releases) / 1e3
        average_us = (len(claims) * claim_us + len(releases) * release_us) / steps
        print(f"  {name:20} a claim {claim_us:6.1f} us, a release of 16 {release_us:6.1f} us, on average {average_us:5.1f} us a step")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--retains", type=int, default=400, help="of each process (default: 400)")
    arguments = parser.parse_args()
    print("two processes on one word:")
    good = from_two_processes(arguments.retains)
    cost()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
