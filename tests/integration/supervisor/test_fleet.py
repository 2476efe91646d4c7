"""An engine on each of two cards (`[gpu] layout = replicas`): a real applianced on a made-up box with a libnvidia-ml that obeys."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from appliance.control import protocol
from appliance.core.errors import ControlError
from tests.fakes.cards import HAS_COMPILER, FakeNvml, make_box, uuid_of
from tests.integration.supervisor.conftest import each_ended
from tests.integration.supervisor.harness import ROOT, Applianced, is_alive, wait_for

pytestmark = pytest.mark.skipif(not HAS_COMPILER, reason="no gcc to build a libnvidia-ml with")

FIRST, SECOND = "0000:01:00", "0000:02:00"
ANSWERING = ("serving", "degraded")
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.94 GiB. GPU 0 has 0.10 GiB free."
PATIENT = {"supervisor.hang_floor_s": "10", "supervisor.hang_ceiling_s": "30", "supervisor.probe_timeout_s": "5"}
"""No test here is about silence, and two engines on a busy machine are seldom quick."""


class TwoCards(Applianced):
    """applianced on a box of its own, with questions to each of its engines."""

    def __init__(self, folder: Path, *engine: str, cards: int = 2, settings: dict[str, str] | None = None, **options: Any) -> None:
        make_box(folder / "box", cards)
        (folder / "box/boot_id").write_text("0c1b\n")
        self.nvml = FakeNvml(folder / "nvml", cards)
        self.kmsg = folder / "kmsg"
        os.mkfifo(self.kmsg)
        self._sequence = itertools.count(1)
        chosen = {"gpu.layout": "replicas", "diagnosis.kernel_log": str(self.kmsg), "gpu.wait_s": "5", **PATIENT, **(settings or {})}
        environment = {"BOX": str(folder / "box"), "PYTHONPATH": str(ROOT), **self.nvml.environment}
        launcher = (str(ROOT / "tests/fakes/boxed_applianced.py"),)
        super().__init__(folder, "--step-s", "0.02", *engine, settings=chosen, environment=environment, program=launcher, **options)

    def replicas(self) -> list[dict[str, Any]]:
        """Each one's status; empty while nobody listens."""
        found: list[dict[str, Any]] = self.status().get("replicas", [])
        return found

    def wait_each(self, *states: str, what: str = "") -> list[dict[str, Any]]:
        """One state for each card."""
        try:
            return wait_for(lambda: (each := self.replicas()) and [one["state"] for one in each] == [*states] and each, what or f"{states}")  # type: ignore[no-any-return]
        except AssertionError as error:
            raise AssertionError(f"{error}; its log ends:\n{self.log.read_text()[-3000:]}") from None

    def engine_of(self, index: int, path: str, body: Any = None, timeout_s: float = 5.0) -> dict[str, Any]:
        """Talk to an engine itself."""
        connection = http.client.HTTPConnection("engine", timeout=timeout_s)
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(timeout_s)
        connection.sock.connect(str(self.run_dir / f"replica-{index}/engine-{self.replicas()[index]['generation']}.sock"))
        connection.request("POST" if body is not None else "GET", path, json.dumps(body) if body is not None else None)
        with contextlib.closing(connection):
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
        return answer

    def fault_of(self, index: int, **fault: Any) -> None:
        """Break one of them."""
        with contextlib.suppress(OSError, http.client.HTTPException):  # it died of it before its answer was read
            self.engine_of(index, "/fault", fault)

    def kernel_says(self, text: str) -> None:
        """Now, as the kernel would write it."""
        self.kmsg.write_text(f"3,{next(self._sequence)},{int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)},-;{text}\n")

    def publications(self) -> Subscription:
        """All of them from here on."""
        return Subscription(self.run_dir / "control.sock")


class Subscription:
    """What a gateway is told, kept by a thread."""

    def __init__(self, path: Path) -> None:
        self.heard: list[dict[str, Any]] = []
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._socket.sendall(protocol.encode({"verb": "subscribe"}))
        threading.Thread(target=self._listen, daemon=True).start()
        wait_for(lambda: self.heard, "the first publication")

    def _listen(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as stream:
            while header := stream.read(protocol.HEADER_BYTES):
                self.heard.append(protocol.decode(stream.read(protocol.body_length(header)))["publication"])

    def close(self) -> None:
        """No more of it."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def two(short_path: Path) -> Iterator[Callable[..., TwoCards]]:
    """Start one; it is ended whatever the test did."""
    yield from each_ended(partial(TwoCards, short_path))


@contextmanager
def asked_all_the_time(one: TwoCards, index: int) -> Iterator[list[str]]:
    """A client of one engine that never rests; yields what went wrong."""
    wrong: list[str] = []
    over = threading.Event()
    path = one.run_dir / f"replica-{index}/engine-{one.replicas()[index]['generation']}.sock"

    def ask() -> None:
        while not over.is_set():
            try:
                connection = http.client.HTTPConnection("engine", timeout=5)
                connection.sock = socket.socket(socket.AF_UNIX)
                connection.sock.settimeout(5)
                connection.sock.connect(str(path))
                connection.request("POST", "/v1/completions", json.dumps({"prompt": "x", "max_tokens": 2}))
                text = json.loads(connection.getresponse().read())["choices"][0]["text"]
                if text != " t0 t1":
                    wrong.append(text)
                connection.close()
            except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
                wrong.append(repr(error))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield wrong
    finally:
        over.set()
        thread.join()


def environment_of(pid: int) -> dict[str, str]:
    """What a process was started with."""
    return dict(word.split("=", 1) for word in Path(f"/proc/{pid}/environ").read_text().split("\0") if "=" in word)


def test_each_card_has_an_engine_of_its_own(two: Callable[..., TwoCards]) -> None:
    """Each sees its card alone and has its own folder; the gateway is told of both, and of what both are together; a person too."""
    one = two()
    each = one.wait_each("serving", "serving")
    assert [environment_of(replica["engine_pid"])["CUDA_VISIBLE_DEVICES"] for replica in each] == [uuid_of(0), uuid_of(1)]
    assert [replica["card"] for replica in each] == [FIRST, SECOND]
    subscription = one.publications()
    outer = subscription.heard[0]
    subscription.close()
    assert (outer["state"], outer["generation"], outer["reason"]) == ("serving", 2, "2 engines serve, each on a card of its own")
    sockets = [f"unix:{one.run_dir}/replica-{index}/engine-1.sock" for index in (0, 1)]
    assert [replica["endpoint"] for replica in outer["replicas"]] == sockets
    assert outer["endpoint"] == sockets[0]
    status = one.status()
    assert (status["state"], status["restarts"], status["last_incident"]) == ("serving", 0, None)
    assert status["sensors"]["nvml"]["ok"] is True
    for index in (0, 1):
        ladder = one.ask("ladder", replica=index)
        assert (ladder["in_force"], len(ladder["rungs"])) == (0, status["replicas"][index]["rungs"])
    flight = wait_for(lambda: len((found := one.ask("flight"))["cards"]) == 2 and found, "a sample of each card")
    assert [card["address"] for card in flight["cards"]] == [FIRST, SECOND]
    assert [[card["address"] for card in replica["cards"]] for replica in flight["replicas"]] == [[FIRST], [SECOND]]
    with pytest.raises(ControlError, match="replica = 2 is none of 0 to 1"):
        one.ask("restart", replica=2)
    command = [sys.executable, "-m", "appliance.cli", "--run-dir", str(one.run_dir), "status"]
    said = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}).stdout
    for words in ("2 engines, a card each", f"card {FIRST} (replica 0, generation 1)", f"card {SECOND} (replica 1, generation 1)"):
        assert words in said
    assert one.stop() == 0


def test_a_crash_of_one_is_none_of_the_others_business(two: Callable[..., TwoCards]) -> None:
    """kill -9: the other answers all the time, the incident names the card, the engine is back as a life of its own."""
    one = two()
    before = one.wait_each("serving", "serving")
    subscription = one.publications()
    with asked_all_the_time(one, 1) as wrong:
        os.kill(before[0]["engine_pid"], signal.SIGKILL)
        wait_for(lambda: one.replicas()[0]["generation"] == 2 and one.replicas()[0]["state"] == "serving", "it is back")
    assert wrong == []
    subscription.close()
    assert all(outer["state"] in ANSWERING for outer in subscription.heard)
    assert all(outer["replicas"][1] == subscription.heard[0]["replicas"][1] for outer in subscription.heard)
    away = next(outer for outer in subscription.heard if outer["state"] == "degraded")
    assert away["reason"].startswith(f"1 of 2 engines serves; card {FIRST}: ")
    assert away["endpoint"] == away["replicas"][1]["endpoint"]
    after = one.replicas()
    assert after[1]["engine_pid"] == before[1]["engine_pid"]
    (incident,) = wait_for(lambda: [i for i in one.ask("incidents", limit=9)["incidents"] if i["recovered_s"] is not None], "it is closed")
    assert (incident["diagnosis"]["cause"], incident["card"], incident["generation"]) == ("killed_unknown", FIRST, 1)
    assert [replica["last_incident"] is not None for replica in after] == [True, False]
    assert one.status()["generation"] == 3


def test_rungs_are_apart_and_outlive_applianced(two: Callable[..., TwoCards]) -> None:
    """One runs out of memory until it is on a safer rung: the other keeps its own, also after applianced was killed and began again."""
    one = two()
    one.wait_each("serving", "serving")
    for _ in range(2):
        generation = one.replicas()[0]["generation"]
        one.fault_of(0, kind="script", steps=[{"kind": "log", "text": OOM}, {"kind": "signal", "signal": "SIGQUIT"}])
        wait_for(lambda: one.replicas()[0]["generation"] > generation and one.replicas()[0]["state"] in ANSWERING, "it is back")  # noqa: B023
        if one.replicas()[0]["rung"]["index"]:
            break
    first, second = one.replicas()
    assert (first["state"], first["rung"]["index"] > 0, second["state"], second["rung"]["index"]) == ("degraded", True, "serving", 0)
    assert one.status()["state"] == "degraded"
    assert "2 engines serve" in one.status()["sentence"]
    outer = one.status()["generation"]
    engines = [first["engine_pid"], second["engine_pid"]]
    one.stop(signal.SIGKILL)
    wait_for(lambda: not any(is_alive(pid) for pid in engines), "the engines die with it")
    one.start()
    again = one.wait_each("degraded", "serving")
    assert [replica["rung"]["index"] for replica in again] == [first["rung"]["index"], 0]
    assert [replica["generation"] for replica in again] == [first["generation"] + 1, second["generation"] + 1]
    assert one.status()["generation"] == outer + 2
    died = [incident for incident in one.ask("incidents", limit=9)["incidents"] if incident["diagnosis"]["cause"] == "supervisor_died"]
    assert len(died) == 1, "the end of one applianced is one incident"
    wait_for(lambda: all(i["recovered_s"] is not None for i in one.ask("incidents", limit=9)["incidents"]), "all are closed")


def test_a_lost_card_takes_out_its_engine_alone(two: Callable[..., TwoCards], short_path: Path) -> None:
    """Xid 79 in three wordings: that engine parks with the word reboot, NVML is not asked about its card again; the other goes on, over a
    restart of applianced too. Nothing reboots while one serves; once the second card is lost the owner's command runs, once."""
    reboots = short_path / "reboots"
    command = json.dumps(["/bin/sh", "-c", f"echo x >> {reboots}"])
    one = two(settings={"supervisor.auto_reboot": "always", "supervisor.reboot_command": command})
    before = one.wait_each("serving", "serving")
    with asked_all_the_time(one, 1) as wrong:
        one.kernel_says("NVRM: A GPU has fallen off the bus.")  # which one, only NVML could say
        one.kernel_says(f"NVRM: Xid (PCI:{FIRST}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
        one.kernel_says(f"NVRM: The NVIDIA GPU {FIRST}.0")
        one.kernel_says("NVRM: fallen off the bus and is not responding to commands.")
        after = one.wait_each("parked", "serving")
        one.nvml.calls()
        wait_for(lambda: [call for call in one.nvml.calls() if call.endswith(" 1")], "the other card is asked about")
    assert wrong == []
    assert after[1]["engine_pid"] == before[1]["engine_pid"]
    (incident,) = one.ask("incidents", limit=9)["incidents"]
    assert (incident["diagnosis"]["cause"], incident["action"]["kind"], incident["card"]) == ("gpu_off_bus", "park", FIRST)
    assert "eboot" in after[0]["sentence"]
    status = one.status()
    assert (status["state"], status["xids"], after[1]["xids"]) == ("degraded", {"79": 1}, {})
    assert f"card {FIRST}: parked" in status["sentence"]
    one.ask("resume", replica=0)
    wait_for(lambda: f"parked because {FIRST} was lost in this boot: reboot" in one.replicas()[0]["sentence"], "it is parked again")
    assert one.stop() == 0
    one.nvml.calls()
    one.start()
    again = one.wait_each("parked", "serving")
    assert f"{FIRST} was lost in this boot" in again[0]["sentence"]
    assert not [call for call in one.nvml.calls() if call.endswith(" 0")]
    assert not reboots.exists()
    one.kernel_says(f"NVRM: Xid (PCI:{SECOND}): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.")
    one.wait_each("parked", "parked")
    assert one.status()["state"] == "parked"
    wait_for(reboots.exists, "the owner's command runs")
    assert one.stop() == 0
    assert reboots.read_text() == "x\n"


def test_a_restart_goes_from_one_to_the_next(two: Callable[..., TwoCards]) -> None:
    """At every moment one of them answers; a second restart is refused while the first is under way; one alone can be asked too."""
    one = two("--ready-after-s", "0.5")
    before = one.wait_each("serving", "serving")
    subscription = one.publications()
    said = one.ask("restart", reason="new driver")
    assert "one after the other" in said["sentence"]
    with pytest.raises(ControlError, match="a rolling restart is under way"):
        one.ask("restart")
    wait_for(lambda: all(replica["generation"] == 2 and replica["state"] == "serving" for replica in one.replicas()), "both are new")
    subscription.close()
    assert all(outer["state"] in ANSWERING for outer in subscription.heard)
    assert all(any(replica["state"] in ANSWERING for replica in outer["replicas"]) for outer in subscription.heard)
    generations = [outer["generation"] for outer in subscription.heard]
    assert generations == sorted(generations)
    assert not {replica["engine_pid"] for replica in before} & {replica["engine_pid"] for replica in one.replicas()}
    wait_for(lambda: "the rolling restart is done" in one.log.read_text(), "it ends")
    one.ask("restart", replica=1)
    wait_for(lambda: [replica["generation"] for replica in one.replicas()] == [2, 3], "one alone")
    one.wait_each("serving", "serving")
    assert one.ask("incidents", limit=9)["incidents"] == []


def test_drain_resume_and_reload_are_for_all(two: Callable[..., TwoCards]) -> None:
    """Or for one that is named; a reload reaches both."""
    one = two()
    one.wait_each("serving", "serving")
    one.ask("drain", reason="moving", replica=0)
    one.wait_each("parked", "serving")
    one.ask("drain", reason="moving")
    one.wait_each("parked", "parked")
    assert one.status()["state"] == "parked"
    (one.folder / "appliance.toml").write_text("[supervisor]\nstart_failures_max = 2\n")
    one.process.send_signal(signal.SIGHUP)
    wait_for(lambda: "supervisor.start_failures_max" in one.log.read_text(), "it is reloaded")
    one.ask("resume")
    each = one.wait_each("serving", "serving")
    assert [replica["generation"] for replica in each] == [2, 2]
    with pytest.raises(ControlError, match="cannot be resumed now"):
        one.ask("resume")
    one.ask("report", kind="traffic", requests=[])
    with pytest.raises(ControlError, match="is no list of requests"):
        one.ask("report", requests=["x"])


def test_a_request_is_of_the_engine_that_had_it(two: Callable[..., TwoCards]) -> None:
    """The gateway says which one that was: the incident of another engine does not have it, though their generations are alike."""
    one = two()
    before = one.wait_each("serving", "serving")
    shape = {
        "path": "/v1/completions", "fingerprint": "f", "body_bytes": 9, "prompt_tokens": 7, "sent_bytes": 0, "stream": False,
        "generation": 1, "attempt": 1, "age_s": 0.5, "resumability": "replay",
    }  # fmt: skip
    requests = [{"request_id": f"req-{index}", "replica": index, **shape} for index in (0, 1)]
    one.ask("report", kind="traffic", requests=requests)
    os.kill(before[1]["engine_pid"], signal.SIGKILL)
    (incident,) = one.wait_incident()
    assert (incident["card"], [request["request_id"] for request in incident["inflight"]]) == (SECOND, ["req-1"])


def test_a_stop_leaves_nothing(two: Callable[..., TwoCards]) -> None:
    """SIGTERM: answers that run are finished, both engines end, strays too; no socket is left, and the service manager was told all."""
    one = two("--spawn-stray")
    each = one.wait_each("serving", "serving")
    strays = [one.engine_of(index, "/stats")["stray_pid"] for index in (0, 1)]
    texts: list[str] = []

    def ask() -> None:
        texts.append(one.engine_of(1, "/v1/completions", {"prompt": "x", "max_tokens": 40})["choices"][0]["text"])

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: one.engine_of(1, "/stats")["running"] == 1, "it runs")
    assert one.stop() == 0
    asking.join()
    assert texts == ["".join(f" t{n}" for n in range(40))]
    assert not any(is_alive(pid) for pid in (*strays, *(replica["engine_pid"] for replica in each)))
    assert [*one.run_dir.rglob("*.sock")] == []


def test_one_card_is_one_engine(two: Callable[..., TwoCards]) -> None:
    """As without the layout, and the log says why; nothing is named by a replica then."""
    one = two(cards=1)
    status = one.wait_state("serving")
    assert "replicas" not in status
    assert "one engine, although gpu.layout is replicas, because this machine has one card" in one.log.read_text()
    with pytest.raises(ControlError, match="there is one engine; leave the number out"):
        one.ask("restart", replica=0)
    assert one.stop() == 0


def test_a_way_back_to_one_engine_keeps_the_generation_growing(two: Callable[..., TwoCards]) -> None:
    """A gateway that holds requests over a change of the layout waits for a higher one."""
    one = two()
    one.wait_each("serving", "serving")
    assert one.stop() == 0
    layout = one._arguments.index("gpu.layout=replicas")
    one._arguments[layout] = "gpu.layout=single"
    one.start()
    single = one.wait_state("serving")
    assert single["generation"] == 3
    assert one.stop() == 0
    one._arguments[layout] = "gpu.layout=replicas"
    one.start()
    one.wait_each("serving", "serving")
    assert one.status()["generation"] == 5
    assert one.stop() == 0
