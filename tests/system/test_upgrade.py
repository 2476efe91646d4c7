"""Upgrade, downgrade, reinstall, remove, purge: on one machine, in the order in which its owner would."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.box import wait_until
from tests.system.conftest import NEXT_VERSION
from tests.system.machine import GATEWAY, SOCKET, SUPERVISOR, Machine
from tests.system.rack import Installed, Rack

pytestmark = pytest.mark.system
CONFFILE = "/etc/llm-appliance/appliance.toml"
EDIT = '\n[gpu]\nmode = "off"\n'


@pytest.fixture(scope="module")
def machine(rack: Rack, installed: Installed, deb: Path, next_deb: Path) -> Iterator[Machine]:
    """Both packages lie in /srv."""
    made = rack.boot(installed.layer)
    made.box.put(deb, "/srv/this.deb")
    made.box.put(next_deb, "/srv/next.deb")
    made.wait_until_serving()
    made.http("/health")
    yield made
    rack.halt(made)


def _version(machine: Machine) -> str:
    return machine.box.do("dpkg-query", "-W", "-f", "${Version}", "llm-appliance")


def test_upgrade_under_load(machine: Machine) -> None:
    """Not one request fails; both services are new afterwards; the engine's environment is untouched."""
    conffile = machine.box.path(CONFFILE)
    conffile.write_text(conffile.read_text().replace("[gpu]\n", '[gpu]\nmode = "off"\n'))
    edited = conffile.read_text()
    before = machine.main_pid(SUPERVISOR), machine.main_pid(GATEWAY)
    load = machine.load(clients=3, tokens=40, seconds=20)
    machine.apt("install", "/srv/next.deb")
    assert _version(machine) == NEXT_VERSION
    result = load.result()
    print(f"\n{result}")
    assert result["failed"] == []
    assert result["done"] >= 3
    after = machine.main_pid(SUPERVISOR), machine.main_pid(GATEWAY)
    assert not set(before) & set(after)
    assert conffile.read_text() == edited, "the owner's edit"
    machine.wait_until_serving()
    assert machine.ctl("--version").strip() == f"appliancectl {NEXT_VERSION}"
    assert machine.box.path("/var/lib/llm-appliance/runtimes/current").readlink() == Path("native-0.1.0")


def test_two_versions_of_the_engine_side_by_side(machine: Machine) -> None:
    """setup makes the new version's environment beside the old one and switches; the old one can be named."""
    machine.ctl("setup", "--yes", "--wheelhouse", "/wheelhouse", timeout_s=600)
    runtimes = machine.box.path("/var/lib/llm-appliance/runtimes")
    assert (runtimes / "current").readlink() == Path(f"native-{NEXT_VERSION}")
    assert (runtimes / "native-0.1.0/bin/python").is_symlink()
    machine.systemctl("restart", SUPERVISOR)
    machine.wait_until_serving()
    assert f"native-{NEXT_VERSION}" in machine.box.path(f"/proc/{machine.engine_pid()}/cmdline").read_text()


def test_a_start_that_fails_does_not_fail_the_upgrade(machine: Machine) -> None:
    """A configuration that the service refuses: apt succeeds, says which unit did not restart, and dpkg is content."""
    own = machine.box.path("/etc/llm-appliance/conf.d/60-own.toml")
    own.write_text("[engine]\nthreds = 4\n")
    said = machine.apt("install", "--reinstall", "/srv/next.deb")
    assert f"{SUPERVISOR} did not restart" in said
    assert machine.box.do("dpkg", "--audit") == ""
    own.unlink()
    machine.box.call("systemctl", "reset-failed", SUPERVISOR)
    machine.systemctl("start", SUPERVISOR)


def test_downgrade(machine: Machine) -> None:
    """The older package takes over the newer one's state."""
    machine.apt("install", "/srv/this.deb")
    assert _version(machine) == "0.1.0"
    machine.wait_until_serving()
    assert "Paris" in machine.chat("Name the capital of France.")


def test_remove_keeps_state_and_edits(machine: Machine) -> None:
    """Stopped and gone; models, incidents and the edited configuration stay for the next installation."""
    machine.apt("remove", "llm-appliance")
    for unit in (SUPERVISOR, GATEWAY, SOCKET):
        assert machine.box.call("systemctl", "is-active", unit).stdout.strip() != "active"
    assert machine.engine_pid() == 0
    assert machine.box.path("/var/lib/llm-appliance/models/SmolLM2-135M-Instruct/config.json").exists()
    assert 'mode = "off"' in machine.box.path(CONFFILE).read_text()
    machine.apt("install", "/srv/this.deb")
    machine.systemctl("start", SUPERVISOR)
    machine.wait_until_serving()


def test_purge_leaves_nothing(machine: Machine, base: Path) -> None:
    """The file system is the base image's again, but for logs, package lists, and the account with its groups."""
    machine.box.do("rm", "/root/load.py")
    machine.apt("purge", "llm-appliance")
    ignored = (
        "/var/log",
        "/var/cache",
        "/var/lib/apt",
        "/var/lib/dpkg",
        "/var/lib/systemd",
        "/run",
        "/tmp",
        "/proc",
        "/sys",
        "/dev",
        "/srv",
    )
    prune = [word for path in ignored for word in ("-path", path, "-prune", "-o")]
    now = set(machine.box.do("find", "/", "-xdev", *prune, "-print").split("\n"))
    outside = [word for path in ("/proc", "/sys", "/dev", "/srv") for word in ("-path", path, "-prune", "-o")]
    listing = set(machine.box.do("find", "/", *outside, "-name", "*llm*appliance*", "-print").split("\n"))
    then = {"/" + str(path.relative_to(base)) for path in base.rglob("*")}
    new = {
        path
        for path in now - then - {"", "/"}
        if not path.startswith(("/wheelhouse", "/etc/machine-id", "/var/lib/dbus/machine-id", "/var/tmp/systemd-private-"))
    }
    print(f"\nnew after purge: {sorted(new)}")
    assert listing == {""}
    assert {path for path in new if "appliance" in path} == set()
    assert new <= {"/etc/passwd-", "/etc/group-", "/etc/shadow-", "/etc/gshadow-", "/etc/.pwd.lock", "/root/.bash_history"}
    assert "llm-appliance" in machine.box.do("getent", "passwd", "llm-appliance")
    assert machine.box.do("systemctl", "list-units", "--all", "llm-appliance*", "--no-legend").strip() == ""


def test_a_taken_port_does_not_fail_the_installation(machine: Machine) -> None:
    """Another program on 8000: apt succeeds; the socket says what is wrong."""
    holder = machine.box.start("python3", "-m", "http.server", "--bind", "127.0.0.1", "8000")
    try:
        wait_until(lambda: machine.box.call("curl", "-s", "http://127.0.0.1:8000/").returncode == 0, "the other program listens")
        machine.apt("install", "/srv/this.deb")
        assert machine.property(SOCKET, "ActiveState") == "failed"
        assert machine.box.do("dpkg", "--audit") == ""
    finally:
        machine.box.do("pkill", "-f", "http.server")
        holder.wait(10)
