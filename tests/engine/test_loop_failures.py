"""What fails alone in the engine, and what ends its process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from appliance.engine.messages import FinishReason
from appliance.engine.scheduler import Chunk
from tests.engine.driver import GREEDY, Driver, differences
from tests.engine.test_tiny_models import SIZES, prompt, save_checkpoint

ALLOC_TEXT = (
    "[enforce fail at alloc_cpu.cpp:128] data. DefaultCPUAllocator: can't allocate memory: you tried to allocate 999 bytes."
    " Error code 12 (Cannot allocate memory)"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few kilobytes."""
    return save_checkpoint(transformers.LlamaConfig(**SIZES), tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.mark.parametrize("error", [RuntimeError(ALLOC_TEXT), MemoryError()])
def test_a_failing_prefill_fails_its_request_alone(tiny: Path, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Others in the same pass, and those that decode, get what they would have got; torch's own words are in the log."""
    driver = Driver(tiny)
    clean = Driver(tiny).run({"a": prompt(20), "c": prompt(25)})
    driver.runner.fail_prefill_of["b"] = error
    answers = driver.run({"a": prompt(20), "b": prompt(40), "c": prompt(25)})
    assert answers["b"].finish is FinishReason.ERROR
    assert "tokens 0 to 40 of a prompt of 40 tokens" in (answers["b"].error or "")
    for name in ("a", "c"):
        assert answers[name].token_ids == clean[name].token_ids
    assert driver.loop.stats().kv_blocks_used == 0
    assert str(error) in caplog.text
    assert "only request b is lost" in caplog.text


def test_a_failing_prefill_does_not_touch_an_answer_that_is_computed_again_beside_it(tiny: Path) -> None:
    """Preempted answers come back in the same pass as prompts that fail, and still have every bit that they had alone."""
    prompts = {f"p{length}": prompt(length, length) for length in (5, 21, 37, 50)}
    sampling = replace(GREEDY, max_new_tokens=60)
    alone = Driver(tiny).alone(prompts, sampling)
    driver = Driver(tiny, kv_pool_bytes=384 * 1024, prefill_fraction=0.7, swap_bytes=0)
    together = []

    class Failing(dict[str, Exception]):
        """Every request whose name says so."""

        def __contains__(self, name: object) -> bool:
            return str(name).startswith("fail")

        def __missing__(self, name: str) -> Exception:
            return RuntimeError(ALLOC_TEXT)

    driver.runner.fail_prefill_of = Failing()
    prefill = driver.runner.prefill

    def watched(chunks: list[Chunk]) -> torch.Tensor | None:
        kinds = {(chunk.sequence.answer_tokens > 0, chunk.sequence.request.request_id.startswith("fail")) for chunk in chunks}
        together.append(kinds >= {(True, False), (False, True)})
        return prefill(chunks)

    driver.runner.prefill = watched  # type: ignore[method-assign, assignment]
    answers = {name: driver.submit(name, ids, sampling) for name, ids in prompts.items()}
    for index in range(400):
        driver.submit(f"fail{index}", prompt(3), sampling)
    driver.loop.run_until_idle()
    assert driver.loop.stats().preemptions > 0
    assert any(together), "no pass had both; the test shows nothing"
    assert not differences(alone, answers)


def test_a_model_that_says_nan_loses_that_request_alone(tmp_path: Path) -> None:
    """One token's embedding is NaN: who says it gets an error; who sits beside it, and later in its blocks, does not notice."""
    folder = save_checkpoint(transformers.LlamaConfig(**SIZES), tmp_path)
    clean = Driver(folder).run({"good": prompt(40), "later": prompt(60)})
    driver = Driver(folder)
    decoder = driver.runner._runner._decoder
    decoder._embedding = decoder._embedding.clone()
    decoder._embedding[7] = float("nan")
    good, bad = [token for token in prompt(40) if token != 7], [7, 8, 9]
    assert len(good) == 40, "the prompt must not hold the poisoned token"
    answers = driver.run({"bad": bad, "good": good})
    assert answers["bad"].finish is FinishReason.ERROR
    assert "NaN" in (answers["bad"].error or "")
    later = driver.run({"later": prompt(60)})["later"]
    for name, answer in (("good", answers["good"]), ("later", later)):
        expected = clean[name].token_ids
        until = expected.index(7) + 1 if 7 in expected else len(expected)
        assert answer.token_ids[:until] == expected[:until]


FATAL = """
import sys
from pathlib import Path
from appliance.engine.build import load_parts
from appliance.engine.loop import EngineLoop
from appliance.engine.messages import GenerateRequest, SamplingParams
from appliance.engine.settings import EngineSettings
import logging, threading
logging.basicConfig(stream=sys.stderr)
parts = load_parts(EngineSettings(Path(sys.argv[1]), kv_pool_bytes=2**21))
def decode(sequences):
    raise RuntimeError("the device went away")
parts.runner.decode = decode
loop = EngineLoop(parts.runner, parts.scheduler, parts.limits, 1)
loop.start()
loop.submit(GenerateRequest("a", (1, 2, 3), SamplingParams(5)), lambda output: None)
threading.Event().wait(30)
"""


def test_a_failing_step_ends_the_process_with_its_reason(tiny: Path) -> None:
    """Code 70, one line, the traceback: what the supervisor diagnoses."""
    ended = subprocess.run([sys.executable, "-c", FATAL, str(tiny)], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 70
    assert "Engine loop failed: RuntimeError: the device went away" in ended.stderr
    assert "Traceback" in ended.stderr


HUNGRY = """
import json, resource, sys
from pathlib import Path
from appliance.engine.build import load_parts
from appliance.engine.loop import EngineLoop
from appliance.engine.messages import GenerateRequest, SamplingParams
from appliance.engine.settings import EngineSettings
import logging
logging.basicConfig(stream=sys.stderr)
parts = load_parts(EngineSettings(Path(sys.argv[1]), threads=1, kv_pool_bytes=2**23, prefill_chunk_tokens=4096, weights_dtype=sys.argv[3]))
loop = EngineLoop(parts.runner, parts.scheduler, parts.limits, 1)
got = {"small": [], "huge": []}
last = {}
def take(output):
    got[output.request_id] += output.token_ids
    last[output.request_id] = output.finish and output.finish.value
    if len(got["small"]) == 3 and not got["huge"] and "huge" not in last:
        last["huge"] = None
        used = int(next(l for l in open("/proc/self/status") if l.startswith("VmSize")).split()[1]) * 1024
        resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[2]) * 2**20,) * 2)
        loop.submit(GenerateRequest("huge", (5,) * 3000, SamplingParams(5, temperature=0.0)), take)
loop.submit(GenerateRequest("small", (1, 2, 3), SamplingParams(40, temperature=0.0)), take)
loop.run_until_idle()
print(json.dumps([len(got["small"]), last["small"], len(got["huge"]), last["huge"]]))
"""


@pytest.mark.parametrize(
    ("weights_dtype", "width", "room_mib", "ends"),
    [("float32", 4096, 120, [5, "length"]), ("float32", 65536, 12, [0, "error"]), ("int8", 4096, 90, [5, "length"])],
)
def test_a_prompt_that_really_exhausts_memory_is_computed_in_smaller_chunks_or_fails_alone(
    weights_dtype: str, width: int, room_mib: int, ends: list[object], tmp_path: Path
) -> None:
    """The address space is limited under the running engine; the long prompt's pass needs more; who decodes gets it all."""
    sizes = SIZES | {"intermediate_size": width, "max_position_embeddings": 4096, "num_hidden_layers": 2}
    folder = save_checkpoint(transformers.LlamaConfig(**sizes), tmp_path)
    command = [sys.executable, "-c", HUNGRY, str(folder), str(room_mib), weights_dtype]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == [40, "length", *ends], ended.stderr
    assert "trying 1500 at a time" in ended.stderr
    # oneDNN does not say why it cannot make a kernel; torch's own allocator does.
    assert "can't allocate memory" in ended.stderr or "could not create a primitive" in ended.stderr


def test_a_prefill_that_failed_once_goes_on_in_half_chunks_with_the_same_bits(tiny: Path) -> None:
    """Also for the rest of that prompt; others keep their chunks."""
    clean = Driver(tiny).run({"long": prompt(250)})
    driver = Driver(tiny)
    prefill, lengths = driver.runner._runner.prefill, []

    def hungry(chunks: list[Chunk]) -> torch.Tensor | None:
        lengths.append([chunk.count for chunk in chunks])
        if sum(lengths[-1]) > 70:
            raise RuntimeError(ALLOC_TEXT)
        return prefill(chunks)

    driver.runner._runner.prefill = hungry  # type: ignore[method-assign, assignment]
    assert not differences(clean, driver.run({"long": prompt(250)}))
    assert lengths == [[250], [125], [62], [62], [62], [62], [2]]
