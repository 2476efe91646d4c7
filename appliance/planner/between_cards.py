"""Engines and cards: how many of them share a model, and whether they may read each other's memory (docs/adr/0095-between-cards.md). Pure.

P2P is what NCCL uses where the driver grants it; the engines' own all-reduce is built on nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from appliance.core.plan import GpuFacts
from appliance.planner.gpus import short_name

WORDS = ("auto", "on", "off")
"""Of `gpu.p2p`."""
DIRECT = frozenset({"p2p", "custom_all_reduce"})
"""Features that stand on cards which read each other's memory."""
_WITH_DIRECT = ("sglang", "vllm")
_CONSUMER = re.compile(r"(?:rtx[2-9]0[5-9]0|gtx[0-9]{3,4}|titan)(?:ti|super|d|x|v|rtx|xp|laptop|gpu|[0-9]+g)*")


def is_consumer(card: str) -> bool:
    """GeForce, by any name that `plan --gpu` or NVML gives it. A card known by its size alone is not called one."""
    return "geforce" in card.lower() or _CONSUMER.fullmatch(short_name(card)) is not None


def kept_off(card: GpuFacts | None, cards: int, engine: str, word: str = "auto") -> frozenset[str]:
    """What the first rung of an engine over so many of these cards goes without.

    An NVLink bridge joins two cards: of more than two, some still meet over PCIe.
    """
    if cards < 2 or engine not in _WITH_DIRECT or word == "on":
        return frozenset()
    bridged = card is not None and bool(card.nvlinks) and cards == 2
    return DIRECT if word == "off" or (card is not None and is_consumer(card.name) and not bridged) else frozenset()


def why_off(card: GpuFacts, cards: int) -> str:
    """One line for whoever sees it in a launch line; empty where nothing about the cards asks for it."""
    if not kept_off(card, cards, "sglang"):
        return ""
    without = "without NVLink" if cards == 2 else "not all joined by NVLink"
    return (
        f"P2P and the engine's own all-reduce are off: with {cards} × {card.name} {without} they hang engines or reset machines where a "
        f'driver grants what it cannot do (gpu.p2p = "on" switches them on)'
    )


@dataclass(frozen=True, slots=True)
class Sharing:
    """`engines` side by side, each over `tensor_parallel` cards."""

    engines: int
    tensor_parallel: int


def shared_out(layout: str, cards: int, tensor_parallel: int = 1) -> Sharing:
    """What `gpu.layout` makes of so many cards. Who counted the cards of an engine is not corrected."""
    if layout == "replicas" and cards > 1:
        return Sharing(cards, 1)
    if layout == "tp" and tensor_parallel == 1 and cards > 1:
        return Sharing(1, cards)
    return Sharing(1, tensor_parallel)
