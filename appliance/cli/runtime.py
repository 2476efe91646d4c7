"""`appliancectl runtime list | use | remove`: the environments of the built-in engine that lie side by side."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import click

from appliance.cli import owner, runtimes
from appliance.cli.place import Place
from appliance.cli.printing import bold, good, say, say_json
from appliance.cli.setup import state_dir_of
from appliance.cli.verbs import VerbGroup
from appliance.config.runtimes import RUNTIMES, current_runtime, put_in_force
from appliance.core.errors import ApplianceError, ExitCode


@click.group(cls=VerbGroup)
def runtime() -> None:
    """The engine's environments: which there are, which is in force."""


@runtime.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print data for programs.")
@click.pass_obj
def list_(place: Place, as_json: bool) -> None:
    """All of them; the one in force is marked.

    \b
    Example:
      appliancectl runtime list
    """
    state_dir = state_dir_of(place)
    current = current_runtime(state_dir)
    rows = [_facts(folder) | {"in_force": folder == current} for folder in _all(state_dir)]
    if as_json:
        say_json({"runtimes": rows})
    for row in () if as_json else rows:
        say(f"{good('*') if row['in_force'] else ' '} {bold(str(row['name']))}  torch {row['torch']}, Python {row['python']}")
    if not rows and not as_json:
        say("none: `appliancectl setup` makes one where the package is installed")


@runtime.command()
@click.argument("name")
@click.pass_obj
def use(place: Place, name: str) -> ExitCode:
    """Put one in force, for engines that start from now on.

    \b
    Example:
      appliancectl runtime use native-0.1.0 && appliancectl restart
    """
    state_dir = state_dir_of(place)
    folder = _named(state_dir, name)
    if (other := owner.other_owner(state_dir)) is not None:
        return owner.again_as(other, state_dir, ["runtime", "use", name])
    put_in_force(folder)
    say(f"{good('ok')} {name} is in force after `appliancectl restart`")
    return ExitCode.OK


@runtime.command()
@click.argument("name")
@click.pass_obj
def remove(place: Place, name: str) -> ExitCode:
    """Delete one that is not in force.

    \b
    Example:
      appliancectl runtime remove native-0.1.0
    """
    state_dir = state_dir_of(place)
    folder = _named(state_dir, name)
    if folder == current_runtime(state_dir):
        raise ApplianceError(f"{name} is in force", hint="put another in force first: appliancectl runtime use NAME")
    if (other := owner.other_owner(state_dir)) is not None:
        return owner.again_as(other, state_dir, ["runtime", "remove", name])
    shutil.rmtree(folder)
    say(f"{good('ok')} {name} is gone")
    return ExitCode.OK


def _all(state_dir: Path) -> list[Path]:
    return sorted(file.parent for file in (state_dir / RUNTIMES).resolve().glob(f"native-*/{runtimes.FACTS}"))


def _named(state_dir: Path, name: str) -> Path:
    for folder in _all(state_dir):
        if folder.name == name:
            return folder
    names = ", ".join(folder.name for folder in _all(state_dir)) or "none"
    raise ApplianceError(f"there is no runtime {name!r} in {state_dir / RUNTIMES}", hint=f"there are: {names}")


def _facts(folder: Path) -> dict[str, object]:
    facts: Mapping[str, object] = json.loads((folder / runtimes.FACTS).read_text(encoding="utf-8"))
    return {"name": folder.name, "torch": facts.get("torch"), "python": facts.get("python")}
