"""What was given when nothing in it was recognised: whoever named the wrong file is to see that at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis.pattern import TEXT_SOURCES

_UNDECODED = "\ufffd"
_BINARY_SHARE = 0.05
_LOOKED_AT = 2000
"""Lines whose characters are counted."""


def what_was_given(evidence: Sequence[Evidence]) -> str | None:
    """In words; None where the evidence is no text that was read."""
    lines = [item for item in evidence if item.source in TEXT_SOURCES]
    if not lines:
        return None
    read = sum(_last_lines(lines).values())
    written = [item.text for item in lines if item.text.strip()]
    if not written:
        nothing = "what was given holds no text: it is empty, or none of its bytes prints anything"
        return nothing if len(lines) <= 1 else f"all {len(lines):,} lines of what was given are blank"
    sample = "".join(written[:_LOOKED_AT])
    if sample.count(_UNDECODED) > _BINARY_SHARE * len(sample):
        return f"what was given is no text ({read:,} lines with bytes that are no characters)"
    lines_were = "1 line was" if read == 1 else f"{read:,} lines were"
    first = written[0].strip()[:80]
    return f"{lines_were} read and none is known of any engine, of the kernel, of systemd or of nvidia-smi: the first is {first!r}"


def _last_lines(lines: Sequence[Evidence]) -> Counter[Source]:
    """By source, how many lines there were: of a long log not all are kept."""
    last: Counter[Source] = Counter()
    for item in lines:
        if item.text or not last[item.source]:  # the piece behind the last line's end is none
            last[item.source] = max(last[item.source], item.line, 1)
    return last
