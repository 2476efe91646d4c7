"""Every wording a regular expression knows, with a mark where anything may stand."""

from __future__ import annotations

import re
from typing import Any

ANYTHING = "\0"
MOST = 3000
"""Wordings of one expression that are looked at."""

_parser: Any = re._parser  # type: ignore[attr-defined]


def wordings(regex: re.Pattern[str]) -> list[str]:
    """The fixed texts that a match may consist of, one for each combination of its alternatives."""
    return _texts(_parser.parse(regex.pattern))


def _texts(parsed: Any) -> list[str]:
    texts = [""]
    for operation, argument in parsed:
        parts = _parts(str(operation), argument)
        texts = [text + part for text in texts for part in parts][:MOST]
    return texts


def _parts(operation: str, argument: Any) -> list[str]:
    if operation == "LITERAL":
        return [chr(argument)]
    if operation == "SUBPATTERN":
        return _texts(argument[3])
    if operation == "BRANCH":
        return [text for branch in argument[1] for text in _texts(branch)]
    if operation == "IN":
        return _choices(argument)
    if operation in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return _repeats(*argument)
    return [""] if operation in ("AT", "ASSERT", "ASSERT_NOT") else [ANYTHING]


def _choices(argument: Any) -> list[str]:
    letters = [chr(value) for operation, value in argument if str(operation) == "LITERAL"]
    return letters if len(letters) == len(argument) <= 4 else [ANYTHING]


def _repeats(least: int, most: int, argument: Any) -> list[str]:
    texts = _texts(argument)
    if most == 1:
        return texts if least else ["", *texts]
    return [ANYTHING] if least == 0 else [text + ANYTHING for text in texts]
