"""Asking applianced: blocking for the command line, asynchronous for the gateway.

Every failure is one of core's errors with the cure in it: Unreachable (nobody listens, exit code 3), NotPermitted
(exit code 4), ControlError (it answered something we cannot use, or refused).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from appliance.control import protocol
from appliance.control.codec import inflight_to_json, publication_from_json
from appliance.core.errors import ControlError, NotPermitted, Unreachable
from appliance.core.publication import Publication
from appliance.core.requests import InflightRequest

DEFAULT_PATH = Path("/run/llm-appliance/control.sock")
ANSWER_TIMEOUT_S = 10.0


def ask(path: str | Path, verb: str, *, timeout_s: float = ANSWER_TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
    """One question over a connection of its own, blocking. The answer is without its `ok`.

    Raises:
        Unreachable, NotPermitted, ControlError: see the module.
    """
    with ControlClient(path, timeout_s=timeout_s) as client:
        return client.ask(verb, **arguments)


class ControlClient:
    """A blocking connection that can ask many times, in order. A context manager; connects on entry."""

    def __init__(self, path: str | Path, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._path = Path(path)
        self._timeout_s = timeout_s
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)

    def __enter__(self) -> ControlClient:
        self._socket.settimeout(self._timeout_s)
        try:
            self._socket.connect(str(self._path))
        except OSError as error:
            self._socket.close()
            _raise_unreachable(self._path, error)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._socket.close()

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """The answer without its `ok`. Raises Unreachable or ControlError."""
        try:
            self._socket.sendall(protocol.encode({"verb": verb, **arguments}))
            body = self._read_exactly(protocol.body_length(self._read_exactly(protocol.HEADER_BYTES)))
        except OSError as error:
            _raise_unreachable(self._path, error)
        return _checked(protocol.decode(body))

    def _read_exactly(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            piece = self._socket.recv(count - len(received))
            if not piece:
                raise ConnectionResetError(errno.ECONNRESET, "closed before the answer was complete")
            received += piece
        return bytes(received)


class AsyncControl:
    """The same for asyncio. One connection, used in order; reconnects at the next question after it was lost."""

    def __init__(self, path: str | Path, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        self._path = Path(path)
        self._timeout_s = timeout_s
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._turn = asyncio.Lock()

    async def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """The answer without its `ok`. Raises Unreachable, NotPermitted or ControlError."""
        async with self._turn:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return _checked(await self._exchange({"verb": verb, **arguments}))
            except (OSError, asyncio.IncompleteReadError) as error:
                self._drop()
                _raise_unreachable(self._path, error)
            except protocol.FrameError:
                self._drop()
                raise
            except asyncio.CancelledError:
                self._drop()  # its answer would otherwise be read as the next question's
                raise

    async def report(self, kind: str, requests: Sequence[InflightRequest], **more: Any) -> dict[str, Any]:
        """Tell applianced what is in flight; `kind` is one of the report verb's (docs/structures.md). Raises as ask()."""
        return await self.ask("report", kind=kind, requests=[inflight_to_json(request) for request in requests], **more)

    def close(self) -> None:
        """Give the connection up."""
        self._drop()

    async def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._streams is None:
            self._streams = await asyncio.open_unix_connection(str(self._path))
        reader, writer = self._streams
        writer.write(protocol.encode(message))
        await writer.drain()
        body = await protocol.read_body(reader)
        if body is None:
            raise ConnectionResetError(errno.ECONNRESET, "closed before the answer")
        return protocol.decode(body)

    def _drop(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def subscribe(path: str | Path, *, timeout_s: float = ANSWER_TIMEOUT_S) -> AsyncIterator[Publication]:
    """The current publication at once, then each change, until applianced goes away. Connecting again is the caller's business.

    Raises:
        Unreachable: nobody listens, nothing came for `timeout_s` at the beginning, or applianced went away (also a clean end: a
            subscription has none of its own).
        NotPermitted, ControlError: see the module.
    """
    try:
        reader, writer = await asyncio.open_unix_connection(str(path))
        with contextlib.closing(writer):
            writer.write(protocol.encode({"verb": "subscribe"}))
            async with asyncio.timeout(timeout_s):
                await writer.drain()
                body = await protocol.read_body(reader)
            while body is not None:
                message = protocol.decode(body)
                if "publication" not in message:
                    _checked(message)
                yield publication_from_json(message.get("publication"))
                body = await protocol.read_body(reader)
    except (OSError, asyncio.IncompleteReadError) as error:
        _raise_unreachable(Path(path), error)
    raise Unreachable(f"applianced closed {path}", hint="it is restarting or was stopped: see `systemctl status llm-appliance`")


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if answer.pop("ok", None) is True:
        return answer
    error, hint = answer.get("error"), answer.get("hint")
    if not isinstance(error, str):
        raise ControlError("applianced gave an answer without `ok` and without `error`", hint="is it of this version?")
    raise ControlError(error, hint=hint if isinstance(hint, str) else None)


def _raise_unreachable(path: Path, error: Exception) -> NoReturn:
    code = getattr(error, "errno", None)
    if isinstance(error, PermissionError):
        raise NotPermitted(f"{path}: permission denied", hint="run as root or join the group that owns it (llm-appliance)") from error
    if isinstance(error, TimeoutError):
        raise Unreachable(
            f"applianced does not answer on {path}", hint="it may be stopped or hung: see `systemctl status llm-appliance`"
        ) from error
    if code in (errno.ENOENT, errno.ECONNREFUSED):
        raise Unreachable(f"nobody listens on {path}", hint="start it: `systemctl start llm-appliance`, or `appliancectl run`") from error
    reason = os.strerror(code) if isinstance(code, int) else str(error)
    raise Unreachable(f"the connection to applianced on {path} failed: {reason}", hint="try again; it may be restarting") from error
