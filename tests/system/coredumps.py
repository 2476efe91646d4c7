"""Core dumps of a machine under test.

kernel.core_pattern is one for all containers and is run in the host's namespaces. While a test needs it, it names a script that hands
the dumps of one box to that box's own systemd-coredump and drops all others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.system.box import Box

PATTERN = Path("/proc/sys/kernel/core_pattern")
LIMIT = Path("/proc/sys/kernel/core_pipe_limit")


@contextlib.contextmanager
def kept_by(box: Box, folder: Path) -> Iterator[None]:
    """For the time of a `with`."""
    handler = folder / "core-handler"
    handler.write_text(
        "#!/bin/sh\n"
        "# the host's number of the process, then what systemd-coredump expects\n"
        "pid=$1; shift; PATH=/usr/sbin:/usr/bin:/sbin:/bin\n"
        f"grep -q '/appliance-{box.name}/' /proc/$pid/cgroup || exit 0\n"
        f'exec nsenter -t {box.leader()} -m -u -i -n -p -C -r -w -- /lib/systemd/systemd-coredump "$@"\n'
    )
    handler.chmod(0o755)
    before = PATTERN.read_text(), LIMIT.read_text()
    LIMIT.write_text("16\n")
    PATTERN.write_text(f"|{handler} %P %p %u %g %s %t %c %h %d\n")
    try:
        yield
    finally:
        PATTERN.write_text(before[0])
        LIMIT.write_text(before[1])
