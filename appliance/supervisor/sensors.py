"""What applianced hears with, in the words of the status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from appliance.supervisor.card_ledger import CardLedger


def sensors_of(problems: Mapping[str, str | None], cards: CardLedger, gpu_words: str, *, delegated: bool) -> dict[str, dict[str, Any]]:
    """Name → whether it works, and what is wrong."""
    heard = {name: {"ok": problem is None, "detail": problem or "works"} for name, problem in problems.items()}
    held = "each engine is held by a cgroup of its own" if delegated else "no cgroup is delegated: engines are held by their session"
    lost = {"ok": not cards.lost, "detail": "; ".join(filter(None, (cards.words, gpu_words)))}
    return heard | {"gpu": lost, "cgroup": {"ok": delegated, "detail": held}}
