"""The gate: whether requests may go to an engine now, and what clients are told when they may not. Each engine has its own (doors.py).

It believes applianced, except where a request has just seen otherwise: a lost connection shuts the gate until either a
new engine life is published or the engine answers /health over a fresh connection *after* the loss. The second is the
proof that this life did not die (one connection broke, or applianced was only restarted); without it a request is never
given to the same life again.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from appliance.core.launch import ContinuesBy, EngineLimits
from appliance.core.publication import Publication
from appliance.core.states import ANSWERING, EngineState
from appliance.gateway.envelope import Refused
from appliance.gateway.resume import Death, LifeName
from appliance.gateway.upstream import LossKind, Upstream, UpstreamLost

log = logging.getLogger("gateway.gate")

PROBE_TIMEOUT_S = 5.0
PROBE_INTERVAL_S = 0.25
NOT_READY_PAUSE_S = 0.5
WATCH_INTERVAL_S = 1.0
"""How often the engine is asked while applianced, which would tell us, is away."""
OLD_LIFE_GRACE_S = 1.0
"""After a life has ended, how long an answer that is already on its way may still arrive."""
STOPPED_HOLD_S = 30.0
"""A stop that is followed by a start within this is a restart, and clients are held over it."""
RETRY_AFTER_UNKNOWN_S = 5.0


class Standing(enum.Enum):
    """What to do with a request now."""

    OPEN = "open"
    HOLD = "hold"
    REFUSE = "refuse"
    """Waiting makes no sense: a person is needed, or the stop was meant."""


@dataclass(frozen=True, slots=True)
class View:
    """All that the standing follows from.

    Attributes:
        publication: the last one; None before the first.
        connected: applianced's control socket answers.
        control_error: why not, in a sentence.
        engine_lost: the last life broke a connection and has not proved itself since.
        stopped_s: how long the engine has been stopped on purpose.
    """

    publication: Publication | None = None
    connected: bool = False
    control_error: str = "applianced has not been asked yet"
    engine_lost: str | None = None
    stopped_s: float = 0.0


def standing_of(view: View) -> Standing:
    """The decision."""
    publication = view.publication
    if publication is None:
        return Standing.HOLD
    if publication.state is EngineState.PARKED:
        return Standing.REFUSE
    if publication.state is EngineState.STOPPED:
        return Standing.HOLD if view.stopped_s < STOPPED_HOLD_S else Standing.REFUSE
    serves = publication.state in ANSWERING and publication.endpoint is not None
    return Standing.OPEN if serves and view.engine_lost is None else Standing.HOLD


def sentence_of(view: View) -> str:
    """What people are told, in one sentence."""
    publication = view.publication
    if publication is None:
        return f"applianced is not answering: {view.control_error}" if not view.connected else "the engine's state is not known yet"
    if publication.state is EngineState.STOPPED and not view.connected:
        return f"the engine was stopped, and applianced does not run: {view.control_error}"
    if view.engine_lost is not None and not view.connected:
        return f"applianced is not answering ({view.control_error}), and neither is the engine: {view.engine_lost}"
    if view.engine_lost is not None and publication.state in ANSWERING:
        return f"the connection to the engine was lost ({view.engine_lost}); applianced is finding out why"
    return publication.reason or f"the engine is {publication.state.value.replace('_', ' ')}"


@dataclass(eq=False, slots=True)
class Life:
    """One engine life as the gateway knows it.

    Attributes:
        generation: applianced's number for it.
        continues_by: how it goes on with answers that an earlier life began.
        last_incident_id: before it.
        replica: which of several engines; None: there is one.
        lost: requests have lost it, and it has not proved itself since.
        since_s: on the loop's clock, when we heard of it.
        leaving: it is being stopped on purpose: its end is no crash.
        counts: prompts, as far as it has not said otherwise.
    """

    generation: int
    upstream: Upstream
    since_s: float
    continues_by: ContinuesBy = ContinuesBy.REPLAY
    last_incident_id: str | None = None
    replica: int | None = None
    lost: bool = False
    leaving: bool = False
    counts: bool = True

    @property
    def index(self) -> int:
        """Of its gate, its slots and its metrics."""
        return self.replica or 0

    @property
    def name(self) -> LifeName:
        """By which it is remembered when it is over."""
        return LifeName(self.generation, self.index)

    def __str__(self) -> str:
        return f"generation {self.generation}" if self.replica is None else f"generation {self.generation} of engine {self.replica}"


class News:
    """What many wait for: each telling wakes all who wait at that moment."""

    def __init__(self) -> None:
        self._told = asyncio.Event()

    def tell(self) -> None:
        """There is some."""
        self._told.set()
        self._told = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        """For the next, but not longer."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._told.wait()
        except TimeoutError:
            return


class Gate:
    """Owns the view and the current life of one engine. `changed` is called after every change that may move the standing.

    Attributes:
        replica: which of several engines; None: there is one.
        paths: what the last engine that said so has for clients.
    """

    def __init__(self, changed: Callable[[], None], news: News, deaths: deque[Death]) -> None:
        """`news`: publications and proofs of life; `deaths`: of lives that were not asked to end; of all engines, both."""
        self.view = View()
        self.life: Life | None = None
        self.replica: int | None = None
        self.paths: tuple[str, ...] = ()
        self._news = news
        self._deaths = deaths
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._prober: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._stopped_since_s: float | None = None

    @property
    def standing(self) -> Standing:
        """See Standing."""
        return standing_of(self._dated_view())

    @property
    def sentence(self) -> str:
        """What people are told."""
        return sentence_of(self.view)

    @property
    def limits(self) -> EngineLimits | None:
        """Of the engine that runs."""
        return self.view.publication.limits if self.view.publication is not None else None

    def refusal(self) -> Refused:
        """The 503 for now."""
        publication = self.view.publication
        retry_after_s = RETRY_AFTER_UNKNOWN_S if publication is None or self.standing is Standing.HOLD else None
        if publication is not None and publication.retry_after_s is not None:
            retry_after_s = publication.retry_after_s
        code = "engine_parked" if publication is not None and publication.state is EngineState.PARKED else "engine_unavailable"
        return Refused(
            503,
            code,
            sentence_of(self.view),
            retry_after_s=retry_after_s,
            incident_id=publication.incident_id if publication is not None else None,
        )

    def check_path(self, path: str) -> None:
        """Raises Refused for what no engine of this box has: nobody has to wait for one to hear that."""
        if self.paths and path not in self.paths and not any(path.startswith(known) for known in self.paths if known.endswith("/")):
            known = ", ".join(path for path in self.paths if not path.endswith("/"))
            raise Refused(404, "unknown_path", f"the engine has no endpoint {path[:200]}", hint=f"it has {known}")

    async def judged(self, life: Life, timeout_s: float) -> bool:
        """Wait until it is known whether a life that broke a connection is over. False: it answers again, or we still cannot tell."""
        due_s = self._loop.time() + timeout_s
        while life is self.life and life.lost and self._loop.time() < due_s:
            await self._news.wait(due_s - self._loop.time())
        return life is not self.life

    async def outlives(self, life: Life, timeout_s: float) -> bool:
        """Whether a life that has just told of a failure of its own still serves; known when the time is over, or it is."""
        due_s = self._loop.time() + timeout_s
        while (serves := self.serves(life.name)) and self._loop.time() < due_s:
            await self._news.wait(due_s - self._loop.time())
        return serves

    def serves(self, life: LifeName) -> bool:
        """This life, and nothing speaks against it."""
        return self.standing is Standing.OPEN and self.life is not None and self.life.generation == life.generation

    async def incident_of(self, life: Life, timeout_s: float) -> str | None:
        """The incident that its end became; None when nobody says so in time."""
        due_s = self._loop.time() + timeout_s
        while self._incident_since(life) is None and self._loop.time() < due_s:
            await self._news.wait(due_s - self._loop.time())
        return self._incident_since(life)

    # applianced said

    def publish(self, publication: Publication) -> None:
        """A publication arrived."""
        engine_lost = self.view.engine_lost
        if self._is_new_life(publication):
            self._replace_life(publication)
            engine_lost = None
        elif self.life is not None and publication.state in (EngineState.DRAINING, EngineState.STOPPED):
            self.life.leaving = True
        self._note_stop(publication)
        if publication.limits is not None:
            self.paths = publication.limits.paths
        self._set(View(publication, True, "", engine_lost))
        self._cancel(self._watcher)
        self._news.tell()

    def control_lost(self, error: str) -> None:
        """The control socket does not answer. The last publication stays; the engine is now asked by ourselves."""
        view = self.view
        self._set(View(view.publication, False, error, view.engine_lost))
        if self._watcher is None or self._watcher.done():
            self._watcher = self._loop.create_task(self._watch())

    # a request said

    def lost(self, life: Life, loss: UpstreamLost) -> bool:
        """A request lost its engine. True when it is the first of this life to do so."""
        first = not life.lost
        life.lost = True
        if life is self.life and self.view.engine_lost is None:
            self._doubt(life, str(loss), NOT_READY_PAUSE_S if loss.kind is LossKind.NOT_READY else 0.0)
        return first

    def stop(self) -> None:
        """End all tasks and the current life."""
        self._cancel(self._prober)
        self._cancel(self._watcher)
        if self.life is not None:
            self.life.upstream.end("the gateway stops")

    # inside

    def _dated_view(self) -> View:
        if self._stopped_since_s is None:
            return self.view
        view = self.view
        return View(view.publication, view.connected, view.control_error, view.engine_lost, self._loop.time() - self._stopped_since_s)

    def _set(self, view: View) -> None:
        before = self.standing, self.view.control_error
        self.view = view
        if (self.standing, view.control_error) != before:  # applianced's own log has the sentences in between
            whose = "" if self.replica is None else f"engine {self.replica}: "
            log.info("%s%s: %s", whose, self.standing.value, sentence_of(view))
        self._changed()

    def _incident_since(self, life: Life) -> str | None:
        publication = self.view.publication
        incident_id = publication.incident_id if publication is not None else None
        return incident_id if incident_id != life.last_incident_id else None

    def _is_new_life(self, publication: Publication) -> bool:
        if publication.endpoint is None:  # while it drains, what runs may still finish
            return self.life is not None and publication.state is not EngineState.DRAINING
        life = self.life
        return life is None or (life.generation, life.upstream.endpoint) != (publication.generation, publication.endpoint)

    def _replace_life(self, publication: Publication) -> None:
        self._cancel(self._prober)
        if self.life is not None:
            reason = f"{self.life} is over: {publication.reason}"
            # Its sockets break by themselves when the process goes; this is for a process that cannot be killed.
            self._loop.call_later(OLD_LIFE_GRACE_S, self.life.upstream.end, reason)
            if not self.life.leaving:
                self._deaths.append(Death(self.life.name, self._loop.time() - self.life.since_s))
        self.life = None
        if publication.endpoint is not None:
            continues_by = publication.limits.continues_by if publication.limits is not None else ContinuesBy.REPLAY
            upstream = Upstream(publication.endpoint)
            now_s, incident_id = self._loop.time(), publication.incident_id
            self.life = Life(publication.generation, upstream, now_s, continues_by, incident_id, self.replica)

    def _note_stop(self, publication: Publication) -> None:
        if publication.state is not EngineState.STOPPED:
            self._stopped_since_s = None
        elif self._stopped_since_s is None:
            self._stopped_since_s = self._loop.time()
            self._loop.call_later(STOPPED_HOLD_S + 0.01, self._changed)

    def _doubt(self, life: Life, why: str, pause_s: float) -> None:
        view = self.view
        self._set(View(view.publication, view.connected, view.control_error, why))
        self._cancel(self._prober)
        self._prober = self._loop.create_task(self._probe(life, pause_s))

    async def _probe(self, life: Life, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        while True:
            if await life.upstream.healthy(PROBE_TIMEOUT_S):
                break
            await asyncio.sleep(PROBE_INTERVAL_S)
        if life is self.life:
            view = self.view
            life.lost = False
            log.warning("%s answers again after: %s", life, view.engine_lost)
            self._set(View(view.publication, view.connected, view.control_error, None))
            self._news.tell()

    async def _watch(self) -> None:
        while True:
            life = self.life
            if (
                life is not None
                and self.view.engine_lost is None
                and not await life.upstream.healthy(PROBE_TIMEOUT_S)
                and life is self.life
            ):
                self._doubt(life, f"{life.upstream.endpoint} does not answer", PROBE_INTERVAL_S)
            await asyncio.sleep(WATCH_INTERVAL_S)

    @staticmethod
    def _cancel(task: asyncio.Task[None] | None) -> None:
        if task is not None:
            task.cancel()
