"""Bodies that have killed engines, by fingerprint: which are refused, and which are suspected though their client left.

Fingerprints are keyed hashes (inflight.py); nothing of a text is kept. In memory: a restart of the gateway forgets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from appliance.gateway.envelope import Refused
from appliance.gateway.resume import LifeName

KEPT_MAX = 10_000
SUSPICION_TTL_S = 3600.0
"""A client that lost two engines and left will try again within this, if ever."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """Of one body.

    Attributes:
        lives: engines that died of it.
        incident_id: of the last one, when it was alone.
    """

    until_s: float
    lives: int
    incident_id: str | None


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Of one body: the engines that died while it got no further, whichever of its clients' requests was with them."""

    until_s: float
    crashes: tuple[LifeName, ...]


class Quarantine:
    """Owns both tables. Empty, as it nearly always is, it costs a request nothing."""

    def __init__(self, ttl_s: float, now_s: Callable[[], float]) -> None:
        self._ttl_s = ttl_s
        self._now_s = now_s
        self._sentences: dict[str, Sentence] = {}
        self._suspicions: dict[str, Suspicion] = {}

    def __bool__(self) -> bool:
        return bool(self._sentences or self._suspicions)

    def __len__(self) -> int:
        """Bodies that are refused now."""
        self._forget_expired()
        return len(self._sentences)

    def convict(self, fingerprint: str, lives: int, incident_id: str | None) -> Refused:
        """An engine died with this alone. Returns what its client is told."""
        self._suspicions.pop(fingerprint, None)
        if self._ttl_s > 0:
            _make_room(self._sentences)
            self._sentences[fingerprint] = Sentence(self._now_s() + self._ttl_s, lives, incident_id)
        return Refused(
            500,
            "request_quarantined",
            f"{lives} engines died in a row while they had this request, the last one while it had nothing else",
            hint=f"do not send it again: for {self._ttl_s:g} s it is refused; `appliancectl incidents` has the evidence",
            incident_id=incident_id,
        )

    def refusal(self, fingerprint: str) -> Refused | None:
        """What a client with this body is told, if it is refused."""
        self._forget_expired()
        sentence = self._sentences.get(fingerprint)
        if sentence is None:
            return None
        left_s = sentence.until_s - self._now_s()
        return Refused(
            422,
            "request_quarantined",
            f"{sentence.lives} engines died in a row while they had a request like this, the last one while it had nothing else;"
            f" it is refused for another {left_s:.0f} s",
            hint="change the request, or lower [resume] quarantine_ttl_s",
            incident_id=sentence.incident_id,
        )

    def remember(self, fingerprint: str, crashes: list[LifeName]) -> None:
        """Its client is gone, or was told that it is lost; what is suspected of it is not forgotten, nor what was before it."""
        together = dict.fromkeys((*self.suspicion(fingerprint), *crashes))
        self._suspicions.pop(fingerprint, None)  # the oldest go first, and this one is new again
        _make_room(self._suspicions)
        self._suspicions[fingerprint] = Suspicion(self._now_s() + SUSPICION_TTL_S, tuple(together))

    def suspicion(self, fingerprint: str) -> tuple[LifeName, ...]:
        """The crashes that a new request with this body brings along."""
        self._forget_expired()
        suspicion = self._suspicions.get(fingerprint)
        return suspicion.crashes if suspicion is not None else ()

    def clear(self, fingerprint: str) -> None:
        """It was answered."""
        self._suspicions.pop(fingerprint, None)

    def _forget_expired(self) -> None:
        now_s = self._now_s()
        for table in (self._sentences, self._suspicions):
            for fingerprint in [name for name, entry in table.items() if entry.until_s <= now_s]:
                del table[fingerprint]


def _make_room(table: dict[str, Sentence] | dict[str, Suspicion]) -> None:
    while len(table) >= KEPT_MAX:
        del table[next(iter(table))]
