"""After which crashes weights that were held are served from again."""

from __future__ import annotations

import pytest

from appliance.core.causes import Cause
from appliance.engine import weight_holder
from appliance.supervisor import weight_keeper
from appliance.supervisor.policy import TABLE, Response
from appliance.supervisor.weight_keeper import may_be_served_after


@pytest.mark.parametrize("cause", [cause for cause in Cause if TABLE[cause].response is Response.LOST_CARD], ids=lambda cause: cause.label)
def test_not_after_a_card_that_was_lost(cause: Cause) -> None:
    """Xid 79 and every other cause by which a card is given up: its memory is gone, or will be with the reset that it needs."""
    assert not may_be_served_after(cause)


@pytest.mark.parametrize(
    "cause",
    [Cause.CUDA_ILLEGAL_ACCESS, Cause.CUDA_DEVICE_ASSERT, Cause.SEGFAULT_NATIVE, Cause.KILLED_UNKNOWN, Cause.HOST_OOM, Cause.UNKNOWN],
)
def test_after_a_crash_of_the_engine_alone(cause: Cause) -> None:
    """A poisoned CUDA context is that process's own; what it may have written is what the checksums are for."""
    assert may_be_served_after(cause)


@pytest.mark.parametrize("cause", [Cause.BAD_NUMBERS, Cause.MODEL_CORRUPT, Cause.ECC_UNCORRECTABLE])
def test_not_where_what_was_read_is_itself_in_doubt(cause: Cause) -> None:
    """The checksums are of what was read: they would be right."""
    assert not may_be_served_after(cause)


def test_both_sides_use_the_same_words() -> None:
    """The keeper may not import the engine, nor the engine the keeper."""
    assert (weight_holder.HELD, weight_holder.EXIT_REFUSED) == (weight_keeper.HELD, weight_keeper.EXIT_REFUSED)
