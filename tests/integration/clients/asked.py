"""What the programs beside this one are asked, and how they tell their caller."""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

URL, MODEL, PROMPT, MAX_TOKENS = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
BASE = f"{URL}/v1"
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]
FORM_TOKENS = 100
"""For a call or a class, however much white space a small model puts into it."""
CITIES = ("Oslo", "Bergen")
City = Literal["Oslo", "Bergen"]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "enum": list(CITIES)}}, "required": ["city"]}
"""A small model fills in what it can only choose."""
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather in a city.", "parameters": PARAMETERS}}
ASKS_WEATHER = "What is the weather in Oslo?"


def tell(how: str, text: str | None, *, own: bool = False, **more: object) -> None:
    """An answer, for the caller.

    Args:
        own: the client asked in words of its own: the text is that of no plain request, but the same every time.
    """
    print(json.dumps({"how": how, "text": text, "own": own, **more}), flush=True)


def tell_call(how: str, name: str, arguments: str | dict[str, Any]) -> None:
    """A call of the tool, which has to be one of its two."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "weather", name
    assert values["city"] in CITIES, values
    tell(how, json.dumps(values), own=True)
