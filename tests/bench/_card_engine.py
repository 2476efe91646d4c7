"""The whole engine on a card beside the CPU's, for gpu_kernels.py: in float32, so that the texts are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
ENGINE_DEADLINE_S = 120.0


def engine_trouble(model: Path, way: str, *damage: str) -> str:
    """What the card's path does otherwise than the CPU's; empty: nothing."""
    command = [sys.executable, str(ROOT / "tests/engine/card_path.py"), str(model), way, *damage]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=ENGINE_DEADLINE_S)
    except subprocess.TimeoutExpired:
        return f"it did not end within {ENGINE_DEADLINE_S:g} s"
    if ran.returncode:
        return ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    texts = {side: [answer["token_ids"] for answer in told[side]["answers"]] for side in ("host", "card")}
    refused = told["card"]["violations"]
    return "" if texts["host"] == texts["card"] and bool(refused) == bool(damage) else f"{texts}, {refused} accesses refused"


def engine(way: str) -> bool:
    """The engine's path for cards beside the CPU's, on tiny random models: the same tokens. `way`: as card_path.py takes it."""
    import transformers

    from tests.engine.test_tiny_models import GEMMA, SIZES, save_checkpoint

    good = True
    for name, config in (("llama", transformers.LlamaConfig(**SIZES)), ("gemma3", transformers.Gemma3TextConfig(**GEMMA))):
        for damage in ((), ("damaged",)):
            with tempfile.TemporaryDirectory() as folder:
                save_checkpoint(config, Path(folder))
                trouble = engine_trouble(Path(folder), way, *damage)
            good &= not trouble
            what = f"engine, {name}{' with a spoiled table' if damage else ''}"
            print(f"{what}: {f'WRONG: {trouble}' if trouble else 'the same text as on the CPU'}", flush=True)
    return good


def real_model(folder: Path, device: str) -> bool:
    """A model from disk, greedily, in float32, on the CPU and on the card."""
    from appliance.engine.build import load_parts
    from appliance.engine.loop import EngineLoop
    from appliance.engine.messages import GenerateRequest, SamplingParams, TokenOutput
    from appliance.engine.settings import EngineSettings

    said: list[list[list[int]]] = []
    for where in ("cpu", device):
        parts = load_parts(EngineSettings(folder, device=where, weights_dtype="float32"))
        loop = EngineLoop(parts.runner, parts.scheduler, parts.limits, parts.threads, choose_tokens=parts.choose_tokens)
        answers: list[list[int]] = [[] for _ in range(8)]
        draw = torch.Generator().manual_seed(3)
        for index, answer in enumerate(answers):
            prompt = tuple(torch.randint(1, parts.runner.vocab_size, (100 + 7 * index,), generator=draw).tolist())

            def take(output: TokenOutput, answer: list[int] = answer) -> None:
                answer.extend(output.token_ids)

            loop.submit(GenerateRequest(str(index), prompt, SamplingParams(max_new_tokens=32, temperature=0.0)), take)
        started_s = time.monotonic()
        loop.run_until_idle()
        print(f"engine, {folder.name} on {where}: {8 * 32 / (time.monotonic() - started_s):.0f} tokens/s of 8 at once, compiling included")
        said.append(answers)
    good = said[0] == said[1]
    print(f"engine, {folder.name}: {'the same text' if good else f'WRONG: {said}'}", flush=True)
    return good
