"""`appliancectl model add hf:ORG/NAME[@rev]`: a model from a hub, by huggingface_hub in an engine's environment (docs/adr/0081)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from appliance.cli import hub_fetch
from appliance.cli.pip_runs import pip_environment
from appliance.config.runtimes import RUNTIMES, packages_of
from appliance.core.errors import ApplianceError, ModelError
from appliance.core.units import GIB, format_bytes
from appliance.orphans import ends_with_us

CLIENT = "huggingface-hub"
KEPT_FREE_BYTES = GIB
_NAMED = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_EXCEPTION = re.compile(r"^(?:[a-z_]\w*\.)*([A-Z]\w+)(?:: |$)(.*)", re.MULTILINE)
_LOOK_S = 0.5
_NEEDS_TOKEN = ("GatedRepoError", "RepositoryNotFoundError", "DisabledRepoError")
_ABOUT_NAME = ("RevisionNotFoundError", "HFValidationError", "RemoteEntryNotFoundError")


@dataclass(frozen=True, slots=True)
class Named:
    """What `hf:ORG/NAME@rev` says; no revision: the newest of its main branch."""

    repo: str
    revision: str | None

    @property
    def name(self) -> str:
        """What the model is called where nothing else is said."""
        return self.repo.partition("/")[2]


def named(source: str) -> Named:
    """Raises ApplianceError."""
    found = _NAMED.fullmatch(source)
    if found is None:
        raise ApplianceError(f"{source!r} names no model of a hub", hint="write hf:ORG/NAME, or hf:ORG/NAME@revision")
    return Named(found[1], found[2])


def read_token(file: Path) -> str:
    """The only line of a file. Raises ApplianceError."""
    token = file.read_text(encoding="utf-8", errors="replace").strip()
    if not token or len(token.split()) != 1 or not token.isascii():
        raise ApplianceError(f"{file} holds no token: one line without spaces is expected", hint="write the hub's token into it")
    return token


def fetched(wanted: Named, folder_of: Callable[[str], Path], python: str, look_at_config: Callable[[Path], None]) -> Path:
    """The folder with all that engines read of the model, whole.

    Args:
        folder_of: a commit → where its files go. What an interrupted call left there is gone on with.
        python: an interpreter with huggingface_hub.
        look_at_config: given the folder when config.json alone is there, before hours of weights.

    Raises:
        ApplianceError: it cannot be reached, is not there, is not ours to read, or does not fit on the disk.
    """
    answer = _ask(python, {"repo": wanted.repo, "revision": wanted.revision, "folder": None, "only": []}, wanted)
    files: Mapping[str, int] = answer["files"]
    if not any(name.endswith(".safetensors") for name in files):
        hint = "of a repository of GGUF files download one, then: appliancectl model add gguf:FILE"
        raise ModelError(f"{wanted.repo} has no weights as *.safetensors", hint=hint)
    folder = folder_of(str(answer["commit"]))
    needed = sum(files.values())
    _check_space(folder, needed)
    question = {"repo": wanted.repo, "revision": answer["commit"], "folder": str(folder), "only": ["config.json"]}
    if "config.json" in files:
        _ask(python, question, wanted)
        look_at_config(folder)
    with click.progressbar(length=needed, label=f"{wanted.repo}, {format_bytes(needed)}", file=sys.stderr) as bar:
        _ask(python, {**question, "only": []}, wanted, lambda: bar.update(max(0, min(needed, _size_of(folder)) - bar.pos)))
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return folder


def python_with_client(state_dir: Path, configured: str) -> str:
    """Our own interpreter, the configured one, or that of a runtime. Raises ApplianceError."""
    if importlib.util.find_spec("huggingface_hub") is not None:
        return sys.executable
    ours = sorted((state_dir / RUNTIMES).resolve().glob("[!.]*/bin/python"))
    for python in (configured, *map(str, ours)):
        if python and CLIENT in packages_of(python):
            return python
    raise ApplianceError(
        "huggingface_hub, which knows how to fetch models, is in no environment of this box",
        hint="make one that has it: appliancectl setup, or appliancectl runtime install sglang|vllm",
    )


def _ask(python: str, question: Mapping[str, Any], wanted: Named, look: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """One run of hub_fetch.py. Raises ApplianceError."""
    environment = pip_environment(None) | {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [python, "-I", str(Path(hub_fetch.__file__))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True, preexec_fn=ends_with_us()) as child:
        given: str | None = json.dumps(question) + "\n"
        while True:
            try:
                said, complained = child.communicate(given, timeout=_LOOK_S)
                break
            except subprocess.TimeoutExpired:
                given = None
                look()
    look()
    if child.returncode:
        raise _refusal(*_raised(complained), wanted)
    answer: dict[str, Any] = json.loads(said.splitlines()[-1])
    return answer


def _raised(traceback: str) -> tuple[str, str]:
    """The class and the words of the exception that a traceback ends with."""
    found = list(_EXCEPTION.finditer(traceback))
    if not found:
        return "no traceback", traceback[-500:]
    return found[-1][1], " ".join((found[-1][2] + traceback[found[-1].end() :]).split())


def _refusal(kind: str, message: str, wanted: Named) -> ApplianceError:
    """What the hub's client raised, with what to do."""
    hub = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if kind in _NEEDS_TOKEN:
        hint = "look at the name; a private or gated model needs --token-file, and its terms accepted on its page"
        return ModelError(f"{hub} does not give {wanted.repo}: {message[:300]}", hint=hint)
    if kind in _ABOUT_NAME:
        return ModelError(
            f"{wanted.repo} has no {wanted.revision or 'such file'}: {message[:300]}", hint="name a branch, a tag or a commit"
        )
    if kind in ("ImportError", "ModuleNotFoundError"):
        return ApplianceError(f"huggingface_hub cannot be imported: {message[:300]}", hint="appliancectl setup makes its environment anew")
    hint = (
        "what was fetched is kept for the next try; on a machine without a network: elsewhere `hf download "
        f"{wanted.repo} --local-dir DIR`, bring DIR here, and `appliancectl model add DIR --copy`"
    )
    return ApplianceError(f"{hub} cannot be reached, or hung up ({kind}: {message[:300]})", hint=hint)


def _check_space(folder: Path, needed: int) -> None:
    there = _size_of(folder)
    free = shutil.disk_usage(folder.parent).free
    if free + there < needed + KEPT_FREE_BYTES:
        have = f", {format_bytes(there)} of it are here" if there else ""
        words = f"the model has {format_bytes(needed)}{have}, {format_bytes(free)} are free and {format_bytes(KEPT_FREE_BYTES)} is kept so"
        raise ApplianceError(f"not enough disk space in {folder.parent}: {words}", hint="free some space, or name another --state-dir")


def _size_of(folder: Path) -> int:
    """Of what has arrived, also in part."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size if file.is_file() else 0
        except OSError:  # renamed under our eyes
            continue
    return total
