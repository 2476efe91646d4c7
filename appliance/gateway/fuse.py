"""The length fuse: a prompt that is too long for the engine, or of a length that it crashes at, never reaches it.

The engine counts, with the reader of the endpoint that is asked for: the gateway has no tokenizer, and the number is the
engine's by construction (docs/adr/0011-count-tokens-in-the-engine.md). Most requests are not counted at all: no tokenizer
makes more tokens than there are bytes, so a body of fewer bytes than the limit cannot trip it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from appliance.config.client_tables import AdmissionTable
from appliance.core.launch import EngineLimits
from appliance.gateway.doors import Doors
from appliance.gateway.envelope import Refused
from appliance.gateway.fitting import Json, Make, longer, shorter
from appliance.gateway.gate import Life
from appliance.gateway.headers import upstream_head
from appliance.gateway.inflight import LiveRequest
from appliance.gateway.lethal_lengths import LethalLengths
from appliance.gateway.metrics import Metrics
from appliance.gateway.restrictions import of_lengths
from appliance.gateway.upstream import LossKind, UpstreamLost

log = logging.getLogger("gateway.fuse")

COUNT_PATH = b"/appliance/count"
COUNTED = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/messages": "messages", "/generate": "text"}
"""Paths whose prompts are counted, and where in the body the prompt is."""
TEMPLATE_TOKENS = 2048
"""What a chat template may add to the text of a request: markers, a default system prompt."""
COUNT_TIMEOUT_S = 10.0
COUNTS_AT_ONCE = 2
"""A burst of long prompts must not take the engine's processor from those who are being answered."""
ANSWER_MAX_BYTES = 64 * 1024
SAID_MAX = 3
"""Fused lengths in one sentence."""
WEIGH_AFTER_S = 0.3
"""Those who wait for the engine go first, and it may die of them once more."""
LEARN_MAX_S = 300.0
"""How long the next engine is waited for, to count a prompt that has killed the last one."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is refused: prompts of more than `most_tokens` (0: none), which is `source`, and those of the lengths in `fused`.

    Attributes:
        learned: of `fused`, those that nobody has configured, and why they are refused.
        least_tokens: what another engine takes, where that is less: prompts are counted from there on, to find the one that takes them.
        buckets: lengths that a prompt is moved to, in order; empty: to any that goes.
    """

    most_tokens: int
    source: str
    fused: frozenset[int]
    learned: Mapping[int, str] = field(default_factory=dict)
    buckets: tuple[int, ...] = ()
    least_tokens: int = 0

    def go(self, prompt_tokens: int) -> bool:
        """A prompt of so many tokens is passed on."""
        return prompt_tokens not in self.fused and not 0 < self.most_tokens < prompt_tokens

    def is_bucket(self, prompt_tokens: int) -> bool:
        """One may be lengthened to so many."""
        return self.go(prompt_tokens) and (not self.buckets or prompt_tokens in self.buckets)

    def within_buckets(self, prompt_tokens: int) -> bool:
        """One may be shortened to so many: buckets bound it, whole messages cannot meet a number exactly."""
        return self.go(prompt_tokens) and (not self.buckets or prompt_tokens <= max(filter(self.go, self.buckets), default=0))

    def bucket_above(self, prompt_tokens: int) -> int | None:
        """The nearest longer one."""
        return next((bucket for bucket in self.buckets if bucket > prompt_tokens and self.go(bucket)), None)


def limits_of(admission: AdmissionTable, engine: EngineLimits | None, learned: Mapping[int, str] | None = None) -> Limits:
    """The owner's limit or the engine's, whichever is lower."""
    learned = learned or {}
    most, source = admission.max_prompt_tokens, "[admission] max_prompt_tokens"
    own = longest_prompt(engine) if engine is not None else 0
    if own and (not most or own <= most):
        most, source = own, "the engine's"
    return Limits(most, source, frozenset((*learned, *admission.fused_lengths)), learned, tuple(sorted(set(admission.length_buckets))))


def longest_prompt(engine: EngineLimits) -> int:
    """Its tokens; 0: the engine has not said."""
    context = engine.context_length_tokens
    return min(context - 1, engine.max_prompt_tokens or context) if context else 0


def limits_of_all(each: Sequence[Limits]) -> Limits:
    """Of several engines: a prompt goes that one of them takes."""
    most = max(each, key=lambda limits: limits.most_tokens or math.inf)
    least = min((limits.most_tokens for limits in each if limits.most_tokens), default=0)
    return replace(most, least_tokens=least) if least != most.most_tokens else most


def must_count(body_bytes: int, limits: Limits) -> bool:
    """Whether a body of so many bytes could be refused, or be too long for one of several engines."""
    most_possible = body_bytes + TEMPLATE_TOKENS
    return 0 < (limits.least_tokens or limits.most_tokens) < most_possible or (bool(limits.fused) and min(limits.fused) <= most_possible)


def judge(prompt_tokens: int, limits: Limits, param: str) -> Refused | None:
    """The refusal of a prompt of so many tokens, with what would fit."""
    if 0 < limits.most_tokens < prompt_tokens:
        return Refused(
            422,
            "context_length_exceeded",
            f"the prompt has {prompt_tokens} tokens, and the limit is {limits.source} {limits.most_tokens}",
            hint=f"shorten it by {prompt_tokens - limits.most_tokens} tokens: at most {limits.most_tokens} fit",
            param=param,
        )
    if prompt_tokens in limits.fused:
        fits = next(length for length in range(prompt_tokens - 1, -1, -1) if length not in limits.fused)
        why = "the engine crashes on some of them: [admission] fused_lengths"
        if prompt_tokens in limits.learned:
            why = f"{limits.learned[prompt_tokens]}: it is refused for a while ([admission] auto_fuse)"
        return Refused(
            422,
            "length_fused",
            f"prompts of exactly {prompt_tokens} tokens are refused, because {why}",
            hint=f"make it shorter or longer; the nearest shorter one that fits has {fits} tokens{_bucket_words(prompt_tokens, limits)}",
            param=param,
        )
    return None


def _bucket_words(prompt_tokens: int, limits: Limits) -> str:
    if not limits.buckets:
        return ""
    above = limits.bucket_above(prompt_tokens)
    return f", and the next of [admission] length_buckets is {above}" if above is not None else ", and no longer one is in length_buckets"


class Fuse:
    """Asks an engine that answers. What cannot be counted is the engine's own to refuse."""

    def __init__(self, admission: AdmissionTable, doors: Doors, metrics: Metrics, lethal: LethalLengths) -> None:
        self._admission = admission
        self._lethal = lethal
        self._weighing: set[asyncio.Task[None]] = set()
        self._doors = doors
        self._metrics = metrics
        self._turn = asyncio.Semaphore(COUNTS_AT_ONCE)
        self._seen: dict[int | None, tuple[tuple[EngineLimits | None, ...], Mapping[int, str], Limits]] = {}
        """Engine (None: all) → its limits, and what they were made of."""

    async def check(self, request: LiveRequest, life: Life | None = None) -> None:
        """Returns when the request may go on, perhaps with another prompt; one is counted once, and judged by the limits of now:
        of the engine that it goes to, where that is known, else of the one that takes the longest prompts.

        Raises:
            Refused: 422.
        """
        if request.path not in COUNTED or request.method != "POST" or self._admission.length_policy == "any":
            return
        limits = self._limits_now(None if life is None or life.replica is None else life.replica)
        refused = None
        if request.prompt_tokens is None and must_count(len(request.body), limits):
            refused = await self._count(request)
        if request.prompt_tokens is not None:
            refused = judge(request.prompt_tokens, limits, COUNTED[request.path])
        if refused is None or await self._altered(request, limits, refused):
            return
        self._metrics.fuse_trips[refused.code] += 1
        raise refused

    async def _altered(self, request: LiveRequest, limits: Limits, refused: Refused) -> bool:
        """Whether the prompt has been made one that goes. Not once an engine has begun to answer it: that was another prompt."""
        policy = self._admission.length_policy
        if policy == "reject" or request.attempt or (refused.code != "length_fused" and policy != "truncate"):
            return False
        document = json.loads(request.body)
        how, made = "padded", None
        if refused.code == "length_fused":
            made = await self._lengthened(request, limits, document)
        if made is None and policy == "truncate":
            how, made = "truncated", await self._least_that_goes(request, limits, shorter(request.path, document))
        if made is None:
            return False
        request.body, request.prompt_tokens = made
        request.altered = how
        self._metrics.altered[how] += 1
        return True

    async def _lengthened(self, request: LiveRequest, limits: Limits, document: Json) -> tuple[bytes, int] | None:
        assert request.prompt_tokens is not None, "it was fused for its number of tokens"
        above = limits.bucket_above(request.prompt_tokens)
        if limits.buckets and above is None:
            return None
        for longer_one in longer(request.path, document, above - request.prompt_tokens if above is not None else 0):
            if (made := await self._tried(request, limits.is_bucket, longer_one)) is not None:
                return made
        return None

    async def _least_that_goes(self, request: LiveRequest, limits: Limits, ways: list[Make]) -> tuple[bytes, int] | None:
        """What takes more is shorter: a search by halves."""
        made, low, high = None, 0, len(ways)
        while low < high:
            middle = (low + high) // 2
            found = await self._tried(request, limits.within_buckets, ways[middle]())
            if found is None:
                low = middle + 1
            else:
                made, high = found, middle
        return made

    async def _tried(self, request: LiveRequest, goes: Callable[[int], bool], document: Json) -> tuple[bytes, int] | None:
        body = json.dumps(document, separators=(",", ":")).encode()
        tokens, refused = await self._counted(request, body)
        return (body, tokens) if refused is None and tokens is not None and goes(tokens) else None

    def _limits_now(self, engine: int | None) -> Limits:
        gates = self._doors.gates if engine is None else self._doors.gates[engine : engine + 1]
        of, learned = tuple([gate.limits for gate in gates]), self._lethal.current()
        seen = self._seen.get(engine)
        if seen is None or seen[1] is not learned or seen[0] != of:
            known = [limits_of(self._admission, one, learned) for one in of if one is not None]
            seen = of, learned, limits_of_all(known or [limits_of(self._admission, None, learned)])
            self._seen[engine] = seen
        return seen[2]

    def learn(self, request: LiveRequest, fingerprint: str) -> None:
        """A request was convicted of killing engines: when the next one is there, it says how long the prompt was."""

        def learned(tokens: int) -> None:
            if self._lethal.convicted(tokens, fingerprint):
                self._metrics.learned_lengths += 1
                log.warning("prompts of exactly %d tokens are refused from now on: engines died of different ones, alone with each", tokens)

        self.weigh(request, None, learned)

    def weigh(self, request: LiveRequest, lost: Life | None, told: Callable[[int], None]) -> None:
        """Have it counted by another engine life than this, as soon as there is one; meanwhile the request itself goes its way."""
        if request.path in COUNTED and self._admission.length_policy != "any":
            task = asyncio.get_running_loop().create_task(self._weigh(request, lost, told))
            self._weighing.add(task)
            task.add_done_callback(self._weighing.discard)

    @property
    def learned(self) -> Mapping[int, str]:
        """Lengths that are refused though nobody has configured that, and why."""
        return self._lethal.current()

    def advise(self, fused_lengths: object) -> None:
        """What applianced says of lengths that go with crashes: `tokens` and `why` of each."""
        for one in fused_lengths if isinstance(fused_lengths, list) else []:
            tokens, why = (one.get("tokens"), one.get("why")) if isinstance(one, dict) else (None, None)
            if isinstance(tokens, int) and isinstance(why, str) and self._lethal.advised(tokens, why):
                self._metrics.learned_lengths += 1
                log.warning("prompts of exactly %d tokens are refused from now on, because %s", tokens, why)

    @property
    def sentence(self) -> str:
        """For people, while lengths are refused that nobody has configured; else empty."""
        said = of_lengths(self._admission.length_policy, self.learned)
        return "; ".join(said[:SAID_MAX]) + (f"; and {len(said) - SAID_MAX} lengths more" if len(said) > SAID_MAX else "")

    async def _weigh(self, request: LiveRequest, lost: Life | None, told: Callable[[int], None]) -> None:
        due_s = asyncio.get_running_loop().time() + LEARN_MAX_S
        while asyncio.get_running_loop().time() < due_s:
            over = lost is None or self._doors.gate_of(lost).life is not lost
            life = next(iter(self._doors.lives()), None)
            if life is None or not over:
                await self._doors.news(1.0)
                continue
            await asyncio.sleep(WEIGH_AFTER_S)
            if life in self._doors.lives():
                tokens, refused = request.prompt_tokens, None
                if tokens is None:
                    tokens, refused = await self._counted_by(life, request, request.body)
                if tokens is not None:
                    told(tokens)
                if tokens is not None or refused is not None or not life.counts:
                    return

    async def _count(self, request: LiveRequest) -> Refused | None:
        """Sets `prompt_tokens`, if the engine answers; its refusal, where it says that the prompt is too long."""
        request.prompt_tokens, refused = await self._counted(request, request.body)
        return refused

    async def _counted(self, request: LiveRequest, body: bytes) -> tuple[int | None, Refused | None]:
        life = max((life for life in self._doors.lives() if life.counts), key=self._takes_tokens, default=None)
        return await self._counted_by(life, request, body) if life is not None else (None, None)

    def _takes_tokens(self, life: Life) -> float:
        """Of one prompt: of several engines the one that takes the longest is asked, as it refuses what is too long for itself."""
        limits = self._doors.gate_of(life).limits
        return (longest_prompt(limits) if limits is not None else 0) or math.inf

    async def _counted_by(self, life: Life, request: LiveRequest, body: bytes) -> tuple[int | None, Refused | None]:
        if not life.counts:
            return None, None
        began_s = asyncio.get_running_loop().time()
        try:
            async with self._turn, asyncio.timeout(COUNT_TIMEOUT_S):
                status, document = await _asked(life, request, body)
        except (UpstreamLost, TimeoutError) as error:
            log.debug("the prompt of %s was not counted: %s", request.request_id, error)
            return None, None
        self._metrics.count_time.observe(asyncio.get_running_loop().time() - began_s)
        if status == 404 and "prompt_tokens" not in document:
            self._no_counter(life, document)
        elif status == 422:
            return None, _passed_on(document)
        elif status == 200 and type(document.get("prompt_tokens")) is int:
            return document["prompt_tokens"], None
        return None, None

    def _no_counter(self, life: Life, document: dict[str, Any]) -> None:
        error = document.get("error")
        if isinstance(error, dict) and error.get("code") == "model_not_found":
            return  # it counts; this client asked for another model, and will be told
        life.counts = False
        if self._admission.max_prompt_tokens or self._admission.fused_lengths:
            log.warning("this engine does not count prompts: [admission] max_prompt_tokens and fused_lengths have no effect on it")


async def _asked(life: Life, request: LiveRequest, body: bytes) -> tuple[int, dict[str, Any]]:
    target = COUNT_PATH + request.path.encode("ascii")
    head = upstream_head("POST", target, [(b"content-type", b"application/json")], request.request_id, len(body))
    connection = await life.upstream.begin(head, body)
    try:
        parts: list[bytes] = []
        while (data := await connection.read()) is not None:
            parts.append(data)
            if sum(map(len, parts)) > ANSWER_MAX_BYTES:
                raise UpstreamLost(LossKind.GARBAGE, "the count is longer than a count can be")
    except BaseException:
        connection.close()
        raise
    life.upstream.give_back(connection)
    try:
        document = json.loads(b"".join(parts))
    except ValueError:
        document = None
    return connection.status, document if isinstance(document, dict) else {}


def _passed_on(document: dict[str, Any]) -> Refused:
    """The engine's own refusal: its reader names both numbers and what would fit."""
    error = document.get("error")
    told = error if isinstance(error, dict) else {}
    message = str(told.get("message") or "the engine says that the prompt is too long")
    return Refused(422, str(told.get("code") or "context_length_exceeded"), message, param=told.get("param"))
