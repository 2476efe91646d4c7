"""Bad input: the status, the field, the value, the limit and the cure, in OpenAI's envelope; and the engine is not asked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.model_folder import byte_level_folder
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.serve_scripted import Answer, served

CHAT, TEXT, IDS = "/v1/chat/completions", "/v1/completions", "/generate"
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**more: Any) -> tuple[str, Any]:
    return CHAT, {"messages": HELLO, **more}


def text(**more: Any) -> tuple[str, Any]:
    return TEXT, {"prompt": "x", **more}


def message(**more: Any) -> tuple[str, Any]:
    return CHAT, {"messages": [{"role": "user", "content": "x", **more}]}


SCHEMA = "response_format.json_schema.schema"


def schema(value: Any) -> tuple[str, Any]:
    return chat(response_format={"type": "json_schema", "json_schema": {"schema": value}})


def nested(depth: int) -> Any:
    """Objects in objects."""
    return {"a": nested(depth - 1)} if depth else 1


BAD: list[tuple[tuple[str, Any], int, str | None, str]] = [
    # request, status, param, words of the message
    ((TEXT, b"\xff{}"), 400, None, "not UTF-8: byte 0xff at position 0"),
    ((TEXT, b""), 400, None, "not JSON"),
    ((TEXT, b'{"prompt": '), 400, None, "not JSON"),
    ((TEXT, b"[1]"), 400, None, "must be a JSON object, not a list"),
    ((TEXT, b'{"temperature": NaN}'), 400, None, "NaN"),
    ((TEXT, b'{"temperature": 1e999}'), 400, None, "1e999 is a number beyond all floats; send a smaller one"),
    (schema({"maximum": 5, "const": "\ud800"}), 400, SCHEMA, "holds \\ud800 without its other half"),
    (schema({"type": "object", "properties": {"\udc00": {}}}), 400, SCHEMA, "\\udc00"),
    (schema({"type": "object", "properties": {"a": {}}, "required": [["a"]]}), 400, "response_format", "for 'required' item"),
    (schema(nested(400)), 400, "response_format", "recursion limit exceeded"),
    (chat(json_schema='{"maximum": NaN}'), 400, "json_schema", "NaN is no JSON number"),
    (chat(chat_template_kwargs={"a": "\ud800"}), 400, "chat_template_kwargs", "\\ud800"),
    ((CHAT, {"messages": HELLO, "parallel_tool_calls": "no"}), 400, "parallel_tool_calls", "true or false"),
    ((CHAT, {"messages": HELLO, "priority": "high"}), 400, "priority", "an integer"),
    ((IDS, {"text": "x", "priority": 2**31}), 400, "priority", "at most 2147483647"),
    ((TEXT, b"[" * 100_000), 400, None, "nested too deeply"),
    ((TEXT, b'{"seed": ' + b"9" * 5000 + b"}"), 400, None, "more than 4300 digits; send a shorter"),
    ((TEXT, b'{"prompt": "\\ud800"}'), 400, "prompt", "\\ud800 without its other half"),
    ((CHAT, b'{"messages": [{"role": "user", "content": "a\\udc00"}]}'), 400, "messages[0].content", "\\udc00"),
    ((CHAT, {}), 400, "messages", "at least one message"),
    ((CHAT, {"messages": []}), 400, "messages", "at least one message"),
    ((CHAT, {"messages": "hi"}), 400, "messages", "must be a list, not a string"),
    ((CHAT, {"messages": ["hi"]}), 400, "messages[0]", "must be an object"),
    ((CHAT, {"messages": [{"role": "user"}]}), 400, "messages[0].content", "is missing"),
    ((CHAT, {"messages": [{"content": "x"}]}), 400, "messages[0].role", "None"),
    ((CHAT, {"messages": [*HELLO, {"role": "tool", "content": "x"}]}), 400, "messages[1].role", "'tool'"),
    ((CHAT, {"messages": [{"role": "assistant", "content": "x"}]}), 400, "messages", "the assistant cannot begin"),
    (message(content=5), 400, "messages[0].content", "must be a string, not an integer"),
    (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), 400, "messages[0].content[0]", "'image_url'"),
    (message(content=[{"type": "text"}]), 400, "messages[0].content[0]", "text"),
    (message(tool_calls=[{"id": "1"}]), 400, "messages[0].tool_calls", "not supported"),
    (message(colour="red"), 400, "messages[0].colour", "is no parameter"),
    (chat(model="gpt-5"), 404, "model", "'gpt-5' does not exist here; this engine serves 'tiny'"),
    (chat(model=7), 400, "model", "must be a string, not an integer"),
    (chat(temprature=1), 400, "temprature", "did you mean temperature?"),
    (chat(temperature=2.5), 400, "temperature", "2.5 is out of range: it must be at most 2"),
    (chat(temperature="1"), 400, "temperature", "must be a number, not a string"),
    (chat(temperature=True), 400, "temperature", "must be a number, not a boolean"),
    (chat(temperature=10**400), 400, "temperature", "out of range"),
    (chat(top_p=0), 400, "top_p", "temperature=0"),
    (chat(top_p=-0.1), 400, "top_p", "it must be at least 0"),
    (chat(top_k=-2), 400, "top_k", "out of range: it must be at least -1"),
    (chat(seed=1.5), 400, "seed", "must be an integer, not a number"),
    (chat(seed=2**63), 400, "seed", "out of range"),
    (chat(max_tokens=0), 400, "max_tokens", "0 is out of range: it must be at least 1"),
    (chat(max_tokens=-5), 400, "max_tokens", "-5 is out of range: it must be at least 1"),
    (chat(max_tokens=10**30), 400, "max_tokens", "out of range"),
    (chat(max_tokens=1_000_000), 422, "max_tokens", "exceeds the context of 256 tokens; with this prompt at most max_tokens="),
    (chat(max_completion_tokens=256), 422, "max_completion_tokens", "at most max_completion_tokens="),
    (chat(max_tokens=1, max_completion_tokens=2), 400, "max_tokens", "contradict"),
    (chat(stop=[""]), 400, "stop", "empty string"),
    (chat(stop=["a"] * 5), 400, "stop", "5 strings; at most 4"),
    (chat(stop=[1]), 400, "stop", "must be a string or a list"),
    (chat(stop="a" * 1001), 400, "stop", "1001 characters; at most 1000"),
    (chat(stop_token_ids=[10**6]), 400, "stop_token_ids", "no token id of this model: 0 to"),
    (chat(stream="yes"), 400, "stream", "must be true or false, not a string"),
    (chat(stream_options={"include_usage": True}), 400, "stream_options", "needs stream=true"),
    (chat(stream=True, stream_options={"usage": True}), 400, "stream_options.usage", "no parameter"),
    (chat(ignore_eos=1), 400, "ignore_eos", "true or false"),
    (chat(chat_template_kwargs=[]), 400, "chat_template_kwargs", "must be an object"),
    (chat(n=17), 400, "n", "17 is out of range: it must be at most 16"),
    (chat(n=0), 400, "n", "at least 1"),
    (chat(n=True), 400, "n", "must be an integer"),
    (chat(logprobs=5), 400, "logprobs", "must be true or false"),
    (chat(top_logprobs=5), 400, "top_logprobs", "needs logprobs=true"),
    (chat(logprobs=True, top_logprobs=21), 400, "top_logprobs", "at most 20"),
    (chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, "tools", "calls in no form that is known here (<tool_call>"),
    (chat(tool_choice="required"), 400, "tool_choice", "'required' demands a call, and there are no tools; send tools"),
    (chat(tools=[], tool_choice={"type": "function"}), 400, "tool_choice", "there are no tools"),
    (chat(response_format={"type": "xml"}), 400, "response_format.type", "none of text, json_object, json_schema"),
    (chat(response_format={}), 400, "response_format.type", "none of text"),
    (chat(response_format={"type": "json_object", "schema": {}}), 400, "response_format.schema", "no parameter"),
    (chat(response_format={"type": "json_schema"}), 400, "response_format.json_schema.schema", "must be a JSON schema"),
    (chat(response_format={"type": "json_schema", "json_schema": {"schema": {"type": "no"}}}), 400, "response_format", "Invalid type: no"),
    (chat(response_format={"type": "json_schema", "json_schema": {"schema": {"not": {}}}}), 400, "response_format", "cannot be followed"),
    (chat(response_format={"type": "json_object"}, regex="a"), 400, "regex", "response_format and regex contradict each other"),
    (chat(regex="(a"), 400, "regex", "unclosed group"),
    (chat(json_schema="{"), 400, "json_schema", "is no JSON"),
    (chat(regex="a" * 300_000), 400, "regex", "at most 262144"),
    (chat(structured_outputs={"grammar": "root ::= x"}), 400, "structured_outputs.grammar", "not supported"),
    (chat(structured_outputs={"regex": "a", "json": {}}), 400, "structured_outputs.regex", "contradict each other"),
    (chat(structured_outputs={"choices": ["a"]}), 400, "structured_outputs.choices", "did you mean choice?"),
    (chat(guided_choice=[]), 400, "guided_choice", "a list of texts to choose from"),
    (chat(presence_penalty=2.5), 400, "presence_penalty", "2.5 is out of range: it must be at most 2"),
    (chat(frequency_penalty="1"), 400, "frequency_penalty", "must be a number"),
    (chat(repetition_penalty=0), 400, "repetition_penalty", "at least 0.01"),
    (chat(min_p=1.1), 400, "min_p", "at most 1"),
    (chat(min_tokens=-1), 400, "min_tokens", "at least 0"),
    (chat(logit_bias=[]), 400, "logit_bias", "must be an object"),
    (chat(logit_bias={"x": 1}), 400, "logit_bias", "'x'"),
    (chat(logit_bias={"99999999999999999999999999": 1}), 400, "logit_bias", "no token id of this model, 0 to"),
    (chat(logit_bias={"0" * 20 + "999999": 1}), 400, "logit_bias", "no token id of this model, 0 to"),
    (chat(logit_bias={"9" * 5000: 1}), 400, "logit_bias", "no token id of this model, 0 to"),
    (chat(logit_bias={"5": 101}), 400, "logit_bias", "logit_bias[5]=101 is no number from -100 to 100"),
    (chat(logit_bias={"5": True}), 400, "logit_bias", "no number from"),
    (chat(logit_bias={str(i): 1 for i in range(1025)}), 400, "logit_bias", ""),
    (chat(store=True), 400, "store", "not supported"),
    (chat(reasoning_effort="high"), 400, "reasoning_effort", "leave it out"),
    ((TEXT, {}), 400, "prompt", "a text or a list"),
    ((TEXT, {"prompt": ""}), 400, "prompt", "is empty"),
    ((TEXT, {"prompt": []}), 400, "prompt", "at least one token id"),
    ((TEXT, {"prompt": ["a"] * 17, "n": 2}), 400, "prompt", "holds 17 prompts with n=2: 34 answers; one request gets at most 32"),
    ((TEXT, {"prompt": ["a", 5]}), 400, "prompt[1]", "must be a text or a list"),
    ((TEXT, {"prompt": ["a", ""]}), 400, "prompt[1]", "is empty"),
    ((TEXT, {"prompt": [1, "a"]}), 400, "prompt", "prompt[1] must be a token id, not a string"),
    ((TEXT, {"prompt": [-1]}), 400, "prompt", "prompt[0]=-1 is no token id"),
    ((TEXT, {"prompt": [True]}), 400, "prompt", "a boolean"),
    ((TEXT, {"prompt": [5] * 256}), 422, "prompt", "256 tokens and exceeds the context of 256 tokens: at most 255"),
    ((TEXT, {"prompt": [5] * 250, "max_tokens": 10}), 422, "max_tokens", "is 260 tokens"),
    ((TEXT, {"prompt": "dog " * 200_000}), 422, "prompt", "at least"),
    (chat(bad_words=["a"]), 400, "bad_words", "not supported by this engine; leave it out or send []"),
    (chat(include_stop_str_in_output=True), 400, "include_stop_str_in_output", "leave it out or send false"),
    (text(echo="yes"), 400, "echo", "true or false"),
    (text(max_tokens=0), 400, "max_tokens", "0 is out of range: it must be at least 1"),
    (text(echo=True, max_tokens=-1), 400, "max_tokens", "it must be at least 0"),
    (text(min_tokens=5, max_tokens=4), 400, "min_tokens", "min_tokens=5 is more than the answer can have: at most 4 tokens"),
    (text(min_tokens=300), 400, "min_tokens", "at most 2"),
    (text(skip_special_tokens="no"), 400, "skip_special_tokens", "true or false"),
    (text(logprobs=21), 400, "logprobs", "at most 20"),
    (text(logprobs=True), 400, "logprobs", "must be an integer"),
    (text(best_of=2), 400, "best_of", "not supported"),
    (text(suffix="b"), 400, "suffix", "not supported"),
    ((IDS, {}), 400, "text", "either text or input_ids"),
    ((IDS, {"text": "a", "input_ids": [1]}), 400, "text", "either text or input_ids"),
    ((IDS, {"input_ids": []}), 400, "text", "at least one token id"),
    ((IDS, {"input_ids": [1], "sampling_params": {"max_tokens": 1}}), 400, "sampling_params.max_tokens", "did you mean max_new_tokens?"),
    ((IDS, {"input_ids": [1], "sampling_params": {"temperature": -1}}), 400, "sampling_params.temperature", "it must be at least 0"),
    ((IDS, {"input_ids": [1], "sampling_params": 5}), 400, "sampling_params", "must be an object"),
    ((IDS, {"input_ids": [1], "sampling_params": {"n": 2}}), 400, "sampling_params.n", "not supported"),
    ((IDS, {"input_ids": [1], "sampling_params": {"regex": "("}}), 400, "sampling_params.regex", "cannot be followed"),
    ((IDS, {"input_ids": [1], "sampling_params": {"response_format": {}}}), 400, "sampling_params.response_format", "no parameter"),
    ((IDS, {"input_ids": [1], "return_logprob": 1}), 400, "return_logprob", "true or false"),
    ((IDS, {"input_ids": [1], "top_logprobs_num": 3}), 400, "top_logprobs_num", "3 needs return_logprob=true"),
    ((IDS, {"input_ids": [1], "return_logprob": True, "top_logprobs_num": 21}), 400, "top_logprobs_num", "at most 20"),
    ((IDS, {"input_ids": [1], "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 8}}), 400, "min_new_tokens", "at most 8 tokens"),
    (("/tokenize", {}), 400, "prompt", "either prompt or messages"),
    (("/tokenize", {"prompt": "x", "continue_final_message": True}), 400, "messages[0]", "to be the assistant's"),
    (("/tokenize", {"messages": HELLO, "tools": [{"type": "function"}]}), 400, "tools[0].function.name", "is no name"),
    (("/detokenize", {}), 400, "tokens", "must be a list"),
    (("/detokenize", {"tokens": ["a"]}), 400, "tokens", "must be a token id"),
]


def check_envelope(answer: Answer) -> Any:
    """Every error is the same envelope with four fields."""
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json) == {"error"}
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.error["type"] == ("invalid_request_error" if answer.status < 500 else "server_error")
    assert answer.error["code"]
    return answer.error


async def test_bad_requests(folder: Path) -> None:
    """Each row of BAD gets its status, names its field and says what is wrong; nothing reaches the engine."""
    async with served(ScriptedEngine(), folder) as one:
        for (path, body), status, param, words in BAD:
            answer = await one.post(path, body)
            error = check_envelope(answer)
            context = f"{path} {str(body)[:100]} → {answer.status} {error}"
            assert (answer.status, error["param"]) == (status, param), context
            assert words in error["message"], context
        assert one.engine.submitted == []


async def test_neutral_values_are_not_refused(folder: Path) -> None:
    """What asks for nothing is accepted: defaults written out, nulls, and bookkeeping fields that change no answer."""
    neutral = {
        "n": 1, "logprobs": False, "top_logprobs": 0, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "tools": [],
        "tool_choice": "auto", "response_format": {"type": "text"}, "user": "me", "metadata": {"a": 1}, "store": False, "stop": None,
        "max_tokens": 1, "max_completion_tokens": 1, "seed": None, "stream": False, "service_tier": "auto", "parallel_tool_calls": True,
        "use_beam_search": False, "length_penalty": 1.0, "include_stop_str_in_output": False, "skip_special_tokens": True, "bad_words": [],
        "repetition_penalty": 1.0, "model": None, "temperature": 0, "top_p": 1, "of_another_engine": None,
    }  # fmt: skip
    message = {"role": "user", "content": "x", "name": "me", "tool_calls": None, "refusal": None, "annotations": [], "audio": None}
    async with served(ScriptedEngine(), folder) as one:
        answer = await one.post(CHAT, {"messages": [message], **neutral})
        assert answer.status == 200, answer.body


async def test_what_sglangs_load_generator_sends_is_not_refused(folder: Path) -> None:
    """`bench_serving --backend sglang` (0.5.23) names all that SGLang could return beside a text, and asks for none of it."""
    sampling = {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}
    nothing = {"lora_path": None, "return_logprob": False, "return_routed_experts": False, "logprob_start_len": -1}
    async with served(ScriptedEngine(), folder) as one:
        answer = await one.post(IDS, {"input_ids": [1], "sampling_params": sampling, "stream": True, **nothing})
        assert answer.status == 200, answer.body
        wants = await one.post(IDS, {"input_ids": [1], "logprob_start_len": 0})
        assert check_envelope(wants)["param"] == "logprob_start_len"


async def test_sizes(folder: Path) -> None:
    """A body over the limit gets 413 with both numbers, declared or chunked; one below it is read."""
    async with served(ScriptedEngine(), folder, max_body_bytes=10_000) as one:
        answer = await one.post(TEXT, b" " * 10_001)
        assert (answer.status, check_envelope(answer)["code"]) == (413, "request_too_large")
        assert "10001" in answer.error["message"]
        assert "10000" in answer.error["message"]
        reader, writer = await one.connect()
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: e\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n")
        for _ in range(20):
            writer.write(b"400\r\n" + b" " * 1024 + b"\r\n")
        assert b" 413 " in (await reader.readuntil(b"\r\n"))
        writer.close()
        assert (await one.post(TEXT, json.dumps({"prompt": "x", "max_tokens": 1}).encode().ljust(10_000))).status == 200


async def test_paths_and_methods(folder: Path) -> None:
    """Unknown paths and wrong methods get the envelope too."""
    async with served(ScriptedEngine(), folder) as one:
        for method, path, status in (
            ("GET", "/nowhere", 404),
            ("POST", "/v1/embeddings", 404),
            ("GET", CHAT, 405),
            ("POST", "/health", 405),
        ):
            answer = await one.ask(method, path, b"")
            assert answer.status == status
            check_envelope(answer)
            assert ("allow" in answer.headers) == (status == 405)


async def test_prompts_and_answers_kept_apart(folder: Path) -> None:
    """Where the engine has less room for prompts or for answers than its context, that room is the limit and is named."""
    engine = ScriptedEngine()
    engine.limits = dataclasses.replace(engine.limits, max_prompt_tokens=100, max_new_tokens=50)
    async with served(engine, folder) as one:
        long = await one.post(TEXT, {"prompt": [5] * 101})
        assert (
            "101 tokens and exceeds the context of 256 tokens or the KV cache's 100 for prompt tokens: at most 100" in long.error["message"]
        )
        wide = await one.post(TEXT, {"prompt": [5] * 100, "max_tokens": 51})
        assert (long.status, wide.status) == (422, 422)
        assert "or the KV cache's 50 for new tokens; with this prompt at most max_tokens=50 fits" in wide.error["message"]
        answer = await one.post(TEXT, {"prompt": [5] * 100, "ignore_eos": True})
        assert answer.json["usage"]["completion_tokens"] == 50


async def test_what_the_engine_refuses(folder: Path) -> None:
    """A request that can never run on this KV pool: 422 with the engine's own sentence."""
    async with served(ScriptedEngine(), folder) as one:
        one.engine.refuse = "300 tokens do not fit the KV pool of 128 tokens"
        answer = await one.post(TEXT, {"prompt": "x", "max_tokens": 5})
        assert (answer.status, check_envelope(answer)["code"]) == (422, "context_length_exceeded")
        assert answer.error["message"] == one.engine.refuse


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
SAMPLING = ["max_tokens", "max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "n", "logprobs"]
BODY = ["messages", "prompt", "text", "input_ids", "sampling_params", "stream", "stream_options", "model", "tools", "rid", "tokens"]
NAMES = st.sampled_from([*SAMPLING, *BODY, "chat_template_kwargs"])
MESSAGES = st.lists(st.fixed_dictionaries({"role": JSON | st.just("user"), "content": JSON}), max_size=3)
BODIES = st.dictionaries(NAMES, JSON | MESSAGES, max_size=6).map(lambda body: json.dumps(body).encode()) | st.binary(max_size=60)


def test_garbage_never_gets_a_500(tmp_path: Path) -> None:
    """Whatever arrives, half-right objects and plain bytes, the answer is a 200 or a refusal in the envelope, never a 500."""

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(bodies=st.lists(st.tuples(st.sampled_from([CHAT, TEXT, IDS, "/tokenize", "/detokenize"]), BODIES), min_size=5, max_size=20))
    def throw(bodies: list[tuple[str, bytes]]) -> None:
        runner.run(_throw(bodies))

    async def _throw(bodies: list[tuple[str, bytes]]) -> None:
        for path, body in bodies:
            answer = await one.post(path, body)
            if answer.status != 200:
                assert answer.status in (400, 404, 422), (path, body, answer)
                check_envelope(answer)

    import asyncio

    with asyncio.Runner() as runner:
        context = served(ScriptedEngine(), byte_level_folder(tmp_path))
        one = runner.run(context.__aenter__())
        throw()
        runner.run(context.__aexit__(None, None, None))


@pytest.mark.parametrize("path", [CHAT, TEXT, IDS])
async def test_raw_garbage_on_the_socket(folder: Path, path: str) -> None:
    """Bytes that are no HTTP end that connection and nothing else."""
    async with served(ScriptedEngine(), folder) as one:
        for junk in (b"\x00" * 100, b"GET " + b"a" * 100_000, f"POST {path} HTTP/9.9\r\n\r\n".encode(), b"\r\n\r\n", b"{}"):
            reader, writer = await one.connect()
            writer.write(junk)
            writer.write_eof()
            await reader.read()
            writer.close()
        assert (await one.get("/health")).status == 200


@pytest.mark.parametrize("in_part", [False, True], ids=["plain", "seeing"])
async def test_a_token_without_weights_is_refused(in_part: bool, tmp_path: Path) -> None:
    """Gemma 3's tokenizer has one for images that its models without eyes have no row for: it would be read from behind the weights."""
    folder = byte_level_folder(tmp_path)
    tokens = json.loads((folder / "tokenizer.json").read_text())
    last = max(token["id"] for token in tokens["added_tokens"])
    name = next(token["content"] for token in tokens["added_tokens"] if token["id"] == last)
    size = {"vocab_size": last}
    (folder / "config.json").write_text(json.dumps({"text_config": size} if in_part else size))
    async with served(ScriptedEngine(), folder) as one:
        for path, body in (text(prompt=f"a {name} b"), chat(messages=[{"role": "user", "content": name}]), (IDS, {"text": name})):
            answer = await one.post(path, body)
            assert (answer.status, "has no weights for; leave it out" in check_envelope(answer)["message"]) == (400, True)
            assert repr(name) in answer.error["message"]
        assert one.engine.submitted == []
        assert (await one.post(*text(prompt="a b", max_tokens=1))).status == 200
