"""The package is installed by apt on a machine without a network, a GPU or an engine, and works as the manual says."""

from __future__ import annotations

import re

import pytest

from tests.system.box import wait_until
from tests.system.machine import CARDS, GATEWAY, SOCKET, SUPERVISOR, Machine
from tests.system.rack import Installed

pytestmark = pytest.mark.system
SECURITY_MAX = 2.0


def test_three_commands_to_a_chat_answer(installed: Installed) -> None:
    """apt install, setup --demo, systemctl start: the model answers."""
    print("\n" + "\n".join(f"{seconds:6.1f} s  {name}" for name, seconds in installed.seconds.items()))
    assert "Paris" in installed.answer


def test_it_serves_after_a_reboot(machine: Machine) -> None:
    """The units are enabled: a machine that boots serves without anybody."""
    assert machine.property(SUPERVISOR, "NRestarts") == "0"
    assert machine.property(SUPERVISOR, "ActiveState") == "active"
    assert machine.property(GATEWAY, "MainPID") == "0", "the first question of all is what starts the gateway"
    assert machine.http("/health")[0] == 200


def test_the_guide_that_the_configuration_names_is_there(machine: Machine) -> None:
    """Not packed, so that its pages find each other."""
    cited = set(re.findall(r"/usr/share/doc/llm-appliance/\S+?\.md", machine.box.do("cat", "/etc/llm-appliance/appliance.toml")))
    assert len(cited) > 2
    for page in (*cited, "/usr/share/doc/llm-appliance/index.md", "/usr/share/doc/llm-appliance/page/serving.png"):
        machine.box.do("test", "-s", page)


def test_systemd_finds_nothing_wrong_with_the_units(machine: Machine) -> None:
    """No warning, of this version of systemd."""
    ended = machine.box.call("systemd-analyze", "verify", SUPERVISOR, GATEWAY, CARDS, SOCKET, "llm-appliance.slice")
    ours = [line for line in (ended.stdout + ended.stderr).splitlines() if "llm-appliance" in line]
    assert (ended.returncode, ours) == (0, [])


@pytest.mark.parametrize("unit", [SUPERVISOR, GATEWAY, CARDS])
def test_the_units_are_hardened(machine: Machine, unit: str) -> None:
    """systemd-analyze security calls its exposure 2.0 at most."""
    text = machine.box.do("systemd-analyze", "security", "--no-pager", unit)
    exposure = re.search(r"Overall exposure level for \S+: ([\d.]+)", text)
    assert exposure is not None, text
    print(f"\n{unit}: {exposure[1]}")
    assert float(exposure[1]) <= SECURITY_MAX, text


def _inside(machine: Machine, unit: str, script: str) -> int:
    """What the service's own process may do: in its namespaces, as its user, without root's capabilities."""
    pid = str(machine.main_pid(unit))
    entered = ("nsenter", "--target", pid, "--mount", "setpriv", "--reuid=llm-appliance", "--regid=llm-appliance", "--clear-groups")
    return machine.box.call(*entered, "sh", "-c", script).returncode


@pytest.mark.parametrize("unit", [SUPERVISOR, GATEWAY])
def test_the_sandbox_is_what_the_unit_says(machine: Machine, unit: str) -> None:
    """Writes to its state and nowhere else, sees no home, no other's /tmp, gains no privileges."""
    machine.http("/health")  # the gateway runs
    machine.box.do("touch", "/tmp/of-somebody-else", "/home/secret")
    assert _inside(machine, unit, "touch /var/lib/llm-appliance/probe && rm /var/lib/llm-appliance/probe") == 0
    assert _inside(machine, unit, "touch /run/llm-appliance/probe && rm /run/llm-appliance/probe") == 0
    for forbidden in (
        "touch /etc/llm-appliance/x",
        "touch /usr/x",
        "touch /var/x",
        "test -e /tmp/of-somebody-else",
        "test -e /home/secret",
    ):
        assert _inside(machine, unit, forbidden) != 0, forbidden
    status = machine.box.path(f"/proc/{machine.main_pid(unit)}/status").read_text()
    assert re.search(r"NoNewPrivs:\t1\n", status)
    assert re.search(r"Seccomp:\t2\n", status)
    assert re.search(r"CapBnd:\t0+\n", status)


def test_the_supervisor_hears_the_kernel_and_owns_its_cgroup(machine: Machine) -> None:
    """Without a capability: the log comes as standard input, the cgroup by Delegate=yes."""
    sensors = machine.status()["sensors"]
    assert sensors["kernel_log"]["ok"], sensors
    cgroup = machine.box.path(f"/proc/{machine.engine_pid()}/cgroup").read_text()
    assert re.search(r"/llm-appliance\.service/(engine|spare)-\d+\n", cgroup), cgroup


def test_other_programs_cannot_import_it(machine: Machine) -> None:
    """A private folder, and no torch in it."""
    assert machine.box.call("python3", "-c", "import appliance").returncode != 0
    found = machine.box.do("find", "/usr", "-path", "*/torch/__init__.py", "-o", "-path", "/usr/lib/llm-appliance/appliance/engine")
    assert found == ""


def test_only_its_group_may_ask_and_command(machine: Machine) -> None:
    """Exit code 4 and what to do for strangers; members of the group llm-appliance ask freely."""
    machine.box.do("useradd", "--create-home", "stranger")
    machine.box.do("useradd", "--create-home", "--groups", "llm-appliance", "member")
    refused = machine.box.call("runuser", "-u", "stranger", "--", "appliancectl", "status")
    assert refused.returncode == 4
    assert "join the group that owns it (llm-appliance)" in refused.stderr
    assert "serving" in machine.box.do("runuser", "-u", "member", "--", "appliancectl", "status")
    assert machine.box.call("runuser", "-u", "stranger", "--", "ls", "/var/lib/llm-appliance").returncode != 0


def test_the_pages_and_completions_are_there(machine: Machine) -> None:
    """man for each command and the configuration; bash completes verbs."""
    for page in ("appliancectl.1", "applianced.8", "appliance.toml.5", "llm-appliance.7"):
        assert machine.box.do("man", "--warnings", "--pager=cat", page.rpartition(".")[2], page.rpartition(".")[0])
    words = (
        "source /usr/share/bash-completion/completions/appliancectl; COMP_WORDS=(appliancectl dia); COMP_CWORD=1; "
        '_appliancectl_completion appliancectl; echo "${COMPREPLY[@]}"'
    )
    assert machine.box.do("bash", "-c", words).split() == ["diagnose"]
    assert machine.box.path("/usr/share/zsh/vendor-completions/_appliancectl").read_text().startswith("#compdef appliancectl")


def test_the_shipped_configuration_is_right(machine: Machine) -> None:
    """config check passes on it, and what setup wrote is in force."""
    machine.ctl("config", "check")
    assert "/etc/llm-appliance/conf.d/50-setup.toml" in machine.ctl("config", "show", "--changed")


def test_needrestart_leaves_it_alone(machine: Machine) -> None:
    """The override is Perl that needrestart can read."""
    program = (
        'our %nrconf; do "/etc/needrestart/conf.d/llm-appliance.conf" or die; my $rules = $nrconf{override_rc};'
        'print "$_=$rules->{$_}\\n" for sort keys %$rules'
    )
    assert machine.box.do("perl", "-e", program) == r"(?^:^llm-appliance(-gateway)?\.service$)=0" + "\n"


def test_setup_again_keeps_what_is_there(machine: Machine) -> None:
    """Idempotent: nothing is made anew, no edit is lost."""
    before = machine.box.do("stat", "-c", "%i %Y", "/var/lib/llm-appliance/runtimes/native-0.1.0/runtime.json")
    machine.ctl("setup", "--demo", "--yes", "--wheelhouse", "/wheelhouse")
    assert machine.box.do("stat", "-c", "%i %Y", "/var/lib/llm-appliance/runtimes/native-0.1.0/runtime.json") == before
    drop_in = machine.box.path("/etc/llm-appliance/conf.d/50-setup.toml")
    written = drop_in.read_text()
    drop_in.write_text(written + 'name = "mine"\n')
    refused = machine.box.call("appliancectl", "setup", "--model", "/var/lib/llm-appliance/models/SmolLM2-135M-Instruct", "--yes")
    assert refused.returncode == 1
    assert "was edited" in refused.stderr
    assert 'name = "mine"' in drop_in.read_text()
    drop_in.write_text(written)


def test_a_new_driver_is_noticed(machine: Machine) -> None:
    """dpkg's trigger tells; the running service is left alone."""
    library = machine.box.path("/root/driver/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1")
    library.parent.mkdir(parents=True)
    library.touch()
    control = machine.box.path("/root/driver/DEBIAN/control")
    control.parent.mkdir()
    fields = {
        "Package": "libnvidia-ml1",
        "Version": "999",
        "Architecture": "all",
        "Maintainer": "t <t@t.invalid>",
        "Description": "stand-in",
    }
    control.write_text("".join(f"{name}: {value}\n" for name, value in fields.items()))
    machine.box.do("dpkg-deb", "--build", "/root/driver", "/root/driver.deb")
    pid = machine.main_pid(SUPERVISOR)
    said = machine.box.do("dpkg", "-i", "/root/driver.deb")
    assert "driver's libraries have changed" in said
    assert machine.box.path("/run/llm-appliance-driver-changed").exists()
    assert machine.main_pid(SUPERVISOR) == pid


def test_the_port_of_the_configuration_is_the_ports(machine: Machine) -> None:
    """gateway.port in one file, daemon-reload, and systemd listens there; a wrong one leaves the default."""
    own = machine.box.path("/etc/llm-appliance/conf.d/60-own.toml")
    own.write_text("[gateway]\nport = 8123\ndrain_s = 100\n")
    machine.systemctl("daemon-reload")
    assert machine.property(GATEWAY, "TimeoutStopUSec") == "1min 55s"
    assert machine.property(SOCKET, "Listen") == "127.0.0.1:8123 (Stream)"
    own.write_text("[gateway]\nport = 812345\n")
    machine.systemctl("daemon-reload")
    assert machine.property(SOCKET, "Listen") == "127.0.0.1:8000 (Stream)"
    own.unlink()
    machine.systemctl("daemon-reload")


def test_the_power_limit_is_set_at_boot_if_wanted(machine: Machine) -> None:
    """With a stand-in for nvidia-smi: persistence mode first, then the limit of the configuration; not enabled unasked."""
    assert machine.box.call("systemctl", "is-enabled", CARDS).stdout.strip() == "disabled"
    tool = machine.box.path("/usr/local/bin/nvidia-smi")
    tool.write_text("#!/bin/sh\necho nvidia-smi heard: $*\n")
    tool.chmod(0o755)
    own = machine.box.path("/etc/llm-appliance/conf.d/60-own.toml")
    own.write_text("[gpu]\npower_limit_w = 280\n")
    folder = machine.box.path(f"/run/systemd/system/{CARDS}.d")
    folder.mkdir(parents=True)
    (folder / "test.conf").write_text("[Unit]\nConditionPathExists=\n")  # there is no driver here
    machine.systemctl("daemon-reload")
    machine.systemctl("start", CARDS)
    said = machine.box.do("journalctl", "--boot", "--output=cat", "-u", CARDS)
    assert said.index("nvidia-smi heard: -pm 1") < said.index("nvidia-smi heard: -pl 280")
    own.unlink()
    tool.unlink()


def test_a_port_that_somebody_else_has_is_said_where_it_is_asked(machine: Machine) -> None:
    """The engine serves and nobody can reach it: status names the port, who holds it, and the cure, which works."""
    machine.systemctl("stop", SOCKET, GATEWAY)
    stranger = machine.box.start("python3", "-m", "http.server", "8000", "--bind", "127.0.0.1")
    try:
        wait_until(lambda: "8000" in machine.box.do("ss", "-Hltn", "sport = :8000"), "somebody has the port")
        assert machine.box.call("systemctl", "start", SOCKET).returncode != 0
        said = machine.box.call("appliancectl", "status")
        assert said.returncode == 1
        assert re.search(r"fail port: 8000 is taken by python3 -m http.server \(pid \d+\), so llm-appliance-gateway.socket", said.stdout)
        cure = said.stdout.partition("then systemctl ")[2].split("\n")[0].split()
    finally:
        machine.box.call("pkill", "-f", "http.server 8000")
        stranger.wait(30)
    machine.systemctl(*cure)
    assert machine.box.call("appliancectl", "status").returncode == 0
    assert machine.http("/health")[0] == 200


def test_whoever_is_in_the_services_group_alone_is_told_who_reads_the_journal(machine: Machine) -> None:
    """And with the group that is named, reads it."""
    machine.box.do("useradd", "--create-home", "--groups", "llm-appliance", "ann")
    as_ann = ("setpriv", "--reuid=ann", "--regid=ann", "--init-groups", "appliancectl", "logs")
    refused = machine.box.call(*as_ann)
    assert (refused.returncode, refused.stdout) == (4, "")
    assert "systemd-journal" in refused.stderr
    machine.box.do("usermod", "-aG", "systemd-journal", "ann")
    told = machine.box.do(*as_ann)
    assert re.search(r" systemd  +\S", told)
    assert re.search(r" engine \d+ ", told)
