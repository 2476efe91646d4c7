"""`appliancectl restart | drain | resume`: what a person may ask of applianced."""

from __future__ import annotations

from typing import Any

import click

from appliance.cli import asking, unit
from appliance.cli.place import Place
from appliance.cli.printing import say, say_json
from appliance.cli.verbs import Verb
from appliance.core.errors import Unreachable

reason_option = click.option("--reason", default="asked with appliancectl", show_default=True, help="Kept in the log and the status.")
replica_option = click.option(
    "--replica", type=click.IntRange(0), metavar="N", help="The engine of one card alone, with an engine on each (gpu.layout = replicas)."
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print data for programs.")


def _rung(_: click.Context, __: click.Parameter, word: str | None) -> int | None:
    """`original`, or the number of a rung. Which rungs there are, applianced knows; here only the word is judged."""
    if word is None or word.isdecimal():
        return int(word) if word is not None else None
    if word != "original":
        raise click.BadParameter(f"{word!r} is neither `original` nor the number of a rung, as `appliancectl status` shows it")
    return 0


@click.command(cls=Verb)
@click.option("--rung", metavar="N|original", callback=_rung, help="The setting to restart on; original is what is configured.")
@replica_option
@reason_option
@json_option
@click.pass_obj
def restart(place: Place, rung: int | None, replica: int | None, reason: str, as_json: bool) -> None:
    """Restart the engine; clients wait.

    Answers in progress may finish first; requests that come in meanwhile are held and answered by the next engine. After crashes
    the appliance may have chosen a safer setting: `--rung original` goes back. With an engine on each card they are restarted one after
    the other, the next when the one before answers again.

    \b
    Example:
      appliancectl restart --reason "new driver"
      appliancectl restart --rung original
    """
    words = "restarting the engine; `appliancectl status` says when it serves again"
    _ask(place, "restart", words, as_json, reason=reason, rung=rung, replica=replica)


@click.command(cls=Verb)
@replica_option
@reason_option
@json_option
@click.pass_obj
def drain(place: Place, replica: int | None, reason: str, as_json: bool) -> None:
    """Finish what runs, take nothing new, stop the engine.

    \b
    Example:
      appliancectl drain --reason "moving the box"
    """
    _ask(place, "drain", "draining; `appliancectl status` says when the engine has stopped", as_json, reason=reason, replica=replica)


@click.command(cls=Verb)
@replica_option
@json_option
@click.pass_obj
def resume(place: Place, replica: int | None, as_json: bool) -> None:
    """Try again after the appliance gave up.

    For an appliance that is parked: `appliancectl status` says why, and what to mend first. Where applianced itself died so often
    that systemd gave it up, its count is cleared and it is started.

    \b
    Example:
      appliancectl resume
    """
    try:
        _ask(place, "resume", "trying again; `appliancectl status` says how it goes", as_json, replica=replica)
    except Unreachable:
        if not (place.means_the_box() and unit.has_failed()):
            raise
        unit.start_again()
        words = "applianced had failed too often and systemd had given it up: started again"
        say_json({"ok": True, "sentence": words}) if as_json else say(words)


def _ask(place: Place, verb: str, words: str, as_json: bool, **arguments: Any) -> None:
    """Arguments that are None were not given."""
    answer = asking.ask(place, verb, **{name: value for name, value in arguments.items() if value is not None})
    if as_json:
        say_json(answer)
    else:
        say(str(answer.get("sentence") or words))
