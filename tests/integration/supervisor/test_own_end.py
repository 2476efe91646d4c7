"""applianced itself is ended: the next one says so, and closes what the last one left open."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tests.integration.supervisor.harness import Applianced, wait_for

Start = Callable[..., Applianced]


def test_a_killed_applianced_is_an_incident_of_its_own(applianced: Start) -> None:
    """kill -9 while it serves: the next run records it with what is known, and closes it when it serves; a stop leaves nothing."""
    one = applianced()
    before = one.wait_state("serving")
    one.stop(signal.SIGKILL)
    one.start()
    one.wait_state("serving")
    (incident,) = one.wait_incident()
    assert (incident["diagnosis"]["cause"], incident["phase"], incident["generation"]) == (
        "supervisor_died",
        "serving",
        before["generation"],
    )
    assert f"pid {before['engine_pid']}" not in incident["diagnosis"]["root"]["text"]
    assert "(pid " in incident["diagnosis"]["root"]["text"]
    wait_for(lambda: one.ask("incident")["incident"]["recovered_s"] is not None, "it is closed")
    assert one.stop() == 0
    one.start()
    one.wait_state("serving")
    assert len(one.ask("incidents", limit=10)["incidents"]) == 1


def test_a_crash_whose_recovery_applianced_did_not_live_to_see(applianced: Start) -> None:
    """kill -9 during a back-off: the crash from before is closed by the next run, with the time that it really took."""
    one = applianced(settings={"supervisor.backoff_first_s": "60", "supervisor.backoff_max_s": "60"})
    one.wait_state("serving")
    one.fault(kind="signal", signal="SIGSEGV")
    one.wait_state("serving", above=1)
    one.fault(kind="signal", signal="SIGSEGV")
    wait_for(lambda: one.status()["state"] == "backoff" and one.status()["last_incident"], "it waits")
    one.wait_incident(2)
    one.stop(signal.SIGKILL)
    one.start()
    one.wait_state("serving", "degraded", above=2)
    three = one.wait_incident(3)
    closed = wait_for(
        lambda: all(listed := one.ask("incidents", limit=10)["incidents"]) and all(i["recovered_s"] is not None for i in listed) and listed,
        "all are closed",
    )
    assert [incident["diagnosis"]["cause"] for incident in three] == ["supervisor_died", "segfault_native", "segfault_native"]
    assert 0 < closed[1]["recovered_s"] < 60
