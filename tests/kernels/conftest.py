"""Guards around what kernels write. Triton's interpreter runs them here (tests/conftest.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

_GUARD = 64
_CANARY = 77


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch.empty gives is full of NaN and lies between canaries, which are still there when the test ends: a kernel that reads
    what it never wrote, leaves out a result, or writes past an end, is seen."""
    made: list[Tensor] = []

    def empty(*size: Any, dtype: torch.dtype = torch.float32, device: object = None) -> Tensor:
        shape = tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size
        memory = torch.full((math.prod(shape) + 2 * _GUARD,), _CANARY, dtype=dtype)
        memory[_GUARD:-_GUARD] = float("nan") if dtype.is_floating_point else -123
        made.append(memory)
        return memory[_GUARD:-_GUARD].view(shape)

    monkeypatch.setattr(torch, "empty", empty)
    yield
    assert made, "nothing was allocated: the guards guarded nothing"
    for memory in made:
        assert memory[:_GUARD].eq(_CANARY).all(), "written before the beginning"
        assert memory[-_GUARD:].eq(_CANARY).all(), "written past the end"
