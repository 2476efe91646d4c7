"""llama-index's OpenAILike: chat, stream, asynchronous, tools."""

import asyncio

from asked import ASKS_WEATHER, BASE, FORM_TOKENS, MAX_TOKENS, MODEL, PROMPT, City, tell, tell_call
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def weather(city: City) -> str:
    """The weather in a city."""
    return f"rain in {city}"


settings = {"model": MODEL, "api_base": BASE, "api_key": "none", "temperature": 0, "max_retries": 0, "context_window": 4096}
settings |= {"is_chat_model": True, "is_function_calling_model": True}
model = OpenAILike(max_tokens=MAX_TOKENS, **settings)
asked = [ChatMessage(role="user", content=PROMPT)]
tell("chat", model.chat(asked).message.content)
tell("stream", "".join(piece.delta or "" for piece in model.stream_chat(asked)))
tell("asynchronous", asyncio.run(model.achat(asked)).message.content)
answer = OpenAILike(max_tokens=FORM_TOKENS, **settings).chat_with_tools(
    [FunctionTool.from_defaults(fn=weather)], user_msg=ASKS_WEATHER, tool_required=True
)
(call, *_) = model.get_tool_calls_from_response(answer)
tell_call("tool call", call.tool_name, call.tool_kwargs)
