"""What one key may use a minute. The clock is passed in."""

from __future__ import annotations

from dataclasses import dataclass, field

from appliance.config.api_keys import ApiKey
from appliance.gateway.envelope import Refused

MINUTE_S = 60.0


@dataclass(slots=True)
class Allowance:
    """So many units a minute; a minute's worth can be saved up. It can be overdrawn: then nothing goes until it is paid back."""

    left: float | None = None
    as_of_s: float = 0.0

    def wait_s(self, per_minute: int, now_s: float) -> float:
        """How long until there is anything left; 0: there is."""
        self._refill(per_minute, now_s)
        assert self.left is not None
        return 0.0 if self.left >= 1 else (1 - self.left) * MINUTE_S / per_minute

    def spend(self, per_minute: int, units: float, now_s: float) -> None:
        """Units are gone, whether there are so many or not."""
        self._refill(per_minute, now_s)
        assert self.left is not None
        self.left -= units

    def _refill(self, per_minute: int, now_s: float) -> None:
        if self.left is None:
            self.left = per_minute
        else:
            self.left = min(per_minute, self.left + (now_s - self.as_of_s) * per_minute / MINUTE_S)
        self.as_of_s = now_s


@dataclass(slots=True)
class _Used:
    requests: Allowance = field(default_factory=Allowance)
    tokens: Allowance = field(default_factory=Allowance)


class KeyLimits:
    """The allowances of all keys. They outlive a reload of the file: nobody is given a fresh minute by it."""

    def __init__(self) -> None:
        self._used: dict[str, _Used] = {}

    def admit(self, entry: ApiKey, now_s: float) -> None:
        """One more request of this key.

        Raises:
            Refused: 429 with the time after which there is an allowance again.
        """
        if not entry.requests_per_minute and not entry.tokens_per_minute:
            return
        used = self._used.setdefault(entry.name, _Used())
        if entry.tokens_per_minute:
            wait_s = used.tokens.wait_s(entry.tokens_per_minute, now_s)
            if wait_s:
                raise _used_up(entry, "tokens_per_minute", entry.tokens_per_minute, wait_s)
        if entry.requests_per_minute:
            wait_s = used.requests.wait_s(entry.requests_per_minute, now_s)
            if wait_s:
                raise _used_up(entry, "requests_per_minute", entry.requests_per_minute, wait_s)
            used.requests.spend(entry.requests_per_minute, 1, now_s)

    def spent(self, entry: ApiKey, tokens: int, now_s: float) -> None:
        """A request of this key took so many tokens, prompt and answer."""
        if entry.tokens_per_minute:
            self._used.setdefault(entry.name, _Used()).tokens.spend(entry.tokens_per_minute, tokens, now_s)


def _used_up(entry: ApiKey, limit: str, per_minute: int, wait_s: float) -> Refused:
    return Refused(
        429,
        "rate_limit_exceeded",
        f"the key {entry.name!r} has used up its {limit} of {per_minute}; the next request can come in {wait_s:.1f} s",
        hint=f"wait so long, or raise {limit} in the key's entry",
        retry_after_s=wait_s,
    )
