"""The .deb as a file: what Debian's own tools say of it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.system.conftest import ROOT, build

pytestmark = pytest.mark.system


def test_two_builds_are_the_same(deb: Path, commit: str, scratch: Path) -> None:
    """Bit by bit: the package depends on the commit and on nothing else."""
    again = build(scratch / "again", "--commit", commit)
    print(f"\n{deb.name}: {deb.stat().st_size} bytes")
    assert hashlib.sha256(again.read_bytes()).hexdigest() == hashlib.sha256(deb.read_bytes()).hexdigest()


@pytest.mark.skipif(shutil.which("lintian") is None, reason="NOT CHECKED: lintian is not installed")
def test_lintian_has_nothing_to_say(deb: Path) -> None:
    """No error, no warning, nothing pedantic."""
    (changes,) = deb.parent.glob("*.changes")
    command = ["lintian", "--allow-root", "--pedantic", "--fail-on=error,warning,pedantic", str(changes)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_the_versions_agree() -> None:
    """setup.cfg and the changelog."""
    changelog = (ROOT / "packaging/debian/changelog").read_text()
    version = changelog.partition("(")[2].partition(")")[0]
    assert f"\nversion = {version}\n" in (ROOT / "setup.cfg").read_text()


def test_there_is_no_engine_in_the_control_plane(deb: Path) -> None:
    """It is in the package once: as a wheel."""
    names = subprocess.run(["dpkg-deb", "--contents", str(deb)], capture_output=True, text=True, check=True).stdout.splitlines()
    paths = [line.split()[5] for line in names]
    assert not [path for path in paths if path.startswith("./usr/lib/llm-appliance/appliance/engine")]
    assert not [path for path in paths if "appliance_kernels" in path]
    assert len([path for path in paths if path.endswith(".whl")]) == 1
