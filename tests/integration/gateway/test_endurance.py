"""What endurance.py does for hours, for seconds."""

from __future__ import annotations

from tests.integration.gateway.endurance import GROWTH_MAX_KIB, fuzz, memory


async def test_its_memory_does_not_grow_with_the_requests() -> None:
    """Whole, streamed, refused and abandoned ones."""
    samples = await memory(3000)
    assert samples[-1] - samples[1] < GROWTH_MAX_KIB


async def test_rubbish_by_the_megabyte_costs_nothing() -> None:
    """No crash, no leak, nobody held up; every answer is HTTP."""
    found = await fuzz(2_000_000, 1)
    assert found.problems == []
    assert found.statuses[200] > 0
    assert found.statuses[400] > 0
