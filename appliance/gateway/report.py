"""What the gateway tells applianced: the shapes of the requests that were in flight when something happened."""

from __future__ import annotations

import asyncio
import logging

from appliance.control.client import AsyncControl
from appliance.core.errors import ApplianceError
from appliance.core.requests import InflightRequest

log = logging.getLogger("gateway.report")

SHAPES_MAX = 1000
"""In one report; a frame of the control socket has an end."""
COLLECT_S = 0.2
"""Clients that leave within this of each other are reported together."""


class Reporter:
    """Sends in the background; what cannot be delivered is dropped, since the incident has been decided by then."""

    def __init__(self, control: AsyncControl) -> None:
        self._control = control
        self._tasks: set[asyncio.Task[None]] = set()
        self._left: list[InflightRequest] = []

    def upstream_lost(self, shapes: tuple[InflightRequest, ...]) -> None:
        """These were with the engine when it was lost."""
        self._send("upstream_lost", shapes)

    def client_left(self, shape: InflightRequest) -> None:
        """This client closed its connection before its answer was complete."""
        self._left.append(shape)
        if len(self._left) == 1:
            asyncio.get_running_loop().call_later(COLLECT_S, self._send_left)

    def close(self) -> None:
        """Give up what is still under way."""
        for task in self._tasks:
            task.cancel()
        self._control.close()

    def _send_left(self) -> None:
        left, self._left = tuple(self._left), []
        self._send("client_disconnect", left)

    def _send(self, kind: str, shapes: tuple[InflightRequest, ...]) -> None:
        task = asyncio.get_running_loop().create_task(self._deliver(kind, shapes))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, kind: str, shapes: tuple[InflightRequest, ...]) -> None:
        try:
            await self._control.report(kind, shapes[:SHAPES_MAX])
        except ApplianceError as error:
            log.debug("a report (%s, %d requests) was not delivered: %s", kind, len(shapes), error)
