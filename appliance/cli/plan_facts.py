"""What `appliancectl plan` plans with: the model behind a name, and the card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from appliance.cli.checks.machine import barrier_of
from appliance.cli.place import SYSTEM_STATE_DIR, Place, own_state_dir
from appliance.core.errors import ModelError
from appliance.core.plan import GpuFacts, ModelFacts
from appliance.core.units import KIB, MIB, parse_bytes
from appliance.planner.gpus import card_facts, gpu_facts
from appliance.planner.inputs import PlanInputError

AUTO = "auto"
"""As a value: as if the option had not been given (a way out may take one back)."""
SMI_DEADLINE_S = 5.0
_SMI = ("nvidia-smi", "--query-gpu=name,memory.total,memory.free,uuid,pci.bus_id", "--format=csv,noheader,nounits")


def find_model_path(place: Place, named: str) -> Path | str:
    """A path, or one of a model in this box's state folder; else the name, which may be a well-known one.

    Raises:
        ModelError: this user may not look whether it is there.
    """
    bare = "/" not in named and not named.endswith((".json", ".gguf"))
    folders = [place.state_dir] if place.state_dir else [SYSTEM_STATE_DIR, own_state_dir()]
    for path in (Path(named), *(folder / "models" / named for folder in folders if bare)):
        barrier = barrier_of(path)
        if barrier is None and path.exists():
            return path
        if barrier is not None and not bare:  # a bare name may still be one that everybody knows
            raise ModelError(f"the model {path} cannot be read: this user may not look into {barrier}", hint="run this as a user who may")
    return named if bare or named.count("/") == 1 else Path(named)


def read_model(where: Path | str) -> ModelFacts:
    """The facts of a path, or of a well-known name.

    Raises:
        ModelError: neither.
    """
    if isinstance(where, Path):
        from appliance.planner.model_files import model_facts

        return model_facts(where)  # which says what is missing
    from appliance.planner.catalogue import known_model

    return known_model(where)


def find_cards(named: str, engine: str, counted: int | None = None) -> tuple[GpuFacts, int]:
    """The card, and how many of its kind there are: as counted, or as are here; 1 of one that was only named.

    Raises:
        PlanInputError: no such card, or none here.
    """
    if engine == "native" or named != AUTO:
        return find_gpu(named, engine), counted or 1
    cards = _cards_here()
    return (_with_nvlinks(cards[0]) if (counted or len(cards)) > 1 else cards[0]), counted or len(cards)


def find_gpu(named: str, engine: str) -> GpuFacts:
    """The card by its name; "auto": the first one here. For the built-in engine, the machine's memory.

    Raises:
        PlanInputError: no such card, or none here.
    """
    if engine == "native":
        return _host_memory(named)
    return _cards_here()[0] if named == AUTO else gpu_facts(named)


def _host_memory(named: str) -> GpuFacts:
    if named != AUTO:
        try:
            return GpuFacts("the machine", parse_bytes(named))
        except ValueError as error:
            raise PlanInputError(f"{named!r} is no size of memory", hint="the built-in engine uses the machine's: write 16GiB") from error
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines() if ":" in line)
    total, free = (int(rows[key].split()[0]) * KIB for key in ("MemTotal", "MemAvailable"))
    return GpuFacts("the machine", total, free)


def _cards_here() -> tuple[GpuFacts, ...]:
    """What nvidia-smi says, one at least; a hung driver is not waited for."""
    import subprocess  # 5 ms, and most plans name their card

    try:
        said = subprocess.run(_SMI, capture_output=True, text=True, timeout=SMI_DEADLINE_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        why = "nvidia-smi did not answer" if isinstance(error, subprocess.TimeoutExpired) else "no NVIDIA card answers here"
        raise PlanInputError(why, hint="name the card with --gpu, such as --gpu 24GiB or --gpu rtx3090") from error
    rows = [[field.strip() for field in line.split(",")] for line in said.splitlines()]
    cards = tuple(_card(*row) for row in rows if len(row) == 5 and row[1].isdigit())
    if not cards:
        raise PlanInputError("nvidia-smi lists no card", hint="name the card with --gpu, such as --gpu 24GiB")
    return cards


def _card(name: str, total: str, free: str, uuid: str, bus: str) -> GpuFacts:
    return card_facts(name, int(total) * MIB, int(free) * MIB if free.isdigit() else int(total) * MIB, uuid, bus)


def _with_nvlinks(card: GpuFacts) -> GpuFacts:
    """Lines like "Link 0: 14.062 GB/s", of one that is down "Link 0: <inactive>"; none of a card that has no NVLink."""
    import subprocess

    try:
        said = subprocess.run(
            ("nvidia-smi", "nvlink", "--status", "-i", card.uuid), capture_output=True, text=True, timeout=SMI_DEADLINE_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return card
    return replace(card, nvlinks=sum("Link " in line and "GB/s" in line for line in said.splitlines()))
