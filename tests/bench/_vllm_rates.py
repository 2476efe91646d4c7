"""Run by vLLM's own Python (see _engine_peers.Vllm): `_vllm_rates.py MODEL_DIR LENGTH_TOKENS SEQUENCES`, asked as _asked.py says."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from _asked import answer, fresh_prompts


def load() -> Callable[[int, int, int], float]:
    """vLLM, and how long it takes."""
    from vllm import LLM, SamplingParams

    model, length_tokens, sequences = sys.argv[1], *map(int, sys.argv[2:])
    llm = LLM(
        model,
        dtype="float32",
        max_model_len=length_tokens,
        max_num_seqs=sequences,
        kv_cache_memory_bytes=512 * 1024**2,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def seconds(batch: int, prompt_tokens: int, new_tokens: int) -> float:
        prompts = [{"prompt_token_ids": prompt} for prompt in fresh_prompts(batch, prompt_tokens)]
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        started_s = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        taken_s = time.perf_counter() - started_s
        assert [len(one.outputs[0].token_ids) for one in outputs] == [new_tokens] * batch
        return taken_s

    seconds(sequences, length_tokens // 2, 4)  # what a first call sets up is set up
    return seconds


if __name__ == "__main__":
    answer(load)
