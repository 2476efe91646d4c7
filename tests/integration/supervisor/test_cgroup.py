"""applianced in a delegated cgroup (v2), as under systemd's Delegate=yes. Needs a writable cgroup v2 mount."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.supervisor.harness import Applianced, is_alive
from tests.unit.supervisor.test_process import cgroup2_for_tests

pytestmark = pytest.mark.skipif(cgroup2_for_tests() is None, reason="no writable cgroup v2 mount")


@pytest.fixture
def delegated() -> Iterator[Path]:
    """A cgroup marked as systemd marks what it delegates."""
    root = cgroup2_for_tests()
    assert root is not None
    path = root / f"appliance-test-{os.getpid()}"
    path.mkdir()
    try:
        os.setxattr(path, "user.delegate", b"1")
    except OSError as error:
        path.rmdir()
        pytest.skip(f"no xattr on cgroups here: {error}")
    yield path
    for folder in (*path.glob("*/"), path):
        with contextlib.suppress(OSError):
            (folder / "cgroup.kill").write_text("1")
    for folder in (*path.glob("*/"), path):
        with contextlib.suppress(OSError):
            folder.rmdir()


def test_each_life_has_a_cgroup_of_its_own(applianced: Callable[..., Applianced], delegated: Path) -> None:
    """applianced sits in a leaf, the engine in a sibling; strays die with their cgroup; an old life's folder is gone."""
    one = applianced("--spawn-stray", cgroup=delegated)
    before = one.wait_state("serving")
    assert before["sensors"]["cgroup"]["ok"] is True
    assert (delegated / "supervisor/cgroup.procs").read_text().split() == [str(one.process.pid)]
    assert str(before["engine_pid"]) in (delegated / "engine-1/cgroup.procs").read_text().split()
    stray = one.engine("/stats")["stray_pid"]
    os.kill(before["engine_pid"], signal.SIGKILL)
    one.wait_state("serving", above=1)
    assert not is_alive(stray)
    assert sorted(folder.name for folder in delegated.iterdir() if folder.is_dir()) == ["engine-2", "supervisor"]
    assert one.stop() == 0
    assert sorted(folder.name for folder in delegated.iterdir() if folder.is_dir()) == ["supervisor"]
