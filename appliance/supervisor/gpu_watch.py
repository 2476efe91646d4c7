"""The cards: waiting for them as configured and as the backend needs, and hearing that one is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from appliance.backends import Backend
from appliance.config.schema import Config
from appliance.gpu import readiness
from appliance.gpu.cards import Roots, cards_on_bus
from appliance.gpu.lost_cards import LossReader, card_named_in, silences_card
from appliance.gpu.nvml import NvmlReader, NvmlReport
from appliance.supervisor import events as ev
from appliance.supervisor.card_ledger import CardLedger
from appliance.supervisor.evidence_desk import EvidenceDesk
from appliance.supervisor.life import Post, Start

SAME_LOSS_S = 10.0
"""The driver says it in several wordings; one that names no card, so soon after another, is the same news."""


class GpuWatch:
    """Owns the NVML reader, and the task that watches, one at a time."""

    def __init__(
        self, backend: Backend, roots: Roots, ledger: CardLedger, nvml: NvmlReader, desk: EvidenceDesk, post: Post, start: Start
    ) -> None:
        self._backend = backend
        self._desk = desk
        self._roots = roots
        self._ledger = ledger
        self._nvml = nvml
        self._post = post
        self._start = start
        self._losses = LossReader()
        self._lost_s = float("-inf")
        self._lost_last: str | None = None
        self._silenced: frozenset[str] = frozenset()
        self._task: asyncio.Task[None] | None = None
        self.words = "not looked at yet"
        """What was found last, for the status."""

    def begin(self, config: Config, *, have_served: bool) -> None:
        """Answers with GpuWaiting, then GpuReady, NoGpu or CardsGone. Cards that have served are not asked about, just looked for."""
        if self._task is not None:
            self._task.cancel()
        mode = config.gpu.mode
        if mode == "off":
            self._none("gpu.mode is off")
        elif mode == "auto" and not self._backend.uses_gpu:
            seen = "an NVIDIA card is present, but" if cards_on_bus(self._roots) else "no NVIDIA card, and"
            self._none(f"{seen} the {self._backend.name} engine computes on the CPU")
        else:
            defect = ev.GpuWaiting("our watch of the cards failed by a defect")
            self._task = self._start(self._watch(config.gpu.wait_s, None if have_served else self.ask_nvml), "gpu", defect)

    def hear(self, text: str, *, replayed: bool) -> str | None:
        """A kernel message, and which card it is about. Replayed ones are remembered; what happened before we came ends nothing."""
        silenced = silences_card(text)
        if silenced is not None:
            self._silenced |= {silenced}
        loss = self._losses.read(text)
        if loss is None:
            return card_named_in(text)
        address = loss.address or self._only_card()
        if address is None and time.monotonic() - self._lost_s < SAME_LOSS_S:
            address = self._lost_last
        news = address is None or self._ledger.note(address, loss.text, for_good=True)
        self._lost_s, self._lost_last = time.monotonic(), address
        if news and not replayed:
            self._post(ev.GpuLost(loss.text))
        return address

    async def ask_nvml(self) -> NvmlReport:
        """Through the one reader, leaving alone who must be."""
        self._nvml.left = self._ledger.lost | self._silenced
        report = await self._nvml.ask()
        for address in report.lost:
            if self._ledger.note(address, "NVML says that it is lost", for_good=True):
                self._desk.add_nvml_loss(address)
                self._post(ev.GpuLost(f"NVML says that the card at {address} is lost"))
        return report

    @property
    def nvml_problem(self) -> str | None:
        """Why NVML says nothing now; None while it does, and where nobody needs it."""
        return self._nvml.problem

    def forgive(self) -> None:
        """A person asked for a new try."""
        self._silenced = frozenset()
        self._ledger.forgive()

    async def close(self) -> None:
        """End the NVML child."""
        await self._nvml.close()

    def _only_card(self) -> str | None:
        cards = cards_on_bus(self._roots)
        return cards[0].address if len(cards) == 1 else None

    async def _watch(self, wait_s: float, ask_nvml: Callable[[], Awaitable[NvmlReport]] | None) -> None:
        def tell(answer: readiness.Readiness) -> None:
            self.words = f"{answer.code.value}: {answer.reason}"
            self._post(ev.GpuWaiting(self.words))

        answer = await readiness.wait(self._roots, wait_s, ask_nvml, tell, lambda: self._ledger.lost)
        self.words = answer.reason
        if answer.code is readiness.Code.NO_GPU:
            self._none(answer.reason)
        elif answer.code is readiness.Code.GPU_LOST:
            self._post(ev.CardsGone(answer.reason))
        else:
            self._post(ev.GpuReady(answer.cards, answer.reason))

    def _none(self, reason: str) -> None:
        self.words = reason
        self._post(ev.NoGpu(reason))
