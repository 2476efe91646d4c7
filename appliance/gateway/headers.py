"""Which headers go on, in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterable

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_UPSTREAM = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"x-request-id",
    b"accept-encoding",  # a compressed stream could not be checked for its end, nor an error event be added to it
}
_NOT_DOWNSTREAM = _HOP_BY_HOP | {
    b"content-length",
    b"date",
    b"server",
    b"x-accel-buffering",  # client.py says it, once
    b"x-request-id",
    # Cross-origin access is off until the owner can switch it on; an engine's own "*" would open it for every web page.
    b"access-control-allow-origin",
    b"access-control-allow-credentials",
    b"access-control-allow-headers",
    b"access-control-allow-methods",
    b"access-control-expose-headers",
    b"access-control-max-age",
}
_OURS = b"x-appliance-"
"""Between gateway and engine only: what clients send under such a name goes nowhere."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def upstream_head(method: str, target: bytes, headers: Headers, request_id: str, body_bytes: int, *ours: tuple[bytes, bytes]) -> bytes:
    """The head of the request as the engine gets it. `target` is path and query as they came; `ours` are headers of our own."""
    parts = [
        b"%s %s HTTP/1.1\r\nhost: engine\r\nx-request-id: %s\r\n" % (method.encode("ascii"), target, request_id.encode("ascii")),
    ]
    drop: frozenset[bytes] | set[bytes] = _NOT_UPSTREAM
    for name, value in headers:
        if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            drop = _NOT_UPSTREAM | _named_in(value)
    kept = [header for header in headers if header[0] not in drop and not header[0].startswith(_OURS)]
    parts.extend(b"%s: %s\r\n" % header for header in (*kept, *ours))
    if body_bytes or method not in ("GET", "HEAD", "DELETE", "OPTIONS"):
        parts.append(b"content-length: %d\r\n" % body_bytes)
    parts.append(b"\r\n")
    return b"".join(parts)


def downstream(headers: Headers) -> Headers:
    """The engine's headers as the client gets them: without length and framing, which are the connection's own."""
    drop: frozenset[bytes] | set[bytes] = _NOT_DOWNSTREAM
    for name, value in headers:
        if name == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            drop = _NOT_DOWNSTREAM | _named_in(value)
    return [header for header in headers if header[0] not in drop]


def value_of(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """The first value of a header; names are in lower case on both sides."""
    for found, value in headers:
        if found == name:
            return value
    return None


def legal_request_id(headers: Headers) -> str | None:
    """The client's own id if it may stand in our logs and headers: letters, digits and `._:-`, at most 128."""
    value = value_of(headers, b"x-request-id")
    return value.decode("ascii") if value is not None and _REQUEST_ID.fullmatch(value) else None


def _named_in(value: bytes) -> set[bytes]:
    return {token.strip().lower() for token in value.split(b",")}
