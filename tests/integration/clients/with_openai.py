"""The openai package as its readme uses it: whole, streamed, asynchronous, tools, schemas, completions, models, errors."""

import asyncio
import json

import openai
from asked import ASKS_WEATHER, BASE, FORM_TOKENS, MAX_TOKENS, MESSAGES, MODEL, TOOL, tell, tell_call
from lighthouse import Lighthouse

client = openai.OpenAI(base_url=BASE, api_key="none", max_retries=0)
ASKED = {"model": MODEL, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "temperature": 0}
FORM = {**ASKED, "max_tokens": FORM_TOKENS}


def chats() -> None:
    """Whole, in chunks, and by the helper."""
    whole = client.chat.completions.create(**ASKED)
    tell("chat", whole.choices[0].message.content, usage=whole.usage.total_tokens, finish=whole.choices[0].finish_reason)
    text, usage, finish = "", None, None
    asked = {name: value for name, value in ASKED.items() if name != "max_tokens"} | {"max_completion_tokens": MAX_TOKENS}
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage.total_tokens if chunk.usage else usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    tell("chat stream", text, usage=usage, finish=finish)
    with client.chat.completions.stream(**ASKED) as stream:
        tell("chat.stream helper", "".join(event.delta for event in stream if event.type == "content.delta"))


async def several() -> list[str]:
    """The asynchronous client, eight streams at once."""
    async with openai.AsyncOpenAI(base_url=BASE, api_key="none", max_retries=0) as asked:

        async def one() -> str:
            pieces = await asked.chat.completions.create(**ASKED, stream=True)
            return "".join([piece.choices[0].delta.content or "" async for piece in pieces if piece.choices])

        return await asyncio.gather(*(one() for _ in range(8)))


def tools() -> None:
    """A call, whole and put together by the helper."""
    asked = {
        **ASKED,
        "max_tokens": FORM_TOKENS,
        "messages": [{"role": "user", "content": ASKS_WEATHER}],
        "tools": [TOOL],
        "tool_choice": "required",
    }
    called = client.chat.completions.create(**asked, parallel_tool_calls=False).choices[0]
    assert called.finish_reason == "tool_calls", called
    (call,) = called.message.tool_calls
    tell_call("tool call", call.function.name, call.function.arguments)
    with client.chat.completions.stream(**asked, parallel_tool_calls=False) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls
    tell_call("tool call", streamed.function.name, streamed.function.arguments)
    results = [called.message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    after = client.chat.completions.create(**{**asked, "messages": [*asked["messages"], *results], "tool_choice": "none"})
    tell("behind the tool's result", after.choices[0].message.content, own=True)


def schemas() -> None:
    """parse with a class, its stream, JSON mode, and log probabilities."""
    parsed = client.chat.completions.parse(**FORM, response_format=Lighthouse).choices[0].message.parsed
    assert isinstance(parsed, Lighthouse), parsed
    with client.chat.completions.stream(**FORM, response_format=Lighthouse) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == parsed
    tell("parse", parsed.model_dump_json(), own=True)
    free = client.chat.completions.create(**ASKED, response_format={"type": "json_object"}).choices[0]
    if free.finish_reason == "stop":
        json.loads(free.message.content)
    tell("JSON mode", free.message.content, own=True)
    likely = client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=3, n=2)
    assert [len(choice.logprobs.content[0].top_logprobs) for choice in likely.choices] == [3, 3]
    for choice in likely.choices:
        tell("one of two, with log probabilities", choice.message.content)


def others() -> None:
    """Models, completions, and what is refused."""
    assert [one.id for one in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    completion = client.completions.create(model=MODEL, prompt="Once", max_tokens=8, temperature=0)
    tell("completion", completion.choices[0].text, own=True)
    for wrong, error in (
        (lambda: client.chat.completions.create(**{**ASKED, "model": "gpt-9"}), openai.NotFoundError),
        (lambda: client.chat.completions.create(**{**ASKED, "max_tokens": 10**6}), openai.UnprocessableEntityError),
        (lambda: client.chat.completions.create(**ASKED, reasoning_effort="high", verbosity="low"), openai.BadRequestError),
        (lambda: client.embeddings.create(model=MODEL, input="x"), openai.NotFoundError),
        (lambda: client.responses.create(model=MODEL, input="x"), openai.NotFoundError),
        (lambda: client.audio.speech.create(model=MODEL, voice="alloy", input="x"), openai.NotFoundError),
        (lambda: client.files.list(), openai.NotFoundError),
        (lambda: client.models.retrieve("gpt-9"), openai.NotFoundError),
    ):
        try:
            wrong()
        except error as caught:
            assert caught.code, caught
            assert caught.message, caught
            assert caught.response.headers["x-request-id"], caught
        else:
            raise AssertionError(error)


chats()
for one in asyncio.run(several()):
    tell("one of eight streams at once", one)
tools()
schemas()
others()
