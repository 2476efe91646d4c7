"""Listening sockets: opened by address, or taken over from systemd or a parent; and who holds a port that is taken."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from appliance.core.errors import ApplianceError

BACKLOG = 2048
UNSEEN_HOLDER = "a process of another user"
_FIRST_PASSED_FD = 3
"""SD_LISTEN_FDS_START."""
_LISTEN = "0A"
"""TCP_LISTEN in /proc/net/tcp."""


class AddressTaken(ApplianceError):
    """Somebody listens there; `holder` says who, in words."""

    def __init__(self, host: str, port: int) -> None:
        self.holder = holder_of(port)
        hint = "stop that, or set gateway.port to another (0: any free one)"
        super().__init__(f"port {port} on {host} is taken by {self.holder}", hint=hint)


def open_listener(host: str, port: int) -> socket.socket:
    """Listen on the address; port 0 lets the kernel choose.

    Raises:
        ApplianceError: no such host, the port is taken (by whom, where that can be seen), or not ours to take.
    """
    listener = bind(host, port)
    try:
        listener.listen(BACKLOG)
    except OSError as error:  # another one that was bound too has listened first
        listener.close()
        raise _refusal(host, port, error) from None
    return listener


def bind(host: str, port: int) -> socket.socket:
    """Hold the address without listening, so that no client can come. Raises as open_listener."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "it is no host name"
        raise ApplianceError(f"cannot listen on {host!r}: {reason}", hint="set gateway.host to an address of this machine") from None
    listener = socket.socket(family, kind, protocol)
    try:
        # Without it, a restart has to wait for the last connections of the one before (TIME_WAIT) to be forgotten.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _refusal(host, port, error) from None
    return listener


def passed_listeners(environment: Mapping[str, str], pid: int) -> list[socket.socket]:
    """The sockets of systemd's socket activation (sd_listen_fds(3)); empty where there are none for this process.

    Raises:
        ApplianceError: LISTEN_FDS is no number, or a descriptor is no listening socket.
    """
    if environment.get("LISTEN_PID") != str(pid):
        return []
    count = environment.get("LISTEN_FDS", "")
    if not count.isdigit():
        raise ApplianceError(f"LISTEN_FDS is {count!r}, no number", hint="systemd sets it; unset LISTEN_PID to do without")
    return [adopt_listener(_FIRST_PASSED_FD + index) for index in range(int(count))]


def adopt_listener(fd: int) -> socket.socket:
    """A listening socket that the parent opened.

    Raises:
        ApplianceError: there is no such descriptor, or it is no listening stream socket.
    """
    try:
        os.set_inheritable(fd, False)
        listener = socket.socket(fileno=fd)
        if listener.type == socket.SOCK_STREAM and listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return listener
        listener.detach()
    except OSError as error:
        raise ApplianceError(f"descriptor {fd} cannot be listened on: {error.strerror}", hint="pass an open listening socket") from None
    raise ApplianceError(f"descriptor {fd} is a socket that does not listen", hint="pass a listening stream socket")


def is_open_to_others(listener: socket.socket) -> bool:
    """Whether other machines can reach it."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    address = ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return not (mapped or address).is_loopback


def refuse_open(listeners: Iterable[socket.socket], *, allowed: bool) -> None:
    """Nobody serves the network by accident: an address that other machines reach needs API keys, or gateway.allow_open.

    Raises:
        ApplianceError: one of the sockets is open to others and that was not allowed.
    """
    reachable = [bound_to(listener) for listener in listeners if is_open_to_others(listener)]
    if reachable and not allowed:
        raise too_open(reachable[0])


def too_open(address: str) -> ApplianceError:
    """What to say of an address that other machines reach without a key."""
    return ApplianceError(
        f"{address} would be open to other machines, and whoever reaches it may use the model: there are no API keys",
        hint="make one with `appliancectl key NAME >> FILE` and set gateway.api_keys_file = FILE; or listen on "
        "127.0.0.1 behind a proxy that asks for keys; or leave it open with gateway.allow_open = true",
    )


def bound_to(listener: socket.socket) -> str:
    """The address as it was bound: 0.0.0.0 is every address of this machine."""
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(listener: socket.socket, *, tls: bool = False, as_bound: bool = False) -> str:
    """The address that a client on this machine connects to; `as_bound`: 0.0.0.0 and :: stay, so that one sees who can reach it."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return f"unix:{os.fsdecode(listener.getsockname())}"
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_unspecified and not as_bound:
        address = ipaddress.ip_address("127.0.0.1" if address.version == 4 else "::1")
    return f"{'https' if tls else 'http'}://{f'[{address}]' if address.version == 6 else address}:{port}"


def _refusal(host: str, port: int, error: OSError) -> ApplianceError:
    if error.errno == errno.EADDRINUSE:
        return AddressTaken(host, port)
    if error.errno in (errno.EACCES, errno.EPERM):
        return ApplianceError(f"port {port} is not ours to take: {error.strerror}", hint="set gateway.port to one above 1023")
    return ApplianceError(f"cannot listen on {host}, port {port}: {error.strerror}", hint="set gateway.host to an address of this machine")


def holder_of(port: int) -> str:
    """Who listens on a TCP port of this machine, in words: "nginx (pid 812)"."""
    inodes = set(_listening_inodes(port))
    for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        if inodes & set(_socket_inodes(pid)):
            return f"{_command_name(pid)} (pid {pid})"
    return UNSEEN_HOLDER if inodes else "another process"


def is_taken(port: int) -> bool:
    """Whether anybody listens on a TCP port of this machine."""
    return any(True for _ in _listening_inodes(port))


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for columns in map(str.split, lines):
            if columns[3] == _LISTEN and int(columns[1].rpartition(":")[2], 16) == port:
                yield columns[9]


def _socket_inodes(pid: int) -> Iterator[str]:
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = str(entry.readlink())
            if target.startswith("socket:["):
                yield target[len("socket:[") : -1]
    except OSError:  # gone meanwhile, or not ours to look into
        return


def _command_name(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "a process"
    name = Path(os.fsdecode(words[0])).name or "a process"
    if name.startswith("python") and len(words) > 2:  # `python -m appliance.gateway`, `python script.py`
        name = " ".join([name, *map(os.fsdecode, words[1:3])]).strip()
    return name
