"""An engine's environment: made aside from what is in force, checked against this machine, proved, then put in its place at once.

The control plane lies in a folder of its own and has no engine. An environment is made by venv and pip. Interrupted work leaves a hidden
folder, which the next try removes, and the files that were fetched, which it uses.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.cli.pip_runs import Package, Pip, Progress, pip_environment
from appliance.cli.printing import say, warn
from appliance.cli.recipes import Recipe
from appliance.compatibility import Host, mismatches, needs_of
from appliance.config.runtimes import LLAMA_SERVER, RUNTIMES, can_run, engine_of, libraries_of, link_of, packages_of, put_in_force
from appliance.core.errors import ApplianceError
from appliance.core.units import format_bytes
from appliance.orphans import ends_with_us

FACTS = "runtime.json"
LOCK = "requirements.lock"
FETCHED = ".fetched"
_BUILD = re.compile(r"version: ([1-9]\d*)")
_SMALL_TEXT_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Means:
    """How an environment is made.

    Attributes:
        wheelhouse: a folder with all wheels, for machines without a network; None: pip's own settings decide.
        python: the interpreter that it is made with.
        lock: a file that pins everything by its hash; nothing else is installed then.
        host: what the engine has to fit; None: nothing is checked.
        switch: put it in force also where another one is.
    """

    wheelhouse: Path | None = None
    python: str = sys.executable
    lock: Path | None = None
    host: Host | None = None
    switch: bool = True


def install(recipe: Recipe, state_dir: Path, means: Means) -> Path:
    """An environment of `recipe`; kept where it is already.

    Raises:
        ApplianceError: no space, no venv, it does not fit this machine, or pip could not bring everything.
    """
    runtimes = state_dir / RUNTIMES
    try:
        runtimes.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _alone(runtimes):
            runtime = _installed(recipe, runtimes, means)
            if means.switch or not (runtimes / link_of(engine_of(runtime.name))).exists():
                put_in_force(runtime)
            return runtime
    except OSError as error:
        where = f"{error.filename or runtimes}: {error.strerror}"
        raise ApplianceError(f"the engine cannot be put into {runtimes}: {where}", hint="mend that, or name another --state-dir") from None


def facts_of(runtime: Path) -> Mapping[str, object]:
    """What was written when it was whole; empty for what is not, and for an interpreter that is gone after a release upgrade."""
    try:
        facts: Mapping[str, object] = json.loads((runtime / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if can_run(runtime) else {}


def _installed(recipe: Recipe, runtimes: Path, means: Means) -> Path:
    for leftover in runtimes.glob(".*.new"):
        shutil.rmtree(leftover)
    there = runtimes / f"{recipe.kind}-{recipe.version}"
    facts = facts_of(there) if recipe.version else {}
    if facts and facts.get("wheel_sha256", "") == recipe.stamp:
        return there
    _check_space(runtimes, recipe)
    made = runtimes / f".{recipe.kind}.new"
    try:
        runtime = runtimes / _make(recipe, made, runtimes, means)
    except (ApplianceError, OSError):
        shutil.rmtree(made, ignore_errors=True)
        raise
    _replace(runtime, made)
    shutil.rmtree(runtimes / FETCHED, ignore_errors=True)
    return runtime


def _make(recipe: Recipe, folder: Path, runtimes: Path, means: Means) -> str:
    """The name that it is to have."""
    environment = pip_environment(means.wheelhouse)
    _run([means.python, "-m", "venv", str(folder)], environment, "make a virtual environment", "apt install python3-venv")
    python = str(folder / "bin" / "python")
    progress = Progress(0)
    pip = Pip(python, environment, progress)
    wanted = ["--no-deps", "--require-hashes", "-r", str(means.lock)] if means.lock is not None else [recipe.requirement]
    resolved: tuple[Package, ...] = ()
    try:
        if means.wheelhouse is None:
            pip.renew()
        if means.wheelhouse is None or recipe.is_for_cards or means.lock is not None:
            say(f"looking up what {recipe.kind} needs")
            resolved = needed(recipe, pip.resolve(wanted, folder / "report.json"))
            _check_fit(recipe, pinned(recipe, resolved, means.lock), means.host)
            progress.close()
        pip.tell = progress = Progress(len([package for package in resolved if package.is_remote]))
        _bring(pip, resolved, runtimes / FETCHED, wanted, means.lock)
    finally:
        progress.close()
    alias(recipe, folder)
    version, torch = _prove(recipe, folder, environment)
    name = f"{recipe.kind}-{version}"
    _say_where(folder, runtimes / name)
    _write_facts(recipe, folder, name, torch, resolved)
    return name


def _bring(pip: Pip, resolved: Sequence[Package], fetched: Path, wanted: Sequence[str], lock: Path | None) -> None:
    """What comes over a network is fetched first, and kept over an interrupted call; then all of it is installed from this machine."""
    if not any(package.is_remote for package in resolved):
        pip.install(wanted)
        return
    fetched.mkdir(exist_ok=True)
    pip.fetch(resolved, fetched)
    local = [package.url for package in resolved if not package.is_remote]
    pins = [f"{package.name}=={package.version}" for package in resolved if package.is_remote]
    pip.install(["--no-index", "--no-deps", "--find-links", str(fetched), *(wanted if lock is not None else [*pins, *local])])


def needed(recipe: Recipe, resolved: Sequence[Package]) -> tuple[Package, ...]:
    """Without those that would do harm: see Recipe.leaves_out."""
    return tuple(one for one in resolved if one.name not in recipe.leaves_out or one.version.endswith("+cpu"))


def pinned(recipe: Recipe, resolved: Sequence[Package], lock: Path | None) -> Mapping[str, str]:
    """Name → version. Raises ApplianceError where the lock file is one of something else."""
    packages = {package.name: package.version for package in resolved}
    has = packages.get(recipe.distribution)
    if lock is not None and (has is None or (recipe.version and has != recipe.version)):
        what = f"pins {recipe.distribution} to {has}" if has else f"does not name {recipe.distribution}"
        raise ApplianceError(f"{lock} {what}, not {recipe.requirement}", hint=f"give the {LOCK} of an environment of {recipe.requirement}")
    return packages


def _check_fit(recipe: Recipe, packages: Mapping[str, str], host: Host | None) -> None:
    """Raises ApplianceError for what could not start here."""
    if host is None or not recipe.is_for_cards:
        return
    needs = needs_of(f"{recipe.distribution} {packages[recipe.distribution]}", recipe.engine, packages)
    found = list(mismatches(needs, host))
    if found:
        raise ApplianceError("; ".join(found), hint="--anyway installs it all the same")
    if not host.driver:
        warn(f"no NVIDIA driver is loaded here: whether {needs.what} fits its driver and cards was not checked")


def _prove(recipe: Recipe, folder: Path, environment: Mapping[str, str]) -> tuple[str, str]:
    """Versions of the engine and of torch, by running it. Raises ApplianceError."""
    if recipe.proof:
        python = str(folder / "bin" / "python")
        version, _, torch = (
            _run([python, "-I", "-c", recipe.proof], environment, "import the engine", "please report this").strip().partition(" ")
        )
        return recipe.version or version.removesuffix("+cpu"), torch
    program = _llama_server(folder)
    link = folder / "bin" / LLAMA_SERVER
    if not (link.exists() and link.samefile(program)):
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(program, link.parent))
    hint = f"a library that it needs is not on this machine (ldd {program}); --package names another build"
    said = _run([str(link), "--version"], environment, "run llama-server", hint)
    build = _BUILD.search(said)
    # A build outside of its authors' repository does not know its own number: packages have it among those of their version.
    of_package = packages_of(str(folder / "bin/python")).get(recipe.distribution, "0")
    return (build[1] if build is not None else max(re.findall(r"\d+", of_package), key=int)), ""


def alias(recipe: Recipe, folder: Path) -> None:
    """vLLM asks for its version under its own name, which a build for CPUs does not have, and knows by "cpu" in it what it is."""
    version = packages_of(str(folder / "bin" / "python")).get(recipe.distribution, "")
    if not version or recipe.distribution == recipe.kind.partition("-")[0] or recipe.engine != "vllm":
        return
    (libraries,) = libraries_of(str(folder / "bin" / "python"))
    version = version if "cpu" in version else f"{version}+cpu"
    info = libraries / f"{recipe.engine}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {recipe.engine}\nVersion: {version}\n", encoding="utf-8")


def _llama_server(folder: Path) -> Path:
    """The program itself: packages put it beside their Python, which only starts it. Raises ApplianceError."""
    for program in sorted(folder.rglob(LLAMA_SERVER)):
        with program.open("rb") as stream:
            if stream.read(4) == b"\x7fELF":
                program.chmod(program.stat().st_mode | 0o111)
                return program
    raise ApplianceError("the package brings no llama-server", hint="name one that does with --package")


def _run(command: Sequence[str], environment: Mapping[str, str], what: str, hint: str) -> str:
    try:
        ended = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, preexec_fn=ends_with_us()
        )
    except OSError as error:
        raise ApplianceError(f"cannot {what}: {command[0]}: {error.strerror}", hint=hint) from None
    if ended.returncode != 0:
        words = " ".join(ended.stdout.split())[-300:]
        raise ApplianceError(f"cannot {what}: {' '.join(command[:3])} ... ended with code {ended.returncode}: {words}", hint=hint)
    return ended.stdout


def _say_where(folder: Path, runtime: Path) -> None:
    """Its commands carry the name of the folder that they were made in, which is about to change."""
    before, after = str(folder).encode(), str(runtime).encode()
    for script in (folder / "bin").iterdir():
        if script.is_symlink() or not script.is_file() or script.stat().st_size > _SMALL_TEXT_BYTES:
            continue
        content = script.read_bytes()
        if not content.startswith(b"\x7fELF") and before in content:
            script.write_bytes(content.replace(before, after))


def _write_facts(recipe: Recipe, folder: Path, name: str, torch: str, resolved: Sequence[Package]) -> None:
    python = str(folder / "bin" / "python")
    packages = packages_of(python)
    needs = needs_of(name, recipe.engine, packages)
    (folder / "report.json").unlink(missing_ok=True)
    pins = [package.pin for package in resolved if package.sha256]
    if pins:
        (folder / LOCK).write_text("\n".join(pins) + "\n", encoding="utf-8")
    facts = {
        "name": name, "engine": recipe.engine, "version": name.removeprefix(f"{recipe.kind}-"), "torch": torch, "cuda": needs.cuda,
        "python": folder.joinpath("lib").glob("python3*").__next__().name.removeprefix("python"),
        "packages": len(packages), "size_bytes": size_of(folder), "wheel_sha256": recipe.stamp,
    }  # fmt: skip
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def size_of(folder: Path) -> int:
    """On the disk."""
    return sum(file.lstat().st_blocks * 512 for file in folder.rglob("*"))


def _replace(runtime: Path, made: Path) -> None:
    """The same version once more, from another build: an engine that runs from the old one is restarted by whoever asked for this."""
    old = runtime.with_name(f".{runtime.name}.old.new")
    if runtime.exists():
        runtime.rename(old)
    made.rename(runtime)
    shutil.rmtree(old, ignore_errors=True)


def _check_space(folder: Path, recipe: Recipe) -> None:
    free = shutil.disk_usage(folder).free
    if free < recipe.free_bytes:
        raise ApplianceError(
            f"not enough disk space in {folder}: an engine needs {format_bytes(recipe.free_bytes)}, {format_bytes(free)} are free",
            hint="free some space",
        )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait until it has ended"
            raise ApplianceError(f"another `appliancectl setup` or `runtime install` works in {folder}", hint=hint) from None
        yield


def users_of(runtime: Path, proc: Path = Path("/proc")) -> list[int]:
    """Processes that were started from it."""
    found = []
    for entry in proc.iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and (entry / "cmdline").read_bytes().startswith(f"{runtime}/".encode()):
                found.append(int(entry.name))
    return sorted(found)
