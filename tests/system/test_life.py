"""What may happen to the processes of an appliance under systemd, and what clients see of it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.box import wait_until
from tests.system.coredumps import kept_by
from tests.system.machine import GATEWAY, SOCKET, SUPERVISOR, Machine, answer_in, chat_command

pytestmark = pytest.mark.system
WATCHDOG_S = 4
HELD = "Name the capital of France."
# A defect that a test can call up: a handler in applianced's own loop that does not come back.
SLEEPS = "import signal, time\nsignal.signal(signal.SIGUSR2, lambda number, frame: time.sleep(600))\n"
WITH_SLEEPER = """[Service]
ExecStart=
ExecStart=/usr/bin/python3 -m appliance.supervisor
Environment=PYTHONPATH=/run/sleeper:/usr/lib/llm-appliance PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1
"""


@pytest.fixture(autouse=True)
def serving(machine: Machine) -> Iterator[None]:
    """Each test begins with a model that answers, and leaves no drop-in and no start limit behind."""
    machine.wait_until_serving()
    yield
    machine.box.do("sh", "-c", "rm -rf /run/systemd/system/llm-appliance*.d /run/systemd/system/nvidia-persistenced.service")
    machine.systemctl("daemon-reload")
    machine.box.call("systemctl", "reset-failed", SUPERVISOR, GATEWAY)
    machine.systemctl("start", SOCKET, SUPERVISOR)


def _drop_in(machine: Machine, unit: str, text: str) -> None:
    folder = machine.box.path(f"/run/systemd/system/{unit}.d")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "test.conf").write_text(text)
    machine.systemctl("daemon-reload")


@pytest.mark.parametrize(("signal_name", "start"), [("STOP", ""), ("USR2", WITH_SLEEPER)], ids=["stopped", "a_handler_sleeps"])
def test_a_supervisor_that_hangs_is_replaced(machine: Machine, signal_name: str, start: str) -> None:
    """applianced stands still: the watchdog ends it and systemd starts another; requests of before and between are answered."""
    assert "WatchdogSec=30\n" in machine.box.do("systemctl", "cat", SUPERVISOR)
    machine.box.path("/run/sleeper").mkdir(exist_ok=True)
    machine.box.path("/run/sleeper/sitecustomize.py").write_text(SLEEPS)
    _drop_in(machine, SUPERVISOR, f"{start or '[Service]'}\nWatchdogSec={WATCHDOG_S}\nRestartSec=1\n")
    machine.systemctl("restart", SUPERVISOR)
    generation = machine.wait_until_serving()
    pid, restarts = machine.main_pid(SUPERVISOR), int(machine.property(SUPERVISOR, "NRestarts"))
    began_s = time.monotonic()
    before = machine.box.start(*chat_command("Tell a long story about a lighthouse.", max_tokens=400))
    streams = machine.load(clients=2, tokens=120, seconds=3)
    wait_until(lambda: "running=3" in machine.journal("--since=-10s"), "the engine answers all of them")
    machine.box.do("kill", f"-{signal_name}", str(pid))
    wait_until(lambda: machine.main_pid(SUPERVISOR) not in (0, pid), "another applianced", 4 * WATCHDOG_S)
    replaced_s = time.monotonic() - began_s
    assert "Paris" in machine.chat(HELD)
    print(f"\nreplaced after {replaced_s:.1f} s, answered after {time.monotonic() - began_s:.1f} s")
    out, err = before.communicate(timeout=180)
    assert before.returncode == 0, (out, err)
    assert len(answer_in(out)) > 100
    result = streams.result()
    assert result["failed"] == [], "streams go on where they were"
    print(f"longest pause of a stream: {result['longest_gap_s']:.1f} s")
    assert machine.wait_until_serving(above=generation) == generation + 1
    assert int(machine.property(SUPERVISOR, "NRestarts")) == restarts + 1
    assert "watchdog timeout" in machine.box.do("journalctl", "--boot", "--no-pager", "-o", "cat", f"UNIT={SUPERVISOR}").lower()


@pytest.mark.parametrize("who", ["supervisor", "engine", "gateway"])
def test_a_process_is_killed(machine: Machine, who: str) -> None:
    """kill -9: it comes back by itself; a request that arrives meanwhile is answered, and streams outlive all but their gateway."""
    machine.http("/health")
    pid_of = {
        "supervisor": lambda: machine.main_pid(SUPERVISOR),
        "engine": machine.engine_pid,
        "gateway": lambda: machine.main_pid(GATEWAY),
    }[who]
    pid, engine = pid_of(), machine.engine_pid()
    streams = machine.load(clients=2, tokens=60, seconds=0.5) if who != "gateway" else None
    began_s = time.monotonic()
    machine.box.do("kill", "-KILL", str(pid))
    assert "Paris" in machine.chat(HELD)
    print(f"\n{who}: answered {time.monotonic() - began_s:.1f} s after kill -9")
    if streams is not None:
        assert streams.result()["failed"] == [], "streams go on where they were"
    wait_until(lambda: pid_of() not in (0, pid), f"another {who}")
    if who == "gateway":
        assert machine.engine_pid() == engine, "the engine has nothing to do with it"
    else:
        wait_until(lambda: not machine.box.path(f"/proc/{engine}").exists(), "the old engine is gone")
    if who == "engine":
        incident = json.loads(machine.box.call("appliancectl", "diagnose", "--json").stdout)
        assert incident["cause"]
        sentence = machine.status()["last_incident"]["diagnosis"]["sentence"]
        assert sentence in machine.journal(), "the journal tells the same sentence"


def test_the_journal_has_sentences_and_fields(machine: Machine) -> None:
    """What `status` says is a message of the journal, and a state can be searched for."""
    sentence = machine.status()["sentence"]
    found = machine.box.do("journalctl", "--boot", "--output=cat", "--no-pager", "APPLIANCE_STATE=serving", "-u", SUPERVISOR)
    assert any(line.startswith(sentence) for line in found.splitlines()), (sentence, found)
    lines = machine.box.do("journalctl", "--boot", "--output=cat", "--no-pager", "-u", SUPERVISOR).splitlines()
    assert any(line.startswith("[20") and "The engine is ready." in line for line in lines), "the engine's own words, as it said them"


def test_stop_drains(machine: Machine) -> None:
    """systemctl stop under load: every answer that was under way is completed, and nothing is killed."""
    load = machine.load(clients=3, tokens=200, seconds=0)
    machine.systemctl("stop", SUPERVISOR)
    result = load.result()
    assert result["failed"] == []
    assert result["done"] == 3
    assert machine.property(SUPERVISOR, "Result") == "success"
    assert machine.engine_pid() == 0
    code, body = machine.http("/health")
    assert code == 503
    assert "error" in body


def test_the_gateway_drains_too(machine: Machine) -> None:
    """systemctl restart of the gateway under load: answers are completed, new clients wait in the socket."""
    load = machine.load(clients=3, tokens=40, seconds=4)
    machine.systemctl("restart", GATEWAY)
    result = load.result()
    assert result["failed"] == []
    assert machine.property(GATEWAY, "Result") == "success"


def test_no_connection_is_refused_over_restarts(machine: Machine) -> None:
    """The port is systemd's: kill and restart of the gateway, again and again, and every client is answered."""
    script = "for i in $(seq 300); do curl -s -o /dev/null --max-time 20 http://127.0.0.1:8000/status || echo failed $?; done"
    clients = machine.box.start("bash", "-c", script)
    for number in range(4):
        pid = machine.main_pid(GATEWAY)
        if number % 2:
            machine.systemctl("restart", GATEWAY)
        else:
            # Between two answers: kill -9 in the middle of one would lose it, whoever holds the port.
            machine.box.do("systemctl", "stop", GATEWAY)
        wait_until(lambda pid=pid: machine.main_pid(GATEWAY) not in (0, pid), "another gateway")  # type: ignore[misc]
    out, err = clients.communicate(timeout=120)
    assert (out, err) == ("", "")


def test_start_limits_end_in_a_failed_unit_that_resume_mends(machine: Machine) -> None:
    """An applianced that dies again and again is left dead; the gateway says so; `appliancectl resume` clears the limit and starts."""
    _drop_in(machine, SUPERVISOR, "[Service]\nRestartSec=100ms\n")

    def dead() -> bool:
        if pid := machine.main_pid(SUPERVISOR):
            machine.box.call("kill", "-KILL", str(pid))
        return machine.property(SUPERVISOR, "ActiveState") == "failed"

    wait_until(dead, "the start limit", 60)
    assert machine.box.call("systemctl", "start", SUPERVISOR).returncode != 0
    assert machine.http("/health")[0] == 503
    machine.ctl("resume")
    machine.wait_until_serving()


@pytest.mark.parametrize(
    "stand_in",
    [
        pytest.param("ExecStart=/bin/false", id="failing"),
        pytest.param("ExecStart=/bin/sh -c 'sleep 3; exec sleep infinity &'", id="late"),
    ],
)
def test_persistenced(machine: Machine, stand_in: str) -> None:
    """nvidia-persistenced that fails or takes its time: the appliance starts after it, and without it (absent is every other test)."""
    machine.systemctl("stop", SUPERVISOR)
    kind = "forking" if "sleep" in stand_in else "oneshot"
    machine.box.path("/run/systemd/system/nvidia-persistenced.service").write_text(f"[Service]\nType={kind}\n{stand_in}\n")
    machine.systemctl("daemon-reload")
    machine.systemctl("start", SUPERVISOR)
    machine.wait_until_serving()
    ended = int(machine.property("nvidia-persistenced.service", "InactiveExitTimestampMonotonic"))
    assert 0 < ended < int(machine.property(SUPERVISOR, "ExecMainStartTimestampMonotonic"))
    if kind == "forking":
        active = int(machine.property("nvidia-persistenced.service", "ActiveEnterTimestampMonotonic"))
        assert active <= int(machine.property(SUPERVISOR, "ExecMainStartTimestampMonotonic"))
        machine.systemctl("stop", "nvidia-persistenced.service")


def test_a_broken_runtime_does_not_close_the_endpoint(machine: Machine) -> None:
    """Without its environment the engine cannot start: the gateway answers 503 and says what is to be done."""
    machine.systemctl("stop", SUPERVISOR)
    machine.box.do("mv", "/var/lib/llm-appliance/runtimes/current", "/var/lib/llm-appliance/runtimes/away")
    try:
        machine.systemctl("start", SUPERVISOR)
        wait_until(lambda: machine.status().get("state") == "parked", "it parks")
        wait_until(lambda: "appliancectl setup" in machine.http("/health")[1], "the gateway has heard of it")
        assert machine.http("/health")[0] == 503
        assert machine.http("/v1/models")[0] == 503
    finally:
        machine.box.do("mv", "/var/lib/llm-appliance/runtimes/away", "/var/lib/llm-appliance/runtimes/current")
        machine.ctl("resume")
    machine.wait_until_serving()


def test_a_wrong_configuration_stops_it_with_the_reason(machine: Machine) -> None:
    """Exit code 78, no restart, and the key in the journal."""
    own = machine.box.path("/etc/llm-appliance/conf.d/60-own.toml")
    own.write_text("[engine]\nthreds = 4\n")
    machine.box.call("systemctl", "restart", SUPERVISOR)
    wait_until(lambda: machine.property(SUPERVISOR, "ActiveState") == "failed", "it gives up")
    assert machine.property(SUPERVISOR, "ExecMainStatus") == "78"
    assert "engine.threds" in machine.journal()
    own.unlink()


def test_a_native_crash_is_kept_and_read(machine: Machine, tmp_path: Path) -> None:
    """SIGSEGV of the engine: systemd-coredump has the dump under the unit's name, and `diagnose` knows the signal."""
    engine, generation = machine.engine_pid(), machine.status()["generation"]
    with kept_by(machine.box, tmp_path):
        machine.box.do("kill", "-SEGV", str(engine))
        wait_until(lambda: str(engine) in machine.box.call("coredumpctl", "--no-pager", "list").stdout, "the dump is listed", 90)
    kept = machine.box.do("coredumpctl", "--no-pager", "info", str(engine))
    assert "Signal: 11 (SEGV)" in kept
    assert "Unit: llm-appliance.service" in kept
    machine.wait_until_serving(above=generation)
    said = machine.box.call("appliancectl", "diagnose")
    assert said.returncode == 1
    assert "Segmentation fault" in said.stdout
