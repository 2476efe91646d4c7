"""The calls of tools in what a model says, dialect by dialect (engine/dialect.py), however the text is cut into pieces.

What only looks like a call stays text, marks included. Every decision depends on the text alone, not on its pieces: over a crash the same
text is read again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from appliance.engine.api.fields import strict_json
from appliance.engine.dialect import PYTHON_TAG, TOOL_CALL, TOOL_CALL_END, TOOL_CALLS, Dialect

_MOST_HEADER_CHARS = 256
"""Between Mistral's mark and the arguments: a name, an id, and two marks."""
_HEADER = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,128})\s*(?:\[CALL_ID\]\s*[A-Za-z0-9_-]{1,64}\s*)?(?:\[ARGS\])?\s*")
_BETWEEN_CALLS = " \t\r\n,"
"""In Mistral's list."""
_LLAMA_KEYS = ("name", "parameters", "arguments", "type", "function", "id")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_FIRST_KEY = re.compile(r'\{\s*(?:"(?P<key>[^"]*)(?P<closed>"?))?')
_BEGUN = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"(?:name|function)"\s*:\s*"(?P<name>[A-Za-z0-9_.-]{1,128})"'
    r'(?:\s*,\s*"(?:arguments|parameters)"\s*:\s*(?P<arguments>.*))?',
    re.DOTALL,
)
_BEGUN_BY_NAME = re.compile(
    r"(?P<name>[A-Za-z0-9_.-]{1,128})\s*(?:\[CALL_ID\][^\[{]{0,80})?(?:\[ARGS\]\s*|(?=\{))(?P<arguments>.*)", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made; `arguments` is JSON, or its beginning where max_tokens cut the call."""

    name: str
    arguments: str


Taken = tuple[list[ToolCall], int]
"""The calls, and how much of the text they were; no calls: what was opened is none."""
_NONE: Taken = ([], 0)


class CallReader:
    """Takes the calls out of one answer's text.

    Attributes:
        calls: so far.
    """

    _mark = TOOL_CALL

    def __init__(self, parallel: bool = True, names: Iterable[str] = (), must: Iterable[str] = ()) -> None:
        """Not `parallel`: one call, and nothing after it. `names`: of the tools that there are. `must`: of which one is called, and the
        answer is nothing else."""
        self.calls = 0
        self._parallel = parallel
        self._names = frozenset(names)
        self._must = tuple(must)
        self._cut = False
        self._buffer = ""
        self._opened: str | None = None
        """White space and mark in front of what may be a call; None: this is text."""
        self._blank = True
        """Nothing but white space was said since the beginning, or since the last call."""
        self._end = _JsonEnd()

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is certainly none of a call, and the calls that are complete."""
        self._buffer += text
        return self._read(final=False)

    def flush(self, cut: bool = False) -> tuple[str, list[ToolCall]]:
        """At the end: a call whose closing tag is missing is one if it is whole. `cut`, by max_tokens: what has begun is one as far as it
        came, from where a tool's name was said. What is behind a mark and may still become one is not shown: no client can use it."""
        self._cut = cut or bool(self._must)  # such an answer ends with its grammar, or was cut
        said, calls = self._read(final=True)
        if not self._must:
            return said, calls
        if not self.calls and len(self._must) == 1:
            calls, self.calls = [ToolCall(self._must[0], "")], 1
        return "", calls

    def _read(self, final: bool) -> tuple[str, list[ToolCall]]:
        said: list[str] = []
        calls: list[ToolCall] = []
        while self._parallel or not self.calls:
            if self._opened is None:
                place = self._open()
                if place is None:
                    break
                said.append(self._say(self._buffer[: place[0]]))
                self._opened, self._buffer = self._buffer[slice(*place)], self._buffer[place[1] :]
                self._end = _JsonEnd()
            taken = self._take(final)
            if taken is None and not final:
                return "".join(said), calls
            begun = self._begun() if taken is None and self._cut else []
            found, used = (begun, len(self._buffer)) if begun else taken or _NONE
            found = found if self._parallel else found[:1]
            if not found and taken is None and self._cut and self._may_begin():
                used = len(self._buffer)
            elif not found:
                said.append(self._opened)
            calls += found
            self.calls += len(found)
            self._opened, self._buffer, self._blank = None, self._buffer[used:], bool(found)
        if self.calls and not self._parallel:
            self._buffer = ""
        said.append(self._say(self._rest(final)))
        return "".join(said), calls

    def _rest(self, final: bool) -> str:
        """Of a text without a call in it, what can be said. White space waits: in front of a call it is not said."""
        keep = len(self._buffer) if final and not self.calls else self._certain(final)
        rest, self._buffer = self._buffer[:keep], "" if final else self._buffer[keep:]
        return rest

    def _certain(self, final: bool) -> int:
        text = self._buffer
        partial = 0 if final else next((size for size in range(len(self._mark) - 1, 0, -1) if text.endswith(self._mark[:size])), 0)
        return len(text[: len(text) - partial].rstrip())

    def _say(self, text: str) -> str:
        self._blank = self._blank and not text.strip()
        return text

    def _open(self) -> tuple[int, int] | None:
        """Where white space and a mark are in the buffer."""
        at = self._buffer.find(self._mark)
        return None if at < 0 else (len(self._buffer[:at].rstrip()), at + len(self._mark))

    def _take(self, final: bool) -> Taken | None:
        """What stands behind the mark; None: not all of it is there."""
        body, closed, _ = self._buffer.partition(TOOL_CALL_END)
        if not closed and not final:
            return None
        call = _called(parsed(body), ("arguments",))
        if call is None:
            return _NONE if closed else None
        return [call], len(body) + len(closed)

    def _begun(self) -> list[ToolCall]:
        """The calls in a buffer that ends in the middle of the last one."""
        return _begun(_BEGUN.match(self._buffer), self._names)

    def _may_begin(self) -> bool:
        """Behind a mark: this is the beginning of a call of a tool that there is."""
        return _may_begin(self._buffer, self._names)


class MistralCalls(CallReader):
    """[TOOL_CALLS] and a list, or a name and its arguments; whichever the template shows, models say the other one, too."""

    _mark = TOOL_CALLS

    def _take(self, final: bool) -> Taken | None:  # noqa: ARG002 - such a call says itself where it ends
        text = self._buffer
        start = len(text) - len(text.lstrip())
        if start == len(text):
            return None
        begin, header = start, None
        if text[start] not in "[{":
            begin = text.find("{", start, start + _MOST_HEADER_CHARS)
            if begin < 0:
                return None if len(text) < start + _MOST_HEADER_CHARS else _NONE
            header = _HEADER.fullmatch(text[start:begin])
            if header is None:
                return _NONE
        end = self._end.find(text, begin)
        if end is None:
            return None
        value = parsed(text[begin:end])
        if header is not None:
            return ([ToolCall(header["name"], _spelled(value))], end) if isinstance(value, dict) else _NONE
        calls = [_called(item, ("arguments",)) for item in (value if isinstance(value, list) else [value])]
        whole = [call for call in calls if call is not None]
        return (whole, end) if len(whole) == len(calls) else _NONE

    def _begun(self) -> list[ToolCall]:
        text = self._buffer.lstrip()
        if not text.startswith("["):
            return _begun(_BEGUN_BY_NAME.match(text), self._names) or super()._begun()
        calls: list[ToolCall] = []
        rest = text[1:].lstrip(_BETWEEN_CALLS)
        while (end := _JsonEnd().find(rest, 0)) is not None:
            call = _called(parsed(rest[:end]), ("arguments",))
            if call is None:
                return []
            calls.append(call)
            rest = rest[end:].lstrip(_BETWEEN_CALLS)
        return calls + _begun(_BEGUN.match(rest), self._names)

    def _may_begin(self) -> bool:
        text = self._buffer.strip()
        if text[:1] in ("", "[", "{"):
            return _may_begin(text.removeprefix("["), self._names)
        name, header, _ = text.partition("[")
        return name.strip() in self._names if header else any(known.startswith(name) for known in self._names)


class LlamaCalls(CallReader):
    """An object with a name and parameters: behind <|python_tag|>, or bare where the answer begins, or behind another call."""

    _mark = PYTHON_TAG

    def _open(self) -> tuple[int, int] | None:
        skipped = self._skipped()
        if self._blank and self._buffer[skipped : skipped + 1] == "{":
            return 0, skipped
        return super()._open()

    def _skipped(self) -> int:
        """White space, and semicolons between two calls."""
        return len(self._buffer) - len(self._buffer.lstrip(" \t\r\n;" if self.calls else None))

    def _certain(self, final: bool) -> int:
        if self._blank and self._skipped() == len(self._buffer):
            return 0
        return super()._certain(final)

    def _take(self, final: bool) -> Taken | None:  # noqa: ARG002 - such a call says itself where it ends
        tagged = self._opened is not None and self._opened.endswith(PYTHON_TAG)
        text = self._buffer
        start = len(text) - len(text.lstrip())
        if start == len(text):
            return None
        if text[start] != "{" or not (tagged or _may_be_call(text[start:])):
            return _NONE
        end = self._end.find(text, start)
        if end is None:
            return None
        call = _called(parsed(text[start:end]), ("parameters", "arguments"), None if tagged else self._names)
        return _NONE if call is None else ([call], end)

    def _may_begin(self) -> bool:
        # A bare object may have become an answer in JSON.
        return self._opened is not None and self._opened.endswith(PYTHON_TAG) and super()._may_begin()


def reader_of(dialect: Dialect, parallel: bool, names: Iterable[str], must: Iterable[str] = ()) -> CallReader:
    """For one answer; see CallReader."""
    if dialect is Dialect.HERMES:
        return CallReader(parallel, names, must)
    return LlamaCalls(parallel, names, must) if dialect is Dialect.LLAMA else MistralCalls(parallel, names, must)


class _JsonEnd:
    """Finds where a JSON object or list ends, in a text that grows; each character is looked at once."""

    def __init__(self) -> None:
        self._at = self._depth = 0
        self._quoted = self._escaped = False

    def find(self, text: str, begin: int) -> int | None:
        """Behind its last bracket; `begin` is where it begins, and stays so."""
        for at in range(max(self._at, begin), len(text)):
            char = text[at]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char in '{[}]"':
                self._quoted = char == '"'
                self._depth += (char in "{[") - (char in "}]")
                if not self._depth:
                    return at + 1
        self._at = len(text)
        return None


def _begun(found: re.Match[str] | None, names: frozenset[str]) -> list[ToolCall]:
    """A call of one of these that is not all there."""
    if found is None or found["name"] not in names:
        return []
    arguments = found["arguments"] or ""
    end = _JsonEnd().find(arguments, 0) if arguments.startswith("{") else None
    return [ToolCall(found["name"], arguments[:end])]


def _may_begin(text: str, names: frozenset[str]) -> bool:
    """A call of one of these as JSON, or its beginning; the arguments may come before the name."""
    said = "".join(text.split())
    for first in ("arguments", "parameters"):
        head = f'{{"{first}":'
        if head.startswith(said) or said.startswith(head):
            return True
    keys = [f'{{{kind}"{key}":"' for kind in ("", '"type":"function",') for key in ("name", "function")]
    return any(f'{key}{name}"'.startswith(said) for key in keys for name in names)


def _may_be_call(text: str) -> bool:
    """By the first key of a bare object: an answer in JSON is not to wait for its end."""
    found = _FIRST_KEY.match(text)
    if found is None or found["key"] is None:
        return found is not None and found.end() == len(text)
    key = found["key"]
    return key in _LLAMA_KEYS if found["closed"] else any(known.startswith(key) for known in _LLAMA_KEYS)


def parsed(text: str) -> object:
    """What a model wrote as JSON, fit to go out as JSON in UTF-8. None where it is none: neither is NaN, nor a number beyond all floats."""
    try:
        value = strict_json(text)
        spelled = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    # Half of an emoji, say, written as an escape: no text, as broken UTF-8 is none.
    return json.loads(_LONE_SURROGATE.sub("\ufffd", spelled)) if _LONE_SURROGATE.search(spelled) else value


def _called(value: object, argument_names: tuple[str, ...], names: frozenset[str] | None = None) -> ToolCall | None:
    """An object as a call. With `names` it must be one of these, with arguments: then nothing else marks it as a call."""
    if not isinstance(value, dict):
        return None
    name = value.get("name", value.get("function"))
    given = [value[key] for key in argument_names if key in value]
    if not isinstance(name, str) or (names is not None and not (given and name in names)):
        return None
    return ToolCall(name, _spelled(given[0] if given else {}))


def _spelled(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
