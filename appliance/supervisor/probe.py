"""Asking one engine life how it is: until it is ready, then for ever; and once for a real answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from appliance.backends import OWN_VOICE, ProofRequest, Voice
from appliance.backends import Counters as Counters
from appliance.control.codec import CodecError, limits_from_json
from appliance.core.launch import EngineLimits, LaunchSpec
from appliance.supervisor import hang
from appliance.supervisor.canary import Canary
from appliance.supervisor.http_get import Answer, NoAnswer, exchange

READY_POLL_S = 0.01
READY_POLL_MAX_S = 0.5
"""While it loads: quick at first (a spare serves after 20 ms), slower for a load of minutes."""
HURRY_INTERVAL_S = 0.1
LATE_S = 0.25
"""A question that took so much longer than its deadline was held up in our own loop."""
SILENT_INTERVAL_S = 0.2
"""After a probe without an answer."""

_BABBLE = (ArithmeticError, LookupError, RecursionError, TypeError, ValueError)
"""What comes of reading numbers that are none: a gauge of vLLM's that is NaN is no reason to end the engine."""


@dataclass(frozen=True, slots=True)
class ProbeSettings:
    """supervisor.probe_*, and what is a hang."""

    interval_s: float
    timeout_s: float
    hang: hang.HangLimits
    start_stall_s: float = 30.0
    canary_s: float = 0.0
    """An engine that was idle for so long is asked for a token; 0: never."""
    canary: tuple[ProofRequest, ...] = ()
    voice: Voice = OWN_VOICE


@dataclass(frozen=True, slots=True)
class Listener:
    """Where findings go."""

    ready: Callable[[EngineLimits], None]
    progress: Callable[[Counters], None]
    """After each answer."""
    hung: Callable[[hang.Hang], None]
    ending: Callable[[str], None]
    """It refuses new requests and finishes what runs."""


class Prober:
    """Asks one life until it is cancelled. Owns nothing but its task's time."""

    def __init__(
        self,
        spec: LaunchSpec,
        settings: ProbeSettings,
        fallback: EngineLimits,
        cpu_s: Callable[[], float],
        to: Listener,
        is_unread: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_unread`: whether the engine may be waiting for us to read its log: then its silence is given the ceiling."""
        self._is_unread = is_unread
        self._unread_s = float("-inf")
        self._spec = spec
        self._settings = settings
        self._fallback = fallback
        self._cpu_s = cpu_s
        self._to = to
        self._interval_s = settings.interval_s
        self._hurried = asyncio.Event()
        self._told_ending = False
        self._canary = Canary(self._sing, settings.canary_s, settings.hang)

    def hurry(self) -> None:
        """Somebody waits for the engine to become idle: ask at once and more often."""
        self._interval_s = min(self._interval_s, HURRY_INTERVAL_S)
        self._hurried.set()

    async def run(self) -> None:
        """Until ready, then until a hang is found."""
        await self._until_ready()
        try:
            await self._until_hung()
        finally:
            self._canary.close()

    async def _until_hung(self) -> None:
        watch = hang.begin(time.monotonic(), self._cpu_s())
        while True:
            silent = watch.looked_s > watch.answered_s
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(self._interval_s, SILENT_INTERVAL_S) if silent else self._interval_s):
                    await self._hurried.wait()
            self._hurried.clear()
            watch, found = await self._look(watch)
            if found is not None:
                self._to.hung(found)
                return

    async def _until_ready(self) -> None:
        pause_s = READY_POLL_S
        while True:
            try:
                answer = await self._ask(self._settings.timeout_s)
            except NoAnswer:
                answer = None
            if answer is not None and answer.status == 200:
                self._to.ready(await self._limits_said(answer))
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.05, READY_POLL_MAX_S)

    async def _limits_said(self, ready: Answer) -> EngineLimits:
        readers = self._settings.voice.limits
        known = self._fallback if readers else limits_of(ready, self._fallback)
        for path, read in readers:
            with contextlib.suppress(NoAnswer):
                answer = await exchange(self._spec.endpoint, path, self._settings.timeout_s)
                with contextlib.suppress(*_BABBLE):
                    known = read(answer.body, known) if answer.status == 200 else known
        return known

    def _counters(self, body: bytes) -> Counters:
        try:
            return self._settings.voice.counters(body)
        except _BABBLE:
            return Counters()

    async def _look(self, watch: hang.Watch) -> tuple[hang.Watch, hang.Hang | None]:
        asked_s = time.monotonic()
        limits = self._limits(asked_s)
        patience_s = hang.patience_s(watch, asked_s, limits, self._settings.timeout_s)
        try:
            answer = await exchange(self._spec.endpoint, self._settings.voice.pulse_path, patience_s)
            problem = "" if answer.status == 200 else f"status {answer.status}"
        except NoAnswer as error:
            answer, problem = Answer(0, b""), str(error)
        now_s, cpu_s, counters = time.monotonic(), self._cpu_s(), self._counters(answer.body)
        if answer.status == 503 and answer.json().get("status") == "draining":
            self._tell_ending(counters.running)
        elif problem and now_s - asked_s > patience_s + LATE_S:
            return watch, None  # it was we who were kept from reading its answer
        elif problem:
            found = hang.judge_silence(watch, now_s, cpu_s, limits, problem)
            return hang.missed(watch, now_s, cpu_s), found
        if self._settings.voice.whole_batches and hang.is_busy(watch, now_s, cpu_s):
            limits = hang.HangLimits(limits.ceiling_s, limits.ceiling_s)
        watch = hang.answered(watch, now_s, cpu_s, counters.progress, counters.running)
        self._to.progress(counters)
        # The answer says how things stood when it was asked for, however late we come to read it.
        found = hang.judge_progress(watch, asked_s, limits)
        if found is None and counters.counts_requests and not self._told_ending:
            found = self._canary.look(now_s, cpu_s, counters.progress, counters.running, counters.waiting)
        return watch, found

    def _limits(self, now_s: float) -> hang.HangLimits:
        """As configured; while its log waits to be read by us, and for the floor after that, the ceiling alone."""
        limits = self._settings.hang
        if self._is_unread():
            self._unread_s = now_s
        return hang.HangLimits(limits.ceiling_s, limits.ceiling_s) if now_s - self._unread_s < limits.floor_s else limits

    def _tell_ending(self, running: int) -> None:
        if not self._told_ending:
            self._told_ending = True
            self._to.ending(f"it was told to stop: it refuses new requests and finishes {running}")

    async def _sing(self) -> str | None:
        return await prove(self._spec, self._settings.canary, self._settings.hang.ceiling_s)

    async def _ask(self, timeout_s: float) -> Answer:
        return await exchange(self._spec.endpoint, self._spec.probe_path, timeout_s)


async def prove(spec: LaunchSpec, requests: tuple[ProofRequest, ...], deadline_s: float) -> str | None:
    """One short real completion, by the first of the requests that this engine knows.

    Returns:
        None when the answer is one; else what is wrong with it.
    """
    for request in requests:
        try:
            answer = await exchange(spec.endpoint, request.path, deadline_s, dict(request.body))
        except NoAnswer as error:
            return str(error)
        if answer.status == 404:
            continue
        if answer.status != 200:
            return f"{request.path} answered {answer.status}: {answer.body[:200].decode(errors='replace')}"
        return (
            None
            if request.accepts(answer.json())
            else f"{request.path} answered without a token: {answer.body[:200].decode(errors='replace')}"
        )
    return f"it knows none of {', '.join(request.path for request in requests)}"


def limits_of(answer: Answer, fallback: EngineLimits) -> EngineLimits:
    """What the engine says it can take, or what we configured where it says nothing."""
    try:
        return limits_from_json(answer.json().get("limits"))
    except CodecError:
        return fallback
