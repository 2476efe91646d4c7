"""A second run measured against what the first one said: exactly the rest comes through, or an error that says why not."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.gateway import said as module
from appliance.gateway.intake import facts_of
from appliance.gateway.said import Diverged, Said, documents_of, texts_of, why_incomparable

Json = dict[str, Any]


def event(run: str, choices: list[Json], **more: Any) -> bytes:
    """As vLLM and SGLang write it; id and created differ from run to run."""
    document = {"id": run, "object": "chat.completion.chunk", "created": len(run), "model": "m", "choices": choices, **more}
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def chat(run: str, *texts: str, finish: str | None = "stop", index: int = 0) -> list[bytes]:
    """A stream of one choice."""
    events = [event(run, [{"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}])]
    events += [event(run, [{"index": index, "delta": {"content": text}, "logprobs": None, "finish_reason": None}]) for text in texts]
    if finish is not None:
        events.append(event(run, [{"index": index, "delta": {}, "logprobs": None, "finish_reason": finish}]))
        events.append(event(run, [], usage={"prompt_tokens": 3, "completion_tokens": len(texts)}))
        events.append(b"data: [DONE]\n\n")
    return events


def first_run(*events: bytes) -> Said:
    """All of it was sent."""
    said = Said()
    for one in events:
        assert said.take(one) == one
    return said


def text_of(events: bytes) -> dict[tuple[object, ...], str]:
    """Texts by field."""
    texts: dict[tuple[object, ...], str] = {}
    for document in documents_of(events):
        for key, holder, name in texts_of(document):
            texts[key] = texts.get(key, "") + holder[name]
    return texts


def cut(text: str, places: set[int]) -> list[str]:
    """A text in pieces."""
    bounds = [0, *sorted(place for place in places if 0 < place < len(text)), len(text)]
    return [text[begin:end] for begin, end in itertools.pairwise(bounds)]


@given(
    st.text(min_size=1, max_size=60),
    st.integers(0, 60),
    st.sets(st.integers(0, 60)),
    st.sets(st.integers(0, 60)),
    st.sampled_from([1, 60, 10**6]),
)
def test_exactly_the_rest_comes_through_however_both_runs_are_cut(
    text: str, sent_chars: int, first: set[int], second: set[int], fold_bytes: int
) -> None:
    """Joined, the client's text is the whole one; role, finish reason, usage and [DONE] come once; the id stays."""
    module.FOLD_BYTES, before = fold_bytes, module.FOLD_BYTES
    try:
        sent = chat("run-1", *cut(text[:sent_chars], first), finish=None)
        replay = first_run(*sent).replay()
        rest = b"".join(replay.take(one) for one in chat("second", *cut(text, second)))
    finally:
        module.FOLD_BYTES = before
    whole = b"".join(sent) + rest
    assert text_of(whole)["content", 0] == text
    assert whole.count(b'"role":') == 1
    documents = list(documents_of(whole))
    assert {document["id"] for document in documents} == {"run-1"}
    assert {document["created"] for document in documents} == {5}
    assert [choice["finish_reason"] for document in documents for choice in document["choices"]].count("stop") == 1
    assert [document["usage"]["prompt_tokens"] for document in documents if "usage" in document] == [3]
    assert rest.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("place", range(8))
def test_a_loss_behind_the_text_repeats_nothing(place: int) -> None:
    """The finish reason and the usage are said once, wherever between them the engine died."""
    events = chat("run-1", "a", "b", "c")
    sent = events[: place + 1]
    rest = _second(sent, chat("run-2", "a", "b", "c"))
    assert list(documents_of(b"".join(sent) + rest)) == list(documents_of(b"".join(events)))


def _second(sent: list[bytes], run: list[bytes]) -> bytes:
    replay = first_run(*sent).replay()
    return b"".join(replay.take(one) for one in run)


def test_several_crashes_in_one_answer() -> None:
    """What a second run lets through is said, too."""
    said = first_run(*chat("run-1", "one ", finish=None))
    through = b"".join(said.replay().take(one) for one in chat("run-2", "one two ", finish=None)[:1])
    replay = said.replay()
    through += b"".join(replay.take(one) for one in chat("run-2", "one two ", finish=None))
    replay = said.replay()
    through += b"".join(replay.take(one) for one in chat("run-3", "one ", "two ", "three"))
    assert text_of(through)["content", 0] == "two three"


def test_choices_interleave() -> None:
    """n = 2: each choice is compared by itself."""
    sent = [*chat("a", "x1", "x2", finish=None), *chat("a", "y1", finish=None, index=1)]
    second = [*chat("b", "y1", "y2", finish=None, index=1), *chat("b", "x1", "x2", "x3", finish=None)]
    assert text_of(_second(sent, second)) == {("content", 0): "x3", ("content", 1): "y2"}


def test_tool_calls_keep_their_first_id() -> None:
    """vLLM draws a new one for each run; its client knows the first."""

    def calls(run: str, call_id: str, *arguments: str) -> list[bytes]:
        head = {"index": 0, "id": call_id, "type": "function", "function": {"name": "weather", "arguments": ""}}
        deltas = [{"tool_calls": [head]}] + [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in arguments]
        return [event(run, [{"index": 0, "delta": delta, "finish_reason": None}]) for delta in deltas]

    rest = _second(calls("a", "call-1", '{"ci'), calls("b", "call-2", '{"city": ', '"Rome"}'))
    assert text_of(rest)["arguments", 0, 0] == 'ty": "Rome"}'
    assert b"call-2" not in rest
    with pytest.raises(Diverged, match="weather"):
        _second(calls("a", "call-1"), [one.replace(b"weather", b"time") for one in calls("b", "call-2")])


def test_log_probabilities_go_with_their_tokens() -> None:
    """A straddling event keeps the entries of the tokens that are new."""

    def logged(*tokens: str) -> bytes:
        logprobs = {"content": [{"token": token, "logprob": -1.0} for token in tokens]}
        return event("a", [{"index": 0, "delta": {"content": "".join(tokens)}, "logprobs": logprobs, "finish_reason": None}])

    (document,) = documents_of(_second([logged("one")], [logged("one", " two")]))
    assert document["choices"][0]["delta"]["content"] == " two"
    assert [entry["token"] for entry in document["choices"][0]["logprobs"]["content"]] == [" two"]


@pytest.mark.parametrize(
    ("second", "why"),
    [
        (["other"], "had 'hello'"),
        (["hell"], "ended"),
        (["hel", "p!"], "'lo'"),
    ],
)
def test_another_answer_is_an_error_that_says_so(second: list[str], why: str) -> None:
    """A letter that differs, and an end that comes too soon."""
    with pytest.raises(Diverged, match=why) as diverged:
        _second(chat("a", "hello", finish=None), chat("b", *second))
    assert (diverged.value.status, diverged.value.code) == (503, "answer_diverged")


def test_an_error_event_comes_through() -> None:
    """The engine's own words."""
    error = b'data: {"error": {"message": "out of memory"}}\n\n'
    assert _second(chat("a", "hello", finish=None), [error]) == error


@pytest.mark.parametrize(
    ("body", "deterministic"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 0.0, "n": 2}, True),
        ({"seed": 0}, True),
        ({"top_k": 1}, True),
        ({"temperature": 0.1}, False),
        ({}, False),
        ({"seed": None}, False),
    ],
)
def test_only_deterministic_requests_can_be_compared(body: Json, deterministic: bool) -> None:
    """Temperature 0, a seed, or only one token to choose from; and only streams whose events grow."""
    facts = facts_of(json.dumps(body).encode())
    assert facts.deterministic is deterministic
    assert (why_incomparable("/v1/completions", facts.deterministic) == "") is deterministic
    assert "/v1/messages" in why_incomparable("/v1/messages", True)
