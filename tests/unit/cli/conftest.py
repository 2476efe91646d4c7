"""Running appliancectl in this process, as its entry point does."""

import asyncio
import functools
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from appliance.cli.__main__ import run
from appliance.control.server import ControlServer, PublicationBoard
from appliance.core.action import Action, ActionKind
from appliance.core.causes import Cause
from appliance.core.diagnosis import ChainLink, Citation, Confidence, Diagnosis, Refuted, Role
from appliance.core.errors import ApplianceError
from appliance.core.evidence import Evidence, Source
from appliance.core.incident import Incident
from appliance.core.publication import Publication
from appliance.core.requests import InflightRequest, Resumability
from appliance.core.states import EngineState


@dataclass(frozen=True)
class Said:
    """What a command line came to."""

    code: int
    out: str
    err: str


Ctl = Callable[..., Said]


@pytest.fixture
def ctl(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ctl:
    """appliancectl for a user without a home of note: nothing of this machine's own appliance is seen or touched."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "xdg-state"))
    monkeypatch.delenv("LLM_APPLIANCE_CONFIG", raising=False)

    def call(*arguments: str | Path) -> Said:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Said(code, said.out, said.err)

    return call


class Applianced:
    """The control socket with canned answers, served by the real server in a thread; it remembers what it was asked."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.answers: dict[str, dict | ApplianceError] = {}
        self.asked: list[tuple[str, dict]] = []

    def serve(self) -> Callable[[], None]:
        """Listen; the returned function ends it."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        board = PublicationBoard(Publication(EngineState.STARTING, 1, None, None, "loading", 1.0))
        verbs = ("status", "incidents", "incident", "restart", "drain", "resume")
        server = ControlServer(self.run_dir / "control.sock", {verb: functools.partial(self._handle, verb) for verb in verbs}, board)
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(10)

        def stop() -> None:
            asyncio.run_coroutine_threadsafe(server.close(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()

        return stop

    async def _handle(self, verb: str, arguments: Mapping[str, object]) -> Mapping[str, object]:
        self.asked.append((verb, dict(arguments)))
        answer = self.answers.get(verb, {})
        if isinstance(answer, ApplianceError):
            raise answer
        return answer


@pytest.fixture
def applianced() -> Iterator[Applianced]:
    """An applianced whose answers the test chooses."""
    with tempfile.TemporaryDirectory(prefix="cli-") as folder:
        one = Applianced(Path(folder))
        stop = one.serve()
        yield one
        stop()


def make_incident(number: int = 1, cause: Cause = Cause.CUDA_OOM_PREFILL, **changes: object) -> Incident:
    """An incident with every kind of field in it."""
    root = Citation(Source.ENGINE_LOG, 12, "torch.OutOfMemoryError: CUDA out of memory", 1_700_000_000.0 + number)
    after = Citation(Source.ENGINE_LOG, 15, "SIGQUIT received.", 1_700_000_001.0 + number)
    verdict = Diagnosis(
        cause=cause,
        confidence=Confidence.HIGH,
        sentence="A prompt needed 48.00 MiB and 5.19 MiB were free.",
        root=root,
        chain=(ChainLink(Role.ROOT, "oom", root), ChainLink(Role.CONSEQUENCE, "sigquit", after)),
        refuted=(Refuted(Cause.ENGINE_RPC_TIMEOUT, "no time-out before the allocation failed"),),
        remedies=("Lower mem_fraction.",),
        safer_config=(("mem_fraction", "0.95 -> 0.93"),),
        numbers=(("asked_bytes", 48 * 1024**2),),
    )
    fields = {
        "incident_id": f"inc-20231114-22132{number}-abcd",
        "time_s": 1_700_000_000.0 + number,
        "generation": number,
        "engine": "native",
        "engine_version": "0.1.0",
        "model": "demo",
        "phase": "serving",
        "diagnosis": verdict,
        "action": Action(ActionKind.RESTART_SAFER, "restarted on the safer rung 1 because a prompt did not fit"),
        "evidence": (Evidence(Source.ENGINE_LOG, "torch.OutOfMemoryError: CUDA out of memory", 1_700_000_000.0, 12),),
        "rung_after": 1,
        "inflight": (InflightRequest("req-1", "/v1/completions", "f1", 100, 7, 0, False, number, 1, 0.5, Resumability.REPLAY),),
        "uptime_s": 200.0,
        "recovered_s": 1.25,
    }
    return Incident(**{**fields, **changes})


@pytest.fixture
def incident() -> Callable[..., Incident]:
    """Makes incidents."""
    return make_incident
