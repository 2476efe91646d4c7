"""The command group: a table of verbs whose modules are loaded when they are called, and the options they share."""

from __future__ import annotations

import difflib
import importlib
from pathlib import Path
from typing import Any

import click

from appliance.cli.place import Place
from appliance.cli.printing import colour

VERBS: dict[str, tuple[str, str]] = {
    "run": ("run", "Serve in the foreground, without systemd or root."),
    "setup": ("setup", "Bring what is needed to serve."),
    "status": ("status", "What is going on, in words."),
    "top": ("top", "What the page shows, in a terminal, live."),
    "logs": ("journal", "What engine, gateway and applianced said, in one order."),
    "doctor": ("doctor", "What about this machine will trouble an engine, and how to cure it."),
    "plan": ("plan", "How much context fits a card, and why."),
    "diagnose": ("diagnose", "Why it crashed: this box's last incident, or any log."),
    "explain": ("explain", "What a flag or variable of an engine really does."),
    "incidents": ("incidents", "The crashes of this box, newest first."),
    "restart": ("lifecycle", "Restart the engine; clients wait."),
    "drain": ("lifecycle", "Finish what runs, take nothing new, stop the engine."),
    "resume": ("lifecycle", "Try again after the appliance gave up."),
    "model": ("model", "The models of this box: bring one, list them, take one away."),
    "runtime": ("runtime", "The engine's environments: which there are, which is in force."),
    "bench": ("bench", "Send requests, and say how fast they are answered."),
    "stress": ("stress", "Work the built-in engine hard for a while, and judge it."),
    "import": ("importing", "The command line of an engine as a configuration."),
    "key": ("key", "Make an API key, and the entry for the file of keys."),
    "config": ("config", "Check the configuration, or show what is in force."),
}
"""Verb → module of appliance/cli, and the line that --help shows for it. A test holds the lines to the verbs' own."""


def place_options(*, config_variable: str | None = None) -> list[click.Parameter]:
    """--config, --run-dir and --state-dir: fresh ones, as a parameter belongs to one command.

    `config_variable` is read at the top level only: at a verb it would win over a --config in front of the verb.
    """
    return [
        click.Option(
            ["--config", "config_path"],
            type=click.Path(path_type=Path),
            envvar=config_variable,
            expose_value=False,
            callback=_place,
            help="Configuration file [default: /etc/llm-appliance/appliance.toml if it is there].",
        ),
        click.Option(
            ["--run-dir"],
            type=click.Path(path_type=Path, file_okay=False),
            expose_value=False,
            callback=_place,
            help="Folder of the control socket [default: /run/llm-appliance, else that of your `appliancectl run`].",
        ),
        click.Option(
            ["--state-dir"],
            type=click.Path(path_type=Path, file_okay=False),
            expose_value=False,
            callback=_place,
            help="Folder of incidents and models [default: /var/lib/llm-appliance, else ~/.local/state/llm-appliance].",
        ),
    ]


def _place(context: click.Context, parameter: click.Parameter, value: Path | None) -> None:
    before = context.find_object(Place) or Place()
    context.obj = before.updated(**{str(parameter.name): value})


class Verb(click.Command):
    """A command that takes the shared options too, so that they may stand before or after the verb."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += place_options()


class VerbGroup(click.Group):
    """A verb with verbs of its own (`config check`)."""

    command_class = Verb

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += place_options()


class LazyVerbs(click.Group):
    """The top level. `--help` reads the table; a verb's module is imported when the verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature, also below
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"appliance.cli.{VERBS[cmd_name][0]}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], VERBS, n=1)
            raise click.UsageError(f"no verb {args[0]!r}" + (f"; did you mean {near[0]}?" if near else ""), ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


def _version(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
    if value:
        from importlib.metadata import PackageNotFoundError, version

        try:
            click.echo(f"appliancectl {version('llm-appliance')}")
        except PackageNotFoundError:  # a checkout that was never installed
            click.echo("appliancectl (not installed)")
        context.exit()


@click.group(
    cls=LazyVerbs,
    params=place_options(config_variable="LLM_APPLIANCE_CONFIG"),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 fine, 1 the thing asked about is bad, 2 usage, 3 applianced cannot be reached, 4 not permitted.",
)
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Print the version and exit.")
@click.pass_context
def appliancectl(context: click.Context) -> None:
    """An OpenAI-compatible LLM endpoint that does not fall over.

    \b
    Examples:
      appliancectl setup --demo && appliancectl run
      appliancectl status
      appliancectl diagnose engine.log
    """
    context.color = colour()
    context.obj = context.find_object(Place) or Place()
