"""`appliancectl run` with the real demo model: what README promises, and what else a person tries."""

import json
import re
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.model


def _first_token_s(url: str, model: str, since_s: float) -> float:
    body = {"model": model, "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                return time.monotonic() - since_s
    raise AssertionError("the stream had no token")


def test_it_serves_prints_a_curl_line_that_works_and_ctrl_c_ends_everything(foreground, demo_model: Path) -> None:
    """From the start to the first token in under 15 s; after Ctrl-C no process is left and the port is free."""
    run = foreground("--model", str(demo_model), "--port", "0")
    model, url = run.wait_until_serving()
    assert _first_token_s(url, model, run.started_s) < 15
    curl = run.wait_for(r"(?m)^\s*(curl .*)$")[1]
    answer = subprocess.run(["bash", "-c", f"{curl} --silent --fail"], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"].strip()
    status = run.ctl("status")
    assert (status.returncode, status.stderr) == (0, "")
    assert status.stdout.startswith(f"serving {model} (native, generation 1)")
    assert run.stop() == 0, run.said
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=5)


def test_applianced_and_gateway_stay_small(foreground, demo_model: Path) -> None:
    """Under 60 MB resident each, the engine being the only one that may be large."""
    run = foreground("--model", str(demo_model), "--port", "0")
    model, url = run.wait_until_serving()
    _first_token_s(url, model, run.started_s)
    for module in ("appliance.supervisor", "appliance.gateway"):
        pid = run.pid_of(module)
        assert pid is not None
        assert psutil.Process(pid).memory_info().rss < 60e6, module
    assert run.stop() == 0


def test_a_gateway_that_dies_refuses_no_connection(foreground, demo_model: Path) -> None:
    """The listening socket belongs to `run`: a client that comes while there is no gateway waits and is answered."""
    run = foreground("--model", str(demo_model), "--port", "0")
    _, url = run.wait_until_serving()
    gateway = run.pid_of("appliance.gateway")
    psutil.Process(gateway).kill()
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as answer:
        assert answer.status == 200
    assert run.pid_of("appliance.gateway") not in (None, gateway)
    run.wait_for(r"gateway ended unasked \(killed by SIGKILL\)")
    assert run.stop(signal.SIGTERM) == 0


def test_applianced_that_dies_takes_the_engine_along_and_both_come_back(foreground, demo_model: Path) -> None:
    """Never two engines: the old one dies with its owner; clients wait for the new one."""
    run = foreground("--model", str(demo_model), "--port", "0")
    model, url = run.wait_until_serving()
    engine = psutil.Process(run.engine_pid)
    psutil.Process(run.pid_of("appliance.supervisor")).kill()
    started_s = time.monotonic()
    assert _first_token_s(url, model, started_s) < 30
    # The corpse of an orphan lies until init has had its turn.
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    assert run.stop() == 0


def test_the_second_run_on_a_state_folder_is_refused_with_the_pid_of_the_first(foreground, demo_model: Path) -> None:
    """Two supervisors over one database would undo each other's work."""
    first = foreground("--model", str(demo_model), "--port", "0")
    first.wait_for("applianced")
    second = foreground("--model", str(demo_model), "--port", "0")
    assert second.process.wait(30) == 1
    second.wait_for(rf"already at work on .* \(pid {first.process.pid}\)")


def test_a_taken_port_is_refused_with_its_holder(foreground, demo_model: Path) -> None:
    """Before anything is started."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        run = foreground("--model", str(demo_model), "--port", str(port))
        assert run.process.wait(30) == 1
    assert re.search(rf"port {port} on 127\.0\.0\.1 is taken by .*\(pid \d+\)", run.said)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "/does/not/exist"], "model folder /does/not/exist does not exist"),
        ([], "no model: neither --model nor model.path is set"),
        (["--set", "gateway.prot=1"], "did you mean gateway.port?"),
    ],
)
def test_what_cannot_be_served_is_said_at_once_with_the_cure(foreground, arguments: list[str], sentence: str) -> None:
    """One sentence, exit code 1, nothing started."""
    run = foreground(*arguments)
    assert run.process.wait(30) == 1
    run._reader.join(10)
    assert sentence in run.said
    assert "Traceback" not in run.said


def test_an_interrupted_run_can_be_started_again_at_once(foreground, demo_model: Path) -> None:
    """kill -9 of everything leaves a state folder that the next run takes over."""
    run = foreground("--model", str(demo_model), "--port", "0")
    run.wait_until_serving()
    for pid in [run.process.pid, *run.descendants()]:
        psutil.Process(pid).kill()
    run.process.wait(30)
    again = foreground("--model", str(demo_model), "--port", "0")
    again.wait_until_serving()
    assert again.stop() == 0
