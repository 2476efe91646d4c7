"""--set table.key=value."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.config import load_config, parse_overrides
from appliance.core.errors import ConfigError


def test_values_are_read_by_the_kind_of_their_key() -> None:
    """Strings, sizes and durations need no quotes; the rest is TOML; the last of a key wins."""
    assignments = ["gateway.port=1", "gateway.port=8080", "model.name=123", "model.path=/a b=c", "engine.kv_pool_bytes=1GiB"]
    assignments += ["gateway.drain_s=5", "metrics.enabled=false", 'engine.extra_args=["-v"]', "budget.mem_fraction = 0.5"]
    overrides = parse_overrides(assignments)
    config = load_config(None, overrides).config
    assert config.gateway.port == 8080
    assert (config.model.name, config.model.path) == ("123", "/a b=c")
    assert (config.engine.kv_pool_bytes, config.gateway.drain_s) == (1024**3, 5.0)
    assert (config.metrics.enabled, config.engine.extra_args, config.budget.mem_fraction) == (False, ("-v",), 0.5)


@pytest.mark.parametrize("assignment", ["gateway.port", "", "=3", "gateway.port=", "gateway.port=eighty", "gateway.port=1\n2"])
def test_what_is_no_assignment_is_refused_with_an_example(assignment: str) -> None:
    """A forgotten "=" or a word where a number belongs."""
    with pytest.raises(ConfigError) as caught:
        parse_overrides([assignment])
    assert "write for example" in str(caught.value)


def test_an_unknown_key_is_left_to_the_loader_which_knows_the_nearest() -> None:
    """One place refuses unknown keys."""
    with pytest.raises(ConfigError, match=r"did you mean gateway\.port"):
        load_config(None, parse_overrides(["gateway.prot=80"]))


@given(st.text())
def test_no_text_ends_in_anything_but_a_config_error(text: str) -> None:
    """Argument lists come from anywhere."""
    for assignment in (text, f"gateway.port={text}", f"model.name={text}"):
        with contextlib.suppress(ConfigError):
            parse_overrides([assignment])
