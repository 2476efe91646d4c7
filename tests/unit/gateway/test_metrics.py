"""Numbers: histograms as Prometheus counts them, and other engines' series under our names."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.gateway.definitions import Group
from appliance.gateway.metrics import Distribution
from appliance.gateway.sources import mapped, told_apart

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 5.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 500.0
"""
SGLANG = """\
# HELP sglang:token_usage The token usage
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m",tp_rank="0"} 0.28
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",tp_rank="0"} 8.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m",tp_rank="0"} 1.0
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 8.0e+06
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 7.0e+06
"""
LLAMACPP = """\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 6886
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 3469
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 0
"""
NATIVE = """\
# HELP appliance_engine_kv_blocks KV blocks there are.
# TYPE appliance_engine_kv_blocks gauge
appliance_engine_kv_blocks 200
# TYPE appliance_engine_kv_blocks_used gauge
appliance_engine_kv_blocks_used 50
# TYPE appliance_engine_running_requests gauge
appliance_engine_running_requests 2
# TYPE appliance_engine_something_new_total counter
appliance_engine_something_new_total{kind="a"} 7
# TYPE another_series gauge
another_series 1
"""


@pytest.mark.parametrize(
    ("page", "values"),
    [
        (
            VLLM,
            {
                "running_requests": 7,
                "waiting_requests": 2,
                "kv_used_ratio": 0.75,
                "preemptions_total": 5,
                "prompt_tokens_total": 1000,
                "generated_tokens_total": 500,
            },
        ),
        (
            SGLANG,
            {
                "running_requests": 8,
                "waiting_requests": 1,
                "kv_used_ratio": 0.28,
                "prompt_tokens_total": 8e6,
                "generated_tokens_total": 7e6,
            },
        ),
        (LLAMACPP, {"running_requests": 2, "waiting_requests": 0, "prompt_tokens_total": 6886, "generated_tokens_total": 3469}),
        (NATIVE, {"kv_blocks": 200, "kv_blocks_used": 50, "running_requests": 2, "something_new_total": 7, "kv_used_ratio": 0.25}),
        ("", {}),
    ],
    ids=["vllm", "sglang", "llamacpp", "native", "nothing"],
)
def test_every_engine_s_numbers_have_our_names(page: str, values: dict[str, float]) -> None:
    """Summed or the fullest over its ranks; what is ours goes through; what nobody knows is left out."""
    found: dict[str, Any] = {sample.name: sample.value for family in mapped(page) for sample in family.samples}
    assert found == {f"appliance_engine_{name}": value for name, value in values.items()}


@pytest.mark.parametrize("page", ["<html>", "a{b 1", "vllm:num_requests_running NaN", "\0\0", 'x{y="'])
def test_an_engine_s_page_that_is_none_breaks_nothing(page: str) -> None:
    """A custom engine may answer anything."""
    mapped(page)


def test_a_distribution_counts_as_prometheus_does() -> None:
    """Cumulative, bounds inclusive, the rest in +Inf; several of the same at once."""
    distribution = Distribution((1.0, 5.0))
    for value in (0.5, 1.0, 3.0, 100.0):
        distribution.observe(value)
    distribution.observe(2.0, 3)
    samples = {sample.labels.get("le", sample.name): sample.value for sample in Group().histogram("d", "text").spread(distribution).samples}
    assert samples == {"1.0": 2, "5.0": 6, "+Inf": 7, "appliance_d_count": 7, "appliance_d_sum": 110.5}


def test_several_engines_numbers_are_told_apart() -> None:
    """One family each, with the engine's index at every series; who does not answer is missing."""
    families = told_apart([mapped(NATIVE), mapped(VLLM), mapped("")])
    assert len({family.name for family in families}) == len(families)
    found = {(sample.name, sample.labels["replica"]): sample.value for family in families for sample in family.samples}
    assert found["appliance_engine_running_requests", "0"] == 2
    assert found["appliance_engine_running_requests", "1"] == 7
    assert found["appliance_engine_something_new_total", "0"] == 7
    assert {replica for _, replica in found} == {"0", "1"}
    (kind,) = [family.type for family in families if family.name == "appliance_engine_something_new"]
    assert kind == "counter"
