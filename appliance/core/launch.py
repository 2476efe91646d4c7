"""How an engine is started and asked: the seam between appliance/backends and appliance/supervisor."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from appliance.core.plan import Rung

WEIGHTS_SOCKET = "weights.sock"
"""In the run directory: where a weight holder is asked (docs/adr/0082-weight-holder.md)."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine listens: a unix socket, or a loopback port. Exactly one of the two.

    `str()` gives `unix:/run/.../engine-3.sock` or `http://127.0.0.1:30000`; `parse` takes it back.
    """

    socket_path: str | None = None
    port: int | None = None

    def __post_init__(self) -> None:
        if (self.socket_path is None) == (self.port is None):
            raise ValueError("an endpoint is either a socket path or a port")

    def __str__(self) -> str:
        return f"unix:{self.socket_path}" if self.socket_path is not None else f"http://127.0.0.1:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """The inverse of str().

        Raises:
            ValueError: neither `unix:PATH` nor `http://127.0.0.1:PORT`.
        """
        if text.startswith("unix:/"):
            return cls(socket_path=text.removeprefix("unix:"))
        if text.startswith("http://127.0.0.1:") and text.rpartition(":")[2].isdigit():
            return cls(port=int(text.rpartition(":")[2]))
        raise ValueError(f"{text!r} is no endpoint: expected unix:/path or http://127.0.0.1:port")


@dataclass(frozen=True, slots=True)
class SpareSpec:
    """A process that can be started before it is known what engine life it will be (docs/adr/0031-warm-spare.md).

    One that was started by an equal spec can become the life that it belongs to.

    Attributes:
        argv, env, cwd: for exec; env is complete, nothing is inherited.
        stamp: of the files that it reads: when they are others, it has read the wrong ones.
        forensic: it is to become an engine with instruments.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    stamp: str
    forensic: bool = False


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """All that is needed to start one engine life and to know whether it lives.

    Attributes:
        argv, env, cwd: for exec; env is complete, nothing is inherited.
        endpoint: where it will listen.
        probe_path: GET on it answers 200 when ready and alive.
        start_deadline_s: no answer by then is a failed start, whatever the process says.
        stop_deadline_s: after SIGTERM; then the group is killed.
        engine: the backend's name, such as "native".
        rung: the setting the argv expresses.
        spare: what could become this life by being told argv; None: it can only be started.
        holder: a process that may keep the weights, which this life asks for them; started as a spare is.
        notes: what the owner should know of this command line; a sentence each, logged at the start.
        runtime: name of the environment that it runs in, where that has one (appliance/config/runtimes.py).
        forensic: it is started with instruments, which leave what they catch in this folder: its stacks are asked for before it is ended,
            and where the folder is cwd it may dump its core there; empty: without.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    endpoint: Endpoint
    probe_path: str
    start_deadline_s: float
    stop_deadline_s: float
    engine: str
    rung: Rung
    spare: SpareSpec | None = None
    holder: SpareSpec | None = None
    notes: tuple[str, ...] = ()
    runtime: str = ""
    forensic: str = ""


class ContinuesBy(enum.StrEnum):
    """How an engine goes on with an answer that an earlier life began."""

    IDS = "ids"
    """It is given the token ids so far and goes on behind them, exactly (docs/structures.md, "A request over a crash")."""
    MESSAGE = "message"
    """It is given the text so far as a message to be finished: `continue_final_message` of vLLM and SGLang."""
    REPLAY = "replay"
    """It cannot: the request is answered from its start, and what the client has already is taken away."""

    @classmethod
    def _missing_(cls, _value: object) -> ContinuesBy:
        return cls.REPLAY  # a word of a newer version; this way goes with every engine


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What a running engine says it can take; the gateway's fuse and slots are set from it.

    Attributes:
        max_prompt_tokens, max_new_tokens: of one request, where the engine keeps prompts and answers apart;
            0: only the context limits them.
        paths: what it has for clients, where it says so; one that ends in a slash stands for all that begin with it.
    """

    model_id: str
    context_length_tokens: int
    max_running: int
    kv_tokens: int
    max_prompt_tokens: int = 0
    max_new_tokens: int = 0
    continues_by: ContinuesBy = ContinuesBy.REPLAY
    paths: tuple[str, ...] = ()
