"""How the cards are shared out among engines (`[gpu] layout`): one engine for all of them, or one a card. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from appliance.config.schema import Config
from appliance.core.units import GIB, MIB, format_bytes
from appliance.planner.between_cards import shared_out

HOST_MEMORY_OPTIONS = {
    "--hicache-size": 10**9,  # SGLang counts its host pool in billions
    "--cpu-offload-gb": GIB,
    "--swap-space": GIB,
    "--kv-offloading-size": GIB,
    "--cache-ram": MIB,
    "-cram": MIB,
}
"""Of engines on cards: what they take of the machine's memory because they were told to, and in which unit."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What of the machine is shared out. `cards`: addresses, in the bus's order, the lost ones among them."""

    cards: tuple[str, ...]
    cores: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Share:
    """One engine's card. `refusal`: why it gets no engine; empty where it does."""

    card: str
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """What came out.

    Attributes:
        shares: one an engine, by card; empty: there is one engine.
        tensor_parallel: over how many cards an engine goes; None: as configured.
        threads: of an engine that computes on the CPU; None: as configured.
        words: what the owner should know; empty: nothing.
    """

    shares: tuple[Share, ...] = ()
    tensor_parallel: int | None = None
    threads: int | None = None
    words: str = ""

    def of(self, config: Config) -> Config:
        """The configuration as an engine of this layout gets it; of a later one too."""
        engine = config.engine
        if self.tensor_parallel is not None:
            engine = replace(engine, tensor_parallel=self.tensor_parallel)
        if self.threads is not None and not engine.threads:
            engine = replace(engine, threads=self.threads)
        if not self.shares:
            return replace(config, engine=engine)
        # A reboot for one card would take the others' engines down: the fleet sees to it when all are gone.
        return replace(config, engine=replace(engine, weight_holder=False), supervisor=replace(config.supervisor, auto_reboot="never"))


def laid_out(config: Config, machine: Machine, *, uses_gpu: bool) -> Layout:
    """`uses_gpu`: of the configured engine, where it is not told otherwise by gpu.mode."""
    layout, count = config.gpu.layout, len(machine.cards)
    sharing = shared_out(layout, count, config.engine.tensor_parallel)
    if sharing.tensor_parallel != config.engine.tensor_parallel and sharing.engines == 1:
        return Layout(tensor_parallel=sharing.tensor_parallel, words=f"one engine over {count} cards (gpu.layout = tp)")
    if layout != "replicas":
        return Layout()
    if config.gpu.mode == "off" or not (uses_gpu or config.gpu.mode == "required"):
        why = "gpu.mode is off" if config.gpu.mode == "off" else f"the {config.engine.backend} engine computes on the CPU"
        return Layout(words=f"one engine, although gpu.layout is replicas, because {why}")
    if count < 2:
        seen = "one card" if count else "no card"
        return Layout(words=f"one engine, although gpu.layout is replicas, because this machine has {seen}")
    without = "; engine.weight_holder is off, for each would hold the weights once more" if config.engine.weight_holder else ""
    return Layout(
        shares=_shares(config, machine),
        tensor_parallel=1,
        threads=max(1, machine.cores // count),
        words=f"an engine on each of {count} cards (gpu.layout = replicas){without}",
    )


def _shares(config: Config, machine: Machine) -> tuple[Share, ...]:
    """The machine's memory goes round in the order of the cards; who comes too late is told."""
    each_bytes, asked = host_memory(config)
    count = len(machine.cards)
    fitting = max(1, machine.memory_bytes // each_bytes) if each_bytes else count
    refusal = (
        f"no engine is started here because {count} of them would take {count} times {format_bytes(each_bytes)} of the machine's memory "
        f"({asked}), which is {format_bytes(machine.memory_bytes)}, enough for {fitting}; ask for less, or set gpu.layout to single"
    )
    return tuple(Share(card, refusal if index >= fitting else "") for index, card in enumerate(machine.cards))


def host_memory(config: Config) -> tuple[int, str]:
    """What one engine takes of the machine's memory because the owner says so, and by which words; 0 where nothing is said."""
    engine = config.engine
    if engine.backend == "native":
        pool, swap = format_bytes(engine.kv_pool_bytes), format_bytes(engine.swap_bytes)
        return engine.kv_pool_bytes + engine.swap_bytes, f"engine.kv_pool_bytes = {pool} and engine.swap_bytes = {swap}"
    total_bytes, said = 0, []
    for option, value in _options(engine.extra_args):
        if option in HOST_MEMORY_OPTIONS and _is_number(value):
            total_bytes += round(float(value) * HOST_MEMORY_OPTIONS[option])
            said.append(f"{option} {value}")
    return max(0, total_bytes), ", ".join(said)


def _options(words: Sequence[str]) -> list[tuple[str, str]]:
    """ "--name value" and "--name=value" alike."""
    following = [*words, ""][1:]
    return [
        (word.partition("=")[0], word.partition("=")[2] or after) for word, after in zip(words, following, strict=True) if word[:1] == "-"
    ]


def _is_number(text: str) -> bool:
    try:
        return float(text) < 1e9  # beyond any machine; also neither infinite nor no number
    except ValueError:
        return False
