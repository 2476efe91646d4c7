"""What the HTTP side knows of this engine life: loading, ready or draining, and who is being served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from appliance.core.launch import EngineLimits
from appliance.engine.api.errors import no_engine
from appliance.engine.api.metrics import HttpMetrics
from appliance.engine.messages import Engine
from appliance.engine.text import ModelText

DEFAULT_MAX_BODY_BYTES = 32 * 1024**2


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The model, once it can answer."""

    engine: Engine
    text: ModelText

    @property
    def limits(self) -> EngineLimits:
        """As published."""
        return self.engine.limits


class Service:
    """The state that the endpoints share. Written by server.py, in the event loop's thread only.

    Attributes:
        max_body_bytes: larger request bodies get 413.
        model: None while it loads.
        draining: what runs may finish, nothing new begins.
        metrics: counted by the endpoints.
    """

    def __init__(self, max_body_bytes: int = DEFAULT_MAX_BODY_BYTES) -> None:
        self.max_body_bytes = max_body_bytes
        self.model: LoadedModel | None = None
        self.draining = False
        self.metrics = HttpMetrics()
        self._active = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        """Requests between their admission and their last byte."""
        return self._active

    @property
    def status(self) -> str:
        """The word in /health."""
        if self.draining:
            return "draining"
        return "loading" if self.model is None else "ok"

    def loaded(self) -> LoadedModel:
        """The model.

        Raises:
            ApiError: 503 while there is none, or while the engine stops.
        """
        if self.draining:
            raise no_engine("the engine is stopping and takes no new requests; send it again in a moment", "engine_draining")
        if self.model is None:
            raise no_engine("the model is still loading; send it again in a moment", "model_loading")
        return self.model

    @contextlib.contextmanager
    def admitted(self) -> Iterator[LoadedModel]:
        """Around one request: a drain waits for it.

        Raises:
            ApiError: as `loaded`.
        """
        model = self.loaded()
        self._active += 1
        self._idle.clear()
        try:
            yield model
        finally:
            self._active -= 1
            if self._active == 0:
                self._idle.set()

    async def until_idle(self) -> None:
        """Return once nobody is being served."""
        await self._idle.wait()
