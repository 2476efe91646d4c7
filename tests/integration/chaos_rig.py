"""The box that chaos.py breaks: applianced with two made-up cards, a gateway whose socket outlives it, clients that check each byte."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fakes.cards import FakeNvml, make_box
from tests.integration.supervisor.harness import Applianced, is_alive, wait_for
from tests.unit.supervisor.test_process import cgroup2_for_tests

ROOT = Path(__file__).parents[2]
LAUNCHER = ROOT / "tests/fakes/boxed_applianced.py"
CLIENTS = 4
CLIENT_TIMEOUT_S = 90.0
REFUSAL = "CUDA error"
"""What the engine itself says to every prompt when it was told to `refuse`; the gateway hands it on."""
STATE_BYTES = 64 * 2**20
MEMORY_V1 = Path("/sys/fs/cgroup/memory")
EAT_LIMIT_BYTES = 120 * 2**20
SETTINGS = {
    "supervisor.stable_after_s": "1",
    "supervisor.backoff_max_s": "1",
    "supervisor.canary_s": "1",
    "diagnosis.keep_incidents": "300",
    "gpu.wait_s": "5",
}
WAITED = {
    # Two cores for applianced, gateway, engine and clients: a healthy engine may well wait a second for its turn.
    "supervisor.hang_floor_s": 1.5,
    "supervisor.hang_ceiling_s": 5.0,
    "supervisor.start_stall_s": 3.0,
    "supervisor.probe_timeout_s": 0.3,
}
"""How long silence is borne. On a machine that others keep busy, so many times longer."""


def say(text: str) -> None:
    """At once, also into a pipe."""
    print(text, flush=True)


class Rig:
    """Owns every process, mount and cgroup of the run. `close` gives all of it back, whatever happened."""

    def __init__(self, folder: Path, patience: float = 1.0) -> None:
        self.folder = folder
        self.patience = patience
        self.skipped: list[str] = []
        self.box = folder / "box"
        make_box(self.box, cards=2)
        self.nvml = FakeNvml(folder / "nvml", cards=2)
        self.kmsg = folder / "kmsg"
        os.mkfifo(self.kmsg)
        self._kmsg = os.open(self.kmsg, os.O_RDWR | os.O_NONBLOCK)
        self._sequence = itertools.count(1)
        self.clock = folder / "clock"
        self.clock.write_text("0")
        self.new_boot()
        self._mount_state()
        self.cgroup = self._make_cgroup()
        self.memory_cgroup = self._make_memory_cgroup()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listening.getsockname()[1]
        self.gateway_kills = 0
        self.applianced = self._start_applianced()
        self.gateway = self.start_gateway()

    # -- applianced ------------------------------------------------------------------------------------------------------

    def _start_applianced(self) -> Applianced:
        shim = self.folder / "clock.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", shim, ROOT / "tests/fakes/clock.c", "-ldl"], check=True)
        environment = {
            **self.nvml.environment,
            "BOX": str(self.box),
            "LD_PRELOAD": str(shim),
            "FAKE_CLOCK": str(self.clock),
            "PYTHONPATH": str(ROOT),
        }
        waited = {key: f"{self.patience * value_s:.3g}" for key, value_s in WAITED.items()}
        settings = SETTINGS | waited | {"diagnosis.kernel_log": str(self.kmsg)}
        return Applianced(
            self.folder, "--step-s", "0.02", settings=settings, environment=environment, cgroup=self.cgroup, program=(str(LAUNCHER),)
        )

    def restart_applianced(self) -> None:
        """What systemd does when it is gone."""
        self.applianced.start()

    def new_boot(self) -> None:
        """The kernel's own name for this boot."""
        (self.box / "boot_id").write_text(str(uuid.uuid4()))

    def kernel_says(self, *texts: str) -> None:
        """Records as /dev/kmsg has them."""
        for text in texts:
            stamp = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
            os.write(self._kmsg, f"3,{next(self._sequence)},{stamp},-;{text}\n".encode())

    def set_clock(self, offset_s: int) -> None:
        """The wall clock of applianced, not that of anybody else."""
        fresh = self.clock.with_suffix(".new")
        fresh.write_text(str(offset_s))
        fresh.replace(self.clock)

    # -- the gateway -----------------------------------------------------------------------------------------------------

    def start_gateway(self) -> subprocess.Popen[bytes]:
        """On the socket that stays open, as under systemd."""
        argv = [
            sys.executable,
            "-m",
            "appliance.gateway",
            "--run-dir",
            str(self.applianced.run_dir),
            "--state-dir",
            str(self.folder / "gw"),
        ]
        argv += ["--config", str(self.folder / "appliance.toml"), "--fd", str(self._listening.fileno())]
        with (self.folder / "gateway.log").open("ab") as log:
            self.gateway = subprocess.Popen(
                argv, cwd=ROOT, stdout=log, stderr=log, stdin=subprocess.DEVNULL, pass_fds=[self._listening.fileno()]
            )
        return self.gateway

    def kill_gateway(self) -> None:
        """kill -9, and systemd's restart."""
        self.gateway_kills += 1
        self.gateway.kill()
        self.gateway.wait()
        self.start_gateway()

    # -- disk, memory, cgroups -------------------------------------------------------------------------------------------

    def _mount_state(self) -> None:
        self.state = self.folder / "state"
        self.state.mkdir()
        self.disk_is_small = False
        if os.geteuid() != 0:
            self.skipped.append("disk full: not root, so no small disk can be mounted for the state folder")
            return
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={STATE_BYTES}", "chaos", self.state], capture_output=True, check=False
        )
        self.disk_is_small = mounted.returncode == 0
        if not self.disk_is_small:
            self.skipped.append(f"disk full: no tmpfs can be mounted ({mounted.stderr.decode().strip()})")

    def fill_disk(self) -> None:
        """To the last byte."""
        with (self.state / "filler").open("wb", buffering=0) as filler, contextlib.suppress(OSError):
            while True:
                filler.write(b"x" * 65536)

    def free_disk(self) -> None:
        """And free again."""
        (self.state / "filler").unlink()

    def _make_cgroup(self) -> Path | None:
        root = cgroup2_for_tests()
        if root is None:
            self.skipped.append("cgroups: no writable cgroup v2, engines are held by their session")
            return None
        path = root / f"appliance-chaos-{os.getpid()}"
        path.mkdir()
        try:
            os.setxattr(path, "user.delegate", b"1")
        except OSError:
            path.rmdir()
            self.skipped.append("cgroups: no xattr on cgroups here, engines are held by their session")
            return None
        return path

    def _make_memory_cgroup(self) -> Path | None:
        path = MEMORY_V1 / f"appliance-chaos-{os.getpid()}"
        try:
            path.mkdir()
            (path / "memory.limit_in_bytes").write_text(str(EAT_LIMIT_BYTES))
        except OSError as error:
            self.skipped.append(f"the kernel's OOM killer: no memory cgroup can be made ({error.strerror}); RLIMIT_AS alone is tried")
            return None
        return path

    def limit_address_space(self, pid: int) -> None:
        """A little more than it has now."""
        words = Path(f"/proc/{pid}/statm").read_text().split()
        limit = int(words[0]) * resource.getpagesize() + EAT_LIMIT_BYTES
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))

    def close(self) -> list[str]:
        """Give everything back; what was still there and should not have been."""
        leaks: list[str] = []
        if self.applianced.process.poll() is None:
            self.applianced.stop()
        self.gateway.kill()
        self.gateway.wait()
        self._listening.close()
        os.close(self._kmsg)
        leaks += [f"a process is left: {pid} {words}" for pid, words in processes_of(self.folder)]
        if self.cgroup is not None:
            left = (path for kind in ("engine", "spare", "weights") for path in self.cgroup.glob(f"{kind}-*"))
            leaks += [f"a cgroup is left: {path.name}" for path in left]
            for path in (*self.cgroup.glob("*/"), self.cgroup):
                with contextlib.suppress(OSError):
                    path.rmdir()
        if self.memory_cgroup is not None:
            with contextlib.suppress(OSError):
                wait_for(lambda: not (self.memory_cgroup / "cgroup.procs").read_text(), "its cgroup is empty", 5)  # type: ignore[operator]
                self.memory_cgroup.rmdir()
        if self.disk_is_small:
            subprocess.run(["umount", self.state], check=False)
        return leaks


def processes_of(folder: Path) -> list[tuple[int, str]]:
    """Everybody alive whose command line has this folder in it."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if str(folder) in words and int(entry.name) != os.getpid() and is_alive(int(entry.name)):
                found.append((int(entry.name), words))
    return found


class Load:
    """Clients that ask one question after another through the gateway, and know every byte of the answer."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self._rig = rig
        self._seed = seed
        self._stop = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(CLIENT_TIMEOUT_S + 10)
            if thread.is_alive():
                self.wrong.append("a client hangs")

    def _ask(self, number: int) -> None:
        for turn in itertools.count():
            if self._stop.is_set():
                return
            kills, began_s = self._rig.gateway_kills, time.monotonic()
            tokens, stream = 5 + (self._seed + 7 * number + 3 * turn) % 30, (number + turn) % 2 == 0
            try:
                outcome = self._one(f"client {number}, question {turn}", tokens, stream)
            except (OSError, http.client.HTTPException) as error:
                outcome = f"connection: {error!r}"
            cut = outcome.startswith("connection")
            if cut and self._rig.gateway_kills > kills:
                outcome, cut = "cut by the gateway's death", False
            self.outcomes["a cut connection" if cut else outcome.partition(":")[0]] += 1
            if cut or outcome.startswith("wrong"):
                self.wrong.append(f"client {number}, question {turn}, after {time.monotonic() - began_s:.1f} s: {outcome}")
            if outcome != "exact":
                time.sleep(0.2)

    def _one(self, prompt: str, tokens: int, stream: bool) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self._rig.port, timeout=CLIENT_TIMEOUT_S)
        with contextlib.closing(connection):
            body = {"model": "fake", "prompt": prompt, "max_tokens": tokens, "stream": stream}
            connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            data = answer.read()
            if answer.status != 200:
                error = json.loads(data)["error"]
                known = answer.status in (429, 503) or error["code"] == "request_quarantined" or error["message"] == REFUSAL
                return f"refused with {error['code'] or error['message']}" if known else f"wrong: status {answer.status}: {data[:200]!r}"
            text = "".join(_events(data)) if stream else json.loads(data)["choices"][0]["text"]
        if stream and b'"error"' in data:
            return "told in the stream that it is lost"
        if stream and b"data: [DONE]" not in data:
            return f"wrong: a stream without its end: {data[-200:]!r}"
        expected = "".join(f" t{number}" for number in range(tokens))
        return "exact" if text == expected else f"wrong: {text[:200]!r} instead of {tokens} tokens"


def _events(data: bytes) -> Iterator[str]:
    for line in data.decode().splitlines():
        if line.startswith("data: {"):
            event: dict[str, Any] = json.loads(line.removeprefix("data: "))
            yield from (choice["text"] for choice in event.get("choices", ()))


def clean(folder: Path) -> None:
    """After a good run."""
    shutil.rmtree(folder, ignore_errors=True)
