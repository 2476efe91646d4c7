"""The machine around the engines, of which there is one however many they are: kernel log, NVML, lost cards, process groups."""

from __future__ import annotations

from dataclasses import dataclass, replace

from appliance.config.schema import Config
from appliance.gpu.cards import Roots
from appliance.gpu.kernel_ears import KernelEars
from appliance.gpu.kernel_log import KernelLog
from appliance.gpu.nvml import NvmlReader
from appliance.supervisor.card_ledger import CardLedger
from appliance.supervisor.groups import Delegation, Groups
from appliance.supervisor.incidents import IncidentStore


@dataclass(frozen=True, slots=True)
class Box:
    """What one supervisor sees of the machine: all of it, or what belongs to one card of several (`of_card`).

    Attributes:
        refusal: why no engine may be started here; empty where one may.
    """

    roots: Roots
    ears: KernelEars
    nvml: NvmlReader
    cards: CardLedger
    groups: Groups
    refusal: str = ""

    @classmethod
    def of(
        cls,
        config: Config,
        store: IncidentStore,
        *,
        roots: Roots | None = None,
        nvml: NvmlReader | None = None,
        delegation: Delegation | None = None,
        adopts_orphans: bool = False,
    ) -> Box:
        """The whole machine. `roots` and `nvml`: others in tests."""
        ears, found = KernelEars(KernelLog(config.diagnosis.kernel_log)), roots or Roots()
        cards = CardLedger(found, ears.log.boot_id, store)
        return cls(found, ears, nvml or NvmlReader(), cards, Groups(delegation, adopts_orphans=adopts_orphans))

    def of_card(self, index: int, address: str, refusal: str = "") -> Box:
        """What belongs to one card. It is closed with the whole."""
        return replace(
            self,
            roots=replace(self.roots, only=address),
            cards=self.cards.of_card(address),
            groups=self.groups.of_replica(index),
            refusal=refusal,
        )

    def named(self, sentence: str) -> str:
        """A sentence for who may not see whose it is."""
        return f"card {self.roots.only}: {sentence}" if self.roots.only else sentence

    async def close(self) -> None:
        """Give back what there is once; nothing where this is a part."""
        if not self.roots.only:
            self.ears.stop()
            await self.nvml.close()
