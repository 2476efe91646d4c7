"""The block word under two processes at once: no explorer chooses the moment here, chance and two cores do."""

from __future__ import annotations

import pytest

from tests.kernels.two_processes import KERNEL, ONE_WRITER, PLANTED, until_lost

RETAINS = 400


@pytest.mark.parametrize("way", [PLANTED, ONE_WRITER])
def test_two_processes_lose_retains_of_what_is_for_one_writer(way: str) -> None:
    """The harness sees the defect of the article, and that the CPU path's step is for one thread alone, as its docs say."""
    retains, rounds, found = until_lost(way, RETAINS)
    assert found, f"{retains} retains in {rounds} rounds, and none was lost: nothing is shown"


def test_two_processes_lose_nothing_by_the_kernel() -> None:
    """Its compare-and-swap holds between processes as it does between programs."""
    retains, rounds, found = until_lost(KERNEL, RETAINS)
    assert not found, f"{found} of {retains} retains were lost in round {rounds}"
