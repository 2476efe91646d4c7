"""The control socket's verbs for several engines: to one of them where its number is said (`replica`), else to all."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from appliance.control.codec import CodecError
from appliance.control.server import Handler
from appliance.core.errors import ControlError
from appliance.supervisor.fleet import Fleet, Replica
from appliance.supervisor.records import Records
from appliance.supervisor.summing import shown, summed_status
from appliance.supervisor.verbs import Verbs

ASK_S = 8.0
"""Whoever asks waits 10 s for an answer (control/client.py)."""
Arguments = Mapping[str, Any]


class FleetVerbs:
    """One method a verb; each makes theirs out of the engines' own (verbs.py)."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._verbs: dict[int, tuple[object, Verbs]] = {}
        self._fused: object = []

    @property
    def handlers(self) -> dict[str, Handler]:
        """For the control server."""
        verbs = (self.status, self.restart, self.drain, self.resume, self.report, self.ladder, self.flight)
        return {verb.__name__: verb for verb in verbs} | Records(self._fleet.store).handlers

    async def status(self, arguments: Arguments) -> Arguments:
        """The sum, and each of them under `replicas`."""
        fleet = self._fleet
        each = []
        for one in fleet.replicas:
            publication = one.publication
            own = await self._of(one).status(arguments)
            each.append({**own, "state": publication.state.value, "sentence": publication.reason})
        told = summed_status(each, fleet.cards, fleet.board.current)
        return {**told, "fused_lengths": self._fused, "subscribers": fleet.board.subscribers}

    async def restart(self, arguments: Arguments) -> Arguments:
        """One of them; or all, the next only when the one before answers again."""
        rolling, named = self._fleet.rolling, "replica" in arguments
        if rolling.under_way:
            raise ControlError("a rolling restart is under way", hint="appliancectl status says how far it is; drain ends it")
        chosen, rest = self._chosen(arguments)
        for one in chosen:
            self._of(one).check_rung(rest)
        if named:
            return await self._ask(chosen[0], "restart", rest)
        rolling.begin([functools.partial(self._ask, one, "restart", rest) for one in chosen])
        return self._answer("restarting the engines one after the other: the next one when the one before answers again")

    async def drain(self, arguments: Arguments) -> Arguments:
        """All of them, or one; a rolling restart ends."""
        self._fleet.rolling.cancel()
        return await self._ask_all("drain", arguments)

    async def resume(self, arguments: Arguments) -> Arguments:
        """Those that are parked."""
        return await self._ask_all("resume", arguments)

    async def report(self, arguments: Arguments) -> Arguments:
        """Each is told of the requests that it has; of those whose engine is not known, each."""
        requests = arguments.get("requests", [])
        if not isinstance(requests, list) or not all(isinstance(request, dict) for request in requests):
            raise CodecError(f"requests = {str(requests)[:80]!r} is no list of requests")
        answer: Arguments = {}
        news = arguments.get("kind", "traffic") not in ("traffic", "weighed")
        for one in self._fleet.replicas:
            own = [request for request in requests if request.get("replica") in (None, one.index)]
            if own or not (news and requests):
                answer = await self._of(one).report({**arguments, "requests": own})
        self._fused = answer.get("fused_lengths", self._fused)
        return answer

    async def ladder(self, arguments: Arguments) -> Arguments:
        """Of the one that is named, or that stands for all; then each is under `replicas`."""
        chosen, rest = self._chosen(arguments)
        each = [await self._of(one).views.ladder(rest) for one in chosen]
        return each[0] if "replica" in arguments else {**each[self._shown], "replicas": self._by_card(each)}

    async def flight(self, arguments: Arguments) -> Arguments:
        """As `ladder`; the cards are those of all of them."""
        chosen, rest = self._chosen(arguments)
        each = [await self._of(one).views.flight(rest) for one in chosen]
        if "replica" in arguments:
            return each[0]
        cards = [card for one in each for card in one["cards"]]
        return {**each[self._shown], "cards": cards, "replicas": self._by_card(each)}

    @property
    def _shown(self) -> int:
        return shown(self._fleet.board.current.replicas)

    def _by_card(self, each: Sequence[Arguments]) -> list[Arguments]:
        return [{"card": card, **one} for card, one in zip(self._fleet.cards, each, strict=True)]

    def _of(self, one: Replica) -> Verbs:
        """Made anew when its supervisor was."""
        supervisor, verbs = self._verbs.get(one.index, (None, None))
        if verbs is None or supervisor is not one.supervisor:
            verbs = Verbs(one.supervisor)
            self._verbs[one.index] = one.supervisor, verbs
        return verbs

    def _chosen(self, arguments: Arguments) -> tuple[tuple[Replica, ...], Arguments]:
        """Whom it is for, and the arguments without that word."""
        replicas, number = self._fleet.replicas, arguments.get("replica")
        if "replica" not in arguments:
            return replicas, arguments
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(replicas):
            known = ", ".join(f"{one.index} is the engine on card {one.card}" for one in replicas)
            raise ControlError(f"replica = {number!r} is none of 0 to {len(replicas) - 1}", hint=known)
        return (replicas[number],), {name: value for name, value in arguments.items() if name != "replica"}

    async def _ask_all(self, verb: str, arguments: Arguments) -> Arguments:
        """One that does as it is asked is enough for an answer."""
        chosen, rest = self._chosen(arguments)
        outcomes = await asyncio.gather(*(self._ask(one, verb, rest) for one in chosen), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if len(failures) == len(outcomes) or not all(isinstance(failure, ControlError) for failure in failures):
            raise failures[0]
        return self._answer(self._fleet.board.current.reason)

    async def _ask(self, one: Replica, verb: str, arguments: Arguments) -> Arguments:
        if one.broken is not None:
            raise ControlError(f"card {one.card}: {one.broken.reason}", hint="try again in a moment")
        try:
            with structlog.contextvars.bound_contextvars(card=one.card):
                async with asyncio.timeout(ASK_S):
                    return await self._of(one).handlers[verb](arguments)
        except TimeoutError:
            raise ControlError(f"the supervisor of card {one.card} did not answer within {ASK_S:g} s", hint="see its log") from None

    def _answer(self, sentence: str) -> Arguments:
        return {"state": self._fleet.board.current.state.value, "sentence": sentence}
