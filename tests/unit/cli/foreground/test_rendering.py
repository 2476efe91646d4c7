"""Log lines of the children as a person at a terminal reads them."""

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.cli.foreground.rendering import render


@pytest.mark.parametrize(
    ("name", "line", "shown"),
    [
        (
            "applianced",
            '{"state": "starting", "before": "planning", "generation": 1, "event": "it loads", "level": "info", "timestamp": "x"}',
            "12:00:00 applianced  it loads  generation=1",
        ),
        ("applianced", '{"event": "no sensor", "level": "warning"}', "12:00:00 applianced  warning: no sensor"),
        (
            "applianced",
            '{"engine": 3, "event": "[2026-11-30 03:28:21] ERROR Out of memory.", "level": "info"}',
            "12:00:00 engine      error: Out of memory.",
        ),
        ("applianced", '{"engine": 3, "event": "Segmentation fault", "level": "info"}', "12:00:00 engine      Segmentation fault"),
        ("gateway", "INFO gateway: listening", "12:00:00 gateway     gateway: listening"),
        ("gateway", "ERROR gateway: no", "12:00:00 gateway     error: gateway: no"),
        ("gateway", "Traceback (most recent call last):", "12:00:00 gateway     Traceback (most recent call last):"),
        ("gateway", '{"no": "event"}', '12:00:00 gateway     {"no": "event"}'),
        ("gateway", "[1]", "12:00:00 gateway     [1]"),
        ("applianced", '{"engine": 3, "event": "a\\u001b[2J\\tb\\rc", "level": "info"}', "12:00:00 engine      a\tb\\rc"),
    ],
)
def test_lines_are_shown_in_one_form(name: str, line: str, shown: str) -> None:
    """Time, who, how bad where it is bad, what; fields that are no news are left out."""
    assert click.unstyle(render(name, line, "12:00:00")) == shown


@given(st.text())
def test_any_line_is_shown(line: str) -> None:
    """A child may print anything."""
    assert render("engine", line, "12:00:00")
    assert render("engine", "{" + line, "12:00:00")
