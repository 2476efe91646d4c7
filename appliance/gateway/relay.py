"""One request, from its place in the queue to its last byte, over as many engine lives as it takes."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from appliance.config import Config
from appliance.core.requests import Resumability
from appliance.gateway import sse
from appliance.gateway.admission import Lane
from appliance.gateway.aftermath import Aftermath
from appliance.gateway.client import Client
from appliance.gateway.doors import Doors
from appliance.gateway.exchange import Exchange
from appliance.gateway.fuse import Fuse, longest_prompt
from appliance.gateway.gate import Life, Standing
from appliance.gateway.inflight import InflightTable, LiveRequest
from appliance.gateway.memory import Memory
from appliance.gateway.metrics import Metrics
from appliance.gateway.quarantine import Quarantine
from appliance.gateway.report import Reporter
from appliance.gateway.room import Space
from appliance.gateway.trials import Trials
from appliance.gateway.upstream import LossKind, UpstreamLost

log = logging.getLogger("gateway.relay")

SLOTS_WHEN_UNKNOWN = 8
READS_MAX = 256
"""Requests that take no slot, such as the list of models, given to an engine at once."""


class Relay:
    """Owns the lanes: `slots` for what decodes, `reads` for what does not."""

    def __init__(self, config: Config, doors: Doors, fuse: Fuse, inflight: InflightTable, reporter: Reporter, metrics: Metrics) -> None:
        self._config = config
        self._doors = doors
        self._fuse = fuse
        self._inflight = inflight
        self._reporter = reporter
        self._metrics = metrics
        self.slots = self._lane(config.admission.vram_red_line)
        self.reads = self._lane(0)
        self.trials = Trials(inflight, self.slots.in_use_of, self._make_room, self.settle)
        self.quarantine = Quarantine(config.resume.quarantine_ttl_s, asyncio.get_running_loop().time)
        self._aftermath = Aftermath(config.resume, doors, inflight, self.trials, self.quarantine, fuse.learn)
        self._exchange = Exchange(metrics, self.trials.clear, self._stands_aside, doors.outlives)

    def settle(self) -> None:
        """A gate's standing or a trial may have moved: open, close or empty the lanes."""
        standings = [gate.standing for gate in self._doors.gates]
        engines = [engine for engine, standing in enumerate(standings) if standing is Standing.OPEN]
        self.trials.review(engines, more_may_come=Standing.HOLD in standings)
        every = range(len(standings))
        self.slots.open(*(self._space(engine) if engine in engines and engine != self.trials.closes else None for engine in every))
        self.reads.open(*(Space(READS_MAX) if engine in engines else None for engine in every))
        if all(standing is Standing.REFUSE for standing in standings):
            self.slots.refuse_all(self._doors.refusal)
            self.reads.refuse_all(self._doors.refusal)
            self.trials.refuse_all(self._doors.refusal)

    async def serve(self, request: LiveRequest, client: Client) -> None:
        """Answer it, or raise Refused."""
        self._inflight.add(request)
        answered = False
        try:
            self._aftermath.recall(request)
            if request.stream:
                client.start_comments()
            await self._serve(request, client, self.slots if request.takes_slot else self.reads)
            answered = True
        finally:
            client.stop_comments()
            self._inflight.discard(request)
            self._aftermath.close(request, answered=answered)
            if self.trials:
                self.settle()

    async def _serve(self, request: LiveRequest, client: Client, lane: Lane) -> None:
        loop = asyncio.get_running_loop()
        lost: UpstreamLost | None = None
        while True:
            if self._doors.standing is Standing.REFUSE:
                raise self._doors.refusal()
            self._doors.check_path(request.path)
            self._aftermath.check(request)
            asked_s = loop.time()
            await self._admit(request, lane, returning=lost is not None)
            began_s = loop.time()
            self._metrics.queue_wait.observe(began_s - asked_s)
            if lost is not None:
                request.waited_s += began_s - asked_s
                self._metrics.resent["continued" if request.sent_bytes else "replayed"] += 1
            held_s: float | None = None
            try:
                lost = await self._attempt(request, client)
                if lost is None:
                    held_s = loop.time() - began_s
                    return
            finally:
                request.life = None
                alone_s = self.trials.leave(request)
                lane.release(request.ticket, held_s)
                if alone_s is not None or self.trials:
                    self.settle()
            if lost.kind is not LossKind.SET_ASIDE and request.resumability is not Resumability.FAIL:
                client.say(sse.RESTARTING_COMMENT)
            await self._aftermath.judge(request, lost, alone_s)

    async def _attempt(self, request: LiveRequest, client: Client) -> UpstreamLost | None:
        life = self._doors.life_of(request.ticket.replica)
        if life is None:
            return UpstreamLost(LossKind.CONNECT, "the engine went away in this moment")
        self._aftermath.check(request)  # its like may have been convicted while it waited for its turn
        if request.takes_slot and self.trials.accuses(request):
            return UpstreamLost(LossKind.SET_ASIDE, "its like is suspected")
        await self._fuse.check(request, life)  # nobody could count it before, or this life holds less than the last one
        request.life = life
        request.attempt += 1
        try:
            await self._exchange.run(request, client, life)
        except UpstreamLost as lost:
            self._metrics.lost[lost.kind.value] += 1
            if lost.kind is not LossKind.SET_ASIDE and self._doors.lost(life, lost):
                shapes = self._inflight.of_life(life)
                log.warning("%s lost with %d requests in flight: %s", life, len(shapes), lost)
                self._reporter.upstream_lost(shapes)
            if lost.delivered:
                request.lost_life = life
                self._tell_length(request, life)
            else:
                request.attempt -= 1
            return lost
        return None

    def _tell_length(self, request: LiveRequest, life: Life) -> None:
        """This life was lost with it; another one counts it: lengths that crashes have in common are diagnosis's to find."""
        (shape,) = self._inflight.shapes([request])
        self._fuse.weigh(request, life, lambda tokens: self._reporter.weighed(replace(shape, prompt_tokens=tokens)))

    async def _admit(self, request: LiveRequest, lane: Lane, *, returning: bool) -> None:
        """Wait for its turn, or, for a suspect and its like, for its trial. Raises Refused."""
        while request.takes_slot and not request.losses.suspected and self.trials.accuses(request):
            await self.trials.await_like(request, self._patience_s(request))
            self._aftermath.recall(request)
        if request.losses.suspected and request.takes_slot and await self.trials.enter(request, self._aftermath.patience_s(request)):
            assert self.trials.closes is not None, "for this trial"
            lane.enter_alone(request.ticket, self.trials.closes)
        else:
            await lane.acquire(request.ticket, returning=returning)
        if request.lost_life is not None:
            self._aftermath.clear_of_living(request)
            request.lost_life = None

    def _patience_s(self, request: LiveRequest) -> float:
        """How much longer one that has not been in may wait: as its client says, or as for an engine."""
        patience_s, due_s = self._aftermath.patience_s(request), request.ticket.due_s
        if due_s is None or request.attempt:
            return patience_s
        return min(patience_s, max(0.0, due_s - asyncio.get_running_loop().time()))

    def _stands_aside(self, request: LiveRequest) -> bool:
        """Somebody else's trial is waiting for its engine to become free."""
        return request.life is not None and self.trials.closes == request.life.index and not self.trials.is_alone(request)

    def _make_room(self) -> None:
        """Take back what can be gone on with exactly."""
        for request in self._inflight:
            if request.connection is not None and request.can_stand_aside and self._stands_aside(request):
                request.connection.fail(UpstreamLost(LossKind.SET_ASIDE, "a suspect is tried alone"))

    # inside

    def _space(self, engine: int) -> Space:
        """What this one takes, by what it published and what is configured."""
        limits, configured = self._doors.gates[engine].limits, self._config.admission
        if limits is None:
            return Space(configured.max_concurrent_decodes or SLOTS_WHEN_UNKNOWN)
        capacity = configured.max_concurrent_decodes or max(1, limits.max_running)
        return Space(capacity, int(limits.kv_tokens * configured.kv_fill), longest_prompt(limits))

    def _lane(self, red_line: float) -> Lane:
        return Lane(
            new_memory=lambda: Memory(red_line),
            queue_size=self._config.admission.queue_size,
            queue_timeout_s=self._config.admission.queue_timeout_s,
            max_wait_s=self._config.resume.max_wait_s,
            refused_while_closed=self._doors.refusal,
        )
