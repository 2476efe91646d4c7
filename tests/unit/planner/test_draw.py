"""The bar: every part of the card, to scale."""

import xml.etree.ElementTree as ElementTree

import pytest

from appliance.core.plan import MemoryPlan
from appliance.planner.draw import bar, segments
from appliance.planner.draw_svg import svg
from appliance.planner.ways_out import plan
from tests.unit.planner import shapes

HYBRID = shapes.facts(shapes.hybrid_27b())
CASES = [
    shapes.inputs(HYBRID, "24GiB", "sglang", engine_version="0.5.17", kv_dtype="fp8_e4m3"),
    shapes.inputs(HYBRID, "24GiB", "vllm", kv_dtype="fp8", tensor_parallel=2),
    shapes.inputs(HYBRID, "24GiB", "llamacpp", kv_dtype="q8_0", measured={"weight": 13.27}),
]


@pytest.mark.parametrize("asked", CASES, ids=lambda asked: asked.engine)
def test_the_parts_are_the_card(asked) -> None:
    """Nothing twice, nothing forgotten: the parts add up to what CUDA sees."""
    choice = plan(asked)
    parts = segments(choice.plan, asked.gpu.total_bytes)
    assert sum(part.size_bytes for part in parts) == pytest.approx(asked.gpu.total_bytes, abs=2)
    assert parts[0].name == "context and others"
    assert parts[-1].name == "spare"


@pytest.mark.parametrize("width", [20, 72, 200])
def test_the_bar_is_as_wide_as_asked(width: int) -> None:
    """With a character at least for each part."""
    choice = plan(CASES[0])
    pieces, legend = bar(choice.plan, CASES[0].gpu.total_bytes, width)
    assert sum(map(len, pieces)) == width
    assert min(map(len, pieces)) >= 1
    assert "weights 17." in legend


def test_the_picture_is_well_formed() -> None:
    """Names are escaped; one rectangle a part and one for its legend."""
    choice = plan(CASES[0])
    root = ElementTree.fromstring(svg(choice.plan, CASES[0].gpu.total_bytes, "a <b> & c"))
    rectangles = [element for element in root.iter() if element.tag.endswith("rect")]
    assert len(rectangles) == 2 * len(segments(choice.plan, CASES[0].gpu.total_bytes))
    assert any(element.text == "a <b> & c" for element in root.iter())


def test_a_plan_that_asks_for_too_much_is_still_drawn() -> None:
    """Parts beyond the card, no spare."""
    refused: MemoryPlan = shapes.plan_of(shapes.inputs(shapes.facts(shapes.dense()), "8GiB", "sglang"), 0.95)
    parts = segments(refused, shapes.gpu_facts("8GiB").total_bytes)
    assert all(part.size_bytes > 0 for part in parts)
    assert sum(map(len, bar(refused, shapes.gpu_facts("8GiB").total_bytes, 60)[0])) == 60
