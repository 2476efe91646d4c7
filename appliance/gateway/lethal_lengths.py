"""Lengths of prompts at which engines die, learned in two ways; they are refused for a while.

By trial: some kernels fail at certain lengths, whatever the words. Each such prompt costs engines until its own body is in
quarantine; when two different bodies of the very same length have been convicted, it is the length, and the next one is not
tried. By diagnosis: applianced finds that a length goes with crashes though no single request was convicted of them.
"""

from __future__ import annotations

from collections.abc import Callable

BODIES_MIN = 2
"""Different ones. That two killers have the same number of tokens by chance is less likely than one in a few hundred."""
LENGTHS_MAX = 1000
BY_TRIAL = "engines have died of different ones of this length, alone with each"


class LethalLengths:
    """In memory, as the quarantine is."""

    def __init__(self, ttl_s: float, now_s: Callable[[], float]) -> None:
        """`ttl_s`: how long a length is refused behind the last conviction or advice; 0: nothing is learned."""
        self._ttl_s = ttl_s
        self._now_s = now_s
        self._bodies: dict[int, set[str]] = {}
        self._until_s: dict[int, float] = {}
        self._why: dict[int, str] = {}

    def convicted(self, prompt_tokens: int, fingerprint: str) -> bool:
        """A body of so many tokens has killed engines. True: from now on the length is refused, and was not before."""
        if self._ttl_s <= 0:
            return False
        if prompt_tokens not in self._bodies and len(self._bodies) >= LENGTHS_MAX:
            del self._bodies[next(iter(self._bodies))]
        bodies = self._bodies.setdefault(prompt_tokens, set())
        bodies.add(fingerprint)
        return len(bodies) >= BODIES_MIN and self._fuse(prompt_tokens, BY_TRIAL)

    def advised(self, prompt_tokens: int, why: str) -> bool:
        """applianced says that this length goes with crashes. True: from now on it is refused, and was not before."""
        return self._ttl_s > 0 and self._fuse(prompt_tokens, why)

    def current(self) -> dict[int, str]:
        """The lengths that are refused now, and why; the same object until that changes."""
        if self._until_s and min(self._until_s.values()) <= (now_s := self._now_s()):
            self._until_s = {length: until_s for length, until_s in self._until_s.items() if until_s > now_s}
            self._why = {length: self._why[length] for length in self._until_s}
        return self._why

    def _fuse(self, prompt_tokens: int, why: str) -> bool:
        known = prompt_tokens in self.current()
        if not known and len(self._why) >= LENGTHS_MAX:
            return False
        self._until_s[prompt_tokens] = self._now_s() + self._ttl_s
        self._why = {**self._why, prompt_tokens: why}
        return not known
