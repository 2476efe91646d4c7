"""Which lines of a long log are worth reading. Most lines of most logs are a few shapes with other numbers in them.

1. A line's shape is the line without digits and hexadecimal letters; shapes that were judged once are not judged again.
2. A new shape is read only if it may contain one of the words of `cues.py`; not at all if it begins like one that a client's text
   followed.
3. What may contain one is given to the patterns themselves.
4. Of the lines of note of one shape the first MANY are kept, and whatever the log ends with: a storm of one complaint is read as such.

Steps 1 and 2 run over a whole chunk at a time, in C.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.catalogue import LOGS, Catalogue, load_catalogue
from appliance.diagnosis.cues import Cues
from appliance.diagnosis.own_words import before_body
from appliance.diagnosis.pattern import Kind

SHORT = 300
"""Engine lines up to here are all read."""
BEFORE, AFTER = 60, 12
"""Lines around a hit that are read too: frames and milestones."""
MANY, MILD_MANY = 2000, 100
"""Lines of one shape that are kept: of note, and harmless."""
MOST_SHAPES = 100_000
"""Shapes remembered; a log with more of them is judged anew from there."""
LEARNT_FROM = 32
"""New lines of a chunk from which such beginnings are learnt."""
MOST_HEADS = 4
"""Lengths of what clients' texts follow that are looked for."""

_VARIABLE = b"0123456789abcdef"
JUDGED_HEAD, JUDGED_TAIL = 512, 256
"""Bytes of a line that are judged: a longer one carries a client's prompt, and programs say their own word before or after it."""


class _Notable:
    """A shape of note: how many lines of it are still wanted, and whether their surroundings are."""

    __slots__ = ("is_wide", "left")

    def __init__(self, *, is_wide: bool) -> None:
        self.is_wide = is_wide
        self.left = MANY if is_wide else MILD_MANY


class Sieve:
    """Judges the lines of one log, chunk by chunk."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._cues = Cues(_words_of(catalogue), catalogue.noted)
        self._dull: set[bytes] = set()
        self._notable: dict[bytes, _Notable] = {}
        self._spent: dict[bytes, _Notable] = {}
        self._heads: dict[int, set[bytes]] = {}

    def begin_end(self) -> None:
        """What follows is the log's end: all of note in it is kept, however often it was seen."""
        self._notable |= self._spent
        self._spent.clear()
        for notable in self._notable.values():
            notable.left = sys.maxsize

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
        present = set(shapes)
        fresh = (present - self._dull).difference(self._notable).difference(self._spent)
        fresh = self._without_known_heads(fresh) if fresh else fresh
        if fresh:
            self._judge(fresh, shapes, chunk)
        wanted = {shape for shape in present if shape in self._notable}
        return self._kept(wanted, shapes) if wanted else []

    def _kept(self, wanted: set[bytes], shapes: Sequence[bytes]) -> list[tuple[int, bool]]:
        found: list[tuple[int, bool]] = []
        for row, shape in enumerate(shapes):
            if shape not in wanted:
                continue
            notable = self._notable[shape]
            found.append((row, notable.is_wide))
            notable.left -= 1
            if not notable.left:
                wanted.discard(shape)
                self._spent[shape] = self._notable.pop(shape)
        return found

    def _without_known_heads(self, fresh: set[bytes]) -> set[bytes]:
        for length, heads in self._heads.items():
            fresh = {shape for shape in fresh if shape[:length] not in heads}
        return fresh

    def _judge(self, fresh: set[bytes], shapes: Sequence[bytes], chunk: bytes) -> None:
        if len(self._dull) + len(self._notable) + len(self._spent) > MOST_SHAPES:
            self._dull.clear()
            self._spent.clear()
            self._notable.clear()
        lines = chunk.split(b"\n")
        firsts: list[int] = []
        for row, shape in enumerate(shapes):
            if shape in fresh:
                fresh.discard(shape)
                firsts.append(row)
        suspects = self._cues.rows([_ends(lines[row]) for row in firsts])
        for index, row in enumerate(firsts):
            note = self._note(lines[row]) if index in suspects else None
            if note is not None:
                self._notable[shapes[row]] = _Notable(is_wide=note)
            elif len(shapes[row]) < JUDGED_HEAD and not (index < LEARNT_FROM and self._learns(lines[row])):
                self._dull.add(shapes[row])

    def _learns(self, line: bytes) -> bool:
        """Whether a client's text is in a line that says nothing: what begins as it does up to there is dull, whatever follows."""
        own = before_body(_ends(line))
        head = own.translate(None, _VARIABLE)
        if len(own) == len(line) or not line.startswith(own) or (len(head) not in self._heads and len(self._heads) >= MOST_HEADS):
            return False
        self._heads.setdefault(len(head), set()).add(head)
        return True

    def _note(self, line: bytes) -> bool | None:
        """True: a fault or consequence. False: a milestone or harmless. None: nothing that a pattern knows."""
        text = line.decode("utf-8", "replace")
        if not self._catalogue.may_note(text):
            return None
        kinds = [pattern.kind for source in LOGS for pattern, _fields in self._catalogue.matches(text, source) if not pattern.frequent]
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
    return bool(Cues().rows([line]))


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


def _words_of(catalogue: Catalogue) -> list[str]:
    """An operator's literals that contain none of the scan's words."""
    added = set(catalogue.patterns).difference(load_catalogue().patterns)
    if not added:
        return []
    cues = Cues()
    literals = {literal for pattern in added if not pattern.frequent for literal in pattern.literals}
    return sorted(literal for literal in literals if not cues.rows([literal.encode()]))
