"""The requests of `vllm bench serve` (openai-chat and openai backends) and its way to read a stream: bytes, line by line."""

import asyncio
import json

import aiohttp
from asked import MAX_TOKENS, MODEL, PROMPT, URL, tell

CHAT = {
    "model": MODEL,
    "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
    "temperature": 0.0,
    "max_completion_tokens": MAX_TOKENS,
    "stream": True,
    "stream_options": {"include_usage": True},
}
TEXT = {
    "model": MODEL,
    "prompt": PROMPT,
    "temperature": 0.0,
    "repetition_penalty": 1.0,
    "max_tokens": MAX_TOKENS,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}


async def ask(session: aiohttp.ClientSession, path: str, body: dict) -> tuple[str, int]:
    """The text and the answer's tokens."""
    text, tokens = "", 0
    async with session.post(f"{URL}{path}", json=body, headers={"Authorization": "Bearer none", "x-request-id": "bench-1"}) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            chunk = line.strip().decode()
            if not chunk or chunk.startswith(":"):
                continue
            data = chunk.removeprefix("data: ")
            if data == "[DONE]":
                continue
            document = json.loads(data)
            for choice in document["choices"]:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            tokens = document["usage"]["completion_tokens"] if document.get("usage") else tokens
    return text, tokens


async def main() -> None:
    """Sixteen at once."""
    async with aiohttp.ClientSession() as session:
        for text, _ in await asyncio.gather(*(ask(session, "/v1/chat/completions", CHAT) for _ in range(16))):
            tell("chat, 16 at once", text)
        _, tokens = await ask(session, "/v1/completions", TEXT)
        assert tokens == MAX_TOKENS


asyncio.run(main())
