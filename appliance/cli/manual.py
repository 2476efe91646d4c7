"""docs/man/appliancectl.1 from the verbs' own help: `python -m appliance.cli.manual > docs/man/appliancectl.1`."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator, Sequence

import click

from appliance.cli.verbs import VERBS, appliancectl, place_options

_SHARED = {parameter.name for parameter in place_options()}
_TAIL = """\
.SH EXIT STATUS
.TP
.B 0
Fine.
.TP
.B 1
The thing asked about is bad: diagnose found a crash, config check an error, status an appliance that is parked.
.TP
.B 2
Usage.
.TP
.B 3
applianced cannot be reached.
.TP
.B 4
Not permitted.
.SH ENVIRONMENT
.TP
.B LLM_APPLIANCE_CONFIG
Configuration file, where \\-\\-config is not given.
.TP
.B NO_COLOR
Set to anything: no colours.
.SH FILES
.TP
.I /etc/llm-appliance/appliance.toml
The configuration; drop-ins in conf.d/*.toml beside it win over it.
.TP
.I /run/llm-appliance/control.sock
Where applianced listens for this program.
.TP
.I /var/lib/llm-appliance/incidents.db
What is kept of crashes.
.TP
.I ~/.local/state/llm-appliance
State of
.B appliancectl run
of a user."""


def manual() -> str:
    """The whole page."""
    return "\n".join([*_head(), *(line for name, command in _commands() for line in _verb(name, command)), _TAIL]) + "\n"


def _head() -> Iterator[str]:
    yield '.\\" Generated: python -m appliance.cli.manual'
    yield '.TH APPLIANCECTL 1 "" "llm-appliance" "LLM appliance"'
    yield from (".SH NAME", "appliancectl \\- run, ask and diagnose the LLM appliance")
    yield from (".SH SYNOPSIS", ".B appliancectl", "[\\fIOPTIONS\\fR] \\fIVERB\\fR [\\fIARGUMENTS\\fR]")
    yield ".SH DESCRIPTION"
    yield from _prose(appliancectl.help or "")
    yield from (".SH OPTIONS", "Before or after the verb:")
    yield from _options(appliancectl.params)
    yield ".SH VERBS"


def _commands() -> Iterator[tuple[str, click.Command]]:
    for verb, (module, _) in VERBS.items():
        command = getattr(importlib.import_module(f"appliance.cli.{module}"), verb)
        if isinstance(command, click.Group):
            yield from ((f"{verb} {name}", sub) for name, sub in command.commands.items())
        else:
            yield verb, command


def _verb(name: str, command: click.Command) -> Iterator[str]:
    arguments = [_metavar(parameter) for parameter in command.params if isinstance(parameter, click.Argument)]
    yield f".SS {_escaped(' '.join([name, *arguments]))}"
    yield from _prose(command.help or "")
    yield from _options([parameter for parameter in command.params if parameter.name not in _SHARED])


def _metavar(argument: click.Argument) -> str:
    name = argument.metavar or str(argument.name).upper()
    return name if argument.required else f"[{name}]"


def _options(parameters: Sequence[click.Parameter]) -> Iterator[str]:
    for parameter in parameters:
        if isinstance(parameter, click.Option):
            record = parameter.get_help_record(_context(appliancectl))
            assert record is not None
            yield from (".TP", f".B {_escaped(record[0])}", _escaped(" ".join(record[1].split())))


def _prose(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(inspect.cleandoc(text).split("\n\n")):
        first, _, rest = paragraph.partition("\n")
        if number:
            yield ".PP"
        if first == "\b":  # click's mark of a paragraph that keeps its lines: our examples
            yield from (".nf", *map(_escaped, rest.split("\n")), ".fi")
        else:
            yield _escaped(" ".join(paragraph.split()))


def _escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


def _context(command: click.Command) -> click.Context:
    return click.Context(command, info_name="appliancectl")


if __name__ == "__main__":
    sys.stdout.write(manual())
