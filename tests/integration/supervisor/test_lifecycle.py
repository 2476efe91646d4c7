"""Starts, stops, parks, reloads and deaths of applianced itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from appliance.control.client import subscribe
from appliance.core.errors import ControlError, Unreachable
from appliance.core.publication import Publication
from appliance.core.states import EngineState
from tests.integration.supervisor.harness import ROOT, Applianced, is_alive, wait_for

Start = Callable[..., Applianced]


def test_it_starts_and_serves(applianced: Start) -> None:
    """The status has every field that docs/structures.md promises, and the engine's limits are the engine's own."""
    one = applianced("--context-length", "2048")
    status = one.wait_state("serving")
    promised = {"state", "generation", "sentence", "engine", "model", "rung", "limits", "restarts", "last_incident", "uptime_s", "sensors"}
    assert promised <= set(status)
    assert status["limits"]["context_length_tokens"] == 2048
    assert status["sensors"]["kernel_log"]["ok"] is False
    assert "CPU" in one.log.read_text()


def test_failed_starts_park_and_resume_tries_again(applianced: Start, tmp_path: Path) -> None:
    """Three failed starts: PARKED with the reason, alive, the hook told; what was wrong is mended, resume serves."""
    told = tmp_path / "told"
    hook = json.dumps([sys.executable, "-c", f"import sys; open({str(told)!r}, 'w').write(sys.argv[1])"])
    one = applianced(
        "--fail-start",
        "RuntimeError: it cannot be",
        "--fail-starts",
        "3",
        "--count-in",
        str(tmp_path),
        settings={"supervisor.on_park": hook},
    )
    parked = one.wait_state("parked")
    assert parked["generation"] == 3
    assert "3 failed starts" in parked["sentence"]
    assert {incident["phase"] for incident in one.wait_incident(3)} == {"start"}
    wait_for(lambda: told.exists() and told.read_text() == parked["sentence"], "the hook has the sentence")
    one.ask("resume")
    assert one.wait_state("serving", "degraded")["generation"] == 4
    with pytest.raises(ControlError, match="cannot be resumed now"):
        one.ask("resume")


def test_an_engine_that_never_gets_ready_fails_its_start(applianced: Start) -> None:
    """Neither ready nor dead: the start deadline ends it."""
    one = applianced("--ready-after-s", "600", settings={"supervisor.start_deadline_s": "1", "supervisor.start_failures_max": "1"})
    assert "failed start" in one.wait_state("parked")["sentence"]
    assert "within 1 s" in one.log.read_text()


def test_a_port_in_use_is_waited_for(applianced: Start, tmp_path: Path) -> None:
    """Somebody has the engine's address: port_in_use, not blamed on the rung, served when it is free again."""
    text = "[Errno 98] error while attempting to bind on address ('127.0.0.1', 30000): address already in use"
    one = applianced("--fail-start", text, "--fail-starts", "1", "--count-in", str(tmp_path))
    status = one.wait_state("serving")
    (incident,) = one.wait_incident()
    assert incident["diagnosis"]["cause"] == "port_in_use"
    assert incident["action"]["kind"] == "wait"
    assert (status["generation"], status["rung"]["index"]) == (2, 0)


def test_a_command_that_does_not_exist(applianced: Start) -> None:
    """exec fails: parked with the name of the program, and applianced stays up."""
    one = applianced(settings={"engine.command": json.dumps(["/no/such/engine", "{socket}"])})
    one.wait_state("parked")
    texts = [item["text"] for item in one.ask("incident")["incident"]["evidence"]]
    assert any("/no/such/engine" in text for text in texts)


def test_a_missing_model_parks_at_once(applianced: Start) -> None:
    """The built-in engine without its model folder: no start is tried, the sentence names path and cure."""
    one = applianced(settings={"engine.backend": "native", "engine.command": "[]", "model.path": "/no/such/model"})
    parked = one.wait_state("parked")
    assert "/no/such/model" in parked["sentence"]
    assert "setup --demo" in parked["sentence"]
    assert parked["last_incident"]["diagnosis"]["cause"] == "model_missing"


def test_restart_lets_running_answers_finish(applianced: Start) -> None:
    """`appliancectl restart`: the answer under way is whole, the next life is another process, and no incident is made of it."""
    one = applianced("--step-s", "0.05")
    before = one.wait_state("serving")
    answers = []
    asking = threading.Thread(target=lambda: answers.append(one.engine("/generate", {"sampling_params": {"max_new_tokens": 20}})))
    asking.start()
    wait_for(lambda: one.engine("/health")["running"] == 1, "the request runs")
    one.ask("restart", reason="test")
    after = one.wait_state("serving", above=1)
    asking.join(10)
    assert answers[0]["text"].endswith(" t19")
    assert after["engine_pid"] != before["engine_pid"]
    assert one.ask("incidents")["incidents"] == []


def test_drain_parks_and_resume_serves(applianced: Start) -> None:
    """`drain` ends with no engine and a sentence; a second drain is refused; `resume` starts the next life."""
    one = applianced()
    before = one.wait_state("serving")
    one.ask("drain", reason="new card\n\x1b[2Jall is well")
    parked = one.wait_state("parked")
    assert "new card\\n\\x1b[2Jall is well" in parked["sentence"], "a reason is one line, and moves no cursor"
    assert not is_alive(before["engine_pid"])
    with pytest.raises(ControlError):
        one.ask("drain")
    one.ask("resume")
    assert one.wait_state("serving")["generation"] == 2


def test_sigterm_drains_and_exits_zero(applianced: Start) -> None:
    """The answer under way is finished, the engine is gone, the exit code is 0, and nothing is left in the run directory."""
    one = applianced("--step-s", "0.05")
    before = one.wait_state("serving")
    answers = []
    asking = threading.Thread(target=lambda: answers.append(one.engine("/generate", {"sampling_params": {"max_new_tokens": 20}})))
    asking.start()
    wait_for(lambda: one.engine("/health")["running"] == 1, "the request runs")
    assert one.stop() == 0
    asking.join(10)
    assert answers[0]["text"].endswith(" t19")
    assert not is_alive(before["engine_pid"])
    assert not list(one.run_dir.glob("*.sock"))


def test_second_sigterm_is_now(applianced: Start) -> None:
    """An answer that would take minutes is not waited for any more."""
    one = applianced("--step-s", "0.05", "--ignore-term", settings={"gateway.drain_s": "600"})
    before = one.wait_state("serving")
    threading.Thread(target=lambda: _abandon(one), daemon=True).start()
    wait_for(lambda: one.engine("/health")["running"] == 1, "the request runs")
    one.process.terminate()
    one.wait_state("draining")
    began_s = time.monotonic()
    assert one.stop() == 0
    assert time.monotonic() - began_s < 5
    assert not is_alive(before["engine_pid"])


def test_an_engine_that_ignores_sigterm_is_killed(applianced: Start) -> None:
    """supervisor.stop_deadline_s after SIGTERM."""
    one = applianced("--ignore-term", settings={"supervisor.stop_deadline_s": "0.5"})
    before = one.wait_state("serving")
    assert one.stop() == 0
    assert not is_alive(before["engine_pid"])


def test_kill_nine_of_applianced_takes_the_engine_along(applianced: Start) -> None:
    """No engine without its supervisor; the next applianced takes over folders and counts on: the generation never goes back."""
    one = applianced()
    before = one.wait_state("serving")
    os.kill(before["engine_pid"], signal.SIGSEGV)
    second = one.wait_state("serving", above=1)
    one.process.kill()
    one.process.wait()
    wait_for(lambda: not is_alive(second["engine_pid"]), "the engine is gone", deadline_s=5)
    one.start()
    third = one.wait_state("serving")
    assert third["generation"] == 3
    causes = [incident["diagnosis"]["cause"] for incident in one.wait_incident(2)]
    assert causes == ["supervisor_died", "segfault_native"]


def test_the_rung_survives_a_restart_of_applianced(applianced: Start, tmp_path: Path) -> None:
    """Out of memory at the start moves the rung; after kill -9 of applianced it is still there."""
    text = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.56 GiB"
    one = applianced("--fail-start", text, "--fail-starts", "1", "--count-in", str(tmp_path))
    status = one.wait_state("degraded")
    assert status["rung"]["index"] == 1
    assert "safer than configured" in status["sentence"]
    one.process.kill()
    one.process.wait()
    one.start()
    assert one.wait_state("degraded")["rung"]["index"] == 1
    with pytest.raises(ControlError, match="none of 0 to"):
        one.ask("restart", rung=99)
    one.ask("restart", rung=0)
    assert one.wait_state("serving")["rung"]["index"] == 0


def test_two_on_one_run_directory(applianced: Start) -> None:
    """The second refuses and names the first; the first goes on."""
    one = applianced()
    one.wait_state("serving")
    argv = [sys.executable, "-m", "appliance.supervisor", "--config", str(one.folder / "appliance.toml")]
    argv += ["--run-dir", str(one.run_dir), "--state-dir", str(one.state_dir)]
    second = subprocess.run(argv, capture_output=True, text=True, timeout=20, cwd=ROOT)
    assert second.returncode == 1
    assert f"pid {one.process.pid}" in second.stderr
    assert one.status()["state"] == "serving"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "engine.bakend=native"], ("engine.bakend", "engine.backend")),
        (["--set", "supervisor.backoff_max_s=2h"], ("supervisor.backoff_max_s", "maximum")),
        (["--config", "/no/such.toml"], ("/no/such.toml",)),
        (["--set", "engine.backend=custom"], ("engine.command",)),
    ],
)
def test_a_wrong_configuration_is_exit_78(tmp_path: Path, arguments: list[str], words: tuple[str, ...]) -> None:
    """systemd does not try it again and again (RestartPreventExitStatus=78), and the message names the key."""
    argv = [sys.executable, "-m", "appliance.supervisor", "--run-dir", str(tmp_path), "--state-dir", str(tmp_path), *arguments]
    run = subprocess.run(argv, capture_output=True, text=True, timeout=20, cwd=ROOT)
    assert run.returncode == 78
    for word in words:
        assert word in run.stderr


def test_sighup_reloads_what_can_be_reloaded(applianced: Start) -> None:
    """Numbers of the supervisor count at once, the engine's with the next engine, a broken file changes nothing; all are said."""
    one = applianced()
    before = one.wait_state("serving")
    (one.folder / "appliance.toml").write_text("[ladder]\nclimb_after_s = 60\n[gateway]\nport = 9999\n[gpu]\nwait_s = 5\n")
    one.process.send_signal(signal.SIGHUP)
    wait_for(lambda: '"key": "gpu.wait_s"' in one.log.read_text(), "the reload is logged")
    log = one.log.read_text()
    assert "in force now" in log
    assert "systemctl restart llm-appliance-gateway" in log
    assert "needs a restart: systemctl restart llm-appliance" in log
    (one.folder / "appliance.toml").write_text("[ladder]\nclimb_after = 60\n")
    one.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "was not reloaded" in one.log.read_text(), "the refusal is logged")
    after = one.status()
    assert (after["state"], after["engine_pid"]) == ("serving", before["engine_pid"])


async def test_the_gateway_is_told_every_change(applianced: Start) -> None:
    """A subscriber sees a life end and the next one come: no endpoint in between, the generation risen, in that order."""
    one = applianced("--ready-after-s", "0.3")
    status = await asyncio.to_thread(one.wait_state, "serving")
    seen: list[Publication] = []
    async with asyncio.timeout(20):
        async for publication in subscribe(one.run_dir / "control.sock"):
            seen.append(publication)
            if len(seen) == 1:
                os.kill(status["engine_pid"], signal.SIGKILL)
            elif publication.endpoint is not None:
                break
    assert [publication.generation for publication in seen] == sorted(publication.generation for publication in seen)
    assert all(publication.endpoint is None for publication in seen[1:-1])
    assert seen[-1].generation == 2
    assert str(seen[-1].endpoint).endswith("engine-2.sock")
    assert seen[1].retry_after_s is not None


async def test_the_last_word_reaches_the_gateway(applianced: Start) -> None:
    """A requested stop is published as such before the socket goes: the gateway need not guess."""
    one = applianced()
    await asyncio.to_thread(one.wait_state, "serving")
    states = []
    with pytest.raises(Unreachable):
        async with asyncio.timeout(20):
            async for publication in subscribe(one.run_dir / "control.sock"):
                if not states:
                    one.process.terminate()
                states.append(publication.state)
    assert states[-1] is EngineState.STOPPED


def test_reports_of_the_gateway_are_kept_with_the_incident(applianced: Start) -> None:
    """Lengths and fingerprints of what was in flight, as the gateway said last; nonsense is refused."""
    one = applianced()
    status = one.wait_state("serving")
    request = {
        "request_id": "req-1", "path": "/v1/completions", "fingerprint": "f", "body_bytes": 9, "prompt_tokens": None,
        "sent_bytes": 0, "stream": False, "generation": 1, "attempt": 1, "age_s": 0.5, "resumability": "replay",
    }  # fmt: skip
    one.ask("report", kind="traffic", requests=[request])
    with pytest.raises(ControlError, match="kind"):
        one.ask("report", kind="gossip", requests=[])
    with pytest.raises(ControlError, match="request_id"):
        one.ask("report", kind="traffic", requests=[{}])
    os.kill(status["engine_pid"], signal.SIGKILL)
    one.wait_incident()
    assert one.ask("incident")["incident"]["inflight"][0]["request_id"] == "req-1"


def test_state_folder_that_cannot_be_written(applianced: Start, tmp_path: Path) -> None:
    """No place for incidents: served all the same, the sensor says so, incidents are kept in memory, the generation still rises."""
    (tmp_path / "state").write_text("a file where the folder should be")
    one = applianced()
    status = one.wait_state("serving")
    os.kill(status["engine_pid"], signal.SIGKILL)
    after = one.wait_state("serving", above=1)
    assert after["sensors"]["incidents"]["ok"] is False
    assert len(one.wait_incident()) == 1
    one.process.kill()
    one.process.wait()
    one.start()
    assert one.wait_state("serving")["generation"] == 3


def test_it_is_small_and_has_no_torch(applianced: Start) -> None:
    """Under 60 MB resident while it supervises and after a crash was diagnosed, with nothing of torch mapped."""
    one = applianced()
    status = one.wait_state("serving")
    os.kill(status["engine_pid"], signal.SIGSEGV)
    one.wait_state("serving", above=1)
    lines = Path(f"/proc/{one.process.pid}/status").read_text().splitlines()
    resident_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    print(f"applianced: {resident_kib / 1024:.1f} MiB resident")
    assert resident_kib < 60 * 1000
    assert "torch" not in Path(f"/proc/{one.process.pid}/maps").read_text()


def _abandon(one: Applianced) -> None:
    try:
        one.engine("/generate", {"sampling_params": {"max_new_tokens": 100_000}}, timeout_s=60)
    except Exception as error:  # noqa: BLE001 - its engine is killed under it
        print(f"request ended: {error!r}")
