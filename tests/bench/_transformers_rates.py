"""Hugging Face's `generate` in float32: `_transformers_rates.py MODEL_DIR THREADS`, asked as _asked.py says."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from _asked import answer, fresh_prompts


def load() -> Callable[[int, int, int], float]:
    """transformers, and how long it takes."""
    import torch
    import transformers

    torch.set_num_threads(int(sys.argv[2]))
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()

    def seconds(batch: int, prompt_tokens: int, new_tokens: int) -> float:
        ids = torch.tensor(fresh_prompts(batch, prompt_tokens))
        started_s = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, use_cache=True)
        return time.perf_counter() - started_s

    return seconds


if __name__ == "__main__":
    answer(load)
