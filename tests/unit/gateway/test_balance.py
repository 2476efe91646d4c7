"""Which engine a request goes to: never one that cannot, home where that is no dearer, and only the homeless move."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway.balance import BEGINNING_CHARACTERS, MARGIN, Load, choose, key_of

CONVERSATIONS = st.integers(min_value=0, max_value=2**64 - 1)
BUSY = st.floats(min_value=0, max_value=1, allow_nan=False)
LOADS = st.lists(st.tuples(BUSY, st.booleans()), min_size=1, max_size=6).map(
    lambda drawn: [Load(replica, busy, free) for replica, (busy, free) in enumerate(drawn)]
)


def idle(*replicas: int) -> list[Load]:
    """Engines with nothing to do."""
    return [Load(replica, 0.0, True) for replica in replicas]


def home(conversation: int, *replicas: int) -> int:
    """Where it goes while nobody is busy."""
    found = choose(conversation, 1, idle(*replicas))
    assert found is not None
    return found


@given(CONVERSATIONS, st.integers(min_value=1), LOADS)
def test_only_one_that_is_free_is_chosen_and_one_is_if_there_is_one(conversation: int, order: int, loads: list[Load]) -> None:
    """Whatever the conversation, and however busy they are."""
    chosen = choose(conversation, order, loads)
    free = {load.replica for load in loads if load.free}
    assert (chosen in free) if free else chosen is None


@given(CONVERSATIONS, st.integers(min_value=1), LOADS)
def test_nobody_waits_behind_a_busy_home(conversation: int, order: int, loads: list[Load]) -> None:
    """The chosen one is at most MARGIN busier than the least busy one that is free."""
    chosen = choose(conversation, order, loads)
    if chosen is not None:
        assert loads[chosen].busy <= min(load.busy for load in loads if load.free) + MARGIN


@given(st.integers(min_value=1, max_value=2**64 - 1), st.integers(min_value=2, max_value=8), st.data())
def test_an_engine_that_goes_out_moves_its_own_conversations_only(conversation: int, count: int, data: st.DataObject) -> None:
    """And when it is back, they are back."""
    out = data.draw(st.integers(min_value=0, max_value=count - 1))
    before = home(conversation, *range(count))
    after = home(conversation, *(replica for replica in range(count) if replica != out))
    assert after == before or before == out


@given(st.integers(min_value=1, max_value=2**64 - 1), st.permutations(range(5)), st.integers(1, 9), st.integers(1, 9))
def test_a_home_depends_on_nothing_but_conversation_and_engines(conversation: int, order: list[int], first: int, second: int) -> None:
    """Neither on the order in which the engines are named nor on who else came."""
    assert choose(conversation, first, idle(*order)) == choose(conversation, second, idle(*range(5)))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_conversations_are_spread_evenly(count: int) -> None:
    """Each engine has about its share of three thousand; so have those without a conversation, who come one after the other."""
    for shares in (
        Counter(home(key_of({"prompt": f"question {number}"}), *range(count)) for number in range(3000)),
        Counter(choose(0, order, idle(*range(count))) for order in range(1, 3001)),
    ):
        assert set(shares) == set(range(count))
        assert max(shares.values()) - min(shares.values()) < 0.15 * 3000


def test_without_a_conversation_the_least_busy_is_taken() -> None:
    """Nothing keeps it at a busier one."""
    loads = [Load(0, 0.2, True), Load(1, 0.1, True), Load(2, 0.0, False)]
    assert {choose(0, order, loads) for order in range(1, 50)} == {1}


CHAT: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who was Ada?"}]


@pytest.mark.parametrize(
    "grown",
    [
        {"messages": [*CHAT, {"role": "assistant", "content": "A mathematician."}, {"role": "user", "content": "When?"}]},
        {"messages": CHAT, "temperature": 0.5, "stream": True, "max_tokens": 7},
    ],
)
def test_a_conversation_keeps_its_key_as_it_grows(grown: dict[str, Any]) -> None:
    """What comes behind its first question does not matter, nor how the answer is to be made."""
    assert key_of({"model": "m", **grown}) == key_of({"model": "m", "messages": CHAT}) != 0


@pytest.mark.parametrize(
    "other",
    [
        {"model": "n", "messages": CHAT},
        {"model": "m", "messages": [CHAT[0], {"role": "user", "content": "Who was Grace?"}]},
        {"model": "m", "messages": [{"role": "system", "content": "Be long."}, CHAT[1]]},
        {"model": "m", "messages": CHAT[1:]},
        {"model": "m", "system": "Be brief.", "messages": [{"role": "user", "content": "Who was Grace?"}]},
    ],
)
def test_other_conversations_have_other_keys(other: dict[str, Any]) -> None:
    """Model, system and first question tell them apart."""
    assert key_of(other) not in (0, key_of({"model": "m", "messages": CHAT}))


def test_parts_ids_and_the_newer_apis_have_keys_too() -> None:
    """The words of a message in parts are the same words; an image is not looked at."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}]
    more = [*parts, {"role": "assistant", "content": "A cat."}]
    assert key_of({"messages": parts}) == key_of({"messages": more}) != 0
    assert key_of({"input": parts}) == key_of({"messages": parts})
    assert key_of({"instructions": "x", "input": "hello"}) not in (0, key_of({"input": "hello"}))
    assert key_of({"prompt": [5, 6, 7]}) not in (0, key_of({"prompt": [5, 6, 8]}))
    assert key_of({"prompt": ["a", "b"]}) not in (0, key_of({"prompt": ["a", "c"]}))
    assert key_of({"text": "hello"}) == key_of({"prompt": "hello"}) != 0


def test_a_long_text_is_known_by_its_beginning() -> None:
    """As it grows, it stays where it is."""
    text = "All happy families are alike. " * 100
    assert len(text) > BEGINNING_CHARACTERS
    assert key_of({"prompt": text}) == key_of({"prompt": f"{text} and so on"})


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=5)
NAMES = st.sampled_from(["messages", "content", "role", "prompt", "text"])


@given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner), max_leaves=12))
def test_any_json_has_a_key_or_none(found: Any) -> None:
    """What clients send is theirs; the engine says what is wrong with it."""
    for name in ("messages", "prompt", "input", "text", "input_ids", "system", "model"):
        assert 0 <= key_of({name: found, "messages" if name == "system" else "x": [found]}) < 2**64
