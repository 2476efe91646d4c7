"""The catalogue: every pattern, loaded once, and the cheap test that most lines fail."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from appliance.core.evidence import Source
from appliance.diagnosis.events import EVENTS
from appliance.diagnosis.literals import Literals, any_of
from appliance.diagnosis.own_words import own_words
from appliance.diagnosis.pattern import Pattern, PatternError, Value, fields_of, load_patterns

PATTERNS_DIR = Path(__file__).parent / "patterns"
_MILD_LEVEL = re.compile(
    r"(?:\(\S+ pid=\d+\) )?(?:\[[^\]]{3,40}\](?: |:(?=\[)))?"
    r"(?:(?:DEBUG|INFO|WARNING)\b|\[?[IW]\d{3,4} \d\d:\d\d:\d\d|E\d{4} \d\d:.{1,120}\btorch/_inductor/)"
)
"""The engines' own levels and torch's; its autotuner calls a candidate that it passes over an error."""
_OF_ONE_REQUEST = re.compile(r"\b(?:TemplateError|UndefinedError|TemplateRuntimeError): |\binput_value=|'input': ['\"]")
"""What a chat template raises over a role, and pydantic's words for a field that is none: they quote the client, and the engine is well."""
LOGS = (Source.ENGINE_LOG, Source.KERNEL_LOG, Source.SYSTEMD)
LONGEST_LINE = 8192
"""Characters of a line that regular expressions see; a longer line is cut in its middle (`shorten`)."""


class Catalogue:
    """All patterns of one set of files, grouped by the source they may match in."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        self.patterns = tuple(patterns)
        _check(self.patterns)
        self._sieves = {
            source: Literals(pattern for pattern in self.patterns if source in pattern.sources)
            for source in {source for pattern in self.patterns for source in pattern.sources}
        }
        self._fatal = Literals(pattern for pattern in self.patterns if pattern.fatal and Source.ENGINE_LOG in pattern.sources)

        noted = (pattern for pattern in self.patterns if not pattern.frequent and not pattern.sources.isdisjoint(LOGS))
        self.noted = tuple(sorted({literal for pattern in noted for literal in pattern.literals}))
        """The literals of all that is not `frequent`."""
        self._noted = any_of(self.noted)

    def may_note(self, text: str) -> bool:
        """False: no pattern that is not `frequent` matches this line of any log."""
        return self._noted.search(text) is not None

    def matches(self, text: str, source: Source) -> Iterator[tuple[Pattern, dict[str, Value]]]:
        """Every pattern of this source that the line matches, with its fields."""
        sieve = self._sieves.get(source)
        if sieve is None or not sieve.any_in(text):
            return
        text = own_words(shorten(text))
        for pattern in sieve.patterns_of(text):
            match = pattern.regex.search(text)
            if match is not None:
                yield pattern, fields_of(match)

    def fatal(self, line: str) -> str | None:
        """The id of the first fatal engine-log pattern that the line matches; what an engine calls a warning is not fatal."""
        if not self._fatal.any_in(line) or _MILD_LEVEL.match(line) is not None or _OF_ONE_REQUEST.search(line) is not None:
            return None
        line = own_words(shorten(line))
        return next((pattern.pattern_id for pattern in self._fatal.patterns_of(line) if pattern.regex.search(line) is not None), None)


def shorten(text: str) -> str:
    """The text, or of a longer one its head and tail: what programs print of note stands there."""
    if len(text) <= LONGEST_LINE:
        return text
    half = LONGEST_LINE // 2
    return f"{text[:half]} … {text[-half:]}"


def _check(patterns: tuple[Pattern, ...]) -> None:
    seen: set[str] = set()
    for pattern in patterns:
        if pattern.pattern_id in seen:
            raise PatternError(f"two patterns are called {pattern.pattern_id!r}", hint="rename one")
        seen.add(pattern.pattern_id)
        if pattern.event not in EVENTS:
            raise PatternError(f"{pattern.pattern_id}: event {pattern.event!r} is not in the vocabulary", hint="see diagnosis/events.py")


@functools.cache
def load_catalogue() -> Catalogue:
    """Our own patterns.

    Raises:
        PatternError: a file cannot be read, or a pattern in it cannot be right.
    """
    return Catalogue(pattern for path in sorted(PATTERNS_DIR.glob("*.toml")) for pattern in load_patterns(path))


def with_operator_patterns(directory: Path | None) -> tuple[Catalogue, tuple[str, ...]]:
    """Our own patterns and those of an operator's `*.toml`, by name, and a sentence for each file that had to be left out.

    Never raises: a slip in such a file must not cost the diagnosis of a crash.
    """
    ours = load_catalogue()
    try:
        files = [] if directory is None else sorted(path for path in directory.iterdir() if path.suffix == ".toml")
    except FileNotFoundError:
        return ours, ()
    except OSError as error:
        return ours, (f"{directory}: {error.strerror}; the patterns in it are not used",)
    patterns, problems = ours.patterns, []
    for path in files:
        try:
            patterns = _joined(patterns, load_patterns(path))
        except PatternError as error:
            problems.append(f"{path} is left out: {error}")
    return (ours if len(patterns) == len(ours.patterns) else Catalogue(patterns)), tuple(problems)


def _joined(known: tuple[Pattern, ...], added: tuple[Pattern, ...]) -> tuple[Pattern, ...]:
    """Both, if they can stand together and each added pattern matches its own samples. Raises PatternError."""
    _check((*known, *added))
    for pattern in added:
        missed = next((sample for sample in pattern.samples if pattern.search(own_words(sample)) is None), None)
        if missed is not None:
            raise PatternError(f"{pattern.pattern_id}: does not match its own sample {missed!r}", hint="literals are tried before regex")
    return (*known, *added)
