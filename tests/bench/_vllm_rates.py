"""Run by vLLM's own Python (see _engine_peers.Vllm): `_vllm_rates.py MODEL_DIR LENGTH_TOKENS SEQUENCES`.

A line of JSON from stdin, `{"batch", "prompt_tokens", "new_tokens"}`, is answered with `{"seconds", "peak_bytes"}`: what generating them
took, and the most memory that this process has had. The end of stdin ends it. Whatever vLLM prints goes to stderr.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def peak_bytes() -> int:
    """Of this process, mapped files counted."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def main() -> None:
    """Answer until nobody asks, or until whoever asked is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
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
    draw = random.Random(1)

    def seconds(batch: int, prompt_tokens: int, new_tokens: int) -> float:
        prompts = [{"prompt_token_ids": draw.choices(range(100, 9000), k=prompt_tokens)} for _ in range(batch)]
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        started_s = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        taken_s = time.perf_counter() - started_s
        assert [len(one.outputs[0].token_ids) for one in outputs] == [new_tokens] * batch
        return taken_s

    seconds(sequences, length_tokens // 2, 4)  # what a first call sets up is set up
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": seconds(**json.loads(line)), "peak_bytes": peak_bytes()}), file=answers, flush=True)


if __name__ == "__main__":
    main()
