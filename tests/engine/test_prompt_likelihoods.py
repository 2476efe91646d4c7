"""How likely a prompt's own tokens were, from the running engine: against transformers, and the same whatever else runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from appliance.engine.messages import FinishReason, GenerateRequest, Likelihood, TokenOutput
from tests.engine.driver import GREEDY, Answer, Driver
from tests.engine.oracle import Oracle
from tests.engine.test_tiny_models import SIZES, prompt, save_checkpoint

JUDGED = replace(GREEDY, max_new_tokens=3, logprobs=2, prompt_logprobs=3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few kilobytes."""
    return save_checkpoint(transformers.LlamaConfig(**SIZES), tmp_path_factory.mktemp("tiny") / "tiny-llama")


def submit(driver: Driver, name: str, ids: list[int], sampling: object = JUDGED) -> list[TokenOutput]:
    """One request; its outputs, once the loop has run."""
    outputs: list[TokenOutput] = []
    driver.answers[name] = Answer()
    driver.loop.submit(GenerateRequest(name, tuple(ids), sampling), outputs.append)  # type: ignore[arg-type]
    return outputs


def judged(outputs: list[TokenOutput]) -> list[Likelihood]:
    """They come with the first output, and only there."""
    assert all(not output.prompt_likelihoods for output in outputs[1:])
    return list(outputs[0].prompt_likelihoods)


def alone(folder: Path, ids: list[int], **settings: object) -> list[Likelihood]:
    driver = Driver(folder, **({"kv_pool_bytes": 8 * 1024**2} | settings))
    outputs = submit(driver, "a", ids)
    driver.loop.run_until_idle()
    return judged(outputs)


@pytest.mark.parametrize("length", [1, 2, 16, 17, 64, 65, 150])
def test_they_are_those_of_transformers(length: int, tiny: Path) -> None:
    """Each token's but the first one's, and the likeliest ones', over chunks and blocks of any size."""
    ids = prompt(length, length)
    found = alone(tiny, ids, prefill_chunk_tokens=40)
    logs = torch.log_softmax(Oracle(tiny).logits(ids).double(), -1)
    assert len(found) == length - 1
    for place, likelihood in enumerate(found):
        assert likelihood.logprob == pytest.approx(float(logs[place, ids[place + 1]]), abs=1e-4)
        assert [logprob for _, logprob in likelihood.top] == pytest.approx(torch.topk(logs[place], 3).values.tolist(), abs=1e-4)
        assert all(logprob == pytest.approx(float(logs[place, token]), abs=1e-4) for token, logprob in likelihood.top)


def test_they_are_the_same_whatever_else_runs_and_was_computed_before(tiny: Path) -> None:
    """To the last bit: alone; beside others; where the prompt lies in the prefix cache; in other chunks; with 8-bit weights too."""
    ids = prompt(150, 3)
    for weights in ("float32", "int8"):
        once = alone(tiny, ids, weights_dtype=weights)
        assert once == alone(tiny, ids, weights_dtype=weights, prefill_chunk_tokens=19)
        driver = Driver(tiny, kv_pool_bytes=8 * 1024**2, weights_dtype=weights)
        for name in ("first", "again"):
            outputs, plain = submit(driver, name, ids), submit(driver, f"{name} beside", ids, replace(JUDGED, prompt_logprobs=None))
            submit(driver, f"{name} other", prompt(70, 9))
            driver.loop.run_until_idle()
            assert judged(outputs) == once
            assert judged(plain) == []
            assert outputs[0].cached_tokens == 0
        assert plain[0].cached_tokens > 0, "nothing was cached: this tests nothing"


def test_a_prefill_that_failed_leaves_none_of_its_own(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out in the middle of a chunk: what is computed again is told once."""
    ids = prompt(150, 3)
    once = alone(tiny, ids)
    from appliance.engine import prompt_likelihoods as module

    real, calls = module.log_shares, []

    def scarce(*arguments: object) -> object:
        calls.append(1)
        if len(calls) == 90:
            raise MemoryError("made up")
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "log_shares", scarce)
    assert alone(tiny, ids) == once
    assert len(calls) > len(ids)


def test_an_answer_of_nothing_has_them_too(tiny: Path) -> None:
    """The very first token ends it."""
    ids = prompt(20, 1)
    driver = Driver(tiny, kv_pool_bytes=8 * 1024**2)
    first = driver.run({"free": ids}, replace(GREEDY, max_new_tokens=1))["free"].token_ids[0]
    outputs = submit(driver, "a", ids, replace(JUDGED, stop_token_ids=frozenset({first})))
    driver.loop.run_until_idle()
    assert [output.finish for output in outputs] == [FinishReason.STOP]
    assert len(judged(outputs)) == 19
