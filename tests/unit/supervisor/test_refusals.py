"""When refused accesses of a living engine are news, and what is said of them."""

from __future__ import annotations

from appliance.core.causes import Cause
from appliance.core.evidence import Source
from appliance.supervisor import events as ev
from appliance.supervisor.log_ring import LogLine
from appliance.supervisor.refusals import AGAIN_S, Refusals, diagnosis_of, line_of


def test_a_life_that_refuses_again_and_again_is_an_incident_a_minute() -> None:
    """Each time with what came since; a new life begins at 0, and one that refused nothing is no news."""
    refusals = Refusals()
    assert refusals.news(ev.Progress(1, 0, 0, 0), 100.0) == 0
    assert refusals.news(ev.Progress(1, 1, 0, 2), 101.0) == 2
    assert refusals.news(ev.Progress(1, 1, 0, 2), 101.0 + AGAIN_S) == 0
    assert refusals.news(ev.Progress(1, 1, 0, 5), 102.0 + AGAIN_S) == 3
    assert refusals.news(ev.Progress(1, 1, 0, 9), 101.0 + 2 * AGAIN_S) == 0
    assert refusals.news(ev.Progress(1, 1, 0, 9), 102.0 + 2 * AGAIN_S) == 4
    assert refusals.news(ev.Progress(2, 0, 0, 0), 103.0 + 2 * AGAIN_S) == 0
    assert refusals.news(ev.Progress(2, 0, 0, 1), 104.0 + 2 * AGAIN_S) == 1


def test_it_stands_on_the_engines_newest_line_or_on_its_counter() -> None:
    """The line has the block; the pipe may be slower than the probe."""
    lines = [LogLine(number, 10.0, f"ERROR KV access refused. block={number}") for number in (3, 4)] + [
        LogLine(5, 11.0, "INFO Decode batch.")
    ]
    newest = line_of(lines)
    assert newest == lines[1]
    assert line_of(lines[2:]) is None
    said = diagnosis_of(1, newest)
    assert (said.cause, said.root and said.root.source, said.root and said.root.line) == (Cause.OK_DEGRADED, Source.ENGINE_LOG, 4)
    assert "an access to a KV block" in said.sentence
    counted = diagnosis_of(7, None)
    assert counted.root is not None
    assert (counted.root.source, counted.root.text) == (Source.PROBE, "/health counts 7 refused accesses to KV blocks")
    assert "7 accesses" in counted.sentence
