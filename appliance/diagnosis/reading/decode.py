"""Bytes of a file or stream, decompressed and in UTF-8, in chunks that end at a line's end."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, Protocol

import zstandard

from appliance.core.errors import ApplianceError

CHUNK_BYTES = 1 << 20
LONGEST_LINE_BYTES = 64 * 1024
"""A longer line keeps its head and its tail of half this size: nothing of note stands in the middle of a dumped tensor."""
_CUT = b" ... "


class UnreadableLog(ApplianceError):
    """A compressed file that breaks off or is not what its first bytes say."""


def chunks(stream: BinaryIO) -> Iterator[bytes]:
    """Chunks of whole lines, in UTF-8 or whatever single-byte encoding it is, never holding more than a few MiB.

    Raises:
        UnreadableLog: the compressed data is broken; what was read until then has been given.
    """
    head = stream.read(CHUNK_BYTES)
    raw = _plain(head, stream)
    first = next(raw, b"")
    encoding = _utf16(first)
    if encoding is not None:
        raw = _reencoded(first, raw, encoding)
        first = next(raw, b"")
    yield from _whole_lines(first, raw)


def _plain(head: bytes, stream: BinaryIO) -> Iterator[bytes]:
    packed = io.BufferedReader(_Rejoined(head, stream), CHUNK_BYTES)
    try:
        yield from _read(_opened(head, packed))
    except (zstandard.ZstdError, gzip.BadGzipFile, EOFError, lzma.LZMAError, zlib.error, OSError) as error:
        raise UnreadableLog(f"the log breaks off: {error}", hint="give it decompressed, or fetch it again") from error


def _opened(head: bytes, packed: Any) -> _Readable:
    """The stream behind whatever compression the first bytes name; closing it is left to the caller of the file."""
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
    if head.startswith(b"\x1f\x8b"):
        return gzip.open(packed)
    if head.startswith(b"\xfd7zXZ\x00"):
        return lzma.open(packed)
    return bz2.open(packed) if head.startswith(b"BZh") else packed


class _Rejoined(io.RawIOBase):
    """A stream with the bytes put back that were read to look at them. The caller owns (and closes) the stream."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head = head
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head[: len(buffer)] or self._stream.read(len(buffer))
        self._head = self._head[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


class _Readable(Protocol):
    def read(self, size: int = ..., /) -> bytes: ...


def _read(stream: _Readable) -> Iterator[bytes]:
    while chunk := stream.read(CHUNK_BYTES):
        yield chunk


def _utf16(first: bytes) -> str | None:
    """Every other byte of a wide log is NUL, mark or no mark; a mark alone may be any two bytes of rubbish."""
    sample = first[:4096]
    share = sample.count(0) / max(1, len(sample))
    if share < 0.1 or (share < 0.4 and not sample.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))):
        return None
    return "utf-16-le" if sample[1::2].count(0) > sample[::2].count(0) else "utf-16-be"


def _reencoded(first: bytes, raw: Iterator[bytes], encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)("replace")
    yield decoder.decode(first).lstrip("\ufeff").encode("utf-8", "replace")
    for chunk in raw:
        yield decoder.decode(chunk).encode("utf-8", "replace")


def _whole_lines(first: bytes, raw: Iterator[bytes]) -> Iterator[bytes]:
    """Cut at line ends; a line that outgrows the limit loses its middle."""
    carry = first
    for chunk in raw:
        end = carry.rfind(b"\n") + 1
        if end:
            yield carry[:end]
            carry = carry[end:]
        if len(carry) > LONGEST_LINE_BYTES * 2:
            carry = carry[:LONGEST_LINE_BYTES] + _CUT + carry[-LONGEST_LINE_BYTES:]
        carry += chunk
    if carry:
        yield carry
