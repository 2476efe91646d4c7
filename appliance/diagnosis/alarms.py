"""Lines that sound like trouble and that no pattern knows: whoever reads a log over them may have missed the cause."""

from __future__ import annotations

import re
from collections.abc import Sequence

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.catalogue import Catalogue, shorten
from appliance.diagnosis.own_words import own_words
from appliance.diagnosis.pattern import Kind

LAST_LINES = 150
"""Lines of each source's end that are looked at: what an engine died of stands there."""
MOST = 40
"""Lines that sound like trouble, of one source; in a storm of them, those are enough."""
_PREFIX = re.compile(
    r"^(?:\S{1,40}\s+\|\s)?(?:\([^()]{1,80}\)\s?)*(?:\[[^\]]{1,80}\]\s?)*(?P<level>[A-Z]{4,8}\b:?)?\s?"
    r"(?:[A-Z]?\d{2,4}[-/]?\d\d(?:[-/]\d\d)?[ T]\d\d:\d\d:\d\d\S*\s?)?(?:\[[^\]]{1,80}\]\s?)*"
)
_BAD_LEVELS = frozenset({"ERROR", "CRITICAL", "FATAL", "PANIC"})
_MILD_LEVELS = frozenset({"INFO", "DEBUG", "WARNING", "WARN", "NOTICE", "TRACE"})
_FRAME = re.compile(r"File \".{1,300}\", line \d+, in |Traceback \(most recent call last\):\s*$")
_INNARDS = re.compile(r"\s|File \"|Traceback |[\^~]+$|#\d+ |frame #|\d+: |The above exception|During handling of|Exception raised from|$")
"""What a traceback or a native stack is made of, beside its last line."""
_EXCEPTION = re.compile(r"^(?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Fault)\b")
_WORDS = re.compile(
    r"\b(?:[Ff]atal|FATAL|[Pp]anic|PANIC|[Aa]bort(?:ed|ing)?|[Aa]ssert\w*|[Cc]rash\w*|[Cc]orrupt\w*|[Ff]ail(?:ed|ure|s)|FAILED|[Cc]annot|"
    r"[Cc]ould not|[Uu]nable|[Ee]rrors?|ERROR|[Ii]llegal|[Ee]xhausted|[Tt]imed? ?out|[Kk]illed|[Dd]ead|[Ll]ost|[Dd]ied|[Uu]nexpected\w*|"
    r"[Tt]erminat\w+|[Oo]ut of|[Ss]egfault|[Ff]ault|[Rr]efus\w+|[Nn]o such|not found)\b"
)
_KERNEL = re.compile(
    r"NVRM: (?!loading|GPU at|Persistence)|Xid|nvidia-uvm|\[Hardware Error\]|segfault|general protection|trap |BUG: |oom|[Oo]ut of memory|"
    r"Killed process|blocked for more|IO_PAGE_FAULT|DMAR|I/O error|AER|PCIe Bus|call trace|Call Trace|hung|lockup|MCE|Machine [Cc]heck|"
    r"Memory failure|nvme\S*: .{0,40}(?:down|timeout|reset)|(?:EXT4-fs|XFS|BTRFS)\b.{0,40}(?:error|corrupt)"
)


def unread(evidence: Sequence[Evidence], catalogue: Catalogue) -> list[tuple[int, Evidence]]:
    """With their positions: the last lines of each source that sound like trouble and mean nothing to the catalogue."""
    found: list[tuple[int, Evidence]] = []
    for source, sounds in ((Source.ENGINE_LOG, _engine_sounds), (Source.KERNEL_LOG, _kernel_sounds)):
        lines = [(order, item) for order, item in enumerate(evidence) if item.source is source][-LAST_LINES:]
        loud = [(order, item) for order, item in lines if sounds(item.text)][-MOST:]
        found += [(order, item) for order, item in loud if not _is_known(item, catalogue)]
    return found


def _engine_sounds(text: str) -> bool:
    text = text[:400]
    head = _PREFIX.match(text)
    body = text if head is None else text[head.end() :]
    if _INNARDS.match(body):
        return False
    level = "" if head is None or head["level"] is None else head["level"].rstrip(":")
    if level in _MILD_LEVELS or re.match(r"(?:INFO|DEBUG|WARN\w*)\b", body):
        return False
    return level in _BAD_LEVELS or _EXCEPTION.match(body) is not None or _WORDS.search(own_words(body)) is not None


def _kernel_sounds(text: str) -> bool:
    return _KERNEL.search(text[:400]) is not None


def _is_known(item: Evidence, catalogue: Catalogue) -> bool:
    """To a pattern that says more than `an exception`."""
    matches = catalogue.matches(shorten(item.text), item.source)
    return any(pattern.event != "exception" and pattern.kind is not Kind.MILESTONE for pattern, _fields in matches)


def breaks_off(evidence: Sequence[Evidence]) -> bool:
    """The engine's log ends inside a traceback: what was raised is not there."""
    lines = [item.text for item in evidence[-LAST_LINES:] if item.source is Source.ENGINE_LOG and item.text.strip()]
    frames = [_FRAME.search(line) is not None for line in lines[-2:]]
    return bool(frames) and (frames[-1] or (frames[0] and _quotes(lines[-1])))


def _quotes(line: str) -> bool:
    """The frame's own line of source: nothing but a blank before it."""
    head = _PREFIX.match(line)
    return (line if head is None else line[head.end() :]).startswith("  ")
