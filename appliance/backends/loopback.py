"""Ports for engines that have no unix sockets."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One that was free a moment ago. Should somebody take it first, the start fails as port_in_use and the next try gets another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
