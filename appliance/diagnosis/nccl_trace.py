"""NCCL's flight recorder as torch writes it: a pickle of a dictionary, one file a rank. Read without running anything that is in it."""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable
from typing import Any

from appliance.core.errors import ApplianceError

FRAMES = 3
_LIST_MAKERS = frozenset({"build_intlist", "build_doublelist", "build_boollist", "build_tensorlist"})
_OPCODES = frozenset(
    {
        "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "DUP", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1",
        "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "SHORT_BINUNICODE",
        "BINUNICODE", "BINUNICODE8", "EMPTY_LIST", "LIST", "APPEND", "APPENDS", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2",
        "TUPLE3", "EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GET", "BINGET",
        "LONG_BINGET", "GLOBAL", "REDUCE"
    }
)  # fmt: skip


class TraceError(ApplianceError):
    """No trace, or one that wants more than plain data."""


class _PlainData(pickle.Unpickler):
    """Numbers, texts, lists and dictionaries; a pickle that names anything but torch's makers of lists is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Callable[[Any], Any]:
        if module_name == "torch.jit._pickle" and global_name in _LIST_MAKERS:
            return _as_it_is
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")


def _as_it_is(items: Any) -> Any:
    return items


def _check(raw: bytes) -> None:
    """Looked through before it is run: a pickle can ask for memory that nothing in it fills. Raises ValueError."""
    for opcode, argument, _position in pickletools.genops(raw):
        if opcode.name not in _OPCODES:
            raise ValueError(f"it does {opcode.name}")
        if opcode.name in ("LONG_BINPUT", "PUT") and int(argument or 0) > len(raw):
            raise ValueError(f"it remembers {argument} things in {len(raw)} bytes")


def read_trace(raw: bytes) -> list[str]:
    """What is in it, in sentences: how far the collectives came, and where the first unfinished one was called.

    Raises:
        TraceError: it cannot be read as plain data.
    """
    try:
        _check(raw)
        trace = _PlainData(io.BytesIO(raw)).load()
    except Exception as error:  # a pickle is a program: whatever goes wrong in it is its own
        raise TraceError(f"the trace cannot be read ({type(error).__name__}: {error})") from error
    entries = trace.get("entries") if isinstance(trace, dict) else None
    rows = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    if not rows:
        return ["it holds no collectives"]
    unfinished = [row for row in rows if row.get("state") != "completed"]
    done = f"{len(rows) - len(unfinished)} of the last {len(rows)} collectives completed"
    if not unfinished:
        return [f"{done}; the last one was {_named(rows[-1])}"]
    first = unfinished[0]
    return [f"{done}; the first that did not is {_named(first)}, {first.get('state', 'in no known state')}{_called(first)}"]


def _named(row: dict[Any, Any]) -> str:
    sizes = row.get("input_sizes")
    of = f" of {str(sizes)[:80]}" if sizes else ""
    return f"{str(row.get('profiling_name', 'a collective'))[:80]} number {row.get('collective_seq_id', row.get('seq_id', '?'))}{of}"


def _called(row: dict[Any, Any]) -> str:
    given = row.get("frames")
    frames = [frame for frame in given if isinstance(frame, dict)][:FRAMES] if isinstance(given, list) else []
    words = [f"{frame.get('name')} ({str(frame.get('filename')).rpartition('/')[2]}:{frame.get('line')})" for frame in frames]
    return f", called in {' < '.join(words)}" if words else ""
