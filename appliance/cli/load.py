"""Requests of given shapes, sent by threads to an OpenAI-compatible address, and what each of them was like."""

from __future__ import annotations

import http.client
import json
import random
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from appliance.cli.gateway_address import KEY_CURE, address_of
from appliance.core.errors import ApplianceError

CONCURRENCY_MAX = 256
PATH = "/v1/completions"
_VOCABULARY = """
the of and to in a is that for it was on as with he be by at this had not are but from or have an they which one you were all
her she there would their we him been has when who will no more if out so up said what its about than into them can only other
time new some could these two may first then do any like my now over such our man me even most made after also did many off
before must well back through years where much your way down should because long each just state those people too mr how little
good world make very year still see work life get know day here old own came same right take come great use general house while
part found place small
"""
_WORDS = tuple(_VOCABULARY.split())
"""One token each in the vocabularies of most models."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A request to be.

    Attributes:
        shared: share of the prompt that other prompts begin with too, 0 to 1.
        beside: it is sent when so many others or fewer are under way.
        gap_s: how long after the one before it, where time is kept.
    """

    prompt_tokens: int
    answer_tokens: int
    shared: float = 0.0
    beside: int = 0
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of it.

    Attributes:
        error: a sentence; empty for a whole answer.
        first_s: from the request to the first token.
        between_s: between two tokens, on average.
    """

    error: str = ""
    first_s: float = 0.0
    between_s: float = 0.0
    whole_s: float = 0.0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    cached_tokens: int = 0


class Target:
    """Where the requests go."""

    def __init__(self, url: str, model: str, key: str, timeout_s: float) -> None:
        address = address_of(url)
        self._host, self._port = address.host, address.port
        self._tls = ssl.create_default_context() if address.tls else None
        self._headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
        self._timeout_s = timeout_s
        self.url = url
        self.model = model or self._first_model()
        self.words_per_token = 1.0

    def calibrate(self) -> None:
        """How many of our words make a token of this model's. Raises ApplianceError where it answers nothing."""
        words = 64
        outcome = self.send(Shape(words, 1), random.Random(0))
        if outcome.error:
            raise ApplianceError(f"{self.url} does not answer a completion: {outcome.error}")
        if outcome.prompt_tokens:
            self.words_per_token = words / outcome.prompt_tokens

    def send(self, shape: Shape, draw: random.Random) -> Outcome:
        """One request, streamed, to its last byte."""
        body = {
            "model": self.model,
            "prompt": self._prompt(shape, draw),
            "max_tokens": shape.answer_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began_s = time.monotonic()
        try:
            with closing(self._connection()) as connection:
                connection.request("POST", PATH, json.dumps(body), self._headers)
                answer = connection.getresponse()
                if answer.status != 200:
                    return Outcome(error=f"{answer.status} {_sentence(answer.read(100_000))}")
                return _read(_events(answer), began_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            return Outcome(error=f"{type(error).__name__}: {error}")

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._tls)

    def _first_model(self) -> str:
        try:
            with closing(self._connection()) as connection:
                connection.request("GET", "/v1/models", headers=self._headers)
                answer = connection.getresponse()
                body = answer.read(1_000_000)
            if answer.status == 401:
                raise ApplianceError(f"{self.url} answers 401: {_sentence(body).partition('; ')[0]}", hint=KEY_CURE)
            if answer.status != 200:
                raise ApplianceError(f"{self.url} answers {answer.status} for its models: {_sentence(body)}")
            return str(json.loads(body)["data"][0]["id"])
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            raise ApplianceError(f"{self.url} does not tell its models: {error}", hint="is it serving? or name one with --model") from None

    def _prompt(self, shape: Shape, draw: random.Random) -> str:
        count = max(1, round(shape.prompt_tokens * self.words_per_token))
        shared = round(count * shape.shared)
        common = random.Random(1)
        return " ".join([*(common.choice(_WORDS) for _ in range(shared)), *(draw.choice(_WORDS) for _ in range(count - shared))])


class Replay:
    """Sends requests in their order, each when its time has come or when few enough others are under way."""

    def __init__(self, target: Target, *, keeps_time: bool, seed: int, done: Callable[[], None]) -> None:
        """`done` is called behind each request, by any thread."""
        self._target = target
        self._keeps_time = keeps_time
        self._seed = seed
        self._done = done
        self._under_way = 0
        self._changed = threading.Condition()

    def run(self, shapes: Sequence[Shape]) -> list[Outcome]:
        """All of them, to the last answer."""
        with ThreadPoolExecutor(CONCURRENCY_MAX) as pool:
            futures = []
            for number, shape in enumerate(shapes):
                self._wait(shape)
                futures.append(pool.submit(self._one, number, shape))
            return [future.result() for future in futures]

    def _wait(self, shape: Shape) -> None:
        if self._keeps_time:
            time.sleep(shape.gap_s)
        most = CONCURRENCY_MAX - 1 if self._keeps_time else min(shape.beside, CONCURRENCY_MAX - 1)
        with self._changed:
            self._changed.wait_for(lambda: self._under_way <= most)
            self._under_way += 1

    def _one(self, number: int, shape: Shape) -> Outcome:
        outcome = self._target.send(shape, random.Random(self._seed * 1_000_003 + number))
        with self._changed:
            self._under_way -= 1
            self._changed.notify_all()
        self._done()
        return outcome


def _events(answer: http.client.HTTPResponse) -> Iterator[str]:
    for raw in answer:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if line.startswith("data:"):
            yield line[5:].strip()


def _read(events: Iterator[str], began_s: float) -> Outcome:
    first_s, pieces, ended = 0.0, 0, False
    usage: dict[str, Any] = {}
    for data in events:
        if data == "[DONE]":
            ended = True
            break
        document = json.loads(data)
        if "error" in document:
            return Outcome(error=_sentence(data.encode()))
        if any(choice.get("text") for choice in document.get("choices", [])):
            pieces += 1
            first_s = first_s or time.monotonic() - began_s
        usage = document.get("usage") or usage
    whole_s = time.monotonic() - began_s
    if not ended:
        return Outcome(error="the stream ended without [DONE]")
    tokens = int(usage.get("completion_tokens") or pieces)
    details = usage.get("prompt_tokens_details") or {}
    return Outcome(
        first_s=first_s or whole_s,
        between_s=(whole_s - first_s) / (tokens - 1) if first_s and tokens > 1 else 0.0,
        whole_s=whole_s,
        prompt_tokens=int(usage.get("prompt_tokens") or 0),
        answer_tokens=tokens,
        cached_tokens=int(details.get("cached_tokens") or 0),
    )


def _sentence(body: bytes) -> str:
    """What an error says, of whatever form it is."""
    try:
        return str(json.loads(body)["error"]["message"])[:300]
    except (ValueError, LookupError, TypeError):
        return body[:200].decode("utf-8", "replace")
