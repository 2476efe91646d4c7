"""pydantic-ai: text, stream, a class as the answer by a tool and by a schema, a tool that is called."""

import asyncio

from asked import ASKS_WEATHER, BASE, FORM_TOKENS, MAX_TOKENS, MODEL, PROMPT, City, tell
from lighthouse import Lighthouse
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE, api_key="none"))
settings = {"temperature": 0, "max_tokens": MAX_TOKENS}
forms = {"temperature": 0, "max_tokens": FORM_TOKENS, "parallel_tool_calls": False}
plain = Agent(model, model_settings=settings)


async def streamed() -> str:
    """In pieces."""
    async with plain.run_stream(PROMPT) as result:
        return "".join([piece async for piece in result.stream_text(delta=True)])


tell("run", plain.run_sync(PROMPT).output)
tell("stream", asyncio.run(streamed()))
for how, output in (("by a tool", Lighthouse), ("by a schema", NativeOutput(Lighthouse))):
    tell(how, Agent(model, model_settings=forms, output_type=output).run_sync(PROMPT).output.model_dump_json(), own=True)

cities = []
agent = Agent(model, model_settings=settings)


@agent.tool_plain
def weather(city: City) -> str:
    """The weather in a city."""
    cities.append(city)
    return "rain"


tell("with a tool that it may call", str(agent.run_sync(ASKS_WEATHER).output), own=True)
