"""haystack-ai's OpenAIChatGenerator: whole, streamed, a tool call."""

from asked import ASKS_WEATHER, BASE, FORM_TOKENS, MAX_TOKENS, MODEL, PARAMETERS, PROMPT, tell, tell_call
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

settings = {"temperature": 0, "max_tokens": MAX_TOKENS}
generator = OpenAIChatGenerator(
    model=MODEL, api_base_url=BASE, api_key=Secret.from_token("none"), generation_kwargs=settings, max_retries=0
)
forms = {"temperature": 0, "max_tokens": FORM_TOKENS, "tool_choice": "required", "parallel_tool_calls": False}
asked = [ChatMessage.from_user(PROMPT)]
tell("run", generator.run(asked)["replies"][0].text)
pieces = []
generator.run(asked, streaming_callback=lambda piece: pieces.append(piece.content))
tell("streamed", "".join(pieces))
tool = Tool(name="weather", description="The weather in a city.", parameters=PARAMETERS, function=lambda city: city)
answer = generator.run([ChatMessage.from_user(ASKS_WEATHER)], tools=[tool], generation_kwargs=forms)
(call, *_) = answer["replies"][0].tool_calls
tell_call("tool call", call.tool_name, call.arguments)
