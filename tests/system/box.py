"""A Debian machine with a real systemd as PID 1: systemd-nspawn on an overlay over a base image that is built once.

Facts of nspawn that cost time to find out: with --console=pipe a container has no /dev/console and prints nothing; on hosts
with hybrid cgroups it gets the legacy hierarchy unless told (SYSTEMD_NSPAWN_UNIFIED_HIERARCHY); without BPF rights the device
policy is silently not applied; without /dev/kmsg and CAP_SYSLOG there is no kernel log. Commands enter with nsenter, because
neither machined nor a bus of the host is needed for that.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "libpam-systemd", "procps", "iproute2", "ca-certificates", "curl", "python3", "python3-venv",
    # What the package depends on: the machine under test has no network.
    "python3-click", "python3-h11", "python3-httptools", "python3-prometheus-client", "python3-sdnotify", "python3-starlette",
    "python3-structlog", "python3-uvicorn", "python3-zstandard",
)  # fmt: skip


@dataclass(frozen=True)
class Release:
    """A distribution that the package is installed on.

    Attributes:
        suite: its name in the archive.
        extra: packages beside PACKAGES.
        sources: where it comes from; empty: the mirror of this machine.
    """

    suite: str
    extra: tuple[str, ...]
    sources: tuple[str, ...] = ()


BUILDS = ("build-essential", "debhelper", "dh-python", "python3-pip", "python3-setuptools", "python3-wheel", "git")
BOOKWORM = Release("bookworm", ("systemd-coredump", "man-db", "bash-completion"))
TRIXIE = Release("trixie", BUILDS)
NOBLE = Release("noble", (*BUILDS, "apt"), ("deb http://archive.ubuntu.com/ubuntu noble main universe",))
UBUNTU_KEYS = Path("/usr/share/keyrings/ubuntu-archive-keyring.gpg")
MASKED = ("apt-daily.timer", "apt-daily-upgrade.timer", "e2scrub_all.timer", "fstrim.timer", "e2scrub_reap.service", "man-db.timer")
CONTROL = Path(__file__).parents[2] / "packaging/debian/control"
BOOT_S = 60.0
HALT_S = 30.0
_CHROOT_WRITES = ("kernel/core_pattern", "kernel/core_pipe_limit", "fs/suid_dumpable")
"""Installing systemd-coredump in a chroot sets these of the host."""
_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "DEBIAN_FRONTEND": "noninteractive",
    "SYSTEMD_PAGER": "",
    "SYSTEMD_COLORS": "0",
}


def why_not() -> str | None:
    """Why this machine cannot boot one; None where it can try."""
    if os.geteuid() != 0:
        return "only root may start containers"
    missing = [tool for tool in ("systemd-nspawn", "mmdebstrap", "nsenter", "dpkg-buildpackage") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install systemd-container mmdebstrap procps debhelper dh-python"
    if cgroup_root() is None:
        return "no writable cgroup v2 hierarchy"
    wanted = subprocess.run(["dpkg-checkbuilddeps", str(CONTROL)], capture_output=True, text=True, check=False)
    if wanted.returncode != 0:
        return f"{wanted.stderr.strip()}: apt-get build-dep ./packaging"
    return None


def cgroup_root() -> Path | None:
    """Where the unified hierarchy is mounted, if we may make cgroups there."""
    for path in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified")):
        if (path / "cgroup.controllers").exists() and os.access(path, os.W_OK):
            return path
    return None


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60.0, pause_s: float = 0.1) -> None:
    """Poll a condition of another machine, with a deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(pause_s)


def image_path(cache: Path, release: Release) -> Path:
    """Where it is kept: another list of packages is another image."""
    key = hashlib.sha256(" ".join((*PACKAGES, *release.extra, *MASKED)).encode()).hexdigest()[:12]
    return cache / f"{release.suite}-{key}"


def base_image(cache: Path, release: Release = BOOKWORM) -> Path:
    """A system with what the package depends on, built where it is not there yet (about a minute)."""
    image = image_path(cache, release)
    if not image.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        fresh = cache / f".{image.name}.new"
        shutil.rmtree(fresh, ignore_errors=True)
        with _host_settings_kept():
            _bootstrap(fresh, release)
        (fresh / "etc/machine-id").write_text("")  # a new one at each first boot
        (fresh / "var/lib/dbus/machine-id").unlink(missing_ok=True)
        (fresh / "etc/hostname").write_text("appliance\n")
        (fresh / "var/log/journal").mkdir(exist_ok=True)
        for unit in MASKED:
            link = fresh / "etc/systemd/system" / unit
            link.unlink(missing_ok=True)
            link.symlink_to("/dev/null")
        fresh.rename(image)
    return image


def _bootstrap(folder: Path, release: Release) -> None:
    include = f"--include={','.join((*PACKAGES, *release.extra))}"
    command = ["mmdebstrap", "--mode=root", "--variant=minbase", include, "--quiet", release.suite, "-", *(release.sources or (_mirror(),))]
    folder.mkdir()
    make = subprocess.Popen(command, stdout=subprocess.PIPE)
    subprocess.run(["tar", "-x", "-C", str(folder)], stdin=make.stdout, check=True)
    assert make.wait() == 0, f"{' '.join(command)} failed"


def _mirror() -> str:
    """Of Debian, as this machine uses it."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI) $(ORIGIN) $(CODENAME)", "Created-By: Packages"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [line.split()[0] for line in lines if line.split()[1:] == ["Debian", BOOKWORM.suite]]
    assert found, f"apt knows no Debian {BOOKWORM.suite} here: add it to the sources and run apt-get update"
    return found[0]


@contextlib.contextmanager
def _host_settings_kept() -> Iterator[None]:
    kept = {name: Path("/proc/sys", name).read_text() for name in _CHROOT_WRITES}
    try:
        yield
    finally:
        for name, value in kept.items():
            Path("/proc/sys", name).write_text(value)


class Box:
    """Owns one container: its overlay, its cgroup, its processes. `down` gives everything back and keeps the upper layer."""

    def __init__(self, name: str, folder: Path, layers: Sequence[Path], arguments: Sequence[str] = ()) -> None:
        self.name = name
        self.upper = folder / "upper"
        self._folder = folder
        self._layers = tuple(layers)
        self._arguments = tuple(arguments)
        self._root = folder / "root"
        root = cgroup_root()
        assert root is not None
        self._cgroup = root / f"appliance-{name}"
        self._nspawn: subprocess.Popen[bytes] | None = None
        self.boot_s = 0.0

    def up(self) -> Box:
        """Boot, and wait until systemd is through. One that does not come up leaves nothing behind."""
        try:
            self._boot()
        except BaseException:
            self.down()
            raise
        return self

    def _boot(self) -> None:
        began_s = time.monotonic()
        for folder in (self.upper, self._folder / "work", self._root):
            folder.mkdir(parents=True)
        lower = ":".join(map(str, self._layers))
        options = f"lowerdir={lower},upperdir={self.upper},workdir={self._folder / 'work'}"
        subprocess.run(["mount", "-t", "overlay", f"appliance-{self.name}", "-o", options, str(self._root)], check=True)
        self._cgroup.mkdir(exist_ok=True)
        with (self._folder / "console.log").open("wb") as console:
            self._nspawn = subprocess.Popen(
                [
                    "systemd-nspawn", "--quiet", f"--directory={self._root}", f"--machine={self.name}", "--boot",
                    "--register=no", "--keep-unit",
                    "--private-network", "--console=read-only", "--kill-signal=SIGRTMIN+3", "--resolv-conf=off", "--timezone=off",
                    "--capability=CAP_BPF,CAP_NET_ADMIN,CAP_PERFMON,CAP_SYSLOG,CAP_IPC_LOCK",
                    "--system-call-filter=bpf", "--bind=/dev/kmsg",
                    *self._arguments,
                ],
                stdin=subprocess.DEVNULL, stdout=console, stderr=console, start_new_session=True,
                env={"PATH": os.environ["PATH"], "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"},
                preexec_fn=lambda: (self._cgroup / "cgroup.procs").write_text("0"),
            )  # fmt: skip
        wait_until(self._is_up, f"{self.name} boots:\n{self._console()}", BOOT_S)
        self.boot_s = time.monotonic() - began_s

    def down(self) -> None:
        """A clean halt, then whatever is needed."""
        if self._nspawn is not None and self._nspawn.poll() is None:
            leader = self.leader()
            self._nspawn.terminate()
            try:
                self._nspawn.wait(HALT_S)
            except subprocess.TimeoutExpired:
                if leader is not None:
                    os.kill(leader, signal.SIGKILL)
                self._nspawn.kill()
                self._nspawn.wait(HALT_S)
        if self._root.is_mount():
            subprocess.run(["umount", str(self._root)], check=True)
        for folder, _, _ in os.walk(self._cgroup, topdown=False):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()

    def call(self, *command: str, stdin: str | None = None, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run it as root in the box; whatever comes of it."""
        return subprocess.run(self._entered(command), input=stdin, stdin=None if stdin is not None else subprocess.DEVNULL,
                              capture_output=True, text=True, timeout=timeout_s, check=False)  # fmt: skip

    def do(self, *command: str, stdin: str | None = None, timeout_s: float = 120.0) -> str:
        """Run it as root in the box; its output. Fails the test where it fails."""
        ended = self.call(*command, stdin=stdin, timeout_s=timeout_s)
        assert ended.returncode == 0, f"{' '.join(command)}: code {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Run it beside the test."""
        return subprocess.Popen(self._entered(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def path(self, path: str) -> Path:
        """A path of the box as seen from here, also below its /run and /tmp."""
        return Path(f"/proc/{self.leader()}/root", path.lstrip("/"))

    def put(self, source: Path, target: str) -> None:
        """Copy a file in."""
        shutil.copy(source, self.path(target))

    def _entered(self, command: Sequence[str]) -> list[str]:
        leader = self.leader()
        assert leader is not None, f"{self.name} is not up"
        environment = [f"{name}={value}" for name, value in _ENVIRONMENT.items()]
        return ["nsenter", "-t", str(leader), "-m", "-u", "-i", "-n", "-p", "-C", "-r", "-w", "--", "env", "-i", *environment, *command]

    def leader(self) -> int | None:
        """The box's PID 1, by its number here: nspawn's only child."""
        assert self._nspawn is not None
        pid = self._nspawn.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def _is_up(self) -> bool:
        assert self._nspawn is not None
        assert self._nspawn.poll() is None, f"nspawn ended with {self._nspawn.returncode}:\n{self._console()}"
        if self.leader() is None:
            return False
        return self.call("systemctl", "is-system-running").stdout.strip() in ("running", "degraded")

    def _console(self) -> str:
        return (self._folder / "console.log").read_text(errors="replace")[-4000:]
