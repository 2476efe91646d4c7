"""applianced with an engine on each of several cards, as a script says it: each engine is started, killed and published by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from appliance.control.server import ControlServer, Handler, PublicationBoard
from appliance.core.launch import EngineLimits
from appliance.core.publication import Publication
from appliance.supervisor.summing import summed
from tests.fakes.scripted_appliance import GatewayProcess, ScriptedAppliance, gateway


class _Part(PublicationBoard):
    """One engine's: what is posted here is told as part of the whole."""

    def __init__(self, first: Publication, changed: Callable[[], None]) -> None:
        super().__init__(first)
        self._told = changed

    def post(self, publication: Publication) -> None:
        """Replace the newest."""
        super().post(publication)
        self._told()


class ScriptedReplicas:
    """One control socket, several engines.

    Attributes:
        engines: by card; each does what ScriptedAppliance's own engine does.
        reports: what the gateway has told.
    """

    def __init__(self, run_dir: Path, count: int, max_running: int) -> None:
        self.run_dir = run_dir
        self.reports: list[Mapping[str, Any]] = []
        self.verbs: dict[str, Handler] = {}
        self.engines = []
        for index in range(count):
            folder = run_dir / str(index)
            folder.mkdir()
            engine = ScriptedAppliance(folder, max_running)
            engine.board = _Part(engine.board.current, self._post)
            self.engines.append(engine)
        self.board = PublicationBoard(self._whole())
        self.server: ControlServer | None = None

    async def listen(self) -> None:
        """Open the control socket."""
        self.server = ControlServer(self.run_dir / "control.sock", {"report": self._report, **self.verbs}, self.board)
        await self.server.start()

    async def hang_up(self) -> None:
        """Close the control socket."""
        if self.server is not None:
            await self.server.close()
            self.server = None

    async def close(self) -> None:
        """End everything."""
        await self.hang_up()
        for engine in self.engines:
            await engine.close()

    @contextlib.asynccontextmanager
    async def kept(self, *arguments: str, program: str) -> AsyncIterator[None]:
        """Whenever an engine dies, its next life is started."""
        keeping = [asyncio.create_task(engine.restart_whenever_it_dies(*arguments, program=program)) for engine in self.engines]
        try:
            yield
        finally:
            for task in keeping:
                task.cancel()
            await asyncio.gather(*keeping, return_exceptions=True)

    def _post(self) -> None:
        self.board.post(self._whole())

    def _whole(self) -> Publication:
        parts = [engine.board.current for engine in self.engines]
        return summed(parts, [f"0000:0{index}:00" for index in range(1, len(parts) + 1)])

    async def _report(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self.reports.append(arguments)
        return {}


@contextlib.asynccontextmanager
async def replicas(
    run_dir: Path,
    *settings: str,
    count: int = 2,
    max_running: int = 8,
    program: str = "upstream.py",
    each: Callable[[int], tuple[str, ...]] = lambda _: (),
    limits: Sequence[EngineLimits] = (),
) -> AsyncIterator[tuple[GatewayProcess, ScriptedReplicas]]:
    """A gateway, and engines that serve; `each`: an engine's arguments by its index; `limits`: theirs, if not the usual ones."""
    scripted = ScriptedReplicas(run_dir, count, max_running)
    for engine, one in zip(scripted.engines, limits, strict=False):
        engine.limits = one
    try:
        await scripted.listen()
        await asyncio.gather(*(engine.start_engine(*each(index), program=program) for index, engine in enumerate(scripted.engines)))
        async with gateway(run_dir, *settings) as running:
            await running.until(lambda status: [one["standing"] for one in status["engines"]] == ["open"] * count, "every engine serves")
            yield running, scripted
    finally:
        await scripted.close()
