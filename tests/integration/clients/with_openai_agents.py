"""openai-agents over chat completions: run, streamed, a tool, a class as the answer."""

import asyncio

import openai
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from asked import ASKS_WEATHER, BASE, FORM_TOKENS, MAX_TOKENS, MODEL, PROMPT, City, tell
from lighthouse import Lighthouse

set_tracing_disabled(True)


@function_tool
def weather(city: City) -> str:
    """The weather in a city."""
    return f"rain in {city}"


def agent(**more: object) -> Agent:
    """Of this endpoint."""
    client = openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0)
    settings = ModelSettings(
        temperature=0, max_tokens=FORM_TOKENS if more else MAX_TOKENS, tool_choice="required" if "tools" in more else None
    )
    return Agent(name="one", model=OpenAIChatCompletionsModel(model=MODEL, openai_client=client), model_settings=settings, **more)


async def main() -> None:
    """One after the other."""
    tell("run", (await Runner.run(agent(), PROMPT)).final_output)
    running = Runner.run_streamed(agent(), PROMPT)
    deltas = [event.data async for event in running.stream_events() if event.type == "raw_response_event"]
    tell("streamed", "".join(delta.delta for delta in deltas if delta.type == "response.output_text.delta"))
    called = await Runner.run(agent(tools=[weather], tool_use_behavior="stop_on_first_tool"), ASKS_WEATHER)
    assert called.final_output.startswith("rain in "), called
    tell("a tool's answer", called.final_output, own=True)
    tell("a class", (await Runner.run(agent(output_type=Lighthouse), PROMPT)).final_output.model_dump_json(), own=True)


asyncio.run(main())
