"""What several engines are together, for who reads no further: one publication and one status out of theirs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from appliance.core.publication import Publication
from appliance.core.states import ANSWERING, EngineState

NEAREST = (
    EngineState.SERVING, EngineState.DEGRADED, EngineState.PROVING, EngineState.STARTING, EngineState.PLANNING, EngineState.BACKOFF,
    EngineState.WAITING_FOR_GPU, EngineState.DRAINING, EngineState.PARKED, EngineState.STOPPED,
)  # fmt: skip
"""States by how near to serving they are: one that is on its way is nearer than one that only ends what runs."""
Json = Mapping[str, Any]


def shown(each: Sequence[Publication]) -> int:
    """The index of the one that stands for all: the nearest to serving, of several the first that can be reached."""
    return min(range(len(each)), key=lambda index: (NEAREST.index(each[index].state), each[index].endpoint is None, index))


def summed(each: Sequence[Publication], cards: Sequence[str], before_generation: int = 0) -> Publication:
    """The outer publication of several.

    Args:
        cards: their addresses.
        before_generation: what the sum of the generations is to be counted from, so that it goes on where another layout ended.
    """
    first = each[shown(each)]
    troubled = [index for index, one in enumerate(each) if one.state is not EngineState.SERVING]
    waits = [one.retry_after_s for one in each if one.retry_after_s is not None]
    incidents = [one.incident_id for one in each if one.incident_id is not None]
    return Publication(
        state=first.state if first.state is not EngineState.SERVING or not troubled else EngineState.DEGRADED,
        generation=before_generation + sum(one.generation for one in each),
        endpoint=first.endpoint,
        limits=first.limits,
        reason=_reason(each, cards, troubled),
        retry_after_s=min(waits) if waits and first.state not in ANSWERING else None,
        incident_id=max(incidents, default=None),  # they are sortable by time
        replicas=tuple(each),
    )


def _reason(each: Sequence[Publication], cards: Sequence[str], troubled: Sequence[int]) -> str:
    sentences = {one.reason for one in each}
    if len(sentences) == 1 and troubled:
        return sentences.pop()  # all of them stop, or wait for the same
    count, answering = len(each), sum(one.state in ANSWERING for one in each)
    return "; ".join((_counted(answering, count), *(f"card {cards[index]}: {each[index].reason}" for index in troubled)))


def _counted(answering: int, count: int) -> str:
    if answering == count:
        return f"{count} engines serve, each on a card of its own"
    return f"{answering or 'none'} of {count} engines {'serves' if answering == 1 else 'serve'}"


def summed_status(each: Sequence[Json], cards: Sequence[str], outer: Publication) -> dict[str, Any]:
    """Theirs as one: the fields of the one that stands for all, what can be added added, and each in full under `replicas`."""
    told = sorted((one["last_incident"] for one in each if one["last_incident"]), key=lambda incident: float(incident["time_s"]))
    xids: Counter[str] = Counter()
    for one in each:
        xids.update(one["xids"])
    return {
        **each[shown(outer.replicas)],
        "state": outer.state.value,
        "generation": outer.generation,
        "sentence": outer.reason,
        "restarts": sum(one["restarts"] for one in each),
        "last_incident": told[-1] if told else None,
        "sensors": {name: _sensor(name, each, cards) for name in _names(one["sensors"] for one in each)},
        "xids": dict(sorted(xids.items(), key=lambda item: int(item[0]))),
        "replicas": [{"card": card, **one} for card, one in zip(cards, each, strict=True)],
    }


def _sensor(name: str, each: Sequence[Json], cards: Sequence[str]) -> dict[str, Any]:
    found = {card: one["sensors"][name] for card, one in zip(cards, each, strict=True) if name in one["sensors"]}
    details = {reading["detail"] for reading in found.values()}
    told = details.pop() if len(details) == 1 else "; ".join(f"card {card}: {reading['detail']}" for card, reading in found.items())
    return {"ok": all(reading["ok"] for reading in found.values()), "detail": told}


def _names(tables: Iterable[Json]) -> list[str]:
    """Of all of them, in their order."""
    return list(dict.fromkeys(name for table in tables for name in table))
