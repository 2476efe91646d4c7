"""The engine's thread: what submitters see."""

from __future__ import annotations

import queue
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from appliance.core.errors import BudgetError
from appliance.engine.build import build_engine, load_parts
from appliance.engine.loop import EngineLoop
from appliance.engine.messages import FinishReason, GenerateRequest, RequestRefused, SamplingParams, TokenOutput
from appliance.engine.scheduler import Chunk
from appliance.engine.settings import EngineSettings
from tests.engine.driver import GREEDY, Driver
from tests.engine.test_tiny_models import SIZES, prompt, save_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few kilobytes."""
    return save_checkpoint(transformers.LlamaConfig(**SIZES), tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture
def engine(tiny: Path) -> EngineLoop:
    """Running, with a pool of about 2,700 tokens."""
    built = build_engine(EngineSettings(tiny, threads=1, kv_pool_bytes=2 * 1024**2, prefill_chunk_tokens=32))
    assert isinstance(built, EngineLoop)
    return built


def collect(outputs: queue.Queue[TokenOutput], deadline_s: float = 30.0) -> tuple[list[int], TokenOutput]:
    """All tokens, and the last output."""
    tokens: list[int] = []
    while True:
        output = outputs.get(timeout=deadline_s)
        tokens += output.token_ids
        if output.finish is not None:
            return tokens, output


def wait_for(condition: Callable[[], bool], deadline_s: float = 30.0) -> None:
    """Until it holds."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "the deadline passed"
        time.sleep(0.005)


def test_requests_of_several_threads_are_served_together(engine: EngineLoop) -> None:
    """Every one gets its own tokens in order, one finish, and all blocks come back."""
    answers: dict[str, list[int]] = {}

    def client(name: str, length: int) -> None:
        outputs: queue.Queue[TokenOutput] = queue.Queue()
        engine.submit(GenerateRequest(name, tuple(prompt(length, 1)), GREEDY), outputs.put)
        answers[name], last = collect(outputs)
        assert last.finish is FinishReason.LENGTH
        assert last.request_id == name

    threads = [threading.Thread(target=client, args=(f"c{i}", 20 + i // 4)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 12
    assert answers["c0"] == answers["c3"] != answers["c4"]
    assert all(len(tokens) == 16 for tokens in answers.values())
    wait_for(lambda: engine.stats().running == 0)
    stats = engine.stats()
    assert (stats.kv_blocks_used, stats.waiting) == (0, 0)
    assert stats.prompt_tokens + stats.cached_tokens == sum(20 + i // 4 for i in range(12))
    assert stats.generated_tokens == 12 * 16
    assert stats.progress > 0
    engine.stop()


def test_limits_come_from_the_model_and_the_pool(engine: EngineLoop, tiny: Path) -> None:
    """512 positions of the model; the pool's regions; the folder's name."""
    limits = engine.limits
    assert (limits.model_id, limits.context_length_tokens, limits.max_running) == ("tiny-llama", 512, 8)
    geometry = engine.stats().kv_blocks_total
    assert limits.kv_tokens == geometry * 16
    assert limits.max_prompt_tokens + limits.max_new_tokens == limits.kv_tokens - 16 + 2
    engine.stop()
    small = load_parts(EngineSettings(tiny, kv_pool_bytes=256 * 1024, model_name="mine"))
    assert small.limits.model_id == "mine"
    assert small.limits.context_length_tokens == small.limits.kv_tokens < 512


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"context_length_tokens": 513}, "513 tokens exceeds the model's own limit of 512"),
        ({"context_length_tokens": 400, "kv_pool_bytes": 256 * 1024}, "400 tokens exceeds the KV pool of 320 tokens"),
        ({"kv_pool_bytes": 20_000}, "holds 1 blocks of 16 tokens"),
    ],
)
def test_impossible_settings_are_refused_with_numbers(tiny: Path, change: dict[str, int], words: str) -> None:
    """Before any weight is loaded."""
    with pytest.raises(BudgetError, match=words):
        load_parts(replace(EngineSettings(tiny), **change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("prompt_tokens", "new_tokens", "words"),
    [
        (500, 13, "500 prompt tokens \\+ 13 new tokens = 513 exceed the context of 512 tokens; at most 12 new tokens fit"),
        (600, 1, "at most 0 new tokens fit this prompt"),
        (0, 5, "this one has 0 and 5"),
        (5, 0, "this one has 5 and 0"),
    ],
)
def test_what_never_fits_is_refused_at_the_door(engine: EngineLoop, prompt_tokens: int, new_tokens: int, words: str) -> None:
    """With both numbers and what would fit."""
    with pytest.raises(RequestRefused, match=words):
        engine.submit(GenerateRequest("x", (1,) * prompt_tokens, SamplingParams(new_tokens)), lambda _: None)
    engine.stop()


@pytest.mark.parametrize("token", [-1, 331, 2**70])
def test_a_token_that_the_model_does_not_have_is_refused(engine: EngineLoop, token: int) -> None:
    """It would be an index out of range, and the end of the engine, in the middle of a step."""
    with pytest.raises(RequestRefused, match=f"token id {token} is outside the model's vocabulary of 331 tokens"):
        engine.submit(GenerateRequest("x", (5, token, 6), GREEDY), lambda _: None)
    engine.stop()


def test_each_region_has_its_own_limit(tiny: Path) -> None:
    """A prompt that fits the context but not the prompts' region, and an answer that fits neither; the largest of both runs."""
    driver = Driver(tiny, kv_pool_bytes=256 * 1024)
    limits = driver.loop.limits
    assert (limits.max_prompt_tokens, limits.kv_tokens) == (192, 320)
    with pytest.raises(RequestRefused, match="193 prompt tokens exceed the 192 that the KV cache keeps for prompts"):
        driver.submit("x", [1] * 193, replace(GREEDY, max_new_tokens=1))
    with pytest.raises(RequestRefused, match="130 new tokens exceed the 128 that the KV cache keeps for the answer"):
        driver.submit("x", [1], replace(GREEDY, max_new_tokens=130))
    for prompt_tokens, new_tokens in ((192, 128), (1, 128), (31, limits.max_new_tokens), (16, 129)):
        answer = driver.run({f"p{prompt_tokens}": prompt(prompt_tokens)}, replace(GREEDY, max_new_tokens=new_tokens))
        assert len(answer[f"p{prompt_tokens}"].token_ids) == new_tokens


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(tiny: Path) -> None:
    """Also when it is the very first."""
    free = Driver(tiny).run({"a": prompt(9)})["a"]
    stop = free.token_ids[4]
    until = free.token_ids.index(stop)
    stopped = Driver(tiny).run({"a": prompt(9)}, replace(GREEDY, stop_token_ids=frozenset({stop})))["a"]
    assert stopped.finish is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[:until]
    first = Driver(tiny).run({"a": prompt(9)}, replace(GREEDY, stop_token_ids=frozenset({free.token_ids[0]})))["a"]
    assert (first.finish, first.token_ids) == (FinishReason.STOP, [])


def test_without_a_seed_answers_differ_with_one_they_do_not(tiny: Path) -> None:
    """And the seed may be any whole number."""
    hot = SamplingParams(max_new_tokens=12, temperature=1.5)
    driver = Driver(tiny)
    assert driver.run({"a": prompt(9)}, hot)["a"].token_ids != driver.run({"b": prompt(9)}, hot)["b"].token_ids
    for seed in (0, -7, 2**80):
        seeded = replace(hot, seed=seed)
        again = [driver.run({f"{name}{seed}": prompt(9)}, seeded)[f"{name}{seed}"].token_ids for name in "cd"]
        assert again[0] == again[1]


def test_an_abort_frees_everything_and_is_confirmed_once(engine: EngineLoop) -> None:
    """In whatever stage; unknown and finished ids are ignored."""
    outputs: queue.Queue[TokenOutput] = queue.Queue()
    engine.submit(GenerateRequest("long", tuple(prompt(30)), replace(GREEDY, max_new_tokens=400)), outputs.put)
    first = outputs.get(timeout=30)
    assert first.finish is None
    engine.abort("long")
    engine.abort("nobody")
    _, last = collect(outputs)
    assert last.finish is FinishReason.ABORT
    engine.abort("long")
    wait_for(lambda: engine.stats().kv_blocks_used == 0)
    engine.submit(GenerateRequest("next", tuple(prompt(3)), GREEDY), outputs.put)
    assert collect(outputs)[1].request_id == "next"
    assert outputs.empty()
    engine.stop()


def test_a_second_request_with_a_living_id_is_turned_away(engine: EngineLoop) -> None:
    """The first one is not disturbed; the id is free again when it has finished."""
    first: queue.Queue[TokenOutput] = queue.Queue()
    second: queue.Queue[TokenOutput] = queue.Queue()
    engine.submit(GenerateRequest("same", tuple(prompt(9)), replace(GREEDY, max_new_tokens=50)), first.put)
    engine.submit(GenerateRequest("same", tuple(prompt(9)), GREEDY), second.put)
    _, turned_away = collect(second)
    assert turned_away.finish is FinishReason.ERROR
    assert "request id same is in use" in (turned_away.error or "")
    assert len(collect(first)[0]) == 50
    engine.submit(GenerateRequest("same", tuple(prompt(9)), GREEDY), second.put)
    assert len(collect(second)[0]) == 16
    engine.stop()


def test_who_is_served_is_seen_during_the_step(tiny: Path) -> None:
    """A step that hangs must look like one: running above zero while progress stands still."""
    driver = Driver(tiny)
    seen = []
    prefill = driver.runner.prefill

    def watched(chunks: list[Chunk]) -> torch.Tensor | None:
        seen.append(driver.loop.stats())
        return prefill(chunks)

    driver.runner.prefill = watched  # type: ignore[method-assign, assignment]
    driver.run({"a": prompt(9), "b": prompt(9)})
    assert (seen[0].running, seen[0].waiting, seen[0].progress) == (2, 0, 0)


def test_next_to_no_temperature_is_greedy(tiny: Path) -> None:
    """Dividing by it would leave nothing but infinities."""
    greedy = Driver(tiny).run({"a": prompt(9)})["a"].token_ids
    for temperature in (1e-6, 1e-300):
        cold = SamplingParams(max_new_tokens=16, temperature=temperature, seed=1)
        assert Driver(tiny).run({"a": prompt(9)}, cold)["a"].token_ids == greedy
    assert Driver(tiny).run({"a": prompt(9)}, replace(cold, temperature=1e-4))["a"].finish is FinishReason.LENGTH


def test_stop_aborts_what_runs_and_refuses_what_comes(engine: EngineLoop) -> None:
    """Nobody is left waiting for an engine that is gone."""
    outputs: queue.Queue[TokenOutput] = queue.Queue()
    engine.submit(GenerateRequest("a", tuple(prompt(30)), replace(GREEDY, max_new_tokens=400)), outputs.put)
    outputs.get(timeout=30)
    engine.stop()
    assert collect(outputs)[1].finish is FinishReason.ABORT
    with pytest.raises(RequestRefused, match="stopping"):
        engine.submit(GenerateRequest("b", (1,), GREEDY), outputs.put)


def test_the_engine_loads_without_transformers(tiny: Path) -> None:
    """It is an oracle for tests, never a part; and torch comes only when the engine is built."""
    code = textwrap.dedent(
        """
        import sys
        from pathlib import Path
        from appliance.engine.build import build_engine
        from appliance.engine.settings import EngineSettings
        assert "torch" not in sys.modules
        build_engine(EngineSettings(Path(sys.argv[1]), kv_pool_bytes=2**21)).stop()
        assert "torch" in sys.modules
        assert "transformers" not in sys.modules
        """
    )
    subprocess.run([sys.executable, "-c", code, str(tiny)], check=True, timeout=60)


def test_an_idle_engine_that_lost_a_block_says_so(tiny: Path) -> None:
    """The books are checked whenever nothing runs: a leak is found before a wrong token."""
    failed: queue.Queue[BaseException] = queue.Queue()
    parts = load_parts(EngineSettings(tiny, threads=1, kv_pool_bytes=2 * 1024**2))
    loop = EngineLoop(parts.runner, parts.scheduler, parts.limits, 1, on_fatal=failed.put)
    parts.scheduler.pool.words[0] = 1
    loop.start()
    assert "do not add up" in str(failed.get(timeout=30))


def test_answers_are_promoted_a_few_blocks_a_step_while_somebody_is_served(tiny: Path) -> None:
    """A copy of all of them would be a pause for who decodes; the rest follows when nothing runs."""
    driver = Driver(tiny, kv_pool_bytes=2 * 1024**2, max_running=8)
    promote, copied = driver.runner.promote, []

    def counted(copies: list[tuple[int, int, int]]) -> bool:
        copied.append((len(copies), len(driver.loop._living)))
        return promote(copies)

    driver.runner.promote = counted  # type: ignore[method-assign, assignment]
    driver.submit("long", prompt(5), replace(GREEDY, max_new_tokens=100))
    for index in range(3):
        driver.submit(f"ends-{index}", prompt(20 + index), replace(GREEDY, max_new_tokens=90))
    driver.loop.run_until_idle()
    during = [count for count, living in copied if living]
    assert sum(during) >= 12
    assert max(during) <= 4


def test_torch_is_left_with_the_threads_that_were_asked_for(tiny: Path) -> None:
    """In the engine's thread, whatever the main thread has."""
    torch.set_num_threads(2)
    seen: queue.Queue[int] = queue.Queue()
    built = build_engine(EngineSettings(tiny, threads=1, kv_pool_bytes=2 * 1024**2))
    built.submit(GenerateRequest("a", (1, 2), replace(GREEDY, max_new_tokens=1)), lambda _: seen.put(torch.get_num_threads()))
    assert seen.get(timeout=30) == 1
    assert isinstance(built, EngineLoop)
    built.stop()
