"""The prefix cache and the answers that wait to be promoted: what goes first, what is copied, and that nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Sequence as Several

import pytest

from appliance.engine.block_pool import BlockPool, BlockState, PoolGeometry, Region
from appliance.engine.order import rank
from appliance.engine.prefix_cache import PrefixCache, Promotions, chain
from tests.unit.engine.model_runner import Engine, make_sequence

BLOCK_TOKENS = 4


class Shelf:
    """A pool with room for six blocks of prompts and eight of answers, and its cache."""

    def __init__(self) -> None:
        self.pool = BlockPool(PoolGeometry(BLOCK_TOKENS, 6, 8))
        self.cache = PrefixCache(self.pool)
        self.promotions = Promotions(self.pool, self.cache)

    def keep(self, tokens: Several[int]) -> list[bytes]:
        """As a prompt that was computed and has ended."""
        digests = chain(tokens, BLOCK_TOKENS)
        blocks = self.pool.allocate(Region.PREFILL, len(digests), 1)
        assert blocks is not None
        self.pool.seal(blocks)
        for digest, block in zip(digests, blocks, strict=True):
            self.cache.keep(digest, block)
        self.pool.release(blocks)
        return digests

    def finish(self, arrival: int, prompt: int, answer: int, first_token: int = 0) -> list[bytes]:
        """An answer that has ended; the digests of all full blocks of prompt and answer."""
        sequence = make_sequence(arrival, prompt, answer, beginning=tuple(range(first_token, first_token + prompt)))
        sequence.token_ids += [-arrival * 100 - index for index in range(answer)]
        sequence.digests = chain(sequence.request.prompt_ids, BLOCK_TOKENS)
        sequence.computed_tokens = prompt + answer - 1
        sequence.decode_blocks = self.pool.allocate(Region.DECODE, -(-(prompt % BLOCK_TOKENS + answer) // BLOCK_TOKENS), arrival) or []
        assert sequence.decode_blocks
        digests = chain(sequence.token_ids[: sequence.computed_tokens], BLOCK_TOKENS)
        self.promotions.take(sequence)
        return digests

    def check(self) -> None:
        """The books balance with what the two hold."""
        self.pool.check_integrity([self.promotions.blocks], self.cache.blocks)


def test_the_least_recently_used_goes_first_and_of_one_beginning_its_end() -> None:
    """Without its first block, nothing of a beginning would be found."""
    shelf = Shelf()
    old, new = shelf.keep(range(12)), shelf.keep(range(50, 58))
    assert len(shelf.cache.find(new)) == 2
    assert len(shelf.cache.find(old)) == 3
    going = []
    for _ in range(5):
        shelf.cache.make_room(1)
        (gone,) = [digest for digest in (*old, *new) if digest not in shelf.cache and digest not in going]
        going.append(gone)
        shelf.check()
    assert going == [new[1], new[0], old[2], old[1], old[0]]
    assert shelf.cache.evictions == 5


def test_a_beginning_is_found_as_far_as_it_goes_and_only_from_its_start() -> None:
    """The same tokens behind other ones are something else."""
    shelf = Shelf()
    digests = shelf.keep(range(12))
    assert len(shelf.cache.find([*digests[:2], b"other"])) == 2
    assert shelf.cache.find(chain([9, 9, 9, 9, *range(4, 12)], BLOCK_TOKENS)) == []
    assert chain(range(12), BLOCK_TOKENS, digests[:1]) == digests
    assert len({*chain([1, 2, 3, 4] * 3, BLOCK_TOKENS)}) == 3


def test_what_somebody_holds_is_passed_over_and_stays_known() -> None:
    """By whoever needs room, and by who wants it forgotten."""
    shelf = Shelf()
    digests = shelf.keep(range(12))
    held = shelf.cache.find(digests)[1:2]
    shelf.pool.retain(held)
    shelf.cache.make_room(2)
    assert [digest in shelf.cache for digest in digests] == [False, True, False]
    shelf.cache.forget(digests)
    assert digests[1] in shelf.cache
    assert shelf.pool.state(held[0]) is BlockState.KEPT
    shelf.pool.check_integrity([held], shelf.cache.blocks)
    shelf.pool.release(held)
    shelf.cache.forget(digests)
    assert digests[1] not in shelf.cache
    shelf.check()


def test_what_is_kept_already_is_not_kept_twice() -> None:
    """Two computed the same beginning at the same time: one of the two blocks is free when both have ended."""
    shelf = Shelf()
    first = shelf.keep(range(4))
    (block,) = shelf.cache.find(first)
    assert shelf.keep(range(4)) == first
    assert shelf.cache.find(first) == [block]
    assert shelf.pool.kept_blocks == 1
    shelf.check()


def test_a_prompt_whose_client_left_goes_from_its_end() -> None:
    """Its blocks were kept when they were computed, and nobody came back for them."""
    engine = Engine(PoolGeometry(BLOCK_TOKENS, 6, 8), max_running=2, chunk_tokens=64)
    engine.scheduler.add(left := make_sequence(1, 12, 5))
    engine.step()
    engine.scheduler.remove(left)
    engine.scheduler.cache.make_room(1)
    assert [digest in engine.scheduler.cache for digest in left.digests] == [True, True, False]


def test_the_answer_that_has_waited_longest_gives_way_first() -> None:
    """Its client is the least likely to ask on."""
    shelf = Shelf()
    shelf.keep(range(4))
    shelf.finish(1, 4, 9)
    first, *others = shelf.promotions.blocks
    assert len(others) == 1
    assert shelf.promotions.give_up()
    assert shelf.promotions.blocks == others
    assert shelf.pool.state(first) is BlockState.FREE
    assert shelf.promotions.give_up()
    assert not shelf.promotions.give_up()
    shelf.check()


def test_an_answer_is_copied_behind_what_it_follows_and_only_once() -> None:
    """Four blocks of two equal conversations: two copies; all that waited is released, the copies are kept."""
    shelf = Shelf()
    prompt = shelf.keep(range(4))
    whole = shelf.finish(1, 4, 9)
    assert shelf.finish(1, 4, 9) == whole
    planned = shelf.promotions.plan(None)
    assert [one.block.digest for one in planned] == whole[1:]
    assert planned[0].block.parent == prompt[0]
    assert all(shelf.pool.state(one.target) is BlockState.OPEN for one in planned)
    shelf.promotions.done(planned, written=True)
    assert shelf.cache.find(whole) == [*shelf.cache.find(prompt), *(one.target for one in planned)]
    assert shelf.promotions.blocks == []
    assert shelf.pool.used_blocks == 0
    shelf.check()


def test_an_answer_whose_prompt_is_not_kept_any_more_is_not_copied() -> None:
    """Nobody would find it: it takes no room from what can be found."""
    shelf = Shelf()
    shelf.keep(range(50, 74))
    shelf.finish(1, 4, 9)
    assert shelf.promotions.plan(None) == []
    assert shelf.promotions.blocks == []
    assert shelf.cache.evictions == 0
    shelf.check()


@pytest.mark.parametrize("most", [1, None])
def test_a_copy_that_was_refused_is_not_kept(most: int | None) -> None:
    """What lies in its target is nobody's."""
    shelf = Shelf()
    prompt = shelf.keep(range(4))
    whole = shelf.finish(1, 4, 9)
    planned = shelf.promotions.plan(most)
    assert len(planned) == (most or 2)
    shelf.promotions.done(planned, written=False)
    assert shelf.cache.find(whole) == shelf.cache.find(prompt)
    assert shelf.pool.used_blocks == len(shelf.promotions.blocks)
    shelf.check()


def test_a_conversation_that_goes_on_keeps_its_beginning() -> None:
    """Its answer ended just now: what others left before is given up first."""
    shelf = Shelf()
    prompt = shelf.keep(range(4))
    other = shelf.keep(range(50, 54))
    shelf.finish(1, 4, 2)
    shelf.cache.make_room(1)
    assert (prompt[0] in shelf.cache, other[0] in shelf.cache) == (True, False)


def test_a_prompt_that_finds_its_beginning_but_no_room_holds_nothing() -> None:
    """It looks again in every step: held each time, its beginning would be held for ever."""
    engine = Engine(PoolGeometry(BLOCK_TOKENS, 4, 8), max_running=4, chunk_tokens=64)
    same = tuple(range(8))
    engine.scheduler.add(first := make_sequence(1, 12, 20, beginning=same))
    engine.step()
    engine.scheduler.add(second := make_sequence(2, 16, 2, beginning=same))
    for _ in range(3):
        engine.step()
        assert second.blocks == []
        engine.scheduler.check_integrity()
    while engine.step():
        pass
    assert engine.finished == [first, second]
    assert second.cached_tokens == 8
    engine.scheduler.check_integrity()
    assert engine.pool.used_blocks == 0


def test_a_new_prompt_waits_while_those_who_answer_need_the_last_blocks() -> None:
    """Admitted, it would only make somebody give way: one block for each who runs, and one for it, has to be free."""
    engine = Engine(PoolGeometry(block_tokens=2, prefill_blocks=8, decode_blocks=4), max_running=4, chunk_tokens=64)
    engine.scheduler.add(first := make_sequence(1, 2, 8))
    while len(first.decode_blocks) < 3:
        engine.step()
    engine.scheduler.add(second := make_sequence(2, 2, 2))
    assert engine.pool.free_blocks(Region.DECODE) == 1
    while first.answer_tokens < 8:
        engine.step()
        assert second.blocks == []
    while engine.step():
        pass
    assert engine.finished == [first, second]
    assert engine.scheduler.preemptions == 0


def test_who_gave_way_comes_back_with_a_block_to_spare_for_each_who_runs() -> None:
    """Otherwise it would give way again in the next step: with room for itself alone it waits on."""
    engine = Engine(PoolGeometry(block_tokens=2, prefill_blocks=40, decode_blocks=9), max_running=5, chunk_tokens=64, swap_blocks=99)
    scheduler = engine.scheduler
    for arrival, answer in enumerate((14, 3, 9, 5, 12, 4, 7, 11, 2, 13, 6, 8), 1):
        scheduler.add(make_sequence(arrival, 1 + arrival % 3, answer))
    came, waited = [], []
    while list(scheduler):
        first = min(scheduler._preempted, key=rank, default=None)
        running = scheduler.running
        room = engine.pool.free_blocks(Region.DECODE) + len(scheduler._promotions.blocks) - running
        missing = scheduler._missing_blocks(first) if first is not None else 0
        engine.step()
        if first is not None:
            back = first not in scheduler._preempted
            (came if back else waited).append((room - missing, running))
    assert came
    assert all(spare >= 0 for spare, _ in came)
    assert any(spare < 0 <= spare + running for spare, running in waited), "nobody had room for itself alone: the test shows nothing"
