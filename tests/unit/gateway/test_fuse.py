"""The length fuse's decisions: nothing too long passes uncounted, and nothing short is counted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.config.client_tables import AdmissionTable
from appliance.core.launch import EngineLimits
from appliance.gateway.fuse import TEMPLATE_TOKENS, Limits, judge, limits_of, must_count

ENGINE = EngineLimits("tiny", 4096, 8, 32768)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, TEMPLATE_TOKENS), st.lists(st.integers(1, 10**6), max_size=4))
def test_what_is_not_counted_could_not_have_been_refused(body_bytes: int, most: int, template: int, fused: list[int]) -> None:
    """Whatever the tokenizer: it makes no more tokens than there are bytes, and what the template adds."""
    limits = Limits(most, "x", tuple(fused))
    if not must_count(body_bytes, limits):
        assert judge(body_bytes + template, limits, "messages") is None
        assert all(judge(tokens, limits, "messages") is None for tokens in (0, 1, body_bytes // 2, body_bytes))


@pytest.mark.parametrize(("body_bytes", "counted"), [(200, False), (4095 - TEMPLATE_TOKENS, False), (4096 - TEMPLATE_TOKENS, True)])
def test_short_bodies_never_pay(body_bytes: int, counted: bool) -> None:
    """Most requests of most people."""
    assert must_count(body_bytes, limits_of(AdmissionTable(), ENGINE)) is counted


@pytest.mark.parametrize(
    ("given_tokens", "engine", "most", "source"),
    [
        (0, ENGINE, 4095, "the engine's"),
        (0, EngineLimits("tiny", 4096, 8, 32768, max_prompt_tokens=2000), 2000, "the engine's"),
        (1000, ENGINE, 1000, "[admission] max_prompt_tokens"),
        (100_000, ENGINE, 4095, "the engine's"),
        (1000, None, 1000, "[admission] max_prompt_tokens"),
        (0, None, 0, "[admission] max_prompt_tokens"),
    ],
)
def test_the_lower_limit_counts(given_tokens: int, engine: EngineLimits | None, most: int, source: str) -> None:
    """The owner's or the engine's."""
    limits = limits_of(AdmissionTable(max_prompt_tokens=given_tokens), engine)
    assert (limits.most_tokens, limits.source) == (most, source)


def test_a_refusal_has_both_numbers_and_what_would_fit() -> None:
    """And names the key that sets the limit, and the field of the body."""
    refused = judge(5000, Limits(1000, "[admission] max_prompt_tokens", ()), "prompt")
    assert refused is not None
    assert (refused.status, refused.code, refused.param) == (422, "context_length_exceeded", "prompt")
    assert "5000 tokens" in str(refused)
    assert "[admission] max_prompt_tokens 1000; shorten it by 4000 tokens: at most 1000 fit" in str(refused)
    assert judge(1000, Limits(1000, "x", ()), "prompt") is None


def test_a_fused_length_is_refused_and_its_neighbours_are_not() -> None:
    """The nearest that fits is not another fused one."""
    limits = Limits(0, "x", (127, 254, 255))
    assert [tokens for tokens in range(300) if judge(tokens, limits, "messages")] == [127, 254, 255]
    refused = judge(255, limits, "messages")
    assert refused is not None
    assert (refused.status, refused.code) == (422, "length_fused")
    assert "255 tokens" in str(refused)
    assert "the nearest shorter one that fits has 253 tokens" in str(refused)


BUCKETS = Limits(600, "x", frozenset({127, 255, 256, 511}), buckets=(128, 256, 512, 700))


@pytest.mark.parametrize(("tokens", "above"), [(127, 128), (255, 512), (511, 512), (512, None), (600, None)])
def test_the_next_bucket_is_one_that_goes(tokens: int, above: int | None) -> None:
    """Not a fused one, and none above the limit."""
    assert BUCKETS.bucket_above(tokens) == above


def test_what_is_moved_ends_in_a_bucket_or_below_one() -> None:
    """Lengthened exactly to one; shortened to no more than the largest that goes. Without buckets: to whatever goes."""
    assert [tokens for tokens in range(700) if BUCKETS.is_bucket(tokens)] == [128, 512]
    assert max(tokens for tokens in range(700) if BUCKETS.within_buckets(tokens)) == 512
    assert not BUCKETS.within_buckets(127)
    free = Limits(600, "x", frozenset({127}))
    assert [free.is_bucket(tokens) for tokens in (126, 127, 128, 601)] == [True, False, True, False]
    assert free.within_buckets(600)


def test_a_refusal_names_the_bucket() -> None:
    """Whoever makes the prompt himself can meet it."""
    refused, last = judge(127, BUCKETS, "messages"), judge(511, Limits(0, "x", frozenset({511}), buckets=(128,)), "messages")
    assert "the nearest shorter one that fits has 126 tokens, and the next of [admission] length_buckets is 128" in str(refused)
    assert "no longer one is in length_buckets" in str(last)
    assert "length_buckets" not in str(judge(127, Limits(0, "x", frozenset({127})), "messages"))


def test_the_owner_s_buckets_are_put_in_order() -> None:
    """As he may have written them."""
    assert limits_of(AdmissionTable(length_buckets=(512, 128, 512)), ENGINE).buckets == (128, 512)
