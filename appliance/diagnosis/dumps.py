"""What stacks, dumps and the flight recorder show: faulthandler's and py-spy's stacks in a log, gdb's frames of a core, CUDA's core
dumps, NCCL's trace, and the last minutes of the cards and of the KV pool."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from appliance.core.evidence import Evidence, Source

FRAMES = 4
MOST = 8
WITHIN_LINES = 200
RECORDED = ("vram_swing", "vram_climb", "vram_saw_tooth", "vram_red_line", "block_violations")
"""Kinds of what the flight recorder shows (flight.py)."""
_FATAL = re.compile(r"Fatal Python error: (?P<what>[^\n]{1,120})")
_THREAD = re.compile(r"(?:Current t|T)hread (?:0x)?[0-9a-fA-F]+(?: \[[^\]]{0,40}\])? \(most recent call first\)")
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]{1,400})", line (?P<line>\d+),? in (?P<name>\S{1,120})')
_PYSPY_HEAD = re.compile(r"^Thread (?P<id>0x[0-9A-Fa-f]+|\d+) \((?P<state>[a-z+]+)\)(?:: \"(?P<name>[^\"]{0,80})\")?")
_PYSPY_FRAME = re.compile(r"^\s{2,}(?P<name>\S{1,120}) \((?P<file>[^():]{1,400}):(?P<line>\d+)\)")
_NATIVE_FRAME = re.compile(
    r"^#\d+\s+(?:0x[0-9a-f]+ )?(?:in )?(?P<name>[^\s(]{1,200}) ?\((?:.*\bfrom (?P<library>\S+)|.*\bat (?P<file>\S+)|(?P<module>[^)]*))?"
)
_WAITS = frozenset({"wait", "acquire", "select", "poll", "epoll_wait", "_wait_for_tstate_lock", "accept", "recv", "get", "kqueue"})


def found_in(evidence: Sequence[Evidence]) -> tuple[str, ...]:
    """In sentences, what tells most first."""
    native = [item.text for item in evidence if item.source is Source.STACK and not item.data.get("kind")]
    told = [item.text for item in evidence if item.source in (Source.STACK, Source.CORE_DUMP) and item.data.get("kind") in ("cuda", "nccl")]
    logs = [item.text for item in evidence if item.source is Source.ENGINE_LOG]
    spied = [item.text for item in evidence if item.source is Source.STACK and item.data.get("kind") == "py-spy"]
    recorded = [item.text for item in evidence if item.source is Source.NVML and item.data.get("kind") in RECORDED]
    found = [*_native(native), *told, *stacks_in(logs), *stacks_in(spied), *recorded, *_earlier(evidence)]
    return tuple(dict.fromkeys(found))[:MOST]


def _earlier(evidence: Sequence[Evidence]) -> Iterator[str]:
    """Core dumps that are told of beside the crash's own."""
    dumps = [item.text for item in evidence if item.source is Source.CORE_DUMP and item.data.get("kind") is None]
    if len(dumps) > 1:
        yield f"{len(dumps)} core dumps of the engine within a day, such as: {dumps[-1]}"


def stacks_in(lines: Sequence[str]) -> list[str]:
    """Python's stacks in an engine's lines: of the thread that a fatal error was in, else of those that are not waiting."""
    return [*_faulthandler(lines), *_py_spy(lines)]


def _faulthandler(lines: Sequence[str]) -> Iterator[str]:
    what, at = "", 0
    for number, line in enumerate(lines):
        fatal = _FATAL.search(line)
        if fatal is not None:
            what, at = fatal["what"].strip(), number
        elif _THREAD.search(line) and "Current" in line:
            frames = _frames(lines[number + 1 : number + 1 + WITHIN_LINES], _FRAME)
            died = f"faulthandler ({what})" if what and number - at <= WITHIN_LINES else "faulthandler"
            if frames:
                yield f"{died}: the thread was in {frames}"


def _py_spy(lines: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(lines):
        head = _PYSPY_HEAD.search(line)
        if head is None:
            continue
        following = lines[number + 1 : number + 1 + WITHIN_LINES]
        first = _PYSPY_FRAME.search(following[0]) if following else None
        frames = _frames(following, _PYSPY_FRAME)
        if frames and first is not None and first["name"].rpartition(".")[2] not in _WAITS:
            yield f"py-spy: {head['name'] or 'thread ' + head['id']} ({head['state']}) was in {frames}"


def _frames(lines: Sequence[str], pattern: re.Pattern[str]) -> str:
    """The innermost ones that stand together."""
    found: list[str] = []
    for line in lines:
        match = pattern.search(line)
        if match is None or len(found) >= FRAMES:
            break
        found.append(f"{match['name']} ({match['file'].rpartition('/')[2]}:{match['line']})")
    return " < ".join(found)


def _native(lines: Sequence[str]) -> Iterator[str]:
    """The top frames of a core's stack."""
    found: list[str] = []
    for line in lines:
        match = _NATIVE_FRAME.search(line.strip())
        if match is not None:
            where = match["library"] or match["file"] or match["module"] or ""
            found.append(f"{match['name']} ({where.rpartition('/')[2]})" if where.strip() else match["name"])
    if found:
        yield f"core dump: the process was in {' < '.join(found[:FRAMES])}"
