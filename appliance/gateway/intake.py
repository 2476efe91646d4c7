"""Reading a request: its body once, within limits of size, pace and memory, and what the gateway has to know of it."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from appliance.gateway.balance import key_of
from appliance.gateway.connection import ClientConnection
from appliance.gateway.envelope import Refused
from appliance.gateway.headers import Headers, value_of

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

JSON_ELEMENTS_MAX = 500_000
"""Lists, objects and commas of a body. Parsing more would hold up everybody's tokens for a tenth of a second."""
DISCARD_MAX_BYTES = 2 * 1024**2
DISCARD_MAX_S = 1.0
"""So much of a refused body is read and thrown away before the answer, and for so long, to keep the connection. What is
longer is answered at once, and the connection ends with it."""
_MORE_THAN_TEXT = frozenset(
    (
        *("tools", "functions", "logprobs", "top_logprobs", "echo", "suffix", "best_of", "use_beam_search", "prompt_logprobs"),
        *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        *("json_schema", "regex", "ebnf", "structural_tag"),
    )
)
"""With one of these an answer is more than a text, or has a form that does not go on from its middle."""
ANSWERS_MAX = 1024
"""More in one request are not counted."""
HELD_BODIES = 8
"""The bodies of all requests together may hold the memory of so many of the largest size."""


class ClientGone(Exception):
    """The client left before its request was complete."""


@dataclass(frozen=True, slots=True)
class BodyFacts:
    """What the gateway reads out of a JSON body; the rest is the engine's to judge.

    Attributes:
        max_tokens: the longest answer that is asked for; 0: not said.
        answers: how many are asked for.
        deterministic: a second run says the same, as far as it is the engine's to say.
        plain: the answer is one text: no tools, no grammar, no log probabilities.
        conversation: balance.key_of it, where that was asked for.
        ranks: it asks for a `priority` among what the engine has.
    """

    stream: bool = False
    max_tokens: int = 0
    answers: int = 1
    deterministic: bool = False
    plain: bool = False
    conversation: int = 0
    ranks: bool = False


class Intake:
    """Reads bodies and counts what they hold."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.held_bytes = 0

    async def read(self, headers: Headers, receive: Receive, connection: ClientConnection) -> bytes:
        """The whole body; `held_bytes` grows by its length, and the caller gives that back with `drop`.

        Raises:
            Refused: 413, or 503 while too much is held already.
            ClientGone: the client left.
        """
        announced = value_of(headers, b"content-length")
        if announced is not None and int(announced) > self.max_body_bytes:
            raise self._too_large(int(announced))
        parts: list[bytes] = []
        size_bytes = 0
        try:
            while True:
                connection.await_body(size_bytes)
                message = await receive()
                if message["type"] != "http.request":
                    raise ClientGone
                part: bytes = message.get("body", b"")
                size_bytes += len(part)
                self.held_bytes += len(part)
                if size_bytes > self.max_body_bytes:
                    raise self._too_large(size_bytes)
                if self.held_bytes > HELD_BODIES * self.max_body_bytes:
                    raise self._too_many()
                parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
        except BaseException:
            self.held_bytes -= size_bytes
            raise
        finally:
            connection.body_complete()

    def drop(self, body: bytes) -> None:
        """A body is not needed any more."""
        self.held_bytes -= len(body)

    async def discard(self, headers: Headers, receive: Receive, connection: ClientConnection) -> None:
        """Before an answer that has no use for the body: read a short rest of it away."""
        if value_of(headers, b"expect") is not None:
            return  # it waits for our word and has sent nothing
        if int(value_of(headers, b"content-length") or DISCARD_MAX_BYTES + 1) > DISCARD_MAX_BYTES:
            return
        try:
            async with asyncio.timeout(DISCARD_MAX_S):
                while connection.body_pending and (await receive())["type"] == "http.request":
                    pass
        except TimeoutError:
            return

    def _too_large(self, size_bytes: int) -> Refused:
        return Refused(
            413,
            "body_too_large",
            f"the body has {size_bytes} bytes or more, the limit is {self.max_body_bytes}",
            hint="send less, or raise [gateway] max_body_bytes",
        )

    def _too_many(self) -> Refused:
        return Refused(
            503,
            "gateway_overloaded",
            f"the requests in flight hold {self.held_bytes} bytes, the limit is {HELD_BODIES * self.max_body_bytes}",
            hint="try again when some are answered",
            retry_after_s=5,
        )


def facts_of(body: bytes, *, several_engines: bool = False) -> BodyFacts:
    """Parse the body of a JSON endpoint. Of several engines one may know the beginning of it already.

    Raises:
        Refused: 400 for what is no UTF-8, no JSON or no object; 413 for more elements than may be parsed at once.
    """
    elements = body.count(b",") + body.count(b"[") + body.count(b"{")
    if elements > JSON_ELEMENTS_MAX:
        raise Refused(
            413,
            "body_too_complex",
            f"the body has about {elements} JSON elements, the limit is {JSON_ELEMENTS_MAX}",
            hint="send fewer in one request",
        )
    try:
        document = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Refused(400, "invalid_utf8", f"the body is not UTF-8: byte {error.start} is 0x{body[error.start]:02x}") from None
    except RecursionError:
        raise Refused(400, "invalid_json", "the body nests lists or objects too deeply", hint="nest less than 900 levels") from None
    except json.JSONDecodeError as error:
        raise Refused(400, "invalid_json", f"the body is not JSON: {error}", hint='send an object such as {"model": ...}') from None
    except ValueError:  # Python's own limit, which costs time with the square of the length
        most = sys.get_int_max_str_digits()
        raise Refused(400, "invalid_json", f"the body holds an integer of more than {most} digits", hint="send a shorter one") from None
    if not isinstance(document, dict):
        raise Refused(400, "invalid_json", f"the body is a JSON {_kind(document)}, expected an object")
    answers = _answers(document)
    return BodyFacts(
        stream=document.get("stream") is True,
        max_tokens=_max_tokens(document),
        answers=answers,
        deterministic=_deterministic(document),
        plain=answers == 1 and not any(document[name] for name in _MORE_THAN_TEXT.intersection(document)),
        conversation=key_of(document) if several_engines else 0,
        ranks=document.get("priority") not in (None, 0),
    )


def _max_tokens(document: dict[str, Any]) -> int:
    sampling = document.get("sampling_params")
    if isinstance(sampling, dict):  # SGLang's /generate
        document = {"max_tokens": sampling.get("max_new_tokens")}
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        value = document.get(name)
        if type(value) is int and 0 < value < 2**31:
            return value
    return 0


def _deterministic(document: dict[str, Any]) -> bool:
    """Greedy, seeded, or with one token to choose from."""
    return document.get("temperature") == 0 or document.get("top_k") == 1 or isinstance(document.get("seed"), int)


def _answers(document: dict[str, Any]) -> int:
    count = document.get("n")
    answers = count if type(count) is int and 1 <= count <= ANSWERS_MAX else 1
    prompts = document.get("prompt")
    if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int):
        answers *= len(prompts)
    return min(answers, ANSWERS_MAX)


def _kind(document: object) -> str:
    names = {list: "list", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(document), "number")
