"""Ways in which SGLang and vLLM fail that the others do not have, on their doubles."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.control import client as control
from tests.integration.conftest import Foreground, wait_until
from tests.integration.engines import Engine, double
from tests.integration.test_engines import Appliance, Json

pytestmark = pytest.mark.timeout(180)

Make = Callable[..., Appliance]


@pytest.fixture
def make(state_dir: Path) -> Iterator[Callable[[Engine], Appliance]]:
    """An appliance that serves; nothing of it is left."""
    made: list[Appliance] = []

    def start(engine: Engine) -> Appliance:
        made.append(Appliance(engine, state_dir / "s"))
        return made[-1]

    yield start
    for one in made:
        assert one.run.stop() == 0


def incidents(run: Foreground) -> list[Json]:
    """Newest first."""
    found: list[Json] = control.ask((run.state_dir / "run").resolve() / "control.sock", "incidents", limit=10)["incidents"]
    return found


def test_the_articles_crash(make: Make, tmp_path: Path) -> None:
    """One long prompt takes SGLang's last memory in a chunk of 2,048: its client waits, half the chunk serves it, no context is lost."""
    appliance = make(double("sglang", "0.5.17", tmp_path, "DOUBLE_OOM_ABOVE_CHUNK=1024"))
    prompt = [{"role": "user", "content": "word " * 3000}]
    text, done = appliance.stream(messages=prompt, max_tokens=5)
    assert (text, done) == (" t0 t1 t2 t3 t4", True)
    (incident,) = appliance.incidents()
    assert incident["diagnosis"]["cause"] == "cuda_oom_prefill"
    status = appliance.run.status()
    assert status["state"] == "degraded"
    assert (status["rung"]["prefill_chunk_tokens"], status["rung"]["context_length_tokens"]) == (1024, 4096)


def test_the_minute_of_silence_after_a_crash_is_not_waited_for(make: Make, tmp_path: Path) -> None:
    """An owner who wants SGLang's own crash diagnostics has it keep its port for 65 s; its first fatal line ends it all the same."""
    appliance = make(double("sglang", "0.5.17", tmp_path, "SGLANG_PYSPY_DUMP_BEFORE_CRASH=1"))
    began_s = time.monotonic()
    (_, done), incident = appliance.broken_by(lambda: appliance.engine_ask("/fault", {"kind": "illegal"}))
    assert done
    assert incident["diagnosis"]["cause"] == "cuda_illegal_access"
    assert time.monotonic() - began_s < 40


def test_a_front_that_lives_on_without_its_scheduler_is_found(make: Make, tmp_path: Path) -> None:
    """Before 0.5.10 nobody in SGLang notices a scheduler that died by a signal: its counters stand still, and that is a hang."""
    appliance = make(double("sglang", "0.5.9", tmp_path))
    (text, done), incident = appliance.broken_by(lambda: appliance.engine_ask("/fault", {"kind": "kill"}))
    assert (done, text.startswith(" t0 t1 t2")) == (True, True)
    assert "no progress" in incident["diagnosis"]["sentence"]


@pytest.mark.parametrize(
    ("dialect", "version", "fault", "cause"),
    [
        ("sglang", "0.5.17", "pool", "kv_pool_too_small"),
        ("sglang", "0.5.17", "oom", "cuda_oom_startup"),
        ("vllm", "0.32.0", "pool", "kv_pool_too_small"),
        ("vllm", "0.32.0", "oom", "cuda_oom_startup"),
    ],
)
def test_a_start_that_cannot_be_is_given_up_with_its_cause(
    foreground: Callable[..., Foreground], tmp_path: Path, dialect: str, version: str, fault: str, cause: str
) -> None:
    """Other rungs are tried, each with another command line, and then a person is told what was printed."""
    run = foreground(*double(dialect, version, tmp_path, f"DOUBLE_FAIL={fault}").arguments)
    wait_until(lambda: "parked" in run.said and run.status()["state"] == "parked", "parked", 60)
    found = incidents(run)
    assert {incident["diagnosis"]["cause"] for incident in found} == {cause}
    assert len({incident["rung_before"] for incident in found}) > 1
    assert run.stop() == 0
