"""`appliancectl doctor`."""

from __future__ import annotations

import grp
import pwd
from collections.abc import Iterator
from pathlib import Path

import click

from appliance.cli.checks.box import check_box
from appliance.cli.checks.cards import check_cards
from appliance.cli.checks.host import check_host
from appliance.cli.checks.machine import Finding, Level, Machine
from appliance.cli.findings import as_row, say_finding
from appliance.cli.place import Place, serving_state_dir
from appliance.cli.printing import say_json
from appliance.cli.verbs import Verb
from appliance.core.errors import ExitCode

SERVICE_USER = "llm-appliance"


@click.command(cls=Verb)
@click.option("--json", "as_json", is_flag=True, help="Print data for programs.")
@click.pass_obj
def doctor(place: Place, as_json: bool) -> ExitCode:
    """What about this machine will trouble an engine, and how to cure it.

    Cards, driver, memory, limits, disk, clock, configuration, model, port. Changes nothing; works without a GPU. Exit code 1
    when something fails; a warning alone is no failure.

    \b
    Example:
      appliancectl doctor
      appliancectl doctor --json | jq '.findings[] | select(.level != "ok")'
    """
    found = tuple(findings(place, Machine(user_groups=_service_groups())))
    failed = any(finding.level is Level.FAIL for finding in found)
    if as_json:
        say_json({"ok": not failed, "findings": [as_row(finding) for finding in found]})
    else:
        for finding in found:
            say_finding(finding)
    return ExitCode.BAD if failed else ExitCode.OK


def troubles_of_the_machine(state_dir: Path) -> Iterator[Finding]:
    """Cards and host, what is not well with them."""
    machine = Machine(user_groups=_service_groups())
    every = (*check_cards(machine), *check_host(machine, str(state_dir)))
    return (finding for finding in every if finding.level is not Level.OK)


def findings(place: Place, machine: Machine) -> Iterator[Finding]:
    """Everything, from the hardware up."""
    state_dir = serving_state_dir(place)
    yield from check_cards(machine)
    yield from check_host(machine, str(state_dir.absolute()))
    yield from check_box(machine, place, state_dir)


def _service_groups() -> frozenset[int]:
    """Of the service's user; empty where the package is not installed."""
    try:
        user = pwd.getpwnam(SERVICE_USER)
    except KeyError:
        return frozenset()
    return frozenset([user.pw_gid, *(group.gr_gid for group in grp.getgrall() if SERVICE_USER in group.gr_mem)])
