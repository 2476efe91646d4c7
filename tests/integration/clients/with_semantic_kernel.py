"""semantic-kernel's OpenAIChatCompletion: whole and streamed."""

import asyncio

import openai
from asked import BASE, MAX_TOKENS, MODEL, PROMPT, tell
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.contents import ChatHistory


async def main() -> None:
    """One after the other."""
    client = openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0)
    service = OpenAIChatCompletion(ai_model_id=MODEL, async_client=client)
    settings = OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=MAX_TOKENS)
    history = ChatHistory()
    history.add_user_message(PROMPT)
    tell("whole", str(await service.get_chat_message_content(history, settings)))
    pieces = [str(piece) async for piece in service.get_streaming_chat_message_content(history, settings)]
    tell("streamed", "".join(pieces))


asyncio.run(main())
