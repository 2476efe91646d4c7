"""The counting endpoint: what the gateway's length fuse is told is what the engine charges."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.fakes.model_folder import LINES, byte_fallback_folder
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.serve_scripted import Served, served

SCRAPS = (*LINES, "<|im_start|>", "<|im_end|>", "\u0000", "\r\n\t", " " * 40, "𝕏", "\u202e", "<tool call>", "e\u0301\u0301", "{}[]\"'\\")


def text(generator: random.Random) -> str:
    """From one character to a long document."""
    scraps = generator.choices(SCRAPS, k=generator.choice((1, 1, 1, 2, 5, 20, 150)))
    whole = "".join(scrap[generator.randrange(len(scrap)) :] for scrap in scraps)
    return whole or "x"


def request(generator: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body for it."""
    kind = generator.choice(("chat", "chat", "parts", "text", "ids", "generate"))
    if kind == "text":
        return "/v1/completions", {"prompt": text(generator)}
    if kind == "ids":
        return "/v1/completions", {"prompt": [generator.randrange(300) for _ in range(generator.randint(1, 300))]}
    if kind == "generate":
        return "/generate", {"text": text(generator)}
    roles = ["user", "assistant"] * generator.randint(0, 4) + ["user"]
    messages: list[dict[str, Any]] = [{"role": role, "content": text(generator)} for role in roles]
    if generator.random() < 0.3:
        messages.insert(0, {"role": generator.choice(("system", "developer")), "content": text(generator)})
    if kind == "parts":
        messages[-1]["content"] = [{"type": "text", "text": text(generator)} for _ in range(generator.randint(1, 3))]
    return "/v1/chat/completions", {"messages": messages}


def one_token(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The same, for an answer of one token."""
    return {**body, "sampling_params": {"max_new_tokens": 1}} if path == "/generate" else {**body, "max_tokens": 1}


async def both(one: Served, path: str, body: dict[str, Any]) -> tuple[int, int]:
    """The count, and what the generating endpoint charges."""
    counted = await one.post(f"/appliance/count{path}", body)
    charged = await one.post(path, one_token(path, body))
    assert (counted.status, charged.status) == (200, 200), (body, counted.body, charged.body)
    usage = charged.json["meta_info"] if path == "/generate" else charged.json["usage"]
    return counted.json["prompt_tokens"], usage["prompt_tokens"]


async def test_the_count_is_what_the_engine_charges(folder: Path) -> None:
    """A thousand varied prompts over three endpoints: scripts, special tokens, roles, parts, ids, long documents."""
    generator = random.Random(20261130)
    lengths = set()
    async with served(ScriptedEngine(context=20_000), folder) as one:
        for _ in range(1000):
            path, body = request(generator)
            counted, charged = await both(one, path, body)
            assert counted == charged, (path, body)
            lengths.add(counted)
    assert min(lengths) < 5
    assert max(lengths) > 3000
    assert len(lengths) > 300


async def test_a_tokenizer_that_adds_tokens_is_counted_with_them(tmp_path: Path) -> None:
    """BOS, and single bytes for what is not in the vocabulary."""
    generator = random.Random(7)
    async with served(ScriptedEngine(context=20_000), byte_fallback_folder(tmp_path)) as one:
        for _ in range(50):
            counted, charged = await both(one, "/v1/completions", {"prompt": text(generator)})
            assert counted == charged


async def test_what_would_be_refused_is_refused_in_the_same_words(folder: Path) -> None:
    """Too long, no JSON, no such model: the gateway may pass it on as it is."""
    bodies = (
        {"messages": [{"role": "user", "content": "word " * 2000}]},
        {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 10_000},
        {"messages": []},
        {"messages": [{"role": "user", "content": "hello"}], "model": "another"},
        b"{",
    )
    async with served(ScriptedEngine(), folder) as one:
        for body in bodies:
            counted, asked = await one.post("/appliance/count/v1/chat/completions", body), await one.post("/v1/chat/completions", body)
            assert counted.status == asked.status >= 400
            assert counted.json == asked.json
        assert one.engine.submitted == []
