"""The openai package as its readme uses it: whole, streamed, asynchronous, completions, models, errors."""

import asyncio
import json
import sys

import openai

url, model, prompt, max_tokens = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
messages = [{"role": "user", "content": prompt}]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def tell(how: str, text: str, **more: object) -> None:
    """A line that the caller reads."""
    print(json.dumps({"how": how, "text": text, **more}), flush=True)


whole = client.chat.completions.create(model=model, messages=messages, max_tokens=max_tokens, temperature=0)
tell("chat", whole.choices[0].message.content, usage=whole.usage.total_tokens, finish=whole.choices[0].finish_reason)
text, usage, finish = "", None, None
options = {"include_usage": True}
for chunk in client.chat.completions.create(
    model=model, messages=messages, max_completion_tokens=max_tokens, temperature=0, stream=True, stream_options=options
):
    usage = chunk.usage.total_tokens if chunk.usage else usage
    for choice in chunk.choices:
        text += choice.delta.content or ""
        finish = choice.finish_reason or finish
tell("chat stream", text, usage=usage, finish=finish)
with client.chat.completions.stream(model=model, messages=messages, max_tokens=max_tokens, temperature=0) as stream:
    tell("chat.stream helper", "".join(event.delta for event in stream if event.type == "content.delta"))


async def alone() -> str:
    """The asynchronous client."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as asked:
        pieces = await asked.chat.completions.create(model=model, messages=messages, max_tokens=max_tokens, temperature=0, stream=True)
        return "".join([piece.choices[0].delta.content or "" async for piece in pieces if piece.choices])


tell("async chat stream", asyncio.run(alone()))
assert [one.id for one in client.models.list()] == [model]
assert client.models.retrieve(model).id == model
completion = client.completions.create(model=model, prompt="Once", max_tokens=8, temperature=0)
assert completion.choices[0].text
for wrong, error in (
    (lambda: client.chat.completions.create(model="gpt-9", messages=messages), openai.NotFoundError),
    (lambda: client.chat.completions.create(model=model, messages=messages, max_tokens=10**6), openai.UnprocessableEntityError),
    (lambda: client.embeddings.create(model=model, input="x"), openai.NotFoundError),
    (lambda: client.responses.create(model=model, input="x"), openai.NotFoundError),
):
    try:
        wrong()
    except error as caught:
        assert caught.code and caught.message, caught
    else:
        raise AssertionError(error)
