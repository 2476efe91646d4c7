"""litellm as a library, through the OpenAI, the vLLM and the Anthropic provider."""

import litellm
from asked import ASKS_WEATHER, BASE, FORM_TOKENS, MAX_TOKENS, MESSAGES, MODEL, TOOL, URL, tell, tell_call

litellm.drop_params = False

for provider, base in (("openai", BASE), ("hosted_vllm", BASE), ("anthropic", URL)):
    more = {"api_base": base, "api_key": "none", "max_tokens": MAX_TOKENS, "temperature": 0, "num_retries": 0}
    whole = litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, **more)
    tell(f"{provider}", whole.choices[0].message.content, usage=whole.usage.total_tokens)
    pieces = litellm.completion(model=f"{provider}/{MODEL}", messages=MESSAGES, stream=True, **more)
    tell(f"{provider} stream", "".join(piece.choices[0].delta.content or "" for piece in pieces))
    if provider != "anthropic":
        asked = {
            "messages": [{"role": "user", "content": ASKS_WEATHER}],
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        (call, *_) = (
            litellm.completion(model=f"{provider}/{MODEL}", **{**more, **asked, "max_tokens": FORM_TOKENS}).choices[0].message.tool_calls
        )
        tell_call(f"{provider} tool call", call.function.name, call.function.arguments)
try:
    litellm.completion(model="openai/gpt-9", messages=MESSAGES, api_base=BASE, api_key="none", num_retries=0)
except litellm.NotFoundError as error:
    assert "gpt-9" in str(error)
else:
    raise AssertionError("a model that does not exist")
