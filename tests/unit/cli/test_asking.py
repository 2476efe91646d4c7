"""status, restart, drain and resume: what applianced says, in words and as data; and what is said where it does not answer."""

import json
import os
import socket
from pathlib import Path

import pytest

from appliance.cli import place as place_module
from appliance.control.codec import incident_to_json
from appliance.core.errors import ControlError
from appliance.core.states import EngineState

STATUS = {
    "state": "serving",
    "generation": 4,
    "sentence": "serving demo since 3 min",
    "engine": "native",
    "engine_version": "0.1.0",
    "engine_pid": 4711,
    "model": "demo",
    "rung": {
        "index": 1,
        "context_length_tokens": 2048,
        "prefill_chunk_tokens": 128,
        "max_running": 8,
        "kv_dtype": "float32",
        "mem_fraction": 0.9,
        "gives_up": "half the prefill speed",
    },
    "limits": {"model_id": "demo", "context_length_tokens": 2048, "max_running": 8, "kv_tokens": 16384},
    "rungs": 4,
    "restarts": 3,
    "last_incident": None,
    "uptime_s": 200.0,
    "sensors": {"kernel_log": {"ok": True, "detail": "works"}, "gpu": {"ok": False, "detail": "no card"}},
}


def test_status_says_what_is_going_on(ctl, applianced) -> None:
    """The sentence, the rung and what it gives up, the limits, the sensors."""
    applianced.answers["status"] = STATUS
    said = ctl("--run-dir", applianced.run_dir, "status")
    assert said.code == 0
    assert said.out.startswith("serving demo (native, generation 4)\n  serving demo since 3 min\n")
    for words in (
        "native 0.1.0, pid 4711",
        "3 min 20 s",
        "1 of 3: context 2048 tokens",
        "gives up: half the prefill speed",
        "16384 tokens in the KV pool",
        "not available: no card",
    ):
        assert words in " ".join(said.out.split())


def test_status_says_which_rung_in_plain_words(ctl, applianced) -> None:
    """Rung 0 is what is configured, whatever stands below it; what a rung switches off is said."""
    rung = STATUS["rung"] | {"index": 0, "gives_up": ""}
    applianced.answers["status"] = STATUS | {"rung": rung}
    assert "0, as configured: context 2048 tokens" in " ".join(ctl("--run-dir", applianced.run_dir, "status").out.split())
    applianced.answers["status"] = STATUS | {"rung": STATUS["rung"] | {"features_off": ["cuda_graph", "overlap_schedule"]}}
    assert "without cuda graph and overlap schedule" in " ".join(ctl("--run-dir", applianced.run_dir, "status").out.split())


@pytest.mark.parametrize("words", ["proved: a prompt of 6,976 tokens left 1.20 GiB", "not proved: it waits for idle time"])
def test_status_says_whether_the_rungs_memory_is_proved(ctl, applianced, words: str) -> None:
    """In applianced's own words; nothing where an older one does not say."""
    applianced.answers["status"] = STATUS | {"proof": {"proved": words.startswith("proved"), "detail": words}}
    assert words in " ".join(ctl("--run-dir", applianced.run_dir, "status").out.split())
    applianced.answers["status"] = STATUS
    assert "memory proof" not in ctl("--run-dir", applianced.run_dir, "status").out


def test_status_speaks_of_the_last_incident(ctl, applianced, incident) -> None:
    """Cause and sentence, and how long ago."""
    applianced.answers["status"] = STATUS | {"last_incident": incident_to_json(incident(), evidence=False)}
    said = " ".join(ctl("--run-dir", applianced.run_dir, "status").out.split())
    assert "inc-20231114-221321-abcd" in said
    assert "cuda_oom_prefill. A prompt needed 48.00 MiB and 5.19 MiB were free." in said


@pytest.mark.parametrize("state", EngineState)
def test_status_has_words_and_an_exit_code_for_every_state(ctl, applianced, state: EngineState) -> None:
    """1 only where somebody has to do something; before the first engine most fields are empty."""
    applianced.answers["status"] = {"state": state.value, "generation": 0, "sentence": "why", "engine": "native", "model": None}
    said = ctl("--run-dir", applianced.run_dir, "status")
    assert said.code == (1 if state in (EngineState.PARKED, EngineState.STOPPED) else 0)
    assert said.out.startswith(f"{state.value} no model (native, generation 0)\n  why\n")


def _systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **answers: str) -> None:
    """A program of that name, which answers `show` of a unit."""
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    cases = "".join(f"*{unit}*) printf '{text}';; " for unit, text in answers.items())
    program.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize("verb", ["status", "restart", "drain"])
def test_a_configuration_that_cannot_be_used_is_why_nobody_answers(ctl, tmp_path: Path, verb: str) -> None:
    """ "Start it" would not help: the first error is named, and how many more there are. Exit code 3."""
    config = tmp_path / "appliance.toml"
    config.write_text("[gateway]\nprot = 1\n[engin]\n")
    said = ctl("--config", config, "--run-dir", tmp_path, verb)
    assert (said.code, said.out) == (3, "")
    assert f"{config}: unknown key gateway.prot; did you mean gateway.port? (and 1 more)" in said.err
    assert "appliancectl config check" in said.err


@pytest.mark.parametrize(
    ("unit", "words", "cure"),
    [
        ("LoadState=loaded\\nActiveState=failed\\nSubState=failed\\nResult=exit-code\\n", "given it up (exit-code)", "appliancectl resume"),
        ("LoadState=loaded\\nActiveState=inactive\\nSubState=dead\\n", "is stopped", "systemctl start llm-appliance"),
        ("LoadState=loaded\\nActiveState=activating\\nSubState=auto-restart\\nResult=watchdog\\n", "(watchdog)", "journalctl -u"),
        ("LoadState=not-found\\nActiveState=inactive\\n", "nobody listens on", "appliancectl run"),
    ],
)
def test_systemd_is_asked_why_nobody_answers(
    ctl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str, words: str, cure: str
) -> None:
    """On a box with the package; where it is not installed, both ways to start are named."""
    _systemctl(tmp_path, monkeypatch, **{"llm-appliance.service": unit})
    monkeypatch.setattr(place_module, "SYSTEM_RUN_DIR", tmp_path / "run")
    said = ctl("status")
    assert (said.code, said.out) == (3, "")
    assert words in said.err
    assert cure in said.err


def test_an_engine_that_nobody_can_reach_is_not_just_serving(ctl, applianced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The port is somebody else's: the sentence, the port, who holds it, what to do; exit code 1. As data under `troubles`."""
    applianced.answers["status"] = STATUS
    monkeypatch.setattr(place_module, "SYSTEM_RUN_DIR", applianced.run_dir)
    _systemctl(tmp_path, monkeypatch, **{"llm-appliance-gateway.socket": "LoadState=loaded\\nActiveState=failed\\nResult=resources\\n"})
    config = tmp_path / "appliance.toml"
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        config.write_text(f"[gateway]\nport = {port}\n")
        said = ctl("--config", config, "status")
        as_data = ctl("--config", config, "status", "--json")
    assert said.code == as_data.code == 1
    assert f"fail port: {port} is taken by " in said.out
    assert f"(pid {os.getpid()}), so llm-appliance-gateway.socket has failed and clients cannot reach" in said.out
    (trouble,) = json.loads(as_data.out)["troubles"]
    assert (trouble["name"], trouble["level"]) == ("port", "fail")
    config.write_text("[gateway]\nprot = 1\n")
    said = ctl("--config", config, "status")
    assert said.code == 0
    assert "warn configuration: has an error since it was read" in said.out


def test_status_as_json_is_the_answer(ctl, applianced) -> None:
    """Unchanged, for programs."""
    applianced.answers["status"] = STATUS
    assert json.loads(ctl("--run-dir", applianced.run_dir, "status", "--json").out) == STATUS


@pytest.mark.parametrize("verb", ["restart", "drain"])
def test_requests_carry_their_reason(ctl, applianced, verb: str) -> None:
    """It is kept in the log and the status."""
    said = ctl("--run-dir", applianced.run_dir, verb, "--reason", "new driver")
    assert said.code == 0
    assert applianced.asked == [(verb, {"reason": "new driver"})]
    assert "appliancectl status" in said.out


def test_a_refusal_of_applianced_is_told_with_its_hint(ctl, applianced) -> None:
    """Exit code 1."""
    applianced.answers["resume"] = ControlError("nothing is parked", hint="appliancectl status says what is going on")
    said = ctl("--run-dir", applianced.run_dir, "resume")
    assert (said.code, said.out) == (1, "")
    assert said.err == "appliancectl: nothing is parked\n  appliancectl status says what is going on\n"


@pytest.mark.parametrize(("word", "rung"), [("original", 0), ("2", 2)])
def test_a_person_may_choose_the_rung(ctl, applianced, word: str, rung: int) -> None:
    """The way back from a safer setting."""
    assert ctl("--run-dir", applianced.run_dir, "restart", "--rung", word).code == 0
    assert applianced.asked == [("restart", {"reason": "asked with appliancectl", "rung": rung})]


def test_a_rung_that_is_none_is_refused_before_anything_is_asked(ctl, applianced) -> None:
    """Usage, exit code 2."""
    said = ctl("--run-dir", applianced.run_dir, "restart", "--rung", "up")
    assert (said.code, applianced.asked) == (2, [])
    assert "'up' is neither `original` nor the number of a rung" in said.err


def test_status_tells_of_each_engine_of_several(ctl, applianced) -> None:
    """The sum first; then each by its card, with its sentence and its setting; the sum's own engine and rung would be one of them."""
    one = {"state": "serving", "card": "0000:01:00", "sentence": "serving demo on rung 0", "generation": 3, "restarts": 1}
    other = one | {"state": "parked", "card": "0000:02:00", "sentence": "parked because it is lost", "engine_pid": None}
    replicas = [STATUS | one, STATUS | other]
    applianced.answers["status"] = STATUS | {"state": "degraded", "sentence": "1 of 2 engines serves", "replicas": replicas}
    said = ctl("--run-dir", applianced.run_dir, "status")
    assert said.code == 0
    assert said.out.startswith("degraded demo (native, 2 engines, a card each)\n  1 of 2 engines serves\n")
    assert said.out.count("context 2048 tokens,") == 2
    assert "serving card 0000:01:00 (replica 0, generation 3)" in said.out
    assert "parked card 0000:02:00 (replica 1, generation 3)" in said.out
    assert said.out.count("pid 4711") == 1
    assert "parked because it is lost" in said.out


@pytest.mark.parametrize("verb", ["restart", "drain", "resume"])
def test_one_engine_of_several_can_be_named(ctl, applianced, verb: str) -> None:
    """By its number in the status."""
    assert ctl("--run-dir", applianced.run_dir, verb, "--replica", "1").code == 0
    assert applianced.asked[0][1]["replica"] == 1
    assert ctl("--run-dir", applianced.run_dir, verb, "--replica", "-1").code == 2
