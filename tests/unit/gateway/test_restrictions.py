"""What admission holds back or refuses, in words: only what is so, with the number and the reason."""

from __future__ import annotations

import pytest

from appliance.core.units import GIB
from appliance.gateway.memory import CardUse, Memory
from appliance.gateway.restrictions import LEARNED_MAX, restrictions

WHY = "3 of 3 crashes of the last day met a prompt of 513 tokens"


def test_there_is_nothing_to_say_of_a_box_that_takes_everything() -> None:
    """No card over its line, nobody has waited, no length is named."""
    assert restrictions([Memory(0.98)], "reject", (), {}) == []


def test_a_card_over_the_red_line_is_said_and_who_has_waited_for_memory() -> None:
    """The card's own sentence while it is over; the count stays when it is over no more."""
    memory = Memory(0.98)
    memory.heard([CardUse("0000:01:00.0", int(23.8 * GIB), 24 * GIB)])
    assert restrictions([memory], "reject", (), {}) == [memory.sentence]
    memory.held_back["red_line"] += 2
    memory.held_back["headroom"] += 1
    memory.heard([CardUse("0000:01:00.0", 12 * GIB, 24 * GIB)])
    (said,) = restrictions([memory], "reject", (), {})
    assert said.endswith("1 because the headroom is less than their prefill takes, 2 because a card was over the red line")


@pytest.mark.parametrize(
    ("policy", "done"), [("reject", "are refused"), ("pad", "are padded"), ("truncate", "are padded or truncated"), ("any", None)]
)
def test_lengths_are_said_with_what_is_done_to_them(policy: str, done: str | None) -> None:
    """Those of the configuration by its key, the others with what was found; under `any` nothing is done, and nothing said."""
    said = restrictions([Memory(0.98)], policy, (1025, 513), {777: WHY})
    expected = [
        f"prompts of exactly 513, 1025 tokens {done}, as [admission] fused_lengths says",
        f"prompts of exactly 777 tokens {done}, because {WHY}",
    ]
    assert said == ([] if done is None else expected)


def test_many_lengths_are_counted() -> None:
    """A thousand sentences are none."""
    said = restrictions([Memory(0.98)], "reject", (), dict.fromkeys(range(1000), WHY))
    assert len(said) == LEARNED_MAX + 1
    assert said[-1] == "and 992 lengths more"
