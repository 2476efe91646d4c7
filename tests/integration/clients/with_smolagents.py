"""smolagents: a model, its stream, and an agent that has to call tools."""

import re

from asked import ASKS_WEATHER, BASE, MAX_TOKENS, MODEL, PROMPT, tell
from smolagents import OpenAIModel, ToolCallingAgent, tool

model = OpenAIModel(model_id=MODEL, api_base=BASE, api_key="none", temperature=0, max_tokens=MAX_TOKENS)
asked = [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}]


@tool
def weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name
    """
    return f"rain in {city}"


tell("generate", model.generate(asked).content)
tell("stream", "".join(piece.content or "" for piece in model.generate_stream(asked)))
agent = ToolCallingAgent(tools=[weather], model=model, max_steps=2, verbosity_level=0)
said = str(agent.run(ASKS_WEATHER))
tell("an agent of two steps", re.sub("call_[0-9a-f]*", "call", said), own=True)  # in which calls have ids of their own
