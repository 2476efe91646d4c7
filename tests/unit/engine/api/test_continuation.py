"""Answers cut off at every event and gone on with by another engine life: together they are the undisturbed answer."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from appliance.engine.api.continuation import split_known
from appliance.engine.api.errors import ApiError
from appliance.engine.text import ModelText
from tests.fakes.model_folder import byte_level_folder
from tests.fakes.scripted_engine import ScriptedEngine
from tests.fakes.serve_scripted import Answer, Served, served

SAID = "Emoji 🙂 and “いろは” then stop."
Json = dict[str, Any]


class Known:
    """What a gateway would know after reading so many blocks of a stream."""

    def __init__(self) -> None:
        self.ticket: Json | None = None
        self.ids: list[int] = []
        self.finish: str | None = None
        self.ended = 0
        self.events: list[Any] = []

    def read(self, block: str) -> None:
        """One block: notes and, mostly, an event."""
        for line in block.split("\n"):
            name, _, value = line.partition(" ")
            if name == ":ticket":
                self.ticket = json.loads(value)
            elif name == ":ids":
                self.ids += map(int, value.split(","))
            elif name == ":finish":
                self.finish = value
            elif name == ":end":
                self.ended += 1
            elif name == "data:":
                self.events.append(value if value == "[DONE]" else json.loads(value))
            elif name == "event:":
                assert f'data: {{"type":"{value}"' in block
            else:
                raise AssertionError(f"an unknown line: {line}")

    def document(self, *, sent: bool) -> bytes:
        """For the next life."""
        document = {"ticket": self.ticket, "ids": self.ids, "sent": sent, "finish": self.finish, "ended": self.ended}
        return json.dumps(document).encode()


def blocks_of(answer: Answer) -> list[str]:
    """The stream in blocks."""
    return [block for block in answer.body.decode().split("\n\n") if block]


async def ask(one: Served, path: str, body: Json, known: bytes = b"") -> Answer:
    """A request as the gateway sends it."""
    return await one.post(path, known + json.dumps(body).encode(), x_appliance_resume=str(len(known)))


def saying(text: ModelText, said: str = SAID) -> ScriptedEngine:
    """An engine that says this and ends."""
    ids = text.encode(said, add_special_tokens=False, most_tokens=1000)
    return ScriptedEngine(lambda _: (*ids, *text.end_token_ids))


def without_time(events: list[Any]) -> list[Any]:
    """What may differ between two runs, and must not within one, is left out."""
    return json.loads(json.dumps(events), object_hook=lambda it: {k: v for k, v in it.items() if k not in ("id", "created", "e2e_latency")})


CASES = [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "x", "stream": True}),
    ("/v1/completions", {"prompt": "x", "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("/v1/completions", {"prompt": "x", "stream": True, "stop": ["then st", "zzz"], "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"prompt": "x", "stream": True, "stop": "stop.!", "max_tokens": 9}),
    ("/generate", {"text": "x", "stream": True, "rid": "mine", "sampling_params": {"stop": "stop.!"}}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 99, "stop_sequences": ["then st"]}),
]


@pytest.mark.parametrize(("path", "body"), CASES)
async def test_a_stream_cut_at_any_block_goes_on_exactly(folder: Path, path: str, body: Json) -> None:
    """The same events, identity and usage, whether the first life got as far as its role, half a character or its last event."""
    async with served(saying(ModelText(folder)), folder) as one:
        one.engine.step_s = 0.002
        plain = (await one.post(path, body)).events
        blocks = blocks_of(await ask(one, path, body))
        for cut in range(1, len(blocks)):
            known = Known()
            for block in blocks[:cut]:
                known.read(block)
            if known.ticket is None:  # a role at most: the gateway has sent nothing and begins anew
                continue
            before = len(known.events)
            for block in blocks_of(await ask(one, path, body, known.document(sent=True))):
                known.read(block)
            assert joined(known.events) == joined(plain), f"cut after {cut} blocks, {before} events"
            assert len({event["id"] for event in known.events if "id" in event}) <= 1
            assert len({event["created"] for event in known.events if "created" in event}) <= 1


def joined(events: list[Any]) -> list[Any]:
    """Events with the texts of neighbours put together: where a text is cut between events is nobody's business."""
    found: list[Any] = []
    for event in without_time(events):
        text = text_of(event)
        if text is not None and found and isinstance(found[-1], str):
            found[-1] += text
        elif text is not None:
            found.append(text)
        else:
            found.append(event)
    if found and isinstance(found[0], dict) and "output_ids" in found[0]:  # /generate: each has all so far, the last one is enough
        return found[-2:]
    return found


def text_of(event: Any) -> str | None:
    """Of an event that has nothing but text."""
    if isinstance(event, dict) and event.get("type") == "content_block_delta":
        return event["delta"]["text"]
    choices = event.get("choices") if isinstance(event, dict) else None
    if not choices or choices[0]["finish_reason"] is not None:
        return None
    return choices[0]["text"] if "text" in choices[0] else choices[0]["delta"].get("content") if "role" not in choices[0]["delta"] else None


async def test_what_was_not_sent_is_said_once_more(folder: Path) -> None:
    """`sent: false`: the stream begins from its role and says the text of the known tokens first, without noting them again."""
    async with served(saying(ModelText(folder)), folder) as one:
        path, body = CASES[0]
        first = Known()
        for block in blocks_of(await ask(one, path, body)):
            first.read(block)
        assert first.ticket is not None
        known = Known()
        known.ticket, known.ids = first.ticket, first.ids[:5]
        second = Known()
        for block in blocks_of(await ask(one, path, body, known.document(sent=False))):
            second.read(block)
        assert second.events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert joined(second.events) == joined(first.events)
        assert known.ids + second.ids == first.ids
        assert one.engine.submitted[-1].answer_ids == tuple(first.ids[:5])


async def test_a_whole_answer_notes_how_far_it_is_and_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a stream the client's answer is one document; what was known is computed again, not generated again."""
    monkeypatch.setattr("appliance.engine.api.answering.NOTE_INTERVAL_S", 0.0)
    async with served(saying(ModelText(folder)), folder) as one:
        one.engine.step_s = 0.005
        body = {"messages": [{"role": "user", "content": "x"}]}
        plain = (await one.post("/v1/chat/completions", body)).json
        blocks = blocks_of(await ask(one, "/v1/chat/completions", body))
        assert len(blocks) > 5
        assert blocks[-1].startswith(":whole 200\ndata: ")
        known = Known()
        for block in blocks[:4]:
            known.read(block)
        assert known.events == []
        last = blocks_of(await ask(one, "/v1/chat/completions", body, known.document(sent=True)))[-1]
        whole = json.loads(last.removeprefix(":whole 200\ndata: "))
        assert known.ticket is not None
        assert whole["id"] == known.ticket["request_id"]
        assert without_time([whole]) == without_time([plain])
        assert one.engine.submitted[-1].answer_ids == tuple(known.ids)


async def test_a_seed_is_drawn_once_and_goes_with_the_ticket(folder: Path) -> None:
    """Also where the client gave none: sampling goes on by the same numbers."""
    async with served(saying(ModelText(folder)), folder) as one:
        one.engine.step_s = 0.01  # so that its first block is not all of it
        for seed in (None, 5):
            known = Known()
            known.read(blocks_of(await ask(one, "/v1/completions", {"prompt": "x", "stream": True, "seed": seed}))[0])
            assert known.ticket is not None
            await ask(one, "/v1/completions", {"prompt": "x", "stream": True, "seed": seed}, known.document(sent=True))
            first, second = one.engine.submitted[-2:]
            assert first.sampling.seed == second.sampling.seed == known.ticket["seed"]
            assert first.request_id != second.request_id
        assert known.ticket["seed"] == 5


async def test_a_prompt_with_the_date_is_the_one_of_its_first_life(tmp_path: Path) -> None:
    """Token ids that follow another prompt would be another answer's."""
    folder = byte_level_folder(tmp_path, template="{{ strftime_now('%Y-%m-%d') }}")
    async with served(saying(ModelText(folder)), folder) as one:
        path, body = CASES[0]
        known = Known()
        known.ticket, known.ids = {"request_id": "chatcmpl-1", "created_s": 951782400.0, "seed": 1}, [5]
        await ask(one, path, body)
        await ask(one, path, body, known.document(sent=True))
        today, then = (one.text.decode(request.prompt_ids) for request in one.engine.submitted)
    assert today == datetime.datetime.now().strftime("%Y-%m-%d")
    assert then == datetime.datetime.fromtimestamp(951782400).strftime("%Y-%m-%d")


async def test_a_context_that_became_too_small_is_said_with_both_numbers(folder: Path) -> None:
    """A safer rung may not hold what an earlier life generated; exactly full is an answer that ends by its length."""
    async with served(ScriptedEngine(context=32), folder) as one:
        body = {"prompt": [5] * 10, "stream": True, "ignore_eos": True}
        known = Known()
        known.ticket, known.ids = {"request_id": "cmpl-1", "created_s": 1.0, "seed": 1}, [5] * 23
        refused = await ask(one, "/v1/completions", body, known.document(sent=True))
        assert (refused.status, refused.error["code"]) == (422, "context_length_exceeded")
        assert "10 prompt tokens and the 23 tokens" in refused.error["message"]
        assert "context of 32 tokens" in refused.error["message"]
        known.ids = [5] * 22
        for block in blocks_of(await ask(one, "/v1/completions", body, known.document(sent=True))):
            known.read(block)
        assert known.events[-2]["choices"][0]["finish_reason"] == "length"
        assert one.engine.submitted == []


async def test_notes_are_for_gateways_that_ask(folder: Path) -> None:
    """Without the header there is no comment in a stream, and the field means nothing in a body."""
    async with served(saying(ModelText(folder)), folder) as one:
        for path, body in CASES:
            assert b"\n:" not in b"\n" + (await one.post(path, body)).body


@pytest.mark.parametrize(
    ("header", "document", "problem"),
    [
        ("x", b"", "no number"),
        ("-1", b"", "no number"),
        ("999999", b"", "no number"),
        ("9" * 5000, b"", "no number"),
        ("2", b"{}", "holds no ticket"),
        ("8", b"not json", "not JSON"),
        (None, b'{"ticket": {"request_id": "a", "seed": 1}, "ids": [99999999]}', "no token id"),
        (None, b'{"ticket": {"request_id": "a", "seed": 1}, "ids": [], "finish": "error"}', "neither stop nor length"),
        (None, b'{"ticket": {"request_id": "a", "seed": 1}, "colour": 1}', "no parameter"),
    ],
)
async def test_nonsense_is_refused_by_name(folder: Path, header: str | None, document: bytes, problem: str) -> None:
    """400 with what is wrong, and nothing is submitted."""
    async with served(saying(ModelText(folder)), folder) as one:
        body = document + b'{"prompt": "x"}'
        answer = await one.post("/v1/completions", body, x_appliance_resume=header or str(len(document)))
        assert answer.status == 400
        assert problem in answer.error["message"]
        assert one.engine.submitted == []


def test_what_is_known_stands_in_front_of_the_body() -> None:
    """None without the header; else cut at its number."""
    assert split_known("", b"abc") == (None, b"abc")
    assert split_known("0", b"abc") == (b"", b"abc")
    assert split_known("2", b"abc") == (b"ab", b"c")
    for header in ("4", "\N{SUPERSCRIPT TWO}", "1" * 5000):
        with pytest.raises(ApiError):
            split_known(header, b"abc")


async def test_room_for_what_is_known_is_not_taken_from_the_client(folder: Path) -> None:
    """The limit on bodies is the client's; what the gateway adds comes on top."""
    async with served(saying(ModelText(folder)), folder, max_body_bytes=2000) as one:
        known = Known()
        known.ticket, known.ids = {"request_id": "cmpl-1", "created_s": 1.0, "seed": 1}, [5] * 100
        body = {"prompt": "x", "stream": True, "user": "u" * 1900}
        assert len(known.document(sent=True)) > 200
        assert (await ask(one, "/v1/completions", body, known.document(sent=True))).status == 200
        body["user"] = "u" * 2100
        assert (await ask(one, "/v1/completions", body, known.document(sent=True))).status == 413
