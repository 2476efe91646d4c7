"""The package and its control plane with the Python and the libraries of each supported release, old ones and new ones.

Debian's python3-* are what the installed control plane runs on; the checkout's own environment has the newest of the index.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system import box as boxes
from tests.system.box import Box, Release
from tests.system.conftest import CACHE, ROOT
from tests.system.machine import Machine

pytestmark = [pytest.mark.system, pytest.mark.releases]
UNIT_TESTS = ("backends", "cli", "config", "control", "core", "diagnosis", "gateway", "gpu", "planner", "supervisor")
TOOLS = ("pytest", "pytest-timeout", "hypothesis==6.130.0", "psutil")
"""Later versions of hypothesis are compiled for one Python."""
DIFFERENT = {
    "bookworm": (
        # The parser of httptools 0.1 refuses a head of 80 KiB by itself, before we count: 400 instead of 431.
        "test_an_endless_head_is_cut_off",
        # uvicorn 0.17 writes no "connection: close" on a connection that was told to end after this answer; it does end.
        "test_a_connection_that_was_about_to_ask_is_still_answered",
        "test_a_client_that_sent_the_next_request_early_is_seen_leaving_too",
        # With httptools 0.1 and uvicorn 0.17 a dead connection waits for the garbage collector.
        "test_whoever_leaves_leaves_nothing",
    ),
}
"""What the release's libraries do otherwise, harmlessly."""
NOT_HERE = (
    # What an engine's environment brings: a pip of today with an index, a client of the hub, the template's interpreter.
    "test_what_does_not_fit_is_refused_and_what_does_is_made", "test_what_is_no_engine_is_told", "test_a_lock_of_something_else_is_refused",
    "test_a_wheel_for_a_newer_c_library_or_python_is_named", "test_a_download_that_is_cut_goes_on_where_it_was",
    "test_what_cannot_be_had_is_told_with_the_cure", "test_a_download_that_was_cut_goes_on_over_a_second_call",
    "test_a_template_that_does_not_render_is_told_of",
)  # fmt: skip
"""The machines have neither network nor engine."""


@pytest.fixture(scope="module")
def tools(possible: None) -> Path:
    """The tools of the tests, none of which the package needs: pure Python, or one build for all versions."""
    folder = CACHE / f"testtools-{hashlib.sha256(' '.join(TOOLS).encode()).hexdigest()[:12]}"
    if not folder.is_dir():
        fresh = folder.with_suffix(".new")
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--target", str(fresh), *TOOLS], check=True, timeout=300)
        fresh.rename(folder)
    return folder


@pytest.fixture(params=[boxes.BOOKWORM, boxes.TRIXIE, boxes.NOBLE], ids=lambda release: release.suite, scope="module")
def released(request: pytest.FixtureRequest, scratch: Path, deb: Path, commit: str, tools: Path) -> Iterator[tuple[Release, Machine]]:
    """A machine of a release with this checkout at /checkout."""
    release: Release = request.param
    if release is boxes.NOBLE and not (boxes.UBUNTU_KEYS.exists() or boxes.image_path(CACHE, release).is_dir()):
        pytest.skip(f"NOT TESTED ON UBUNTU: {boxes.UBUNTU_KEYS} is missing (package ubuntu-keyring)")
    checkout = scratch / f"checkout-{release.suite}"  # of the commit: work may go on in the one that we are in
    checkout.mkdir()
    subprocess.run(f"git -C {ROOT} archive {commit} | tar -x -C {checkout}", shell=True, check=True)
    binds = {ROOT: "/repository", checkout: "/checkout", tools: "/testtools", deb.parent: "/deb"}
    arguments = [f"--bind-ro={source}:{target}" for source, target in binds.items()]
    box = Box(f"{release.suite}-{scratch.name[-4:]}", scratch / release.suite, (boxes.base_image(CACHE, release),), arguments).up()
    # On everybody's path and not in PYTHONPATH: some tests start programs with an environment of their own.
    box.do("python3", "-c", "import pathlib, site; pathlib.Path(site.getsitepackages()[0], 'testtools.pth').write_text('/testtools')")
    yield release, Machine(box)
    box.down()


def test_the_package_is_built_and_starts(released: tuple[Release, Machine], deb: Path, commit: str) -> None:
    """Built by the release's own tools; the package's own autopkgtest passes on it."""
    release, machine = released
    package = f"/deb/{deb.name}"
    if "debhelper" in release.extra:
        program = f"git config --global --add safe.directory '*' && /repository/packaging/build-deb --output /srv/deb --commit {commit}"
        machine.box.do("sh", "-c", program, timeout_s=300)
        package = f"/srv/deb/{deb.name}"
    machine.apt("install", package)
    print(machine.box.do("sh", "/checkout/packaging/debian/tests/installed"))


@pytest.mark.timeout(900)
def test_the_control_plane_with_the_libraries_of_the_release(released: tuple[Release, Machine]) -> None:
    """Its own unit tests, with the release's interpreter; on the oldest release also whole gateways."""
    release, machine = released
    left_out = " and ".join(f"not {name}" for name in (*NOT_HERE, *DIFFERENT.get(release.suite, ())))
    ended = machine.box.call(
        "env", "-C", "/checkout", "PYTHONDONTWRITEBYTECODE=1", "HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis",
        "python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", *(["-k", left_out] if left_out else []),
        "-p", "tests.system.without_the_engine",
        *(f"tests/unit/{name}" for name in UNIT_TESTS), *(["tests/integration/gateway"] if release is boxes.BOOKWORM else []),
        timeout_s=800,
    )  # fmt: skip
    print(f"\n{release.suite}: {ended.stdout.strip().splitlines()[-1]}")
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr
