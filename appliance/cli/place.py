"""Which appliance a command line means: the box's own under systemd, or one that `appliancectl run` started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from appliance.core.errors import ApplianceError

if TYPE_CHECKING:  # at run time only where a configuration is read: it is a sixth of a cold `appliancectl plan`
    from appliance.config import LoadedConfig

SYSTEM_RUN_DIR = Path("/run/llm-appliance")
SYSTEM_STATE_DIR = Path("/var/lib/llm-appliance")
CONTROL_SOCKET = "control.sock"
INCIDENTS = "incidents.db"
RUN_LINK = "run"
"""Inside a state folder of `appliancectl run`: the run folder, or a link to it where its own path is too long."""


@dataclass(frozen=True, slots=True)
class Place:
    """What --config, --run-dir and --state-dir said; None where they did not."""

    config_path: Path | None = None
    run_dir: Path | None = None
    state_dir: Path | None = None

    def updated(self, **given: Path | None) -> Place:
        """With what was said later on the command line in place of what was said before."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})

    def config_file(self) -> Path | None:
        """The file that counts; None where there is none, which means the built-in defaults."""
        if self.config_path is not None:
            return self.config_path
        from appliance.config.load import DEFAULT_PATH

        return DEFAULT_PATH if _exists(DEFAULT_PATH) else None

    def load(self, assignments: Sequence[str] = ()) -> LoadedConfig:
        """The effective configuration. Raises ConfigError."""
        from appliance.config import load_config, parse_overrides

        return load_config(self.config_file(), parse_overrides(assignments))

    def means_the_box(self) -> bool:
        """Whether the box's own appliance is meant, the one that systemd runs."""
        return self.control_socket() == SYSTEM_RUN_DIR / CONTROL_SOCKET

    def control_socket(self) -> Path:
        """The one that was named, else the box's own, else that of this user's `appliancectl run`."""
        if self.run_dir is not None:
            return self.run_dir / CONTROL_SOCKET
        if self.state_dir is not None:
            return (self.state_dir / RUN_LINK).resolve() / CONTROL_SOCKET
        system = SYSTEM_RUN_DIR / CONTROL_SOCKET
        own = (own_state_dir() / RUN_LINK).resolve() / CONTROL_SOCKET
        return own if not _exists(system) and _exists(own) else system

    def incidents_db(self) -> Path:
        """Where incidents are kept, by the same order."""
        if self.state_dir is not None:
            return self.state_dir / INCIDENTS
        system, own = SYSTEM_STATE_DIR / INCIDENTS, own_state_dir() / INCIDENTS
        return own if not _exists(system) and _exists(own) else system


def serving_state_dir(place: Place) -> Path:
    """The state folder of the appliance that is meant."""
    if place.state_dir is not None:
        return place.state_dir
    return SYSTEM_STATE_DIR if place.means_the_box() else own_state_dir()


def own_state_dir() -> Path:
    """Where this user's `appliancectl run` keeps its state unless told otherwise.

    Raises:
        ApplianceError: there is no home folder to put it in.
    """
    if base := os.environ.get("XDG_STATE_HOME"):
        return Path(base) / "llm-appliance"
    try:
        return Path.home() / ".local" / "state" / "llm-appliance"
    except RuntimeError:
        raise ApplianceError("this user has no home folder", hint="name a folder with --state-dir") from None


def _exists(path: Path) -> bool:
    """Whether something is there; a path that we may not look at counts, so that the refusal is told where it is met."""
    try:
        path.stat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True
