"""No input raises, and every verdict stays printable and bounded."""

from __future__ import annotations

import json
import os

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from appliance.core.evidence import Evidence, Source
from appliance.diagnosis import diagnose, is_fatal_line, load_catalogue, read_evidence, report
from appliance.diagnosis.reading.decode import UnreadableLog
from appliance.diagnosis.recurrence import signature
from tests.unit.diagnosis.corpus_cases import CORPUS, load

# `FUZZ_EXAMPLES=20000 pytest tests/unit/diagnosis/test_fuzz.py` for the ten minutes of a release.
EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
SLOW = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))

SAMPLES = [sample for pattern in load_catalogue().patterns for sample in pattern.samples]
LINES = [line for case in load(CORPUS) for value in case.raw.values() if isinstance(value, str) for line in value.split("\n")]

scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
data = st.dictionaries(st.sampled_from(["code", "signal", "kind", "silent_s", "oom_kill", "zone_unknown", "year_unknown"]), scalars)
times = st.one_of(st.none(), st.floats(), st.floats(min_value=0, max_value=4e9))
real_lines = st.sampled_from(SAMPLES + LINES)


@st.composite
def damaged_lines(draw: st.DrawFn) -> str:
    """A real line cut, doubled, spliced with another, or with rubbish in it."""
    line, other = draw(real_lines), draw(real_lines)
    start, end = sorted((draw(st.integers(0, len(line))), draw(st.integers(0, len(line)))))
    return (
        line[:start] + draw(st.sampled_from(["", "\x00", "\x1b[31m", "\ud800", other, "999999999999999999999", "{", "\u202e"])) + line[end:]
    )


evidences = st.lists(
    st.builds(
        Evidence,
        source=st.sampled_from(Source),
        text=st.one_of(damaged_lines(), st.text(max_size=80)),
        time_s=times,
        line=st.integers(0, 10),
        boot_id=st.sampled_from([None, "a", "b"]),
        data=data,
    ),
    max_size=30,
)


@SLOW
@given(evidences, st.booleans())
def test_any_evidence_gets_a_printable_verdict(evidence: list[Evidence], stopped: bool) -> None:
    """Whatever the sources, times, texts and data are."""
    verdict = diagnose(evidence, stopped_by_us=stopped)
    assert len(verdict.chain) <= 12
    assert len(verdict.refuted) <= 8
    assert json.loads(json.dumps(report.to_json_dict(verdict)))["cause"] == verdict.cause.label
    assert verdict.cause.label in report.text(verdict)
    assert verdict.cause.label in report.markdown(verdict)


@SLOW
@given(st.binary(max_size=4000))
def test_any_bytes_can_be_read(raw: bytes) -> None:
    """As a file of unknown kind; only broken archives are refused, by name."""
    try:
        evidence = read_evidence(raw)
    except UnreadableLog:
        return
    diagnose(evidence)


@SLOW
@given(st.lists(damaged_lines(), max_size=20), st.sampled_from([None, *Source]), st.sampled_from(["\n", "\r\n", "\n\n", "\r"]))
def test_any_damaged_log_can_be_read(lines: list[str], source: Source | None, end: str) -> None:
    """Real lines, broken in every way."""
    text = end.join(lines).encode("utf-8", "surrogatepass")
    diagnose(read_evidence(text, source))
    assert all(is_fatal_line(line) is None or isinstance(is_fatal_line(line), str) for line in lines)


def test_what_the_long_run_found() -> None:
    """Kept as it was found: coats without end, numbers that are none, halves of characters, an error number that is a table."""
    assert read_evidence("vllm-1  | " * 2000 + "x")[0].text.endswith("x")
    for odd in (float("nan"), float("inf"), -1e300):
        for kind in ("late", "hang", "spawn"):
            item = Evidence(Source.PROBE, "", odd, data={"kind": kind, "silent_s": odd, "deadline_s": odd, "errno": {}})
            report.text(diagnose([item]))
    verdict = diagnose([Evidence(Source.ENGINE_LOG, "KeyError: 'half of a \ud800 character'")])
    assert signature(verdict, ()) is not None
    report.text(diagnose(read_evidence('{"MESSAGE": "x", "_SOURCE_REALTIME_TIMESTAMP": "²"}')))
