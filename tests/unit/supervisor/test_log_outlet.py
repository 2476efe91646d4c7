"""The log may never stop the supervisor."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator

import pytest
import structlog

from appliance.supervisor.log_outlet import QUEUE_LINES, Outlet, configure


@pytest.fixture(autouse=True)
def restore() -> Iterator[None]:
    """structlog's configuration is the process's."""
    yield
    structlog.reset_defaults()


def test_lines_are_json_where_nobody_sits() -> None:
    """One object a line, with time, level, fields and tracebacks."""
    reading, writing = os.pipe()
    outlet = configure(writing)
    structlog.get_logger().info("serving", generation=3)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError as error:
        structlog.get_logger().error("failed", exc_info=error)
    outlet.close()
    os.close(writing)
    with os.fdopen(reading) as log:
        first, second = (json.loads(line) for line in log)
    assert (first["event"], first["level"], first["generation"]) == ("serving", "info", 3)
    assert "timestamp" in first
    assert "ZeroDivisionError" in second["exception"]


def test_a_pipe_that_nobody_reads_stops_nobody() -> None:
    """A terminal stopped with Ctrl-S: logging never waits, the queue is bounded, and the drop is told when reading goes on."""
    reading, writing = os.pipe()
    outlet = Outlet(writing)
    began_s = time.monotonic()
    for number in range(QUEUE_LINES + 3000):
        outlet.put(f"{number:0100}")
    assert time.monotonic() - began_s < 2
    os.set_blocking(reading, False)
    received = b""
    deadline_s = time.monotonic() + 10
    while b"lines were dropped" not in received and time.monotonic() < deadline_s:
        try:
            received += os.read(reading, 1 << 20)
        except BlockingIOError:
            outlet.put("again")
            time.sleep(0.001)
    assert b"log lines were dropped" in received
    outlet.close()
    os.close(reading)
    os.close(writing)


def test_nobody_at_the_other_end() -> None:
    """A closed pipe is no error."""
    reading, writing = os.pipe()
    outlet = Outlet(writing)
    os.close(reading)
    outlet.put("x")
    outlet.close()
    os.close(writing)
