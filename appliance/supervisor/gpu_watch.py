"""Waiting for the cards, as configured and as the backend needs."""

from __future__ import annotations

import asyncio

from appliance.backends import Backend
from appliance.config.schema import Config
from appliance.gpu import readiness
from appliance.gpu.nvml import NvmlProbe
from appliance.supervisor import events as ev
from appliance.supervisor.life import Post, Start


class GpuWatch:
    """Owns the task that watches, one at a time."""

    def __init__(self, backend: Backend, roots: readiness.Roots, nvml: NvmlProbe, post: Post, start: Start) -> None:
        self._backend = backend
        self._roots = roots
        self._post = post
        self._start = start
        self._nvml = nvml
        self._task: asyncio.Task[None] | None = None
        self.words = "not looked at yet"
        """What was found last, for the status."""

    def begin(self, config: Config) -> None:
        """Answers with GpuWaiting, then GpuReady or NoGpu."""
        if self._task is not None:
            self._task.cancel()
        mode = config.gpu.mode
        if mode == "off":
            self._none("gpu.mode is off")
        elif mode == "auto" and not self._backend.uses_gpu:
            seen = "an NVIDIA card is present, but" if readiness.nvidia_cards(self._roots) else "no NVIDIA card, and"
            self._none(f"{seen} the {self._backend.name} engine computes on the CPU")
        else:
            defect = ev.GpuWaiting("our watch of the cards failed by a defect")
            self._task = self._start(self._watch(config.gpu.wait_s), "gpu", defect)

    async def _watch(self, wait_s: float) -> None:
        def tell(answer: readiness.Readiness) -> None:
            self.words = f"{answer.code.value}: {answer.reason}"
            self._post(ev.GpuWaiting(self.words))

        answer = await readiness.wait(self._roots, wait_s, self._nvml.ask, tell)
        if answer.code is readiness.Code.NO_GPU:
            self._none(answer.reason)
        else:
            self.words = answer.reason
            self._post(ev.GpuReady(answer.cards, answer.reason))

    def _none(self, reason: str) -> None:
        self.words = reason
        self._post(ev.NoGpu(reason))
