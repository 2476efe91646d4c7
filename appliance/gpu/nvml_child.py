"""`python -m appliance.gpu.nvml_child`: answers questions to NVML, a line of JSON each, until its input ends.

A process of its own because NVML may hang in the kernel. A question is `{"number": N, "leave": [PCI addresses], "processes": BOOL}`: those
cards are not touched, and the answer carries the same number, so that one that nobody waited for is not taken for the next.
NVML is initialised and the cards are enumerated once, by the first question; after that each card is asked through its own handle,
so that a card that is lost later is never involved again. Where NVML cannot be initialised, the answer says why and the process ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from appliance.gpu.cards import normal_address

NO_LIBRARY = 12
Json = dict[str, Any]


def main() -> None:
    """One line in, one line out."""
    try:
        import pynvml
    except ImportError:
        _say({"code": NO_LIBRARY, "problem": "the Python package nvidia-ml-py is not installed"})
        return
    cards: dict[str, tuple[Any, Json]] | None = None
    for line in sys.stdin:
        question = json.loads(line)
        number, leave = question["number"], frozenset(question["leave"])
        try:
            if cards is None:
                pynvml.nvmlInit()
                driver, cards = str(pynvml.nvmlSystemGetDriverVersion()), _enumerate(pynvml)
        except pynvml.NVMLError as error:
            _say({"number": number, "code": int(error.value), "problem": str(error)})
            return
        asked = [card for address, card in cards.items() if address not in leave]
        gpus = [facts | _now(pynvml, handle) | (_holders(pynvml, handle) if question["processes"] else {}) for handle, facts in asked]
        _say({"number": number, "code": 0, "problem": "", "driver": driver, "gpus": gpus})


def _say(answer: Json) -> None:
    print(json.dumps(answer), flush=True)


def _enumerate(pynvml: Any) -> dict[str, tuple[Any, Json]]:
    """Address → handle and what never changes; a card that gives no handle stands under its index, with the reason."""
    cards: dict[str, tuple[Any, Json]] = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            address = normal_address(_text(pynvml.nvmlDeviceGetPciInfo(handle).busId)) or str(index)
            facts = {
                "address": address, "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)), "name": _text(pynvml.nvmlDeviceGetName(handle)),
                "nvlinks": _nvlinks(pynvml, handle),
            }  # fmt: skip
            cards[address] = (handle, facts)
        except pynvml.NVMLError as error:
            cards[str(index)] = (None, {"code": int(error.value), "problem": str(error)})
    return cards


def _now(pynvml: Any, handle: Any) -> Json:
    """What changes. Memory is what counts: without it the card is one that does not answer."""
    if handle is None:
        return {}
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        return {"code": int(error.value), "problem": str(error)}
    watts = _maybe(pynvml, lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)
    return {
        "total_bytes": int(memory.total),
        "free_bytes": int(memory.free),
        "used_bytes": int(memory.used),
        "persistence": _maybe(pynvml, lambda: bool(pynvml.nvmlDeviceGetPersistenceMode(handle))),
        "temperature_c": _maybe(pynvml, lambda: int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))),
        "power_w": watts,
        "pcie_generation": _maybe(pynvml, lambda: int(pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle))),
        "pcie_width": _maybe(pynvml, lambda: int(pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle))),
        "pcie_replays": _maybe(pynvml, lambda: int(pynvml.nvmlDeviceGetPcieReplayCounter(handle))),
    }


def _nvlinks(pynvml: Any, handle: Any) -> int | None:
    """How many are up; None where it has none, or the driver does not say. A card without a bridge has them, all of them down."""

    def state_of(link: int) -> int | None:
        state: int | None = _maybe(pynvml, lambda: pynvml.nvmlDeviceGetNvLinkState(handle, link))
        return state

    states = [state_of(link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS)]
    known = [state for state in states if state is not None]
    return sum(state == pynvml.NVML_FEATURE_ENABLED for state in known) if known else None


def _holders(pynvml: Any, handle: Any) -> Json:
    """Who has memory of this card, as far as we may see them."""
    found = None if handle is None else _maybe(pynvml, lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle))
    return {"processes": [int(process.pid) for process in found or ()]}


def _maybe(pynvml: Any, ask: Callable[[], Any]) -> Any:
    """Not every card supports everything: an absent number, not a fault."""
    try:
        return ask()
    except pynvml.NVMLError:
        return None


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    main()
