"""How fast the built-in engine is here: `python tests/bench/engine.py [MODEL_DIR ...] [--threads N]`.

Prefill and decode rates of 128-token prompts with 128 new tokens, medians of a few runs; the time to the first token of a
conversation's second turn, with and without the prefix cache; and the time from exec to the first token in a fresh process.
Decode counts the tokens of all sequences together.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from appliance.engine.build import load_parts
from appliance.engine.messages import GenerateRequest, SamplingParams, TokenOutput
from appliance.engine.settings import EngineSettings

ROOT = Path(__file__).parents[2]
PROMPT_TOKENS = 128
NEW_TOKENS = 128
RUNS = 3
TURN_TOKENS = 512
"""The first turn's prompt; its answer has an eighth of that, and so has the next question."""
FIRST_TOKEN = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.bench.engine import serve, engine
from appliance.engine.settings import EngineSettings
serve(engine(EngineSettings(Path(sys.argv[2]), threads=int(sys.argv[3]))), batch=1, new_tokens=1)
"""


_FRESH = itertools.count()
"""No prompt begins like one before it."""


def engine(settings: EngineSettings) -> object:
    """An engine that runs in the caller's thread."""
    parts = load_parts(settings)
    from appliance.engine.loop import EngineLoop

    return EngineLoop(parts.runner, parts.scheduler, parts.limits, parts.threads)


def serve(loop: object, batch: int, new_tokens: int, prompt_tokens: int = PROMPT_TOKENS) -> tuple[float, float]:
    """Seconds until every sequence had its first token, and from then to the last."""
    from appliance.engine.loop import EngineLoop

    assert isinstance(loop, EngineLoop)
    waiting = set()
    first_s = 0.0

    def output_of(name: str) -> Callable[[TokenOutput], None]:
        def take(_: TokenOutput) -> None:
            nonlocal first_s
            if name in waiting:
                waiting.discard(name)
                first_s = time.perf_counter()

        return take

    started_s = time.perf_counter()
    for index in range(batch):
        name = f"{index}"
        waiting.add(name)
        prompt = tuple(100 + (next(_FRESH) * 7919 + position * 31) % 9000 for position in range(prompt_tokens))
        loop.submit(GenerateRequest(name, prompt, SamplingParams(new_tokens, temperature=0.0)), output_of(name))
    loop.run_until_idle()
    return first_s - started_s, time.perf_counter() - first_s


def second_turn_s(loop: object, shift: int) -> float:
    """Seconds to the first token of a second turn: the first one's prompt and answer, and a new question."""
    from appliance.engine.loop import EngineLoop

    assert isinstance(loop, EngineLoop)
    tokens = [100 + (shift * 7919 + position * 31) % 9000 for position in range(TURN_TOKENS)]
    for new_tokens in (TURN_TOKENS // 8, 1):
        started_s = time.perf_counter()
        sampling = SamplingParams(new_tokens, temperature=0.0)
        loop.submit(GenerateRequest(f"turn-{new_tokens}", tuple(tokens), sampling), lambda output: tokens.extend(output.token_ids))
        loop.run_until_idle()
        taken_s = time.perf_counter() - started_s
        tokens.extend(200 + (shift + position * 17) % 9000 for position in range(TURN_TOKENS // 8))
    return taken_s


def measure(model: Path, threads: int) -> None:
    """Print one model's figures."""
    loop = engine(EngineSettings(model, threads=threads))
    serve(loop, 8, 4)  # shapes that are seen for the first time are compiled
    print(f"{model.name}, {threads or 'all'} threads, prompts of {PROMPT_TOKENS}, answers of {NEW_TOKENS}, median of {RUNS}")
    for batch in (1, 4, 8):
        prefill_rates, decode_rates = [], []
        for _ in range(RUNS):
            prefill_s, _ = serve(loop, batch, 1)
            _, decode_s = serve(loop, batch, NEW_TOKENS)
            prefill_rates.append(batch * PROMPT_TOKENS / prefill_s)
            decode_rates.append(batch * (NEW_TOKENS - 1) / decode_s)
        prefill, decode = statistics.median(prefill_rates), statistics.median(decode_rates)
        print(f"  batch {batch}: prefill {prefill:6.0f} tok/s  decode {decode:6.1f} tok/s  ({batch * 1e3 / decode:.1f} ms a step)")
    plain = engine(EngineSettings(model, threads=threads, prefix_cache=False))
    turns = [(second_turn_s(plain, shift), second_turn_s(loop, shift)) for shift in range(RUNS)]
    computed_s, cached_s = (statistics.median(column) for column in zip(*turns, strict=True))
    print(
        f"  second turn to first token: {cached_s * 1e3:.0f} ms, without the cache {computed_s * 1e3:.0f} ms ({cached_s / computed_s:.2f}x)"
    )
    times = []
    for _ in range(RUNS):
        started_s = time.perf_counter()
        subprocess.run([sys.executable, "-c", FIRST_TOKEN, str(ROOT), str(model), str(threads)], check=True)
        times.append(time.perf_counter() - started_s)
    print(f"  exec to first token: {statistics.median(times):.2f} s (one prompt of {PROMPT_TOKENS} tokens, without HTTP and tokenizer)")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*", help="model folders (default: the demo model, brought if need be)")
    parser.add_argument("--threads", type=int, default=0)
    arguments = parser.parse_args()
    models = arguments.models
    if not models:
        from appliance.engine.demo import SMOLLM2, bring

        models = [bring(SMOLLM2, ROOT / ".cache" / "models", sys.stderr)]
    for model in models:
        measure(model, arguments.threads)


if __name__ == "__main__":
    main()
