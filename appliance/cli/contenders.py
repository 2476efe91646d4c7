"""`appliancectl bench --engine A --engine B`: engines one after the other, each in an appliance of its own for its turn."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from appliance.cli.place import RUN_LINK, Place
from appliance.config import Config
from appliance.config.runtimes import LLAMA_SERVER, RUNTIMES, can_run, current_runtime, engine_of
from appliance.control import client
from appliance.core.errors import ApplianceError, Unreachable
from appliance.core.states import EngineState
from appliance.core.units import format_duration
from appliance.orphans import ends_with_us

ENGINES = ("native", "sglang", "vllm", "llamacpp")
OUT_OF_THE_WAY = (EngineState.PARKED.value, EngineState.STOPPED.value)
CLEARLY_FASTER = 1.1
"""Ten in a hundred: less than that is within what one run differs from the next."""
LOOK_S = 0.2
STOP_S = 60.0
_SERVING = re.compile(r"Serving (\S+) at (https?://\S+)/v1 ")
_PARKED = re.compile(r"\bparked because (.*)")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_ALONE = (
    "gateway.host=127.0.0.1", "gateway.api_keys_file=", "gateway.tls_certificate=", "gateway.tls_key=", "fallback.base_url=",
    "metrics.traffic_days=0", "supervisor.on_park=[]", "supervisor.auto_reboot=never", "ladder.prove=off", "engine.warm_spare=false",
)  # fmt: skip
"""What an appliance has for others than the one who measures."""


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine, what it serves, and the settings that make the difference."""

    name: str
    backend: str
    model: str
    settings: tuple[str, ...]


def contender(words: str, config: Config, state_dir: Path) -> Contender:
    """Of ENGINE or RUNTIME, with =MODEL where it serves another file than the configured one.

    Raises:
        ApplianceError: there is no such engine, or it has nothing to serve.
    """
    name, _, model = words.partition("=")
    runtime = current_runtime(state_dir, name) if name in ENGINES else (state_dir / RUNTIMES / name).resolve()
    if name not in ENGINES and not (runtime is not None and "-" in name and can_run(runtime)):
        hint = f"name one of {', '.join(ENGINES)}, or a runtime of `appliancectl runtime list`"
        raise ApplianceError(f"{name!r} is no engine and no runtime that can be run", hint=hint)
    backend = engine_of(name)
    model = model or config.model.path
    if not model and backend != "native":
        raise ApplianceError(f"{name} has no model to serve", hint=f"write --engine {name}=PATH, or set model.path")
    settings = [f"engine.backend={backend}"]
    if runtime is not None:
        settings.append(f"engine.python={runtime}/bin/python")
        settings += [f"engine.program={runtime}/bin/{LLAMA_SERVER}"] if backend == "llamacpp" else []
    if backend != config.engine.backend:  # what was configured for another engine means nothing to this one
        settings += ["engine.extra_args=[]", "engine.environment=[]", "engine.version=", "engine.kv_dtype=auto", "engine.state_dtype="]
    return Contender(name, backend, model, tuple(settings))


@dataclass(frozen=True, slots=True)
class Turn:
    """One that serves: where, after how long, and where it can be asked."""

    url: str
    ready_s: float
    socket: Path

    def restarts(self) -> int:
        """How often its engine was started again."""
        return int(client.ask(self.socket, "status")["restarts"])


@contextlib.contextmanager
def serving(one: Contender, place: Place, assignments: Sequence[str], deadline_s: float) -> Iterator[Turn]:
    """Its appliance, from the first answer to the end of the block. Raises ApplianceError where it does not come to serve."""
    with tempfile.TemporaryDirectory(prefix="appliance-bench-") as folder:
        command = [sys.executable, "-m", "appliance.cli", "--state-dir", folder]
        command += ["--config", str(file.absolute())] if (file := place.config_file()) is not None else []
        command += ["run", "--port", "0", *(["--model", one.model] if one.model else [])]
        for setting in (*_ALONE, *one.settings, *assignments):
            command += ["--set", setting]
        began_s = time.monotonic()
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, text=True, preexec_fn=ends_with_us()) as child:
            said = _Said(child)
            try:
                url = said.url(began_s + deadline_s, one.name)
                yield Turn(url, time.monotonic() - began_s, (Path(folder) / RUN_LINK).resolve() / "control.sock")
            finally:
                _stop(child)
                said.reading.join(STOP_S)


class _Said:
    """Owns the thread that reads what an appliance says."""

    def __init__(self, child: subprocess.Popen[str]) -> None:
        self._child = child
        self._last: deque[str] = deque(maxlen=8)
        self._url = self._parked = ""
        self.reading = threading.Thread(target=self._read, daemon=True)
        self.reading.start()

    def url(self, until_s: float, name: str) -> str:
        """Where it serves. Raises ApplianceError where it will not."""
        while not self._url:
            if self._parked or self._child.poll() is not None:
                self.reading.join(LOOK_S)
                why = self._parked or " ".join(self._last)[-600:]
                raise ApplianceError(f"{name} does not come to serve: {why}")
            if time.monotonic() > until_s:
                raise ApplianceError(f"{name} does not serve yet: {' '.join(self._last)[-300:]}", hint="raise supervisor.start_deadline_s")
            self.reading.join(LOOK_S)
        return self._url

    def _read(self) -> None:
        assert self._child.stdout is not None
        for raw in self._child.stdout:
            line = _COLOURS.sub("", raw).strip()
            self._last.append(line)
            if (found := _SERVING.search(line)) is not None:
                self._url = found[2]
            elif (found := _PARKED.search(line)) is not None:
                self._parked = found[1]


def _stop(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGINT)
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()


@contextlib.contextmanager
def box_out_of_the_way(place: Place, *, agreed: bool, deadline_s: float) -> Iterator[None]:
    """The appliance that serves here is drained for as long as the block takes: two engines would share what is measured.

    Raises:
        ApplianceError: it serves, and nobody has agreed.
    """
    socket = place.control_socket()
    try:
        state = client.ask(socket, "status")["state"]
    except Unreachable:
        yield
        return
    if state in OUT_OF_THE_WAY:
        yield
        return
    if not agreed:
        hint = "--yes drains it first, and lets it serve again afterwards; clients wait, or get 503"
        raise ApplianceError(f"the appliance of this box is {state}: engines beside it would share memory and time with it", hint=hint)
    client.ask(socket, "drain", reason="engines are compared (appliancectl bench)")
    try:
        until_s = time.monotonic() + deadline_s
        while client.ask(socket, "status")["state"] not in OUT_OF_THE_WAY:
            if time.monotonic() > until_s:
                raise ApplianceError(f"it has not drained within {format_duration(deadline_s)}", hint="appliancectl status says why")
            time.sleep(LOOK_S)
        yield
    finally:
        client.ask(socket, "resume")


def recommended(results: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The engine to take, empty where none can be, and the sentence with the numbers that say so.

    First those that answered everything without a restart; of these the one that is clearly faster (10 %); else the one whose first token
    comes sooner, for 95 of 100 requests.
    """
    whole = [one for one in results if not one.get("error") and not one["failed"] and not one["restarts"]]
    if not whole:
        return "", "none answered every request without a restart: look at the errors before any number"
    by_speed = sorted(whole, key=lambda one: float(one["answer_tokens_per_s"]), reverse=True)
    best, *others = by_speed
    left_out = [str(one["engine"]) for one in results if one not in whole]
    tail = f"; {', '.join(left_out)} failed" if left_out else ""
    if not others:
        return str(best["engine"]), f"{best['engine']}: it alone answered every request without a restart{tail}"
    near = [one for one in by_speed if float(one["answer_tokens_per_s"]) * CLEARLY_FASTER > float(best["answer_tokens_per_s"])]
    if len(near) == 1:
        return str(best["engine"]), f"{best['engine']}: {_speed(best)} against {_speed(others[0])} of {others[0]['engine']}{tail}"
    first, second, *_ = sorted(near, key=_first_token_s)
    words = f"{_first_token_s(first):.2f} s to the first token (P95) against {_first_token_s(second):.2f} s of {second['engine']}"
    return str(first["engine"]), f"{first['engine']}: {words}, at about the same throughput ({_speed(first)}, {_speed(second)}){tail}"


def _speed(one: Mapping[str, Any]) -> str:
    return f"{float(one['answer_tokens_per_s']):.1f} tokens/s"


def _first_token_s(one: Mapping[str, Any]) -> float:
    return float(one["time_to_first_token_s"].get("p95", 0.0))
