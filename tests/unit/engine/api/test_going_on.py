"""`continue_final_message`: the answer goes on with what the assistant is made to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.serve_scripted import served

ASKED = [{"role": "user", "content": "Name a river."}]
BEGUN = [*ASKED, {"role": "assistant", "content": "A river is "}]


def body(messages: Any = BEGUN, **more: Any) -> dict[str, Any]:
    return {"messages": messages, "max_tokens": 3, **more}


async def test_the_prompt_ends_inside_the_last_message(folder: Path) -> None:
    """No end of turn behind it, and no new turn; without it, the one or the other."""
    async with served(ScriptedEngine(), folder) as one:
        prompts = []
        for more in (
            {"continue_final_message": True, "add_generation_prompt": False},
            {"continue_final_message": True},
            {"add_generation_prompt": False},
            {},
        ):
            assert (await one.post("/v1/chat/completions", body(**more))).status == 200
            prompt_ids = one.engine.submitted[-1].prompt_ids
            prompts.append(one.text._tokenizer.decode(list(prompt_ids), skip_special_tokens=False))
        assert prompts[0] == prompts[1]
        assert prompts[0].endswith("<|im_start|>assistant\nA river is")  # this template strips its messages
        assert prompts[2].endswith("A river is<|im_end|>\n")
        assert prompts[3].endswith("A river is<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        (body(continue_final_message=True, add_generation_prompt=True), "add_generation_prompt"),
        (body(ASKED, continue_final_message=True), "messages[0]"),
        (body([*ASKED, {"role": "assistant", "content": " "}], continue_final_message=True), "messages"),
        (body(continue_final_message="yes"), "continue_final_message"),
    ],
)
async def test_what_cannot_be_gone_on_with_is_said(sent: dict[str, Any], param: str, folder: Path) -> None:
    """Nothing reaches the engine."""
    async with served(ScriptedEngine(), folder) as one:
        answer = await one.post("/v1/chat/completions", sent)
        assert (answer.status, answer.error["param"]) == (400, param)
        assert one.engine.submitted == []
