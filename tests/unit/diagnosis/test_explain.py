"""`explain`: every entry is whole, and names are found however they are written."""

from __future__ import annotations

import pytest

from appliance.diagnosis.explain import Explanation, NoSuchName, explain, explanations


@pytest.mark.parametrize("entry", explanations(), ids=lambda entry: entry.name)
def test_each_entry_says_what_it_does_and_where_that_is_written(entry: Explanation) -> None:
    """Meaning, default, trade and source; engines and kinds of a closed list; it finds itself."""
    assert min(map(len, (entry.default, entry.means, entry.trades, entry.source))) > 0
    assert set(entry.engines) <= {"sglang", "vllm", "llama.cpp", "ollama", "tgi", "native", "any"}
    assert entry.kind in {"flag", "env", "systemd", "sysctl", "module", "kernel", "config"}
    assert explain(entry.name) is entry
    assert entry.means in entry.text()


def test_there_are_at_least_sixty() -> None:
    """Names are unique too."""
    assert len({entry.name for entry in explanations()}) == len(explanations()) >= 60


@pytest.mark.parametrize("name", ["mem-fraction-static", "--mem_fraction_static", "MEM_FRACTION_STATIC", "--mem-fraction-static=0.9"])
def test_a_name_is_found_however_it_is_written(name: str) -> None:
    """With and without dashes, underscores, value."""
    assert explain(name).name == "--mem-fraction-static"


def test_the_wait_timeout_is_no_request_timeout() -> None:
    """The entry that a week of searching would have saved."""
    assert "no request time-out" in explain("SGLANG_REQUEST_STATE_WAIT_TIMEOUT").trades


def test_an_unknown_name_gets_the_nearest() -> None:
    """The message names what was asked and what there is."""
    with pytest.raises(NoSuchName, match=r"watchdogtimeout.*--watchdog-timeout"):
        explain("watchdogtimeout")
