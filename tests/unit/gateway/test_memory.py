"""Memory as admission sees it: the red line with its way back, the planned peak, and what is proved by an answer."""

from __future__ import annotations

import pytest

from appliance.core.errors import Unreachable
from appliance.core.launch import Endpoint
from appliance.core.publication import Publication
from appliance.core.states import EngineState
from appliance.core.units import GIB, MIB
from appliance.gateway.advisor import Advisor, cards_of, plan_of
from appliance.gateway.doors import Doors
from appliance.gateway.memory import LONG_TOKENS, CardUse, Memory, PrefillPlan
from appliance.gateway.room import Room

TOTAL = 24 * GIB
PLAN = PrefillPlan(headroom_bytes=600 * MIB, peak_bytes=800 * MIB, chunk_tokens=4096)


def used(*ratios: float) -> list[CardUse]:
    """Cards that are so full."""
    return [CardUse(f"0000:0{number}:00.0", round(TOTAL * ratio), TOTAL) for number, ratio in enumerate(ratios, 1)]


def test_the_fullest_card_counts_and_the_way_back_is_longer() -> None:
    """Over the line at once; open again only a hundredth below it. Nobody is told of what is no change."""
    memory = Memory(0.98)
    steps = [(0.5, 0.97, False), (0.5, 0.981, True), (0.5, 0.975, True), (0.971, 0.3, True), (0.96, 0.2, False)]
    told = []
    for first, second, over in steps:
        told.append(memory.heard(used(first, second)))
        assert memory.over is over
    assert told == [False, True, False, False, True]


def test_only_long_prompts_are_held_back() -> None:
    """What fills a chunk; without a plan, from 2048 tokens on. And the sentence has card, both shares and the number."""
    memory = Memory(0.98)
    memory.heard(used(0.99))
    assert (memory.holds_back(LONG_TOKENS - 1), memory.holds_back(LONG_TOKENS)) == ("", "red_line")
    assert "card 0000:01:00.0 has 99.0 % of its 24.00 GiB taken, above the red line of 98.0 %" in memory.sentence
    assert "prompts of 2048 tokens and more" in memory.sentence
    memory.planned(PrefillPlan(GIB, MIB, 512))
    assert (memory.holds_back(511), memory.holds_back(512)) == ("", "red_line")


def test_no_line_and_no_cards_hold_nobody_back() -> None:
    """0 switches it off; a box without cards has none to be full."""
    off, none = Memory(0.0), Memory(0.98)
    off.heard(used(1.0))
    none.heard([])
    assert off.holds_back(10**6) == none.holds_back(10**6) == off.sentence == none.sentence == ""


def test_a_prefill_takes_what_a_chunk_takes() -> None:
    """In proportion below a chunk, and no more above it."""
    assert [PLAN.peak_of(tokens) // MIB for tokens in (0, 2048, 4096, 100_000)] == [0, 400, 800, 800]
    assert PrefillPlan(GIB, 800, 0).peak_of(1) == 800


def test_a_prefill_that_is_planned_to_take_more_than_there_is_goes_alone() -> None:
    """600 of 800 MiB: three quarters of a chunk. Both numbers are said."""
    memory = Memory(0.98)
    memory.planned(PLAN)
    assert (memory.holds_back(3072), memory.holds_back(3080)) == ("", "headroom")
    assert memory.why(4096) == "the prefill of about 4096 tokens is planned to take 800.00 MiB, and the headroom is 600.00 MiB"


def test_an_answer_is_a_proof_for_as_long_as_the_engine_lives() -> None:
    """The allocator kept what the prefill needed: the card is fuller than the line, and stays so, and that is well."""
    memory = Memory(0.98)
    memory.planned(PLAN)
    memory.heard(used(0.99))
    memory.answered(3500)
    assert not memory.over
    assert memory.heard(used(0.9905)) is False
    assert (memory.holds_back(3500), memory.holds_back(3501)) == ("", "headroom")
    assert memory.heard(used(0.993)), "more than was proved"
    memory.new_life()
    memory.planned(PLAN)
    assert memory.holds_back(3500) == "headroom"
    assert memory.heard(used(0.985)) is True


@pytest.mark.parametrize("rung", [None, {}, {"plan": None}, {"plan": {"headroom_bytes": 1}, "prefill_chunk_tokens": 5}, {"plan": []}])
def test_a_rung_without_arithmetic_has_no_plan(rung: object) -> None:
    """Other engines, other versions."""
    assert plan_of(rung) is None


def test_what_applianced_says_is_read() -> None:
    """The last sample of each card; the three numbers of the rung in force."""
    cards = [
        {"address": "a", "total_bytes": TOTAL, "used_bytes": [1, 2]},
        {"address": "b", "total_bytes": TOTAL, "used_bytes": []},
        {"address": "c", "total_bytes": 0, "used_bytes": [3]},
        {"address": "d", "total_bytes": TOTAL, "used_bytes": "3"},
        "e",
    ]
    assert list(cards_of(cards)) == [CardUse("a", 2, TOTAL)]
    assert list(cards_of(None)) == []
    rung = {"prefill_chunk_tokens": 512, "plan": {"headroom_bytes": 7, "activation_peak_bytes": 5}}
    assert plan_of(rung) == PrefillPlan(7, 5, 512)


class Oracle:
    """applianced of another version, or one that is out of its mind: each question gets the next answer."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    async def ask(self, _verb: str, **_: object) -> object:
        """The control socket's client."""
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_whatever_applianced_says_the_gateway_goes_on() -> None:
    """Nothing of it may end the task: the gateway ends with it."""
    doors = Doors(lambda: None)
    doors.publish(Publication(EngineState.SERVING, 1, Endpoint(port=1), None, "serving", None))
    (life,) = doors.lives()
    told: list[object] = []
    answers = [{"generation": 7}, {}, {"generation": 1, "rung": 3, "fused_lengths": 5}, {"cards": 5}, Unreachable("away")]
    memory, oracle = Memory(0.98), Oracle(*answers, {"cards": [3, {"used_bytes": [TOTAL], "total_bytes": TOTAL}]})
    advisor = Advisor(oracle, doors, [Room(memory)], told.append, lambda: None)  # type: ignore[arg-type]
    for _ in range(2):
        await advisor._ask(life, new=True)
    with pytest.raises(Unreachable):
        await advisor._ask(life, new=False)
    await advisor._ask(life, new=False)
    assert told == [None, 5]
    assert memory.over
    doors.stop()
