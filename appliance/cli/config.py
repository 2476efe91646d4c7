"""`appliancectl config check | show`."""

from __future__ import annotations

import click

from appliance.cli.place import Place
from appliance.cli.printing import bad, faint, good, say, say_json
from appliance.cli.verbs import VerbGroup
from appliance.config import LoadedConfig
from appliance.config.annotate import toml_value
from appliance.config.load import BUILT_IN
from appliance.config.schema import facts_of, keys_of, tables
from appliance.core.errors import ConfigError, ExitCode

set_option = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="TABLE.KEY=VALUE",
    help="As if this stood in the last drop-in; may be repeated.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print data for programs.")


@click.group(cls=VerbGroup)
def config() -> None:
    """Check the configuration, or show what is in force."""


@config.command()
@set_option
@json_option
@click.pass_obj
def check(place: Place, assignments: tuple[str, ...], as_json: bool) -> ExitCode:
    """Read the configuration and its drop-ins; print every error with the file, the key and the nearest one.

    Exit code 1 when there is one.

    \b
    Example:
      appliancectl config check
      appliancectl --config ./appliance.toml config check
    """
    file = str(place.config_file() or BUILT_IN)
    try:
        place.load(assignments)
        errors: list[str] = []
    except ConfigError as error:
        errors = str(error).splitlines()
    if as_json:
        say_json({"ok": not errors, "file": file, "errors": errors})
    elif errors:
        for line in errors:
            say(f"{bad('error')} {line}")
        say(f"{len(errors)} {'error' if len(errors) == 1 else 'errors'}; nothing of it is in force until that is mended")
    else:
        say(f"{good('ok')} {file}")
    return ExitCode.BAD if errors else ExitCode.OK


@config.command()
@click.option("--changed", is_flag=True, help="Only what differs from the built-in defaults.")
@set_option
@json_option
@click.pass_obj
def show(place: Place, changed: bool, assignments: tuple[str, ...], as_json: bool) -> None:
    """Print the effective values and where each came from, in TOML that can be pasted into a file.

    \b
    Example:
      appliancectl config show --changed
      appliancectl config show --json | jq '."gateway.port"'
    """
    loaded = place.load(assignments)
    values = {name: value for name, value in _values(loaded).items() if not (changed and loaded.origins[name] == BUILT_IN)}
    if as_json:
        say_json({name: {"value": value, "from": loaded.origins[name]} for name, value in values.items()})
    else:
        _print_toml(loaded, values)


def _values(loaded: LoadedConfig) -> dict[str, object]:
    return {f"{table}.{key}": getattr(getattr(loaded.config, table), key) for table, kind in tables().items() for key in keys_of(kind)}


def _print_toml(loaded: LoadedConfig, values: dict[str, object]) -> None:
    for table, kind in tables().items():
        lines = {
            f"{key} = {toml_value(values[f'{table}.{key}'], facts_of(key_field))}": loaded.origins[f"{table}.{key}"]
            for key, key_field in keys_of(kind).items()
            if f"{table}.{key}" in values
        }
        if lines:
            width = max(map(len, lines))
            say(f"[{table}]")
            for line, origin in lines.items():
                say(f"{line.ljust(width)}  {faint('# ' + origin)}")
            say()
