"""One word in shared memory and two processes that retain its block, really at the same time: `two_processes.py WAY FILE RETAINS`, twice.

By load and store (planted), by the CPU path's own step, which is for one writer, and by the Triton kernel, whose atomics in the
interpreter are the processor's. The first two have to be seen losing some, or nothing is shown by the third.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # behind the choice of the interpreter

from appliance_kernels.refcount import reference
from appliance_kernels.refcount import triton as kernel
from appliance_kernels.refcount.reference import HOLDERS, SEALED, Step
from tests.kernels import planted

PLANTED, ONE_WRITER, KERNEL = "load and store (planted)", "the CPU path's step", "the Triton kernel"
LOSES = {PLANTED: True, ONE_WRITER: True, KERNEL: False}
ENOUGH = {PLANTED: 1, ONE_WRITER: 50, KERNEL: 1}
"""How many times the retains: the CPU path's step is some microseconds, and two processes have to meet in it."""
ROUNDS = 20
"""In which a way that loses has to be seen losing: on a busy machine two processes may not meet."""
ROUNDS_OF_OURS = 3
CHILD_S = 120.0


def child(way: str, file: str, retains: int) -> None:
    """One of two: say that it is there, wait for the other, retain."""
    shared = torch.from_file(file, shared=True, size=2, dtype=torch.int32)
    word, there = shared[:1], shared[1:]
    result, block, one = torch.zeros(1, dtype=torch.int32), torch.tensor([0]), torch.ones(1, dtype=torch.int32)
    kernel.take_step(one, block, Step.RETAIN, result)  # what a first call sets up is set up
    planted.release_by_add[(1,)](there, 0, result)
    while int(there) > 0:
        os.sched_yield()
    for _ in range(retains):
        if way == PLANTED:
            planted.retain_by_load_and_store[(1,)](word, 0, result)
        elif way == ONE_WRITER:
            reference.take_step(word, [0], Step.RETAIN)
        else:
            kernel.take_step(word, block, Step.RETAIN, result)


def lost(way: str, retains: int) -> int:
    """Of 2 · `retains`, in one round.

    Raises:
        RuntimeError: a process failed; what it said is on stderr.
        TimeoutExpired: one did not end.
    """
    with tempfile.NamedTemporaryFile() as file:
        torch.from_file(file.name, shared=True, size=2, dtype=torch.int32).copy_(torch.tensor([SEALED | 1, 2], dtype=torch.int32))
        children = [subprocess.Popen([sys.executable, __file__, way, file.name, str(retains)]) for _ in range(2)]
        try:
            codes = [one.wait(CHILD_S) for one in children]
        finally:
            for one in children:
                one.kill()
        if codes != [0, 0]:
            raise RuntimeError(f"{way}: a process ended with {codes}")
        held = int(torch.from_file(file.name, shared=True, size=2, dtype=torch.int32)[0]) & HOLDERS
    return 1 + 2 * retains - held


def until_lost(way: str, retains: int) -> tuple[int, int, int]:
    """Rounds until one loses: how many retains there were, in how many rounds, and how many were lost."""
    count, rounds, found = retains * ENOUGH[way], 0, 0
    while rounds < (ROUNDS if LOSES[way] else ROUNDS_OF_OURS) and not found:
        found, rounds = lost(way, count), rounds + 1
    return 2 * count * rounds, rounds, found


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], int(sys.argv[3]))
