"""What leaves the box in a bundle: no tokens, keys, prompts, hosts, addresses or user names; the rest stays readable.

Equal secrets get equal placeholders (`<ip-2>`), so that lines can still be matched with each other.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass

_QUOTED = r"(?:'(?:[^'\\]|\\.)*'?|\"(?:[^\"\\]|\\.)*\"?)"


@dataclass(frozen=True, slots=True)
class Redaction:
    """How often something of a kind was taken out, and how many different ones there were."""

    kind: str
    count: int
    distinct: int


@dataclass(frozen=True, slots=True)
class _Rule:
    kind: str
    regex: re.Pattern[str]
    keep: Callable[[str], bool] = lambda _secret: False


def _local(address: str) -> bool:
    return address.startswith(("127.", "0.0.0.0", "255.")) or address in ("::1", "::")


# A rule that begins with a run of letters begins where the run does: at any other place it would read the run's rest again and again.
_RULES = (
    _Rule("key", re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]{0,8000}?-----END [A-Z ]*PRIVATE KEY-----")),
    _Rule(
        "token",
        re.compile(r"\b(hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|AKIA[A-Z0-9]{16}|xox[abp]-[A-Za-z0-9-]{10,})"),
    ),
    _Rule("token", re.compile(r"(?<![A-Za-z0-9_-])eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*")),
    _Rule("token", re.compile(r"(?i)\bauthorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic)\s+([^\s'\",]+)")),
    _Rule("token", re.compile(r"(?i)\bbearer\s+([A-Za-z0-9._~+/=-]{8,})")),
    _Rule(
        "key",
        re.compile(
            r"(?i)(?<![a-z0-9_-])(?:[a-z0-9_-]*(?:api[_-]?key|access[_-]?key|secret|passw(?:or)?d|token)s?)['\"]?(?:\s*[:=]\s*|\s+)"
            r"(?!None\b|null\b|usage\b|[\d.,]+\b|\(|=)['\"]?([^\s'\",)\]]{6,})"
        ),
    ),
    _Rule("key", re.compile(r"://[^/\s:@]+:([^@\s/]+)@")),
    _Rule(
        "prompt",
        re.compile(
            rf"(?i)\b(?:prompt|text|content|messages|inputs?|input_text|query|output_text)['\"]?\s*[:=]\s*({_QUOTED}|\[\s*[{{'\"].*?(?:\]\s*(?=[,)}}]|$)|(?=\n)|\Z))"
        ),
    ),
    _Rule(
        "prompt", re.compile(r"(?i)\b(?:prompt_token_ids|input_ids|origin_input_ids|output_ids|token_ids)['\"]?\s*[:=]\s*(\[[\d,\s]*\]?)")
    ),
    _Rule(
        "user",
        re.compile(r"(?:/home/|/Users/|C:\\Users\\)([^/\\\s:'\"]+)"),
        lambda name: name in ("runner", "user", "ubuntu", "debian", "root"),
    ),
    _Rule(
        "user", re.compile(r"(?i)\b(?:user(?:name)?|logname|sudo_user)=([A-Za-z_][\w.-]*)"), lambda name: name in ("root", "None", "null")
    ),
    _Rule("user", re.compile(r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")),
    _Rule(
        "host",
        re.compile(
            r"(?m)^(?:[^\W\d_]{2,5} +\d{1,2} \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)) "
            r"([\w.-]+) (?=[\w./@-]+(?:\[\d+\])?: )"
        ),
    ),
    _Rule(
        "host",
        re.compile(r"(?i)\b(?:_HOSTNAME|hostname|host)['\"]?\s*[:=]\s*['\"]?([A-Za-z][\w.-]*[\w])"),
        lambda name: name in ("localhost", "None"),
    ),
    _Rule("ip", re.compile(r"(?<![\d.])((?:\d{1,3}\.){3}\d{1,3})(?![\d.])"), _local),
    _Rule("ip", re.compile(r"(?<![\w:])((?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4})(?![\w:])"), _local),
    _Rule("mac", re.compile(r"(?<![\w:])((?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2})(?![\w:])")),
    _Rule("serial", re.compile(r"(GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})")),
    _Rule("serial", re.compile(r"(?i)serial (?:number|is)[:\s]+(?!0\b)(\w{6,})")),
)


class Redactor:
    """Takes secrets out of the pieces of one bundle; placeholders are the same in all of them."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._counts: dict[str, int] = {}

    def redact(self, text: str) -> str:
        """The text without its secrets."""
        for rule in _RULES:
            text = rule.regex.sub(functools.partial(self._replaced, rule), text)
        return text

    def report(self) -> list[Redaction]:
        """What was taken out so far, the most frequent first."""
        kinds = sorted(self._counts, key=lambda kind: -self._counts[kind])
        return [Redaction(kind, self._counts[kind], sum(1 for known, _secret in self._names if known == kind)) for kind in kinds]

    def _replaced(self, rule: _Rule, match: re.Match[str]) -> str:
        group = 1 if match.re.groups and match[1] is not None else 0
        secret = match[group]
        if rule.keep(secret) or (secret.startswith("<") and secret.endswith(">")):
            return match[0]
        number = sum(1 for known, _secret in self._names if known == rule.kind) + 1
        name = self._names.setdefault((rule.kind, secret), f"<{rule.kind}-{number}>")
        self._counts[rule.kind] = self._counts.get(rule.kind, 0) + 1
        start, end = match.start(group) - match.start(), match.end(group) - match.start()
        return f"{match[0][:start]}{name}{match[0][end:]}"


def redact(text: str) -> tuple[str, list[Redaction]]:
    """One text without its secrets, and what was taken out."""
    redactor = Redactor()
    return redactor.redact(text), redactor.report()
