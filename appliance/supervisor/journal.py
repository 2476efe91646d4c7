"""systemd-journald's own protocol: the sentence as MESSAGE, the rest as fields to search by (journalctl APPLIANCE_GENERATION=7).

Only where standard error goes to the journal anyway; https://systemd.io/JOURNAL_NATIVE_PROTOCOL/ describes the datagrams.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

SOCKET = "/run/systemd/journal/socket"
IDENTIFIER = "applianced"
VALUE_MAX_BYTES = 48 * 1024
"""A datagram may have about 200 KiB; a line of an engine that is longer than this has said enough."""
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2, "exception": 3}
_SILENT = frozenset({"event", "level", "timestamp", "engine", "state", "before", "exception", "error"})
"""Not repeated in the sentence: fields say them, or they have a place of their own."""


def connected(environment: Mapping[str, str], stderr: int = 2) -> int | None:
    """A descriptor that takes datagrams for the journal; None where standard error goes elsewhere (systemd.exec(5), JOURNAL_STREAM)."""
    facts = os.fstat(stderr)
    if environment.get("JOURNAL_STREAM") != f"{facts.st_dev}:{facts.st_ino}":
        return None
    outlet = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        outlet.connect(SOCKET)
    except OSError:
        outlet.close()
        return None
    return outlet.detach()


def datagram(event: Mapping[str, Any] | str) -> bytes:
    """One entry of the journal."""
    if isinstance(event, str):
        event = {"event": event}
    fields = {"MESSAGE": sentence(event), "PRIORITY": str(_PRIORITIES.get(str(event.get("level")), 6)), "SYSLOG_IDENTIFIER": IDENTIFIER}
    for name, value in event.items():
        if name not in ("event", "level", "timestamp", "exception"):
            fields[f"APPLIANCE_{name.upper()}"] = str(value)
    return b"".join(_field(name, value) for name, value in fields.items())


def sentence(event: Mapping[str, Any]) -> str:
    """What a person reads: the event, its reason, and what else belongs to it; a traceback on lines of its own."""
    words = str(event["event"])
    if "error" in event:
        words += f": {event['error']}"
    details = [f"{name}={value}" for name, value in event.items() if name not in _SILENT]
    words = " ".join([words, *details])
    return f"{words}\n{event['exception']}" if "exception" in event else words


def _field(name: str, value: str) -> bytes:
    data = value.encode(errors="replace")[:VALUE_MAX_BYTES]
    if b"\n" in data:
        return name.encode() + b"\n" + len(data).to_bytes(8, "little") + data + b"\n"
    return name.encode() + b"=" + data + b"\n"
