"""`appliancectl setup`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click

from appliance.cli.models import MODELS
from appliance.cli.place import SYSTEM_STATE_DIR, Place, own_state_dir
from appliance.cli.verbs import Verb
from appliance.core.errors import ApplianceError, ExitCode


@click.command(cls=Verb)
@click.option("--demo", is_flag=True, help="Bring the demo model: SmolLM2-135M-Instruct, 135 million parameters, for the CPU.")
@click.option(
    "--models-dir", type=click.Path(path_type=Path, file_okay=False), help="Where models are kept [default: `models` in the state folder]."
)
@click.option("--python", help="Python interpreter of the engine's environment [default: engine.python, else this one].")
@click.pass_obj
def setup(place: Place, demo: bool, models_dir: Path | None, python: str | None) -> ExitCode:
    """Bring what is needed to serve.

    Can be run again: what is there and whole is kept, what was interrupted is made anew.

    \b
    Example:
      appliancectl setup --demo
      appliancectl setup --demo --models-dir /srv/models
    """
    if not demo:
        raise click.UsageError("say what to set up: --demo brings the demo model")
    folder = models_dir or _state_dir(place) / MODELS
    interpreter = python or place.load().config.engine.python or sys.executable
    try:
        ended = subprocess.run([interpreter, "-m", "appliance.engine.demo", str(folder)], check=False)
    except OSError as error:
        raise ApplianceError(
            f"cannot run {interpreter}: {error.strerror}", hint="set engine.python, or --python, to a Python 3.11"
        ) from None
    return ExitCode.OK if ended.returncode == 0 else ExitCode.BAD


def _state_dir(place: Place) -> Path:
    if place.state_dir is not None:
        return place.state_dir
    return SYSTEM_STATE_DIR if os.access(SYSTEM_STATE_DIR, os.W_OK) else own_state_dir()
