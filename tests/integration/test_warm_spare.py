"""The real engine with the demo model, killed under a stream: its spare is the next engine, and the client sees one answer."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import openai
import psutil
import pytest

pytestmark = pytest.mark.model

QUESTION = [{"role": "user", "content": "List the numbers from one to thirty in words, one per line."}]
MIB = 1024**2


def private_bytes(pid: int) -> int:
    """What the end of the process would give back."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def test_a_stream_goes_on_in_the_process_that_was_the_spare(foreground, demo_model: Path) -> None:
    """The text of an undisturbed answer, from one stream; no engine was started; the pair costs the weights once."""
    run = foreground("--model", str(demo_model), "--port", "0")
    model, url = run.wait_until_serving()

    def sensor() -> str:
        return run.status()["sensors"]["warm_spare"]["detail"]

    run.wait_until(lambda: sensor().startswith("ready since"), "the spare is ready")
    (spare,) = (pid for pid, command in run.descendants().items() if "--spare" in command)
    engine = run.engine_pid
    assert private_bytes(spare) < 260 * MIB, "the weights (513 MiB) are the page cache's"
    assert not [c for c in psutil.Process(spare).net_connections("unix") if c.laddr], "it listens nowhere"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        asked = {"model": model, "messages": QUESTION, "temperature": 0, "max_tokens": 64}
        undisturbed = client.chat.completions.create(**asked)
        text = ""
        for count, chunk in enumerate(client.chat.completions.create(**asked, stream=True)):
            text += chunk.choices[0].delta.content or ""
            if count == 12:
                os.kill(engine, signal.SIGKILL)
    assert text == undisturbed.choices[0].message.content
    status = run.status()
    assert status["engine_pid"] == spare
    assert status["generation"] == 2
    assert not psutil.pid_exists(engine)
    run.wait_until(lambda: sensor().startswith("ready since") and str(spare) not in sensor(), "the next spare")
    assert run.stop() == 0
