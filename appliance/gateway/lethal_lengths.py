"""Lengths of prompts at which engines die, learned from requests that were convicted of killing them.

Some kernels fail at certain lengths, whatever the words. Each such prompt costs engines until its own body is in quarantine;
when two different bodies of the very same length have been convicted, it is the length, and the next one is not tried.
"""

from __future__ import annotations

from collections.abc import Callable

BODIES_MIN = 2
"""Different ones. That two killers have the same number of tokens by chance is less likely than one in a few hundred."""
LENGTHS_MAX = 1000


class LethalLengths:
    """In memory, as the quarantine is."""

    def __init__(self, ttl_s: float, now_s: Callable[[], float]) -> None:
        """`ttl_s`: how long a length is refused behind the last conviction; 0: nothing is learned."""
        self._ttl_s = ttl_s
        self._now_s = now_s
        self._bodies: dict[int, set[str]] = {}
        self._until_s: dict[int, float] = {}

    def convicted(self, prompt_tokens: int, fingerprint: str) -> bool:
        """A body of so many tokens has killed engines. True: from now on the length is refused, and was not before."""
        if self._ttl_s <= 0:
            return False
        if prompt_tokens not in self._bodies and len(self._bodies) >= LENGTHS_MAX:
            del self._bodies[next(iter(self._bodies))]
        bodies = self._bodies.setdefault(prompt_tokens, set())
        bodies.add(fingerprint)
        if len(bodies) < BODIES_MIN:
            return False
        known = prompt_tokens in self.current()
        self._until_s[prompt_tokens] = self._now_s() + self._ttl_s
        return not known

    def current(self) -> frozenset[int]:
        """The lengths that are refused now."""
        if not self._until_s:
            return _NONE
        now_s = self._now_s()
        self._until_s = {length: until_s for length, until_s in self._until_s.items() if until_s > now_s}
        return frozenset(self._until_s)


_NONE: frozenset[int] = frozenset()
