"""Reference counts of KV blocks, as /metrics tells them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from appliance.engine.api.metrics import HttpMetrics, render
from appliance.engine.block_pool import BlockPool, PoolGeometry, Region
from appliance.engine.messages import EngineStats
from appliance.engine.references import References, references_of

GEOMETRY = PoolGeometry(16, 6, 4)


def test_blocks_are_counted_by_their_holders() -> None:
    """Of both regions, the null block left out; what only the prefix cache keeps is held by nobody."""
    pool = BlockPool(GEOMETRY)
    assert references_of(pool.words, GEOMETRY) == ((0, 10),)
    prompts = pool.allocate(Region.PREFILL, 3, 1)
    answers = pool.allocate(Region.DECODE, 1, 1)
    assert prompts is not None
    assert answers is not None
    pool.seal(prompts)
    pool.retain(prompts[:2])
    pool.retain(prompts[:1])
    assert references_of(pool.words, GEOMETRY) == ((0, 6), (1, 2), (2, 1), (3, 1))
    pool.keep(prompts[2])
    pool.release([prompts[2]])
    assert references_of(pool.words, GEOMETRY) == ((0, 7), (1, 1), (2, 1), (3, 1))


def told(references: References) -> dict[tuple[str, ...], float]:
    """What a scrape finds."""
    stats = EngineStats(0, 0, 0, 0, 0, 0, 10, 0, 0.0, decode_launches=7, block_references=references)
    families = text_string_to_metric_families(render(HttpMetrics(), stats))
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_every_block_stands_in_one_class() -> None:
    """Fewest, most, and classes that add up; an engine that has not looked says nothing."""
    found = told(((0, 5), (1, 2), (2, 1), (4, 1), (40, 1)))
    classes = {key[1]: value for key, value in found.items() if key[0] == "appliance_engine_kv_blocks_by_references"}
    assert classes == {"0": 5, "1": 2, "2": 1, "3-4": 1, "5-8": 0, "9-16": 0, "17-32": 0, "33+": 1}
    assert (found["appliance_engine_kv_block_references_min",], found["appliance_engine_kv_block_references_max",]) == (0, 40)
    assert found["appliance_engine_decode_launches_total",] == 7
    assert ("appliance_engine_kv_block_references_min",) not in told(())
