"""What every engine's file says of its options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from appliance.core.plan import Rung
from appliance.core.versions import Version


@dataclass(frozen=True, slots=True)
class EngineWords:
    """A rung in an engine's words: options, and variables of its environment for what has no option."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Gone:
    """An option that was there once.

    Attributes:
        since: the first version without it, as far as we know.
        instead: what to write, a sentence part.
        until: the first version that has it again; empty: none.
    """

    since: Version
    instead: str
    until: Version = ()

    def is_gone_from(self, version: Version) -> bool:
        """Whether that version refuses it."""
        return version >= self.since and not (self.until and version >= self.until)


@dataclass(frozen=True, slots=True)
class Remark:
    """About one word of engine.extra_args. What is no refusal is a danger that its owner should know of."""

    is_refusal: bool
    sentence: str


@dataclass(frozen=True, slots=True)
class OptionRules:
    """One engine's options.

    Attributes:
        program: the beginning of its command line, for people.
        newest: the newest version whose options we have read.
        words: a rung, said to a version.
        gone: options that versions have dropped.
        ours: options that the appliance sets itself → the key of appliance.toml to set in their place, or why nobody may.
        dangerous: legal options → what they do that an owner may not expect.
        abbreviates: whether its parser takes the beginning of an option for the option (argparse).
    """

    program: tuple[str, ...]
    newest: Version
    words: Callable[[Rung, Version], EngineWords]
    gone: Mapping[str, Gone] = field(default_factory=dict)
    ours: Mapping[str, str] = field(default_factory=dict)
    dangerous: Mapping[str, str] = field(default_factory=dict)
    abbreviates: bool = True

    def remarks(self, extra_args: tuple[str, ...], version: Version) -> tuple[Remark, ...]:
        """What is wrong with them, and what is dangerous, in their order."""
        options = (word.partition("=")[0] for word in extra_args if word.startswith("-") and not _is_number(word))
        return tuple(remark for option in options if (remark := self._remark(option, version)) is not None)

    def _remark(self, option: str, version: Version) -> Remark | None:
        name = option.replace("_", "-") if option.startswith("--") else option
        gone = self.gone.get(name)
        if gone is not None and gone.is_gone_from(version):
            since = ".".join(map(str, gone.since))
            return Remark(True, f"{option} of engine.extra_args is not known to this engine since {since}: {gone.instead}")
        whole = self._whole(name)
        if whole is not None:
            short = "" if whole == name else f" (short for {whole})"
            return Remark(True, f"{option}{short} of engine.extra_args is set by the appliance itself: {self.ours[whole]}")
        if name in self.dangerous:
            return Remark(False, f"{option} of engine.extra_args: {self.dangerous[name]}")
        return None

    def _whole(self, name: str) -> str | None:
        """The option of ours that is meant."""
        if name in self.ours:
            return name
        if not self.abbreviates or not name.startswith("--") or name in self.dangerous:
            return None
        meant = [option for option in self.ours if option.startswith(name)]
        return meant[0] if len(meant) == 1 else None


def _is_number(word: str) -> bool:
    return word.lstrip("-").replace(".", "", 1).isdigit()
