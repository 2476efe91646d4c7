"""Asking applianced on behalf of a person: where nobody answers, why not, as far as configuration and systemd can tell."""

from __future__ import annotations

from typing import Any

from appliance.cli import unit
from appliance.cli.place import Place
from appliance.control import client
from appliance.core.errors import ConfigError, Unreachable


def ask(place: Place, verb: str, **arguments: Any) -> dict[str, Any]:
    """The answer. Raises as control.client.ask, with better words for Unreachable."""
    try:
        return client.ask(place.control_socket(), verb, **arguments)
    except Unreachable as error:
        raise explained(place, error) from None


def explained(place: Place, error: Unreachable) -> Unreachable:
    """A configuration that cannot be used is named first: no start would help before that is mended."""
    try:
        place.load()
    except ConfigError as wrong:
        first, *rest = wrong.message.splitlines()
        more = f" (and {len(rest)} more)" if rest else ""
        return Unreachable(
            f"applianced does not run, and cannot with this configuration: {first}{more}",
            hint="`appliancectl config check` names every error; mend it, then `systemctl start llm-appliance`, or `appliancectl run`",
        )
    return (unit.why_absent() if place.means_the_box() else None) or error
