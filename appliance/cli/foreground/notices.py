"""What the children say of themselves: READY=1 and WATCHDOG=1, by the protocol in which they say it to systemd."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

from appliance.core.errors import ApplianceError

NOTIFY_SOCKET = "notify.sock"
_LONGEST_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""


class Notices:
    """Owns the socket. The kernel names the sender of each message, so nobody else can speak for a child, nor a life for the next."""

    def __init__(self, run_dir: Path) -> None:
        """Raises ApplianceError where the run folder takes no socket."""
        self._path = run_dir / NOTIFY_SOCKET
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        try:
            self._path.unlink(missing_ok=True)
            self._socket.bind(str(self._path))
        except OSError as error:
            self._socket.close()
            raise ApplianceError(f"{self._path} cannot be made: {error.strerror}", hint="name another folder with --run-dir") from None

    def environment(self, watchdog_s: float) -> Mapping[str, str]:
        """Ours for a child that is to speak to us, and to no service manager that may have started us."""
        ours = {name: value for name, value in os.environ.items() if name not in ("WATCHDOG_PID", "LISTEN_PID", "LISTEN_FDS")}
        return ours | {"NOTIFY_SOCKET": str(self._path), "WATCHDOG_USEC": str(round(watchdog_s * 1e6))}

    def fileno(self) -> int:
        """For the selector."""
        return self._socket.fileno()

    def read(self) -> Iterator[tuple[int, str]]:
        """Pid and message of everything that has arrived."""
        while True:
            try:
                message, ancillary, _, _ = self._socket.recvmsg(_LONGEST_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
            except BlockingIOError:
                return
            for level, kind, content in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                    yield _CREDENTIALS.unpack(content[: _CREDENTIALS.size])[0], message.decode(errors="replace")

    def close(self) -> None:
        """And take the socket out of the folder."""
        self._socket.close()
        self._path.unlink(missing_ok=True)
