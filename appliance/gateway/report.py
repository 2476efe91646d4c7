"""What the gateway tells applianced: the shapes of the requests that were in flight when something happened."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from appliance.control.client import AsyncControl
from appliance.core.errors import ApplianceError
from appliance.core.requests import InflightRequest

log = logging.getLogger("gateway.report")

SHAPES_MAX = 1000
"""In one report; a frame of the control socket has an end."""
COLLECT_S = 0.2
"""What comes within this of each other is reported together."""


class Reporter:
    """Sends in the background; what cannot be delivered is dropped, since the incident has been decided by then.

    `healthy`: the lengths of the last prompts that were answered. `advised` is called with what a report is answered with.
    """

    def __init__(self, control: AsyncControl, healthy: Sequence[int]) -> None:
        self._control = control
        self._healthy = healthy
        self._tasks: set[asyncio.Task[None]] = set()
        self._collected: dict[str, list[InflightRequest]] = {}
        self.advised: Callable[[object], None] = _nobody

    def upstream_lost(self, shapes: tuple[InflightRequest, ...]) -> None:
        """These were with the engine when it was lost."""
        self._send("upstream_lost", shapes)

    def client_left(self, shape: InflightRequest) -> None:
        """This client closed its connection before its answer was complete."""
        self._collect("client_disconnect", shape)

    def weighed(self, shape: InflightRequest) -> None:
        """This one was with an engine that was lost, and now its length is known."""
        self._collect("weighed", shape)

    def close(self) -> None:
        """Give up what is still under way."""
        for task in self._tasks:
            task.cancel()
        self._control.close()

    def _collect(self, kind: str, shape: InflightRequest) -> None:
        collected = self._collected.setdefault(kind, [])
        collected.append(shape)
        if len(collected) == 1:
            asyncio.get_running_loop().call_later(COLLECT_S, self._send_collected, kind)

    def _send_collected(self, kind: str) -> None:
        self._send(kind, tuple(self._collected.pop(kind)))

    def _send(self, kind: str, shapes: tuple[InflightRequest, ...]) -> None:
        more = {"lengths": list(self._healthy)} if kind == "weighed" else {}
        task = asyncio.get_running_loop().create_task(self._deliver(kind, shapes, more))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(self, kind: str, shapes: tuple[InflightRequest, ...], more: dict[str, Any]) -> None:
        try:
            answer = await self._control.report(kind, shapes[:SHAPES_MAX], **more)
        except ApplianceError as error:
            log.debug("a report (%s, %d requests) was not delivered: %s", kind, len(shapes), error)
            return
        self.advised(answer.get("fused_lengths"))


def _nobody(_: object) -> None:
    return
