"""What is taken from the prefix cache is what would have been computed, to the last bit of every logit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from tests.engine.driver import GREEDY, Answer, Driver, differences
from tests.engine.test_tiny_models import CASES, SIZES, prompt, save_checkpoint

SAMPLING = replace(GREEDY, max_new_tokens=40)


def conversations(driver: Driver) -> dict[str, Answer]:
    """Three turns of one, then several at once that begin like it, or almost."""
    answers: dict[str, Answer] = {}
    tokens = prompt(50, 1)
    for turn in range(3):
        name = f"turn-{turn}"
        answers |= driver.run({name: tokens}, SAMPLING)
        tokens = tokens + answers[name].token_ids + prompt(11 + turn, 100 + turn)
    almost = [*tokens]
    almost[70] = (almost[70] + 1) % 331
    together = {"same": tokens, "again": tokens, "shorter": tokens[:96], "almost": almost, "other": prompt(90, 5)}
    return answers | driver.run(together, SAMPLING)


@pytest.mark.parametrize(("case", "block_tokens"), [("llama-tied-odd-heads", 5), ("mistral-window", 16), ("gemma3", 16)])
def test_an_answer_from_the_cache_has_the_bits_of_one_that_was_computed(case: str, block_tokens: int, tmp_path: Path) -> None:
    """Turns of a conversation, prompts that share a beginning, roomy and so tight that blocks are evicted and answers preempted."""
    folder = save_checkpoint(CASES[case](), tmp_path)
    shape = {"block_tokens": block_tokens, "kv_pool_bytes": 8 * 1024**2, "prefill_chunk_tokens": 64}
    computed = conversations(Driver(folder, **shape, prefix_cache=False))
    roomy = Driver(folder, **shape)
    cached = conversations(roomy)
    assert not differences(computed, cached)
    assert roomy.loop.stats().cached_tokens > 400
    assert roomy.loop.stats().kv_blocks_used == 0
    assert roomy.loop.stats().block_references == ((0, roomy.loop.stats().kv_blocks_total),)
    assert roomy.loop.stats().decode_launches >= 4 * 39
    assert computed["turn-2"].cached_tokens == 0
    full = (50 + 40 + 11 + 39) // block_tokens * block_tokens
    assert cached["turn-2"].cached_tokens == full
    config = transformers.AutoConfig.from_pretrained(folder)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * dim
    tight = Driver(folder, **(shape | {"kv_pool_bytes": 420 * per_token}), prefill_fraction=0.75, max_running=5)
    assert not differences(computed, conversations(tight))
    assert tight.loop.stats().evictions > 0


def test_what_was_computed_of_numbers_that_are_none_is_not_kept(tmp_path: Path) -> None:
    """A prompt whose logits were NaN is computed anew the next time, and so right when it was chance."""
    folder = save_checkpoint(transformers.LlamaConfig(**SIZES), tmp_path)
    clean = Driver(folder).run({"a": prompt(40)})
    driver = Driver(folder)
    decoder = driver.runner._runner._decoder
    sound = decoder._embedding
    decoder._embedding = sound.clone()
    decoder._embedding[prompt(40)[3]] = float("nan")
    assert "NaN" in (driver.run({"bad": prompt(40)})["bad"].error or "")
    decoder._embedding = sound
    assert not differences(clean, driver.run({"a": prompt(40)}))


def test_a_refused_promotion_is_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The target of a copy is not what it should be: nothing is copied, nothing is found there later."""
    folder = save_checkpoint(transformers.LlamaConfig(**SIZES), tmp_path)
    driver = Driver(folder)
    promote, pool = driver.runner.promote, driver.loop._shared.scheduler.pool

    def damaged(copies: list[tuple[int, int, int]]) -> bool:
        pool.owners[copies[0][1]] = 99
        return promote(copies)

    driver.runner.promote = damaged  # type: ignore[method-assign, assignment]
    first = driver.run({"a": prompt(40)}, SAMPLING)["a"]
    assert "KV access refused for a sequence that has ended" in caplog.text
    assert driver.loop.stats().block_violations == 1
    second = prompt(40) + first.token_ids + prompt(5)
    assert driver.run({"b": second})["b"].cached_tokens == 32
    assert driver.loop.stats().kv_blocks_used == 0
