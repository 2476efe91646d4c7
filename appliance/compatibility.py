"""Whether an engine fits this machine: driver and CUDA, compute capability and weights. What does not fit is named with both numbers.

Pure, but for `driver_of`, `this_host` and what appliance/config/runtimes.py reads of an environment. Imported by the command line before it
installs an engine, and by applianced before it starts one.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Capability = tuple[int, int]

LEAST_DRIVER = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""CUDA's major version → the oldest driver that runs it (NVIDIA's "minor version compatibility")."""
LEAST_CAPABILITY: dict[int, Capability] = {11: (3, 5), 12: (5, 0), 13: (7, 5)}
"""CUDA's major version → the oldest cards that its compilers and libraries still know."""
ENGINES_LEAST: dict[str, Capability] = {"sglang": (7, 5), "vllm": (7, 0)}
FLOAT8: Capability = (8, 9)
"""Cards from here on compute with 8-bit floats."""
FLOAT8_BY_MARLIN: Capability = (8, 0)
"""Cards from here on can unpack such weights to 16 bits as they compute (Marlin's kernels)."""
FLOAT4: Capability = (10, 0)

_RUNTIME = re.compile(r"nvidia-cuda-runtime(?:-cu\d+)?|cuda-toolkit")
_TORCH_BUILD = re.compile(r"\+cu(\d\d)(\d)")


@dataclass(frozen=True, slots=True)
class Card:
    """A card; capability None: it is not known."""

    name: str
    capability: Capability | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """The machine; an empty driver: there is none. glibc is empty where the C library is another one."""

    driver: str = ""
    cards: tuple[Card, ...] = ()
    glibc: str = ""
    python: str = ""


@dataclass(frozen=True, slots=True)
class Needs:
    """What an environment asks of a machine.

    Attributes:
        what: the engine and its version, for the sentence.
        engine: as in engine.backend.
        cuda: version of CUDA that it brings; empty: none.
        source: which package says so.
    """

    what: str
    engine: str
    cuda: str = ""
    source: str = ""


def needs_of(what: str, engine: str, packages: Mapping[str, str]) -> Needs:
    """Of an environment with these packages (name → version)."""
    for name, version in packages.items():
        if _RUNTIME.fullmatch(name):
            return Needs(what, engine, ".".join(version.split(".")[:2]), f"{name} {version}")
    build = _TORCH_BUILD.search(packages.get("torch", ""))
    return Needs(what, engine, f"{build[1]}.{build[2]}", f"torch {packages['torch']}") if build is not None else Needs(what, engine)


def mismatches(needs: Needs, host: Host) -> Iterator[str]:
    """Each a sentence with what to do; none: it fits, as far as can be told. A machine without a driver is not judged."""
    if not needs.cuda or not host.driver:
        return
    major = int(needs.cuda.split(".")[0])
    least = LEAST_DRIVER.get(major, "")
    brings = f"{needs.what} brings CUDA {needs.cuda} ({needs.source})"
    if least and _numbers(host.driver) < _numbers(least):
        older = f", or install a version of {needs.engine} that was built for CUDA {_newest_cuda(host.driver)}"
        yield f"{brings}, which needs driver {least} or newer; this machine has {host.driver}: upgrade the driver{older}"
    floor = max(LEAST_CAPABILITY.get(major, (0, 0)), ENGINES_LEAST.get(needs.engine, (0, 0)))
    for card in host.cards:
        if card.capability is not None and card.capability < floor:
            has = f"{card.name} has {_dotted(card.capability)} (sm_{_plain(card.capability)})"
            yield f"{brings}, which needs compute capability {_dotted(floor)} or newer; the card {has}: use llamacpp, or an older version"


@dataclass(frozen=True, slots=True)
class WeightsVerdict:
    """`sentence`: what the card makes of the weights; empty: nothing to say. `refused`: an engine would not start."""

    sentence: str = ""
    refused: bool = False


def judge_weights(model_config: Mapping[str, Any], card: Card) -> WeightsVerdict:
    """A model's config.json on a card: 8-bit and 4-bit floats need kernels that old cards have not."""
    said = model_config.get("quantization_config")
    quantisation: Mapping[str, Any] = said if isinstance(said, dict) else {}
    method = str(quantisation.get("quant_method") or "").lower()
    detail = " ".join(str(quantisation.get(key) or "") for key in ("fmt", "format", "quant_algo")).lower() if method else ""
    if not method or card.capability is None:
        return WeightsVerdict()
    has = f"the card {card.name} has compute capability {_dotted(card.capability)} (sm_{_plain(card.capability)})"
    if "fp4" in method + detail and card.capability < FLOAT4:
        return WeightsVerdict(f"the weights are 4-bit floats ({method}), which cards from {_dotted(FLOAT4)} on compute with; {has}")
    if not ("fp8" in method + detail or "float-quantized" in detail) or card.capability >= FLOAT8:
        return WeightsVerdict()
    what = f"the weights are 8-bit floats ({method}), which cards from {_dotted(FLOAT8)} on compute with; {has}"
    if card.capability >= FLOAT8_BY_MARLIN:
        return WeightsVerdict(f"{what}: they are unpacked to 16 bits at each step, which saves memory and no time")
    return WeightsVerdict(f"{what}, and none of the engines unpacks them on it: take the model in 16 bits, or as AWQ or GPTQ", refused=True)


def driver_of(proc: Path = Path("/proc")) -> str:
    """Version of the kernel module that is loaded; empty where none is."""
    try:
        text = (proc / "driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return ""
    found = re.search(r"\b(\d{3,}(?:\.\d+)*)\b", text)
    return found[1] if found is not None else ""


def this_host(driver: str, cards: Sequence[Card]) -> Host:
    """This machine, with these cards."""
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        library = ""
    return Host(driver, tuple(cards), library.removeprefix("glibc "), platform.python_version())


def capability_of(text: str) -> Capability | None:
    """ "8.6" → (8, 6)."""
    major, _, minor = text.strip().partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _newest_cuda(driver: str) -> str:
    return str(max((major for major, least in LEAST_DRIVER.items() if _numbers(driver) >= _numbers(least)), default=min(LEAST_DRIVER)))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def _plain(capability: Capability) -> str:
    return f"{capability[0]}{capability[1]}"
