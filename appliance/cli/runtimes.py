"""The built-in engine's environment: made aside from what is in force, proved, then put in its place at once.

The control plane lies in a folder of its own and has no engine; the engine's wheel lies beside it, as data. An environment is
made by venv and pip from that wheel and public ones. Interrupted work leaves a hidden folder, which the next try removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from appliance.config.runtimes import RUNTIMES, put_in_force
from appliance.core.errors import ApplianceError
from appliance.core.units import GIB, format_bytes
from appliance.orphans import ends_with_us

WHEELS_DIR = Path("/usr/share/llm-appliance/wheels")
"""Where the package puts our engine's wheel."""
FACTS = "runtime.json"
MIN_FREE_BYTES = 2 * GIB
"""torch for CPUs and what it needs come to 1 GiB; with CUDA it is six, which pip itself notices when it must."""
_PYTHON_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_PROOF = "import appliance.engine.__main__, torch; print(torch.__version__)"


@dataclass(frozen=True, slots=True)
class Source:
    """What an environment is made from.

    Attributes:
        wheel: our engine.
        wheelhouse: a folder with all public wheels, for machines without a network; None: pip's own settings decide.
        python: the interpreter that it is made with.
    """

    wheel: Path
    wheelhouse: Path | None = None
    python: str = sys.executable

    @property
    def name(self) -> str:
        """Of the environment: native-VERSION."""
        return f"native-{self.wheel.name.split('-')[1]}"


def packaged_wheel(folder: Path = WHEELS_DIR) -> Path:
    """Our engine's wheel. Raises ApplianceError."""
    wheels = sorted(folder.glob("llm_appliance-*.whl"))
    if len(wheels) != 1:
        raise ApplianceError(f"expected one wheel of the engine in {folder}, found {len(wheels)}", hint="reinstall the package")
    return wheels[0]


def install(source: Source, state_dir: Path) -> Path:
    """The environment in force made from `source`; kept where it is already.

    Raises:
        ApplianceError: no space, no venv, or pip could not bring everything.
    """
    runtimes = state_dir / RUNTIMES
    try:
        runtimes.mkdir(mode=0o755, parents=True, exist_ok=True)
        with _alone(runtimes):
            return _installed(source, runtimes)
    except OSError as error:
        where = f"{error.filename or runtimes}: {error.strerror}"
        raise ApplianceError(f"the engine cannot be put into {runtimes}: {where}", hint="mend that, or name another --state-dir") from None


def _installed(source: Source, runtimes: Path) -> Path:
    runtime = runtimes / source.name
    for leftover in runtimes.glob(".*.new"):
        shutil.rmtree(leftover)
    digest = _sha256(source.wheel)
    if _facts(runtime).get("wheel_sha256") != digest:
        _check_space(runtimes)
        _replace(runtime, _make(source, runtimes / f".{source.name}.new", digest))
    put_in_force(runtime)
    return runtime


def pip_environment(wheelhouse: Path | None) -> dict[str, str]:
    """For pip of another interpreter than ours. With a wheelhouse, that alone counts, whatever pip is told elsewhere."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if wheelhouse is None:
        return environment
    environment = {name: value for name, value in environment.items() if not name.startswith("PIP_")}
    return environment | {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheelhouse)}


def _make(source: Source, folder: Path, digest: str) -> Path:
    environment = pip_environment(source.wheelhouse)
    _run([source.python, "-m", "venv", str(folder)], environment, "make a virtual environment", "apt install python3-venv")
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", "--no-warn-script-location"]
    hint = "this needs a package index (pip's settings and PIP_* variables count), or a folder of wheels: --wheelhouse"
    _run([*pip, f"llm-appliance[engine] @ {source.wheel.absolute().as_uri()}"], environment, "install the engine", hint)
    torch = _run([python, "-I", "-c", _PROOF], environment, "import the engine", "please report this", quiet=True).strip()
    # Commands of packages carry the name of this folder, which is about to change; `python -m` does not.
    for script in (folder / "bin").iterdir():
        if not script.is_symlink():
            script.unlink()
    facts = {"name": source.name, "wheel_sha256": digest, "torch": torch, "python": _PYTHON_VERSION}
    (folder / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return folder


def _run(command: Sequence[str], environment: Mapping[str, str], what: str, hint: str, *, quiet: bool = False) -> str:
    try:
        said = subprocess.PIPE if quiet else None
        ended = subprocess.run(command, env=environment, stdout=said, text=True, check=False, preexec_fn=ends_with_us())
    except OSError as error:
        raise ApplianceError(f"cannot {what}: {command[0]}: {error.strerror}", hint=hint) from None
    if ended.returncode != 0:
        raise ApplianceError(f"cannot {what}: {' '.join(command[:4])} ... ended with code {ended.returncode}", hint=hint)
    return ended.stdout or ""


def _replace(runtime: Path, made: Path) -> None:
    """The same version once more, from another build: an engine that runs from the old one is restarted by whoever asked for this."""
    old = runtime.with_name(f".{runtime.name}.old.new")
    if runtime.exists():
        runtime.rename(old)
    made.rename(runtime)
    shutil.rmtree(old, ignore_errors=True)


def _facts(runtime: Path) -> Mapping[str, str]:
    """What `_make` wrote last; empty for what is not whole, and for an interpreter that is gone after a release upgrade."""
    if not (runtime / "bin" / "python").exists():
        return {}
    try:
        facts: Mapping[str, str] = json.loads((runtime / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return facts if facts.get("python") == _PYTHON_VERSION else {}


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise ApplianceError(
            f"not enough disk space in {folder}: an engine needs {format_bytes(MIN_FREE_BYTES)}, {format_bytes(free)} are free",
            hint="free some space",
        )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ApplianceError(f"another `appliancectl setup` works in {folder}", hint="wait until it has ended") from None
        yield


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
