"""The choice, its reasons, and refusals whose ways out work."""

from dataclasses import replace

import pytest

from appliance.core.units import GIB
from appliance.core.versions import version_of
from appliance.planner.choose import attempt
from appliance.planner.inputs import Choice, PlanInputError, PlanInputs, PlanRefused, Shortfall
from appliance.planner.ways_out import plan
from tests.unit.planner import shapes

LLAMA = shapes.facts(shapes.dense())
LLAMA_70B = shapes.facts(shapes.dense(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64))
HYBRID = shapes.facts(shapes.hybrid_27b())
ENGINES = ("sglang", "vllm", "llamacpp")


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_next_fraction_up_would_not_do(engine: str) -> None:
    """The highest one whose headroom covers the peak with its margin."""
    choice = plan(shapes.inputs(LLAMA, "rtx3090", engine))
    needed = 1.25 * choice.plan.activation_peak_bytes
    above = shapes.plan_of(replace(choice.inputs, mem_fraction=None), choice.plan.mem_fraction + 0.01)
    assert choice.plan.headroom_bytes >= needed
    assert choice.plan.mem_fraction == 0.95 or above.headroom_bytes < needed


@pytest.mark.parametrize("engine", ENGINES)
def test_the_context_is_a_multiple_of_1024_under_the_pool(engine: str) -> None:
    """Or the model's own limit."""
    choice = plan(shapes.inputs(LLAMA, "24GiB", engine))
    context = choice.plan.context_length_tokens
    assert context % 1024 == 0
    assert context <= min(choice.plan.kv_tokens, LLAMA.max_context_tokens)


def test_the_table_falls_and_marks_what_fits() -> None:
    """Less for the static memory: fewer tokens, more headroom; the chosen fraction is in it and fits."""
    choice = plan(shapes.inputs(LLAMA, "24GiB", "sglang"))
    fractions = [row.mem_fraction for row in choice.table]
    tokens = [row.kv_tokens for row in choice.table]
    headroom = [row.headroom_bytes for row in choice.table]
    assert fractions == sorted(fractions, reverse=True)
    assert tokens == sorted(tokens, reverse=True)
    assert headroom == sorted(headroom)
    assert next(row.fits for row in choice.table if row.mem_fraction == choice.plan.mem_fraction)


def test_a_given_fraction_is_worked_out_not_improved() -> None:
    """And says so."""
    choice = plan(shapes.inputs(LLAMA, "24GiB", "sglang", mem_fraction=0.87))
    assert choice.plan.mem_fraction == 0.87
    assert "was given" in choice.reason


def test_the_red_line_holds_unless_the_owner_moves_it() -> None:
    """A given fraction above it is a warning."""
    big = shapes.inputs(LLAMA, "h200", "vllm")
    assert plan(big).plan.mem_fraction == 0.95
    assert plan(replace(big, red_line=0.9)).plan.mem_fraction == 0.9
    over = plan(replace(big, mem_fraction=0.97))
    assert any("red line" in warning for warning in over.warnings)


def test_memory_above_eighty_per_cent_is_warned_of() -> None:
    """The second article's advice."""
    assert any("80%" in warning for warning in plan(shapes.inputs(LLAMA, "24GiB", "sglang")).warnings)
    assert not any("80%" in warning for warning in plan(shapes.inputs(LLAMA, "24GiB", "sglang", mem_fraction=0.72)).warnings)


def test_an_earlier_out_of_memory_asks_for_half_as_much_again() -> None:
    """Whatever the worked-out peak is."""
    choice = plan(shapes.inputs(LLAMA, "24GiB", "sglang", oom_headroom_bytes=2 * GIB))
    assert choice.plan.headroom_bytes >= 3 * GIB


def test_memory_held_by_others_is_not_planned() -> None:
    """Free memory that was read from the card caps what is there."""
    empty = plan(shapes.inputs(LLAMA, "24GiB", "sglang"))
    asked = shapes.inputs(LLAMA, "24GiB", "sglang")
    shared = plan(replace(asked, gpu=replace(asked.gpu, free_at_start_bytes=asked.gpu.total_bytes - 2 * GIB)))
    assert empty.plan.free_at_start_bytes - shared.plan.free_at_start_bytes == 2 * GIB
    assert shared.plan.context_length_tokens < empty.plan.context_length_tokens


REFUSALS = [
    ("weights do not fit", shapes.inputs(LLAMA_70B, "24GiB", "vllm"), "leave nothing"),
    ("nor in llama.cpp", shapes.inputs(LLAMA_70B, "24GiB", "llamacpp", measured={"weight": 37.22}), "leave nothing"),
    ("context too long", shapes.inputs(HYBRID, "24GiB", "sglang", kv_dtype="fp8_e4m3", context_length_tokens=200_000), "200,000"),
    ("fraction too high", shapes.inputs(LLAMA, "24GiB", "sglang", mem_fraction=0.99), "headroom"),
    ("least context not reached", shapes.inputs(HYBRID, "24GiB", "sglang", min_context_tokens=131_072), "are wanted"),
    ("card too small for all", shapes.inputs(LLAMA, "8GiB", "sglang"), "leave nothing"),
    (
        "pool given",
        shapes.inputs(HYBRID, "24GiB", "vllm", context_length_tokens=65_536, measured={"kv_pool": 1.56}),
        "1.56 GiB",
    ),
]


@pytest.mark.parametrize(("asked", "said"), [pytest.param(asked, said, id=name) for name, asked, said in REFUSALS])
def test_a_refusal_says_why_and_names_ways_out_that_work(asked: PlanInputs, said: str) -> None:
    """One to three, each with a plan that fits."""
    with pytest.raises(PlanRefused, match=said) as refused:
        plan(asked)
    assert 1 <= len(refused.value.ways_out) <= 3
    for way in refused.value.ways_out:
        assert way.plan.fits
        assert way.options
        assert way.change
        assert way.gain


def test_the_cheapest_way_out_comes_first() -> None:
    """An 8-bit cache before a shorter context, and that before more cards."""
    asked = shapes.inputs(LLAMA, "24GiB", "sglang", context_length_tokens=60_000)
    with pytest.raises(PlanRefused) as refused:
        plan(asked)
    kinds = [way.options[0] for way in refused.value.ways_out]
    assert kinds == ["--kv-dtype", "--context", "--tp"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"mem_fraction": 0.0}, "0 is not between"),
        ({"mem_fraction": 1.2}, "1.2 is not between"),
        ({"prefill_chunk_tokens": 8}, "8 is less than 16"),
        ({"max_running": 0}, "0 is less than 1"),
        ({"context_length_tokens": 10**6}, "1,000,000 tokens exceeds the model's own limit of 131,072"),
        ({"min_context_tokens": 10**6}, "own limit"),
        ({"tensor_parallel": 3}, "32 attention heads cannot be shared by 3 cards"),
        ({"kv_dtype": "fp3"}, "'fp3' is not known"),
        ({"kv_dtype": "q8_0"}, "sglang has no KV cache in q8_0"),
        ({"engine": "trt"}, "'trt' is not known"),
        ({"engine": "native", "tensor_parallel": 2}, "does not run on 2 cards"),
        ({"engine": "native", "kv_dtype": "fp8"}, "no KV cache in fp8"),
    ],
)
def test_what_cannot_be_is_refused_with_value_and_limit(changes: dict[str, object], said: str) -> None:
    """Usage errors, told apart from plans that do not fit."""
    with pytest.raises(PlanInputError) as refused:
        plan(replace(shapes.inputs(LLAMA, "24GiB", "sglang"), **changes))  # type: ignore[arg-type]
    assert said in str(refused.value)
    assert refused.value.hint


def test_a_model_without_attention_is_refused() -> None:
    """Its memory has no term that grows with the context; other numbers would be made up."""
    stateful = replace(shapes.facts(shapes.hybrid_27b()), full_attention_layers=0)
    with pytest.raises(PlanInputError, match="no KV cache to plan"):
        plan(shapes.inputs(stateful, "24GiB", "sglang"))


def test_an_attempt_tells_the_shortfall_without_looking_for_ways() -> None:
    """For callers that try many settings."""
    assert isinstance(attempt(shapes.inputs(LLAMA_70B, "24GiB", "vllm")), Shortfall)
    assert isinstance(attempt(shapes.inputs(LLAMA, "24GiB", "vllm")), Choice)


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.5.17", (0, 5, 17)), ("v0.20.2rc1", (0, 20, 2)), ("0.5.9.post1", (0, 5, 9)), ("", (9, 9)), ("main", (9, 9)), ("0.24", (0, 24))],
)
def test_versions_are_read_as_they_are_printed(text: str, version: tuple[int, ...]) -> None:
    """What is no version is the newest."""
    assert version_of(text, (9, 9)) == version
