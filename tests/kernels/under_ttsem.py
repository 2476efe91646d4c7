"""Planted defects, and every kernel on memory of exactly its size, for ttsem; run as a program it is pytest with every launch under ttsem.

`PYTHONPATH=TTSEM TRITON_INTERPRET=0 python tests/kernels/under_ttsem.py PYTEST_ARGUMENT ...`, as test_ttsem.py does. The last line of
its output is one of JSON: pytest's exit `code`, how many `launches` there were and of which `kernels`, and how many went `unchecked`, too
large for it.

ttsem compiles each launch with Triton's own front end and executes that code, program after program, on exactly the memory that the
launch was given. An access outside of it is a fault, and so is an element that two programs of the launch touch, unless both only read
it or both only change it atomically. Memory that nobody has written is NaN.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from triton.runtime.jit import JITFunction
from ttsem.sanitize import KernelFault, session

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.bench import gpu_kernels
from tests.kernels import planted


def _counts() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        (
            lambda: planted.retain_by_load_and_store[(2,)](_counts()[0], 1, _counts()[1]),
            "tl.store(counts_ptr + block, count + 1)`: program instances (0, 0, 0) and (1, 0, 0) both touch element 1 of `counts_ptr`",
        ),
        (
            lambda: planted.tell_by_load_and_store[(2,)](_counts()[1][:1], torch.zeros(4, dtype=torch.int64), 11),
            "tl.store(count_ptr, place + 1)`: program instances (0, 0, 0) and (1, 0, 0) both touch element 0 of `count_ptr`",
        ),
        (
            lambda: planted.release_by_swap_after_a_load[(2,)](_counts()[0], 1, _counts()[1]),
            "(0, 0, 0) atomically updates it, (1, 0, 0) loads it",
        ),
        (
            lambda: planted.write_up_to_the_end[(5,)](torch.zeros(4), 4),
            "tl.store(cache_ptr + offset, 1.0)` writes 1 element(s) past the end of the tensor passed as `cache_ptr`",
        ),
    ],
    ids=["retain by load and store", "tell by load and store", "release by a swap after a load", "write up to the end"],
)
def test_what_is_planted_is_found(launch: Callable[[], None], said: str) -> None:
    """At the kernel's line."""
    with pytest.raises(KernelFault, match=re.escape(said)):
        launch()


def test_what_takes_several_launches_is_not_found() -> None:
    """Adding with an undo is wrong too (test_refcount.py): that is the explorer's to find."""
    counts, took = _counts()
    planted.retain_by_add_and_undo[(2,)](counts, 1, took)
    assert counts.tolist() == [1, 3, 1]


@pytest.mark.parametrize("cases", [gpu_kernels.row_cases, gpu_kernels.write_cases, gpu_kernels.decode_cases, gpu_kernels.prefill_cases])
def test_kernels_stay_in_memory_of_exactly_their_size(cases: Callable[[gpu_kernels.Bench], Iterator[gpu_kernels.Case]]) -> None:
    """Without the guards of the other tests; against float64."""
    for case in cases(gpu_kernels.Bench(rehearse=True)):
        assert gpu_kernels.judge(case) <= gpu_kernels.MOST_ERROR, case.name


def main(arguments: list[str]) -> None:
    """The command line."""
    kernels: set[str] = set()
    with session() as state:
        run = JITFunction.run

        def recorded(kernel: JITFunction, *given: Any, **options: Any) -> Any:
            __tracebackhide__ = True
            kernels.add(kernel.__name__)
            return run(kernel, *given, **options)

        with mock.patch.object(JITFunction, "run", recorded):
            code = int(pytest.main(arguments))
    print(json.dumps({"code": code, "launches": state.launches, "kernels": sorted(kernels), "unchecked": state.races_unchecked}))


if __name__ == "__main__":
    main(sys.argv[1:])
