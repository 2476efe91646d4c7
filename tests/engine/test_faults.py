"""The running engine with its books damaged: nothing is written where it must not be, the victim is computed again, nobody else notices."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from appliance.engine.block_pool import BlockPool, PoolCorrupt, Region
from appliance.engine.kv_cache import CacheCorrupt
from appliance.engine.messages import FinishReason
from appliance.engine.scheduler import Chunk
from appliance.engine.sequence import Sequence
from appliance_kernels.kv_write.reference import Reason, Violation, Violations
from appliance_kernels.refcount.reference import free_blocks
from tests.engine.driver import GREEDY, Driver, differences
from tests.engine.test_tiny_models import SIZES, prompt, save_checkpoint

PROMPTS = {"a": prompt(37, 1), "b": prompt(9, 2), "c": prompt(64, 3)}
SAMPLING = replace(GREEDY, max_new_tokens=30)
REASONS = {"stray": "outside", "sealed": "outside", "foreign": "foreign", "freed": "not_open", "unreadable": "unreadable"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few kilobytes."""
    return save_checkpoint(transformers.LlamaConfig(**SIZES), tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.mark.parametrize("kind", REASONS)
@pytest.mark.parametrize("step", [1, 7])
def test_a_damaged_book_costs_a_pause_and_not_a_bit(kind: str, step: int, tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every answer, the victim's too, has the bits that it has on a sound engine; the log says what was refused and what was done."""
    clean = Driver(tiny, kv_pool_bytes=2 * 1024**2).run(PROMPTS, SAMPLING)
    driver = Driver(tiny, kv_pool_bytes=2 * 1024**2, fault=(kind, step))
    answers = driver.run(PROMPTS, SAMPLING)
    assert not differences(clean, answers)
    assert all(answer.finish is FinishReason.LENGTH for answer in answers.values())
    stats = driver.loop.stats()
    assert stats.block_violations >= 1
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    (line,) = [record.getMessage() for record in caplog.records if "KV access refused" in record.getMessage()]
    assert re.match(rf"KV access refused\. request=a block=\d+ offset=\d+ reason={REASONS[kind]} blocks_corrected=\d+ tokens=\d+: ", line)
    assert not differences(clean, driver.run({name: PROMPTS[name] for name in ("b", "c")}, SAMPLING) | {"a": clean["a"]})


def test_who_does_not_share_the_damage_keeps_its_memory(tiny: Path) -> None:
    """The blocks of the others hold, after the damaged step, what they held before it."""
    driver = Driver(tiny, kv_pool_bytes=2 * 1024**2, fault=("foreign", 5))
    runner = driver.runner._runner
    decode, seen = runner.decode, []

    def watched(sequences: list[Sequence]) -> torch.Tensor:
        others = [block for sequence in sequences[1:] for block in sequence.blocks]
        newest = {(s.decode_blocks[-1], (len(s.token_ids) - 1) % 16) for s in sequences[1:]}
        before = runner._cache.keys(1)[others].clone()
        logits = decode(sequences)
        after = runner._cache.keys(1)[others]
        changed = (before != after).any(-1).any(1).nonzero().tolist()
        seen.append({(others[index], offset) for index, offset in changed} == newest)
        return logits

    runner.decode = watched  # type: ignore[method-assign, assignment]
    driver.run(PROMPTS, SAMPLING)
    assert driver.loop.stats().block_violations == 2  # the write, and the read of the same block
    assert all(seen)
    assert len(seen) > 20


def test_a_write_behind_a_region_is_found_when_nothing_runs(tiny: Path) -> None:
    """Nobody refused it, for no check of ours made it; the guard block says that it happened, and the engine ends."""
    driver = Driver(tiny, kv_pool_bytes=2 * 1024**2, fault=("overrun", 5))
    driver.check_each_step = False
    with pytest.raises(CacheCorrupt, match="between the regions was written, first in the values of layer 2"):
        driver.run(PROMPTS, SAMPLING)


def refused_in_a_prompt(tiny: Path, weights_dtype: str, spoil: Callable[[BlockPool, Chunk], str], caplog: pytest.LogCaptureFixture) -> None:
    """A prompt's table is spoiled once between two of its chunks: the access is refused with the words that `spoil` returns, and every
    answer has the bits that it has on a sound engine."""
    shape = {"kv_pool_bytes": 2 * 1024**2, "prefill_chunk_tokens": 32, "weights_dtype": weights_dtype}
    clean = Driver(tiny, **shape).run(PROMPTS, SAMPLING)
    driver = Driver(tiny, **shape)
    runner, pool = driver.runner._runner, driver.loop._shared.scheduler.pool
    prefill, words = runner.prefill, []

    def damaged(chunks: list[Chunk]) -> torch.Tensor | None:
        for chunk in chunks:
            if chunk.start and not words:
                words.append(spoil(pool, chunk))
        return prefill(chunks)

    runner.prefill = damaged  # type: ignore[method-assign, assignment]
    assert not differences(clean, driver.run(PROMPTS, SAMPLING))
    (line,) = [record.getMessage() for record in caplog.records if "KV access refused" in record.getMessage()]
    assert re.search(words[0], line), line


@pytest.mark.parametrize("weights_dtype", ["float32", "int8"])
def test_a_beginning_that_a_prompt_may_not_read_is_a_pause(weights_dtype: str, tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first block of its table becomes one that nobody holds: what is computed of zeros is thrown away."""

    def spoil(pool: BlockPool, chunk: Chunk) -> str:
        chunk.sequence.prompt_blocks[0] = int(free_blocks(pool.words, *pool.geometry.bounds(Region.PREFILL), 1)[0])
        return rf"request={chunk.sequence.request.request_id} .*reason=unreadable"

    refused_in_a_prompt(tiny, weights_dtype, spoil, caplog)


@pytest.mark.parametrize("weights_dtype", ["float32", "int8"])
def test_a_prompt_is_not_written_into_the_answers_region(weights_dtype: str, tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not even into an open block of its own there: the kernel's region is the prompts'."""

    def spoil(pool: BlockPool, chunk: Chunk) -> str:
        (block,) = pool.allocate(Region.DECODE, 1, chunk.sequence.arrival) or []
        chunk.sequence.prompt_blocks[chunk.start // 16] = block
        return rf" block={block} .*reason=outside"

    refused_in_a_prompt(tiny, weights_dtype, spoil, caplog)


def test_a_block_that_is_lost_is_found_when_nothing_runs(tiny: Path) -> None:
    """Every answer was right, and the books are not: the region, and how many blocks are free, held, and marked as held."""
    driver = Driver(tiny, kv_pool_bytes=2 * 1024**2, fault=("leaked", 5))
    driver.check_each_step = False
    with pytest.raises(PoolCorrupt, match=r"of the decode region do not add up: \d+ free \+ 0 held \+ 0 kept != \d+, 1 marked as held"):
        driver.run(PROMPTS, SAMPLING)


def test_two_books_damaged_in_one_step_are_two_pauses(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What one of them believes to hold says nothing of what the other may give back: both leave before the blocks are counted."""
    clean = Driver(tiny, kv_pool_bytes=2 * 1024**2).run(PROMPTS, SAMPLING)
    driver = Driver(tiny, kv_pool_bytes=2 * 1024**2)
    _damage_two(driver)
    assert not differences(clean, driver.run(PROMPTS, SAMPLING))
    assert caplog.text.count("KV access refused") == 2
    assert driver.loop.stats().kv_blocks_used == 0


def test_more_refusals_than_can_be_told_cost_everybody_a_pause_and_nobody_a_bit(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two block tables are damaged in one step, and there is room to tell of one access: whose the others were, nobody knows."""
    clean = Driver(tiny, kv_pool_bytes=2 * 1024**2).run(PROMPTS, SAMPLING)
    driver = Driver(tiny, kv_pool_bytes=2 * 1024**2)
    driver.runner._runner._violations = Violations(capacity=1)
    _damage_two(driver)
    assert not differences(clean, driver.run(PROMPTS, SAMPLING))
    apart = re.findall(r"KV access refused\. request=(\w) block=(-?\d+) offset=\d+ reason=(\w+)", caplog.text)
    assert len(apart) == 3
    assert sorted(reason for _, _, reason in apart) == ["outside", "untold", "untold"]
    assert driver.loop.stats().kv_blocks_used == 0


def _damage_two(driver: Driver) -> None:
    """The tables of the two oldest, at their sixth decode step."""
    runner = driver.runner._runner
    decode, steps = runner.decode, iter(range(10**6))

    def damaged(sequences: list[Sequence]) -> torch.Tensor:
        if next(steps) == 5:
            for number, sequence in enumerate(sequences[:2]):
                sequence.decode_blocks[-1] = 1_000_000 + number
        return decode(sequences)

    runner.decode = damaged  # type: ignore[method-assign, assignment]


def test_a_second_refusal_on_the_safe_path_gives_the_request_up(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would go round for ever; the client is told, the others go on."""
    driver = Driver(tiny, kv_pool_bytes=2 * 1024**2, fault=("stray", 3))
    beside = driver.runner.beside

    def damaged(pool: object) -> object:
        lane = beside(pool)  # type: ignore[arg-type]
        lane.take_violations = lambda: [Violation(1, 0, 0, Reason.NOT_OPEN)]  # type: ignore[method-assign]
        return lane

    driver.runner.beside = damaged  # type: ignore[method-assign, assignment]
    answers = driver.run(PROMPTS, SAMPLING)
    assert answers["a"].finish is FinishReason.ERROR
    assert "send it again" in (answers["a"].error or "")
    assert "on the safe path, request a is given up" in caplog.text
    assert [len(answers[name].token_ids) for name in "bc"] == [30, 30]


def test_no_memory_for_the_safe_path_fails_that_request_alone(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As any other request that finds no memory."""
    driver = Driver(tiny, kv_pool_bytes=2 * 1024**2, fault=("stray", 3))

    def full(_pool: object) -> object:
        raise OSError(12, "Cannot allocate memory")

    driver.runner.beside = full  # type: ignore[method-assign, assignment]
    answers = driver.run(PROMPTS, SAMPLING)
    assert answers["a"].finish is FinishReason.ERROR
    assert "no memory for the safe path of request a: OSError" in caplog.text
    assert [len(answers[name].token_ids) for name in "bc"] == [30, 30]
    assert driver.loop.stats().kv_blocks_used == 0
