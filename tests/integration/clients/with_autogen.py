"""autogen-ext's OpenAIChatCompletionClient: whole, streamed, a tool call, a class as the answer."""

import asyncio

from asked import ASKS_WEATHER, BASE, MAX_TOKENS, MODEL, PROMPT, City, tell, tell_call
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from lighthouse import Lighthouse

ABOUT = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True, "family": "unknown"}


def weather(city: City) -> str:
    """The weather in a city."""
    return f"rain in {city}"


async def main() -> None:
    """One after the other."""
    client = OpenAIChatCompletionClient(
        model=MODEL, base_url=BASE, api_key="none", temperature=0, max_tokens=MAX_TOKENS, max_retries=0, model_info=ABOUT
    )
    asked = [UserMessage(content=PROMPT, source="user")]
    tell("create", (await client.create(asked)).content)
    tell("stream", "".join([piece async for piece in client.create_stream(asked) if isinstance(piece, str)]))
    tool = FunctionTool(weather, description="The weather in a city.")
    called = await client.create([UserMessage(content=ASKS_WEATHER, source="user")], tools=[tool], tool_choice="required")
    tell_call("tool call", called.content[0].name, called.content[0].arguments)
    tell(
        "a class", Lighthouse.model_validate_json((await client.create(asked, json_output=Lighthouse)).content).model_dump_json(), own=True
    )
    await client.close()


asyncio.run(main())
