"""Suspects are tried alone: one at a time, when those who were there before them have been served, or OTHERS_MAX_S are over.

For a trial an engine's slots are closed and run empty. Answers that can be gone on with exactly are taken back from the
engine for that; the others are waited for, CLOSED_MAX_S at most, since newcomers wait too: then the trial is put off. The
suspect has the engine to itself until it has got further than ever before (then it was not the cause), the engine dies
(then it was), or ALONE_MAX_S are over. Whoever comes with the same body meanwhile waits for what becomes of it.

With several engines it is the one with the least to do, at once, and the others serve everybody meanwhile. While only one
answers and another may come back, the trial waits for that, OTHERS_MAX_S at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from appliance.gateway.envelope import Refused
from appliance.gateway.inflight import LiveRequest, next_order

log = logging.getLogger("gateway.trials")

OTHERS_MAX_S = 30.0
CLOSED_MAX_S = 20.0
ALONE_MAX_S = 60.0


@dataclass(eq=False, slots=True)
class _Suspect:
    """Requests that came before `mark` are served first, if that is so by `due_s`."""

    request: LiveRequest
    mark: int
    due_s: float
    admitted: asyncio.Future[bool]


class Trials:
    """Owns the suspects. `settle` is called when something has moved, and is to call `review` and to obey `closes`.

    Attributes:
        closes: the engine that nobody else may go to now; None: there is no trial.
    """

    def __init__(
        self,
        inflight: Iterable[LiveRequest],
        in_use: Callable[[int], int],
        make_room: Callable[[], None],
        settle: Callable[[], None],
    ) -> None:
        """`in_use`: slots of an engine; `make_room`: take back what can be taken back from the one that is closed."""
        self.closes: int | None = None
        self._inflight = inflight
        self._in_use = in_use
        self._make_room = make_room
        self._settle = settle
        self._loop = asyncio.get_running_loop()
        self._suspects: list[_Suspect] = []
        self._tried: set[LiveRequest] = set()
        self._accused: set[LiveRequest] = set()
        """Suspects, until they are cleared or gone."""
        self._alike: dict[LiveRequest, asyncio.Future[None]] = {}
        """Those who have the body of one of them, and wait for what becomes of it."""
        self._alone: LiveRequest | None = None
        self._alone_since_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def __bool__(self) -> bool:
        return bool(self._suspects) or self._alone is not None

    @property
    def waiting(self) -> int:
        """Suspects that have not been tried yet."""
        return len(self._suspects)

    def is_alone(self, request: LiveRequest) -> bool:
        """No other request is with the engine."""
        return self._alone is request

    async def enter(self, request: LiveRequest, patience_s: float) -> bool:
        """Wait for its trial, and begin it. False: it is not suspected any more.

        Raises:
            Refused: it waited for too long, or it has been convicted together with its like.
        """
        patience = 0.0 if request.losses.chances else OTHERS_MAX_S  # an engine died in its trial, perhaps by chance: once more
        suspect = _Suspect(request, next_order(), self._loop.time() + patience, self._loop.create_future())
        self._suspects.append(suspect)
        self._accused.add(request)
        log.warning("request %s was with %d engines that died; it will be tried alone", request.request_id, len(request.losses.crashes))
        due = self._loop.call_at(suspect.due_s, self._settle)
        self._settle()
        try:
            async with asyncio.timeout(patience_s):
                return await suspect.admitted
        except BaseException as error:
            self.leave(request)
            if isinstance(error, TimeoutError):
                raise _never_tried(request, patience_s) from None
            raise
        finally:
            due.cancel()
            self._suspects.remove(suspect)
            self._settle()

    def accuses(self, request: LiveRequest) -> bool:
        """Another one with this body is suspected: it would kill another engine, if it is what it looks like."""
        return bool(self._accused) and request not in self._accused and any(one.body == request.body for one in self._accused)

    async def await_like(self, request: LiveRequest, patience_s: float) -> None:
        """Wait until nobody with this body is suspected any more.

        Raises:
            Refused: its like was convicted, or it waited for too long.
        """
        self._alike[request] = verdict = self._loop.create_future()
        self._settle()
        try:
            async with asyncio.timeout(patience_s):
                await verdict
        except TimeoutError:
            raise _like_never_tried(patience_s) from None
        finally:
            del self._alike[request]
            self._settle()

    def leave(self, request: LiveRequest) -> float | None:
        """It is not with the engine any more. For how long it was alone with it; None where it was not."""
        if self._alone is not request:
            return None
        self._stop_timer()
        self._alone = self.closes = None
        return self._loop.time() - self._alone_since_s

    def clear(self, request: LiveRequest) -> None:
        """It got further, or was alone for long enough: others may come in beside it."""
        if self.leave(request) is not None:
            log.info("request %s was tried alone, and the engine lives", request.request_id)
            self._tried.add(request)
            self._acquit(request)
            self._settle()

    def forget(self, request: LiveRequest) -> None:
        """It is gone."""
        self._tried.discard(request)
        self._acquit(request)

    def convicted(self, culprit: LiveRequest, fingerprint_of: Callable[[LiveRequest], str], refused: Refused) -> None:
        """Its like share its fate; whose crashes it explains are not suspected any more."""
        explained = set(culprit.losses.crashes)
        for one, verdict in self._alike.items():
            if one.body == culprit.body and not verdict.done():
                verdict.set_exception(refused)
        for suspect in list(self._suspects):
            if suspect.admitted.done():
                continue
            if fingerprint_of(suspect.request) == fingerprint_of(culprit):
                suspect.admitted.set_exception(refused)
            elif set(suspect.request.losses.crashes) <= explained:
                suspect.request.losses.acquit()
                suspect.admitted.set_result(False)
                self._acquit(suspect.request)

    def refuse_all(self, refused: Callable[[], Refused]) -> None:
        """There will be no engine to try them on."""
        waiting: list[asyncio.Future[Any]] = [*(suspect.admitted for suspect in self._suspects), *self._alike.values()]
        for one in waiting:
            if not one.done():
                one.set_exception(refused())

    def review(self, engines: Sequence[int], *, more_may_come: bool = False) -> None:
        """Something has changed: may a trial begin, must an engine be closed for one? `engines`: those that answer, others may follow."""
        if self._alone is not None:
            return
        ready = [suspect for suspect in self._suspects if not suspect.admitted.done()] if engines else []
        ready = [suspect for suspect in ready if self._is_due(suspect, len(engines), more_may_come)]
        if not ready:
            self._open_again()
            return
        if self.closes not in engines:
            self._open_again()
        where = self.closes if self.closes is not None else min(engines, key=self._in_use)
        if not self._in_use(where):
            # Whoever came last before the first crash is the likeliest.
            self._begin(max(ready, key=lambda suspect: suspect.request.order), where)
        elif self.closes is None:
            self.closes = where
            self._start_timer(CLOSED_MAX_S, self._put_off)
            self._make_room()

    def _acquit(self, request: LiveRequest) -> None:
        """Its like need not wait for it."""
        if request not in self._accused:
            return
        self._accused.discard(request)
        for one, verdict in self._alike.items():
            if not verdict.done() and not self.accuses(one):
                verdict.set_result(None)

    def _open_again(self) -> None:
        self.closes = None
        self._stop_timer()

    def _is_due(self, suspect: _Suspect, engines: int, more_may_come: bool) -> bool:
        if engines > 1 or self._loop.time() >= suspect.due_s:
            return True
        return not more_may_come and self._others_served(suspect)

    def _others_served(self, suspect: _Suspect) -> bool:
        """Those who have been tried are no others: where they can be taken back, the next trial need not wait for their end."""
        aside = self._tried.union(self._alike, (other.request for other in self._suspects))
        return all(request.order >= suspect.mark or not request.takes_slot or request in aside for request in self._inflight)

    def _begin(self, suspect: _Suspect, where: int) -> None:
        self.closes = where
        self._alone = suspect.request
        self._alone_since_s = self._loop.time()
        suspect.admitted.set_result(True)
        self._start_timer(ALONE_MAX_S, lambda: self.clear(suspect.request))

    def _put_off(self) -> None:
        """The engine does not run empty. Those who are in it now have to be served first, too."""
        self.closes = None
        due_s = self._loop.time() + OTHERS_MAX_S
        for suspect in self._suspects:
            suspect.mark, suspect.due_s = next_order(), due_s
        self._loop.call_at(due_s, self._settle)
        self._settle()

    def _start_timer(self, delay_s: float, then: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(delay_s, then)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _never_tried(request: LiveRequest, patience_s: float) -> Refused:
    return Refused(
        503,
        "engine_lost_repeatedly",
        f"{len(request.losses.crashes)} engines died while they had this request; it could not be tried alone within {patience_s:.0f} s",
        hint="send it again when there is less to do, or raise [resume] max_wait_s",
        retry_after_s=30,
    )


def _like_never_tried(patience_s: float) -> Refused:
    return Refused(
        503,
        "engine_lost_repeatedly",
        f"engines died while they had a request with the same body; whether of it was not found out within {patience_s:.0f} s",
        hint="send it again when there is less to do, or raise [resume] max_wait_s",
        retry_after_s=30,
    )
