"""SmolLM2-135M-Instruct and Gemma 3 270M against transformers on the same weights, and against themselves to the last bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from appliance.engine.messages import SamplingParams
from tests.engine.driver import GREEDY, Answer, Driver, differences
from tests.engine.oracle import Oracle, relative_error
from tests.engine.prompts import CHATS, PROMPTS, encode

pytestmark = pytest.mark.model

NEW_TOKENS = 64
RELATIVE_LIMIT = 1e-3


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def model(request: pytest.FixtureRequest) -> Path:
    """Each real model in turn."""
    folder: Path = request.getfixturevalue(request.param)
    return folder


@pytest.fixture(scope="module")
def prompts(model: Path) -> dict[str, list[int]]:
    """Twenty, or with the chats for the model that knows them twenty-four."""
    return encode(model, PROMPTS + (CHATS if model.name.endswith("Instruct") else ()))


@pytest.fixture(scope="module")
def batched(model: Path, prompts: dict[str, list[int]]) -> Iterator[dict[str, Answer]]:
    """All prompts at once, eight at a time, greedy."""
    yield Driver(model).run(prompts, replace(GREEDY, max_new_tokens=NEW_TOKENS))


def test_logits_and_greedy_text_agree_with_transformers(model: Path, prompts: dict[str, list[int]], batched: dict[str, Answer]) -> None:
    """At every one of the 64 steps the logits are within 1e-3 and the token is the one that transformers would choose there.

    The judge reads prompt and answer at once: if each token is its choice given all before, its own greedy answer is the same.
    """
    oracle = Oracle(model)
    worst = 0.0
    for name, answer in batched.items():
        prompt = prompts[name]
        assert len(answer.token_ids) == NEW_TOKENS
        judged = oracle.logits(prompt + answer.token_ids)[len(prompt) - 1 : -1]
        assert answer.token_ids == judged.argmax(-1).tolist(), name
        rows = torch.stack([answer.logits[len(prompt) + step] for step in range(NEW_TOKENS)])
        worst = max(worst, relative_error(rows, judged))
    print(f"{model.name}: largest relative error {worst:.1e}")
    assert worst < RELATIVE_LIMIT
    one = "prompt-1"  # and literally, by its own loop with its own cache
    assert batched[one].token_ids == oracle.generate(prompts[one], NEW_TOKENS)


def test_a_long_prompt_agrees_with_transformers(model: Path) -> None:
    """Past Gemma's window of 512, over several tiles and chunks: the logits after 1,000 tokens."""
    ids = encode(model, ("\n".join(PROMPTS[:19]) * 6,))["prompt-0"][:1000]
    assert len(ids) == 1000
    answer = Driver(model).run({"long": ids}, replace(GREEDY, max_new_tokens=4))["long"]
    judged = Oracle(model).logits(ids + answer.token_ids)[len(ids) - 1 : -1]
    assert relative_error(torch.stack([answer.logits[1000 + step] for step in range(4)]), judged) < RELATIVE_LIMIT
    assert answer.token_ids == judged.argmax(-1).tolist()


def test_an_answer_is_the_same_to_the_last_bit_alone_and_in_any_batch(
    model: Path, prompts: dict[str, list[int]], batched: dict[str, Answer]
) -> None:
    """Alone; with odd small chunks; with everybody prefilled and decoded together."""
    some = {name: prompts[name] for name in ("prompt-0", "prompt-9", "prompt-19")}
    sampling = replace(GREEDY, max_new_tokens=12)
    alone = Driver(model).alone(some, sampling)
    for name, answer in alone.items():
        for position, logits in answer.logits.items():
            assert torch.equal(logits, batched[name].logits[position]), f"{name} at {position}"
    assert not differences(alone, Driver(model, prefill_chunk_tokens=19, max_running=3).run(some, sampling))
    assert not differences(alone, Driver(model, prefill_chunk_tokens=1000, max_running=16).run(some, sampling))


def test_an_answer_survives_preemption_and_a_new_life_to_the_last_bit(
    model: Path, prompts: dict[str, list[int]], batched: dict[str, Answer]
) -> None:
    """Blocks taken away and computed again; and prompt plus answer so far prefilled as one prompt, as after a crash."""
    names = list(prompts)[:8]
    # Eight answers of 64 tokens take about 36 blocks of 16 tokens; the decode region here has 25.
    token_bytes = {"SmolLM2-135M-Instruct": 46_080, "gemma-3-270m": 36_864}[model.name]
    tight = Driver(model, kv_pool_bytes=126 * 16 * token_bytes, prefill_fraction=0.8, swap_bytes=0)
    answers = tight.run({name: prompts[name] for name in names}, replace(GREEDY, max_new_tokens=NEW_TOKENS))
    assert tight.loop.stats().preemptions > 0
    assert not differences(answers, {name: batched[name] for name in names})
    for cut in (17, 63):
        revived = {name: prompts[name] + batched[name].token_ids[:cut] for name in names}
        for name, answer in Driver(model).run(revived, replace(GREEDY, max_new_tokens=2)).items():
            for position, logits in answer.logits.items():
                if position in batched[name].logits:
                    assert torch.equal(logits, batched[name].logits[position]), f"{name} revived after {cut} tokens, at {position}"


def test_a_seed_gives_the_same_tokens_whatever_else_runs(model: Path, prompts: dict[str, list[int]]) -> None:
    """Sampled answers, alone and among greedy and other sampled ones; another seed gives others."""
    sampling = SamplingParams(max_new_tokens=20, temperature=0.9, top_p=0.95, top_k=50, seed=1234)
    prompt = prompts["prompt-1"]
    alone = Driver(model).run({"mine": prompt}, sampling)["mine"]
    crowd = Driver(model)
    mine = crowd.submit("mine", prompt, sampling)
    other = crowd.submit("other", prompt, replace(sampling, seed=99))
    for name in ("prompt-3", "prompt-19"):
        crowd.submit(name, prompts[name], replace(GREEDY, max_new_tokens=30))
    crowd.loop.run_until_idle()
    assert mine.token_ids == alone.token_ids
    assert other.token_ids != alone.token_ids
