"""applianced in a delegated cgroup (v2), as under systemd's Delegate=yes. Needs a writable cgroup v2 mount."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.cards import HAS_COMPILER
from tests.integration.supervisor.harness import Applianced, is_alive, wait_for
from tests.integration.supervisor.test_fleet import TwoCards
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


@pytest.mark.skipif(not HAS_COMPILER, reason="no gcc to build a libnvidia-ml with")
def test_engines_of_two_cards_have_cgroups_of_their_own(short_path: Path, delegated: Path) -> None:
    """Their lives are counted apart and called apart; a crash empties one of them, a stop both."""
    one = TwoCards(short_path, "--spawn-stray", cgroup=delegated)
    try:
        before = one.wait_each("serving", "serving")
        for index, replica in enumerate(before):
            assert str(replica["engine_pid"]) in (delegated / f"engine-{index}.1/cgroup.procs").read_text().split()
        strays = [one.engine_of(index, "/stats")["stray_pid"] for index in (0, 1)]
        os.kill(before[0]["engine_pid"], signal.SIGKILL)
        wait_for(lambda: one.replicas()[0]["generation"] == 2 and one.replicas()[0]["state"] == "serving", "it is back")
        assert [is_alive(stray) for stray in strays] == [False, True]
        assert sorted(folder.name for folder in delegated.iterdir() if folder.is_dir()) == ["engine-0.2", "engine-1.1", "supervisor"]
        assert one.stop() == 0
        assert sorted(folder.name for folder in delegated.iterdir() if folder.is_dir()) == ["supervisor"]
    finally:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
