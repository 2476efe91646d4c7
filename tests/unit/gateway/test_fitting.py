"""Which prompts are tried when one's length does not go."""

from __future__ import annotations

from typing import Any

import pytest

from appliance.gateway.fitting import longer, shorter

Json = dict[str, Any]
CHAT, TEXT, IDS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/generate", "/v1/messages"


def conversation(*roles: str) -> Json:
    """Numbered messages, and a field that is none of ours."""
    return {"model": "m", "messages": [{"role": role, "content": f"{role} {number}"} for number, role in enumerate(roles)]}


def left(document: Json) -> list[str]:
    """What is left."""
    return [message["content"] for message in document["messages"]]


def test_a_conversation_loses_its_oldest_turns() -> None:
    """Whole turns, so that it begins with the user and no tool's answer stands alone; system and last message stay."""
    asked = conversation("system", "user", "assistant", "tool", "assistant", "user", "assistant", "user")
    made = [make() for make in shorter(CHAT, asked)]
    assert [left(document) for document in made] == [
        ["system 0", "user 5", "assistant 6", "user 7"],
        ["system 0", "user 7"],
    ]
    assert all(document["model"] == "m" for document in made)
    assert left(asked)[1] == "user 1"


@pytest.mark.parametrize("roles", [("user",), ("system", "user"), ("system",), ()])
def test_a_single_question_cannot_be_made_shorter(roles: tuple[str, ...]) -> None:
    """What would be cut off is what is asked."""
    assert shorter(CHAT, conversation(*roles)) == []


def test_a_text_loses_its_beginning() -> None:
    """Also one of token ids; not a list of texts."""
    texts = [make()["prompt"] for make in shorter(TEXT, {"prompt": "abcdefgh" * 100})]
    assert [len(text) for text in texts] == sorted((len(text) for text in texts), reverse=True)
    assert all(("abcdefgh" * 100).endswith(text) for text in texts)
    assert min(len(text) for text in texts) == 25
    assert [make()["prompt"] for make in shorter(TEXT, {"prompt": [1, 2, 3]})] == [[2, 3], [3]]
    assert [make()["input_ids"] for make in shorter(IDS, {"input_ids": [1, 2]})] == [[2]]
    assert shorter(TEXT, {"prompt": ["a", "b"]}) == shorter(TEXT, {}) == shorter("/v1/embeddings", {"input": "x"}) == []


def test_line_breaks_where_no_template_takes_them_away() -> None:
    """Inside the last message, in front of the text."""
    assert [document["messages"][-1]["content"] for document in longer(MESSAGES, conversation("user", "user"))] == [
        "user\n 1",
        "user\n\n 1",
        "user\n\n\n 1",
        "user\n\n\n\n 1",
    ]
    assert list(longer(CHAT, {"messages": [{"role": "user", "content": " word "}]})) == []
    assert next(longer(TEXT, {"prompt": "x"})) == {"prompt": "\nx"}
    assert list(longer(TEXT, {"prompt": [1, 2]})) == list(longer(CHAT, {"messages": [{"content": [{}]}]})) == []


def test_breaks_stand_apart_where_a_bucket_is_further_off() -> None:
    """In one place they would become one token: behind the four that are tried there, one in front of each of the last words."""
    tried = [document["messages"][-1]["content"] for document in longer(CHAT, {"messages": [{"content": "a b c d"}]}, 3)]
    assert tried[4:] == ["a b\n c\n d"]
    tried = [document["messages"][-1]["content"] for document in longer(CHAT, {"messages": [{"content": "a b c d e"}]}, 3)]
    assert tried[4:] == ["a b c\n d\n e", "a b\n c\n d\n e"]
    assert [document["prompt"] for document in longer(TEXT, {"prompt": "a b c d e"}, 3)][4:] == ["\na\n b c d e", "\na\n b\n c d e"]


def test_no_more_than_sixteen_breaks_apart() -> None:
    """However far off the bucket is; and none without one."""
    words = {"prompt": "word " * 100}
    assert len(list(longer(TEXT, words, 400))) == 4 + 15
    assert len(list(longer(TEXT, words))) == 4


def test_breaks_are_all_that_is_added() -> None:
    """Whoever takes them out has the client's text."""
    words = " ".join(f"w{number}" for number in range(40))
    for document in longer(MESSAGES, {"messages": [{"role": "user", "content": words}]}, 16):
        assert document["messages"][-1]["content"].replace("\n", "") == words
