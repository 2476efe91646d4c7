"""Memory as admission sees it: what the cards have left, and what the prefill of a prompt is planned to take. Pure.

A prompt is *held back* while its prefill might not find memory: a card is over the red line and the prompt is long, or the
plan of the rung has less headroom than such a prefill takes. Whoever is held back goes in when nothing else runs, so that
an engine that fails at it fails alone with it. One that was answered so is the proof that this engine has the memory,
reserved long ago, whatever the card says: from then on what was like it is not held back any more in this life.

    peak(prompt) = activation peak of the plan * min(prompt, chunk) / chunk

Engines prefill in chunks, so beyond one chunk a prompt's length does not matter. Where an engine does not (`chunk` is the
whole context), it does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from appliance.core.units import format_bytes

HYSTERESIS = 0.01
"""Of a card's memory: it has to fall so far below the line before long prompts are taken as before."""
PROVED_MARGIN = 0.002
"""A level that was proved is exceeded when so much more is taken."""
REASONS = ("red_line", "headroom")
LONG_TOKENS = 2048
"""A long prompt, where no plan says how large a chunk is."""


@dataclass(frozen=True, slots=True)
class CardUse:
    """One card, as NVML told it last."""

    address: str
    used_bytes: int
    total_bytes: int

    @property
    def ratio(self) -> float:
        """Of its memory."""
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What the plan of the rung says about prefills, of one card."""

    headroom_bytes: int
    peak_bytes: int
    chunk_tokens: int

    def peak_of(self, prompt_tokens: int) -> int:
        """At the worst moment of such a prompt's prefill."""
        return self.peak_bytes * min(prompt_tokens, self.chunk_tokens) // self.chunk_tokens if self.chunk_tokens else self.peak_bytes


class Memory:
    """What is known of one engine life's memory.

    Attributes:
        over: a card is over the red line.
        held_back: red_line or headroom → requests that had to wait for it.
    """

    def __init__(self, red_line: float) -> None:
        """`red_line`: share of a card's memory; 0: not looked at."""
        self.over = False
        self.held_back = Counter(dict.fromkeys(REASONS, 0))
        self._red_line = red_line
        self._fullest: CardUse | None = None
        self._plan: PrefillPlan | None = None
        self._proved_ratio = 0.0
        self._proved_tokens = 0

    def new_life(self) -> None:
        """Another engine: nothing is proved of it."""
        self.over, self._fullest, self._plan = False, None, None
        self._proved_ratio, self._proved_tokens = 0.0, 0

    def planned(self, plan: PrefillPlan | None) -> None:
        """Of the rung that this life runs on; None: there is no arithmetic behind it."""
        self._plan = plan

    def heard(self, cards: Sequence[CardUse]) -> bool:
        """The cards' last sample. True: something is different now for those who wait."""
        before = self.over
        self._fullest = max(cards, key=lambda card: card.ratio, default=None)
        ratio = self._fullest.ratio if self._fullest is not None else 0.0
        if not self._red_line or ratio < self._line - HYSTERESIS:
            self.over = False
        elif ratio >= self._line:
            self.over = True
        return self.over is not before

    def holds_back(self, prompt_tokens: int) -> str:
        """Why a prompt of so many tokens goes in alone only: red_line or headroom; empty: it does not."""
        if self.over and prompt_tokens >= self.long_tokens:
            return "red_line"
        plan = self._plan
        if plan is not None and prompt_tokens > self._proved_tokens and plan.peak_of(prompt_tokens) > plan.headroom_bytes:
            return "headroom"
        return ""

    def answered(self, prompt_tokens: int) -> None:
        """One that was held back went in alone and came out well."""
        if self.over and self._fullest is not None:
            self._proved_ratio = max(self._proved_ratio, self._fullest.ratio)
            self.over = False
        self._proved_tokens = max(self._proved_tokens, prompt_tokens)

    @property
    def long_tokens(self) -> int:
        """From so many on a prompt counts as long: it fills a chunk, or what is a chunk elsewhere."""
        return min(self._plan.chunk_tokens, LONG_TOKENS) if self._plan is not None and self._plan.chunk_tokens else LONG_TOKENS

    @property
    def sentence(self) -> str:
        """For people, while a card is over the line; else empty."""
        if not self.over or self._fullest is None:
            return ""
        taken = self._taken(self._fullest)
        return f"{taken}: prompts of {self.long_tokens} tokens and more go to the engine one at a time, when nothing else runs"

    def why(self, prompt_tokens: int) -> str:
        """What a client is told whose prompt was held back until its time was up."""
        if self.over and self._fullest is not None:
            return f"the prompt has about {prompt_tokens} tokens, and {self._taken(self._fullest)}"
        assert self._plan is not None
        return (
            f"the prefill of about {prompt_tokens} tokens is planned to take {format_bytes(self._plan.peak_of(prompt_tokens))}, and "
            f"the headroom is {format_bytes(self._plan.headroom_bytes)}"
        )

    @property
    def _line(self) -> float:
        return max(self._red_line, self._proved_ratio + PROVED_MARGIN if self._proved_ratio else 0.0)

    def _taken(self, card: CardUse) -> str:
        line = f"the red line of {100 * self._line:.1f} %"
        return f"card {card.address} has {100 * card.ratio:.1f} % of its {format_bytes(card.total_bytes)} taken, above {line}"
