"""llama.cpp for real: too little memory, what its log tells the planner, a message over its death, a file that is none."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.control import client as control
from appliance.core.units import MIB
from appliance.planner.startup_log import measured_terms, read_startup_log
from tests.integration.conftest import Foreground
from tests.integration.engines import llama_server, llamacpp

pytestmark = [pytest.mark.network, pytest.mark.timeout(180)]

Start = Callable[..., Foreground]
STORY = "Tell me a story about a lighthouse."
CONTEXT = ("--set", "engine.context_length_tokens=8192")


def test_under_a_memory_limit_it_serves_a_shorter_context(foreground: Start, state_dir: Path) -> None:
    """A KV cache of 180 MiB and what comes with it do not fit: that is said by its name, and a rung with half of it serves."""
    limited = state_dir / "limited"
    # It takes 515 MiB of addresses with a context of 8,192 and 428 with 4,096.
    limited.write_text(f'#!/bin/sh\nulimit -v 475000\nMALLOC_ARENA_MAX=1 exec {llama_server()} "$@"\n')
    limited.chmod(0o755)
    run = foreground(*llamacpp(limited).arguments, *CONTEXT)
    run.wait_until_serving()
    status = run.status()
    assert status["state"] == "degraded"
    assert status["limits"]["context_length_tokens"] == 4096
    incident = control.ask((run.state_dir / "run").resolve() / "control.sock", "incidents", limit=1)["incidents"][0]
    assert incident["diagnosis"]["cause"] == "host_oom"
    assert "MiB more were refused" in incident["diagnosis"]["sentence"]
    assert run.stop() == 0


def test_its_log_tells_the_planner_what_its_memory_is_made_of(foreground: Start) -> None:
    """Weights, KV cache, compute buffer, context, chunk and sequences, as it printed them; no word of a prompt."""
    run = foreground(*llamacpp().arguments)
    run.wait_until_serving()
    log = read_startup_log("\n".join(re.findall(r"^\S+ engine +(.*)$", run.said, re.MULTILINE)))
    terms = measured_terms(log)
    assert log.engine == "llamacpp"
    assert (log.size("context"), log.size("chunk"), log.size("max_running")) == (2048, 64, 4)
    assert terms.weight_bytes == pytest.approx(92.1 * MIB, rel=0.01)
    assert terms.kv_pool_bytes == 45 * MIB  # 2048 × 30 layers × 3 heads × 64 × (K and V) × 2 bytes
    assert terms.activation_peak_bytes
    assert run.stop() == 0


def test_a_message_of_anthropic_s_outlives_it(foreground: Start) -> None:
    """kill -9 under a stream of /v1/messages: one start and one end, and all the tokens that were asked for."""
    run = foreground(*llamacpp().arguments, "--set", "supervisor.stable_after_s=1")
    model, url = run.wait_until_serving()
    body = {"model": model, "messages": [{"role": "user", "content": STORY}], "max_tokens": 40, "temperature": 0, "stream": True}
    request = urllib.request.Request(f"{url}/v1/messages", json.dumps(body).encode(), {"content-type": "application/json"})
    events: list[dict[str, Any]] = []
    with urllib.request.urlopen(request, timeout=150) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                events.append(json.loads(line[6:]))
                if len(events) == 10:
                    os.kill(run.engine_pid, signal.SIGKILL)
    others = [event["type"] for event in events if event["type"] != "content_block_delta"]
    assert others == ["message_start", "content_block_start", "content_block_stop", "message_delta", "message_stop"]
    assert events[-2]["usage"]["output_tokens"] == 40
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    assert run.status()["generation"] == 2
    assert run.stop() == 0


def test_a_file_that_is_none_is_named_before_anything_starts(foreground: Start, tmp_path: Path) -> None:
    """What `run` says of it ends with what to do."""
    pointer = tmp_path / "model.gguf"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\n")
    run = foreground(
        "--model", str(pointer), "--port", "0", "--set", "engine.backend=llamacpp", "--set", f"engine.program={llama_server()}"
    )
    run.wait_for(r"is no GGUF file: it begins with b'vers'")
    assert run.stop() == 0
