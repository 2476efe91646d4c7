"""The requests of `vllm bench serve` (openai-chat and openai backends) and its way to read a stream: bytes, line by line."""

import asyncio
import json
import sys

import aiohttp

url, model, prompt, max_tokens = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
CHAT = {
    "model": model,
    "messages": [{"role": "user", "content": [{"type": "text", "text": prompt}]}],
    "temperature": 0.0,
    "max_completion_tokens": max_tokens,
    "stream": True,
    "stream_options": {"include_usage": True},
}
TEXT = {
    "model": model,
    "prompt": prompt,
    "temperature": 0.0,
    "repetition_penalty": 1.0,
    "max_tokens": max_tokens,
    "logprobs": None,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": True,
}


async def ask(session: aiohttp.ClientSession, path: str, body: dict) -> tuple[str, int]:
    """The text and the answer's tokens."""
    text, tokens = "", 0
    async with session.post(f"{url}{path}", json=body, headers={"Authorization": "Bearer none", "x-request-id": "bench-1"}) as answer:
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
            print(json.dumps({"how": "chat, 16 at once", "text": text}), flush=True)
        _, tokens = await ask(session, "/v1/completions", TEXT)
        assert tokens == max_tokens


asyncio.run(main())
