"""The machines of a run, and what the first of them leaves behind for the others."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path

from tests.system.box import Box
from tests.system.machine import Machine


@dataclass(frozen=True)
class Installed:
    """The layer, and how long each command took."""

    layer: Path
    seconds: dict[str, float] = field(default_factory=dict)
    answer: str = ""


class Rack:
    """Boots machines and takes them down."""

    def __init__(self, scratch: Path, base: Path, wheelhouse: Path) -> None:
        self._scratch = scratch
        self._base = base
        self._arguments = (f"--bind-ro={wheelhouse}:/wheelhouse",)
        self._numbers = itertools.count(1)
        self._up: list[Machine] = []

    def boot(self, *layers: Path) -> Machine:
        """A new one, over these layers and the base image."""
        name = f"t{os.getpid()}-{next(self._numbers)}"
        machine = Machine(Box(name, self._scratch / name, (*layers, self._base), self._arguments).up())
        self._up.append(machine)
        return machine

    def halt(self, machine: Machine) -> Path:
        """Down; its layer."""
        self._up.remove(machine)
        machine.box.down()
        return machine.box.upper

    def clear(self) -> None:
        """All of them."""
        for machine in tuple(self._up):
            self.halt(machine)
