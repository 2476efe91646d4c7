"""Every order in which programs can touch shared memory: a small model checker over the real kernels in Triton's interpreter.

A program is a function that launches a kernel of one program instance. Each runs in a thread of its own, but only one moves at
a time, from one access of the shared tensors to the next (loads, stores and atomics of anything else do not matter to others).
Who moves next is a choice; `explore` goes through all sequences of choices, `sample` draws some.

The memory is sequentially consistent here, as on x86. What a card's weaker memory adds is not seen.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter

Program = Callable[[], None]
_ACCESSES = {"create_masked_load": 0, "create_masked_store": 0, "create_atomic_cas": 0, "create_atomic_rmw": 1}
"""The interpreter's accesses of memory, and which of their arguments is the pointer."""


class _Runner(threading.Thread):
    """One program, which waits for its turn before every access of shared memory."""

    def __init__(self, program: Program) -> None:
        super().__init__(daemon=True)
        self._program = program
        self._turn = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.ended = False

    def move(self) -> None:
        """One access, and everything up to the next one."""
        self._turn.release()
        self._stopped.acquire()

    def pause(self) -> None:
        """In the program's thread: let others go."""
        self._stopped.release()
        self._turn.acquire()

    def run(self) -> None:
        """The thread."""
        self._turn.acquire()
        try:
            self._program()
        except BaseException as error:  # noqa: BLE001  # told to the test
            self.error = error
        self.ended = True
        self._stopped.release()


def _language() -> Any:
    return tl  # what the interpreter looks for in a kernel's module


class _Unpatched:
    def restore(self) -> None:
        """Launches end in another order than they began: none of them may put the language back."""


@contextlib.contextmanager
def _watched(shared: Sequence[torch.Tensor]) -> Iterator[None]:
    """Accesses of the shared tensors pause. The language is patched once, around all launches."""
    builder: Any = interpreter.interpreter_builder
    bounds = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in shared]

    def pausing(access: Callable[..., Any], pointer: int) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            address = int(arguments[pointer].data.flat[0])
            runner = threading.current_thread()
            if isinstance(runner, _Runner) and any(first <= address < end for first, end in bounds):
                runner.pause()
            return access(*arguments)

        return wrapped

    patched, patch = interpreter._patch_lang(_language), interpreter._patch_lang
    interpreter._patch_lang = lambda _kernel: _Unpatched()
    for name, pointer in _ACCESSES.items():
        setattr(builder, name, pausing(getattr(builder, name), pointer))
    try:
        yield
    finally:
        for name in _ACCESSES:
            delattr(builder, name)
        interpreter._patch_lang = patch
        patched.restore()


def run_once(programs: Sequence[Program], shared: Sequence[torch.Tensor], choose: Callable[[int], int]) -> None:
    """Run all programs to their ends; `choose` picks one of so many that can move."""
    runners = [_Runner(program) for program in programs]
    with _watched(shared):
        for runner in runners:
            runner.start()
            runner.move()  # up to its first access
        while movable := [runner for runner in runners if not runner.ended]:
            movable[choose(len(movable)) if len(movable) > 1 else 0].move()
    for runner in runners:
        runner.join()
        if runner.error is not None:
            raise runner.error


def explore(make: Callable[[], tuple[Sequence[Program], Sequence[torch.Tensor]]], check: Callable[[], None], most: int = 100_000) -> int:
    """Run fresh programs under every schedule, and `check` after each. Returns how many there were."""
    prefix: list[int] = []
    for count in range(1, most + 1):
        taken: list[tuple[int, int]] = []

        def choose(options: int, prefix: list[int] = prefix, taken: list[tuple[int, int]] = taken) -> int:
            choice = prefix[len(taken)] if len(taken) < len(prefix) else 0
            taken.append((choice, options))
            return choice

        run_once(*make(), choose)
        check()
        while taken and taken[-1][0] + 1 == taken[-1][1]:
            taken.pop()
        if not taken:
            return count
        prefix = [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1]
    raise AssertionError(f"more than {most} schedules")


def sample(make: Callable[[], tuple[Sequence[Program], Sequence[torch.Tensor]]], check: Callable[[], None], count: int, seed: int) -> None:
    """So many random schedules."""
    draw = random.Random(seed)
    for _ in range(count):
        run_once(*make(), draw.randrange)
        check()
