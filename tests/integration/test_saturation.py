"""Long honest prefills and a full queue on the real engine: slow is not dead."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path

import openai
import pytest

pytestmark = pytest.mark.model

CLIENTS = 6
WORDS = 225
LONGEST_NAIVE_S = 4.0
"""A probe that wanted a token within so long would have restarted this engine many times."""
SETTINGS = (
    "supervisor.hang_floor_s=2",
    "supervisor.hang_ceiling_s=20",
    "supervisor.probe_interval_s=0.2",
    "engine.prefill_chunk_tokens=64",
)


@pytest.mark.timeout(600)
def test_a_saturated_engine_is_never_taken_for_a_dead_one(foreground: Callable, demo_model: Path) -> None:
    """Six clients with prompts that take longer to read than the hang floor: every one is answered, nothing is restarted."""
    run = foreground("--model", str(demo_model), "--port", "0", *itertools.chain.from_iterable(("--set", setting) for setting in SETTINGS))
    model, url = run.wait_until_serving()
    first_s: list[float] = []
    failures: list[str] = []

    def ask(number: int) -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            began_s = time.monotonic()
            try:
                words = " ".join(f"word{number}x{index % 97}" for index in range(WORDS))
                for _ in client.completions.create(model=model, prompt=words, max_tokens=4, temperature=0, stream=True):
                    first_s.append(time.monotonic() - began_s)
                    break
            except openai.OpenAIError as error:
                failures.append(f"client {number}: {error!r}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    status = run.status()
    print(f"seconds to the first token: {sorted(round(value, 1) for value in first_s)}")
    assert failures == []
    assert len(first_s) == CLIENTS
    assert max(first_s) > LONGEST_NAIVE_S
    assert (status["generation"], status["restarts"], status["last_incident"]) == (1, 0, None)
    assert run.stop() == 0
