"""The anthropic package: create, stream, count_tokens, errors."""

import anthropic
from asked import MAX_TOKENS, MESSAGES, MODEL, URL, tell

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
asked = {"model": MODEL, "max_tokens": MAX_TOKENS, "messages": MESSAGES, "extra_body": {"temperature": 0}}


def tokens(usage: anthropic.types.Usage) -> int:
    """What came out of the cache, which a new engine life begins without, counts apart."""
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + usage.output_tokens


whole = client.messages.create(**asked)
tell("create", whole.content[0].text, usage=tokens(whole.usage))
with client.messages.stream(**asked) as stream:
    text = "".join(stream.text_stream)
    last = stream.get_final_message()
tell("stream", text, usage=tokens(last.usage))
assert last.content[0].text == text
assert last.stop_reason in ("end_turn", "max_tokens")
counted = client.messages.count_tokens(model=MODEL, messages=MESSAGES)
assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens, (counted, whole.usage)
try:
    client.messages.create(**{**asked, "model": "claude-9"})
except anthropic.NotFoundError as error:
    assert "claude-9" in str(error)
else:
    raise AssertionError("a model that does not exist")
