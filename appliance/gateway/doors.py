"""The gates of all engines as one: requests go to whichever is open, and are held while none is and one may be again.

With one engine there is one gate, and this is that gate. With an engine on each card (`Publication.replicas`) there is one
for each, by index, always in the same order; each is opened, doubted and shut by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace

from appliance.core.publication import Publication
from appliance.core.states import EngineState
from appliance.gateway.envelope import Refused
from appliance.gateway.gate import Gate, Life, News, Standing
from appliance.gateway.resume import Death, LifeName
from appliance.gateway.upstream import UpstreamLost

DEATHS_KEPT = 100
_NOT_THERE_ANY_MORE = "this engine is not configured any more"


class Doors:
    """Owns the gates. `changed` is called after every change that may move a standing.

    Attributes:
        gates: of the engines that there are.
        publication: the last one, of all of them together; None before the first.
        deaths: of the last lives that were not asked to end.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self.publication: Publication | None = None
        self.deaths: deque[Death] = deque(maxlen=DEATHS_KEPT)
        self._changed = changed
        self._news = News()
        self._asked = asyncio.Event()
        self._every = [self._gate()]
        """Also those of engines that are not there any more: requests may still be with them."""
        self.gates = self._every[:]

    # what is known

    @property
    def several(self) -> bool:
        """There is more than one engine."""
        return len(self.gates) > 1

    @property
    def standing(self) -> Standing:
        """The best of all: one that is open is enough."""
        if not self.several:
            return self.gates[0].standing
        standings = {gate.standing for gate in self.gates}
        return next(standing for standing in Standing if standing in standings)

    @property
    def connected(self) -> bool:
        """applianced's control socket answers."""
        return self.gates[0].view.connected

    @property
    def sentence(self) -> str:
        """What people are told, in one sentence: applianced's own, where we know nothing that it does not."""
        if not self.several or self.publication is None:
            return self.gates[0].sentence
        doubted = any(gate.view.engine_lost is not None for gate in self.gates)
        if not doubted and (self.connected or self.standing is Standing.OPEN):
            return self.publication.reason
        shut = [(index, gate.sentence) for index, gate in enumerate(self.gates) if gate.standing is not Standing.OPEN]
        answering = f"{len(self.gates) - len(shut)} of {len(self.gates)} engines answer"
        if len({sentence for _, sentence in shut}) == 1 and len(shut) == len(self.gates):
            return f"{answering}: {shut[0][1]}"
        return "; ".join([answering, *(f"engine {index}: {sentence}" for index, sentence in shut)])

    def refusal(self) -> Refused:
        """The 503 for now: of the engine that is back first, as far as one will be."""
        if not self.several:
            return self.gates[0].refusal()
        standing = self.standing
        refused = min((gate.refusal() for gate in self.gates if gate.standing is standing), key=lambda one: one.retry_after_s or 0.0)
        refused.message = self.sentence
        return refused

    def check_path(self, path: str) -> None:
        """Raises Refused for what no engine of this box has: nobody has to wait for one to hear that."""
        for gate in self.gates:
            if gate.paths:
                gate.check_path(path)
                return

    def open_replicas(self) -> list[int]:
        """The engines that answer."""
        return [index for index, gate in enumerate(self.gates) if gate.standing is Standing.OPEN]

    def lives(self) -> list[Life]:
        """Of the engines that answer."""
        return [gate.life for gate in self.gates if gate.life is not None and gate.standing is Standing.OPEN]

    def life_of(self, index: int) -> Life | None:
        """Of this engine, if it answers."""
        gate = self._every[index]
        return gate.life if gate.standing is Standing.OPEN else None

    def gate_of(self, life: Life) -> Gate:
        """Where this life was known."""
        return self._every[life.index]

    def serves(self, life: LifeName) -> bool:
        """This life, and nothing speaks against it."""
        return life.replica < len(self._every) and self._every[life.replica].serves(life)

    async def outlives(self, life: Life, timeout_s: float) -> bool:
        """See Gate."""
        return await self.gate_of(life).outlives(life, timeout_s)

    async def asked(self, timeout_s: float) -> None:
        """Wait until applianced was asked for the first time, whatever came of it, but not longer: before that nothing is known."""
        if not self._asked.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._asked.wait()

    async def news(self, timeout_s: float) -> None:
        """Wait for the next publication or proof of life, of whichever engine, but not longer."""
        await self._news.wait(timeout_s)

    # applianced said

    def publish(self, publication: Publication) -> None:
        """A publication arrived."""
        self._asked.set()
        self.publication = publication
        parts = publication.replicas or (publication,)
        while len(self._every) < len(parts):
            self._every.append(self._gate())
        self.gates = self._every[: len(parts)]
        for index, gate in enumerate(self.gates):
            gate.replica = index if publication.replicas else None
        for gate, part in zip(self._every, [*parts, *map(_closed, self._every[len(parts) :])], strict=True):
            if part != gate.view.publication or not gate.view.connected:
                gate.publish(part)

    def control_lost(self, error: str) -> None:
        """The control socket does not answer: see Gate."""
        self._asked.set()
        for gate in self.gates:
            gate.control_lost(error)

    # requests said

    def lost(self, life: Life, loss: UpstreamLost) -> bool:
        """A request lost its engine. True when it is the first of this life to do so."""
        return self.gate_of(life).lost(life, loss)

    def explained(self, lives: Iterable[LifeName]) -> None:
        """These died of one request. They say nothing about the next one."""
        explained = set(lives)
        for death in [death for death in self.deaths if death.life in explained]:
            self.deaths.remove(death)

    def stop(self) -> None:
        """End all tasks and the current lives."""
        for gate in self._every:
            gate.stop()

    # inside

    def _gate(self) -> Gate:
        return Gate(self._changed, self._news, self.deaths)


def _closed(gate: Gate) -> Publication:
    """For an engine that applianced does not speak of any more."""
    last = gate.view.publication
    stopped = Publication(EngineState.STOPPED, 0, None, None, _NOT_THERE_ANY_MORE, None)
    return stopped if last is None else replace(stopped, generation=last.generation)
