"""Block words from two processes, and what their steps cost: `python tests/bench/block_words.py [--retains N]`. Exit code 1: a defect.

First two processes retain the same block in shared memory, really at the same time: by load and store (planted), by the CPU path's own
step, which is for one writer, and by the Triton kernel, whose atomics in the interpreter are the processor's. The first two have to lose
some, or nothing was shown. Then the words' part of a decode step of 8 sequences, three ways: counts under a lock, plain adds on
a tensor, and the engine's steps. It is what this machine shows: on a CPU one thread changes the words, and nobody waits for it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  # behind the choice of the interpreter

from appliance_kernels.refcount import reference  # noqa: E402
from appliance_kernels.refcount import triton as kernel  # noqa: E402
from appliance_kernels.refcount.reference import HOLDERS, SEALED, Step  # noqa: E402
from tests.kernels import planted  # noqa: E402

WAYS = ("load and store (planted)", "the CPU path's step", "the Triton kernel")
LOSES = {WAYS[0]: True, WAYS[1]: True, WAYS[2]: False}
ROUNDS = 20
"""In which a way that loses has to be seen losing: on a busy machine two processes may not meet."""
SEQUENCES, BLOCKS, BLOCK_TOKENS = 8, 4096, 16


def child(way: str, file: str, retains: int) -> None:
    """One of two: say that it is there, wait for the other, retain."""
    shared = torch.from_file(file, shared=True, size=2, dtype=torch.int32)
    word, there = shared[:1], shared[1:]
    result, block, one = torch.zeros(1, dtype=torch.int32), torch.tensor([0]), torch.ones(1, dtype=torch.int32)
    kernel.take_step(one, block, Step.RETAIN, result)  # what a first call sets up is set up
    planted.release_by_add[(1,)](there, 0, result)
    while int(there) > 0:
        time.sleep(0.0005)
    for _ in range(retains):
        if way == WAYS[0]:
            planted.retain_by_load_and_store[(1,)](word, 0, result)
        elif way == WAYS[1]:
            reference.take_step(word, [0], Step.RETAIN)
        else:
            kernel.take_step(word, block, Step.RETAIN, result)


def lost(way: str, retains: int) -> int:
    """Of 2 · `retains`."""
    with tempfile.NamedTemporaryFile() as file:
        torch.from_file(file.name, shared=True, size=2, dtype=torch.int32).copy_(torch.tensor([SEALED | 1, 2], dtype=torch.int32))
        command = [sys.executable, __file__, "--child", way, file.name, "--retains", str(retains)]
        children = [subprocess.Popen(command) for _ in range(2)]
        if [one.wait() for one in children] != [0, 0]:
            sys.exit("a process failed")
        held = int(torch.from_file(file.name, shared=True, size=2, dtype=torch.int32)[0]) & HOLDERS
    return 1 + 2 * retains - held


def from_two_processes(retains: int) -> bool:
    """Whether each way did what it is to do."""
    good = True
    for way in WAYS:
        # The CPU path's step is some microseconds; so that two meet, there have to be more of them.
        count = retains * (50 if way == WAYS[1] else 1)
        rounds, found = 0, 0
        while rounds < (ROUNDS if LOSES[way] else 3) and not found:
            found, rounds = lost(way, count), rounds + 1
        right = (found > 0) == LOSES[way]
        good &= right
        verdict = "" if right else "   WRONG" if found else "   not seen to lose: nothing is shown"
        print(f"  {way:26} {2 * count * rounds:7} retains in {rounds} rounds, {found} lost{verdict}", flush=True)
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
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(*arguments.child, arguments.retains)
        return
    print("two processes on one word:")
    good = from_two_processes(arguments.retains)
    cost()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
