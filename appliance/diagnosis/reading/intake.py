"""`read_evidence`: one file, stream or text into evidence, with memory that does not grow with the file."""

from __future__ import annotations

import datetime
import io
import itertools
import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.case import signal_of
from appliance.diagnosis.catalogue import Catalogue, load_catalogue
from appliance.diagnosis.reading.decode import LONGEST_LINE_BYTES, chunks
from appliance.diagnosis.reading.unwrap import Unwrapped, unwrap
from appliance.diagnosis.scan import Sieve

HIGHEST_CODE, HIGHEST_SIGNAL = 255, 64
HEAD_LINES, TAIL_LINES = 4_000, 20_000
HEAD_BYTES, TAIL_BYTES = 4 * 1024**2, 12 * 1024**2
"""What is kept of a log with more interesting lines than this: its beginning and its end."""
END_CHUNKS = 2
"""Of the last chunks of a log (of 1 MiB) all that is of note is kept."""
END_LINES = 60
"""Lines kept of either end of a large input, whatever they say."""
SMALL_BYTES = 512 * 1024
"""Inputs up to here are kept whole; of longer ones, the interesting lines and their surroundings."""
SMI_LINES = 6
"""Output of nvidia-smi says what it is within so many lines."""
_SMI = re.compile(
    rb"NVIDIA-SMI \d|NVIDIA-SMI has failed|=+NVSMI LOG=+|Failed to initialize NVML|(?:^|[$#] )nvidia-smi\b|\bERR!|GPU \d+: NVIDIA "
    rb"|^\s*(?:GPU|Remapped Rows|Attached GPUs)\b.*:|Unable to determine the device handle"
)
_ROUTED = (Source.KERNEL_LOG, Source.SYSTEMD)


def read_evidence(
    data: Path | BinaryIO | bytes | str,
    source: Source | None = None,
    *,
    now_s: float | None = None,
    progress: Callable[[int], None] | None = None,
    catalogue: Catalogue | None = None,
) -> list[Evidence]:
    """The evidence in a file (Path), an open stream, raw bytes, or a text.

    Args:
        source: what the input was given as; None finds out, line by line. Lines that say themselves that the kernel or
            systemd printed them go to those sources either way.
        now_s: the time the log was taken, for lines that leave the year out; default: a file's own time, else now.
        progress: called with the bytes of (decoded) text read so far.
        catalogue: the patterns that decide which lines of a long log are kept; default: our own.

    Raises:
        OSError: the file cannot be read.
        UnreadableLog: compressed data that breaks off.
    """
    if isinstance(data, Path):
        with data.open("rb") as stream:
            return _read(stream, source, _year(data.stat().st_mtime if now_s is None else now_s), progress, catalogue)
    if isinstance(data, str):
        data = data.encode("utf-8", "replace")
    if isinstance(data, bytes):
        data = io.BytesIO(data)
    return _read(data, source, _year(now_s), progress, catalogue)


def exit_evidence(word: str) -> Evidence:
    """The evidence of `--exit 137`, `--exit -11` or `--exit SIGKILL`.

    Raises:
        ValueError: neither a number nor a signal's name.
    """
    if word.strip().removeprefix("-").isdecimal():
        code = int(word)
        if not -HIGHEST_SIGNAL <= code <= HIGHEST_CODE:
            raise ValueError(
                f"{word.strip()} is out of range: exit codes go from 0 to {HIGHEST_CODE}, signals from -1 to -{HIGHEST_SIGNAL}"
            )
        return Evidence(Source.EXIT, f"the process exited with code {code}", data={"code": code})
    signal = signal_of(word)
    if signal is None:
        raise ValueError(f"{word!r} is no exit code or signal: write a number such as 137 or a name such as SIGKILL")
    return Evidence(Source.EXIT, f"the process was ended by {signal}", data={"signal": signal})


def _year(now_s: float | None) -> int:
    moment = datetime.datetime.now(tz=datetime.UTC) if now_s is None else datetime.datetime.fromtimestamp(now_s, tz=datetime.UTC)
    return moment.year


def _read(
    stream: BinaryIO, source: Source | None, year: int, progress: Callable[[int], None] | None, catalogue: Catalogue | None
) -> list[Evidence]:
    lines = _lines(stream, progress, catalogue)
    first = list(itertools.islice(lines, SMI_LINES))
    is_smi = source is None and any(_SMI.search(line[:4096]) for _number, line in first)
    kind = Source.NVIDIA_SMI if is_smi else source
    return [_evidence(line, number, kind, year) for number, line in _two_ends(itertools.chain(first, lines))]


def _two_ends(lines: Iterator[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    """The first HEAD_LINES and the last TAIL_LINES, or as many as HEAD_BYTES and TAIL_BYTES hold."""
    head_bytes, tail_bytes = 0, 0
    tail: deque[tuple[int, bytes]] = deque()
    for count, (number, whole) in enumerate(lines):
        line = (
            whole if len(whole) <= LONGEST_LINE_BYTES else whole[: LONGEST_LINE_BYTES // 2] + b" ... " + whole[-LONGEST_LINE_BYTES // 2 :]
        )
        if count < HEAD_LINES and head_bytes < HEAD_BYTES:
            head_bytes += len(line)
            yield number, line
            continue
        tail.append((number, line))
        tail_bytes += len(line)
        while len(tail) > TAIL_LINES or tail_bytes > TAIL_BYTES:
            tail_bytes -= len(tail.popleft()[1])
    yield from tail


def _lines(stream: BinaryIO, progress: Callable[[int], None] | None, catalogue: Catalogue | None) -> Iterator[tuple[int, bytes]]:
    """Numbered lines: all of a small input; of a large one its two ends and what the sieve keeps between them."""
    source = _counted(chunks(stream), progress)
    small: list[bytes] = []
    for chunk in source:
        small.append(chunk)
        if sum(map(len, small)) > SMALL_BYTES:
            yield from _sieved(itertools.chain([b"".join(small)], source), catalogue or load_catalogue())
            return
    yield from enumerate(b"".join(small).split(b"\n"), 1)


def _counted(source: Iterator[bytes], progress: Callable[[int], None] | None) -> Iterator[bytes]:
    seen_bytes = 0
    for chunk in source:
        seen_bytes += len(chunk)
        if progress is not None:
            progress(seen_bytes)
        yield chunk


def _sieved(source: Iterator[bytes], catalogue: Catalogue) -> Iterator[tuple[int, bytes]]:
    sieve = Sieve(catalogue)
    given = 0
    for number, chunk, is_last in _with_end(source, sieve):
        ends: list[tuple[int, bytes]] = []
        if number == 1:
            ends += enumerate(chunk.split(b"\n", END_LINES)[:END_LINES], 1)
        if is_last:
            whole = chunk.rstrip(b"\n")
            last = whole.rsplit(b"\n", END_LINES)[-END_LINES:]
            ends += enumerate(last, number + whole.count(b"\n") + 1 - len(last))
        for at, line in sorted({*ends, *sieve.lines(chunk, number)}) if ends else sieve.lines(chunk, number):
            if at > given:
                given = at
                yield at, line


def _with_end(source: Iterator[bytes], sieve: Sieve) -> Iterator[tuple[int, bytes, bool]]:
    """Each chunk with the number of its first line, and whether it is the last; the sieve is told where the end begins."""
    waiting: deque[bytes] = deque()
    number = 1
    for chunk in source:
        waiting.append(chunk)
        if len(waiting) > END_CHUNKS:
            first = waiting.popleft()
            yield number, first, False
            number += first.count(b"\n")
    sieve.begin_end()
    while waiting:
        chunk = waiting.popleft()
        yield number, chunk, not waiting
        number += chunk.count(b"\n")


def _evidence(line: bytes, number: int, kind: Source | None, year: int) -> Evidence:
    text = line.decode("utf-8", "replace")
    if kind is Source.NVIDIA_SMI:
        return Evidence(kind, text.rstrip("\r\n"), line=number)
    inner = unwrap(text, year)
    stamp = inner.stamp
    data: dict[str, object] = {name: True for name in ("zone_unknown", "year_unknown") if stamp is not None and getattr(stamp, name)}
    if inner.host is not None:
        data["host"] = inner.host
    return Evidence(_source(inner, kind), inner.text, None if stamp is None else stamp.time_s, number, inner.boot_id, data)


def _source(inner: Unwrapped, kind: Source | None) -> Source:
    if inner.source in _ROUTED and kind in (None, Source.ENGINE_LOG, Source.SYSTEMD, Source.KERNEL_LOG):
        return inner.source
    if kind is Source.SYSTEMD and inner.source is Source.ENGINE_LOG:
        return Source.ENGINE_LOG
    return kind or inner.source or Source.ENGINE_LOG
