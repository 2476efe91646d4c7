"""What an answer may say, as a grammar over the model's own tokens: llguidance compiles and follows it (docs/adr/0005-grammars.md).

Imported when the first request asks for a grammar: no other request, and no start, pays for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

from appliance.engine.closed_schema import closed
from appliance.engine.messages import ConstraintFailed

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_WHITE_SPACE: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,24}"}
"""Between the parts of JSON as models write it; bounded, because small models otherwise never come to the next part."""


@dataclass(frozen=True, slots=True)
class Frame:
    """JSON of a schema between two things, which `exactly`, `token` and `matching` make, one behind the other; empty: nothing."""

    before: str
    schema: Mapping[str, object]
    after: str = ""


def exactly(text: str) -> str:
    """This text."""
    return f" {json.dumps(text)}"


def token(token_id: int) -> str:
    """This special token."""
    return f" <[{token_id}]>"


def matching(pattern: str) -> str:
    """A text that matches this regular expression."""
    return f" /{pattern}/"


class GrammarRefused(Exception):
    """The grammar is wrong, or asks for what cannot be followed; the message says what."""


class Grammars:
    """Owns the model's tokens as llguidance sees them."""

    def __init__(self, tokenizer_path: Path, vocabulary: int, end_token_ids: Iterable[int]) -> None:
        """A quarter of a second for 49,000 tokens, with the interpreter's lock held.

        Args:
            vocabulary: of tokenizer.json or of the weights, whichever is larger: a padded id is never allowed.
        """
        self._tokens = LLTokenizer(str(tokenizer_path), vocabulary, sorted(end_token_ids) or None)

    def json(self, schema: Mapping[str, object]) -> str:
        """The grammar of JSON of this schema. Raises GrammarRefused."""
        try:
            return str(LLMatcher.grammar_from_json_schema(json.dumps(closed(schema)), overrides=_WHITE_SPACE))
        except ValueError as error:  # its own parser is the narrower one: nested 128 deep it takes no more
            raise GrammarRefused(_one_line(str(error))) from error

    def regex(self, pattern: str) -> str:
        """The grammar of texts that the pattern matches as a whole."""
        return str(LLMatcher.grammar_from_regex(pattern))

    def choice(self, texts: Iterable[str]) -> str:
        """The grammar of one of these texts."""
        return str(LLMatcher.grammar_from_lark(f"start: {' | '.join(map(json.dumps, texts))}"))

    def framed(self, frames: Sequence[Frame], between: str, several: bool) -> str:
        """The grammar of one of these; or of several, with this text between two."""
        rules = []
        for number, frame in enumerate(frames):
            inner = json.dumps({**closed(frame.schema), "x-guidance": _WHITE_SPACE})
            rules += [f"frame{number}:{frame.before} body{number}{frame.after}", f"body{number}: %json {inner}"]
        more = f" ({exactly(between) if between else ''} one)*" if several else ""
        one = " | ".join(f"frame{number}" for number in range(len(frames)))
        return str(LLMatcher.grammar_from_lark("\n".join([f"start: one{more}", f"one: {one}", *rules, ""])))

    def either(self, grammars: Sequence[str]) -> str:
        """The grammar of what one of these takes."""
        parts = [{**_part(grammar), "name": f"part{number}"} for number, grammar in enumerate(grammars)]
        start = {"lark_grammar": f"start: {' | '.join('@' + part['name'] for part in parts)}"}
        return json.dumps({"grammars": [start, *parts]})

    def constraint(self, grammar: str) -> GrammarConstraint:
        """For one answer.

        Raises:
            GrammarRefused: it is wrong, or not supported.
        """
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarRefused(_one_line(matcher.get_error()))
        return GrammarConstraint(matcher)


class GrammarConstraint:
    """A grammar and how far the answer has come in it. Implements messages.Constraint."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """See messages.Constraint; an end token where the answer may end."""
        mask = self._matcher.compute_logit_bias()
        if self._matcher.is_error():
            raise ConstraintFailed(f"the grammar could not be followed any further: {_one_line(self._matcher.get_error())}")
        return bytes(mask)

    def take(self, token_id: int) -> None:
        """See messages.Constraint. What was not allowed is an error from then on."""
        self._matcher.consume_token(token_id)

    @property
    def complete(self) -> bool:
        """See messages.Constraint."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


def _part(grammar: str) -> dict[str, str]:
    """One of those above, which are Lark's text or the JSON of a list of one."""
    if not grammar.startswith("{"):
        return {"lark_grammar": grammar}
    (only,) = json.loads(grammar)["grammars"]
    return {name: value for name, value in only.items() if value is not None}


def _one_line(text: str) -> str:
    """Without the matcher's own state, which holds what the model said and helps nobody."""
    said = " ".join(text.partition("<state>")[0].split())[:300]
    return "nothing at all may come next" if said == "NoExtensionBias" else said
