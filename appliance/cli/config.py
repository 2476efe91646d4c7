"""`appliancectl config check | show`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from appliance.cli import setup_config
from appliance.cli.checks.machine import Finding, Level, Machine, ok, warn
from appliance.cli.findings import as_row, say_finding
from appliance.cli.place import Place, serving_state_dir
from appliance.cli.printing import bad, faint, good, say, say_json
from appliance.cli.verbs import VerbGroup
from appliance.config import Config, LoadedConfig
from appliance.config.annotate import toml_value
from appliance.config.keys import facts_of, keys_of
from appliance.config.load import BUILT_IN
from appliance.config.runtimes import with_runtime
from appliance.config.schema import tables
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
    """Read the configuration and its drop-ins, and look at what they name; print everything that is wrong.

    First every key: errors come with the file, the key and the nearest one. Then what the values name, without starting anything:
    files, programs, model, memory, state folder, port. Exit code 1 for what would end a start; a warning alone is no failure.

    \b
    Example:
      appliancectl config check
      appliancectl --config ./appliance.toml config check
    """
    file = str(place.config_file() or BUILT_IN)
    found: list[Finding] = []
    try:
        loaded = place.load(assignments)
        errors: list[str] = []
        found += [*unread_drop_ins(place), *shadows(loaded, place)]
        found += findings_of(loaded.config, place)
    except ConfigError as error:
        errors = str(error).splitlines()
    failed = bool(errors) or any(finding.level is Level.FAIL for finding in found)
    if as_json:
        say_json({"ok": not failed, "file": file, "errors": errors, "findings": [as_row(finding) for finding in found]})
        return ExitCode.BAD if failed else ExitCode.OK
    for finding in found:
        say_finding(finding)
    for line in errors:
        say(f"{bad('error')} {line}")
    if errors:
        say(f"{len(errors)} {'error' if len(errors) == 1 else 'errors'}; nothing of it is in force until that is mended")
    elif not failed:
        say(f"{good('ok')} {file}")
    return ExitCode.BAD if failed else ExitCode.OK


def shadows(loaded: LoadedConfig, place: Place) -> Iterator[Finding]:
    """Values that are not in force because a later drop-in says another: what drop-ins are for, over appliance.toml and setup's."""
    for one in loaded.shadowed:
        key_field = keys_of(tables()[one.name.partition(".")[0]])[one.name.partition(".")[2]]
        value = toml_value(one.value, facts_of(key_field))
        reason = f"{value} of {one.file} is not in force: {one.by} says another"
        if one.file == str(place.config_file()) or Path(one.file).name == setup_config.NAME:
            yield ok(one.name, reason)
        else:
            yield warn(one.name, reason, f"keep one of the two; {Path(one.by).name} wins, as its name comes later")


def unread_drop_ins(place: Place) -> Iterator[Finding]:
    """Files that somebody meant to be read, as systemd's own drop-ins end in .conf."""
    file = place.config_file()
    folder = None if file is None else file.parent / "conf.d"
    for meant in sorted(folder.glob("[!.]*.conf")) if folder is not None and folder.is_dir() else ():
        yield warn(str(meant), "is not read: its name does not end in .toml", f"mv {meant} {meant.with_suffix('.toml')}")


def findings_of(config: Config, place: Place) -> Iterator[Finding]:
    """What is not well with what it names."""
    from appliance.cli.checks import configured
    from appliance.cli.checks.box import check_engine, check_model

    state_dir = serving_state_dir(place)
    about_model = [finding for finding in check_model(config, state_dir) if finding.level is not Level.OK]
    yield from about_model
    yield from (finding for finding in check_engine(config, state_dir) if finding.level is not Level.OK)
    yield from configured.check_files(config)
    yield from configured.check_programs(config)
    yield from configured.check_engine_of_others(with_runtime(config, state_dir))
    yield from configured.check_options(with_runtime(config, state_dir))
    yield from configured.check_memory(config, Path(config.model.path) if config.model.path and not about_model else None)
    yield from configured.check_layout(Machine(), config)
    yield from configured.check_state_dir(state_dir)
    yield from configured.check_address(Machine(), config)


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
