"""litellm as a library, through the OpenAI and the Anthropic provider."""

import json
import sys

import litellm

url, model, prompt, max_tokens = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
messages = [{"role": "user", "content": prompt}]
litellm.drop_params = False


def tell(how: str, text: str, **more: object) -> None:
    """A line that the caller reads."""
    print(json.dumps({"how": how, "text": text, **more}), flush=True)


for provider, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
    more = {"api_base": base, "api_key": "none", "messages": messages, "max_tokens": max_tokens, "temperature": 0, "num_retries": 0}
    whole = litellm.completion(model=f"{provider}/{model}", **more)
    tell(f"{provider}", whole.choices[0].message.content, usage=whole.usage.total_tokens)
    pieces = litellm.completion(model=f"{provider}/{model}", stream=True, **more)
    tell(f"{provider} stream", "".join(piece.choices[0].delta.content or "" for piece in pieces))
