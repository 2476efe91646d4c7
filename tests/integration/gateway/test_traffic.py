"""The traffic profile of a running gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

from appliance.traffic import bucket_of, read_profile
from tests.fakes.scripted_appliance import appliance


async def test_a_gateway_leaves_the_shape_of_its_traffic(run_dir: Path) -> None:
    """What the engine said of its answers, how many came at once; a refused request and a page are no traffic."""
    usage = '{"usage": {"prompt_tokens": 700, "completion_tokens": 30, "prompt_tokens_details": {"cached_tokens": 350}}, "x": "a secret"}'
    async with appliance(run_dir) as (running, _):
        answers = await asyncio.gather(*(running.post({"do": "whole", "delay_s": 1.0, "body": usage}) for _ in range(4)))
        stream = await running.post({"do": "stream", "stream": True, "events": 10})
        bad = await running.post({"do": "whole", "status": 400, "body": "{}"})
        assert await running.stop() == 0
    assert {answer.status for answer in (*answers, stream)} == {200}
    assert bad.status == 400
    profile = read_profile(run_dir / "state")
    assert profile.lengths[bucket_of(700), bucket_of(30)] == 4
    assert profile.requests == 5
    assert profile.cached_percent == {bucket_of(50): 4, 0: 1}
    assert sum(profile.concurrency.values()) == 6
    assert sum(profile.gap_ms.values()) == 5
    assert max(profile.concurrency) == bucket_of(3)
    assert b"secret" not in (run_dir / "state/traffic.db").read_bytes()
