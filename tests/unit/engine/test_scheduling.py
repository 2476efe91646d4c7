"""The scheduler and the pool, story by story, against a model of the cache."""

from __future__ import annotations

import pytest

from appliance.engine.block_pool import PoolGeometry, Region
from appliance.engine.sequence import Stage
from tests.unit.engine.model_runner import Engine, make_sequence


def test_a_full_decode_region_preempts_the_youngest() -> None:
    """The oldest keeps going, the youngest computes its answer again later; both get all their tokens."""
    engine = Engine(PoolGeometry(block_tokens=2, prefill_blocks=8, decode_blocks=4), max_running=2, chunk_tokens=64)
    old, young = make_sequence(1, 3, 7), make_sequence(2, 3, 7)
    engine.scheduler.add(old)
    engine.scheduler.add(young)
    while engine.step():
        pass
    assert engine.finished == [old, young]
    assert engine.scheduler.preemptions > 0


def test_who_gave_way_comes_back_with_what_it_had() -> None:
    """Nothing of its answer is computed again: every prefill is of a prompt, and every token is decoded once."""
    engine = Engine(PoolGeometry(block_tokens=2, prefill_blocks=8, decode_blocks=4), max_running=2, chunk_tokens=64, swap_blocks=8)
    old, young = make_sequence(1, 3, 7), make_sequence(2, 3, 7)
    for sequence in (old, young):
        engine.scheduler.add(sequence)
    computed = 0
    while list(engine.scheduler):
        computed += sum(chunk.count for chunk in engine.scheduler.plan_prefill())
        engine.step()
    assert engine.finished == [old, young]
    assert engine.scheduler.swaps == engine.scheduler.preemptions > 0
    assert computed == old.prompt_tokens + young.prompt_tokens


def test_who_finds_no_room_to_be_set_aside_is_computed_again() -> None:
    """As without any."""
    engine = Engine(PoolGeometry(block_tokens=2, prefill_blocks=8, decode_blocks=4), max_running=2, chunk_tokens=64, swap_blocks=1)
    for arrival in (1, 2):
        engine.scheduler.add(make_sequence(arrival, 3, 7))
    while engine.step():
        pass
    assert len(engine.finished) == 2
    assert engine.scheduler.preemptions > engine.scheduler.swaps == 0


@pytest.mark.parametrize("leaves", ["removed", "disowned"])
def test_what_was_set_aside_for_somebody_who_leaves_is_let_go(leaves: str) -> None:
    """Its room is for others; nobody would ever ask for it again."""
    engine = Engine(PoolGeometry(block_tokens=2, prefill_blocks=8, decode_blocks=4), max_running=2, chunk_tokens=64, swap_blocks=8)
    old, young = make_sequence(1, 3, 7), make_sequence(2, 3, 7)
    for sequence in (old, young):
        engine.scheduler.add(sequence)
    while not young.saved_blocks:
        engine.step()
    assert young.arrival in engine.saved
    if leaves == "removed":
        engine.scheduler.remove(young)
    else:
        engine.scheduler.disown([young])
    assert (engine.saved, young.saved_blocks) == ({}, 0)
    while engine.step():
        pass
    assert engine.finished == [old]
    assert engine.pool.used_blocks == 0


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    """No part of a prompt is admitted; the next in line does not overtake it."""
    engine = Engine(PoolGeometry(block_tokens=2, prefill_blocks=4, decode_blocks=8), max_running=4, chunk_tokens=64)
    first, big, small = make_sequence(1, 6, 3), make_sequence(2, 8, 1), make_sequence(3, 1, 1)
    for sequence in (first, big, small):
        engine.scheduler.add(sequence)
    engine.step()
    assert (engine.scheduler.running, engine.scheduler.waiting) == (1, 2)
    assert big.stage is Stage.WAITING
    assert big.blocks == []
    while engine.step():
        pass
    assert engine.finished == [first, big, small]


def test_an_answer_begun_in_an_earlier_life_lies_where_it_lay() -> None:
    """The prompt is computed first and sealed, then the answer's tokens in the decode region; nothing is chosen twice."""
    engine = Engine(PoolGeometry(block_tokens=4, prefill_blocks=4, decode_blocks=6), max_running=2, chunk_tokens=8)
    begun = make_sequence(1, 14, 12, begun=9)
    engine.scheduler.add(begun)
    (first,) = engine.scheduler.plan_prefill()
    assert (first.start, first.count, first.completes, first.chooses) == (0, 8, False, False)
    engine._apply_moves()
    engine._prefill(first)
    (second,) = engine.scheduler.plan_prefill()
    assert (second.start, second.count, second.completes, second.chooses) == (8, 6, True, False)
    engine._prefill(second)
    assert (begun.stage, engine.scheduler.preemptions) == (Stage.WAITING, 0)
    while engine.step():
        pass
    assert engine.finished == [begun]
    assert begun.answer_tokens == 12
    assert engine.pool.used_blocks == 0


def test_decode_waits_for_one_chunk_at_most() -> None:
    """While a long prompt is prefilled in chunks, who decodes gets a token in every turn."""
    engine = Engine(PoolGeometry(block_tokens=4, prefill_blocks=40, decode_blocks=40), max_running=4, chunk_tokens=8)
    talker, long = make_sequence(1, 4, 50), make_sequence(2, 100, 1)
    engine.scheduler.add(talker)
    engine.step()
    engine.scheduler.add(long)
    turns = 0
    while long.stage is not Stage.FINISHED:
        before = talker.answer_tokens
        engine.step()
        turns += 1
        assert talker.answer_tokens == before + 1
    assert turns == 13  # ceil(100 / 8)


def test_one_step_shares_its_tokens_among_several_prompts() -> None:
    """Short prompts ride together instead of one a step."""
    engine = Engine(PoolGeometry(block_tokens=4, prefill_blocks=40, decode_blocks=40), max_running=4, chunk_tokens=10)
    for arrival, prompt in enumerate((4, 3, 9), 1):
        engine.scheduler.add(make_sequence(arrival, prompt, 2))
    chunks = engine.scheduler.plan_prefill()
    assert [(chunk.start, chunk.count, chunk.completes) for chunk in chunks] == [(0, 4, True), (0, 3, True), (0, 3, False)]


def test_a_prompt_that_was_computed_before_is_not_computed_again() -> None:
    """All its full blocks but the one with the last token are taken; two that share them hold them twice."""
    engine = Engine(PoolGeometry(block_tokens=4, prefill_blocks=12, decode_blocks=8), max_running=4, chunk_tokens=64)
    same = tuple(range(16))
    engine.scheduler.add(make_sequence(1, 16, 2, beginning=same))
    engine.step()
    second, third = make_sequence(2, 16, 2, beginning=same), make_sequence(3, 18, 2, beginning=same)
    engine.scheduler.add(second)
    engine.scheduler.add(third)
    chunks = engine.scheduler.plan_prefill()
    assert [(chunk.start, chunk.count) for chunk in chunks] == [(12, 4), (16, 2)]
    assert second.prompt_blocks[:3] == third.prompt_blocks[:3]
    assert (second.cached_tokens, third.cached_tokens, engine.scheduler.cached_tokens) == (12, 16, 28)


def test_the_next_turn_of_a_conversation_finds_the_answer() -> None:
    """Prompt and answer so far, promoted when the answer was finished: only what is new is computed."""
    engine = Engine(PoolGeometry(block_tokens=4, prefill_blocks=12, decode_blocks=8), max_running=4, chunk_tokens=64)
    first = make_sequence(1, 6, 11)
    engine.scheduler.add(first)
    while engine.step():
        pass
    assert engine.pool.used_blocks == 0
    second = make_sequence(2, 20, 1, beginning=tuple(first.token_ids))
    engine.scheduler.add(second)
    (chunk,) = engine.scheduler.plan_prefill()
    assert (chunk.start, chunk.count) == (16, 4)  # 16 of 17 tokens: the last one was never an input


def test_what_is_only_kept_gives_way_the_oldest_first() -> None:
    """A prompt that needs all the room gets it; of two beginnings the one that was used last survives a smaller need."""
    engine = Engine(PoolGeometry(block_tokens=4, prefill_blocks=6, decode_blocks=8), max_running=4, chunk_tokens=64)
    old, new = tuple(range(100, 109)), tuple(range(200, 209))
    for arrival, beginning in enumerate((old, new, old), 1):
        engine.scheduler.add(make_sequence(arrival, 9, 1, beginning=beginning))
        while engine.step():
            pass
    assert engine.pool.kept_blocks == 4
    engine.scheduler.add(make_sequence(4, 12, 1))
    while engine.step():
        pass
    engine.scheduler.add(again := make_sequence(5, 9, 1, beginning=old))
    engine.scheduler.plan_prefill()
    assert again.cached_tokens == 8
    engine.scheduler.remove(again)
    engine.scheduler.add(whole := make_sequence(6, 24, 1))
    assert [chunk.count for chunk in engine.scheduler.plan_prefill()] == [24]
    assert whole.cached_tokens == 0
    assert engine.scheduler.cache.evictions >= 5


def test_an_answer_that_waits_to_be_promoted_gives_way_to_one_that_is_written() -> None:
    """Nobody is preempted, and nobody waits, for blocks that are held for a next turn that may never come."""
    engine = Engine(PoolGeometry(block_tokens=2, prefill_blocks=8, decode_blocks=6), max_running=2, chunk_tokens=64)
    engine._promote = lambda: None  # type: ignore[method-assign]
    engine.scheduler.add(make_sequence(1, 2, 10))
    while engine.step():
        pass
    assert engine.pool.free_blocks(Region.DECODE) == 2
    engine.scheduler.add(make_sequence(2, 2, 12))
    while engine.step():
        pass
    assert len(engine.finished) == 2
    assert engine.scheduler.preemptions == 0
