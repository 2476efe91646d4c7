"""The catalogue: every pattern, loaded once, and the cheap test that most lines fail."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from appliance.core.evidence import Source
from appliance.diagnosis.events import EVENTS
from appliance.diagnosis.own_words import own_words
from appliance.diagnosis.pattern import Pattern, PatternError, Value, fields_of, load_patterns

_Trie = dict[str, "_Trie"]

PATTERNS_DIR = Path(__file__).parent / "patterns"
_MILD_LEVEL = re.compile(r"(?:\(\S+ pid=\d+\) )?(?:\[[^\]]{8,40}\] )?(?:DEBUG|INFO|WARNING)\b")
LONGEST_LINE = 8192
"""Characters of a line that regular expressions see; a longer line is cut in its middle (`shorten`)."""


class Catalogue:
    """All patterns of one set of files, grouped by the source they may match in."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        self.patterns = tuple(patterns)
        _check(self.patterns)
        self._by_source = {
            source: tuple(pattern for pattern in self.patterns if source in pattern.sources)
            for source in {source for pattern in self.patterns for source in pattern.sources}
        }
        self._gates = {source: _gate(patterns) for source, patterns in self._by_source.items()}
        self._fatal = tuple(pattern for pattern in self.patterns if pattern.fatal and Source.ENGINE_LOG in pattern.sources)
        self._fatal_gate = _gate(self._fatal)

    def matches(self, text: str, source: Source) -> Iterator[tuple[Pattern, dict[str, Value]]]:
        """Every pattern of this source that the line matches, with its fields."""
        gate = self._gates.get(source)
        if gate is None or gate.search(text) is None:
            return
        text = own_words(shorten(text))
        for pattern in self._by_source[source]:
            match = pattern.search(text)
            if match is not None:
                yield pattern, fields_of(match)

    def fatal(self, line: str) -> str | None:
        """The id of the first fatal engine-log pattern that the line matches; what an engine calls a warning is not fatal."""
        if self._fatal_gate.search(line) is None or _MILD_LEVEL.match(line) is not None:
            return None
        line = own_words(shorten(line))
        return next((pattern.pattern_id for pattern in self._fatal if pattern.search(line) is not None), None)


def shorten(text: str) -> str:
    """The text, or of a longer one its head and tail: what programs print of note stands there."""
    if len(text) <= LONGEST_LINE:
        return text
    half = LONGEST_LINE // 2
    return f"{text[:half]} … {text[-half:]}"


def _gate(patterns: Iterable[Pattern]) -> re.Pattern[str]:
    """One expression over every literal: a line that fails it fails all of these patterns.

    Common heads are shared (a trie), which is twenty times faster than a plain alternation of some hundred words.
    """
    literals = sorted({literal for pattern in patterns for literal in pattern.literals}, key=len)
    trie: _Trie = {}
    for literal in literals:
        node = trie
        for letter in literal:
            if "" in node:
                break  # a shorter literal already matches here
            node = node.setdefault(letter, {})
        else:
            node[""] = {}
    return re.compile(_alternation(trie) or r"(?!)")


def _alternation(node: _Trie) -> str:
    if "" in node or not node:
        return ""
    branches = [re.escape(letter) + _alternation(child) for letter, child in sorted(node.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


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
