"""Loads that take their time, and loads that do nothing any more."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.supervisor.harness import Applianced, wait_for

Start = Callable[..., Applianced]
QUICK = {"supervisor.start_stall_s": "1", "supervisor.start_deadline_s": "2", "supervisor.start_failures_max": "1"}


def first_incident(one: Applianced) -> tuple[dict[str, Any], str]:
    """It, and what our own probes had to say."""
    one.wait_state("parked")
    incident = one.ask("incident")["incident"]
    return incident, " ".join(item["text"] for item in incident["evidence"] if item["source"] == "probe")


@pytest.mark.parametrize("load", ["read", "grow"])
def test_a_load_that_goes_on_may_take_as_long_as_it_takes(applianced: Start, load: str) -> None:
    """Files are read, or memory is taken, for three times the start deadline: it serves in the end, without an incident."""
    one = applianced("--load", load, "--ready-after-s", "6", settings=QUICK)
    status = one.wait_state("serving")
    assert (status["generation"], status["last_incident"]) == (1, None)


def test_a_load_that_stalls_has_failed(applianced: Start) -> None:
    """Nothing read, taken, computed or said for start_stall_s: ended long before its deadline, with the numbers as evidence."""
    one = applianced("--load", "stall", settings=QUICK | {"supervisor.start_deadline_s": "600"})
    incident, said = first_incident(one)
    assert (incident["phase"], incident["diagnosis"]["cause"]) == ("start", "engine_watchdog")
    assert "the load has stalled" in said
    assert "supervisor.start_stall_s = 1" in said


@pytest.mark.parametrize("load", ["compute", "talk"])
def test_past_its_deadline_a_load_has_to_do_more_than_compute_and_talk(applianced: Start, load: str) -> None:
    """It is no stall, and it is not a load either: an engine that waits for another in a loop looks like this for ever."""
    one = applianced("--load", load, "--ready-after-s", "600", settings=QUICK)
    incident, said = first_incident(one)
    assert incident["phase"] == "start"
    assert "stalled" not in said
    assert "did not prove itself within 2 s" in one.log.read_text()


def test_a_load_that_somebody_stopped_is_not_held_against_the_rung(applianced: Start) -> None:
    """SIGSTOP while it loads: found by the stall, named as state T, and tried again on the same rung."""
    one = applianced("--load", "read", "--ready-after-s", "2", settings=QUICK | {"supervisor.start_failures_max": "3"})
    pid = wait_for(lambda: one.status().get("engine_pid"), "it loads")
    os.kill(pid, signal.SIGSTOP)
    status = one.wait_state("serving", above=1)
    assert status["rung"]["index"] == 0
    assert status["last_incident"]["action"]["kind"] == "restart_same"
    probe = next(item for item in one.ask("incident")["incident"]["evidence"] if item["source"] == "probe")
    assert "state T" in probe["text"]
