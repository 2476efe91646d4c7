"""The listening socket, made before anything else: an address in use is found out at once, not after a minute of loading."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from appliance.core.errors import ApplianceError
from appliance.core.launch import Endpoint

_BACKLOG = 2048
_SOCKET_MODE = 0o660
"""The owner and the group: the gateway runs as another user of the same group."""


class ListenError(ApplianceError):
    """The address cannot be listened on; the message begins with `[Errno N]` as Python's and uvicorn's do."""


def listen(endpoint: Endpoint) -> socket.socket:
    """A listening socket; connections wait until they are accepted. A socket file that nobody answers on is replaced.

    Raises:
        ListenError: the address is in use, or cannot be bound.
    """
    try:
        if endpoint.socket_path is not None:
            return _listen_unix(Path(endpoint.socket_path))
        return _listen_loopback(endpoint.port or 0)
    except OSError as error:
        reason = "address already in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise ListenError(f"[Errno {error.errno}] error while attempting to bind on address {endpoint}: {reason}") from error


def _listen_unix(path: Path) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISSOCK(path.stat().st_mode) and not _answers(path):
            path.unlink()
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.bind(str(path))
        # Nobody can connect before listen(), so the mode is right before it matters.
        path.chmod(_SOCKET_MODE)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def _answers(path: Path) -> bool:
    """Somebody listens there. Only a refused connection says that nobody does."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True


def _listen_loopback(port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET)
    try:
        # The last engine's connections in TIME_WAIT must not keep the next one out; a listening socket still does.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen(_BACKLOG)
    except (OSError, OverflowError):
        sock.close()
        raise
    return sock


def endpoint_of(sock: socket.socket) -> Endpoint:
    """Where a listening socket really is: port 0 lets the kernel choose one."""
    if sock.family == socket.AF_UNIX:
        return Endpoint(socket_path=os.fsdecode(sock.getsockname()))
    return Endpoint(port=sock.getsockname()[1])
