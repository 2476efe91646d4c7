"""The words without which no line is of note, and a quick way to the lines that may have one.

Every wording of every log's pattern that is not `frequent` contains one of these words (a test proves it), so words may only be
added; an operator's pattern adds the literals that have none. Logs are long and languages are small: what is looked at is not each
line, but each word that was not seen before. So of a word here only the letters count that stand together, and whether they begin or
end a word: a line found so *may* be of note, and the patterns themselves tell.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

from appliance.diagnosis.literals import any_of

WORDS = (
    "rror", "failed", "failure", "timed out", "timeout", "memory", "kill", "terminat", "illegal", "orrupt", "nvalid", "isconnect",
    "load", "nccl", "signal", "bind", "start", "idle", "abort", "lost", "context", "nvidia", "cache", "cancel", " err: ", "build: ",
    "API server", "not ", "no ", "n't ", "in use", "already", "ccupied", "mismatch", "Header", "ncomplete", "git-lfs", "ffline", "gated",
    "emplate", "quota", "oo many", "ENFILE", "rrno", "cleaning up", '" 4', "| 4", "| 5", "aiting for", "arming", "istening", "free=",
    "issing", "rong number", "nknown", "entire", "/dev/shm", "xhausted", "rash", "NET/", "fallen off", "egmentation", "free()", "malloc",
    "smashing", "died", "exitcode", "leaked", "apturing", "hit an", "is zero", "etract", "longer than", "exceeds", "must ", "misaligned",
    "ssert", "too old", "ompatib", "nsatisf", "apability", "equire", "upport", "bad_alloc", "non-default", "init_method", "nabl",
    "ustom all", "torch.compile", "blocks", "is stopped", "unexpectedly", "eartbeat", "eceived", "[shutdown]", "IPC", "reempt", " clos",
    "roles", "inference", "VRAM", "got exception", "oo large", "llocated", "navailable", "new model", "etries", "pull model", "nrecognized",
    "ERR", "Exception", "EOF", "ENO", "EADDR", "EMFILE", "Engine", "WARN", "Watchdog", "Warn", "Worker", "Fatal", "Fail", "FAIL", "FATAL",
    "Finished", "CUDA", "CUBLAS", "CUDNN", "CUSOLVER", "CRIT", "Capture", "Client", "Connected", "Commandline", "SIG", "Seg", "Shutting",
    "Shard", "Subprocess", "Starting", "Stopp", "Signal", "ServerArgs", "Xid", "Killed", "KV ", "Aborted", "Assert", "Application",
    "Access to", "Available", "Traceback", "Triton", "Timeout", "Try to", "The ", "Out of", "OutOfM", "OOMK", "NCCL", "Not enough",
    "NVRM", "NVML", "No ", "GGML", "GPU K", "GPU d", "GPU f", "GPUs", "Gracefully", "Bus error", "Bad Request", "RPC", "Received",
    "Request is", "Retract", "Regist", "Rank", "Pyspy", "Proc", "Memory", "Model", "Illegal", "Init", "Internal", "Load", "Uvicorn",
    "Unproc", "Upgrade", "ZMQ", "HF", "Default", "Detok", "Driver", "Duplicate", "Bfloat", "Boot", "Not Found", "*** ", "!!!",
    "exited, code=", "Deactivated", "Succeeded", "Started ", "Reboot", "ebooting", "System is ", "IO_PAGE", "DRHD", "_reaper",
    "blocked for", "state:D",
)  # fmt: skip
_SPACED = bytes(code if chr(code).isalpha() or code >= 0x80 or code in b"_'" else 0x20 for code in range(256))
_RUN = re.compile(r"[A-Za-z_']+")
FEWEST_LETTERS = 2
MOST_WORDS_KNOWN = 200_000
MOST_TELLING_KNOWN = 4000
MOST_SOUGHT = 64
"""Of more words that tell, which literals they belong to is not asked."""


class Cues:
    """Which lines may contain one of the words; remembers what it has seen."""

    def __init__(self, added: Iterable[str] = (), literals: Iterable[str] = ()) -> None:
        """`added`: words beside WORDS. `literals`: of the lines with a word, those without any of these are not wanted."""
        self._literals = tuple(literals)
        self._words = (*WORDS, *added, *_wordless(self._literals))
        self._telling, self._marks = _prepared(self._words)
        self._of_word = _remembered(self._words, self._literals)
        self._known: set[bytes] = set()
        self._tell: set[bytes] = set()

    def rows(self, lines: Sequence[bytes]) -> set[int]:
        """Their numbers, from 0. No line may hold the end of another."""
        text = b"\n".join(lines)
        telling = self._telling_in(set(text.translate(_SPACED).split()))
        telling.update(mark for mark in self._marks if _rarest(mark) in text and mark in text)
        if len(telling) > MOST_SOUGHT:
            return {row for row, line in enumerate(lines) if any(word in line for word in telling)}
        sought = [(word, self._literals_of(word)) for word in telling]
        return {row for row, line in enumerate(lines) for word, literals in sought if word in line and _any_in(line, literals)}

    def _telling_in(self, words: set[bytes]) -> set[bytes]:
        fresh = words - self._known
        if fresh:
            if len(self._known) >= MOST_WORDS_KNOWN:
                self._known.clear()
                self._tell.clear()
                fresh = words
            self._tell.update(word for word in fresh if self._telling.search(f" {word.decode('latin-1')} ") is not None)
            self._known |= fresh
        return words & self._tell

    def _literals_of(self, word: bytes) -> tuple[bytes, ...]:
        """Those that this word may be a piece of; a line with one of them is wanted."""
        if not self._literals:
            return (b"",)
        likely = self._of_word.get(word)
        if likely is None:
            if len(self._of_word) >= MOST_TELLING_KNOWN:
                self._of_word.clear()
            likely = self._of_word[word] = _likely(word, self._words, self._literals)
        return likely


def _any_in(line: bytes, literals: tuple[bytes, ...]) -> bool:
    return any(literal in line for literal in literals)


@functools.lru_cache(maxsize=4)
def _wordless(literals: tuple[str, ...]) -> tuple[str, ...]:
    """Those without one of our words: they are words themselves."""
    return tuple(literal for literal in literals if not any(word in literal for word in WORDS))


@functools.lru_cache(maxsize=4)
def _remembered(_words: tuple[str, ...], _literals: tuple[str, ...]) -> dict[bytes, tuple[bytes, ...]]:
    """What was found out of telling words, for the next log too."""
    return {}


def _likely(word: bytes, words: tuple[str, ...], literals: tuple[str, ...]) -> tuple[bytes, ...]:
    """The literals with one of our words that this one may be a piece of."""
    spaced = f" {word.decode('latin-1')} "
    meant = [known for known in words if ((part := _part(known)) and part in spaced) or known.encode() == word]
    return tuple(literal.encode() for literal in literals if any(known in literal for known in meant))


@functools.lru_cache(maxsize=4)
def _prepared(words: tuple[str, ...]) -> tuple[re.Pattern[str], tuple[bytes, ...]]:
    """What tells by its letters, as one expression, and the words that have none."""
    parts = [_part(word) for word in words]
    return any_of(part for part in parts if part), tuple(word.encode() for word, part in zip(words, parts, strict=True) if not part)


@functools.cache
def _rarest(mark: bytes) -> int:
    """The byte of a mark to look for first: that takes a tenth of the time."""
    return max(mark, key=lambda code: (chr(code) in "*!|+", chr(code).isupper(), code != 0x20))


@functools.cache
def _part(word: str) -> str:
    """The longest letters of it that stand together, with a space where the word says that nothing more belongs to them."""
    runs = [match for match in _RUN.finditer(word) if len(match[0]) >= FEWEST_LETTERS]
    if not runs:
        return ""
    best = max(runs, key=lambda run: len(run[0]))
    before = " " if best.start() > 0 else ""
    return f"{before}{best[0]}{' ' if best.end() < len(word) else ''}"
