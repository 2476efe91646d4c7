"""langchain-openai: invoke, stream, batch, tools, structured output."""

from asked import ASKS_WEATHER, BASE, FORM_TOKENS, MAX_TOKENS, MODEL, PROMPT, TOOL, tell, tell_call
from langchain_openai import ChatOpenAI
from lighthouse import Lighthouse

chat = ChatOpenAI(base_url=BASE, api_key="none", model=MODEL, temperature=0, max_tokens=MAX_TOKENS, max_retries=0)

whole = chat.invoke(PROMPT)
tell("invoke", whole.content, usage=whole.usage_metadata["total_tokens"], finish=whole.response_metadata["finish_reason"])
tell("stream", "".join(piece.content for piece in chat.stream(PROMPT)))
for answer in chat.batch([PROMPT, PROMPT]):
    tell("batch", answer.content)
forms = ChatOpenAI(base_url=BASE, api_key="none", model=MODEL, temperature=0, max_tokens=FORM_TOKENS, max_retries=0)
(call, *_) = forms.bind_tools([TOOL], tool_choice="any", parallel_tool_calls=False).invoke(ASKS_WEATHER).tool_calls
tell_call("tool call", call["name"], call["args"])
for method in ("json_schema", "function_calling"):
    found = forms.with_structured_output(Lighthouse, method=method).invoke(PROMPT)
    tell(f"structured by {method}", found.model_dump_json(), own=True)
