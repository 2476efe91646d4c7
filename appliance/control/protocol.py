"""Frames of the control socket.

+----------------+---------------------------+
| length, 4 B BE | that many bytes of JSON   |      at most 8 MiB
+----------------+---------------------------+

->  {"verb": "status"}
<-  {"ok": true, "state": "serving", ...}
->  {"verb": "brew"}
<-  {"ok": false, "error": "unknown verb 'brew'", "hint": "one of: drain, incident, ..."}
->  {"verb": "subscribe"}
<-  {"publication": {...}}      the current one, at once
<-  {"publication": {...}}      each later one, for ever
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any

from appliance.core.errors import ControlError

MAX_FRAME_BYTES = 8 * 1024**2
HEADER_BYTES = 4
SOCKET_PATH_MAX_BYTES = 107
"""sun_path of Linux holds 108 bytes, the last one is the terminating zero."""
_HEADER = struct.Struct(">I")


class FrameError(ControlError):
    """The other side does not speak this protocol: too long a frame, no JSON, or no JSON object."""


def encode(message: Mapping[str, Any]) -> bytes:
    """The frame of a message.

    Raises:
        FrameError: the message is larger than a frame may be.
        ValueError: NaN or infinity, which JSON does not have.
    """
    body = json.dumps(message, allow_nan=False, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(
            f"a frame of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}", hint="ask for less, such as a smaller limit"
        )
    return _HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """The length that a frame's first four bytes announce.

    Raises:
        FrameError: more than MAX_FRAME_BYTES; the stream cannot be followed any further.
    """
    (length,) = _HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise FrameError(
            f"a frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}",
            hint="frames are a 4-byte big-endian length and that many bytes of JSON",
        )
    return int(length)


def decode(body: bytes) -> dict[str, Any]:
    """The message of a frame's body.

    Raises:
        FrameError: no UTF-8, no JSON, or JSON that is no object. The stream itself can go on.
    """
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame of {len(body)} bytes is no JSON: {error}") from error
    if not isinstance(message, dict):
        raise FrameError(f"a frame holds a JSON {type(message).__name__}, expected an object")
    return message


async def read_body(reader: asyncio.StreamReader) -> bytes | None:
    """The body of the next frame; None at a clean end of the stream.

    Raises:
        FrameError: the announced length is illegal.
        asyncio.IncompleteReadError: the stream ended inside a frame.
    """
    try:
        header = await reader.readexactly(HEADER_BYTES)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    return await reader.readexactly(body_length(header))
