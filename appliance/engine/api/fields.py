"""Reading a JSON body field by field, with types and limits, and refusing what nobody read.

`null` counts as absent, as OpenAI's clients mean it. Every refusal is a 400 that names the field, the value and the
limit. A field that no reader asked for is an error too: a parameter is honoured, listed as ignored, or refused.
"""

from __future__ import annotations

import difflib
import json
import math
import reprlib
import sys

from appliance.engine.api.errors import bad_request

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
_LONGEST_NAME = 100
"""Of a field that is looked for among those that there are; a client may send one of megabytes."""


def parse_object(body: bytes) -> dict[str, object]:
    """The JSON object in a request body.

    Raises:
        ApiError: 400: not UTF-8, not JSON, JSON that other parsers refuse (NaN), nested too deeply, or no object.
    """
    try:
        value = strict_json(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8: byte 0x{body[error.start]:02x} at position {error.start}", code="invalid_utf8") from None
    except RecursionError:
        raise bad_request("the body's JSON is nested too deeply", code="invalid_json") from None
    except json.JSONDecodeError as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    except NoNumber as error:
        raise bad_request(f"the body is not JSON: {error}", code="invalid_json") from None
    except ValueError:  # Python's own limit, which costs time with the square of the length
        most = sys.get_int_max_str_digits()
        raise bad_request(f"the body holds an integer of more than {most} digits; send a shorter one", code="invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, not {_kind(value)}", code="invalid_json")
    return value


class NoNumber(ValueError):
    """What Python takes for a number, and nothing else does."""


def strict_json(text: str) -> object:
    """JSON as every parser takes it: NaN is none, nor is a number beyond all floats.

    Raises:
        ValueError: it is no JSON; NoNumber for such a number.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_constant=_no_constant, parse_float=_finite)


def _no_constant(name: str) -> object:
    raise NoNumber(f"{name} is no JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise NoNumber(f"{text[:40]} is a number beyond all floats; send a smaller one")
    return number


def check_json(value: object, path: str) -> None:
    """What goes on as JSON, into a prompt or a grammar, must be fit for it.

    Raises:
        ApiError: 400: it is nested too deeply, or holds a lone surrogate.
    """
    try:
        spelled = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise bad_request(f"{path} is nested too deeply; send a flatter one", path, "invalid_value") from None
    check_text(spelled, path)


def check_text(value: str, path: str) -> str:
    """The text itself, once it is known to be one: JSON's \\u escapes can smuggle in half a surrogate pair.

    Raises:
        ApiError: 400: it holds a lone surrogate.
    """
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        unit = f"\\u{ord(value[error.start]):04x}"
        raise bad_request(f"{path} holds {unit} without its other half at position {error.start}", path, "invalid_unicode") from None
    return value


class Fields:
    """One JSON object being read. Call `end()` after the last field."""

    def __init__(self, values: dict[str, object], where: str = "") -> None:
        self._values = values
        self._where = where
        self._read: set[str] = set()

    def path(self, name: str) -> str:
        """The field's name as an error should print it."""
        return f"{self._where}.{name}" if self._where else name

    def value(self, name: str) -> object:
        """The field as it stands, None when absent or null; from now on it counts as read."""
        self._read.add(name)
        return self._values.get(name)

    def number(self, name: str, default: float, minimum: float, maximum: float) -> float:
        """A JSON number within both limits."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong_type(name, value, "a number")
        self._check_range(name, value, minimum, maximum)
        return float(value)

    def integer(self, name: str, minimum: int, maximum: int) -> int | None:
        """A JSON integer within both limits."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong_type(name, value, "an integer")
        self._check_range(name, value, minimum, maximum)
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """true or false."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong_type(name, value, "true or false")
        return value

    def text(self, name: str) -> str | None:
        """A string without lone surrogates."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self._wrong_type(name, value, "a string")
        return check_text(value, self.path(name))

    def items(self, name: str) -> list[object] | None:
        """A list, its items unread."""
        value = self.value(name)
        if value is not None and not isinstance(value, list):
            raise self._wrong_type(name, value, "a list")
        return value

    def nested(self, name: str) -> Fields:
        """An object's fields; without the object, none."""
        value = self.value(name)
        if value is not None and not isinstance(value, dict):
            raise self._wrong_type(name, value, "an object")
        return Fields(value or {}, self.path(name))

    def token_ids(self, name: str, vocabulary: int) -> tuple[int, ...] | None:
        """A list of token ids of this model."""
        values = self.items(name)
        return None if values is None else check_token_ids(values, self.path(name), vocabulary)

    def only(self, name: str, *allowed: object) -> None:
        """Accept the field only where its value asks for nothing: a feature that this engine does not have.

        Raises:
            ApiError: 400 naming the field: silence would let the client believe that it was honoured.
        """
        value = self.value(name)
        # 1 == True in Python, not in JSON.
        if value is not None and not any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in allowed):
            what = " or ".join(json.dumps(good) for good in allowed)
            cure = f"leave it out or send {what}" if allowed else "leave it out"
            raise bad_request(
                f"{self.path(name)}={_SHORT.repr(value)} is not supported by this engine; {cure}", self.path(name), "unsupported_parameter"
            )

    def ignore(self, *names: str) -> None:
        """Fields that change nothing in an answer, whatever they hold."""
        self._read.update(names)

    def end(self) -> None:
        """Refuse what nobody read and somebody wants.

        Raises:
            ApiError: 400 with the unknown field's name and the nearest known one.
        """
        for name in self._values.keys() - self._read:
            if self._values[name] is None:
                continue  # SGLang's load generator has fields of features that it does not use
            near = difflib.get_close_matches(name[:_LONGEST_NAME], self._read, n=1)
            cure = f"did you mean {near[0]}?" if near else "leave it out"
            path = self.path(_SHORT.repr(name)[1:-1])
            raise bad_request(f"{path} is no parameter of this endpoint; {cure}", path, "unknown_parameter")

    def _wrong_type(self, name: str, value: object, expected: str) -> Exception:
        return bad_request(f"{self.path(name)} must be {expected}, not {_kind(value)}", self.path(name), "invalid_type")

    def _check_range(self, name: str, value: float, minimum: float, maximum: float) -> None:
        if not minimum <= value <= maximum:
            bound = f"at least {minimum}" if value < minimum else f"at most {maximum}"
            message = f"{self.path(name)}={_SHORT.repr(value)} is out of range: it must be {bound}"
            raise bad_request(message, self.path(name), "invalid_value")


def check_token_ids(values: list[object], path: str, vocabulary: int) -> tuple[int, ...]:
    """The values as token ids.

    Raises:
        ApiError: 400 naming the first item that is none.
    """
    ids: list[int] = []
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int):
            raise bad_request(f"{path}[{index}] must be a token id, not {_kind(value)}", path, "invalid_type")
        if not 0 <= value < vocabulary:
            raise bad_request(f"{path}[{index}]={value} is no token id of this model: 0 to {vocabulary - 1}", path, "invalid_value")
        ids.append(value)
    return tuple(ids)


def _kind(value: object) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "null")
