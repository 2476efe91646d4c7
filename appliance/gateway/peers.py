"""What the kernel knows of the peer of an accepted TCP connection, and what it is told to do about silent ones."""

from __future__ import annotations

import socket
import struct

SEND_BUFFER_BYTES = 128 * 1024
"""Of the kernel, a connection: with its default of 4 MiB a client that reads nothing looks like a reader for minutes."""
_TCP_INFO = struct.Struct("=24xI28xI")
"""struct tcp_info of linux/tcp.h as far as tcpi_last_ack_recv, of which we take tcpi_unacked and that."""
_TCP_CLOSE = 7
"""Of linux/tcp_states.h."""


def unheard_s(accepted: socket.socket) -> float:
    """How long a peer that owes us an acknowledgement has not been heard; 0 when it owes none.

    This is the vanished peer in the middle of an answer: keep-alive probes are not sent while data is under way, and the
    kernel's own retransmissions take a quarter of an hour. (TCP_USER_TIMEOUT would hit the slow reader as well.)
    """
    info = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    unacknowledged, last_heard_ms = _TCP_INFO.unpack(info)
    return last_heard_ms / 1000 if unacknowledged else 0.0


def probe_when_silent(accepted: socket.socket, silent_peer_s: float) -> None:
    """Three unanswered probes end a quiet connection `silent_peer_s` after the peer was last heard."""
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, round(silent_peer_s * 0.4)))
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, round(silent_peer_s * 0.2)))
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def is_reset(accepted: socket.socket) -> bool:
    """The peer's kernel has ended the connection. (Nobody reads from a peer that has closed its side, so nobody would be told.)"""
    return accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE
