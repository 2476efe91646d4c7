"""What an answer may say, by OpenAI's and vLLM's names, is followed: by real grammars over a real tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.engine.messages import Constraint, ConstraintFailed
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.serve_scripted import served

LIT = {"type": "object", "properties": {"lit": {"type": "boolean"}}, "required": ["lit"], "additionalProperties": False}
OPEN = {name: value for name, value in LIT.items() if name != "additionalProperties"}
ASKED = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": OPEN}}}, '{"lit":true}', '{"lit":true,"x":1}'),
    ({"structured_outputs": {"choice": ["red", 'b"lue']}}, 'b"lue', "green"),
    ({"guided_choice": ["red", "blue"], "guided_decoding_backend": "auto"}, "blue", "bl"),
    ({"structured_outputs": {"json": LIT, "disable_any_whitespace": False}}, '{"lit": true}', '{"lit": 1}'),
    ({"guided_json": json.dumps(LIT)}, '{"lit":false}', "{}"),
    ({"structured_outputs": {"regex": "[0-9]{2}"}}, "12", "1"),
    ({"guided_regex": "a|b"}, "b", "c"),
    ({"structured_outputs": {"json_object": True}}, '{"a": [1]}', "[1]"),
]


@pytest.mark.parametrize(("asked", "good", "bad"), ASKED)
async def test_it_is_followed(folder: Path, asked: dict[str, Any], good: str, bad: str) -> None:
    """One text fits as a whole, and one does not."""
    async with served(ScriptedEngine(), folder) as one:
        for text, fits in ((good, True), (bad, False)):
            answer = await one.post("/v1/completions", {"prompt": "x", **asked})
            assert answer.status == 200, answer.body
            constraint = one.engine.submitted[-1].constraint
            assert constraint is not None
            ids = one.text.encode(text, add_special_tokens=False, most_tokens=100)
            assert _fits(constraint, ids, min(one.text.end_token_ids)) is fits, text


def _fits(constraint: Constraint, ids: tuple[int, ...], end: int) -> bool:
    for token_id in (*ids, end):
        if not constraint.allowed()[token_id]:
            return False
        constraint.take(token_id)
    return True


async def test_a_form_that_nothing_has_is_told_in_words(folder: Path) -> None:
    """It is found out when the first token is chosen; without the matcher's own state, which may quote what was said."""
    async with served(ScriptedEngine(), folder) as one:
        assert (await one.post("/v1/completions", {"prompt": "x", "regex": r"[^\s\S]"})).status == 200  # the double asks no grammar
        constraint = one.engine.submitted[-1].constraint
        assert constraint is not None
        with pytest.raises(ConstraintFailed) as failed:
            constraint.allowed()
        assert str(failed.value) == "the grammar could not be followed any further: nothing at all may come next"
