"""The gateway as a process: its socket, its start, its end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from appliance.control import protocol
from appliance.control.codec import publication_to_json
from appliance.core.launch import Endpoint
from appliance.core.publication import Publication
from appliance.core.states import EngineState
from tests.fakes.scripted_appliance import ROOT, appliance, eventually, free_port, gateway

CHAT = "/v1/chat/completions"


async def _run(*arguments: str, **environment: str) -> tuple[int, str]:
    """Run the gateway to its end; exit code and what it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "appliance.gateway",
        *arguments,
        stderr=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    _, said = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode is not None
    return process.returncode, said.decode()


async def test_a_taken_port_is_named_with_its_holder(run_dir: Path) -> None:
    """One sentence, exit code 1, no traceback."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        code, said = await _run("--run-dir", str(run_dir), "--state-dir", str(run_dir), "--set", f"gateway.port={port}")
    assert code == 1
    assert re.fullmatch(rf"gateway: port {port} on 127.0.0.1 is taken by .*python.* \(pid {os.getpid()}\); stop that, or .*\n", said)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("gateway.prot=1", "did you mean gateway.port"),
        ("gateway.port=70000", "above the maximum of 65535"),
        ("gateway.host=not a host", "cannot listen on 'not a host'"),
        ("gateway.host=192.0.2.1", "set gateway.host to an address of this machine"),
        ("gateway.host=0.0.0.0", "gateway.api_keys_file = FILE"),
    ],
)
async def test_what_cannot_be_listened_on_is_one_sentence(run_dir: Path, setting: str, words: str) -> None:
    """Wrong keys, values, hosts; and an address open to others without leave."""
    settings = ("--set", "gateway.port=0") if not setting.startswith("gateway.port") else ()
    code, said = await _run("--run-dir", str(run_dir), "--state-dir", str(run_dir), *settings, "--set", setting)
    assert code == 1
    assert words in said
    assert "Traceback" not in said


async def test_an_open_address_is_allowed_by_a_key(run_dir: Path) -> None:
    """For those whose proxy stands on another machine."""
    async with gateway(run_dir, "gateway.host=0.0.0.0", "gateway.allow_open=true") as running:
        assert (await running.ask("GET", "/")).status == 200
        assert f"listening on http://0.0.0.0:{running.port}\n" in running.log.read_text(), "whoever looks sees that it is open"


async def test_it_answers_within_a_second_and_a_half_of_its_start(run_dir: Path) -> None:
    """With neither applianced nor an engine there."""
    began = time.monotonic()
    async with gateway(run_dir) as running:
        assert (await running.ask("GET", "/health")).status == 503
    assert time.monotonic() - began < 1.5


async def _applianced_that_answers(publication: Publication | None, after_s: float, run_dir: Path) -> asyncio.Server:
    """A control socket that takes its time, as on a machine that boots; without a publication it says nothing at all."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await protocol.read_body(reader)
        await asyncio.sleep(after_s)
        if publication is not None:
            writer.write(protocol.encode({"publication": publication_to_json(publication)}))
        await reader.read()
        writer.close()

    return await asyncio.start_unix_server(answer, str(run_dir / "control.sock"))


@pytest.mark.parametrize("path", ["/health", "/status", "/"])
async def test_the_first_question_of_all_waits_for_applianceds_first_word(run_dir: Path, path: str) -> None:
    """With socket activation a question is what starts the gateway: its answer is not that nobody was asked yet."""
    serving = Publication(EngineState.SERVING, 1, Endpoint(socket_path=str(run_dir / "engine.sock")), None, "serving demo", None)
    server = await _applianced_that_answers(serving, 0.4, run_dir)
    async with gateway(run_dir) as running:
        answer = await running.ask("GET", path)
    server.close()
    assert answer.status == 200
    assert "serving demo" in answer.body.decode()


async def test_an_applianced_that_says_nothing_does_not_hold_the_first_question(run_dir: Path) -> None:
    """A second, and then what is known."""
    server = await _applianced_that_answers(None, 0, run_dir)
    async with gateway(run_dir) as running:
        began_s = time.monotonic()
        assert (await running.ask("GET", "/health")).status == 503
        assert 0.5 < time.monotonic() - began_s < 5
    server.close()


async def test_it_serves_on_a_socket_that_its_parent_opened(run_dir: Path) -> None:
    """--fd: nobody is refused between two gateways."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        for _ in range(2):
            asked = asyncio.ensure_future(asyncio.open_connection("127.0.0.1", port))
            async with gateway(run_dir, arguments=("--fd", str(listener.fileno())), fds=(listener.fileno(),)) as running:
                running.port = port
                assert (await running.ask("GET", "/")).status == 200
                _, writer = await asked
                writer.close()
                assert await running.stop() == 0


async def test_sockets_of_systemd_are_taken_over(run_dir: Path) -> None:
    """LISTEN_FDS and LISTEN_PID; a LISTEN_PID of another process is not meant for us."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        script = (
            "import os,sys; os.dup2(int(sys.argv[1]), 3); os.set_inheritable(3, True); os.environ['LISTEN_PID'] = str(os.getpid());"
            "os.environ['LISTEN_FDS'] = '1'; os.execv(sys.executable, [sys.executable, '-m', 'appliance.gateway', *sys.argv[2:]])"
        )
        arguments = ["--run-dir", str(run_dir), "--state-dir", str(run_dir)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, str(listener.fileno()), *arguments, cwd=ROOT, pass_fds=(listener.fileno(),)
        )
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await asyncio.wait_for(reader.readline(), 10) == b"HTTP/1.1 200 OK\r\n"
            writer.close()
        finally:
            process.terminate()
            assert await asyncio.wait_for(process.wait(), 10) == 0
    taken = free_port()
    async with gateway(run_dir, f"gateway.port={taken}") as running:
        running.port = taken
        assert (await running.ask("GET", "/")).status == 200


@pytest.mark.parametrize("kind", ["closed", "not-listening", "file"])
async def test_a_descriptor_that_is_no_listening_socket_is_refused(run_dir: Path, kind: str) -> None:
    """In one sentence."""
    with socket.socket() as idle, (run_dir / "file").open("w") as file:
        fd = {"closed": 999, "not-listening": idle.fileno(), "file": file.fileno()}[kind]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "appliance.gateway",
            "--fd",
            str(fd),
            "--run-dir",
            str(run_dir),
            "--state-dir",
            str(run_dir),
            cwd=ROOT,
            pass_fds=() if kind == "closed" else (fd,),
            stderr=asyncio.subprocess.PIPE,
        )
        _, said = await process.communicate()
    assert process.returncode == 1
    assert f"descriptor {fd}" in said.decode()
    assert "Traceback" not in said.decode()


async def test_systemd_is_told_when_it_listens_and_when_it_stops(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """READY=1 only after it listens, WATCHDOG=1 when asked for, STOPPING=1 at the end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(run_dir / "notify"))
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(run_dir / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "2000000")
        said: list[str] = []

        def heard(word: str) -> bool:
            try:
                while True:
                    said.append(manager.recv(4096).decode())
            except BlockingIOError:
                return any(word in message for message in said)

        async with gateway(run_dir) as running:
            await eventually(lambda: heard("READY=1"), "READY=1")
            await eventually(lambda: heard("WATCHDOG=1"), "WATCHDOG=1")
            assert await running.stop() == 0
        assert heard("STOPPING=1")
    assert f"READY=1\nSTATUS=listening on http://127.0.0.1:{running.port}" in said


async def test_sigterm_lets_running_answers_finish(run_dir: Path) -> None:
    """New connections are refused, idle ones are closed, the running stream ends whole, exit code 0."""
    async with appliance(run_dir) as (running, _), running.connection() as idle, running.connection() as busy:
        await idle.ask("GET", "/")
        busy.send("POST", CHAT, {"do": "stream", "stream": True, "events": 10, "gap_s": 0.1})
        await busy.head()
        running.process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(idle.reader.read(), 5) == b""
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", running.port)
        rest = b""
        while part := await busy.chunk():
            rest += part
        assert rest.endswith(b"data: [DONE]\n\n")
        assert await running.stop(signal.SIGCONT) == 0


async def test_a_connection_that_was_about_to_ask_is_still_answered(run_dir: Path) -> None:
    """Accepted before SIGTERM, its request on the wire: no reset."""
    async with gateway(run_dir) as running, running.connection() as connection:
        await running.status()
        running.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        answer = await connection.ask("GET", "/health")
        assert answer.headers["connection"] == "close"
        assert await running.stop(signal.SIGCONT) == 0


async def test_what_outlasts_the_drain_is_told_so(run_dir: Path) -> None:
    """After drain_s: an error event in a stream, 503 for what was held, and the process ends."""
    async with appliance(run_dir, "gateway.drain_s=0.3s") as (running, _), running.connection() as stream, running.connection() as held:
        stream.send("POST", CHAT, {"do": "stream", "stream": True, "events": 1000, "gap_s": 0.05})
        await stream.head()
        held.send("POST", CHAT, {"do": "never"})
        await running.until(lambda status: status["slots"]["in_use"] == 2, "two run")
        stopped = asyncio.ensure_future(running.stop())
        answer = await held.answer()
        rest = b""
        while part := await stream.chunk():
            rest += part
        assert await stopped == 0
    assert (answer.status, answer.error()["code"]) == (503, "gateway_stopping")
    assert json.loads(rest.strip().split(b"\n\n")[-1].removeprefix(b"data: "))["error"]["code"] == "gateway_stopping"


async def test_a_second_signal_ends_it_at_once(run_dir: Path) -> None:
    """The owner is in a hurry."""
    async with appliance(run_dir) as (running, _), running.connection() as connection:
        connection.send("POST", CHAT, {"do": "never"})
        await running.until(lambda status: status["slots"]["in_use"] == 1, "it runs")
        running.process.send_signal(signal.SIGTERM)
        await eventually(lambda: b"stopping: 1 requests run" in running.log.read_bytes(), "the drain")
        began = time.monotonic()
        assert await running.stop() == 0
        assert time.monotonic() - began < 2


async def test_fingerprints_stay_the_same_over_a_restart(run_dir: Path) -> None:
    """The key is kept in the state folder, readable by its owner alone."""
    prints = []
    for _ in range(2):
        async with appliance(run_dir) as (running, _):
            asked = asyncio.ensure_future(running.post({"do": "whole", "delay_s": 0.5}))
            status = await running.until(lambda status: status["inflight"], "it runs")
            prints.append(status["inflight"][0]["fingerprint"])
            await asked
    assert prints[0] == prints[1]
    assert (run_dir / "state" / "fingerprint.key").stat().st_mode & 0o777 == 0o600


async def test_no_torch_and_little_memory(run_dir: Path) -> None:
    """Under 40 MiB, and nothing of the engine's is loaded."""
    async with appliance(run_dir) as (running, _):
        await running.ask("GET", "/metrics")
        maps = Path(f"/proc/{running.process.pid}/maps").read_text()
        rollup = Path(f"/proc/{running.process.pid}/smaps_rollup").read_text()
    assert "torch" not in maps
    assert int(re.search(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE)[1]) < 40 * 1024
