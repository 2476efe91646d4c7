"""The cards that `appliancectl plan` plans for: how many, how they are shared out, and what is off between them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from appliance.cli.place import Place
from appliance.cli.plan_facts import AUTO, find_cards
from appliance.core.errors import ApplianceError
from appliance.core.plan import GpuFacts
from appliance.planner.between_cards import kept_off, shared_out
from appliance.planner.inputs import PlanInputError

LAYOUTS = ("auto", "single", "tp", "replicas")


@dataclass(frozen=True, slots=True)
class Cards:
    """One card of those that are alike, and what is made of them."""

    gpu: GpuFacts
    engines: int
    tensor_parallel: int
    off: frozenset[str]
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Wish:
    """What the command line says, and where it is about this box, what its configuration says beyond that."""

    layout: str = AUTO
    tensor_parallel: int = 1
    p2p: str = "auto"


def cards_for(place: Place, given: Mapping[str, Any], engine: str) -> Cards:
    """Of the options --gpu, --gpus, --layout, --tp and --p2p.

    Raises:
        PlanInputError: no such card, or more are wanted than there are.
    """
    counted = given["gpus"]
    if counted is not None and not 1 <= counted <= 1024:
        raise PlanInputError(f"{counted} cards cannot be", hint="--gpus takes a number from 1 to 1024")
    wish = _wish(place, given)
    gpu, count = find_cards(given["gpu_name"], engine, counted)
    if counted is not None and wish.tensor_parallel > counted:
        raise PlanInputError(f"a model over {wish.tensor_parallel} cards, of which there is {counted}", hint="lower --tp, or raise --gpus")
    if wish.layout in ("single", "replicas") and wish.tensor_parallel > 1:
        raise PlanInputError(
            f"layout {wish.layout} and a model over {wish.tensor_parallel} cards contradict each other", hint="use one of --tp and --layout"
        )
    sharing = shared_out(wish.layout, 1 if engine == "native" else count, wish.tensor_parallel)
    off = kept_off(gpu, sharing.tensor_parallel, engine, wish.p2p)
    return Cards(gpu, sharing.engines, sharing.tensor_parallel, off, _assumed(wish.layout, count, engine))


def _assumed(layout: str, count: int, engine: str) -> tuple[str, ...]:
    """Where a layout changes nothing, that is said."""
    if layout not in ("tp", "replicas") or (count > 1 and engine != "native"):
        return ()
    why = "the built-in engine is planned on the machine's memory" if engine == "native" else "there is one card"
    return (f"one engine, although the layout is {layout}, because {why} (--gpus)",)


def _wish(place: Place, given: Mapping[str, Any]) -> _Wish:
    """The configuration counts for this box's cards, and where cards are counted; a card of some other box is asked about alone."""
    here = _Wish()
    if (given["gpu_name"] == AUTO or given["gpus"] is not None) and place.config_file() is not None:
        with contextlib.suppress(ApplianceError):  # one that cannot be read is told by config check
            config = place.load().config
            here = _Wish(config.gpu.layout, config.engine.tensor_parallel, config.gpu.p2p)
    layout, tensor_parallel = given["layout"] or here.layout, given["tensor_parallel"]
    if tensor_parallel is None:  # each option wins over the configuration, the other key included that would contradict it
        tensor_parallel = here.tensor_parallel if given["layout"] in (None, "auto", "tp") else 1
    elif given["layout"] is None:
        layout = "auto"
    return _Wish(layout, tensor_parallel, given["p2p"] or here.p2p)
