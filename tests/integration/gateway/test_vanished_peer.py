"""A client whose machine vanished: no FIN, no RST, just silence. In a network namespace whose loopback is cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.scripted_appliance import ROOT

IN_NAMESPACE = """
import asyncio, fcntl, json, socket, struct, sys, time
from pathlib import Path
from tests.fakes.scripted_appliance import Connection, appliance

def loopback(up):
    with socket.socket() as sock:
        fcntl.ioctl(sock, 0x8914, struct.pack("16sh14x", b"lo", 0x41 if up else 0))  # SIOCSIFFLAGS

async def stats(run_dir):  # over the unix socket: that one is not cut
    reader, writer = await asyncio.open_unix_connection(str(run_dir / "engine-1.sock"))
    answer = await Connection(reader, writer).ask("GET", "/stats")
    writer.close()
    return answer.json()

async def main(run_dir, asked):
    async with appliance(run_dir, "gateway.disconnect_grace_s=3s") as (running, scripted):
        async with running.connection() as connection:
            connection.send("POST", "/v1/chat/completions", asked)
            await running.until(lambda status: status["slots"]["in_use"] == 1, "it runs")
            if asked.get("stream"):
                await connection.head()
            loopback(False)
            cut_at = time.monotonic()
            while not (aborted := (await stats(run_dir))["aborted_at"]) and time.monotonic() < cut_at + 15:
                await asyncio.sleep(0.05)
            loopback(True)
            print(json.dumps([seen - cut_at for seen in aborted]))

loopback(True)
asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "-rn", "true"], capture_output=True, check=False).returncode != 0, reason="no network namespaces here"
)
@pytest.mark.parametrize(
    "asked",
    [{"do": "never"}, {"do": "stream", "stream": True, "events": 100_000, "gap_s": 0.02}],
    ids=["while-it-waits", "mid-stream"],
)
def test_it_is_given_up_after_the_grace(run_dir: Path, asked: dict[str, object]) -> None:
    """Probes find it while nothing is under way, missing acknowledgements while something is; not before 3 s, soon after."""
    done = subprocess.run(
        ["unshare", "-rn", sys.executable, "-c", IN_NAMESPACE, str(run_dir), json.dumps(asked)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (took_s,) = json.loads(done.stdout)
    assert 1.5 < took_s < 7
