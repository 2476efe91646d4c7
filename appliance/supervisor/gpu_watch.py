"""The cards: waiting for them as configured and as the backend needs, and hearing that one is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import structlog

from appliance.backends import Backend
from appliance.config.schema import Config
from appliance.core.errors import ApplianceError, ConfigError
from appliance.core.launch import LaunchSpec
from appliance.core.plan import GpuFacts
from appliance.core.units import MIB, format_bytes
from appliance.gpu import readiness
from appliance.gpu.cards import cards_on_bus
from appliance.gpu.lost_cards import LossReader, card_named_in, silences_card
from appliance.gpu.nvml import GPU_IS_LOST, NvmlGpu, NvmlReport
from appliance.planner.gpus import card_facts
from appliance.supervisor import events as ev
from appliance.supervisor import fits_card, proc_table
from appliance.supervisor.box import Box
from appliance.supervisor.evidence_desk import EvidenceDesk
from appliance.supervisor.life import Post, Start
from appliance.supervisor.memory_room import Look

MEMORY_BACK_S = 5.0
MEMORY_POLL_S = 0.05
HELD_MIN_BYTES = 512 * MIB
"""Less is what drivers and desktops come and go with."""
SAME_LOSS_S = 10.0
"""The driver says it in several wordings; one that names no card, so soon after another, is the same news."""


log = structlog.get_logger()


class GpuWatch:
    """Owns the task that watches, one at a time."""

    def __init__(self, backend: Backend, box: Box, desk: EvidenceDesk, post: Post, start: Start) -> None:
        self._backend = backend
        self._desk = desk
        self._roots = box.roots
        self._ledger = box.cards
        self._nvml = box.nvml
        self._refusal = box.refusal
        self._left_behind = box.groups.left_behind
        self._post = post
        self._start = start
        self._losses = LossReader()
        self._lost_s = float("-inf")
        self._lost_last: str | None = None
        self._silenced: frozenset[str] = frozenset()
        self._empty_bytes: dict[str, int] = {}
        """In use on each card while no engine of ours was alive."""
        self._empty: tuple[NvmlGpu, ...] = ()
        self._task: asyncio.Task[None] | None = None
        self.words = "not looked at yet"
        """What was found last, for the status."""

    def begin(self, config: Config, *, have_served: bool) -> None:
        """Answers with GpuWaiting, then GpuReady, NoGpu or CardsGone. Cards that have served are not asked about, just looked for."""
        if self._task is not None:
            self._task.cancel()
        if not self._ledger.lost_anywhere and self._left_behind():  # on a lost card a corpse holds nothing that is wanted
            self._task = self._start(self._begin_alone(config, have_served), "gpu", ev.GpuWaiting("our watch failed by a defect"))
            return
        mode = config.gpu.mode
        if mode == "off":
            self._none("gpu.mode is off")
        elif mode == "auto" and not self._backend.uses_gpu:
            seen = "an NVIDIA card is present, but" if cards_on_bus(self._roots) else "no NVIDIA card, and"
            self._none(f"{seen} the {self._backend.name} engine computes on the CPU")
        else:
            defect = ev.GpuWaiting("our watch of the cards failed by a defect")
            self._task = self._start(self._watch(config.gpu.wait_s, None if have_served else self._ask_without_engine), "gpu", defect)

    def hear(self, text: str, *, replayed: bool) -> str | None:
        """A kernel message, and which card it is about. Replayed ones are remembered; what happened before we came ends nothing.

        With a card of several, the loss of another is another's news; and one that names no card is left to NVML, which is asked each
        second: better so than that every engine ends for one card.
        """
        silenced = silences_card(text)
        if silenced is not None:
            self._silenced |= {silenced}
        loss = self._losses.read(text)
        if loss is None:
            return card_named_in(text)
        address = loss.address or self._only_card()
        if address is None and time.monotonic() - self._lost_s < SAME_LOSS_S:
            address = self._lost_last
        self._lost_s, self._lost_last = time.monotonic(), address
        if self._roots.only not in ("", address):
            return address
        news = address is None or self._ledger.note(address, loss.text, for_good=True)
        if news and not replayed:
            self._post(ev.GpuLost(loss.text))
        return address

    async def ask_nvml(self, *, processes: bool = False) -> NvmlReport:
        """Through the one reader, leaving alone who must be."""
        self._nvml.left = self._ledger.lost_anywhere | self._silenced
        report = await self._nvml.ask(processes=processes)
        for address in (*report.lost, *self._lost_unnamed(report)):
            if self._roots.concerns(address) and self._ledger.note(address, "NVML says that it is lost", for_good=True):
                self._desk.add_nvml_loss(address)
                self._post(ev.GpuLost(f"NVML says that the card at {address} is lost"))
        return replace(report, gpus=tuple(gpu for gpu in report.gpus if self._roots.concerns(gpu.address)))

    def _lost_unnamed(self, report: NvmlReport) -> tuple[str, ...]:
        """A child that was started after the loss gets no handle of the card, and so no address: it is the one that is missing."""
        unnamed = sum(gpu.code == GPU_IS_LOST and not gpu.address for gpu in report.gpus)
        named = {gpu.address for gpu in report.gpus} | self._nvml.left
        missing = tuple(card.address for card in cards_on_bus(self._roots.whole) if card.address not in named) if unnamed else ()
        return missing if len(missing) == unnamed else ()

    def card(self, uuid: str) -> GpuFacts | None:
        """What a card said of itself while no engine was on it; None where it was not asked."""
        for gpu in self._empty:
            if gpu.uuid == uuid:
                with contextlib.suppress(ApplianceError):  # too small for any model
                    return card_facts(gpu.name, gpu.total_bytes, gpu.free_bytes, gpu.uuid, gpu.address, gpu.nvlinks)
        return None

    def fitted(self, spec: LaunchSpec, config: Config) -> LaunchSpec:
        """Checked against driver and card, and kept off the cards that are not its own. Raises ConfigError for what could not start."""
        if self._refusal:
            raise ConfigError(self._refusal)
        checked = fits_card.checked(spec, self._backend, config, self.card(self._ledger.first_uuid), self._roots.proc)
        return replace(checked, env={**checked.env, **self._ledger.environment()})

    async def look(self) -> Look | None:
        """What is free on each card; None where NVML does not say."""
        report = await self.ask_nvml()
        free = {gpu.address: gpu.free_bytes for gpu in report.gpus if gpu.problem is None}
        return Look(free) if free else None

    @property
    def nvml_problem(self) -> str | None:
        """Why NVML says nothing now; None while it does, and where nobody needs it."""
        return self._nvml.problem

    def forgive(self) -> None:
        """A person asked for a new try."""
        self._silenced = frozenset(address for address in self._silenced if not self._roots.concerns(address))
        self._ledger.forgive()

    def _only_card(self) -> str | None:
        cards = cards_on_bus(self._roots.whole)
        return cards[0].address if len(cards) == 1 else None

    async def _watch(self, wait_s: float, ask_nvml: Callable[[], Awaitable[NvmlReport]] | None) -> None:
        def tell(answer: readiness.Readiness) -> None:
            self.words = f"{answer.code.value}: {answer.reason}"
            self._post(ev.GpuWaiting(self.words))

        answer = await readiness.wait(self._roots, wait_s, ask_nvml, tell, lambda: self._ledger.lost)
        if answer.ready:
            await self._until_memory_is_back()
        self.words = answer.reason
        if answer.code is readiness.Code.NO_GPU:
            self._none(answer.reason)
        elif answer.code is readiness.Code.GPU_LOST:
            self._post(ev.CardsGone(answer.reason))
        else:
            self._post(ev.GpuReady(answer.cards, answer.reason))

    async def _begin_alone(self, config: Config, have_served: bool) -> None:
        """Once nobody is left of the engine that an applianced before us had: two would share the memory of one."""
        while words := self._left_behind():
            self.words = f"processes of the engine before survive SIGKILL: {words}"
            self._post(ev.GpuWaiting(self.words))
            await asyncio.sleep(MEMORY_POLL_S)
        self._task = None
        self.begin(config, have_served=have_served)

    async def _ask_without_engine(self) -> NvmlReport:
        report = await self.ask_nvml()
        self._empty = tuple(gpu for gpu in report.gpus if gpu.problem is None)
        self._empty_bytes |= {gpu.address: gpu.used_bytes for gpu in self._empty}
        return report

    async def _until_memory_is_back(self) -> None:
        """The driver gives an engine's memory back some time after its last process is gone. Bounded; who still holds it is named."""
        began_s = time.monotonic()
        while self._empty_bytes and self._nvml.problem is None:
            report = await self.ask_nvml(processes=True)
            held = [(gpu, gpu.used_bytes - self._empty_bytes.get(gpu.address, gpu.used_bytes)) for gpu in report.gpus]
            words = "; ".join(_holding(gpu, bytes_) for gpu, bytes_ in held if bytes_ > HELD_MIN_BYTES)
            if not words:
                return
            self.words = words
            self._post(ev.GpuWaiting(words))
            if time.monotonic() - began_s > MEMORY_BACK_S:
                log.warning(f"starting although {words}")
                return
            await asyncio.sleep(MEMORY_POLL_S)

    def _none(self, reason: str) -> None:
        self.words = reason
        self._post(ev.NoGpu(reason))


def _holding(gpu: NvmlGpu, held_bytes: int) -> str:
    """Who keeps how much of a card from the next engine."""
    holders = [stat for pid in gpu.processes if (stat := proc_table.read_stat(pid)) is not None]
    by = f" by {proc_table.describe(holders)}" if holders else ""
    return f"{format_bytes(held_bytes)} of the card at {gpu.address} are still held{by}"
