"""Crashes that have a length in common: a real applianced judges, a real gateway refuses, the engine's HTTP side counts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.fakes.model_folder import byte_level_folder
from tests.fakes.scripted_appliance import ROOT, Answer, GatewayProcess, gateway
from tests.integration.supervisor.harness import Applianced

ASKED_TOKENS = 60


async def asked(running: GatewayProcess, token: int, tokens: int) -> Answer:
    """A prompt of so many tokens."""
    return await running.post({"prompt": [token] * tokens, "max_tokens": 1}, "/v1/completions")


async def metric(running: GatewayProcess, line: str) -> float:
    """The value of a series."""
    page = (await running.ask("GET", "/metrics")).body.decode()
    return next((float(found.split()[-1]) for found in page.splitlines() if found.startswith(f"{line} ")), -1.0)


async def test_the_third_crash_of_a_length_fuses_it(tmp_path: Path, run_dir: Path) -> None:
    """Three bodies, each answered on the next engine, so none is convicted; the fourth is refused with the numbers.

    The next gateway knows it as well, and one whose owner does not want it passes such prompts on.
    """
    model = byte_level_folder(tmp_path / "model")
    (tmp_path / "met").mkdir()
    engine = ["/usr/bin/env", f"PYTHONPATH={ROOT}", sys.executable, str(ROOT / "tests/fakes/serve_scripted.py"), "--socket", "{socket}"]
    engine += ["--model", str(model), "--once", str(tmp_path / "met"), "--poison-length", str(ASKED_TOKENS)]
    environment = {"PYTHONPATH": str(ROOT)}
    applianced = Applianced(tmp_path, settings={"engine.command": json.dumps(engine)}, environment=environment)
    try:
        applianced.wait_state("serving")
        async with gateway(applianced.run_dir) as running:
            await running.until(lambda status: status["standing"] == "open", "open")
            lengths = {(await asked(running, 65, tokens)).json()["usage"]["prompt_tokens"] for tokens in range(10, 50)}
            assert len(lengths) == 40
            for token in (66, 67, 68):
                answer = await asked(running, token, ASKED_TOKENS)
                assert (answer.status, answer.json()["usage"]["prompt_tokens"]) == (200, ASKED_TOKENS), answer.body
            status = await running.until(lambda status: status["fused_lengths"]["learned"], "it is fused")
            refused, beside = await asked(running, 69, ASKED_TOKENS), await asked(running, 69, ASKED_TOKENS + 1)
            fused = await metric(running, "appliance_fused_lengths_learned")
        async with gateway(applianced.run_dir) as running:
            await running.until(lambda status: status["fused_lengths"]["learned"], "the next gateway is told")
        async with gateway(applianced.run_dir, "admission.auto_fuse=false") as running:
            await running.until(lambda status: status["standing"] == "open", "open")
            passed = await asked(running, 66, ASKED_TOKENS)
        incidents = applianced.wait_incident(3)
    finally:
        applianced.stop()
    why = f"3 of 3 crashes of the last day met a prompt of {ASKED_TOKENS} tokens"
    assert (refused.status, refused.error()["code"], beside.status) == (422, "length_fused", 200)
    assert passed.status == 200
    assert why in refused.error()["message"]
    assert f"prompts of exactly {ASKED_TOKENS} tokens are refused, because {why}" in status["sentence"]
    assert status["fused_lengths"]["learned"][0]["tokens"] == ASKED_TOKENS
    assert fused == 1
    assert [incident["inflight"][0]["prompt_tokens"] for incident in incidents] == [ASKED_TOKENS] * 3
