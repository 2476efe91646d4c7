"""The snippets of docs/proxies.md in the real programs: events at once, and a leaving client that is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fakes.scripted_appliance import ROOT, Connection, GatewayProcess, ScriptedAppliance, appliance, free_port
from tests.integration.gateway.test_tls import aborts

CHAT = "/v1/chat/completions"
NGINX = "daemon off;\nmaster_process off;\npid {folder}/nginx.pid;\nerror_log {folder}/nginx.log;\nevents {{}}\nhttp {{\naccess_log off;\n"
PATHS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def snippet(language: str) -> str:
    """A block of the page."""
    found = re.search(rf"```{language}\n(.*?)```", (ROOT / "docs/proxies.md").read_text(), re.DOTALL)
    assert found is not None
    return found.group(1)


def written(run_dir: Path, program: str, port: int, gateway_port: int) -> list[str]:
    """The configuration with these ports; the command that runs it."""
    text = snippet(program)
    assert text.count("127.0.0.1:8000") == text.count("127.0.0.1:8080") == 1
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{gateway_port}").replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    path = run_dir / f"{program}.conf"
    if program == "haproxy":
        path.write_text(text)
        return [program, "-db", "-f", str(path)]
    temporary = "".join(f"{name}_temp_path {run_dir}/{name};\n" for name in PATHS)
    path.write_text(NGINX.format(folder=run_dir) + temporary + text + "}\n")
    return [program, "-e", f"{run_dir}/nginx.log", "-c", str(path)]


@contextlib.asynccontextmanager
async def proxied(run_dir: Path, program: str) -> AsyncIterator[tuple[int, GatewayProcess, ScriptedAppliance]]:
    """The program in front of a gateway; its port."""
    if shutil.which(program) is None:
        pytest.skip(f"NOT CHECKED: {program} is missing; apt-get install {program}")
    async with appliance(run_dir) as (running, scripted):
        port = free_port()
        command = written(run_dir, program, port, running.port)
        log = (run_dir / "proxy.log").open("wb")
        process = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log, env=dict(os.environ))
        try:
            due_s = time.monotonic() + 15
            while True:
                assert process.returncode is None, (run_dir / "proxy.log").read_text()
                try:
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    healthy = (await Connection(reader, writer).ask("GET", "/health")).status == 200
                    writer.close()
                    if healthy:
                        break
                except (OSError, asyncio.IncompleteReadError):
                    pass
                assert time.monotonic() < due_s, (run_dir / "proxy.log").read_text()
                await asyncio.sleep(0.05)
            yield port, running, scripted
        finally:
            process.kill()
            await process.wait()
            log.close()


@pytest.mark.parametrize("program", ["nginx", "haproxy"])
async def test_the_proxy_passes_each_event_and_the_client_s_leaving(run_dir: Path, program: str) -> None:
    """No event waits for the next one; a closed client is closed to the engine; our errors and ids come through."""
    async with proxied(run_dir, program) as (port, _, scripted):
        connection = Connection(*await asyncio.open_connection("127.0.0.1", port))
        connection.send("POST", CHAT, {"do": "stream", "stream": True, "events": 6, "gap_s": 0.2})
        status, headers = await connection.head()
        arrived: list[float] = []
        while part := await asyncio.wait_for(connection.chunk(), 5):
            arrived.extend([time.monotonic()] * part.count(b"data: {"))
        gaps = [later - earlier for earlier, later in itertools.pairwise(arrived)]
        refused = await connection.ask("POST", CHAT, b"no json")
        connection.writer.close()
        assert (status, len(arrived)) == (200, 6)
        assert headers["x-request-id"]
        assert min(gaps) > 0.05, gaps
        assert (refused.status, refused.error()["code"]) == (400, "invalid_json")
        for number, body in enumerate(({"do": "stream", "stream": True, "events": 1000, "gap_s": 0.02}, {"do": "never"})):
            leaver = Connection(*await asyncio.open_connection("127.0.0.1", port))
            leaver.send("POST", CHAT, body)
            due_s = time.monotonic() + 10
            while (await stats(scripted))["open"] == 0:
                assert time.monotonic() < due_s
            left_s = time.monotonic()
            leaver.writer.close()
            assert (await aborts(scripted, number + 1))[-1] - left_s < 2


async def stats(scripted: ScriptedAppliance) -> dict[str, int]:
    """The engine's own counts."""
    reader, writer = await asyncio.open_unix_connection(str(scripted.run_dir / f"engine-{scripted.generation}.sock"))
    found = (await Connection(reader, writer).ask("GET", "/stats")).json()
    writer.close()
    return dict(found)
