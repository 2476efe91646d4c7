"""A request at the door: whose it is, what it may, how much it will take; and, when it is over, what it took."""

from __future__ import annotations

import asyncio
import math
from collections.abc import MutableMapping
from typing import Any

from appliance.config.api_keys import PRIORITIES, ApiKey
from appliance.config.client_tables import AdmissionTable
from appliance.gateway.accounting import Account, PromptSizes
from appliance.gateway.doors import Doors
from appliance.gateway.envelope import Refused
from appliance.gateway.headers import Headers, value_of
from appliance.gateway.inflight import InflightTable, LiveRequest, next_order
from appliance.gateway.intake import BodyFacts, facts_of
from appliance.gateway.keys import ANYBODY, KeyRing, may_use_model
from appliance.gateway.limits import KeyLimits
from appliance.gateway.metrics import Metrics
from appliance.gateway.profile import Profiler
from appliance.gateway.routes import OPEN_PAGES, READING_METHODS, Kind, Route
from appliance.gateway.schedule import Ticket
from appliance.gateway.sse import dialect_of

TIMEOUT_MAX_S = 86400.0


class Reception:
    """Owns what is known of keys and of the sizes of requests."""

    def __init__(
        self, keys: KeyRing, admission: AdmissionTable, doors: Doors, inflight: InflightTable, profiler: Profiler, metrics: Metrics
    ) -> None:
        self._keys = keys
        self._limits = KeyLimits()
        self._sizes = PromptSizes()
        self._admission = admission
        self._doors = doors
        self._inflight = inflight
        self._profiler = profiler
        self._metrics = metrics

    def key_of(self, path: str, route: Route, headers: Headers) -> ApiKey:
        """Whose request it is. Raises Refused: 401, 403, 429."""
        if path in OPEN_PAGES:
            return ANYBODY
        key = self._keys.admit(headers)
        if route.kind in (Kind.JSON, Kind.OTHER):
            may_use_model(key)
            self._limits.admit(key, asyncio.get_running_loop().time())
        return key

    def accept(self, scope: MutableMapping[str, Any], request_id: str, body: bytes, route: Route, key: ApiKey) -> LiveRequest:
        """The request as it goes to the engine. Raises Refused where the body is no JSON and has to be, or a header is wrong."""
        method, path = scope["method"], scope["path"]
        headers = scope["headers"]
        if route.kind is Kind.JSON:
            _check_encoding(headers)
        is_json = route.kind is Kind.JSON and method == "POST"
        facts = facts_of(body, several_engines=self._doors.several) if is_json else BodyFacts()
        if facts.ranks:
            _may_rank(key)
        query: bytes = scope["query_string"]
        now_s = asyncio.get_running_loop().time()
        patience, priority = _wishes(headers)
        if route.streams:
            self._profiler.arrived(now_s, len(self._inflight))
        return LiveRequest(
            request_id=request_id,
            method=method,
            path=path,
            target=scope["raw_path"] + b"?" + query if query else scope["raw_path"],
            headers=self._keys.onwards(headers),
            body=body,
            stream=facts.stream and route.streams,
            dialect=dialect_of(path),
            arrived_s=now_s,
            ticket=Ticket(
                order=next_order(),
                request_id=request_id,
                flow=key.name or _address(scope),
                tokens=self._tokens(route, facts, len(body)),
                prompt_tokens=self._sizes.estimate(len(body)),
                level=_level(key, priority),
                max_concurrent=key.max_concurrent,
                max_queued=key.max_queued,
                due_s=self._due_s(patience, now_s),
                conversation=facts.conversation,
            ),
            takes_slot=route.takes_slot and method not in READING_METHODS,
            deterministic=facts.deterministic,
            plain=facts.plain,
        )

    def counted(self, request: LiveRequest, body_bytes: int) -> None:
        """Its prompt has been counted, before it asks for a slot. `body_bytes`: as it came."""
        if request.prompt_tokens is not None:
            ticket = request.ticket
            ticket.tokens = max(1, ticket.tokens - self._sizes.estimate(body_bytes) + request.prompt_tokens)
            ticket.prompt_tokens = request.prompt_tokens

    def account(self, request: LiveRequest) -> Account:
        """For its answer."""
        request.account = Account(request.ticket, len(request.body), self._metrics, self._sizes)
        return request.account

    def settle(self, key: ApiKey, request: LiveRequest, account: Account) -> None:
        """It is over. What had no answer cost nothing."""
        if not account.answered or not request.takes_slot:
            return
        how = "usage" if account.usage is not None else "estimate"
        prompt = request.prompt_tokens if request.prompt_tokens is not None else account.prompt_tokens
        answer = account.answer_tokens if account.usage is not None or not request.notes.ids else request.notes.count
        self._profiler.answered(prompt, answer, account.usage.cached_tokens if account.usage is not None else 0)
        if account.usage is not None:
            self._metrics.healthy_lengths.append(prompt)
        self._metrics.prompt_length.observe(prompt)
        self._metrics.answer_length.observe(answer)
        self._metrics.tokens["in", how] += prompt
        self._metrics.tokens["out", how] += answer
        if key.name:
            self._limits.spent(key, prompt + answer, asyncio.get_running_loop().time())
            for what, count in (("requests", 1), ("tokens_in", prompt), ("tokens_out", answer)):
                self._metrics.of_key[key.name, what] += count

    def _tokens(self, route: Route, facts: BodyFacts, body_bytes: int) -> int:
        """What it may need of the KV pool: each of its answers has a prompt of its own where there are several."""
        answer = (facts.max_tokens or self._admission.assumed_answer_tokens) * facts.answers if route.streams else 0
        return self._sizes.estimate(body_bytes) + answer

    def _due_s(self, given: bytes | None, now_s: float) -> float | None:
        timeout_s = self._admission.request_timeout_s if given is None else _seconds(given)
        return now_s + timeout_s if timeout_s else None


def _check_encoding(headers: Headers) -> None:
    """Raises Refused for a body that would have to be unpacked first: a thousand bytes can hold a gigabyte."""
    encoding = value_of(headers, b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
        shown = encoding[:40].decode("latin-1")
        raise Refused(
            415,
            "unsupported_encoding",
            f"the body is compressed (Content-Encoding: {shown}), and only plain JSON is taken",
            hint="send it as it is",
        )


def _wishes(headers: Headers) -> tuple[bytes | None, bytes | None]:
    """How long its client waits, and its class, where it says so."""
    patience = priority = None
    for name, value in headers:
        if name == b"x-request-timeout":
            patience = value
        elif name == b"x-priority":
            priority = value
    return patience, priority


def _seconds(given: bytes) -> float:
    try:
        timeout_s = float(given)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= TIMEOUT_MAX_S:
        shown = given[:40].decode("latin-1")
        raise Refused(
            400,
            "invalid_timeout",
            f"X-Request-Timeout is {shown!r}; it must be a number of seconds, more than 0 and at most {TIMEOUT_MAX_S:.0f}",
            hint="send for example 30",
        )
    return timeout_s


def _may_rank(key: ApiKey) -> None:
    """Engines put requests in an order of their own, and let one give way for another: no key may pass the others by a word in its body."""
    if key.name and key.priority != PRIORITIES[0]:
        raise Refused(
            400,
            "invalid_priority",
            f"the body has a priority, and the key {key.name} is of class {key.priority}: only keys of class {PRIORITIES[0]} may rank",
            hint="leave priority out of the body; the header X-Priority asks for a lower class",
        )


def _level(key: ApiKey, given: bytes | None) -> int:
    """The key's class, or the lower one that the request asks for."""
    own = PRIORITIES.index(key.priority)
    if given is None:
        return own
    asked = given.decode("latin-1").lower()
    if asked not in PRIORITIES:
        raise Refused(
            400, "invalid_priority", f"X-Priority {asked[:40]!r} is none of {', '.join(PRIORITIES)}", hint="leave it out or send one"
        )
    return max(own, PRIORITIES.index(asked))


def _address(scope: MutableMapping[str, Any]) -> str:
    client = scope.get("client")
    return str(client[0]) if client else ""
