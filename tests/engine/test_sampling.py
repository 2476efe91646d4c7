"""How the next token is chosen in the running engine: penalties, biases, log probabilities, what may be said at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from appliance.engine.messages import ConstraintFailed, FinishReason, GenerateRequest, Likelihood, SamplingParams, TokenOutput
from tests.engine.driver import GREEDY, Answer, Driver, differences
from tests.engine.test_tiny_models import SIZES, prompt, save_checkpoint

HOT = SamplingParams(max_new_tokens=30, temperature=1.2, seed=5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few kilobytes."""
    return save_checkpoint(transformers.LlamaConfig(**SIZES), tmp_path_factory.mktemp("tiny") / "tiny-llama")


class Only:
    """A constraint: these tokens in turn, each from a set; fails, or has nothing to offer, where a test wants it."""

    def __init__(self, sets: list[set[int]]) -> None:
        self.sets = sets
        self.taken: list[int] = []

    def allowed(self) -> bytes:
        allowed = self.sets[len(self.taken)]
        if -1 in allowed:
            raise ConstraintFailed("the grammar is too much")
        return bytes(token in allowed for token in range(331))

    def take(self, token_id: int) -> None:
        self.taken.append(token_id)

    @property
    def complete(self) -> bool:
        return len(self.taken) == len(self.sets)


def ask(driver: Driver, name: str, sampling: SamplingParams, only: Only | None = None) -> tuple[Answer, list[Likelihood]]:
    """One request to its end."""
    answer, likelihoods = Answer(), []
    driver.answers[name] = answer

    def take(output: TokenOutput) -> None:
        answer.take(output)
        likelihoods.extend(output.likelihoods)

    driver.loop.submit(GenerateRequest(name, tuple(prompt(20)), sampling, constraint=only), take)
    driver.loop.run_until_idle()
    return answer, likelihoods


@pytest.mark.parametrize(
    "changes",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"repetition_penalty": 1.4},
        {"logit_bias": ((3, 8.0), (4, -100.0))},
        {"min_p": 0.2},
        {"repetition_penalty": 1.1, "presence_penalty": -0.5, "min_p": 0.05, "top_k": 40, "top_p": 0.9, "logit_bias": ((9, 2.5),)},
    ],
    ids=lambda changes: "-".join(changes),
)
@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_adjusted_answers_depend_on_their_request_alone(changes: dict[str, object], temperature: float, tiny: Path) -> None:
    """Alone, in a batch with others that are adjusted otherwise, and gone on with after a crash: the same tokens."""
    sampling = replace(HOT, temperature=temperature, **changes)  # type: ignore[arg-type]
    prompts = {f"p{length}": prompt(length, length) for length in (5, 33, 64)}
    alone = Driver(tiny).alone(prompts, sampling)
    together = Driver(tiny)
    answers = {name: together.submit(name, ids, sampling) for name, ids in prompts.items()}
    together.submit("other", prompt(9), replace(HOT, logit_bias=((7, 50.0),)))
    together.loop.run_until_idle()
    assert not differences(alone, answers)
    driver = Driver(tiny)
    after = driver.submit("p33", prompts["p33"], sampling, alone["p33"].token_ids[:11])
    driver.loop.run_until_idle()
    assert alone["p33"].token_ids[11:] == after.token_ids
    plain = Driver(tiny).alone(prompts, replace(HOT, temperature=temperature))
    if temperature or "min_p" not in changes or len(changes) > 1:
        assert any(plain[name].token_ids != alone[name].token_ids for name in prompts), "the adjustment changed nothing"


def test_a_greedy_answer_takes_the_largest_adjusted_logit(tiny: Path) -> None:
    """Recomputed from the recorded logits by the formulas that OpenAI and Hugging Face give."""
    sampling = replace(
        GREEDY, max_new_tokens=25, presence_penalty=0.8, frequency_penalty=0.5, repetition_penalty=1.3, logit_bias=((11, 1.5),)
    )
    answer, _ = ask(Driver(tiny), "a", sampling)
    said: list[int] = []
    for position, token in enumerate(answer.token_ids, 20):
        logits = answer.logits[position].double()
        for seen in {*prompt(20), *said}:
            logits[seen] = logits[seen] / 1.3 if logits[seen] > 0 else logits[seen] * 1.3
        for seen in set(said):
            logits[seen] -= 0.5 * said.count(seen) + 0.8
        logits[11] += 1.5
        assert token == int(logits.argmax())
        said.append(token)


def test_no_stop_token_comes_before_its_time(tiny: Path) -> None:
    """The very same answer, but not ended; after that it may end."""
    free = ask(Driver(tiny), "a", GREEDY)[0].token_ids
    ends = replace(GREEDY, stop_token_ids=frozenset({free[2]}))
    assert ask(Driver(tiny), "b", ends)[0].token_ids == free[:2]
    answer, _ = ask(Driver(tiny), "c", replace(ends, min_new_tokens=6))
    assert answer.token_ids[:2] == free[:2]
    assert len(answer.token_ids) >= 6
    assert free[2] not in answer.token_ids


def test_what_may_only_end_ends_before_its_time(tiny: Path) -> None:
    """A grammar at its end leaves nothing but a stop token: more tokens were asked for than it has."""
    ends = replace(GREEDY, stop_token_ids=frozenset({3}), min_new_tokens=6)
    answer, _ = ask(Driver(tiny), "a", ends, Only([{5}, {6}, {3, 7}, {3}, {1}]))
    assert (answer.finish, answer.token_ids) == (FinishReason.STOP, [5, 6, 7])


def test_likelihoods_are_of_the_model_before_anything_was_adjusted(tiny: Path) -> None:
    """Each token's own and the likeliest ones', against a float64 softmax of the recorded logits."""
    sampling = replace(HOT, logprobs=5, repetition_penalty=1.3, top_k=3)
    answer, likelihoods = ask(Driver(tiny), "a", sampling)
    assert len(likelihoods) == len(answer.token_ids) == 30
    for position, (token, likelihood) in enumerate(zip(answer.token_ids, likelihoods, strict=True), 20):
        logs = torch.log_softmax(answer.logits[position].double(), -1)
        assert likelihood.logprob == pytest.approx(float(logs[token]), abs=1e-9)
        largest = torch.topk(logs, 5)
        assert [one for one, _ in likelihood.top] == largest.indices.tolist()
        assert [value for _, value in likelihood.top] == pytest.approx(largest.values.tolist(), abs=1e-9)
    assert ask(Driver(tiny), "b", replace(sampling, logprobs=None))[0].token_ids == answer.token_ids
    assert all(not one.top for one in ask(Driver(tiny), "c", replace(sampling, logprobs=0))[1])


@pytest.mark.parametrize("temperature", [0.0, 1.2])
def test_a_constraint_is_obeyed_and_its_end_is_the_answer_s(temperature: float, tiny: Path) -> None:
    """Only allowed tokens, in the model's order of liking; nothing after the end; with penalties beside it."""
    sets = [{5, 6, 7}, {300}, {330, 0}, {8, 9}]
    only = Only(sets)
    answer, _ = ask(Driver(tiny), "a", replace(HOT, temperature=temperature, repetition_penalty=1.2), only)
    assert answer.finish is FinishReason.STOP
    assert len(answer.token_ids) == 4
    assert all(token in allowed for token, allowed in zip(answer.token_ids, sets, strict=True))
    assert only.taken == answer.token_ids


@pytest.mark.parametrize(("last", "words"), [({-1}, "the grammar is too much"), (set(), "leaves no token to choose")])
def test_a_constraint_that_fails_ends_its_own_request(last: set[int], words: str, tiny: Path) -> None:
    """With its reason; who sits beside it does not notice."""
    clean = Driver(tiny).run({"good": prompt(9)})
    driver = Driver(tiny)
    good = driver.submit("good", prompt(9))
    answer, _ = ask(driver, "a", HOT, Only([{5}, {6}, last]))
    assert (answer.finish, answer.token_ids) == (FinishReason.ERROR, [5, 6])
    assert words in (answer.error or "")
    assert answer.hopeless
    assert not differences(clean, {"good": good})
