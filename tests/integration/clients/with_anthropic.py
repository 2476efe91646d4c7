"""The anthropic package: create, stream, count_tokens, errors."""

import json
import sys

import anthropic

url, model, prompt, max_tokens = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
asked = {"model": model, "max_tokens": max_tokens, "messages": [{"role": "user", "content": prompt}], "extra_body": {"temperature": 0}}


def tell(how: str, text: str, **more: object) -> None:
    """A line that the caller reads."""
    print(json.dumps({"how": how, "text": text, **more}), flush=True)


whole = client.messages.create(**asked)
tell("create", whole.content[0].text, usage=whole.usage.input_tokens + whole.usage.output_tokens)
with client.messages.stream(**asked) as stream:
    text = "".join(stream.text_stream)
    last = stream.get_final_message()
tell("stream", text, usage=last.usage.input_tokens + last.usage.output_tokens)
assert last.content[0].text == text
assert last.stop_reason in ("end_turn", "max_tokens")
counted = client.messages.count_tokens(model=model, messages=asked["messages"])
assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens, (counted, whole.usage)
try:
    client.messages.create(**{**asked, "model": "claude-9"})
except anthropic.NotFoundError as error:
    assert "claude-9" in str(error)
else:
    raise AssertionError("a model that does not exist")
