"""After a loss: was it a crash, whose fault may it be, and may the request be given to the next engine?"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

from appliance.config.client_tables import ResumeTable
from appliance.gateway.doors import Doors
from appliance.gateway.envelope import Refused
from appliance.gateway.exchange import cannot_go_on
from appliance.gateway.gate import RETRY_AFTER_UNKNOWN_S, Gate, Life, Standing
from appliance.gateway.inflight import InflightTable, LiveRequest
from appliance.gateway.quarantine import Quarantine
from appliance.gateway.resume import LifeName, Loss, Verdict, after_loss, chance_of_death
from appliance.gateway.trials import Trials
from appliance.gateway.upstream import LossKind, UpstreamLost

log = logging.getLogger("gateway.aftermath")

NEWS_WAIT_S = 0.5
"""How long a broken stream waits for applianced's sentence on it, to end with the incident's id in its error."""
INCIDENT_WAIT_S = 5.0
"""The same for a request that is quarantined: here the incident is what its sender needs."""


Learn = Callable[[LiveRequest, str], None]


class Aftermath:
    """Applies resume.py's verdicts. `learn` is told of each request that is convicted, and its fingerprint."""

    def __init__(
        self, resume: ResumeTable, doors: Doors, inflight: InflightTable, trials: Trials, quarantine: Quarantine, learn: Learn
    ) -> None:
        self._resume = resume
        self._doors = doors
        self._inflight = inflight
        self._trials = trials
        self._quarantine = quarantine
        self._learn = learn

    def recall(self, request: LiveRequest) -> None:
        """A request comes: one with the same body may have been suspected when its client left."""
        if self._quarantine and request.takes_slot:
            known = self._quarantine.suspicion(self._inflight.fingerprint_of(request))
            request.losses.crashes = list(dict.fromkeys((*known, *request.losses.crashes)))

    def check(self, request: LiveRequest) -> None:
        """Raises Refused for a body that is in quarantine."""
        if self._quarantine and request.takes_slot:
            refused = self._quarantine.refusal(self._inflight.fingerprint_of(request))
            if refused is not None:
                request.losses.acquit()
                raise refused

    def close(self, request: LiveRequest, *, answered: bool) -> None:
        """A request goes, in whatever way."""
        if not answered and request.losses.crashes:
            self._quarantine.remember(self._inflight.fingerprint_of(request), request.losses.crashes)
        elif answered and self._quarantine:
            self._quarantine.clear(self._inflight.fingerprint_of(request))
        self._trials.forget(request)  # its like goes on by what is known of it now

    def clear_of_living(self, request: LiveRequest) -> None:
        """Take back what was held against it of engines that turned out to live: only a connection broke."""
        for life in [life for life in request.losses.crashes if self._doors.serves(life)]:
            request.losses.survived(life)

    def patience_s(self, request: LiveRequest) -> float:
        """How much longer it may wait for an engine."""
        return max(0.0, self._resume.max_wait_s - request.waited_s)

    async def judge(self, request: LiveRequest, lost: UpstreamLost, alone_s: float | None) -> None:
        """Return when the request may be given to an engine again. `alone_s`: for how long it had had this one to itself.

        Raises:
            Refused: it may not.
        """
        if lost.kind is LossKind.SET_ASIDE:
            return
        life = request.lost_life
        if life is not None:
            await self._count(request, life, alone_s)
        facts = Loss(request.resumability, request.losses, request.waited_s)
        verdict = after_loss(facts, max_attempts=self._resume.max_attempts, max_wait_s=self._resume.max_wait_s)
        if verdict is Verdict.QUARANTINE and life is not None:
            await self._convict(request, life)
        if verdict in (Verdict.AGAIN, Verdict.ALONE):
            return
        where = self._where(life)
        if where.standing is Standing.HOLD and verdict is not Verdict.FAIL_WAITED:
            await (self._doors.news(NEWS_WAIT_S) if life is None else self._doors.gate_of(life).incident_of(life, NEWS_WAIT_S))
        raise self._failed(request, lost, verdict)

    async def _count(self, request: LiveRequest, life: Life, alone_s: float | None) -> None:
        """Add it to the request's losses, as far as it is one: a stop that was asked for is none, a broken connection is no crash."""
        if life.leaving:
            request.lost_life = None
            return
        losses = request.losses
        losses.add(life.name)
        self.clear_of_living(request)
        if alone_s is None and not losses.suspected:
            return  # should it turn out to live, `clear_of_living` takes it back
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        over = await self._doors.gate_of(life).judged(life, self.patience_s(request))
        request.waited_s += loop.time() - began_s
        self.clear_of_living(request)
        if not over:
            losses.survived(life.name)
            request.lost_life = None
        elif alone_s is not None and losses.suspected:
            losses.chances.append(chance_of_death(self._doors.deaths, self._own(request), alone_s))

    def _own(self, request: LiveRequest) -> set[LifeName]:
        """Lives that ended with this body, in whosever request, gone or not: they are no sign that engines die without it."""
        fingerprint = self._inflight.fingerprint_of(request)
        same = (other for other in self._inflight if other.losses.crashes and self._inflight.fingerprint_of(other) == fingerprint)
        lives = {life for other in same for life in other.losses.crashes}
        return lives.union(request.losses.crashes, self._quarantine.suspicion(fingerprint))

    async def _convict(self, request: LiveRequest, life: Life) -> NoReturn:
        incident_id = await self._doors.gate_of(life).incident_of(life, INCIDENT_WAIT_S)
        fingerprint, explained = self._inflight.fingerprint_of(request), self._own(request)
        refused = self._quarantine.convict(fingerprint, len(request.losses.crashes), incident_id)
        log.error("request %s is quarantined (fingerprint %s): %s", request.request_id, fingerprint, refused.message)
        self._trials.convicted(request, self._inflight.fingerprint_of, refused)
        self._learn(request, fingerprint)
        self._doors.explained(explained)
        request.losses.acquit()  # it has been sentenced for these
        raise refused

    def _where(self, life: Life | None) -> Doors | Gate:
        """Who knows how this life is; without one, how all are."""
        return self._doors if life is None else self._doors.gate_of(life)

    def _failed(self, request: LiveRequest, lost: UpstreamLost, verdict: Verdict) -> Refused:
        if verdict is Verdict.FAIL_WAITED:
            return self._doors.refusal()
        life = request.lost_life
        where = self._where(life)
        now, serves = where.refusal(), where.standing is Standing.OPEN
        why = lost.detail if serves else now.message
        if verdict is Verdict.FAIL_SENT:
            refused = cannot_go_on(request, why)
        else:
            message = (
                f"{request.losses.fruitless} engines in a row were lost while they had this request, "
                f"[resume] max_attempts forgives {self._resume.max_attempts}: {why}"
            )
            refused = Refused(503, "engine_lost_repeatedly", message, hint="see `appliancectl incidents`")
        refused.retry_after_s = now.retry_after_s or RETRY_AFTER_UNKNOWN_S
        refused.incident_id = now.incident_id if not serves and (life is None or now.incident_id != life.last_incident_id) else None
        return refused
