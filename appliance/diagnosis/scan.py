"""Which lines of a long log are worth reading: a scan over bytes that most lines never leave.

The scan knows words, not patterns: every sample of every engine-log pattern that is not `frequent` contains one of them
(a test proves it), so words may only be added. Heads with a capital are tried by one regular expression, whose search
skips from one rare letter to the next; the others by `bytes.find`, which is the faster the longer the word.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from appliance.core.evidence import Evidence, Source

SHORT = 300
"""Engine lines up to here are all read."""
BEFORE, AFTER = 60, 12
"""Lines around a hit that are read too: frames and milestones."""

_CAPITAL = re.compile(
    rb"E(?:rror|RR|xception|OF|NO|ADDR|MFILE|ngine (?:is|core|loop|process)|ngineCore (?:failed|enc|hit))"
    rb"|W(?:ARN|atchdog|arn|orker)|F(?:atal|ailed|AIL|ATAL|ile \")|C(?:UDA|UBLAS|UDNN|USOLVER|RIT|apture CUDA)"
    rb"|S(?:IG|egfault|egmentation|hutting|hard|ubprocess|tarting|topp|top)|X(?:id )|K(?:illed)|A(?:borted|ssert|pplication)"
    rb"|T(?:raceback|riton|imeout|ry to|he server is|he engine|emplate)|O(?:ut of|utOfM)"
    rb"|N(?:CCL|ot enough|VRM|VML|o )|GGML|B(?:us error)|R(?:PC|eceived|equest is|etract|egist)"
    rb"|P(?:yspy)|M(?:emory|odel)|I(?:llegal|nit|llegal)|L(?:oad)|U(?:vicorn)|Z(?:MQ)|HF|D(?:efault|etok)|Bfloat|Boot|\*\*\* |!!!"
)
_WORDS = (
    b"out of memory", b"error", b"failed", b"timed out", b"timeout", b"fatal", b"killed", b"terminat", b"illegal", b"unable to",
    b"cannot ", b"corrupt", b"invalid", b"disconnect", b"exception", b"loading", b"load_", b"nccl", b"refused", b"signal",
)  # fmt: skip


def worth_reading(evidence: Sequence[Evidence]) -> list[int]:
    """Indices of the evidence without the engine lines that no pattern can match, when there are many of those."""
    lines = [index for index, item in enumerate(evidence) if item.source is Source.ENGINE_LOG]
    if len(lines) <= SHORT:
        return list(range(len(evidence)))
    chosen = set(range(len(evidence))) - set(lines)
    text = "\n".join(evidence[index].text.replace("\n", " ") for index in lines).encode("utf-8", "replace")
    for first, last in _windows(text):
        chosen.update(lines[first:last])
    chosen.update(lines[:BEFORE])
    chosen.update(lines[-BEFORE:])
    return sorted(chosen)


def interesting_lines(chunk: bytes, number: int) -> Iterator[tuple[int, bytes]]:
    """The numbered lines of a chunk that lie around a hit; the chunk's first line has this number."""
    starts = None
    for first, last in _windows(chunk):
        if starts is None:
            starts = line_starts(chunk)
        for row in range(first, min(last, len(starts) - 1)):
            yield number + row, chunk[starts[row] : starts[row + 1] - 1]


def line_starts(text: bytes) -> list[int]:
    """Offset of each line, and one past the end: line i is text[starts[i] : starts[i + 1] - 1]."""
    starts = [0]
    for line in text.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


def _windows(text: bytes) -> Iterator[tuple[int, int]]:
    """Merged ranges of line numbers (from 0) around the hits."""
    hits = sorted(_hits(text))
    if not hits:
        return
    starts = line_starts(text)
    first, last = 0, -1
    for hit in hits:
        row = bisect_right(starts, hit) - 1
        low, high = max(0, row - BEFORE), row + AFTER + 1
        if low <= last:
            last = max(last, high)
            continue
        if last > 0:
            yield first, last
        first, last = low, high
    yield first, last


def _hits(text: bytes) -> Iterator[int]:
    """Offsets of hits: at most one a line and word."""
    for word in _WORDS:
        at = text.find(word)
        while at >= 0:
            yield at
            end = text.find(b"\n", at)
            at = text.find(word, end) if end >= 0 else -1
    match = _CAPITAL.search(text)
    while match is not None:
        yield match.start()
        end = text.find(b"\n", match.end())
        match = _CAPITAL.search(text, end) if end >= 0 else None
