"""The listening side of the control socket. It frames and dispatches; what a verb means is the handler's business."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from appliance.control import protocol
from appliance.control.codec import publication_to_json
from appliance.core.errors import ApplianceError, ControlError
from appliance.core.publication import Publication

Handler = Callable[[Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Takes the verb's arguments, gives the answer without `ok`. An ApplianceError becomes `{"ok": false, ...}`."""

log = logging.getLogger(__name__)

SOCKET_MODE = 0o660
MAX_CONNECTIONS = 64
WRITE_TIMEOUT_S = 30.0
"""A peer that reads nothing for so long is disconnected: its buffers are our memory."""


class PublicationBoard:
    """The newest publication and everybody who waits for the next. One writer: the supervisor's loop.

    A reader that is slow misses the ones in between, never the newest.

    Attributes:
        subscribers: connections that are told each one: gateways that run.
    """

    def __init__(self, first: Publication) -> None:
        self._current = first
        self.subscribers = 0
        self._changed = asyncio.Event()

    @property
    def current(self) -> Publication:
        """The newest."""
        return self._current

    def post(self, publication: Publication) -> None:
        """Replace the newest and wake every waiter; an equal one wakes nobody."""
        if publication != self._current:
            self._current = publication
            self._changed.set()
            self._changed = asyncio.Event()

    async def follow(self) -> AsyncIterator[Publication]:
        """The current one, then each change, for ever."""
        while True:
            changed, publication = self._changed, self._current
            yield publication
            if publication is self._current:
                await changed.wait()


class ControlServer:
    """Owns the listening socket and its connections."""

    def __init__(self, path: Path, handlers: Mapping[str, Handler], board: PublicationBoard) -> None:
        self._path = path
        self._handlers = handlers
        self._board = board
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Bind with mode 0660 and accept. A left-over socket file is replaced: the caller holds the run directory's lock.

        Raises:
            ControlError: the path is too long for a unix socket, or cannot be bound.
        """
        length = len(os.fsencode(self._path))
        if length > protocol.SOCKET_PATH_MAX_BYTES:
            raise ControlError(
                f"the socket path {self._path} has {length} bytes, the kernel's limit is {protocol.SOCKET_PATH_MAX_BYTES}",
                hint="choose a shorter run directory",
            )
        try:
            self._server = await asyncio.start_unix_server(self._accept, sock=_bound(self._path))
        except OSError as error:
            raise ControlError(
                f"cannot listen on {self._path}: {error.strerror}", hint="check the run directory's owner and mode"
            ) from error

    async def close(self) -> None:
        """Stop accepting, end every connection, remove the socket file."""
        if self._server is not None:
            self._server.close()
            for task in tuple(self._connections):
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            self._path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.write(protocol.encode(_refusal(ControlError(f"{MAX_CONNECTIONS} connections are open already", hint="close some"))))
            writer.close()
            return
        task = asyncio.ensure_future(self._converse(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with (
            contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, TimeoutError, asyncio.CancelledError),
            contextlib.closing(writer),
        ):
            try:
                while (body := await protocol.read_body(reader)) is not None:
                    request = protocol.decode(body)
                    if request.get("verb") == "subscribe":
                        await self._publish_to(reader, writer)
                        return
                    await _send(writer, await self._answer(request))
            except protocol.FrameError as error:
                await _send(writer, _refusal(error))

    async def _answer(self, request: dict[str, Any]) -> Mapping[str, Any]:
        arguments = {name: value for name, value in request.items() if name != "verb"}
        verb = request.get("verb")
        handler = self._handlers.get(verb) if isinstance(verb, str) else None
        try:
            if handler is None:
                verbs = ", ".join(sorted([*self._handlers, "subscribe"]))
                raise ControlError(f"unknown verb {verb!r}", hint=f"one of: {verbs}")
            return {"ok": True, **await handler(arguments)}
        except ApplianceError as error:
            return _refusal(error)
        except Exception:
            log.exception("the verb %r failed; please report this", verb)
            return _refusal(
                ControlError(f"the verb {verb!r} failed by a defect of ours", hint="see the log of applianced, and please report this")
            )

    async def _publish_to(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gone = asyncio.ensure_future(reader.read(1))  # subscribers say nothing more: any byte or the end means done
        publish = asyncio.ensure_future(self._publish(writer))
        self._board.subscribers += 1
        try:
            await asyncio.wait({gone, publish}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._board.subscribers -= 1
            gone.cancel()
            publish.cancel()
            await asyncio.gather(gone, publish, return_exceptions=True)

    async def _publish(self, writer: asyncio.StreamWriter) -> None:
        async for publication in self._board.follow():
            await _send(writer, {"publication": publication_to_json(publication)})


async def _send(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    async with asyncio.timeout(WRITE_TIMEOUT_S):
        writer.write(protocol.encode(message))
        await writer.drain()


def _refusal(error: ApplianceError) -> dict[str, Any]:
    return {"ok": False, "error": error.message, "hint": error.hint}


def _bound(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setblocking(False)
        # Linux gives the file the socket's own mode minus the umask, so it is never wider than 0660, not for a moment;
        # the second call takes the umask back out. (Changing the umask would change it for the whole process.)
        os.fchmod(listener.fileno(), SOCKET_MODE)
        listener.bind(str(path))
        path.chmod(SOCKET_MODE)
    except OSError:
        listener.close()
        raise
    return listener
