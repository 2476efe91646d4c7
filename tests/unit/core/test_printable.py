"""Words from outside stay words."""

from __future__ import annotations

import pytest

from appliance.core.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("new driver, 2.0 °C", "new driver, 2.0 °C"),
        ("one\ntwo\r\n", "one\\ntwo\\r\\n"),
        ("\x1b[2J\x1b]0;title\x07", "\\x1b[2J\\x1b]0;title\\x07"),
        ("\u202egnirts", "\\u202egnirts"),
        ("\udc80\x00\x9b", "\\udc80\\x00\\x9b"),
        ("", ""),
    ],
)
def test_nothing_in_it_acts_on_a_terminal_or_a_log(text: str, shown: str) -> None:
    """Line ends, escapes, title and direction changes, bytes that were no UTF-8: written out."""
    assert printable(text) == shown


def test_what_is_kept_is_kept() -> None:
    """Tabs of a log line."""
    assert printable("a\tb\n", keep="\t") == "a\tb\\n"
