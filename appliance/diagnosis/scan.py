"""Which lines of a long log are worth reading. Most lines of most logs are a few shapes with other numbers in them.

1. A line's shape is the line without digits and hexadecimal letters; shapes that were judged once are not judged again.
2. A new shape is read only if it contains one of the words below: every wording of every engine-log pattern that is not
   `frequent` does (a test proves it), so words may only be added. An operator's pattern adds the literals that have none.
3. What contains a word is given to the patterns themselves.

Steps 1 and 2 run over a whole chunk at a time, in C.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.catalogue import Catalogue, load_catalogue
from appliance.diagnosis.own_words import without_bodies
from appliance.diagnosis.pattern import Kind

SHORT = 300
"""Engine lines up to here are all read."""
BEFORE, AFTER = 60, 12
"""Lines around a hit that are read too: frames and milestones."""
MILD_EACH = 100
"""Lines of one harmless shape that are kept."""
MOST_SHAPES = 200_000
"""Shapes remembered; a log with more of them is judged anew from there."""

_VARIABLE = b"0123456789abcdef"
_CAPITAL = re.compile(
    rb"E(?:rror|RR|xception|OF|NO|ADDR|MFILE|ngine)|W(?:ARN|atchdog|arn|orker|aiting for)|F(?:atal|ail|AIL|ATAL|inished)"
    rb"|C(?:UDA|UBLAS|UDNN|USOLVER|RIT|apture|lient|onnected|ommandline)"
    rb"|S(?:IG|eg|hutting|hard|ubprocess|tarting|topp|ignal|erverArgs)|Xid"
    rb"|K(?:illed|V )|A(?:borted|ssert|pplication|ccess to|vailable)|T(?:raceback|riton|imeout|ry to|he |emplate)|O(?:ut of|utOfM|OMK)"
    rb"|N(?:CCL|ot enough|VRM|VML|o )|GGML|G(?:PU [Kdf]|PUs|racefully)|B(?:us error|ad Request)"
    rb"|R(?:PC|eceived|equest is|etract|egist|ank)|P(?:yspy|roc)|Memory"
    rb"|Model|I(?:llegal|nit|nternal)|L(?:oad)"
    rb"|U(?:vicorn|nproc|pgrade)|ZMQ|HF|D(?:efault|etok|river|uplicate)|Bfloat|Boot|Not Found|\*\*\* |!!!"
)
_WORDS = (
    b"rror", b"failed", b"failure", b"timed out", b"timeout", b"memory", b"kill", b"terminat", b"illegal", b"orrupt", b"nvalid",
    b"isconnect", b"load", b"nccl", b"signal", b"bind", b"start", b"idle", b"abort", b"lost", b"context", b"nvidia", b"cache",
    b"cancel", b" err: ", b"build: ", b"API server", b"not ", b"no ", b"n't ", b"in use", b"already", b"ccupied", b"mismatch",
    b"Header", b"ncomplete", b"git-lfs", b"ffline", b"gated", b"emplate", b"quota", b"oo many", b"ENFILE", b"rrno", b"cleaning up",
    b'" 4', b"| 4", b"| 5", b"aiting for", b"arming", b"istening", b"free=", b"issing", b"rong number", b"nknown", b"entire",
    b"/dev/shm", b"xhausted", b"rash", b"NET/", b"fallen off", b"egmentation", b"free()", b"malloc", b"smashing", b"died", b"exitcode",
    b"leaked", b"apturing", b"hit an", b"is zero", b"etract", b"longer than", b"exceeds", b"must ", b"misaligned", b"ssert", b"too old",
    b"ompatib", b"nsatisf", b"apability", b"equire", b"upport", b"bad_alloc", b"non-default", b"init_method", b"nabl", b"ustom all",
    b"torch.compile", b"blocks", b"is stopped", b"unexpectedly", b"eartbeat", b"eceived", b"[shutdown]", b"IPC", b"reempt", b" clos",
    b"roles", b"oo large", b"llocated", b"navailable", b"new model", b"etries", b"pull model", b"nrecognized",
)  # fmt: skip
JUDGED_HEAD, JUDGED_TAIL = 512, 256
"""Bytes of a line that are judged: a longer one carries a client's prompt, and programs say their own word before or after it."""


class Sieve:
    """Judges the lines of one log, chunk by chunk."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._words = (*_WORDS, *_words_of(catalogue))
        self._dull: set[bytes] = set()
        self._keen: set[bytes] = set()
        self._mild: dict[bytes, int] = {}

    def lines(self, chunk: bytes, number: int) -> Iterator[tuple[int, bytes]]:
        """The numbered lines of a chunk that are of note or near one that is; the chunk's first line has this number."""
        rows = self.rows(chunk)
        if rows:
            lines = chunk.split(b"\n")
            for first, last in _merged(rows, len(lines)):
                for row in range(first, last):
                    yield number + row, lines[row]

    def rows(self, chunk: bytes) -> list[tuple[int, bool]]:
        """Line numbers (from 0) of note in this chunk, each with whether its surroundings are of note too."""
        shapes = chunk.translate(None, _VARIABLE).split(b"\n")
        fresh = set(shapes) - self._dull - self._keen
        fresh -= self._mild.keys()
        if fresh:
            self._judge(fresh, shapes, chunk)
        if self._keen.isdisjoint(shapes) and self._mild.keys().isdisjoint(shapes):
            return []
        found: list[tuple[int, bool]] = []
        for row, shape in enumerate(shapes):
            if shape in self._keen:
                found.append((row, True))
            elif (left := self._mild.get(shape, 0)) > 0:
                self._mild[shape] = left - 1
                found.append((row, False))
        return found

    def _judge(self, fresh: set[bytes], shapes: list[bytes], chunk: bytes) -> None:
        if len(self._dull) > MOST_SHAPES:
            self._dull.clear()
        lines = chunk.split(b"\n")
        firsts = [row for shape, row in dict(zip(reversed(shapes), range(len(shapes) - 1, -1, -1), strict=True)).items() if shape in fresh]
        text = without_bodies(b"\n".join(_ends(lines[row]) for row in firsts))
        suspects = {firsts[index] for index in _rows_with_words(text, self._words)}
        for row in firsts:
            note = self._note(lines[row]) if row in suspects else None
            if note is None:
                if len(shapes[row]) < JUDGED_HEAD:
                    self._dull.add(shapes[row])
            elif note:
                self._keen.add(shapes[row])
            else:
                self._mild[shapes[row]] = MILD_EACH

    def _note(self, line: bytes) -> bool | None:
        """True: a fault or consequence. False: a milestone or harmless. None: nothing that a pattern knows."""
        kinds = [
            pattern.kind
            for source in (Source.ENGINE_LOG, Source.KERNEL_LOG, Source.SYSTEMD)
            for pattern, _fields in self._catalogue.matches(line.decode("utf-8", "replace"), source)
            if not pattern.frequent
        ]
        if not kinds:
            return None
        return any(kind in (Kind.CAUSE, Kind.CONSEQUENCE) for kind in kinds)


def worth_reading(evidence: Sequence[Evidence], catalogue: Catalogue) -> list[int]:
    """Indices of the evidence without the engine lines that no pattern can match, when there are many of those."""
    lines = [index for index, item in enumerate(evidence) if item.source is Source.ENGINE_LOG]
    if len(lines) <= SHORT:
        return list(range(len(evidence)))
    chosen = set(range(len(evidence))) - set(lines)
    text = "\n".join(evidence[index].text.replace("\n", " ") for index in lines).encode("utf-8", "replace")
    for first, last in _merged(Sieve(catalogue).rows(text), len(lines)):
        chosen.update(lines[first:last])
    chosen.update(lines[:BEFORE])
    chosen.update(lines[-BEFORE:])
    return sorted(chosen)


def _ends(line: bytes) -> bytes:
    return line if len(line) <= JUDGED_HEAD + JUDGED_TAIL else line[:JUDGED_HEAD] + b" " + line[-JUDGED_TAIL:]


def has_word(line: bytes) -> bool:
    """Whether the scan would look at this line at all."""
    return bool(_rows_with_words(line))


def _merged(rows: Sequence[tuple[int, bool]], count: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows around those of note, merged, inside 0..count."""
    first, last = 0, 0
    for row, wide in rows:
        low, high = (max(0, row - BEFORE), min(count, row + AFTER + 1)) if wide else (row, row + 1)
        if low <= last:
            last = max(last, high)
            continue
        if last > first:
            yield first, last
        first, last = low, high
    if last > first:
        yield first, last


def _words_of(catalogue: Catalogue) -> list[bytes]:
    """An operator's literals that contain none of the scan's words."""
    added = set(catalogue.patterns).difference(load_catalogue().patterns)
    literals = {literal.encode() for pattern in added if not pattern.frequent for literal in pattern.literals}
    return sorted(literal for literal in literals if not has_word(literal))


def _rows_with_words(text: bytes, words: Sequence[bytes] = _WORDS) -> set[int]:
    """Rows (from 0) of the text that contain a word of the scan."""
    hits = list(_hits(text, words))
    if not hits:
        return set()
    starts = [0]
    for line in text.split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    return {bisect_right(starts, hit) - 1 for hit in hits}


def _hits(text: bytes, words: Sequence[bytes]) -> Iterator[int]:
    """Offsets of hits: at most one a line and word."""
    for word in words:
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
